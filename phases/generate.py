"""The first phase of a run: choose prompts, and generate the target's traces of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from data.bad_rows import DROP, NONE
from data.budget import estimate_bytes
from data.config import DataConfig
from data.generate import generate_traces
from data.generation_plan import GenerationPlan, traces_folder
from data.imported import open_imported, prompts_of
from data.packing import PackedBatches
from data.prompts import (
    Prompt,
    is_made_here,
    load_prompts,
    take,
    user_turns,
)
from data.split import HeldOut, count_left_out, drop_held_out, held_out_turns, split_by_hash
from data.trace_identity import differences, only_grown_eos
from data.trace_rows import Traces
from data.traces import Trace, TraceStore
from drafters.base import TrainedDrafter, weights_hash
from drafters.causal_lm import CausalLMDrafter
from eval.config import tree_depth
from phases.check import (
    check_context,
    check_model_pair,
    check_places,
    check_prompts,
    check_room,
)
from phases.cut_answers import show_cut, show_unmeasured
from phases.run import Run, load_target, require_downloaded
from phases.servers import own_server
from phases.uses import note_use
from recipes.common.config import Config
from target.model import Target
from target.outline import outline
from trainer.errors import UserError
from trainer.progress import working

Servers = Callable[[], AbstractContextManager[Sequence[str]]]  # what gives servers' addresses


@working("reading the prompts")
def choose_prompts(
    config: Config, unread: dict[str, object] | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Choose the (training, evaluation) prompts, without the training prompts all of whose turns
    are held out as well. `unread` receives what a report says of rows that cannot be read.
    UserError where more than half of the training turns are held out."""
    train, held_out = both_prompts(config, unread)
    data = config.data
    key, value = "eval.prompts", config.eval.prompts
    if value is None:
        key, value = "data.eval_share", data.eval_share
    return drop_held_out(train, held_out, data.system_prompt, key, value), held_out


