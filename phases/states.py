"""The target's hidden states of the training text: stored, or from a serving engine."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from accelerate.utils import gather_object

from data.features import FeaturesStore, Folder, write_features
from data.features_layout import FeaturesPlan, features_folder
from data.features_local import LocalFolder
from data.features_remote import RemoteFolder
from data.file_cache import FileCache
from data.served_states import ServedStates
from data.traces import Trace
from engines.states import PLUGIN, StatesClient, check_server, layer_numbers, states_options
from engines.vllm_server import Server
from phases.run import Run
from phases.servers import own_server
from phases.uses import note_use
from target.outputs import LayerId, TargetRequest
from trainer.checks import is_address


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
    local = features_folder(run.target, traces, plan, data.cache_dir)
    note_use(run, local)
    folder = _folder(run, local)
    found = None
    if folder.manifest() is None:
        found = FeaturesStore.with_further_layers(run.target, traces, plan, folder)
    everywhere = all(gather_object([found is not None]))  # another command may just complete it
    if found is not None and everywhere:
        if accelerator.is_main_process:
            print(f"features: layers {list(plan.layers)} of those in {found.folder}")
            if plan.summary and not found.has_summaries:
                print(
                    "features: without summaries of the logits, so that each step computes all of "
                    "them; delete that store to have it made with them"
                )
        yield found
        return
    yield write_features(
        run.target, traces, plan, folder,
        batch_size=data.batch_size, rank=accelerator.process_index,
        world=accelerator.num_processes, barrier=run.barrier,
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
    """Yield states from the server of data.features_engine, or from one that the first process of
    each machine starts; they are compared with transformers' first."""
    data, target = run.config.data, run.target
    with contextlib.ExitStack() as stack:
        server = Server(data.features_engine, lambda: None)
        if is_address(server.url):
            check_server(server.url)
        else:
            Path(data.cache_dir).mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=".states-", dir=data.cache_dir)
            )
            options = {**states_options(target, layers, Path(folder)), **data.engine_options}
            server = stack.enter_context(own_server(run, options, PLUGIN))
        client = StatesClient(
            server.url, [*layer_numbers(layers, target.num_layers).values()], target.hidden_size,
            concurrency=data.batch_size, alive=server.alive,
        )  # fmt: skip
        stack.callback(client.close)
        states = ServedStates(client, target, layers)
        states.check(traces)
        yield states
