"""Files of a published head: read safely, and checked against the tables of `reader`.

Every message names the file and the key or tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from trainer.errors import UserError
from trainer.files import load_json

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = {"d2t": (torch.int64,), "t2d": (torch.bool,)}  # all others: FLOATS
IGNORED_TENSORS = re.compile(r"rotary_emb\.inv_freq$")  # saved by old versions, computed here
# files that training writes beside the weights
ASIDE = ("training_args", "optimizer", "scheduler", "rng_state")


def read_json(path: Path, kind: type[T]) -> T:
    """Read a JSON file that holds a table; UserError where it does not.

    `kind`: the TypedDict that declares its keys, which are not checked here.
    """
    try:
        content: T = load_json(path)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a table of settings, got a {type(content).__name__}")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Weight files of one kind: safetensors if there are any, else those that torch wrote.

    Raises UserError where there are none.
    """
    for patterns in (["*.safetensors"], ["pytorch_model*.bin"], ["*.pt", "*.bin"]):
        found = sorted(path for pattern in patterns for path in folder.glob(pattern))
        found = [path for path in found if not path.name.startswith(ASIDE)]
        if found:
            return found
    raise UserError(f"{folder} holds no weights (*.safetensors, *.bin or *.pt)")


def tensor_names(folder: Path) -> Iterator[str]:
    """Yield the names of all tensors in the weight files."""
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            yield from _torch_load(path)
            continue
        try:
            with safe_open(path, framework="pt") as file:
                yield from file.keys()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error})") from error


def read_tensors(folder: Path) -> Tensors:
    """Read the tensors of all weight files; UserError where one is damaged or not finite."""
    tensors: Tensors = {}
    for path in weight_files(folder):
        try:
            read = load_file(path) if path.suffix == ".safetensors" else _torch_load(path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error})") from error
        for name, tensor in read.items():
            if name in tensors:
                raise UserError(f"{path}: tensor {name!r} stands in another file too")
            # numbers of one byte have no test of their own
            if not bool((tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all()):
                raise UserError(f"{path}: tensor {name!r} holds values that are not finite")
            tensors[name] = tensor
    return tensors


def _torch_load(path: Path) -> Tensors:
    """Load tensors and nothing else: other contents of such a file could run code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged pickle raises
        raise UserError(f"{path} is damaged or holds more than tensors: not loaded") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in content.items()
    ):
        raise UserError(f"{path} must hold a table of tensors")
    return content


def renamed(
    folder: Path, tensors: Tensors, rules: Sequence[tuple[str, str]]
) -> tuple[Tensors, dict[str, str]]:
    """Rename tensors by the first rule that matches the whole name.

    `rules`: (expression, new name). Returns the tensors and, by new name, the names they had.
    """
    found: Tensors = {}
    given: dict[str, str] = {}
    for name, tensor in tensors.items():
        if IGNORED_TENSORS.search(name):
            continue
        matches = ((re.fullmatch(pattern, name), new) for pattern, new in rules)
        new = next((match.expand(new) for match, new in matches if match), name)
        if new in found:
            raise UserError(f"{folder}: tensors {given[new]!r} and {name!r} mean the same")
        found[new], given[new] = tensor, name
    return found, given


def check_tensors(
    folder: Path,
    tensors: Tensors,
    wanted: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[int, ...]],
    given: dict[str, str],
) -> None:
    """Check names, shapes and dtypes; `given`: the names of these tensors in the file.

    Raises UserError for a tensor that is missing, unknown, or of another shape or dtype.
    """
    for name, shape in wanted.items():
        if name not in tensors:
            raise UserError(
                f"{folder}: tensor {given.get(name, name)!r} of shape {list(shape)} is missing"
            )
    for name, tensor in tensors.items():
        shape, shown = wanted.get(name, optional.get(name)), given.get(name, name)
        if shape is None:
            raise UserError(f"{folder}: unknown tensor {shown!r}")
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{folder}: tensor {shown!r} must have shape {list(shape)}, "
                f"got {list(tensor.shape)}"
            )
        dtypes = DTYPES.get(name, FLOATS)
        if tensor.dtype not in dtypes:
            raise UserError(
                f"{folder}: tensor {shown!r} must be {' or '.join(map(str, dtypes))}, "
                f"got {tensor.dtype}"
            )


def check_architecture(folder: Path, names: object, known: tuple[str, ...]) -> None:
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise UserError(
            f"{folder}: key 'architectures' must name one of {', '.join(known)}, got {names}"
        )


def check_keys(
    folder: Path, config: Mapping[str, object], keys: Mapping[str, tuple[type, bool]], strict: bool
) -> None:
    """Check the keys of config.json; keys[name]: the type, and whether the key is always there.

    `strict`: all keys must be there and no others; else null stands for a default. Raises UserError
    for a key that is missing, unknown or of another type.
    """
    for key, (kind, always) in keys.items():
        if key not in config or (config[key] is None and not strict):
            if strict or always:
                raise UserError(f"{folder}: key {key!r} is missing")
            continue
        value = config[key]
        fits = isinstance(value, (int, float) if kind is float else kind)
        if isinstance(value, bool) and kind is not bool:
            fits = False
        if not fits and not (value is None and key in NULLABLE):
            raise UserError(f"{folder}: key {key!r} must be of type {kind.__name__}, got {value!r}")
        if isinstance(value, (int, float)) and not 0 <= value < math.inf:
            raise UserError(f"{folder}: key {key!r} must be >= 0, got {value}")
    unknown = sorted(config.keys() - keys.keys())
    if strict and unknown:
        raise UserError(f"{folder}: unknown key {unknown[0]!r}")


NULLABLE = ("rope_scaling",)  # in our own exports too
