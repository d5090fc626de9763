"""The store of target hidden states ("features") of traces: safetensors shards, memory-mapped.

    manifest.json              what the store was made with, and all shards once it is complete
    shard-00000.safetensors    per layer "hidden.<layer>" [tokens, H], with fp8 "scale.<layer>"
                               [tokens, 1]; "sha256" [rows, 32] of the bytes of each row

`data/features_layout.py` says which row lies where. A shard counts from the moment it gets its
name, with its bytes on the disk. Opening reads headers, sizes and "sha256"; the states of a row are
checked when they are first read: a store of terabytes opens at once, and a process reads no more of
it than its batches need.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from data.batches import Batch, by_length, collate
from data.budget import in_bytes
from data.features_layout import (
    DTYPES,
    FeaturesPlan,
    Identity,
    Shard,
    ShardEntry,
    bytes_per_token,
    layout_of,
    row_key,
)
from data.served_states import ServedStates
from data.traces import REMEDY, Trace, differences
from target.model import LayerId, Target, TargetOutputs, check_layers
from trainer.config import RunFault, UserError
from trainer.device import sent
from trainer.files import damaged, read_json, sync, write_json
from trainer.lock import lock
from trainer.progress import TokenProgress

MANIFEST = "manifest.json"
_Tensors = dict[str, torch.Tensor]
_Bytes = dict[str, np.ndarray]  # the same as uint8 [tokens or rows, bytes of one]
_HEADER = "draftsmith.features"  # the one entry in the metadata of a shard, as JSON


class _Header(TypedDict):
    identity: Identity
    shard: ShardEntry


class FeaturesStore:
    """Answers like `Target.outputs(..., layers=layers, logits=False)` where the rows are stored.
    `layers`: those to answer with, all that are stored by default."""

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        shards: list[Shard],
        layers: Sequence[LayerId] | None = None,
    ):
        self.folder, self.identity = folder, identity
        self.layers: tuple[LayerId, ...] = tuple(identity["layers"] if layers is None else layers)
        self.num_rows, self.num_tokens = int(identity["rows"]), int(identity["tokens"])
        self._dtype: torch.dtype = getattr(torch, str(identity["target"]["dtype"]))
        self.entries: list[ShardEntry] = []
        self._places: dict[bytes, tuple[_Bytes, int, slice]] = {}  # shard, row in it, its tokens
        self._unchecked: dict[bytes, str] = {}  # rows that have not been read, file of each
        for shard in shards:
            read = _read_shard(folder, shard, identity)
            if read is None:
                what = f"{folder / shard.file} is missing"
                raise UserError(f"data.features: {what}; start the command that made it again")
            self.entries.append(read[0])
            first = 0
            for i, (key, length) in enumerate(zip(shard.keys, shard.lengths, strict=True)):
                end = first + length
                self._places[key] = (read[1], i, slice(first, end))
                self._unchecked[key] = shard.file
                first = end

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        target_fingerprint: Mapping[str, object],
        layers: Sequence[LayerId],
        traces: Sequence[Trace],
    ) -> FeaturesStore:
        """Open a complete store of exactly these layers and traces; UserError for any other."""
        path = Path(folder) / MANIFEST
        if not path.exists():
            raise UserError(f"data.features: no store in {folder}: {path} is missing")
        manifest = read_json(path, REMEDY)
        stored = manifest["identity"]
        plan = FeaturesPlan(
            tuple(layers), stored["dtype"], stored["tokens_per_shard"], stored.get("engine", "hf")
        )
        wanted, shards = layout_of(target_fingerprint, stored["hidden_size"], traces, plan)
        _require_same(path.parent, stored, wanted)
        if not manifest["complete"]:
            what = f"the store {folder} is not complete"
            raise UserError(f"data.features: {what}; start the command that makes it again")
        store = cls(path.parent, stored, shards)
        if store.entries != manifest["shards"]:
            raise damaged(path, "it does not list the shards that are there", REMEDY)
        return store

    @classmethod
    def with_further_layers(
        cls, target: Target, traces: Sequence[Trace], plan: FeaturesPlan, cache_dir: str | Path
    ) -> FeaturesStore | None:
        """Open a complete store in `cache_dir` that holds the states of `plan` beside those of
        further layers, which another recipe needed. None where there is none."""
        wanted, shards = layout_of(target.fingerprint, target.hidden_size, traces, plan)
        for path in sorted(Path(cache_dir).glob(f"features/*/{MANIFEST}")):
            try:
                manifest = read_json(path, REMEDY)
            except UserError:  # it is named when its own run reads it
                continue
            stored: Identity = manifest["identity"]
            same = {"layers": wanted["layers"], "after_final_norm": wanted["after_final_norm"]}
            enough = manifest["complete"] and {*wanted["layers"]} < {*stored["layers"]}
            if enough and {**stored, **same} == wanted:
                return cls(path.parent, stored, shards, plan.layers)
        return None

    def outputs(self, batch: Batch, device: torch.device | str = "cpu") -> TargetOutputs | None:
        """Stored states of a batch: hidden[layer] [B, L, H] in the target's dtype, on `device`.

        States are zero where there is no text. None if a text (prompt and response together) is not
        stored. Raises UserError where stored states are damaged.
        """
        keys = [row_key(p, r) for p, r in zip(batch.prompts, batch.responses, strict=True)]
        if not all(key in self._places for key in keys):
            return None
        rows = [self._row(key) for key in keys]
        shape, places = tuple(batch.input_ids.shape), batch.starts()
        hidden: dict[LayerId, torch.Tensor] = {}
        for layer in self.layers:
            found = _placed([row[f"hidden.{layer}"] for row in rows], places, shape)
            states = sent(found, device)
            if self.identity["dtype"] == "fp8":
                found = _placed([row[f"scale.{layer}"] for row in rows], places, shape)
                scale = sent(found, device)
                # e4m3 in the bits of float16: 2^8 too small, but far faster than a cast on a CPU
                bits = states.view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(~0x4000)
                states = bits.view(torch.float16).float().mul_(scale.view(torch.float32) * 256)
            else:
                states = states.view(DTYPES[self.identity["dtype"]])
            hidden[layer] = states.to(self._dtype)
        return TargetOutputs(hidden)

    def _row(self, key: bytes) -> _Bytes:
        """Views of the mapped file, whose bytes are checked the first time."""
        shard, i, tokens = self._places[key]
        row = {name: shard[name][tokens] for name in shard if name != "sha256"}
        if key in self._unchecked:
            if _sha256(row) != shard["sha256"][i].tobytes():
                path = self.folder / self._unchecked[key]
                what = f"the states of its row {i} are not those that were written"
                raise damaged(path, what, REMEDY)
            del self._unchecked[key]
        return row


def write_features(
    target: Target,
    traces: Sequence[Trace],
    plan: FeaturesPlan,
    folder: str | Path,
    *,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    barrier: Callable[[], None] = lambda: None,
    label: str = "features",
    served: Callable[[], AbstractContextManager[ServedStates]] | None = None,
) -> FeaturesStore:
    """Fill the store `folder`, if it is not complete, and open it.

    Rank r writes the shards r, r + world, ... `served`: reaches the engine that computes the states
    in the target's place; all ranks ask it. Raises UserError where the store is another's or the
    disk too small, RunFault where a state is not finite or the disk cannot be written.
    """
    folder = Path(folder)
    check_layers(plan.layers, target.num_layers)
    identity, shards = layout_of(target.fingerprint, target.hidden_size, traces, plan)
    path = folder / MANIFEST
    fresh = {"identity": identity, "complete": False, "shards": []}
    manifest = read_json(path, REMEDY) if path.exists() else fresh
    _require_same(folder, manifest.get("identity"), identity)
    remaining = [shard for shard in shards if _read_shard(folder, shard, identity) is None]
    if remaining or not manifest["complete"]:
        _check_budget(folder, identity, remaining, label if rank == 0 else None)
        scratch = folder / ".writing"  # for half-written shards of all ranks
        said = f"data.features: the store {folder} is being written by another command; wait or use"
        with contextlib.ExitStack() as held:
            if rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock(folder / ".lock", f"{said} another data.cache_dir"))
                write_json(path, fresh)
                shutil.rmtree(scratch, ignore_errors=True)  # what a dead command left
                scratch.mkdir(exist_ok=True)  # by one alone: another would find it there, then gone
            barrier()  # until here no rank writes: all have seen the same
            own = [shard for shard in shards[rank::world] if shard in remaining]
            source = None if served is None else held.enter_context(served())
            progress = TokenProgress(label, enabled=rank == 0)
            progress.part("", total=sum(shard.num_tokens for shard in own))
            for shard in own:
                tensors = _compute(target, shard, identity, batch_size, progress, source)
                _publish(tensors, shard, identity, scratch)
            progress.close()
            barrier()
            if rank == 0:
                entries = FeaturesStore(folder, identity, shards).entries
                write_json(path, {"identity": identity, "complete": True, "shards": entries})
                shutil.rmtree(scratch, ignore_errors=True)
        barrier()
    return FeaturesStore(folder, identity, shards)


def _check_budget(
    folder: Path, identity: Identity, remaining: list[Shard], label: str | None
) -> None:
    """Print the bytes to write, if there is a label; UserError if they exceed the free space."""
    each = bytes_per_token(identity["layers"], identity["hidden_size"], identity["dtype"])
    needed = sum(shard.num_tokens for shard in remaining) * each
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    if label:
        rows, tokens = identity["rows"], identity["tokens"]
        size = f"{rows} rows, {tokens} tokens of {each} bytes, {in_bytes(tokens * each)}"
        print(f"{label}: {size} in {folder}; to write {in_bytes(needed)}, free {in_bytes(free)}")
    if needed > free:
        raise UserError(
            f"data.features need {in_bytes(needed)} in {folder}, only {in_bytes(free)} are free: "
            "lower data.num_prompts, set data.features=live or use a larger disk (data.cache_dir)"
        )


def _compute(
    target: Target,
    shard: Shard,
    identity: Identity,
    batch_size: int,
    progress: TokenProgress,
    source: ServedStates | None,
) -> _Tensors:
    """Compute the tensors of one shard. No batch crosses shards, so a kill changes no number."""
    layout = shard.layout(identity).items()
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in layout}
    ends = list(accumulate(shard.lengths))
    for rows in by_length(range(len(ends)), lambda i: shard.lengths[i], batch_size):
        group = [shard.traces[i] for i in rows]
        prompts, responses = [t.prompt_ids for t in group], [t.response_ids for t in group]
        batch = collate(prompts, responses, [t.source for t in group])
        if source is None:
            ids = batch.input_ids.to(target.device)
            hidden = target.outputs(ids, layers=identity["layers"], logits=False).hidden
        else:
            hidden = source.outputs(batch).hidden
        finite = {layer: states.isfinite().all(-1).cpu() for layer, states in hidden.items()}
        stored: _Tensors = {}
        for layer, states in hidden.items():
            if identity["dtype"] == "fp8":
                # 448 is the largest number of e4m3; nothing is divided by zero
                scale = (states.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-37)
                states = states.float() / scale
                stored[f"scale.{layer}"] = scale.cpu()
            stored[f"hidden.{layer}"] = states.to(DTYPES[identity["dtype"]]).cpu()
        for j, (i, trace) in enumerate(zip(rows, group, strict=True)):
            num_tokens = trace.num_tokens
            bad = [layer for layer in hidden if not bool(finite[layer][j, :num_tokens].all())]
            if bad:
                name = f"trace {trace.index} ({trace.conversation_id!r}, turn {trace.turn})"
                what = f"the target's output of layers {bad} is not finite in {name}"
                raise RunFault(f"{progress.name}: {what}; check the target or model.dtype")
            own = {name: values[j, :num_tokens] for name, values in stored.items()}
            for name, values in own.items():
                tensors[name][ends[i] - num_tokens : ends[i]] = values
            sum_of_row = _sha256({name: own[name].view(torch.uint8).numpy() for name in own})
            tensors["sha256"][i] = torch.tensor(list(sum_of_row), dtype=torch.uint8)
            progress.advance(num_tokens)
    return tensors


def _placed(
    texts: list[np.ndarray], places: list[tuple[int, int]], shape: tuple[int, ...]
) -> torch.Tensor:
    """uint8 [*shape, bytes of a token], zero where there is no text."""
    out = np.zeros((*shape, texts[0].shape[1]), np.uint8)
    for text, (row, first) in zip(texts, places, strict=True):
        out[row, first : first + len(text)] = text
    return torch.from_numpy(out)


def _sha256(tensors: _Bytes) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].data)
    return digest.digest()


def _header(shard: Shard, identity: Identity, sums: torch.Tensor) -> _Header:
    entry: ShardEntry = {
        "file": shard.file,
        "rows": len(shard.keys),
        "tokens": shard.num_tokens,
        "sha256": hashlib.sha256(sums.numpy().data).hexdigest(),
    }
    return {"identity": identity, "shard": entry}


def _publish(tensors: _Tensors, shard: Shard, identity: Identity, scratch: Path) -> None:
    """Write the whole shard or nothing; its bytes are on the disk when this returns."""
    path, temporary = scratch.parent / shard.file, scratch / shard.file
    header = json.dumps(_header(shard, identity, tensors["sha256"]))
    try:
        save_file(tensors, temporary, metadata={_HEADER: header})
        shutil.copymode(scratch.parent / MANIFEST, temporary)  # `save_file`: for its owner only
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        what = f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        raise RunFault(f"{what}; remove the cause and start the same command again") from error


def _read_shard(folder: Path, shard: Shard, identity: Identity) -> tuple[ShardEntry, _Bytes] | None:
    """Entry and mapped tensors of a shard; None where it is missing.

    Only "sha256" is read. `safe_open` refuses a file whose length is not what its header says.
    """
    path = folder / shard.file
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise damaged(path, f"not readable: {str(error).splitlines()[0]}", REMEDY) from error
    if header.get("identity") != identity:
        raise UserError(f"data.features: {path} belongs to another store; move or delete it")
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if layout != shard.layout(identity) or header != _header(shard, identity, tensors["sha256"]):
        raise damaged(path, "its header or checksums are not what was written", REMEDY)
    return header["shard"], {name: tensors[name].view(torch.uint8).numpy() for name in tensors}


def _require_same(folder: Path, stored: object, wanted: Identity) -> None:
    if stored != wanted:
        what = f"the store {folder} was made with {'; '.join(differences(stored, wanted))}"
        raise UserError(f"data.features: {what}; delete it or use another data.cache_dir")
