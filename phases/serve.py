"""The drafter in a serving engine: its counters as rows of the report (`eval.engine=vllm`)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from drafters.base import TrainedDrafter
from drafters.export.card import Export
from drafters.kinds import kind_of
from engines.vllm_run import Speculation, serve
from eval.costs import Cost
from eval.measure import Bench
from eval.report.rows import GREEDY_DRAFTS
from eval.row import Row
from eval.served import served_row
from eval.server import server_row
from trainer.checks import is_address


def served_rows(bench: Bench, name: str, drafter: TrainedDrafter, cost: Cost) -> list[Row]:
    """Measure vLLM on the bench's prompts: with drafts drawn as ours are, and, where that differs,
    with vLLM's own default, which drafts the likeliest tokens at every temperature. A server that
    runs already is measured with the drafter that it has."""
    config, target = bench.config, bench.target
    if is_address(config.engine):
        return [server_row(bench, name, config.engine, cost).row]
    with tempfile.TemporaryDirectory() as scratch:
        drafter, trained = drafter.servable(Path(scratch) / "target")
        target, kind = trained or target, kind_of(drafter)
        assert kind.method is not None, "check_engine refuses kinds that no engine serves"
        folder = Path(scratch) / "drafter"
        kind.writers["vllm"](drafter, folder, Export("", target.name, config.K))
        method = kind.method
        jobs: dict[str, Speculation | None] = {
            "plain": None,
            name: Speculation(method, folder, config.K),
        }
        if bench.sampling.temperature > 0:
            jobs[f"{name}{GREEDY_DRAFTS}"] = Speculation(method, folder, config.K, sampled=False)
            if method == "medusa":  # vLLM draws no drafts from these heads, whatever it is told
                del jobs[name]
        served = serve(
            target, jobs, [trace.prompt_ids for trace in bench.traces],
            max_new_tokens=config.max_new_tokens, sampling=bench.sampling,
            batch_size=config.batch_size, seed=config.seed, alone=bench.timed_prompts(),
        )  # fmt: skip
    return [
        served_row(bench, job, served[job], served["plain"], cost).row
        for job in jobs
        if job != "plain"
    ]
