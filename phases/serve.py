"""The drafter in a serving engine: its counters as rows of the report (`eval.engine=vllm`)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from drafters.base import TrainedDrafter
from drafters.export.card import Export
from drafters.export.gguf import FILE
from drafters.kinds import kind_of
from engines import llamacpp_run
from engines.llamacpp_run import Drafting
from engines.vllm_run import Speculation, serve
from eval.costs import Cost
from eval.measure import Bench
from eval.report.rows import GREEDY_DRAFTS
from eval.row import Row
from eval.served import llamacpp_row, served_row
from eval.server import server_row
from trainer.checks import is_address


def served_rows(
    bench: Bench, name: str, drafter: TrainedDrafter, cost: Cost, gguf: Path | None
) -> list[Row]:
    """Measure vLLM on the bench's prompts: with drafts drawn as ours are, and, where that differs,
    with vLLM's own default, which drafts the likeliest tokens at every temperature. Or llama.cpp,
    which knows no other way, on the target's file `gguf`. A server that runs already is measured
    with the drafter that it has."""
    config, target = bench.config, bench.target
    if is_address(config.engine):
        return [server_row(bench, name, config.engine, cost).row]
    if config.engine == "llamacpp":
        return [_of_llamacpp(bench, name, drafter, cost, gguf)]
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


def _of_llamacpp(
    bench: Bench, name: str, drafter: TrainedDrafter, cost: Cost, gguf: Path | None
) -> Row:
    config, kind = bench.config, kind_of(drafter)
    assert gguf is not None, "check_model_pair has asked for it"
    assert kind.method is not None, "check_engine refuses kinds that llama.cpp does not serve"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "drafter"
        asked = Export("", bench.target.name, config.K, gguf=gguf)
        kind.writers["llamacpp"](drafter, folder, asked)
        sampled = bench.sampling.temperature > 0
        job = f"{name}{GREEDY_DRAFTS}" if sampled else name
        drafting = Drafting(kind.method, folder / FILE, config.K)
        served = llamacpp_run.serve(
            gguf, {"plain": None, job: drafting}, [trace.prompt_ids for trace in bench.traces],
            max_new_tokens=config.max_new_tokens, sampling=bench.sampling, seed=config.seed,
        )  # fmt: skip
    return llamacpp_row(bench, job, served[job], served["plain"], cost).row
