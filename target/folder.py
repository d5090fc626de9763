"""The folder of a model or a head, which may come from anyone: what its files say is looked at
before a library builds what they ask for, and whatever a library raises about them is one line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from target.loading import is_out_of_memory, stored_dtypes, weight_files
from trainer.checks import is_file, require_files
from trainer.errors import RunFault, UserError
from trainer.files import MOST_BYTES, read_json

INDEX, CONFIG, GENERATION = "*.index.json", "config.json", "generation_config.json"
TABLE_FILES = (CONFIG, GENERATION, "tokenizer_config.json", "special_tokens_map.json",
               "added_tokens.json")  # fmt: skip
REMEDY = "correct it, or download it again"
WIDTHS = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
# of a table with as many rows or columns as the model is wide
OTHERS = ("vocab_size", "intermediate_size", "n_inner", "ffn_dim", "n_positions")
SIZES = (*WIDTHS, *LAYERS, *HEADS, *OTHERS, "num_key_value_heads", "head_dim",
         "max_position_embeddings")  # fmt: skip
TABLES = ("quantization_config", "rope_scaling", "rope_parameters")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
FACTORS = ("rope_theta", "factor")
MOST_LAYERS, MOST_IDS = 10_000, 2**31
BUILT_AT_ONCE = 100  # layers, which take a second


@contextmanager
def reading(said: str, remedy: str = "") -> Iterator[None]:
    """Inside the block a library reads files of anyone's. Whatever it raises becomes a UserError,
    which begins with `said`: each raises in its own way, and a damaged file in any. RunFault where
    the memory does not suffice."""
    try:
        yield
    except (UserError, RunFault):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise RunFault(f"{said}: the memory does not suffice") from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if "trust_remote_code" in reason:
            remedy = "set model.trust_remote_code=true if you trust the code that comes with it"
        elif not isinstance(error, OSError):  # such as one of the network
            remedy = remedy or REMEDY
        line = f"{said} ({reason[:300]})"
        raise UserError(f"{line}; {remedy}" if remedy else line) from error


def check_folder(key: str, name: str | Path, whole: bool = True) -> None:
    """UserError where `name` is a path at which nothing is, or a folder that cannot be read as a
    model's or a head's: with a pipe or a device in it, an index that names files elsewhere, or no
    table where one belongs. `key`: the setting that holds `name`; `whole`: all files that an index
    names must be there."""
    require_files(key, name)
    for path in sorted(Path(name).glob("*.json")) if os.path.isdir(name) else ():
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            raise UserError(f"must have at most {MOST_BYTES} bytes", key=f"{key}: {path}")
        if path.match(INDEX):
            _check_index(key, path, whole)
        elif path.name in TABLE_FILES:
            _table(key, path)


def check_model(key: str, folder: Path) -> None:
    """UserError where the folder of a language model describes one that there is not, or far more
    than its weights can hold: it would be built, and fill the memory, before it is compared with
    them."""
    for path in (folder / CONFIG, folder / GENERATION):
        if path.exists():
            check_config(f"{key}: {path}", _table(key, path))
    files = weight_files(str(folder), None)
    if not all(path.exists() for path in files):  # of a target without its layers
        return
    if stored_dtypes(files) and (folder / CONFIG).exists():  # else they are damaged, or old
        config, said = _table(key, folder / CONFIG), f"{key}: {folder / CONFIG}"
        bits = 1 if config.get("quantization_config") else 8
        check_sizes(said, config, files, OTHERS, bits)
        if isinstance(config.get("text_config"), dict):
            check_sizes(f"{said}: text_config", config["text_config"], files, OTHERS, bits)


def check_sizes(
    said: str, table: Mapping[str, Any], files: Sequence[Path], rows: Sequence[str], bits: int = 8
) -> None:
    """UserError where a table of a model's sizes names more layers than its weights have tensors,
    or a matrix that is larger than all of them. `rows`: keys for the rows of matrices that are as
    wide as the model; `bits`: of a number, at least."""
    given = {name: value for name, value in table.items() if type(value) is int}
    width = max((given[name] for name in WIDTHS if name in given), default=1)
    sizes = {name: given[name] for name in (*WIDTHS, *rows) if name in given}
    sizes |= {name: given[name] * given.get("head_dim", 1) for name in HEADS if name in given}
    numbers = sum(path.stat().st_size for path in files) * 8 // bits
    far = {name: f"{numbers} numbers" for name, size in sizes.items() if width * size > numbers}
    layers = {name: given[name] for name in LAYERS if given.get(name, 0) > BUILT_AT_ONCE}
    if layers:
        tensors = len(stored_dtypes(files))
        far |= {name: f"{tensors} tensors" for name, count in layers.items() if count > tensors}
    for name, most in far.items():
        raise UserError(
            f"must fit the weights, which are at most {most}", key=f"{said}: {name}",
            value=given[name], remedy=REMEDY,
        )  # fmt: skip


def _table(key: str, path: Path) -> dict[str, Any]:
    """The table in a JSON file; UserError, by `key`, where it holds anything else."""
    try:
        return read_json(path, REMEDY)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def _check_index(key: str, path: Path, whole: bool) -> None:
    """UserError unless the index of a checkpoint names files of its own folder, which are there
    where it must be `whole`."""
    parts = _table(key, path).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise UserError(
            "must be a table of tensors and their files", key=f"{key}: {path}: weight_map",
            value=parts, remedy=REMEDY,
        )  # fmt: skip
    for part in sorted(set(parts.values())):
        place = PurePosixPath(part)
        if place.is_absolute() or ".." in place.parts or "\0" in part:
            raise UserError(
                "must name files of the folder that it lies in", key=f"{key}: {path}: weight_map",
                value=part, remedy=REMEDY,
            )  # fmt: skip
        if not is_file(f"{key}: the file", path.parent / part) and whole:
            raise UserError(
                "is not there", key=f"{key}: {path}: weight_map", value=part,
                remedy="download it again, with all of its files",
            )  # fmt: skip


def check_config(said: str, config: Mapping[str, Any]) -> None:
    """UserError where a table of config.json, or one inside it such as that of its text model, has
    a size that no model has, NaN, or something else where a table belongs. `said`: what the
    messages begin with."""

    def refuse(name: str, rule: str) -> None:
        raise UserError(f"must {rule}", key=f"{said}: {name}", value=config[name], remedy=REMEDY)

    for name, value in config.items():
        if value is None:
            continue
        if isinstance(value, dict) and (name.endswith("_config") or name in TABLES):
            check_config(f"{said}: {name}", value)
        elif _holds_nan(value):
            refuse(name, "be a number, not NaN")
        if name in SIZES and not isinstance(value, list):  # one for each layer
            most = MOST_LAYERS if name in LAYERS else math.inf
            if type(value) is not int or value < 1:
                refuse(name, "be a whole number >= 1")
            elif value > most:
                refuse(name, f"be at most {most}")
        if name in TABLES and not isinstance(value, dict):
            refuse(name, "be a table")
        if name in EPSILONS and isinstance(value, int | float) and not 0 <= value < math.inf:
            refuse(name, "be a number >= 0")
        if name in FACTORS and isinstance(value, int | float) and not 0 < value < math.inf:
            refuse(name, "be a number > 0")
        if name == "eos_token_id":
            ids = value if isinstance(value, list) else [value]
            if not all(type(one) is int and 0 <= one < MOST_IDS for one in ids):
                refuse(name, "be a token's number, or a list of such")


def _holds_nan(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nan, value.values()))
    if isinstance(value, list):
        return any(map(_holds_nan, value))
    return isinstance(value, float) and math.isnan(value)
