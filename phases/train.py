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

from data.batches import longest_text
from data.packing import PackedBatches, check_separation
from data.prompts import Prompt
from data.render import fixed_response_ids
from data.split import HeldOut
from data.trace_rows import column
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.load import load_drafter
from eval.config import EvalConfig, trees_of
from phases.cut_answers import answer_format
from phases.help import composed
from phases.run import Run
from phases.stage import RunText, StageRun, settings_of
from recipes.base import Recipe, Stage, Start, presets
from recipes.common.config import Config
from recipes.common.draft_size import SizeSearch, TrialResult
from trainer.errors import UserError, excerpt
from trainer.lock import lock
from trainer.loop import FitResult
from trainer.progress import working
from trainer.setup import checkpointing_of

TOY_KEYS = ("data.num_prompts", "data.max_new_tokens", "trainer.max_steps", "trainer.lr")
TOY_ENDINGS = ("_steps", "_lr", "_preset", "context")  # and keys of the method that end so
LARGE = 10**9  # parameters of a target for which these keys, as the recipe has them, are too small


def settings_of_the_toy(config: Config, num_parameters: int) -> list[str]:
    """`key=value` of the settings that a recipe chose for the toy, of a run with a large target."""
    if num_parameters <= LARGE or "published" not in presets(config.recipe):
        return []
    own, published = composed(config.recipe), composed(config.recipe, "published")
    names = [f.name for f in dataclasses.fields(config.method) if f.name.endswith(TOY_ENDINGS)]
    if config.model.drafter is not None:  # a stage that would make it is left out
        names = [name for name in names if not name.startswith("base_")]
    found = []
    for key in (*TOY_KEYS, *(f"method.{name}" for name in names)):
        section, _, name = key.partition(".")
        value, toys, papers = (
            getattr(getattr(one, section), name) for one in (config, own, published)
        )
        # null: as another key that is named, or no preset
        if value == toys != papers and (value is not None or name.endswith("_preset")):
            value = "null" if value is None else value
            found.append(f"{key}={value}")
    return found


def deeper_than_trained(config: EvalConfig, steps: int) -> tuple[int, str] | None:
    """The depth of drafts of the report that reach deeper than the `steps` over which training
    unrolls the drafter, and a sentence on them; None where there are none."""
    K = config.K
    drafted = [(K, f"eval.K={K}")]
    drafted += [(tree.deepest(K), f"eval.tree={text}") for text, tree in trees_of(config)]
    depth, name = max(drafted)
    if depth <= steps:
        return None
    return depth, (
        f"{name} drafts {depth} tokens deep, training unrolls {steps}: the depths beyond are never "
        "trained"
    )


def prepare(
    run: Run, kind: type[Recipe], prompts: list[Prompt]
) -> tuple[Recipe, TrainedDrafter | None]:
    """Make the recipe and the starting drafter, None where the recipe builds one from the traces,
    and check all settings that can be checked before any text is generated."""
    model, engine = run.config.model, run.config.eval.engine
    # a trained drafter may leave out some stages
    given = None if model.drafter is None else _given_drafter(run, kind, model.drafter)
    recipe = kind(run.config.method, run.target, given)
    num_parameters = run.target.model.num_parameters()
    toy = settings_of_the_toy(run.config, num_parameters)
    if toy and run.accelerator.is_main_process:
        print(
            f"{', '.join(toy)}: recipe={run.config.recipe} has this for the toy, and "
            f"{model.target} has {num_parameters / 1e9:.1f} B parameters: set them, or begin with "
            "preset=published"
        )
    if engine != "own" and recipe.unserved is not None:
        raise UserError(f"eval.engine={engine}: {recipe.unserved}")
    if run.config.trainer.lora_rank:
        if recipe.no_lora is not None:
            raise UserError(f"trainer.lora_rank must be 0: {recipe.no_lora}")
        if model.drafter is None:
            raise UserError(
                "trainer.lora_rank adapts trained weights, of which a fresh drafter has none: name "
                "one with model.drafter, or set it to 0"
            )
    if given is not None:
        _check_checkpointing(run, recipe, given)
    unroll = recipe.unroll
    deeper = deeper_than_trained(run.config.eval, unroll[1]) if unroll else None
    if unroll and deeper and run.accelerator.is_main_process:
        print(f"warning: {deeper[1]}; set {unroll[0]} to {deeper[0]}")
    for stage in chosen_stages(run, recipe):
        _check_text(run, stage, prompts)
    if run.config.trainer.pack_tokens:
        _check_packing(run, recipe)
        if isinstance(given, CausalLMDrafter):
            check_separation(given.model, "set trainer.pack_tokens=0")
    _check_settings(run, recipe)
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


def _check_text(run: Run, stage: Stage, prompts: list[Prompt]) -> None:
    """Refuse a stage that needs text which the prompts and the traces do not hold."""
    data = run.config.data
    if stage.data.mix.get("fixed") and stage.row != "control":
        answers = answer_format(run.target, data)
        missing = sum(fixed_response_ids(p, answers) is None for p in prompts)
        if missing:
            raise UserError(
                f"method.data_mix asks for fixed responses, {missing} of {len(prompts)} prompts"
                " have none: name data.response_column or set fixed to 0"
            )
    if stage.data.teacher and not (data.teacher_top_k or data.teacher_samples):
        raise UserError(
            "the compressed teacher is stored with the traces: set data.teacher_top_k and "
            "data.teacher_samples, got 0 and 0"
        )


def _check_packing(run: Run, recipe: Recipe) -> None:
    """Refuse stages that cannot pack texts: text that a drafter is still to write has no length."""
    for stage in chosen_stages(run, recipe):
        if not stage.packs:
            raise UserError(
                f"trainer.pack_tokens must be 0: recipe={run.config.recipe} reads a text a row"
            )
        sources = [name for name, share in stage.data.mix.items() if share]
        if sources not in (["target"], ["fixed"]):
            raise UserError(
                "trainer.pack_tokens packs stored texts of one source, got "
                f"{' and '.join(sources)} in stage {stage.name}: set it to 0"
            )
    check_separation(run.target.model, "set trainer.pack_tokens=0")


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
    _check_checkpointing(run, recipe, drafter)
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
            check_context(base, stage, text.traces, run.config.data.max_new_tokens)
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


def check_context(
    drafter: CausalLMDrafter, stage: Stage, traces: Sequence[Trace], max_new_tokens: int
) -> None:
    """Refuse a stage whose texts, those that the drafter is to write included, may be longer than
    its context."""
    longest = longest_text(traces, stage.data.mix, max_new_tokens)
    if longest > drafter.context:
        raise UserError(
            f"ContextError: model.drafter sees {drafter.context} tokens, the longest text of stage "
            f"{stage.name} may have {longest}: lower data.max_prompt_tokens or "
            "data.max_new_tokens, or take another drafter"
        )


def _check_checkpointing(run: Run, recipe: Recipe, drafter: TrainedDrafter) -> None:
    """Refuse trainer.gradient_checkpointing where a stage trains `drafter` as it is, and that does
    not have it."""
    for stage in chosen_stages(run, recipe):
        if stage.prepare is Stage.prepare and settings_of(run, stage).gradient_checkpointing:
            checkpointing_of(drafter)


def _check_settings(run: Run, recipe: Recipe) -> None:
    for stage in chosen_stages(run, recipe):
        settings_of(run, stage)
