"""The drafter in vLLM, in llama.cpp or on a running server: its counters as rows of the report."""

from __future__ import annotations

import tempfile
from pathlib import Path

from drafters.base import TrainedDrafter
from drafters.export.card import SPEC_TYPES, Export
from drafters.export.gguf import FILE
from drafters.kinds import kind_of
from drafters.training_free.base import TrainingFree
from drafters.trees.copy import CopyTree
from engines import llamacpp_run
from engines.llamacpp_run import Drafting
from engines.load import LoadRun, under_load
from engines.vllm_run import Speculation, serve
from engines.vllm_server import vllm_server
from engines.web import server_root
from eval.config import EvalConfig, trees_of
from eval.costs import Cost
from eval.load import level, load_part
from eval.measure import Bench
from eval.report.rows import GREEDY_DRAFTS
from eval.row import Json, Row
from eval.served import llamacpp_row, served_row
from eval.server import engine_of, server_row
from target.gguf import rounds_as
from trainer.checks import is_address

TIMED = 3  # prompts on which llama.cpp's forwards are timed by their rows
ROOM = 64  # tokens behind each


def served_rows(
    bench: Bench, name: str, drafter: TrainedDrafter | TrainingFree, cost: Cost, gguf: Path | None
) -> list[Row]:
    """Measure vLLM on the bench's prompts: with drafts drawn as ours are, and, where that differs,
    with vLLM's own default, which drafts the likeliest tokens at every temperature. Or llama.cpp,
    which knows no other way, on the target's file `gguf`. A server that runs already is measured
    with the drafter that it has."""
    config, target = bench.config, bench.target
    if is_address(config.engine):
        return [server_row(bench, name, config.engine, cost).row]
    if config.engine == "llamacpp":
        return _of_llamacpp(bench, name, drafter, cost, gguf)
    assert isinstance(drafter, TrainedDrafter), "EvalConfig refuses copies in vLLM"
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


def loads(bench: Bench, drafter: TrainedDrafter | TrainingFree) -> list[Json]:
    """The entry of the report's part `load` for the bench's temperature: the server that the user
    names, beside one without the drafter if there is one; or vLLM with the drafter and without it,
    started here one after the other. Nothing without eval.concurrency."""
    config = bench.config
    if not config.concurrency:
        return []
    if is_address(config.engine):
        source, plain = engine_of(server_root(config.engine)), None
        if config.plain_engine is not None:
            plain = _at_loads(bench, config.plain_engine, drafting=False)
        drafted = _at_loads(bench, config.engine, drafting=True)
        return [_load(bench, source, drafted, plain, named=True)]
    assert isinstance(drafter, TrainedDrafter), "EvalConfig refuses copies in vLLM"
    with tempfile.TemporaryDirectory() as scratch:
        drafter, trained = drafter.servable(Path(scratch) / "target")
        target, kind = trained or bench.target, kind_of(drafter)
        assert kind.method is not None, "check_engine refuses kinds that no engine serves"
        folder = Path(scratch) / "drafter"
        kind.writers["vllm"](drafter, folder, Export("", target.name, config.K))
        speculation = Speculation(kind.method, folder, config.K).config(bench.sampling)
        longest = max(len(t.prompt_ids) for t in bench.traces) + config.max_new_tokens
        own: dict[str, object] = {
            "max_model_len": min(target.context, longest + 2 * config.K + 2),
            "max_num_seqs": max(config.concurrency),
            "enable_prefix_caching": False,
        }
        with vllm_server(target, own) as server:
            plain = _at_loads(bench, server.url, drafting=False)
        with vllm_server(target, {**own, "speculative_config": speculation}) as server:
            drafted = _at_loads(bench, server.url, drafting=True)
            device = "a CPU" if bench.target.device.type == "cpu" else "a GPU"
            source = f"{engine_of(server.url)} on {device}, which this run started"
    return [_load(bench, source, drafted, plain, named=False)]


