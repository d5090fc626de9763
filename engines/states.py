"""Hidden states of texts from a vLLM server, whose connector writes them to files.

`vllm_plugin/draftsmith_states.py` is the connector. The server and whoever asks see the same
folder: on one machine, or on a file system that both have.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch

from engines.completions import DELAYS_S, PATIENCE_S, RESUME, ask, served_model
from engines.web import PAGE_BYTES, Limits, ServerError, answer_limits, server_root
from target.model import Target
from target.outputs import LayerId
from trainer.errors import RunFault, UserError

PLUGIN = Path(__file__).with_name("vllm_plugin")
CHECK_S = 10.0  # for the first answer of a server
FILE_S = 60.0  # from the answer to its file
CLOSE_S = 5.0  # for what is under way when the run ends, so that its files are deleted
LONGEST_PAUSE_S = 0.05
NUMBER_BYTES, ID_BYTES = 4, 8  # at most; a file has PAGE_BYTES for its frame
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


def layer_numbers(layers: Sequence[LayerId], num_layers: int) -> dict[LayerId, int]:
    """vLLM's number of each layer: of the output of layer i i + 1; of `final_norm` that of the last
    layer, whose output the norm is applied to here."""
    return {layer: num_layers if isinstance(layer, str) else layer + 1 for layer in layers}


def states_options(target: Target, layers: Sequence[LayerId], folder: Path) -> dict[str, object]:
    """The options of a vLLM server that writes the states of these layers into `folder`."""
    numbers = sorted({*layer_numbers(layers, target.num_layers).values()})
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": numbers}},
        },
        "kv_transfer_config": {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "draftsmith_states",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"folder": str(folder.absolute())},
        },
        "enable_prefix_caching": False,  # every token is read, so that every token has states
    }


def check_server(address: str) -> None:
    """UserError where no OpenAI-compatible server answers at `address` within CHECK_S."""
    try:
        served_model(server_root(address), Limits(CHECK_S, PAGE_BYTES))
    except ServerError as error:
        raise UserError(
            f"no server answers there ({error})", key="data.features_engine", value=address,
            remedy="start the server first, or correct the address",
        ) from error  # fmt: skip


@dataclass(eq=False)
class StatesServer:
    """One of the servers that give states. `failing`: since when no request has been answered;
    `folder`: where its files come; `num_bytes`, `num_tokens`: of the states that were read, `began`
    and `ended`: when the first of them was asked for and the last one was there."""

    root: str
    model: str | None = None
    failing: float | None = None
    folder: Path | None = None
    num_bytes: int = 0
    num_tokens: int = 0
    began: float = math.inf
    ended: float = 0.0

    def note(self, states: torch.Tensor, began: float) -> None:
        """Count states [n, layers, H] that were asked for at `began`."""
        self.failing = None
        self.num_bytes += states.nbytes
        self.num_tokens += len(states)
        self.began, self.ended = min(self.began, began), time.monotonic()


class StatesClient:
    """Asks servers for states, each for `concurrency` texts at a time. A text that one of them
    fails to read goes to the next that is free; one that gives other states, or none for
    PATIENCE_S, is left out, by name, as long as there are others. `alive` raises RunFault where the
    run's own server is known to have ended."""

    def __init__(
        self,
        addresses: Sequence[str],
        numbers: Sequence[int],
        hidden_size: int,
        *,
        concurrency: int,
        alive: Callable[[], None] = lambda: None,
    ):
        self.servers = [StatesServer(server_root(address)) for address in addresses]
        self.numbers = sorted({*numbers})  # vLLM's, in the order of the files
        self.hidden_size, self._alive = hidden_size, alive
        self._closed, self._choosing = threading.Event(), threading.Lock()
        self._todo: queue.SimpleQueue[tuple[list[int], Future[torch.Tensor]] | None]
        self._todo = queue.SimpleQueue()
        # daemons: a process that ends does not wait for a server that hangs
        self._threads = [
            threading.Thread(target=self._work, args=(server,), daemon=True)
            for server in self.servers
            for _ in range(concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, ids: Sequence[int]) -> Future[torch.Tensor]:
        """States [n, layers, H] of a text, on the CPU in the server's dtype; the layers are
        `numbers`. The result raises RunFault where the server does not give them."""
        future = Future[torch.Tensor]()
        self._todo.put((list(ids), future))
        return future

    def close(self) -> None:
        """Give up what is not under way, and wait CLOSE_S at most for what is."""
        self._closed.set()
        for _ in self._threads:
            self._todo.put(None)
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self, server: StatesServer) -> None:
        """Read texts until there are no more, or this server is left out."""
        failures = 0
        while (one := self._todo.get()) is not None:
            ids, future = one
            if self._closed.is_set():
                future.cancel()
                continue
            if server not in self.servers:
                self._todo.put(one)
                return
            began = time.monotonic()
            try:
                found = self._try(server, ids)
            except ServerError as error:
                delay = DELAYS_S[min(failures, len(DELAYS_S) - 1)]
                failures += 1
                try:
                    self._failed(server, error)
                except RunFault as fault:
                    future.set_exception(fault)
                    continue
                self._todo.put(one)  # for whichever server is free next
                self._closed.wait(delay)
            except Exception as error:  # of whoever waits for the result
                future.set_exception(error)
            else:
                failures = 0
                with self._choosing:
                    server.note(found, began)
                future.set_result(found)

    def _failed(self, server: StatesServer, error: ServerError) -> None:
        """Note that a server has not read a text. RunFault where no other is left and it is not to
        be asked again."""
        self._alive()
        with self._choosing:
            known, others = server.failing, [one for one in self.servers if one is not server]
            server.failing = since = known or time.monotonic()
            late = time.monotonic() - since > PATIENCE_S
            if self._closed.is_set() or ((late or not error.transient) and not others):
                raise RunFault(f"data.features_engine: {error}; {RESUME}") from error
            if late or not error.transient:
                if server in self.servers:
                    print(f"{error}: left out, {len(others)} remain", flush=True)
                self.servers = others
            elif known is None:
                print(f"{error}: asked again for {PATIENCE_S:g} s", flush=True)

    def _try(self, server: StatesServer, ids: list[int]) -> torch.Tensor:
        root = server.root
        server.model = server.model or served_model(root)
        name = uuid.uuid4().hex
        answer = ask(f"{root}/v1/completions", {
            "model": server.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0,
            "add_special_tokens": False, "kv_transfer_params": {"states": name},
        }, answer_limits(1, len(ids)))  # fmt: skip
        params = answer.get("kv_transfer_params")
        path = params.get("path") if isinstance(params, dict) else None
        if not isinstance(path, str) or Path(path).name != name:
            said = "it writes no hidden states: start it with this project's connector"
            raise ServerError(root, said, False)
        shape = len(ids), len(self.numbers), self.hidden_size
        most = NUMBER_BYTES * math.prod(shape) + ID_BYTES * len(ids) + PAGE_BYTES
        server.folder = Path(path).parent
        content = self._read(root, Path(path), most)
        states, read, layers = (content.get(name) for name in ("states", "ids", "layers"))
        if not _is_dense(read) or read.shape != (len(ids),) or read.tolist() != ids:
            raise ServerError(root, "states of another text than the one sent", False)
        if not _is_dense(states) or states.shape != shape:
            shown = list(states.shape) if _is_dense(states) else "nothing"
            said = f"states of the shape {shown}, expected {list(shape)}: tokens, layers, width"
            raise ServerError(root, said, False)
        if layers != self.numbers:
            said = f"the states of the layers {str(layers)[:80]}, expected {self.numbers} as vLLM "
            raise ServerError(root, f"{said}counts them", False)
        if not states.is_floating_point():
            raise ServerError(root, f"states of the kind {states.dtype}", False)
        return states

    def _read(self, root: str, path: Path, most: int) -> dict[str, object]:
        """The content of a file of at most `most` bytes, which is deleted. It may appear after the
        answer."""
        began, pause = time.monotonic(), 0.001
        while not os.path.exists(path):  # False, too, for what can be no path
            if time.monotonic() - began > FILE_S:
                said = f"no file {path} after {FILE_S:g} s: it must lie in a folder that both see"
                raise ServerError(root, said, True)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        try:
            if not path.is_file() or path.stat().st_size > most:
                said = f"{path} is no file of at most {most} bytes, as these states would be"
                raise ServerError(root, said, False)
            return dict(torch.load(path, weights_only=True))
        except ServerError:
            raise
        except Exception as error:  # of a damaged file torch raises whatever comes
            raise ServerError(root, f"cannot read {path}: {error}", True) from error
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _is_dense(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor whose numbers lie in memory."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
    )
