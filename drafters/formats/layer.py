"""The decoder layer of a published head: its configuration, in whichever spelling it was saved.

transformers, trainers and engines spell the rotary embedding in several ways: `rope_theta` and
`rope_scaling` at the top level until transformers 4, `rope_parameters` from 5 on, one table for
all layers or one for each type of layer, the type as `type` or `rope_type`. A file may hold
several of them. Values that agree are read; values that differ are refused, since every reader
would take another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig

from drafters.formats.files import check_keys
from drafters.formats.keys import EAGLE3, LAYER_KEYS, UNUSED, WITHOUT
from trainer.errors import UserError

# by type: the parameters that it must have, and those that it may have
ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
}
LISTS = ("short_factor", "long_factor")
# of these parameters and all others, what their values are
KINDS = (
    dict.fromkeys(LISTS, "a list of numbers > 0")
    | dict.fromkeys(("beta_slow", "mscale", "mscale_all_dim"), "a number >= 0")
    | {"truncate": "true or false"}
)
FITS: dict[str, Callable[[Any], bool]] = {
    "a number > 0": lambda value: type(value) in (int, float) and value > 0,
    "a number >= 0": lambda value: type(value) in (int, float) and value >= 0,
    "a list of numbers > 0": lambda value: (
        isinstance(value, list) and all(FITS["a number > 0"](one) for one in value)
    ),
    "true or false": lambda value: isinstance(value, bool),
}
# mrope gives the three positions of a text token one value, and is then the default
SAME = {"mrope": "default", "su": "longrope"}
OF_MROPE = ("mrope_section", "mrope_interleaved")
READ_HERE = f"convert the head to one of {', '.join(ROPE_TYPES)}, or name another head"


def layer_config(folder: Path, config: Mapping[str, Any], strict: bool) -> LlamaConfig:
    """The configuration of the layer, as transformers and the engines read it.

    Raises UserError for a layer that is no Llama's, has a window, or is described twice and
    differently. `strict`: see `reader.read`.
    """
    kind = config.get("model_type") or "llama"
    if kind != "llama":
        if not {*(config.get("architectures") or [])} & {*EAGLE3}:
            raise UserError(f"{folder}: key 'model_type' must be 'llama', got {kind!r}")
        print(f"{folder}: model_type is {kind!r}, read as the Llama layer that architectures names")
    refuse_variants(folder, config)
    if strict and config["tie_word_embeddings"]:
        raise UserError(f"{folder}: key 'tie_word_embeddings' must be false here, got true")
    check_keys(folder, config, UNUSED, strict=False)
    _refuse_window(folder, config)
    layer = {key: config[key] for key in LAYER_KEYS if config.get(key) is not None}
    for key in ("model_type", "torch_dtype", "rope_theta", "rope_scaling"):
        layer.pop(key, None)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if not heads or width % heads:
        raise UserError(
            f"must divide hidden_size, {width}",
            key=f"{folder}: num_attention_heads",
            value=heads,
            remedy="transformers makes no Llama layer of them: correct config.json",
        )
    layer["rope_parameters"] = rope = rope_parameters(folder, config)
    scaling = {"rope_theta": rope["rope_theta"], **(config.get("rope_scaling") or {})}
    if strict and {"rope_type": "default"} | scaling != rope:  # what SGLang reads
        raise UserError(
            "must be that of rope_parameters",
            key=f"{folder}: rope_scaling",
            value=config["rope_scaling"],
        )
    try:
        made = LlamaConfig(**layer)
    except (ValueError, TypeError, KeyError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder}: config.json describes no Llama layer ({reason})") from error
    for name in LISTS:
        wanted = (made.head_dim or 0) // 2
        if name in rope and len(rope[name]) != wanted:
            raise UserError(
                f"must hold {wanted} numbers, half of head_dim",
                key=f"{folder}: {name}",
                value=f"{len(rope[name])} numbers",
                remedy="correct config.json",
            )
    return made


def refuse_variants(folder: Path, config: Mapping[str, object]) -> None:
    """Raise UserError for a variant of the layer or head that this project does not have."""
    for key, value in WITHOUT.items():
        given = config.get(key)
        if given is not None and given != value:
            raise UserError(f"{folder}: key {key!r} must be {value!r} here, got {given!r}")


def _refuse_window(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError where the layer sees a window of the text only.

    A file may name a window and say that it is not used: by `use_sliding_window`, or by
    `layer_types`, which decides where both are given.
    """
    types, window = config.get("layer_types"), config.get("sliding_window")
    if types:
        if any(one != "full_attention" for one in types):
            raise UserError(
                "must hold full_attention alone",
                key=f"{folder}: layer_types",
                value=types,
                remedy="heads here see the whole text: name another head",
            )
    elif window is not None and config.get("use_sliding_window") is not False:
        raise UserError(
            "must be null, or use_sliding_window false",
            key=f"{folder}: sliding_window",
            value=window,
            remedy="heads here see the whole text: name another head",
        )


