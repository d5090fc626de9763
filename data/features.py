"""The store of target hidden states ("features") of traces: safetensors shards, memory-mapped.

    manifest.json              what the store was made with, and all shards once it is complete
    shard-00000.safetensors    per layer "hidden.<layer>" [tokens, H], with fp8 "scale.<layer>"
                               [tokens, 1]; for a reduced vocabulary "summary.log_z" and
                               "summary.first" [tokens, 1], of the logits that predict tokens of the
                               response; "sha256" [rows, 32] of the bytes of each row

`data/features_layout.py` says which row lies where, `data/features_local.py` reads and writes the
files in a folder, `data/features_remote.py` on object storage. A shard counts from the moment it
gets its name, with its bytes on the disk. Opening reads headers, sizes and "sha256"; the states of
a row are checked when they are first read: a store of terabytes opens at once, and a process reads
no more of it than its batches need.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from data.batches import Batch, collate
from data.budget import in_bytes
from data.features_layout import (
    DTYPES,
    HEADER,
    MANIFEST,
    SUMMARY,
    FeaturesPlan,
    Identity,
    Row,
    Shard,
    ShardEntry,
    bytes_per_token,
    header_of,
    layout_of,
    row_key,
    row_sha256,
)
from data.features_local import LocalFolder
from data.features_remote import RemoteFolder
from data.served_states import ServedStates
from data.trace_identity import differences, only_grown_eos
from data.traces import REMEDY, Trace
from target.model import Target, check_layers
from target.outputs import LayerId, TargetOutputs
from target.padding import by_length
from trainer.device import sent
from trainer.errors import RunFault, UserError
from trainer.files import damaged
from trainer.lock import lock
from trainer.logits import LogitsSummary
from trainer.progress import TokenProgress

_Tensors = dict[str, torch.Tensor]
Folder: TypeAlias = LocalFolder | RemoteFolder


class FeaturesStore:
    """Answers like `Target.outputs(..., layers=layers, logits=False)` where the rows are stored.
    `layers`: those to answer with, all that are stored by default. The answer has the summaries of
    logits that are stored."""

    def __init__(
        self,
        folder: Folder,
        identity: Identity,
        shards: list[Shard],
        layers: Sequence[LayerId] | None = None,
    ):
        self.folder, self.identity = folder, identity
        self.layers: tuple[LayerId, ...] = tuple(identity["layers"] if layers is None else layers)
        self.num_rows, self.num_tokens = int(identity["rows"]), int(identity["tokens"])
        self._dtype: torch.dtype = getattr(torch, str(identity["target"]["dtype"]))
        self.entries: list[ShardEntry] = []
        self._places: dict[bytes, Row] = {}
        self.has_summaries = "summary" in identity
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="features")  # starts none before use
        self._asked: dict[Hashable, Future[_Tensors]] = {}  # batches under way
        for shard, entry in zip(shards, folder.entries(shards, identity), strict=True):
            if entry is None:
                what = f"{folder}/{shard.file} is missing"
                raise UserError(f"data.features: {what}; start the command that made it again")
            self.entries.append(entry)
            ends = accumulate(shard.lengths)
            for i, (key, end) in enumerate(zip(shard.keys, ends, strict=True)):
                self._places[key] = Row(shard, i, slice(end - shard.lengths[i], end))

    @classmethod
    def open(
        cls,
        folder: str | Path | Folder,
        *,
        target_fingerprint: Mapping[str, object],
        layers: Sequence[LayerId],
        traces: Sequence[Trace],
    ) -> FeaturesStore:
        """Open a complete store of exactly these layers and traces; UserError for any other."""
        place = _place(folder)
        manifest = place.manifest()
        if manifest is None:
            raise UserError(f"data.features: no store in {place}: {place}/{MANIFEST} is missing")
        stored = manifest["identity"]
        plan = FeaturesPlan(
            tuple(layers), stored["dtype"], stored["tokens_per_shard"], stored.get("engine", "hf"),
            "summary" in stored,
        )  # fmt: skip
        wanted, shards = layout_of(target_fingerprint, stored["hidden_size"], traces, plan)
        _require_same(place, stored, wanted)
        if not manifest["complete"]:
            what = f"the store {place} is not complete"
            raise UserError(f"data.features: {what}; start the command that makes it again")
        store = cls(place, stored, shards)
        if store.entries != manifest["shards"]:
            what = "it does not list the shards that are there"
            raise damaged(f"{place}/{MANIFEST}", what, REMEDY)
        return store

    @classmethod
    def with_further_layers(
        cls, target: Target, traces: Sequence[Trace], plan: FeaturesPlan, folder: Folder
    ) -> FeaturesStore | None:
        """Open a complete store beside `folder` that holds the states of `plan`, which another
        recipe needed: with the summaries of `plan` where there is such a one, else without. None
        where there is none."""
        wanted, shards = layout_of(target.fingerprint, target.hidden_size, traces, plan)
        found = None
        for other in folder.beside():
            try:
                manifest = other.manifest()
            except UserError:  # it is named when its own run reads it
                continue
            if manifest is None:  # gone since
                continue
            stored: Identity = manifest["identity"]
            more = {*wanted["layers"]} <= {*stored["layers"]} and stored != wanted
            if manifest["complete"] and more and _besides(stored) == _besides(wanted):
                found = cls(other, stored, shards, plan.layers)
                if found.has_summaries or not plan.summary:
                    break
        return found

    def ahead(self, batch: Batch) -> None:
        """Begin to read the states of a batch to come, where they are stored, in a thread."""
        if self._holds(batch):
            self._asked[_name(batch)] = self._pool.submit(self._read, batch)

    def outputs(self, batch: Batch, device: torch.device | str = "cpu") -> TargetOutputs | None:
        """Stored states of a batch: hidden[layer] [B, L, H] in the target's dtype, on `device`.

        States are zero where there is no text. None if a text (prompt and response together) is not
        stored. Raises UserError where stored states are damaged, RunFault where they cannot be
        read.
        """
        if not self._holds(batch):
            return None
        asked = self._asked.pop(_name(batch), None)
        read = self._read(batch) if asked is None else asked.result()
        hidden: dict[LayerId, torch.Tensor] = {}
        for layer in self.layers:
            states, scale = sent(read[f"hidden.{layer}"], device), None
            if self.identity["dtype"] == "fp8":
                scale = sent(read[f"scale.{layer}"], device).view(torch.float32)
            hidden[layer] = _decoded(states, scale, self.identity["dtype"]).to(self._dtype)
        summary = _read_summary(read, device) if self.has_summaries else None
        return TargetOutputs(hidden, summary=summary)

    def _holds(self, batch: Batch) -> bool:
        return all(key in self._places for key in _keys(batch))

    def _read(self, batch: Batch) -> _Tensors:
        """What is stored of a batch, uint8 [B, L, bytes of a token] each."""
        rows = self.folder.rows([self._places[key] for key in _keys(batch)], self.identity)
        parts = ("hidden", "scale") if self.identity["dtype"] == "fp8" else ("hidden",)
        names = [f"{part}.{layer}" for layer in self.layers for part in parts]
        names += [*SUMMARY] if self.has_summaries else []
        places, shape = batch.starts(), tuple(batch.input_ids.shape)
        return {name: _placed([row[name] for row in rows], places, shape) for name in names}


def _besides(identity: Identity) -> dict[str, object]:
    """The identity of a store but for how much of each token it holds."""
    return {k: v for k, v in identity.items() if k not in ("layers", "after_final_norm", "summary")}


def _decoded(states: torch.Tensor, scale: torch.Tensor | None, dtype: str) -> torch.Tensor:
    """Stored states [..., H], or the bytes of them, as numbers. `scale`: [..., 1], with fp8."""
    if scale is None:
        return states.view(DTYPES[dtype])
    # e4m3 in the bits of float16: 2^8 too small, but far faster than a cast on a CPU
    bits = states.view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).float().mul_(scale * 256)


def _read_summary(read: _Tensors, device: torch.device | str) -> LogitsSummary:
    log_z, first = (
        sent(read[name], device).view(dtype).squeeze(-1) for name, dtype in SUMMARY.items()
    )
    return LogitsSummary(log_z, first.long())


def _place(folder: str | Path | Folder) -> Folder:
    return LocalFolder(folder) if isinstance(folder, str | Path) else folder


def _keys(batch: Batch) -> list[bytes]:
    return [row_key(p, r) for p, r in zip(batch.prompts, batch.responses, strict=True)]


def _name(batch: Batch) -> Hashable:
    return tuple(batch.input_ids.shape), tuple(batch.starts()), tuple(_keys(batch))


def write_features(
    target: Target,
    traces: Sequence[Trace],
    plan: FeaturesPlan,
    folder: str | Path | Folder,
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
    place = _place(folder)
    check_layers(plan.layers, target.num_layers)
    identity, shards = layout_of(target.fingerprint, target.hidden_size, traces, plan)
    fresh = {"identity": identity, "complete": False, "shards": []}

    def missing() -> list[Shard] | None:
        """The shards to write; None where the store is complete."""
        manifest = place.manifest() or fresh
        _require_same(place, manifest.get("identity"), identity)
        there = zip(shards, place.entries(shards, identity), strict=True)
        found = [shard for shard, entry in there if entry is None]
        return found if found or not manifest["complete"] else None

    scratch = place.work / ".writing"  # for half-written shards of all ranks
    said = f"data.features: the store {place} is being written by another command; wait or use"
    with contextlib.ExitStack() as held:
        remaining = missing()
        if remaining is not None:
            _check_budget(place, identity, remaining, label if rank == 0 else None)
            if rank == 0:
                place.work.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock(place.work / ".lock", f"{said} another data.cache_dir"))
        barrier()  # from here on no other command can complete it: all ranks see the same
        if remaining is not None and (remaining := missing()) is not None:
            if rank == 0:
                place.write_manifest(fresh)
                shutil.rmtree(scratch, ignore_errors=True)  # what a dead command left
                scratch.mkdir(exist_ok=True)  # by one alone: another would find it there, then gone
            barrier()  # until here no rank writes: all have seen the same
            own = [shard for shard in shards[rank::world] if shard in remaining]
            source = None if served is None else held.enter_context(served())
            progress = TokenProgress(label, enabled=rank == 0)
            progress.part("", total=sum(shard.num_tokens for shard in own))
            for shard in own:
                tensors = _compute(target, shard, identity, batch_size, progress, source)
                _publish(tensors, shard, identity, place, scratch / shard.file)
            progress.close()
            barrier()
            if rank == 0:
                entries = FeaturesStore(place, identity, shards).entries
                place.write_manifest({**fresh, "complete": True, "shards": entries})
                shutil.rmtree(scratch, ignore_errors=True)
            barrier()
    return FeaturesStore(place, identity, shards)


def _check_budget(
    folder: Folder, identity: Identity, remaining: list[Shard], label: str | None
) -> None:
    """Print the bytes to write, if there is a label; UserError if they exceed the free space."""
    each = bytes_per_token(
        identity["layers"], identity["hidden_size"], identity["dtype"], "summary" in identity
    )
    needed, free = sum(shard.num_tokens for shard in remaining) * each, folder.free()
    if label:
        rows, tokens = identity["rows"], identity["tokens"]
        size = f"{rows} rows, {tokens} tokens of {each} bytes, {in_bytes(tokens * each)}"
        room = "" if free is None else f", free {in_bytes(free)}"
        print(f"{label}: {size} in {folder}; to write {in_bytes(needed)}{room}")
    if free is not None and needed > free:
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
        if "summary" in identity:
            final, scale = stored["hidden.final_norm"], stored.get("scale.final_norm")
            stored |= _summary(target, batch, _decoded(final, scale, identity["dtype"]))
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
            sum_of_row = row_sha256({name: own[name].view(torch.uint8).numpy() for name in own})
            tensors["sha256"][i] = torch.tensor(list(sum_of_row), dtype=torch.uint8)
            progress.advance(num_tokens)
    return tensors


def _summary(target: Target, batch: Batch, final: torch.Tensor) -> _Tensors:
    """Summaries [B, L, 1] of the logits that states `final` [B, L, H], as they will be read, give
    for the tokens of the responses; NaN elsewhere."""
    shape = (*batch.input_ids.shape, 1)
    found = {
        "summary.log_z": torch.full(shape, math.nan, dtype=SUMMARY["summary.log_z"]),
        "summary.first": torch.zeros(shape, dtype=SUMMARY["summary.first"]),
    }
    rows, index = batch.supervised().nonzero(as_tuple=True)
    states = final[rows, index].to(target.device, target.model.dtype)
    summary = LogitsSummary.of(target.head, states)
    found["summary.log_z"][rows, index, 0] = summary.log_z.float().cpu()
    found["summary.first"][rows, index, 0] = summary.first.to(torch.int32).cpu()
    return found


def _placed(
    texts: list[np.ndarray], places: list[tuple[int, int]], shape: tuple[int, ...]
) -> torch.Tensor:
    """uint8 [*shape, bytes of a token], zero where there is no text; in pinned memory for a GPU."""
    whole = (*shape, texts[0].shape[1])
    out = torch.zeros(whole, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    filled = out.numpy()
    for text, (row, first) in zip(texts, places, strict=True):
        filled[row, first : first + len(text)] = text
    return out


def _publish(
    tensors: _Tensors, shard: Shard, identity: Identity, folder: Folder, temporary: Path
) -> None:
    """Write the whole shard or nothing."""
    header = json.dumps(header_of(shard, identity, tensors["sha256"].numpy()))
    try:
        save_file(tensors, temporary, metadata={HEADER: header})
        folder.publish(temporary, shard)
    except (OSError, SafetensorError) as error:
        what = f"cannot write {folder}/{shard.file}: {getattr(error, 'strerror', None) or error}"
        raise RunFault(f"{what}; remove the cause and start the same command again") from error


def _require_same(folder: Folder, stored: object, wanted: Identity) -> None:
    if stored != wanted:
        remedy = "delete it or use another data.cache_dir"
        if isinstance(stored, dict) and (grown := only_grown_eos(stored, wanted)):
            raise UserError(grown, key="features store", value=str(folder), remedy=remedy)
        what = f"the store {folder} was made with {'; '.join(differences(stored, wanted))}"
        raise UserError(f"data.features: {what}; {remedy}")
