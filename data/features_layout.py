"""The layout of a features store: which rows lie in which shard, and what a store is identified by.

Rows are the distinct (prompt, response) of the traces, longest first: a batch that is too large for
the memory shows at once. Which row lies where follows from the traces and the plan alone, so that
another number of processes may go on with a store.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import torch

from data.trace_rows import chosen, num_tokens
from data.traces import Trace
from target.model import Target
from target.outputs import LayerId
from trainer.errors import UserError, require

MANIFEST = "manifest.json"
HEADER = "draftsmith.features"  # the one entry in the metadata of a shard, as JSON
Bytes = dict[str, np.ndarray]  # tensors as uint8 [tokens or rows, bytes of one]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
SUMMARY = {"summary.log_z": torch.float32, "summary.first": torch.int32}


class _Optional(TypedDict, total=False):
    engine: str  # what has computed the states, if another than transformers
    summary: bool  # whether summaries of the logits are stored, if they are


class Identity(_Optional):
    """What a store was made with, in its manifest and in the header of each shard."""

    target: Mapping[str, object]  # its fingerprint
    layers: list[LayerId]
    after_final_norm: list[bool]  # of each layer
    hidden_size: int
    dtype: str  # a key of DTYPES
    tokens_per_shard: int
    traces: str  # hash of the keys of all rows
    rows: int
    tokens: int
    schema: int


class ShardEntry(TypedDict):
    """A shard in the manifest and in its own header."""

    file: str
    rows: int
    tokens: int
    sha256: str  # of the tensor "sha256"


class Header(TypedDict):
    """What a shard says of itself."""

    identity: Identity
    shard: ShardEntry


@dataclass(frozen=True)
class FeaturesPlan:
    """What is stored, and in how large files.

    `dtype`: fp32, bf16, or fp8: e4m3 with a float32 scale per token and layer, off by at most 2^-4
    of each number, or 2^-10 of the scale where that is more. A process holds `tokens_per_shard`
    tokens in memory and loses no more than those when it is killed. `engine`: what computes the
    states, whose last digits differ. `summary`: a `LogitsSummary` is stored with the states, of the
    logits that predict tokens of a response.
    """

    layers: tuple[LayerId, ...]
    dtype: str = "bf16"
    tokens_per_shard: int = 1 << 15
    engine: str = "hf"
    summary: bool = False

    def __post_init__(self) -> None:
        ordered = sorted(self.layers, key=lambda x: x if isinstance(x, int) else 1 << 30)
        object.__setattr__(self, "layers", tuple(ordered))
        require(bool(ordered), "data.features layers", "name at least one", ordered)
        rule = "name final_norm, whose logits are summarised"
        require("final_norm" in ordered or not self.summary, "data.features layers", rule, ordered)
        known, size = ", ".join(DTYPES), self.tokens_per_shard
        require(self.dtype in DTYPES, "data.features_dtype", f"be one of {known}", self.dtype)
        require(size >= 1, "data.features tokens_per_shard", "be >= 1", size)


def bytes_per_token(
    layers: Sequence[LayerId], hidden_size: int, dtype: str, summary: bool = False
) -> int:
    """Bytes on disk per token, scales included; a row adds 32 bytes, a shard about 2 kB."""
    states = len(layers) * (hidden_size * DTYPES[dtype].itemsize + 4 * (dtype == "fp8"))
    return states + sum(dtype.itemsize for dtype in SUMMARY.values()) * summary


def row_key(prompt: Sequence[int], response: Sequence[int]) -> bytes:
    """The key of a row, by which its states are looked up."""
    return hashlib.sha256(array("q", [len(prompt), *prompt, *response]).tobytes()).digest()


class Shard(NamedTuple):
    """A shard as it is planned, before it is written."""

    file: str
    keys: list[bytes]  # of its rows
    traces: Sequence[Trace]  # one that has it, for each
    lengths: list[int]  # tokens of each

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def layout(self, identity: Identity) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor in the file."""
        shape = (self.num_tokens, identity["hidden_size"])
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "sha256": (torch.uint8, (len(self.keys), 32))
        }
        for layer in identity["layers"]:
            tensors[f"hidden.{layer}"] = DTYPES[identity["dtype"]], shape
            if identity["dtype"] == "fp8":
                tensors[f"scale.{layer}"] = torch.float32, (self.num_tokens, 1)
        if "summary" in identity:
            tensors |= {name: (dtype, (self.num_tokens, 1)) for name, dtype in SUMMARY.items()}
        return tensors


