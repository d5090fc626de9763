"""The same drafter in a serving engine: its counters as rows beside ours (`eval.engine=vllm`)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from data.vllm import engine_python
from drafters.causal_lm import CausalLMDrafter
from drafters.export import hf, vllm
from drafters.export.heads import method_of
from drafters.hydra import HydraDrafter
from drafters.medusa2 import Medusa2Drafter
from eval.measure import Bench, Cost
from eval.served import Speculation, serve, served_row
from eval.server import check_server, server_row
from trainer.config import EvalConfig, UserError, is_address


def check_engine(drafter: Any, config: EvalConfig) -> None:
    """Before anything is paid for: the engine is there and can serve this kind of drafter."""
    if config.engine == "own":
        return
    if isinstance(drafter, HydraDrafter):
        raise UserError(
            f"eval.engine={config.engine}: no engine loads Hydra; vllm serves causal LMs, medusa, "
            "eagle and eagle3"
        )
    if is_address(config.engine):
        check_server(config.engine, config.K)
    else:
        engine_python()


def served_rows(bench: Bench, name: str, drafter: Any, cost: Cost) -> list[dict[str, Any]]:
    """Rows of vLLM on the bench's prompts: drafts drawn as ours are, and, where that differs, with
    vLLM's own default, which drafts the likeliest tokens at every temperature. A server that runs
    already is asked as it is."""
    config, target = bench.config, bench.target
    if is_address(config.engine):
        return [server_row(bench, name, config.engine, cost).row]
    with tempfile.TemporaryDirectory() as scratch:
        if isinstance(drafter, Medusa2Drafter):
            drafter = drafter.merged(Path(scratch) / "target")
            target = drafter.shared.target
        method = "draft_model" if isinstance(drafter, CausalLMDrafter) else method_of(drafter)
        folder = Path(scratch) / "drafter"
        if isinstance(drafter, CausalLMDrafter):
            hf.export(
                drafter.model, target.tokenizer, target.fingerprint["vocab_size"], folder,
                num_assistant_tokens=config.K, card="", eos_ids=target.eos_ids,
            )  # fmt: skip
        else:
            vllm.export(drafter, folder, card="")
        jobs: dict[str, Speculation | None] = {
            "plain": None,
            name: Speculation(method, folder, config.K),
        }
        default = f"{name}, greedy drafts"
        if bench.sampling.temperature > 0:
            jobs[default] = Speculation(method, folder, config.K, sampled=False)
        served = serve(
            target, jobs, [trace.prompt_ids for trace in bench.traces],
            max_new_tokens=config.max_new_tokens, sampling=bench.sampling,
            batch_size=config.batch_size, seed=config.seed,
        )  # fmt: skip
    return [
        served_row(bench, job, served[job], served["plain"], cost).row
        for job in jobs
        if job != "plain"
    ]
