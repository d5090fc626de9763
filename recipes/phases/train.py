"""The second phase of a run: train the stages of a recipe."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from data.batches import Batches, preview
from data.cache import CachedModel
from data.decode import Request, decode
from data.features import FeaturesPlan, FeaturesStore, features_folder, write_features
from data.kept import KeptLogits
from data.packing import PackedBatches, PackedTraces, check_separation
from data.prompts import (
    Prompt,
    fixed_response_ids,
)
from data.sampling import Sampling, row_key
from data.target import Target
from data.traces import Trace
from drafters.load import load_drafter
from recipes.base import Context, Stage, TargetRequest
from recipes.phases import shared
from recipes.phases.dev import dev_evaluation, split_dev
from recipes.phases.run import Run
from trainer.compiled import compiled
from trainer.config import TrainerConfig, UserError
from trainer.lock import lock
from trainer.loop import FitResult, fit
from trainer.tracking import Tracker


def prepare(run: Run, recipe: Any, prompts: list[Prompt]) -> Any:
    """The starting drafter, None where the recipe builds one from the traces. Refuses what can be
    known before any text is generated."""
    data = run.config.data
    for stage in chosen_stages(run, recipe):
        if stage.needs.mix.get("fixed") and stage.row != "control":
            missing = sum(fixed_response_ids(p, run.target.tokenizer) is None for p in prompts)
            if missing:
                raise UserError(
                    f"method.data_mix asks for fixed responses, {missing} of {len(prompts)} prompts"
                    " have none: name data.response_column or set fixed to 0"
                )
        if stage.needs.teacher and not (data.teacher_top_k or data.teacher_samples):
            raise UserError(
                "the compressed teacher is stored with the traces: set data.teacher_top_k and "
                "data.teacher_samples, got 0 and 0"
            )
    if run.config.trainer.pack_tokens:
        _check_packing(run, recipe)
    model, engine = run.config.model, run.config.eval.engine
    if engine != "own" and (reason := getattr(recipe, "unserved", None)):
        raise UserError(f"eval.engine={engine}: {reason}")
    if run.config.trainer.lora_rank:
        if reason := getattr(recipe, "no_lora", None):
            raise UserError(f"trainer.lora_rank must be 0: {reason}")
        if model.drafter is None:
            raise UserError(
                "trainer.lora_rank adapts trained weights, of which a fresh drafter has none: name "
                "one with model.drafter, or set it to 0"
            )
    if model.drafter is None:
        _check_settings(run, recipe)
        return None if getattr(recipe, "builds_from_traces", False) else build(run, recipe, [])
    drafter = load_drafter(
        model.drafter,
        run.target,
        revision=model.drafter_revision,
        trust_remote_code=model.trust_remote_code,
    )
    if drafter.acceptance is not None and not getattr(recipe, "trains_acceptance", False):
        drafter.acceptance = None
        print(
            f"{model.drafter}: its acceptance head was trained for the weights as they are and is "
            "left out; recipe=specdecpp trains one for the new ones"
        )
    recipe.accept(drafter)
    if run.config.trainer.pack_tokens and not drafter.target_layers:
        check_separation(drafter.model, "set trainer.pack_tokens=0")
    _check_settings(run, recipe)  # a trained drafter may leave out some stages
    return drafter


def _check_packing(run: Run, recipe: Any) -> None:
    """Of stored text only: what a drafter is still to write has no length."""
    if not getattr(recipe, "packs", False):
        raise UserError(
            f"trainer.pack_tokens must be 0: recipe={run.config.recipe} reads a text a row"
        )
    for stage in chosen_stages(run, recipe):
        sources = [name for name, share in stage.needs.mix.items() if share]
        if sources not in (["target"], ["fixed"]):
            raise UserError(
                "trainer.pack_tokens packs stored texts of one source, got "
                f"{' and '.join(sources)} in stage {stage.name}: set it to 0"
            )
    check_separation(run.target.model, "set trainer.pack_tokens=0")


def raw_texts(run: Run, recipe: Any) -> dict[str, PackedBatches]:
    """The raw text of every stage that asks for some, by stage, tokenised as far as it is read."""
    accelerator, found = run.accelerator, {}
    for stage in recipe.stages():
        if stage.needs.text is None:
            continue
        settings, world = _settings(run, stage), accelerator.num_processes
        rows = settings.max_steps * settings.gradient_accumulation_steps * settings.batch_size
        files = stage.needs.text.load(
            run.target, rows * world * stage.needs.text.context, run.config.data.cache_dir,
            is_main=accelerator.is_main_process, barrier=run.barrier,
        )  # fmt: skip
        found[stage.name] = PackedBatches(
            files, stage.needs.text, settings.batch_size, run.config.run.seed,
            accelerator.process_index, world,
        )  # fmt: skip
    return found


def build(
    run: Run, recipe: Any, traces: list[Trace], texts: Mapping[str, PackedBatches] | None = None
) -> Any:
    """A fresh drafter; the same one again on every rank and on a second start."""
    if getattr(recipe, "size_search", None) is not None:
        _search_size(run, recipe, traces, texts or {})
    torch.manual_seed(run.config.run.seed)
    return recipe.build(traces)


def _search_size(
    run: Run, recipe: Any, traces: list[Trace], texts: Mapping[str, PackedBatches]
) -> None:
    """Short trainings of the first stage, in a folder that runs of this configuration share."""
    search, first = recipe.size_search, recipe.stages()[0]
    train, dev = split_dev(traces, run.config.run.seed)
    if not dev:
        raise UserError("method.search_parameters compares on held-out prompts: name more prompts")
    made_of = [run.config.identity(), [t.key for t in traces], run.target.fingerprint]
    made_of += [text.fingerprint for text in texts.values()]
    digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]
    folder = Path(run.config.data.cache_dir) / "size_search" / digest
    folder.mkdir(parents=True, exist_ok=True)
    there = dataclasses.replace(run, folder=folder)

    def trial(number: int, name: str, drafter: Any) -> dict[str, Any]:
        stage = dataclasses.replace(
            first, name=f"size {name}", overrides={**first.overrides, **search.overrides}
        )
        found = {stage.name: texts[first.name]} if first.name in texts else {}
        drafter = recipe.enter(stage, drafter, stage.overrides["max_steps"])
        return _fit_stage(there, recipe, stage, number, drafter, train, dev, found).series[-1]

    accelerator = run.accelerator
    said = (
        f"sizes are being compared in {folder} by another process: wait for it, or use another "
        "data.cache_dir"
    )
    with contextlib.ExitStack() as held:
        if accelerator.is_main_process and not search.is_done(folder):
            held.enter_context(lock(folder / ".lock", said))
        search.run(folder, trial, run.config.eval.K, accelerator.is_main_process, run.barrier)


def chosen_stages(run: Run, recipe: Any) -> list[Stage]:
    """All of them, or the one asked for and those whose weights it starts from."""
    stages, wanted = recipe.stages(), run.config.run.stage
    if wanted is None:
        return stages
    known = [stage.name for stage in stages]
    if wanted not in known:
        raise UserError(f"run.stage must be one of {', '.join(known)}, got {wanted!r}")
    first = last = known.index(wanted)
    while first and stages[first].start == "previous":
        first -= 1
    return stages[first : last + 1]


def train_stages(
    run: Run,
    recipe: Any,
    base: Any,
    traces: list[Trace],
    texts: Mapping[str, PackedBatches] | None = None,
) -> tuple[dict[str, Any], dict[str, FitResult]]:
    """Train every stage from the drafter `base`; returns the drafters that the report has a row
    for, and what each stage reached. `texts`: of `raw_texts`."""
    check_context(base, traces)
    train, dev = split_dev(traces, run.config.run.seed)
    rows: dict[str, Any] = {}
    results: dict[str, FitResult] = {}
    current = base
    names = [stage.name for stage in recipe.stages()]
    for stage in chosen_stages(run, recipe):
        drafter = copy.deepcopy(base if stage.start == "base" else current)
        if hasattr(recipe, "observe"):
            recipe.observe(train, {"before": base, **rows})
        if hasattr(recipe, "enter"):
            torch.manual_seed(run.config.run.seed)  # whether the stage before ran or was found done
            drafter = recipe.enter(stage, drafter, _settings(run, stage).max_steps)
        results[stage.name] = _fit_stage(
            run, recipe, stage, names.index(stage.name), drafter, train, dev, texts or {}
        )
        current = drafter
        if stage.row:
            rows[stage.row] = drafter
    return rows, results


def check_context(drafter: Any, traces: list[Trace]) -> None:
    """A drafter with a context of its own must see the whole of every text."""
    longest = max(len(t.prompt_ids) + len(t.response_ids) for t in traces)
    context = getattr(drafter, "context", longest)
    if longest > context:
        raise UserError(
            f"ContextError: model.drafter sees {context} tokens, the longest text has {longest}: "
            "lower data.max_prompt_tokens or data.max_new_tokens, or take another drafter"
        )


def _check_settings(run: Run, recipe: Any) -> None:
    for stage in chosen_stages(run, recipe):
        _settings(run, stage)


def _settings(run: Run, stage: Stage) -> TrainerConfig:
    try:
        return dataclasses.replace(run.config.trainer, **stage.overrides)
    except UserError as error:  # a stage may be shorter than the recipe's last one
        raise UserError(f"stage {stage.name} of recipe={run.config.recipe}: {error}") from error


def _fit_stage(
    run: Run,
    recipe: Any,
    stage: Stage,
    number: int,
    drafter: Any,
    train: list[Trace],
    dev: list[Trace],
    texts: Mapping[str, PackedBatches],
) -> FitResult:
    config, accelerator, target = run.config, run.accelerator, run.target
    settings, needs = _settings(run, stage), stage.needs
    if stage.row == "control" and any(not t.fixed_ids for t in train):
        needs = dataclasses.replace(needs, mix={"target": 1.0})
        if accelerator.is_main_process:
            print("control: cross-entropy on the target's text, the prompts have no own responses")
    micro_steps = settings.max_steps * settings.gradient_accumulation_steps
    if stage.name in texts:
        batches = texts[stage.name]
    elif settings.pack_tokens:
        (source,) = (name for name, share in needs.mix.items() if share)
        batches = PackedTraces(
            train, source, settings.pack_tokens, settings.batch_size, config.run.seed,
            needs.teacher, accelerator.process_index, accelerator.num_processes,
        )  # fmt: skip
    else:
        batches = Batches(
            train,
            needs.mix,
            settings.batch_size,
            seed=config.run.seed,
            per=needs.per,
            ramp=int(needs.ramp_share * micro_steps),
            teacher=needs.teacher,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
        )
    recipe.begin(stage, config.data.max_new_tokens)
    kept = KeptLogits(target, train, needs.mix)
    fits = kept.fits()

    store = stored_features(run, recipe.target_request(batches.at(0), 0), train)

    def outputs(batch: Any, step: int) -> Any:
        request = recipe.target_request(batch, step)
        if request is None:
            return None
        found = None
        if store is not None:
            found = store.outputs(batch, accelerator.device)
        elif fits and request.logits and not request.layers:
            found = kept.outputs(batch)
        return found or target.outputs(
            batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits,
            project_later=True,
        )  # fmt: skip

    def context(step: int, batch: Any) -> Context:
        def generate(
            prompts: list[list[int]], temperature: float, max_new_tokens: int, stream: int
        ) -> list[list[int]]:
            return sample_drafter(
                accelerator.unwrap_model(recipe.drafter), prompts, target, temperature,
                max_new_tokens,
                seed=hash((config.run.seed, stream, accelerator.process_index)),
            )  # fmt: skip

        def stored_outputs() -> Any:
            return outputs(batch.to(accelerator.device), step)

        return Context(batch, generate, stored_outputs, config.run.seed, run.folder)

    evaluate = dev_evaluation(run, dev, drafter, chooses=needs.text is None)
    if hasattr(recipe, "evaluated"):
        evaluate = recipe.evaluated(evaluate, dev)
    folder = run.folder / "stages" / f"{number}-{stage.name}"
    made_by = recipe.made_by(stage) if hasattr(recipe, "made_by") else None
    kept_at = None
    if made_by is not None and settings.resume == "auto":
        kept_at = shared.place(run, made_by, settings, drafter, [*train, *dev])
        shared.take(run, kept_at, folder)
    tracker = Tracker(
        settings,
        run.folder,
        run.folder.name,
        config.to_dict(),
        accelerator.is_main_process,
        stage=stage.name,
    )
    if accelerator.is_main_process:
        print(
            f"stage {stage.name}: {settings.max_steps} steps of {settings.batch_size} rows from "
            f"{needs.mix if needs.text is None else dict(needs.text.shares)}"
        )
    try:
        with compiled(settings.compile, target.model):
            result = fit(
                recipe=recipe, drafter=drafter, batches=batches, evaluate=evaluate, outputs=outputs,
                config=settings, folder=folder, seed=config.run.seed, accelerator=accelerator,
                tracker=tracker, context=context, meet=target.meet,
                describe=lambda batch: preview(batch, target.tokenizer),
            )  # fmt: skip
    finally:
        tracker.finish()
    if kept_at is not None:
        shared.leave(run, folder, kept_at)
    return result


def stored_features(
    run: Run, request: TargetRequest | None, traces: list[Trace]
) -> FeaturesStore | None:
    """The target's states of the training text, written once; None where the target runs live."""
    data, accelerator = run.config.data, run.accelerator
    if data.features == "live":
        return None
    if request is None or request.logits or not request.layers:
        raise UserError(
            f"data.features=cached stores hidden states, recipe={run.config.recipe} asks for none: "
            "leave it at live"
        )
    plan = FeaturesPlan(request.layers, data.features_dtype)
    return write_features(
        run.target, traces, plan, features_folder(run.target, traces, plan, data.cache_dir),
        batch_size=data.batch_size, rank=accelerator.process_index,
        world=accelerator.num_processes, barrier=run.barrier,
    )  # fmt: skip


def sample_drafter(
    drafter: Any,
    prompts: list[list[int]],
    target: Target,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> list[list[int]]:
    """On-policy text: the drafter's own samples, no top-k or top-p, dropout off, EOS kept."""
    training = drafter.training
    drafter.eval()
    requests = [
        Request(ids, row_key(seed, ids, index), Sampling(temperature), index)
        for index, ids in enumerate(prompts)
    ]
    drawn: dict[int, list[int]] = {}
    for row in decode(
        CachedModel(drafter.model), requests, max_new_tokens=max_new_tokens, eos_ids=target.eos_ids,
        batch_size=len(prompts), vocab_size=target.vocab_size,
    ):  # fmt: skip
        drawn[row.request.tag] = row.response_ids
    drafter.train(training)
    return [drawn[i] for i in range(len(prompts))]