class Row(NamedTuple):
    """Where the states of a text are stored."""

    shard: Shard
    number: int  # of the row in its shard
    tokens: slice  # of the row among those of the shard


def header_of(shard: Shard, identity: Identity, sums: np.ndarray) -> Header:
    """The header of a shard whose tensor "sha256" is `sums`."""
    entry: ShardEntry = {
        "file": shard.file,
        "rows": len(shard.keys),
        "tokens": shard.num_tokens,
        "sha256": hashlib.sha256(sums.data).hexdigest(),
    }
    return {"identity": identity, "shard": entry}


def row_sha256(tensors: Bytes) -> bytes:
    """SHA-256 of the bytes of a row, by the names of its tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].data)
    return digest.digest()


def shards_of(traces: Sequence[Trace], tokens_per_shard: int) -> list[Shard]:
    """The shards of a store: each distinct row once, longest first.

    Only a row that is too long by itself exceeds the size. Raises UserError where no trace has a
    token.
    """
    sizes: list[int] = num_tokens(traces).tolist()
    distinct = {row_key(t.prompt_ids, t.response_ids): i for i, t in enumerate(traces) if sizes[i]}
    if not distinct:
        raise UserError("data.features: no trace has a token: nothing to store; check data.prompts")
    shards: list[list[tuple[bytes, int]]] = []
    room = 0
    for key, i in sorted(distinct.items(), key=lambda row: (-sizes[row[1]], row[0])):
        if not shards or sizes[i] > room:
            shards.append([])
            room = tokens_per_shard
        shards[-1].append((key, i))
        room -= sizes[i]
    return [
        Shard(
            f"shard-{number:05d}.safetensors",
            [key for key, _ in rows],
            chosen(traces, np.array([i for _, i in rows])),
            [sizes[i] for _, i in rows],
        )
        for number, rows in enumerate(shards)
    ]


def layout_of(
    fingerprint: Mapping[str, object],
    hidden_size: int,
    traces: Sequence[Trace],
    plan: FeaturesPlan,
) -> tuple[Identity, list[Shard]]:
    """The identity of a store, which decides its content, and its shards."""
    shards = shards_of(traces, plan.tokens_per_shard)
    keys = sorted(key for shard in shards for key in shard.keys)
    identity: Identity = {
        "target": fingerprint,
        "layers": list(plan.layers),
        "after_final_norm": [layer == "final_norm" for layer in plan.layers],
        "hidden_size": hidden_size,
        "dtype": plan.dtype,
        "tokens_per_shard": plan.tokens_per_shard,
        "traces": hashlib.sha256(b"".join(keys)).hexdigest()[:32],
        "rows": len(keys),
        "tokens": sum(shard.num_tokens for shard in shards),
        "schema": 1,
    }
    if plan.engine != "hf":
        identity["engine"] = plan.engine
    if plan.summary:
        identity["summary"] = True
    return json.loads(json.dumps(identity)), shards  # so that tuples compare as they are stored


def features_folder(
    target: Target, traces: Sequence[Trace], plan: FeaturesPlan, cache_dir: str | Path
) -> Path:
    """Folder of the store of these states, the same for all runs that need them."""
    identity = layout_of(target.fingerprint, target.hidden_size, traces, plan)[0]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return Path(cache_dir) / "features" / digest
