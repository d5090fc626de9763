"""The second phase of a run: train the stages of a recipe."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from data.batches import Batch, Batches, preview
from data.features import FeaturesStore, write_features
from data.features_layout import FeaturesPlan, features_folder
from data.packing import PackedBatches, PackedTraces, check_separation
from data.prompts import Prompt
from data.render import fixed_response_ids
from data.teacher import Teacher
from data.traces import Trace
from drafters.load import load_drafter
from phases import shared
from phases.dev import dev_evaluation, split_dev
from phases.run import Run
from recipes.base import Context, Needs, Recipe, Stage, Start
from recipes.common.draft_size import SizeSearch
from target.cache import CachedModel
from target.decode import Request, decode
from target.model import Target, TargetOutputs, TargetRequest
from target.sampling import Sampling, row_key
from trainer.compiled import compiled
from trainer.config import TrainerConfig, UserError
from trainer.lock import lock
from trainer.loop import Fit, FitResult, fit
from trainer.redaction import redacted
from trainer.tracking import Tracker


def prepare(run: Run, recipe: Recipe, prompts: list[Prompt]) -> Any:
    """The starting drafter, None where the recipe builds one from the traces. Refuses what can be
    known before any text is generated."""
    model, engine = run.config.model, run.config.eval.engine
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
    # a trained drafter may leave out some stages, so it comes before what the stages ask for
    drafter = None if model.drafter is None else _given_drafter(run, recipe, model.drafter)
    for stage in chosen_stages(run, recipe):
        _check_text(run, stage, prompts)
    if run.config.trainer.pack_tokens:
        _check_packing(run, recipe)
        if drafter is not None and not drafter.target_layers:
            check_separation(drafter.model, "set trainer.pack_tokens=0")
    _check_settings(run, recipe)
    if drafter is None and not recipe.builds_from_traces:
        return build(run, recipe, [])
    return drafter


def _given_drafter(run: Run, recipe: Recipe, name: str) -> Any:
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
            f"{name}: its acceptance head was trained for the weights as they are and is left out; "
            "recipe=specdecpp trains one for the new ones"
        )
    recipe.accept(drafter)
    return drafter


def _check_text(run: Run, stage: Stage, prompts: list[Prompt]) -> None:
    """Refuse a stage whose text will not be there."""
    data = run.config.data
    if stage.data.mix.get("fixed") and stage.row != "control":
        missing = sum(fixed_response_ids(p, run.target.tokenizer) is None for p in prompts)
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
    """Refuse what cannot be packed: text that a drafter is still to write has no length."""
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


def raw_texts(run: Run, recipe: Recipe) -> dict[str, PackedBatches]:
    """The raw text of every stage that asks for some, by stage, tokenised as far as it is read."""
    accelerator, found = run.accelerator, {}
    for stage in recipe.stages():
        if stage.data.text is None:
            continue
        settings, world = _settings(run, stage), accelerator.num_processes
        rows = settings.max_steps * settings.gradient_accumulation_steps * settings.batch_size
        files = stage.data.text.load(
            run.target, rows * world * stage.data.text.context, run.config.data.cache_dir,
            is_main=accelerator.is_main_process, barrier=run.barrier,
        )  # fmt: skip
        found[stage.name] = PackedBatches(
            files, stage.data.text, settings.batch_size, run.config.run.seed,
            accelerator.process_index, world,
        )  # fmt: skip
    return found


def build(
    run: Run, recipe: Recipe, traces: list[Trace], texts: Mapping[str, PackedBatches] | None = None
) -> Any:
    """A fresh drafter; the same one again on every rank and on a second start."""
    if recipe.size_search is not None:
        _search_size(run, recipe, recipe.size_search, traces, texts or {})
    torch.manual_seed(run.config.run.seed)
    return recipe.build(traces)


def _search_size(
    run: Run,
    recipe: Recipe,
    search: SizeSearch,
    traces: list[Trace],
    texts: Mapping[str, PackedBatches],
) -> None:
    """Train the first stage shortly, in a folder that runs of this configuration share."""
    first = recipe.stages()[0]
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
        settings = _settings(there, stage)
        drafter = stage.prepare(
            Start(drafter, train, {}, settings.max_steps, run.config.data.max_new_tokens)
        )
        return StageRun(there, stage, number, drafter, train, dev, found).fit().series[-1]

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
    recipe: Recipe,
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
        settings = _settings(run, stage)
        torch.manual_seed(run.config.run.seed)  # whether the stage before ran or was found done
        start = Start(
            drafter, train, {"before": base, **rows}, settings.max_steps,
            run.config.data.max_new_tokens,
        )  # fmt: skip
        current = stage.prepare(start)
        number = names.index(stage.name)
        results[stage.name] = StageRun(run, stage, number, current, train, dev, texts or {}).fit()
        if stage.row:
            rows[stage.row] = current
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


@dataclasses.dataclass
class StageRun:
    """One stage on its way. `number`: its place among the recipe's; `train`, `dev`: the traces that
    are trained on and those held out; `texts`: raw text by stage."""

    run: Run
    stage: Stage
    number: int
    drafter: Any
    train: list[Trace]
    dev: list[Trace]
    texts: Mapping[str, PackedBatches]

    def __post_init__(self) -> None:
        self.settings = _settings(self.run, self.stage)
        self.folder = self.run.folder / "stages" / f"{self.number}-{self.stage.name}"

    def fit(self) -> FitResult:
        run, stage, objective = self.run, self.stage, self.stage.objective
        accelerator, target = run.accelerator, run.target
        data, batches = self._batches()
        request = objective.target_request(batches.at(0), 0)
        stored = stored_features(run, request, self.train)
        teacher = Teacher(target, self.train, data.mix, stored, accelerator.device)
        usual = dev_evaluation(run, self.dev, self.drafter, chooses=data.text is None)
        evaluate = objective.evaluated(usual, self.dev)
        cached = self._take_from_cache()
        tracker = Tracker(
            self.settings, run.folder, run.folder.name, run.config.to_dict(),
            accelerator.is_main_process, stage=stage.name,
        )  # fmt: skip
        if accelerator.is_main_process:
            print(
                f"stage {stage.name}: {self.settings.max_steps} steps of "
                f"{self.settings.batch_size} rows from "
                f"{data.mix if data.text is None else dict(data.text.shares)}"
            )

        def outputs(batch: Batch, step: int) -> TargetOutputs | None:
            return teacher.outputs(batch, objective.target_request(batch, step))

        def context(step: int, batch: Batch, drafter: Any) -> Context:
            return self._context(batch, drafter, lambda on_device: outputs(on_device, step))

        try:
            with compiled(self.settings.compile, target.model):
                result = fit(Fit(
                    objective=objective, drafter=self.drafter, batches=batches, evaluate=evaluate,
                    outputs=outputs, config=self.settings, folder=self.folder,
                    seed=run.config.run.seed, accelerator=accelerator, tracker=tracker,
                    context=context, lr_multiplier=stage.lr_multiplier, sync=target.sync,
                    describe=lambda batch: redacted(preview(batch, target.tokenizer)),
                ))  # fmt: skip
        finally:
            tracker.finish()
        if cached is not None:
            shared.leave(run, self.folder, cached)
        return result

    def _batches(self) -> tuple[Needs, Batches | PackedBatches | PackedTraces]:
        """The text of the stage, and its batches."""
        data, settings, accelerator = self.stage.data, self.settings, self.run.accelerator
        seed = self.run.config.run.seed
        if self.stage.row == "control" and any(not t.fixed_ids for t in self.train):
            data = dataclasses.replace(data, mix={"target": 1.0})
            if accelerator.is_main_process:
                print("control: cross-entropy on the target's text, the prompts have no own "
                      "responses")  # fmt: skip
        if self.stage.name in self.texts:
            return data, self.texts[self.stage.name]
        if settings.pack_tokens:
            (source,) = (name for name, share in data.mix.items() if share)
            return data, PackedTraces(
                self.train, source, settings.pack_tokens, settings.batch_size, seed, data.teacher,
                accelerator.process_index, accelerator.num_processes,
            )  # fmt: skip
        micro_steps = settings.max_steps * settings.gradient_accumulation_steps
        return data, Batches(
            self.train, data.mix, settings.batch_size, seed=seed, per=data.per,
            ramp=int(data.ramp_share * micro_steps), teacher=data.teacher,
            rank=accelerator.process_index, world=accelerator.num_processes,
        )  # fmt: skip

    def _context(
        self, batch: Batch, drafter: Any, outputs: Callable[[Batch], TargetOutputs | None]
    ) -> Context:
        run, accelerator = self.run, self.run.accelerator
        seed = run.config.run.seed

        def generate(
            prompts: list[list[int]], temperature: float, max_new_tokens: int, stream: int
        ) -> list[list[int]]:
            return sample_drafter(
                drafter, prompts, run.target, temperature, max_new_tokens,
                seed=hash((seed, stream, accelerator.process_index)),
            )  # fmt: skip

        def of_batch() -> TargetOutputs | None:
            return outputs(batch.to(accelerator.device))

        return Context(batch, drafter, generate, of_batch, seed, run.folder)

    def _take_from_cache(self) -> Path | None:
        """Where other runs find this stage, if they may; it is taken from there if it is there."""
        if self.stage.shared is None or self.settings.resume != "auto":
            return None
        place = shared.place(
            self.run, self.stage.shared, self.settings, self.drafter, [*self.train, *self.dev]
        )
        shared.take(self.run, place, self.folder)
        return place


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
