"""The one training loop: fetch, loss, backward, clip, step, log, evaluate, save.

- `objective` and `source`: see `trainer.objective`. `source.at(index)` is stateless and shards by
  rank; index = step * accumulation + micro-step.
- `lr_multiplier(name) -> float` of a parameter, times its learning rate.
- `evaluate(drafter, step)`: numbers for JSON; `select` is maximised, None selects the last step.
  The random state is restored afterwards.

The loop waits for its device only to log, evaluate and save; the waits of a loss are counted in
`tests/test_counts.py`. Several processes agree on the denominators of a step on the CPU, while the
step before computes, unless the objective computes its batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Generic, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn

from trainer import lora
from trainer.checkpoint import load_weights, rng_state, set_rng_state
from trainer.compiled import compiled
from trainer.config import TrainerConfig
from trainer.device import shows_numbers_at_once, tensor_cores
from trainer.errors import RunFault
from trainer.interrupt import Interrupt
from trainer.objective import B, O, Source, TrainingObjective
from trainer.optimizer import learning_rate, make_optimizer
from trainer.processes import Sum
from trainer.progress import Progress, working
from trainer.setup import checkpointing_of, placement
from trainer.store import FitResult, Store
from trainer.tracking import StepRecord, Tokens, Tracker, Window, metrics_text

Announced: TypeAlias = tuple[B, dict[str, float]]  # a batch, and its denominators by term


@dataclasses.dataclass(kw_only=True)
class Fit(Generic[B, O]):
    """One training: its arguments, see the module, and its state while it runs."""

    objective: TrainingObjective[B, O]
    drafter: nn.Module
    source: Source[B, O]
    evaluate: Callable[[nn.Module, int], Mapping[str, object]] | None
    config: TrainerConfig
    folder: Path
    seed: int
    accelerator: Accelerator
    tracker: Tracker
    lr_multiplier: Callable[[str], float] = lambda name: 1.0

    def __post_init__(self) -> None:
        assert self.accelerator.gradient_accumulation_steps == 1, "this loop accumulates by itself"
        self.alone = self.accelerator.num_processes == 1
        self.placement = placement(self.accelerator, self.config)
        self.store = Store(Path(self.folder), self.placement, self.seed)

    def prepare(self) -> None:
        """Make model and optimiser, and restore the newest whole checkpoint if there is one."""
        if self.config.gradient_checkpointing:
            checkpointing_of(self.drafter)()
        found, self.counters = self.store.find(resume=self.config.resume == "auto")
        if found is not None:
            load_weights(found, self.drafter)
        self.tracker.truncate(-1 if found is None else self.counters.step)
        self.model, self.optimizer = self.placement.prepare(
            self.drafter,
            lambda model: make_optimizer(
                model, self.config, self.lr_multiplier, fused=self.placement.fuses
            ),
        )
        self.window = Window(self.accelerator, Path(self.folder), type(self.objective))
        self.ahead: tuple[list[Announced[B]], Sum] | None = None  # the next step's
        self.terms: list[str] | None = None  # names, in the order in which they are summed
        if found is None:
            set_seed(self.seed, device_specific=True)
        else:
            self.window.sums = self.store.load(found, self.model, self.optimizer, self.objective)
        self.described = found is not None

    @property
    def network(self) -> nn.Module:
        """What is trained, without the wrapper of a placement."""
        network = self.accelerator.unwrap_model(self.model)
        assert isinstance(network, nn.Module)
        return network

    def train(self) -> None:
        """Run the remaining steps. SystemExit(75) after a request to stop."""
        config, counters = self.config, self.counters
        self.model.train()
        self.progress = Progress(config.max_steps, counters.step, self.accelerator.is_main_process)
        layers = compiled(config.compile, self.network)
        saved = closing(self.store)
        with Interrupt() as self.interrupt, closing(self.progress), layers, saved:
            if config.compile is not None:
                self.progress.note("the first steps compile layers too, which can take minutes")
            if counters.step == 0:
                self.evaluate_drafter()
            self.window.start(counters.num_tokens)
            while counters.step < config.max_steps:
                self.placement.gather(self.model)
                batches, denominators = self.fetch()
                if batches:
                    with tensor_cores(config.precision):
                        self.update(batches, denominators)
                counters.step += 1
                self.progress.advance()
                stop = self.stop_agreed or (self.alone and self.stopping)
                if self.due(config.log_every):
                    lr = learning_rate(counters.step - 1, config)
                    row = self.window.row(counters.step, counters.num_tokens, lr)
                    self.tracker.log(row)
                    self.progress.report(row)
                if self.due(config.eval_every):
                    self.evaluate_drafter()
                if stop or self.due(config.save_every):
                    with self.window.paused() as sums:
                        self.store.save(counters, self.model, self.optimizer, self.objective, sums)
                if stop and counters.step < config.max_steps:
                    self.store.settle()
                    self.progress.note(f"stopped and saved at step {counters.step}")
                    raise SystemExit(75)

    @property
    def stopping(self) -> bool:
        """Whether this process was asked to stop, or could not write a checkpoint: to save after
        the step says why."""
        return self.interrupt.requested or self.store.failed

    def due(self, every: int) -> bool:
        """Whether something is due that is done `every` so many steps and after the last one."""
        return self.counters.step % every == 0 or self.counters.step == self.config.max_steps

    def fetch(self) -> tuple[list[Announced[B]], dict[str, float]]:
        """This rank's batches of the step, each with the denominators that the objective announces,
        and their sums over all ranks and micro-steps. Without batches no rank has a supervised
        token. The sums of the step after it begin here, so that no rank waits for them there."""
        counters = self.counters
        if self.ahead is None:
            batches, sums = self.announce(counters.step)
            self.source.sync()
        else:
            batches, sums = self.ahead
        *counts, num_tokens, skipped, stop = sums.wait()
        self.ahead, following = None, counters.step + 1
        early = not (self.alone or self.objective.computes_batches)
        if early and following < self.config.max_steps:
            self.ahead = self.announce(following)
        counters.num_tokens += int(num_tokens)
        counters.skipped_batches += int(skipped)
        self.stop_agreed = bool(stop)  # so that every rank ends after the same step
        if num_tokens == 0:
            return [], {}
        if not self.described and (text := self.source.describe(batches[0][0])):
            self.progress.note(text)
        self.described = True
        return batches, dict(zip(self.terms or [], counts, strict=True))

    def announce(self, step: int) -> tuple[list[Announced[B]], Sum]:
        """Make this rank's batches of a step, each with its denominators, and begin to sum these
        over all ranks, by the terms' names, followed by supervised tokens, skipped batches and
        requests to stop."""
        num_micro = self.config.gradient_accumulation_steps
        objective, drafter = self.objective, self.network
        batches, skipped = list[B](), 0
        for index in range(step * num_micro, (step + 1) * num_micro):
            raw = self.source.at(index)
            batch = self.source.refreshed(step, raw, drafter)
            if batch is not None and batch.num_supervised > 0:
                batches.append(batch)
                continue
            skipped += batch is None or not batch.loss_mask.any()  # a process may own no column
            if self.alone:
                continue
            if batch is None:  # ranks go through a step together
                empty = torch.zeros_like(raw.loss_mask)
                batch = dataclasses.replace(raw, loss_mask=empty, num_supervised=0)
            batches.append(batch)
        announced = [dict(objective.denominators(batch, step)) for batch in batches]
        if announced:
            self.check_terms(announced, step)
        num_tokens = sum(int(batch.num_supervised) for batch in batches)
        sums = [sum(float(one[name]) for one in announced) for name in self.terms or []]
        sums += [num_tokens, skipped, self.stopping]
        return list(zip(batches, announced, strict=True)), Sum(sums)

    def check_terms(self, announced: list[dict[str, float]], step: int) -> None:
        """RunFault where a batch announces other terms than the first one of this training, or of
        another rank: a term would be divided by another's count."""
        names = [sorted(one) for one in announced]
        if self.terms is None:
            self.source.sync()
            names = [*gather_object([names[0]]), *names]
            self.terms = names[0]
        first = self.terms or []
        for other in names:
            if other != first:
                raise RunFault(
                    f"denominators() announced the terms {', '.join(other)} for a batch of step "
                    f"{step + 1}, but {', '.join(first)} for the first one"
                )

    def update(self, batches: list[Announced[B]], denominators: Mapping[str, float]) -> None:
        """One optimiser step on weight * sum / denominator, summed over terms, batches, ranks."""
        accelerator, step = self.accelerator, self.counters.step
        record = StepRecord(step, [Tokens.of(batch) for batch, _ in batches])
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config) * group["lr_multiplier"]
        for i, (batch, announced) in enumerate(batches, start=1):
            last = i == len(batches)
            with self.placement.micro_step(self.model, last):
                batch = batch.to(accelerator.device)
                target_outputs = self.source.outputs(batch, step)
                self.source.sync()
                try:
                    with self.placement.autocast():
                        output = self.objective.loss(
                            self.model, batch, target_outputs, step, denominators
                        )
                except RunFault as fault:
                    path = self.window.save([Tokens.of(batch)], step)
                    raise RunFault(f"step {step + 1}: {fault}; its batch is in {path}") from fault
                record.add(output, announced)
                # a denominator of 0 belongs to a term that nobody has: its sum is 0
                loss = sum(
                    term.weight * term.total / (denominators[name] or 1)
                    for name, term in sorted(output.terms.items())
                )
                loss = loss * accelerator.num_processes  # gradients are averaged over the ranks
                accelerator.backward(loss)
            record.losses.append(loss.detach())
        self.window.add(record, self.placement.clip(self.model))
        if self.alone and shows_numbers_at_once(accelerator.device):
            self.window.settle()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @working("held-out text")
    def evaluate_drafter(self) -> None:
        """Evaluate, log the metrics, and save the weights if they are the best so far."""
        if self.evaluate is None:
            return
        counters = self.counters
        with self.window.paused():
            random_state = rng_state()
            self.placement.gather(self.model, exact=True)
            drafter = self.network
            drafter.eval()
            metrics = self.evaluate(drafter, counters.step)
            self.source.sync()
            metrics = gather_object([metrics])[0]
            self.model.train()
            set_rng_state(random_state)
            self.tracker.log({"step": counters.step, "eval": metrics})
            improved = counters.improved_by(metrics)
            text = metrics_text(metrics) + ", the best so far" * improved
            self.progress.note(f"step {counters.step}  held-out text: {text}")
            if improved:
                self.store.save_best(counters.step, self.model, metrics)


def fit(run: Fit[B, O]) -> FitResult:
    """Train `run.drafter` in place; it ends with its best weights by `evaluate`, else its last.

    A second call with the same `folder` resumes from the newest checkpoint, or returns at once
    where training has ended. SIGTERM or Ctrl-C saves and raises SystemExit(75). The caller closes
    the tracker."""
    merge = lora.attach(run.drafter, run.config) if run.config.lora_rank else None
    done = run.store.finished() if run.config.resume == "auto" else None
    if done is None:
        run.prepare()
        run.train()
        done = run.counters
        run.placement.end(run.model, run.drafter)
        run.accelerator.free_memory()
        run.store.finish(done)
    run.store.load_final(done, run.drafter)
    if merge is not None:
        merge()
    run.drafter.to(run.accelerator.device).eval()
    return done.result()
