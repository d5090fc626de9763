"""The second phase of a run: train the stages of a recipe."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from data.packing import PackedBatches, check_separation
from data.prompts import Prompt
from data.split import HeldOut
from data.trace_rows import column
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.load import load_drafter
from phases.check import (
    check_packing,
    check_recipe,
    check_stage_context,
    check_text,
    deeper_than_trained,
    settings_of_the_toy,
)
from phases.run import Run
from phases.source import RunText
from phases.stage import StageRun, settings_of
from phases.uses import note_use
from recipes.base import Recipe, Stage, Start
from recipes.common.draft_size import SizeSearch, TrialResult
from trainer.errors import UserError, excerpt
from trainer.lock import lock
from trainer.loop import FitResult
from trainer.progress import working
from trainer.setup import checkpointing_of


def prepare(
    run: Run, kind: type[Recipe], prompts: list[Prompt]
) -> tuple[Recipe, TrainedDrafter | None]:
    """Make the recipe and the starting drafter, None where the recipe builds one from the traces,
    and check all settings that can be checked before any text is generated."""
    config, model = run.config, run.config.model
    # a trained drafter may leave out some stages
    given = None if model.drafter is None else _given_drafter(run, kind, model.drafter)
    recipe = kind(config.method, run.target, given)
    num_parameters = run.target.model.num_parameters()
    toy = settings_of_the_toy(config, num_parameters)
    if toy and run.accelerator.is_main_process:
        print(
            f"{', '.join(toy)}: recipe={config.recipe} has this for the toy, and "
            f"{model.target} has {num_parameters / 1e9:.1f} B parameters: set them, or begin with "
            "preset=published"
        )
    check_recipe(config, recipe)
    stages = chosen_stages(run, recipe)
    _check_stages(run, stages, given)
    unroll = recipe.unroll
    deeper = deeper_than_trained(config.eval, unroll[1]) if unroll else None
    if unroll and deeper and run.accelerator.is_main_process:
        print(f"warning: {deeper[1]}; set {unroll[0]} to {deeper[0]}")
    for stage in stages:
        check_text(config, run.target, stage, prompts)
    if config.trainer.pack_tokens:
        check_packing(config, run.target, stages)
        if isinstance(given, CausalLMDrafter):
            check_separation(given.model, "set trainer.pack_tokens=0")
    if given is None and not recipe.builds_from_traces:
        return recipe, build(run, recipe, RunText([], [], [], {}))
    return recipe, given


@working("loading the drafter")
def _given_drafter(run: Run, recipe: type[Recipe], name: str) -> TrainedDrafter:
    """Load model.drafter."""
    model = run.config.model
    drafter = load_drafter(
        name,
        run.target,
        revision=model.drafter_revision,
        trust_remote_code=model.trust_remote_code,
    )
    if drafter.acceptance is not None and not recipe.trains_acceptance:
        drafter.acceptance = None
        print(
            f"{name}: its acceptance head was trained for the present weights and is left out; "
            "recipe=specdecpp trains one for the new weights"
        )
    return drafter


@working("reading raw text")
def raw_texts(run: Run, recipe: Recipe) -> dict[str, PackedBatches]:
    """Tokenise the raw text of every stage that reads some, as far as the stage reads. Returns it
    by stage."""
    accelerator, found = run.accelerator, {}
    for stage in recipe.stages():
        if stage.data.text is None:
            continue
        settings = settings_of(run, stage)
        parts = settings.context_parallel_size
        world = accelerator.num_processes // parts
        rows = settings.max_steps * settings.gradient_accumulation_steps * settings.batch_size
        files = stage.data.text.load(
            run.target, rows * world * stage.data.text.context, run.config.data.cache_dir,
            is_main=accelerator.is_main_process, barrier=run.barrier,
        )  # fmt: skip
        for file in files:
            note_use(run, file.folder)
        found[stage.name] = PackedBatches(
            files, stage.data.text, settings.batch_size, run.config.run.seed,
            accelerator.process_index // parts, world,
        )  # fmt: skip
    return found


def build(
    run: Run,
    recipe: Recipe,
    text: RunText,
) -> TrainedDrafter:
    """Build a fresh drafter, the same on every rank and when the run is resumed."""
    if recipe.size_search is not None:
        _search_size(run, recipe, recipe.size_search, text)
    torch.manual_seed(run.config.run.seed)
    drafter = recipe.build(text.traces)
    _check_stages(run, chosen_stages(run, recipe), drafter)
    return drafter


def _search_size(run: Run, recipe: Recipe, search: SizeSearch, text: RunText) -> None:
    """Choose the drafter's size: train the first stage shortly for each shape, in a folder that
    runs of this configuration share."""
    first = recipe.stages()[0]
    if not text.dev:
        raise UserError("method.search_parameters compares on held-out prompts: name more prompts")
    made_of = [run.config.identity(), column(text.traces, "key"), run.target.fingerprint]
    made_of += [raw.fingerprint for raw in text.raw.values()]
    digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]
    folder = Path(run.config.data.cache_dir) / "size_search" / digest
    folder.mkdir(parents=True, exist_ok=True)
    there = dataclasses.replace(run, folder=folder)

    def trial(number: int, name: str, drafter: CausalLMDrafter) -> TrialResult:
        stage = dataclasses.replace(
            first, name=f"size {name}", overrides={**first.overrides, **search.overrides}
        )
        raw = {stage.name: text.raw[first.name]} if first.name in text.raw else {}
        settings = settings_of(there, stage)
        prepared = stage.prepare(
            Start(drafter, text.train, {}, settings.max_steps, run.config.data.max_new_tokens)
        )
        own = dataclasses.replace(text, raw=raw)
        last = StageRun(there, stage, number, prepared, own).fit().series[-1]
        alpha, tokens_per_round = last["alpha"], last["tokens_per_round"]
        assert isinstance(alpha, float) and isinstance(tokens_per_round, float)  # noqa: PT018
        return TrialResult(alpha, tokens_per_round)

    accelerator = run.accelerator
    said = (
        f"sizes are being compared in {folder} by another process: wait for it, or use another "
        "data.cache_dir"
    )
    with contextlib.ExitStack() as held:
        if accelerator.is_main_process and not search.is_done(folder):
            held.enter_context(lock(folder / ".lock", said))
        search.run(folder, trial, run.config.eval.K, accelerator.is_main_process, run.barrier)


def chosen_stages(run: Run, recipe: Recipe) -> list[Stage]:
    """List the stages to train: all, or run.stage and those whose weights it starts from."""
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


@working("training")
def train_stages(
    run: Run,
    recipe: Recipe,
    base: TrainedDrafter,
    text: RunText,
    held_out: HeldOut | None = None,
) -> tuple[dict[str, TrainedDrafter], dict[str, FitResult]]:
    """Train every stage, starting with the drafter `base`. `held_out`: turns that a stage which
    brings text of its own leaves out. Returns the drafters that the report has a row for, and the
    result of each stage."""
    if isinstance(base, CausalLMDrafter):
        for stage in chosen_stages(run, recipe):
            check_stage_context(base, stage, text.traces, run.config.data.max_new_tokens)
    if not text.dev and run.accelerator.is_main_process:
        name = excerpt(text.traces[0].conversation_id)
        print(
            f"warning: all training text has the conversation_id {name}, so none is held out: the "
            "last checkpoint is taken, and nothing is calibrated"
        )
    rows: dict[str, TrainedDrafter] = {}
    results: dict[str, FitResult] = {}
    current = base
    names = [stage.name for stage in recipe.stages()]
    for stage in chosen_stages(run, recipe):
        drafter = copy.deepcopy(base if stage.start == "base" else current)
        if recipe.unroll is not None:
            drafter.trained_depth = recipe.unroll[1]
        settings = settings_of(run, stage)
        torch.manual_seed(run.config.run.seed)  # whether the stage before ran now or earlier
        start = Start(
            drafter, text.train, {"before": base, **rows}, settings.max_steps,
            run.config.data.max_new_tokens, held_out,
        )  # fmt: skip
        current = stage.prepare(start)
        number = names.index(stage.name)
        results[stage.name] = StageRun(run, stage, number, current, text).fit()
        if stage.row:
            rows[stage.row] = current
    return rows, results


def _check_stages(run: Run, stages: Sequence[Stage], drafter: TrainedDrafter | None) -> None:
    """Refuse settings that a stage cannot train with, and trainer.gradient_checkpointing where one
    trains `drafter` as it is, and that does not have it."""
    for stage in stages:
        settings = settings_of(run, stage)
        plain = stage.prepare is Stage.prepare
        if drafter is not None and plain and settings.gradient_checkpointing:
            checkpointing_of(drafter)
