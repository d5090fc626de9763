"""A connector of vLLM that writes the target's hidden states to files, one for each request.

vLLM's method `extract_hidden_states` keeps the states of all tokens of a request in the blocks of a
cache; once the request has ended, this connector copies them out. A request asks for them by
`kv_transfer_params={"states": <32 hexadecimal digits>}`; the answer's `kv_transfer_params` have the
`path` of a file with that name, in the folder of the server's `kv_connector_extra_config`. It holds
{"ids": [n] int64, "states": [n, layers, H] in the server's dtype, "layers": their numbers} by
`torch.save`, of the n tokens of the prompt; the layers are those of
`eagle_aux_hidden_state_layer_ids`, ascending. A file appears whole, before the answer or soon after
it; whoever asked deletes it. Requests without the word leave nothing.

The server imports this module by its path: it needs the standard library, torch and vllm alone.
"""

from __future__ import annotations

import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # pyright: ignore[reportMissingImports]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import (  # pyright: ignore[reportMissingImports]
    get_tensor_model_parallel_rank,
)

NAME = re.compile("[0-9a-f]{32}")  # of a file: no request reaches out of the folder
LAYER = "cache_only_layers"  # in the name of the layer that vLLM adds for the states
WRITERS = 4
logger = logging.getLogger(f"vllm.{__name__}")


@dataclass
class _Ended:
    """A request that has ended, and the blocks that hold the states of its prompt."""

    request: str
    name: str
    ids: list[int]
    blocks: list[int]


@dataclass
class _Metadata(KVConnectorMetadata):
    """What the scheduler tells the worker at each step."""

    ended: list[_Ended] = field(default_factory=list)


class StatesConnector(KVConnectorBase_V1, SupportsHMA):
    """One object in the scheduler, which learns what has ended, and one in each worker, of which
    the first writes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        folder = self._kv_transfer_config.get_from_extra_config("folder", None)
        if not folder:
            raise ValueError('kv_connector_extra_config needs {"folder": ...}, where files go')
        self._folder = Path(folder).absolute()
        found = [
            (i, name)
            for i, group in enumerate(kv_cache_config.kv_cache_groups)
            for name in group.layer_names
            if LAYER in name
        ]
        if len(found) != 1:
            raise ValueError(
                f"{len(found)} layers of the cache hold hidden states, expected one: this needs "
                "--speculative-config with the method extract_hidden_states"
            )
        ((self._group, self._layer),) = found
        draft = vllm_config.speculative_config.draft_model_config.hf_config
        self._layers = sorted(draft.eagle_aux_hidden_state_layer_ids)
        self._ended: list[_Ended] = []
        self._cache: torch.Tensor | None = None
        self._writes = False
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="states")

    # --- in the scheduler -------------------------------------------------------------------------

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks until the worker has copied them, where the request asked for states."""
        params = request.kv_transfer_params or {}
        name, ids = params.get("states"), request.prompt_token_ids
        if name is None or not ids or request.num_computed_tokens < len(ids):  # or ended early
            return False, None
        if not NAME.fullmatch(str(name)):
            logger.error("states: a request named its file %.60r, not 32 hexadecimal digits", name)
            return False, None
        self._ended.append(
            _Ended(request.request_id, name, list(ids), list(block_ids[self._group]))
        )
        return True, {"path": str(self._folder / name)}

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same where the cache has one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        ended, self._ended = self._ended, []
        return _Metadata(ended)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False  # nothing is loaded

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def get_finished_count(self) -> int:
        return 1  # one worker writes, so one reports

    # --- in the worker ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._cache = kv_caches[self._layer]  # [blocks, layers, tokens of a block, H]
        self._writes = get_tensor_model_parallel_rank() == 0
        if self._writes:
            self._folder.mkdir(parents=True, exist_ok=True)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Copy the states of what has ended; its blocks may be used again at once, since the copy
        stands before any later forward in the device's queue."""
        if not (self._writes and self.has_connector_metadata()):
            return None, None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        for one in metadata.ended:
            self._copy(one)
        return {one.request for one in metadata.ended} or None, None

    def _copy(self, ended: _Ended) -> None:
        cache = self._cache
        assert cache is not None
        blocks = torch.tensor(ended.blocks, device=cache.device)
        found = cache.index_select(0, blocks).transpose(1, 2).flatten(0, 1)[: len(ended.ids)]
        copied = None
        if found.is_cuda:
            states = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            states.copy_(found, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        else:
            states = found.contiguous()
        content = {"ids": torch.tensor(ended.ids), "states": states, "layers": self._layers}
        self._pool.submit(_write, self._folder / ended.name, content, copied)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass  # nothing is loaded

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass  # the model itself has put the states into the cache

    def wait_for_save(self) -> None:
        pass

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "LBNHC"  # the states of a token lie together


def _write(path: Path, content: dict[str, Any], copied: torch.cuda.Event | None) -> None:
    part = path.with_suffix(".part")
    try:
        if copied is not None:
            copied.synchronize()
        torch.save(content, part)
        os.replace(part, path)
    except Exception:
        logger.exception("states: cannot write %s", path)
        part.unlink(missing_ok=True)
