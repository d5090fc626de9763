"""The target's hidden states of the run's text: stored, or from a serving engine."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import torch
from accelerate.utils import gather_object

from data.features import FeaturesStore, Folder, write_features
from data.features_layout import FeaturesPlan, features_folder
from data.features_local import LocalFolder
from data.features_remote import RemoteFolder
from data.file_cache import FileCache
from data.held_states import HeldStates
from data.imported import reread
from data.served_states import ServedStates
from data.trace_rows import num_tokens
from data.traces import Trace
from drafters.base import TrainedDrafter
from engines.distribution_check import judged
from engines.states import (
    NUMBER_BYTES,
    PLUGIN,
    StatesClient,
    StatesServer,
    check_server,
    layer_numbers,
    states_options,
)
from engines.vllm_server import Server
from phases.run import Run
from phases.servers import own_server
from phases.uses import note_use
from target.outputs import LayerId, TargetRequest
from trainer.checks import addresses_of
from trainer.errors import UserError

MEMORY = Path("/dev/shm")
NETWORK = ("nfs", "nfs4", "cifs", "smbfs", "lustre", "ceph", "fuse.sshfs", "beegfs", "gpfs")


@contextlib.contextmanager
def target_states(
    run: Run, request: TargetRequest | None, traces: Sequence[Trace]
) -> Iterator[FeaturesStore | ServedStates | None]:
    """Yield the source of the target's states; None where the target itself reads each batch, or
    nothing asks for it."""
    data, accelerator = run.config.data, run.accelerator
    cached, served = data.features == "cached", data.features_engine != "hf"
    if request is None or not (cached or served):
        if (cached or served) and accelerator.is_main_process:
            key = "features=cached" if cached else f"features_engine={data.features_engine}"
            print(f"data.{key}: this stage asks the target for nothing")
        yield None
        return
    plan = FeaturesPlan(
        request.states,
        data.features_dtype,
        engine="vllm" if served else "hf",
        summary=request.summary and cached,
    )
    if not cached:
        with served_states(run, plan.layers, traces) as states:
            yield states
        return
    yield _stored(run, plan, traces, "features")


def hold_states(run: Run, drafter: TrainedDrafter, texts: Sequence[Trace]) -> None:
    """For a target without layers: store the states of the held-out `texts`, their look-ahead
    included, exactly, and let it answer from them. UserError where the states and the texts are not
    those of one model."""
    target = run.target
    whole = [
        dataclasses.replace(t, response_ids=t.response_ids + t.lookahead_ids, lookahead_ids=[])
        for t in texts
    ]
    layers = tuple(dict.fromkeys((*drafter.target_layers, "final_norm")))
    dtype = "bf16" if target.model.dtype == torch.bfloat16 else "fp32"
    plan = FeaturesPlan(layers, dtype, engine="vllm")
    target.stored = HeldStates(_stored(run, plan, whole, "held-out states"), whole)
    if said := judged(reread(target, texts)):
        raise UserError(
            f"the answers that were generated do not go with the states of "
            f"data.features_engine={run.config.data.features_engine} ({said}): one of the two is "
            f"not of {target.name}"
        )


def _stored(run: Run, plan: FeaturesPlan, traces: Sequence[Trace], label: str) -> FeaturesStore:
    """The store of these states, which is written where it is not complete."""
    data, accelerator = run.config.data, run.accelerator
    served = data.features_engine != "hf"
    local = features_folder(run.target, traces, plan, data.cache_dir)
    note_use(run, local)
    folder = _folder(run, local)
    found = None
    if folder.manifest() is None:
        found = FeaturesStore.with_further_layers(run.target, traces, plan, folder)
    everywhere = all(gather_object([found is not None]))  # another command may just complete it
    if found is not None and everywhere:
        if accelerator.is_main_process:
            print(f"{label}: layers {list(plan.layers)} of those in {found.folder}")
            if plan.summary and not found.has_summaries:
                print(
                    f"{label}: without summaries of the logits, so that each step computes all of "
                    "them; delete that store to have it made with them"
                )
        return found
    manifest = folder.manifest()
    if not (served or run.target.has_layers or (manifest and manifest["complete"])):
        raise UserError(
            f"is left to a target without layers, and {folder} is not a complete store of the "
            f"{label} of this text",
            key="data.features_engine", value=data.features_engine,
            remedy="name a server of states, or set model.parts=all",
        )  # fmt: skip
    return write_features(
        run.target, traces, plan, folder,
        batch_size=data.batch_size, rank=accelerator.process_index,
        world=accelerator.num_processes, barrier=run.barrier, label=label,
        served=(lambda: served_states(run, plan.layers, traces)) if served else None,
    )  # fmt: skip


def _folder(run: Run, local: Path) -> Folder:
    """The place of the store that is named `local` where it is not on object storage."""
    data = run.config.data
    if data.features_url is None:
        return LocalFolder(local)
    cache = FileCache(
        Path(data.features_cache_dir or Path(data.cache_dir) / "features_cache"),
        data.features_cache_gb * 1e9,
    )
    return RemoteFolder(data.features_url, local, cache)


@contextlib.contextmanager
def served_states(
    run: Run, layers: Sequence[LayerId], traces: Sequence[Trace]
) -> Iterator[ServedStates]:
    """Yield states from the servers of data.features_engine, or from one that the first process of
    each machine starts; those of each are checked first."""
    data, target = run.config.data, run.target
    addresses = addresses_of(data.features_engine)
    with contextlib.ExitStack() as stack:
        own = Server("", lambda: None)
        for address in addresses:
            check_server(address)
        if not addresses:
            folder = stack.enter_context(_own_folder(run, layers, traces))
            options = {**states_options(target, layers, folder), **data.engine_options}
            own = stack.enter_context(own_server(run, options, PLUGIN))
            addresses = [own.url]
        numbers = [*layer_numbers(layers, target.num_layers).values()]

        def asking(some: Sequence[str]) -> AbstractContextManager[StatesClient]:
            return contextlib.closing(StatesClient(
                some, numbers, target.hidden_size, concurrency=data.batch_size, alive=own.alive,
            ))  # fmt: skip

        for address in addresses:
            with asking([address]) as client:
                ServedStates(client, target, layers).check(traces)
                (server,) = client.servers
                if run.accelerator.is_main_process:
                    print(about(server), flush=True)
        yield ServedStates(stack.enter_context(asking(addresses)), target, layers)


def about(server: StatesServer) -> str:
    """What is known of a server that has given states: how large they are, how fast they come, and
    where its files lie."""
    assert server.folder is not None
    kind, rate = file_system(server.folder), server.num_bytes / (server.ended - server.began)
    slow = f", a network disk ({kind}): /dev/shm is faster" if kind in NETWORK else ""
    per_token = server.num_bytes // server.num_tokens
    return (
        f"states from {server.root}: {per_token:,} bytes a token, the first "
        f"{server.num_bytes / 1e6:.1f} MB at {rate / 1e6:.1f} MB/s, in {server.folder}{slow}"
    )


@contextlib.contextmanager
def _own_folder(run: Run, layers: Sequence[LayerId], traces: Sequence[Trace]) -> Iterator[Path]:
    """A folder for the files of the run's own server: in memory, where twice as much is free as
    they can take at a time, else below data.cache_dir."""
    data, width = run.config.data, NUMBER_BYTES * run.target.hidden_size
    longest = int(num_tokens(traces).max())
    numbers = {*layer_numbers(layers, run.target.num_layers).values()}
    most = data.batch_size * run.accelerator.num_processes * longest * len(numbers) * width
    place = Path(data.cache_dir)
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * most:
        place = MEMORY
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".states-", dir=place) as folder:
        yield Path(folder)


def file_system(folder: Path) -> str:
    """The kind of the file system that holds a folder, "" where it is not known."""
    found, length = "", -1
    for part in psutil.disk_partitions(all=True):
        if folder.is_relative_to(part.mountpoint) and len(part.mountpoint) > length:
            found, length = part.fstype, len(part.mountpoint)
    return found
