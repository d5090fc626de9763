"""Published Medusa heads, in vLLM's names or in those of the original repository."""

from __future__ import annotations

import re
from pathlib import Path

from drafters.formats.files import Tensors, check_architecture, check_tensors, renamed
from drafters.formats.head import PublishedHead
from drafters.formats.keys import HeadConfig
from trainer.errors import UserError


def read_medusa(folder: Path, config: HeadConfig, tensors: Tensors, strict: bool) -> PublishedHead:
    """Medusa heads from the content of `folder`; UserError where it is not as documented.

    `strict`: see `reader.read`.
    """
    if strict:
        check_architecture(folder, config["architectures"], ("MedusaModel",))
        if config["model_type"] != "medusa" or not config["medusa_fc_bias"]:
            raise UserError(
                f"{folder}: keys 'model_type' and 'medusa_fc_bias' must be 'medusa' and true, or "
                "vLLM drops the biases"
            )
    indexed = r"(?:medusa_heads\.)?(\d+)\.(\d+)"  # head, layer; the matrix comes after the layers
    matrices = [match for name in tensors if (match := re.fullmatch(indexed + r"\.weight", name))]
    tensors, given = renamed(
        folder,
        tensors,
        [
            (indexed + r"\.linear\.(weight|bias)", r"block.\1.\2.\3"),
            (indexed + r"\.weight", r"rows.\1"),
            (r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"block.\1.\2.\3"),
            (r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight", r"rows.\1"),
            (r"(?:medusa_heads\.)?lm_head\.weight", "rows"),
        ],
    )
    num_heads, num_layers = _counts(folder, config, tensors)
    for match in matrices:
        if int(match[2]) != num_layers:
            raise UserError(f"{folder}: unknown tensor {match[0]!r} beside {num_layers} layers")

    shared = bool(config.get("original_lm_head"))
    if shared and "rows" not in tensors and "rows.0" in tensors:
        tensors["rows"], given["rows"] = tensors.pop("rows.0"), given.pop("rows.0")
    rows = tensors.get("rows" if shared else "rows.0")
    if rows is None or rows.dim() != 2:
        raise UserError(f"{folder}: tensor 'medusa_heads.0.{num_layers}.weight' is missing")
    vocab, width = config.get("vocab_size") or len(rows), config.get("hidden_size") or rows.shape[1]
    if config.get("truncated_vocab_size", vocab) not in (None, vocab):
        raise UserError(
            f"{folder}: key 'truncated_vocab_size' must be that of vocab_size, {vocab}, "
            f"got {config['truncated_vocab_size']}"
        )
    blocks = [(i, j) for i in range(num_heads) for j in range(num_layers)]
    wanted: dict[str, tuple[int, ...]] = {
        f"block.{i}.{j}.weight": (width, width) for i, j in blocks
    }
    biases: dict[str, tuple[int, ...]] = {f"block.{i}.{j}.bias": (width,) for i, j in blocks}
    for i, j in blocks:  # as they would be called
        for part in ("weight", "bias"):
            given.setdefault(f"block.{i}.{j}.{part}", f"medusa_heads.{i}.{j}.linear.{part}")
    for name in ["rows"] if shared else [f"rows.{i}" for i in range(num_heads)]:
        wanted[name] = (vocab, width)
        given.setdefault(name, f"medusa_heads.{name[5:]}.{num_layers}.weight")
    check_tensors(folder, tensors, wanted | biases if strict else wanted, biases, given)
    return PublishedHead(
        "medusa", tensors, ["final_norm"], vocab, num_heads=num_heads, num_layers=num_layers
    )


def _counts(folder: Path, config: HeadConfig, tensors: Tensors) -> tuple[int, int]:
    """The numbers of heads and of layers of each, as the tensors are numbered. UserError where
    config.json says others."""
    # the file counts: uploads of the original repository are known to say too few heads
    parts = [name.split(".") for name in tensors if name.startswith(("block.", "rows."))]
    num_heads = 1 + max((int(part[1]) for part in parts), default=-1)
    num_layers = 1 + max((int(part[2]) for part in parts if part[0] == "block"), default=-1)
    if not num_heads or num_heads * max(num_layers, 1) > len(tensors):
        raise UserError(f"{folder}: the tensors are no Medusa heads, numbered from 0")
    said = {
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "medusa_num_layers": num_layers,
    }
    for key, count in said.items():
        if config.get(key, count) != count:
            raise UserError(
                f"{folder}: key {key!r} must be {count}, as the tensors are numbered, "
                f"got {config.get(key)}"
            )
    return num_heads, num_layers