def _at_loads(bench: Bench, address: str, drafting: bool) -> list[LoadRun]:
    """Measure a server at every load, after a request that warms it up."""
    config, found = bench.config, []
    how = "with" if drafting else "without"
    for concurrency in (0, *config.concurrency):
        requests = bench.requests() if concurrency else bench.requests()[:1]
        run = under_load(
            address, bench.target, requests, concurrency or 1,
            max_new_tokens=config.max_new_tokens, drafting=drafting,
        )  # fmt: skip
        if concurrency:
            found.append(run)
            print(
                f"load, T={bench.sampling.temperature:g}, {how} the drafter: {concurrency} "
                f"requests at once, {run.tokens_per_s:.1f} tokens/s", flush=True,
            )  # fmt: skip
    return found


def _load(
    bench: Bench, source: str, drafted: list[LoadRun], plain: list[LoadRun] | None, named: bool
) -> Json:
    without = [None] * len(drafted) if plain is None else plain
    levels = [level(*pair) for pair in zip(drafted, without, strict=True)]
    return load_part(bench.sampling.temperature, bench.config.K, source, levels, named)


def _of_llamacpp(
    bench: Bench, name: str, drafter: TrainedDrafter | TrainingFree, cost: Cost, gguf: Path | None
) -> list[Row]:
    """The drafter's row, and one for each tree of eval.tree that copies: llama.cpp copies with the
    same `shortest` before it asks the drafter."""
    config = bench.config
    assert gguf is not None, "check_model_pair has asked for it"
    prompts = [trace.prompt_ids for trace in bench.traces]
    with tempfile.TemporaryDirectory() as scratch:
        if isinstance(drafter, TrainingFree):
            assert drafter.in_llamacpp is not None, "EvalConfig refuses other copies"
            kind, ngram = drafter.in_llamacpp
            jobs = {name: Drafting((kind,), None, config.K, ngram)}
        else:
            jobs = _with_copies(config, name, drafter, Path(scratch) / "drafter", gguf)
            if bench.sampling.temperature > 0:
                jobs = {f"{job}{GREEDY_DRAFTS}": one for job, one in jobs.items()}
        served = llamacpp_run.serve(
            gguf, {"plain": None, **jobs}, prompts, max_new_tokens=config.max_new_tokens,
            sampling=bench.sampling, seed=config.seed,
        )  # fmt: skip
        timed, by_rows, drafting = bench.timed_prompts(), None, next(iter(jobs.values()))
        once = bench.sampling.temperature == config.temperatures[0]
        some = [prompts[i] for i in timed if len(prompts[i]) + ROOM <= bench.target.context]
        if some and drafting.always and once:
            by_rows = llamacpp_run.seconds_by_rows(gguf, drafting, some[:TIMED])
    dtype = rounds_as(gguf)
    return [
        llamacpp_row(
            bench,
            job,
            served[job],
            served["plain"],
            cost,
            by_rows if one is drafting else None,
            dtype,
        ).row
        for job, one in jobs.items()
    ]


def _with_copies(
    config: EvalConfig, name: str, drafter: TrainedDrafter, folder: Path, gguf: Path
) -> dict[str, Drafting]:
    kind = kind_of(drafter)
    assert kind.method is not None, "check_engine refuses kinds that llama.cpp does not serve"
    kind.writers["llamacpp"](drafter, folder, Export("", "", config.K, gguf=gguf))
    alone = SPEC_TYPES[kind.method]
    jobs = {name: Drafting((alone,), folder / FILE, config.K)}
    for _, tree in trees_of(config):
        if isinstance(tree, CopyTree):
            both = (llamacpp_run.COPIES, alone)
            named = f"{name}, {llamacpp_run.COPIES}:{tree.shortest}"
            jobs[named] = Drafting(both, folder / FILE, config.K, tree.shortest)
    return jobs