def rope_parameters(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding of the layer, `rope_parameters` of a LlamaConfig.

    `rope_theta` is 10,000 where no key gives it, as in every reader. Raises UserError for values
    that contradict each other, an unknown type, and parameters that the type lacks or does not
    know.
    """
    found: dict[str, tuple[str, Any]] = {}  # parameter -> the key that gave it, and its value

    def add(name: str, key: str, value: object) -> None:
        if value is None:
            return
        first, before = found.setdefault(name, (key, value))
        if before != value:
            raise UserError(
                f"must be that of {first}, {before}",
                key=f"{folder}: {key}",
                value=value,
                remedy="leave one of them in config.json, the one that the head was trained with",
            )

    add("rope_theta", "rope_theta", config.get("rope_theta"))
    add("partial_rotary_factor", "partial_rotary_factor", config.get("partial_rotary_factor"))
    for key in ("rope_parameters", "rope_scaling"):
        for name, value in _of_the_layer(folder, config, key).items():
            if name in ("type", "rope_type"):
                add("rope_type", f"{key}.{name}", SAME.get(str(value), value))
            else:
                add(name, f"{key}.{name}", value)
    kind_key, kind = found.pop("rope_type", ("rope_type", "default"))
    if str(kind) not in ROPE_TYPES:
        raise UserError(
            f"must be one of {', '.join(ROPE_TYPES)}",
            key=f"{folder}: {kind_key}",
            value=kind,
            remedy=READ_HERE,
        )
    required, optional = ROPE_TYPES[kind]
    length = "original_max_position_embeddings"
    if length in (*required, *optional):
        add(length, length, config.get(length))
    for name in required:
        if name not in found:
            raise UserError(
                f"rope_type {kind} needs it",
                key=f"{folder}: {name}",
                remedy="add it to rope_scaling in config.json",
            )
    if spread := [name for name in OF_MROPE if found.pop(name, None)]:
        print(
            f"{folder}: {' and '.join(spread)} are of images; text has the default rotary embedding"
        )
    part_key, part = found.pop("partial_rotary_factor", ("", 1.0))
    if part != 1.0:
        raise UserError(
            "must be 1: heads here rotate all of each key",
            key=f"{folder}: {part_key}",
            value=part,
            remedy="name another head",
        )
    _check_parameters(folder, kind, found)
    values = {name: value for name, (_, value) in found.items()}
    return {"rope_theta": 10000.0, "rope_type": kind} | values


def _check_parameters(folder: Path, kind: str, found: Mapping[str, tuple[str, Any]]) -> None:
    """Raise UserError for a parameter that the type `kind` does not know, and for a value that it
    cannot have."""
    required, optional = ROPE_TYPES[kind]
    for name, (key, value) in found.items():
        if name not in ("rope_theta", *required, *optional):
            raise UserError(
                f"is no parameter of rope_type {kind}",
                key=f"{folder}: {key}",
                value=value,
                remedy=READ_HERE,
            )
        wanted = KINDS.get(name, "a number > 0")
        if not FITS[wanted](value):
            raise UserError(
                f"must be {wanted}",
                key=f"{folder}: {key}",
                value=value,
                remedy="correct config.json",
            )


def _of_the_layer(folder: Path, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table `key`; where it holds one for each type of layer, that of the head's layer."""
    given = config.get(key) or {}
    if not any(isinstance(one, dict) for one in given.values()):
        return given
    kind = (config.get("layer_types") or ["full_attention"])[0]
    if not isinstance(given.get(kind), dict):
        raise UserError(
            f"must hold {kind}, the type of the head's layer",
            key=f"{folder}: {key}",
            value=[*given],
            remedy="correct config.json",
        )
    return given[kind]