def both_prompts(
    config: Config, unread: dict[str, object] | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Choose the training prompts and those of the report, as they are named."""
    data, evaluation = config.data, config.eval
    common = {
        "config": data.prompts_config,
        "split": data.prompts_split,
        "column": data.prompts_column,
    }
    own = evaluation.prompts is not None
    check_prompts("data", data, data.prompts)
    check_prompts("eval", evaluation, evaluation.prompts)
    imported = open_imported(data.traces)
    toy = imported is None and is_made_here(data.prompts)
    if imported is not None:
        if data.prompts != DataConfig.prompts:
            raise UserError(
                f"data.traces={data.traces} was imported with its prompts: leave out "
                f"data.prompts={data.prompts}, or name another data.traces"
            )
        train = prompts_of(imported)
        train = take(train, data.num_prompts, config.run.seed) if own else train
    else:
        train = load_prompts(
            data.prompts,
            count=data.num_prompts if own or toy else sys.maxsize,  # both are taken from these
            response_column=data.response_column,
            seed=config.run.seed,
            bad_rows=data.bad_rows,
            left_out=unread,
            **common,
        )
    if own or toy:
        held_out = load_prompts(
            evaluation.prompts or data.prompts, count=evaluation.num_prompts,
            config=evaluation.prompts_config,
            split=evaluation.prompts_split, column=evaluation.prompts_column,
            seed=evaluation.seed, toy_split="eval", key="eval.prompts",
            bad_rows=DROP if data.bad_rows == DROP else NONE, left_out=unread,
        )  # fmt: skip
    else:
        train, held_out = split_by_hash(train, data.eval_share, system_prompt=data.system_prompt)
        print(f"data.eval_share={data.eval_share} holds out {len(held_out)}, leaves {len(train)}")
        train = take(train, data.num_prompts, config.run.seed)
        held_out = take(held_out, evaluation.num_prompts, evaluation.seed)
    return train, held_out


@working("the target's text")
def _generate(
    run: Run,
    plan: GenerationPlan,
    folder: Path,
    label: str,
    engine: Servers | None = None,
    served: Target | None = None,
    alone: bool = False,
) -> Traces:
    """Generate the traces of `plan`. `engine`: of `shared_engine`, None: the run's own for this
    text alone; `served`: another target than the run's; `alone`: in this process, while the others
    do not ask. UserError if every prompt is too long."""
    data, accelerator = run.config.data, run.accelerator
    traces = generate_traces(
        served or run.target, plan, folder, batch_size=data.batch_size,
        rows_per_shard=data.rows_per_shard, label=label,
        servers=(engine or (lambda: _servers(run))) if plan.served else None,
        rank=0 if alone else accelerator.process_index,
        world=1 if alone else accelerator.num_processes,
        barrier=(lambda: None) if alone else run.barrier,
    )  # fmt: skip
    if not traces:
        raise UserError(
            f"{label}: no prompt is left: all {len(plan.prompts)} are too long; name shorter ones, "
            "lower data.max_new_tokens or raise data.max_prompt_tokens"
        )
    note_use(run, folder)
    return traces


@contextlib.contextmanager
def _servers(run: Run) -> Iterator[Sequence[str]]:
    """Yield the addresses of the servers that generate: data.servers, or the run's own."""
    data = run.config.data
    if data.engine == "openai":
        yield data.servers
        return
    with own_server(run, data.engine_options) as server:
        yield [server.url]


@contextlib.contextmanager
def shared_engine(run: Run) -> Iterator[Servers]:
    """Yield what starts the engine of the text: once, for all texts, and where one is missing."""
    with contextlib.ExitStack() as stack:
        started: list[Sequence[str]] = []

        def servers() -> AbstractContextManager[Sequence[str]]:
            if not started:
                started.append(stack.enter_context(_servers(run)))
            return contextlib.nullcontext(started[0])

        yield servers


def writer_of_text(config: Config, device: torch.device | str) -> Target:
    """The target for a command that does nothing but generate: without its weights, where servers
    write the text and the target is not asked for distributions as well."""
    model, data = config.model, config.data
    require_downloaded(model)
    if data.engine != "hf" and not (data.teacher_top_k or data.teacher_samples):
        found = outline(
            model.target, revision=model.target_revision, dtype=model.dtype, device=device,
            trust_remote_code=model.trust_remote_code,
        )  # fmt: skip
        if found.fingerprint and not model.quantization:
            return found
    return load_target(config, device)


def training_folder(run: Run, prompts: list[Prompt]) -> Path:
    """The folder of these prompts' traces: data.traces, else by their identity in the cache."""
    if run.config.data.traces:
        return Path(run.config.data.traces)
    plan = GenerationPlan.from_config(run.config.data, prompts, run.config.run.seed)
    return traces_folder(plan, run.target, run.config.data.cache_dir)


def all_traces(run: Run, train: list[Prompt], held_out: list[Prompt]) -> Traces:
    """Generate all traces and return those to train on, whose contexts are not held out. The
    report's are generated now as well, by all processes, so that errors in its prompts show before
    the training."""
    if run.config.run.stage is None:
        check_room(run.config.eval, run.target.context)
    with shared_engine(run) as engine:
        traces = training_traces(run, train, engine)
        traces = without_held_out(run, traces, train, held_out)
        if run.config.run.stage is None:
            report_traces(run, held_out, engine)
    return traces


def held_out_in(run: Run, prompts: Sequence[Prompt]) -> HeldOut:
    """The held-out prompts, as they are found in text that was rendered elsewhere."""
    data = run.config.data
    return HeldOut(prompts, run.target.tokenizer, data.system_prompt, data.chat_template_kwargs)


def without_held_out(
    run: Run, traces: Traces, train: list[Prompt], held_out: list[Prompt]
) -> Traces:
    """The traces of training turns whose contexts are not held out as well. Such a turn of a
    conversation is generated all the same, since its answer is in the context of later ones.

    UserError where they are more than half of the prompts that are token ids, of which only the
    tokenizer can tell.
    """
    data = run.config.data
    if train[0].ids is None:
        flags = held_out_turns(train, held_out, data.system_prompt)
        places = zip(traces.column("index"), traces.column("turn"), strict=True)
        is_left_out = [flags[index][turn] for index, turn in places]
    else:
        find = held_out_in(run, held_out)
        texts = [find.asked(trace.prompt_ids) for trace in traces]
        is_left_out = [text is not None for text in texts]
        places = traces.column("index")
        shared = [(t, f"row {i + 1}") for t, i in zip(texts, places, strict=True) if t is not None]
        said = count_left_out(shared, len(texts), "data.traces", data.traces)
        if said and run.accelerator.is_main_process:
            print(said)
    if not any(is_left_out):
        return traces
    if all(is_left_out):
        rule = "leaves no training turn that fits and whose context is not held out as well"
        raise UserError(rule, key="eval.prompts", value=run.config.eval.prompts)
    return traces.chosen(np.flatnonzero(~np.array(is_left_out)))


def report_traces(run: Run, held_out: list[Prompt], engine: Servers) -> None:
    """Generate the traces of the report at all of its temperatures. Print how many answers are cut,
    and which defaults of servers are not measured."""
    config = run.config.eval
    own = not is_made_here(config.prompts or run.config.data.prompts)
    for temperature in config.temperatures:
        traces, plan = evaluation_traces(run, held_out, temperature, engine=engine)
        label, key = f"evaluation T={temperature:g}", f"eval.max_new_tokens={plan.max_new_tokens}"
        show_cut(run, label, key, traces, plan.prompts, own)
    show_unmeasured(run)


def contents(
    run: Run,
    drafter: TrainedDrafter,
    traces: Iterable[Trace],
    texts: Mapping[str, PackedBatches] | None = None,
) -> dict[str, str]:
    """Hash what a run is made of; `texts`: raw text by stage."""
    digest = hashlib.sha256(b"[")  # of the JSON of all rows, one row in memory at a time
    for i, t in enumerate(traces):
        row = json.dumps([t.prompt_ids, t.response_ids, t.fixed_ids])
        digest.update(f"{', ' * (i > 0)}{row}".encode())
    digest.update(b"]")
    return {
        "target": str(run.target.fingerprint["weights"]),
        "training text": digest.hexdigest()[:16],
        "starting drafter": weights_hash(drafter),
        **{f"raw text of stage {n}": text.fingerprint for n, text in (texts or {}).items()},
    }


def training_traces(run: Run, prompts: list[Prompt], engine: Servers | None = None) -> Traces:
    """Generate the target's traces of the training prompts, or read them where they are stored."""
    if (imported := open_imported(run.config.data.traces)) is not None:
        return imported_traces(run, imported, prompts)
    plan = GenerationPlan.from_config(run.config.data, prompts, run.config.run.seed)
    traces = _generate(run, plan, training_folder(run, prompts), "training traces", engine)
    key, own = f"data.max_new_tokens={plan.max_new_tokens}", not is_made_here(plan.source)
    show_cut(run, "training text", key, traces, prompts, own)
    return traces


def imported_traces(run: Run, store: TraceStore, prompts: list[Prompt]) -> Traces:
    """Read the rows of these prompts from an imported store. UserError where they are of another
    target."""
    traces, hashes = traces_of_store(run, store), {prompt.hash for prompt in prompts}
    found = [name in hashes for name in traces.column("prompt_hash")]
    traces = traces.chosen(np.flatnonzero(found))
    if run.accelerator.is_main_process:
        drawn = sorted({f"T={temperature:g}" for temperature in traces.column("temperature")})
        print(
            f"training traces: {len(traces)} of {store.folder}, imported from "
            f"{store.identity['log']}, {', '.join(drawn)}; nothing is generated for training"
        )
    show_cut(run, "training text", "", traces, [], own=True)
    return traces


def traces_of_store(run: Run, store: TraceStore) -> Traces:
    """All rows of an imported store. UserError where they are of another target."""
    wanted = json.loads(json.dumps(run.target.fingerprint))
    if store.identity["target"] != wanted:
        if grown := only_grown_eos(store.identity, {**store.identity, "target": wanted}):
            remedy = "import the log again"
            raise UserError(grown, key="data.traces", value=str(store.folder), remedy=remedy)
        found = "; ".join(differences(store.identity["target"], wanted))
        raise UserError(
            f"data.traces={store.folder} was imported for another target ({found}): import the log "
            "for this one"
        )
    return store.load()


def evaluation_traces(
    run: Run,
    prompts: list[Prompt],
    temperature: float,
    served: Target | None = None,
    engine: Servers | None = None,
    alone: bool = False,
) -> tuple[list[Trace], GenerationPlan]:
    """Generate traces of the held-out prompts at one temperature, with look-ahead for the engine's
    counters; by the target `served` where it is given, else by the run's own, in data.engine.
    `alone`: in this process, while the others do not ask."""
    evaluation = run.config.eval
    if not prompts:
        raise UserError(
            f"data.eval_share={run.config.data.eval_share} holds no prompt out for the report: "
            "give another share, or a set of its own as eval.prompts"
        )
    check_room(evaluation, (served or run.target).context)
    engine_name = run.config.data.engine
    held_out_from = run.config.data.prompts if prompts[0].ids is None else run.config.data.traces
    plan = dataclasses.replace(
        GenerationPlan.from_config(run.config.data, prompts, evaluation.seed),
        source=evaluation.prompts or f"held out from {held_out_from}",
        served=engine_name if served is None and engine_name != "hf" else False,
        temperatures=(temperature,), top_k=evaluation.top_k, top_p=evaluation.top_p,
        max_new_tokens=evaluation.max_new_tokens, samples_per_prompt=1, stop_strings=(),
        lookahead=max(evaluation.K, tree_depth(evaluation)), teacher_top_k=0, teacher_samples=0,
    )  # fmt: skip
    folder = traces_folder(plan, served or run.target, run.config.data.cache_dir)
    label = f"evaluation traces T={temperature:g}" + ", trained target" * (served is not None)
    # few rows, which are read many times
    return list(_generate(run, plan, folder, label, engine, served, alone)), plan


def held_out_texts(run: Run, dev: Sequence[Trace], prompts: list[Prompt]) -> list[Trace]:
    """The held-out training texts `dev`, and the texts of the report, where there is one."""
    found = list(dev)
    if run.config.run.stage is None:
        for temperature in run.config.eval.temperatures:
            found += evaluation_traces(run, prompts, temperature)[0]
    return found


def check_texts(run: Run, drafter: TrainedDrafter, prompts: list[Prompt]) -> None:
    """Refuse held-out prompts to which the drafter cannot draft to the end, before training."""
    if run.config.run.stage is None and isinstance(drafter, CausalLMDrafter):
        for temperature in run.config.eval.temperatures:
            check_context(drafter, evaluation_traces(run, prompts, temperature)[0], run.config.eval)


def describe(config: Config) -> list[Prompt]:
    """Print what a run would read and write, without loading a model. Returns its training
    prompts."""
    check_model_pair(config)
    check_places(config)
    train, held_out = choose_prompts(config)
    data = config.data
    rows = sum(len(list(user_turns(p))) for p in train) * data.samples_per_prompt
    prompt_tokens = sum(len(p.ids or str(p.messages or p.text)[::4]) for p in train)
    prompt_tokens /= max(1, len(train))
    size = estimate_bytes(
        rows, prompt_tokens, data.max_new_tokens, data.teacher_top_k, data.teacher_samples
    )
    print(f"prompts: {len(train)} for training, {len(held_out)} for evaluation")
    if (imported := open_imported(data.traces)) is not None:
        print(f"traces: those of {len(train)} prompts in {imported.folder}; none is generated")
    else:
        print(f"traces: {rows} rows, about {size / 1e6:.1f} MB in {data.traces or data.cache_dir}")
    return train
