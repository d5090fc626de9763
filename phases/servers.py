"""A server of the target for as long as a phase needs it, one on each machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from accelerate.utils import gather_object

from engines.vllm_server import Server, vllm_server
from phases.run import Run


@contextlib.contextmanager
def own_server(
    run: Run, options: Mapping[str, object], modules: Path | None = None
) -> Iterator[Server]:
    """Yield the vLLM server that the first process of each machine starts, which listens to that
    machine alone. Arguments as `vllm_server` has them."""
    with contextlib.ExitStack() as stack:
        accelerator, own = run.accelerator, Server("", lambda: None)
        if accelerator.is_local_main_process:
            if accelerator.is_main_process:
                print("starting vLLM", flush=True)
            own = stack.enter_context(vllm_server(run.target, options, modules))
        first = accelerator.process_index - accelerator.local_process_index
        yield own._replace(url=gather_object([own.url])[first])
        run.barrier()  # the others may still be asking
