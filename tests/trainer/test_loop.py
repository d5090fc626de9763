"""The loop on a tiny language model: what it computes, and that stopping it changes nothing.

Long, because everything here shares one small model, its batches and its way to start. Run as a
program this file trains in the folder named on the command line; the tests below start it to kill
it, or twice to join two processes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from io import BufferedReader
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from phases.exits import end
from tests.helpers import commands
from tests.helpers.commands import TWO, finish
from tests.helpers.warm import Warm, piped
from trainer import tracking
from trainer.config import TrainerConfig
from trainer.device import computes_in_bfloat16
from trainer.errors import RunFault, UserError
from trainer.loop import Fit, fit
from trainer.losses import LossOutput, Term
from trainer.objective import Source
from trainer.optimizer import learning_rate, make_optimizer
from trainer.processes import PATIENCE
from trainer.replicated import Replicated
from trainer.setup import make_accelerator
from trainer.tracking import Tracker

V, LENGTH = 13, 9
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Batch:
    input_ids: Tensor  # [B, L] long
    loss_mask: Tensor  # [B, L] bool
    num_supervised: int

    def to(self, device: torch.device) -> Batch:
        return replace(
            self, input_ids=self.input_ids.to(device), loss_mask=self.loss_mask.to(device)
        )


@dataclass
class Batches:
    """Sequence `n` of an endless stream depends on `n` alone; lengths differ a lot."""

    batch_size: int
    rank: int = 0
    world: int = 1
    empty: frozenset[int] = frozenset()  # sequences without a supervised token

    def at(self, index: int) -> Batch:
        first = (index * self.world + self.rank) * self.batch_size
        rows = [self.sequence(n) for n in range(first, first + self.batch_size)]
        ids, masks = zip(*rows, strict=True)
        mask = torch.stack(masks)
        return Batch(torch.stack(ids), mask, int(mask.sum()))

    def sequence(self, n: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(n)
        start, step = torch.randint(V, (2,), generator=generator).tolist()
        ids = (start + (1 + step % 3) * torch.arange(LENGTH)) % V
        num_supervised = int(torch.randint(1, LENGTH, (), generator=generator))
        if n in self.empty:
            num_supervised = 0
        mask = torch.zeros(LENGTH, dtype=torch.bool)
        mask[1 : 1 + num_supervised] = True
        return ids, mask


class TinyLM(nn.Module):
    """Predicts token t from token t - 1."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, V)
        self.gradient_checkpointing = False
        self.num_recomputed = 0

    def gradient_checkpointing_enable(self) -> None:
        self.gradient_checkpointing = True

    def block(self, x: Tensor) -> Tensor:
        self.num_recomputed += int(self.gradient_checkpointing)
        return self.dropout(torch.tanh(self.norm(x)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.gradient_checkpointing and self.training:
            return self.head(recompute(self.block, x, use_reentrant=False))
        return self.head(self.block(x))


class PlainLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class CrossEntropy:
    computes_batches = False

    def denominators(self, batch: Batch, step: int) -> dict[str, float]:
        return {"labels": batch.num_supervised}

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...

    def loss(
        self,
        drafter: nn.Module,
        batch: Batch,
        target_outputs: object,
        step: int,
        denominators: Mapping[str, float] | None = None,
    ) -> LossOutput:
        logits = drafter(batch.input_ids)[:, :-1].float()
        labels = batch.input_ids[:, 1:]
        mask = batch.loss_mask[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        right = (logits.argmax(-1) == labels) & mask
        count = mask.sum()
        terms = {"labels": Term((losses * mask).sum(), count)}
        return LossOutput(terms, {"accuracy": (right.sum(), count)})


class Counting(CrossEntropy):
    """With a state of its own: how many losses it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros((), dtype=torch.long)

    def loss(self, *given) -> LossOutput:
        self.calls += 1
        output = super().loss(*given)
        output.metrics["calls"] = (self.calls.clone(), 1)
        return output

    def state_dict(self) -> dict:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict) -> None:
        self.calls = state["calls"]


def accuracy(drafter: nn.Module, step: int) -> dict[str, float]:
    batch = Batches(64).at(1000)
    with torch.no_grad():
        right = drafter(batch.input_ids)[:, :-1].argmax(-1) == batch.input_ids[:, 1:]
    torch.rand(step % 7)  # an evaluation may draw numbers; training must not notice
    return {"select": right.float().mean().item()}


def train(
    folder: Path, objective: CrossEntropy | None = None, drafter: nn.Module | None = None, **given
):
    """-> result, drafter, rows of metrics.jsonl. Keys of TrainerConfig and arguments of `fit`."""
    names = {field.name for field in fields(TrainerConfig)}
    settings = {"max_steps": 12, "log_every": 1, "eval_every": 5, "save_every": 4, "lr": 1e-2}
    settings |= {key: value for key, value in given.items() if key in names}
    config = TrainerConfig(**settings)
    AcceleratorState._reset_state(reset_partial_state="LOCAL_RANK" not in os.environ)
    accelerator = make_accelerator(config, cpu=True)
    if drafter is None:
        torch.manual_seed(0)
        drafter = TinyLM(dropout=given.get("dropout", 0.1))
    usual = Batches(2, accelerator.process_index, accelerator.num_processes)
    source = Source(given.get("batches", usual), lambda batch, step: None)
    for name in ("refreshed", "describe"):
        if name in given:
            setattr(source, name, given[name])
    arguments = {
        "objective": objective or Counting(),
        "drafter": drafter,
        "source": source,
        "evaluate": accuracy,
        "config": config,
        "folder": folder,
        "seed": 1,
        "accelerator": accelerator,
        "tracker": Tracker(config, folder, "test", {}, accelerator.is_main_process),
    }
    others = {*names, "dropout", "batches", "refreshed", "describe"}
    arguments |= {key: value for key, value in given.items() if key not in others}
    result = fit(Fit(**arguments))
    return result, drafter, rows_of(folder)


def rows_of(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("tokens_per_s", None)  # the one field that is a timing
    return rows


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def losses_of(rows: list[dict]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


class Stopped(Exception):
    pass


class StoppingBatches(Batches):
    """Raises when the batch of this index is asked for."""

    stop_at = -1

    def at(self, index: int) -> Batch:
        if index == self.stop_at:
            raise Stopped
        return super().at(index)


# What is computed


def test_training_lowers_the_loss_and_raises_the_measured_metric(tmp_path):
    result, _, rows = train(tmp_path, max_steps=60, lr=3e-2)
    assert result.steps == 60
    assert losses_of(rows)[-1] < 0.7 * losses_of(rows)[0]
    assert result.best_metric > result.series[0]["select"]
    assert [row["step"] for row in result.series] == [0, *range(5, 61, 5)]


@pytest.mark.parametrize("num_micro", [2, 4])
def test_accumulation_equals_one_large_batch_with_unequal_token_counts(tmp_path, num_micro):
    settings = {"evaluate": None, "dropout": 0.0, "max_steps": 6}
    _, large, rows = train(tmp_path / "a", batches=Batches(4), **settings)
    _, small, micro_rows = train(
        tmp_path / "b",
        batches=Batches(4 // num_micro),
        gradient_accumulation_steps=num_micro,
        **settings,
    )
    # the same numbers summed in another order: float32 rounding, magnified a little by Adam
    torch.testing.assert_close(losses_of(micro_rows), losses_of(rows), rtol=1e-5, atol=0)
    for a, b in zip(large.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert [row["num_tokens"] for row in rows] == [row["num_tokens"] for row in micro_rows]


def test_logged_loss_is_the_mean_over_the_steps_since_the_last_row(tmp_path):
    _, _, every = train(tmp_path / "a", evaluate=None)
    _, _, fourth = train(tmp_path / "b", evaluate=None, log_every=4)
    expected = [sum(losses_of(every)[i : i + 4]) / 4 for i in (0, 4, 8)]
    torch.testing.assert_close(losses_of(fourth), expected, rtol=1e-12, atol=0)


def test_how_often_one_evaluates_or_saves_changes_no_loss(tmp_path):
    _, _, seldom = train(tmp_path / "a", eval_every=12, save_every=12)
    _, _, often = train(tmp_path / "b", eval_every=1, save_every=1)
    assert losses_of(seldom) == losses_of(often)


def test_several_terms_are_divided_each_by_its_own_denominator(tmp_path):
    class TwoTerms(CrossEntropy):
        def denominators(self, batch: Batch, step: int) -> dict[str, float]:
            return {"tokens": batch.num_supervised, "rows": len(batch.input_ids)}

        def loss(self, drafter, batch, target_outputs, step, *denominators) -> LossOutput:
            one = super().loss(drafter, batch, target_outputs, step).terms["labels"]
            rows = Term(one.total, len(batch.input_ids), 0.25)
            return LossOutput({"tokens": one, "rows": rows})

    settings = {"evaluate": None, "dropout": 0.0, "max_steps": 1}
    _, _, plain = train(tmp_path / "a", CrossEntropy(), **settings)
    _, _, rows = train(tmp_path / "b", TwoTerms(), **settings)
    num_tokens = plain[0]["num_tokens"]
    expected = plain[0]["loss"] * (1 + 0.25 * num_tokens / 2)
    assert rows[0]["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_loss_is_told_what_its_terms_are_divided_by(tmp_path):
    """The sums over the micro-steps."""
    told = []

    class Told(CrossEntropy):
        def loss(self, drafter, batch, target_outputs, step, denominators) -> LossOutput:
            told.append((step, batch.num_supervised, denominators))
            return super().loss(drafter, batch, target_outputs, step)

    train(tmp_path, Told(), gradient_accumulation_steps=2, evaluate=None, max_steps=3)
    assert len(told) == 6
    for step, _, given in told:
        assert given == {"labels": sum(number for of, number, _ in told if of == step)}


def test_a_loss_that_divides_by_something_unannounced_is_refused(tmp_path):
    class Wrong(CrossEntropy):
        def denominators(self, batch: Batch, step: int) -> dict[str, float]:
            return {"labels": float(len(batch.input_ids))}

    with pytest.raises(RunFault, match=r"Wrong: loss\(\) returned the denominator .* of labels"):
        train(tmp_path, Wrong())


def test_a_loss_with_other_terms_than_announced_is_refused(tmp_path):
    class Other(CrossEntropy):
        def denominators(self, batch: Batch, step: int) -> dict[str, float]:
            return {"tokens": batch.num_supervised}

    says = r"returned the terms labels at step 1, but denominators\(\) had announced tokens"
    with pytest.raises(RunFault, match=says):
        train(tmp_path, Other())


def test_a_batch_that_announces_other_terms_than_the_first_is_refused(tmp_path):
    """Its counts would be added to other terms'."""

    class Changing(CrossEntropy):
        def denominators(self, batch: Batch, step: int) -> dict[str, float]:
            return {"labels" if step < 2 else "tokens": batch.num_supervised}

    says = r"announced the terms tokens for a batch of step 3, but labels for the first one"
    with pytest.raises(RunFault, match=says):
        train(tmp_path, Changing())


def test_batches_without_supervised_tokens_are_skipped_and_counted(tmp_path):
    empty = frozenset({2, 3, 8, 9, 10, 11})  # batch 1; batches 4 and 5: all of step 2
    result, _, rows = train(
        tmp_path, batches=Batches(2, empty=empty), gradient_accumulation_steps=2, evaluate=None
    )
    assert result.skipped_batches == 3
    assert rows[2]["loss"] is None
    assert rows[2]["num_tokens"] == rows[1]["num_tokens"]


def test_a_skipped_step_leaves_the_weights_alone(tmp_path):
    torch.manual_seed(0)
    untouched = TinyLM()
    settings = {"evaluate": None, "weight_decay": 0.5, "max_steps": 3}
    _, drafter, _ = train(tmp_path, batches=Batches(2, empty=frozenset(range(6))), **settings)
    assert same_weights(drafter, untouched)


def test_refresh_replaces_batches_and_may_give_none(tmp_path):
    def refreshed(step: int, batch: Batch, drafter: nn.Module) -> Batch | None:
        return None if step == 1 else replace(batch, input_ids=(batch.input_ids * 0))

    result, _, rows = train(
        tmp_path, CrossEntropy(), evaluate=None, max_steps=30, lr=0.1, refreshed=refreshed
    )
    assert result.skipped_batches == 1
    assert rows[1]["loss"] is None
    assert losses_of(rows)[-1] < 0.1  # token 0 follows token 0: only refreshed batches say so


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802]),
        ("hold_cosine", [0.5, 1.0, 1.0, 1.0, 0.775, 0.325]),
    ],
)
def test_schedules(schedule, expected):
    config = TrainerConfig(
        max_steps=6, lr=1.0, lr_schedule=schedule, lr_warmup_steps=2, lr_min_ratio=0.1
    )
    assert [learning_rate(step, config) for step in range(6)] == pytest.approx(expected, abs=1e-6)


def test_the_schedule_reaches_the_optimiser(tmp_path):
    settings = {"evaluate": None, "lr_warmup_steps": 4, "max_steps": 4}
    _, slow, rows = train(tmp_path / "a", **settings)
    _, fast, _ = train(tmp_path / "b", evaluate=None, max_steps=4)
    assert [row["lr"] for row in rows] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert not same_weights(slow, fast)


def test_a_stage_may_let_parameters_learn_at_their_own_rate(tmp_path):
    def faster(name):
        return 4.0 if name.startswith("head.") else 1.0

    torch.manual_seed(0)
    before = TinyLM(dropout=0.0)
    settings = {"max_steps": 2, "lr_schedule": "linear", "lr_min_ratio": 0.0, "evaluate": None}
    settings["lr_multiplier"] = faster
    for steps, folder in ((1, "one"), (2, "two")):
        settings["max_steps"] = steps
        drafter = deepcopy(before)
        _, _, rows = train(tmp_path / folder, CrossEntropy(), drafter, **settings)
        assert rows[0]["lr"] == 1e-2
        if steps == 1:  # the first step of Adam is the learning rate, whatever the gradient
            for name, factor in (("head.weight", 4), ("norm.weight", 1), ("embed.weight", 1)):
                moved = drafter.get_parameter(name) - before.get_parameter(name)
                assert moved.abs().max().item() == pytest.approx(factor * 1e-2, rel=1e-3)
    # resumed, the rates are still their own
    first, batches = deepcopy(before), StoppingBatches(2)
    batches.stop_at = 1
    with pytest.raises(Stopped):
        train(tmp_path / "cut", CrossEntropy(), first, batches=batches, save_every=1, **settings)
    train(tmp_path / "cut", CrossEntropy(), first, save_every=1, **settings)
    assert same_weights(first, drafter)


def test_weight_decay_shrinks_matrices_and_spares_biases_at_zero_gradient(tmp_path):
    class Still(CrossEntropy):
        def loss(self, drafter, batch, target_outputs, step, *denominators) -> LossOutput:
            one = super().loss(drafter, batch, target_outputs, step).terms["labels"]
            return LossOutput({"labels": Term(0.0 * one.total, one.count)})

    torch.manual_seed(0)
    before = TinyLM()
    _, after, _ = train(
        tmp_path, Still(), evaluate=None, max_steps=1, weight_decay=0.5, lr=0.1,
        lr_schedule="constant",
    )  # fmt: skip
    torch.testing.assert_close(after.head.weight, before.head.weight * (1 - 0.1 * 0.5))
    assert torch.equal(after.head.bias, before.head.bias)


@pytest.mark.parametrize(
    "option",
    [{"adam_beta2": 0.9}, {"max_grad_norm": 0.01}, {"optimizer": "muon"}],
)
def test_optimiser_options_change_the_weights(tmp_path, option):
    _, plain, _ = train(tmp_path / "a", evaluate=None)
    _, changed, _ = train(tmp_path / "b", evaluate=None, **option)
    assert not same_weights(plain, changed)


def test_gradient_checkpointing_is_on_and_changes_no_loss(tmp_path):
    _, _, plain = train(tmp_path / "a", evaluate=None)
    _, drafter, rows = train(tmp_path / "b", evaluate=None, gradient_checkpointing=True)
    assert drafter.gradient_checkpointing
    assert drafter.num_recomputed == 2 * 12  # the block runs again in each backward pass
    assert losses_of(rows) == losses_of(plain)


def test_gradient_checkpointing_is_refused_where_the_drafter_has_none(tmp_path):
    rule = r"trainer\.gradient_checkpointing must be false for a PlainLM, got true: it cannot"
    with pytest.raises(UserError, match=rule):
        train(tmp_path, drafter=PlainLM(), gradient_checkpointing=True)


@pytest.mark.parametrize("steps", ["4", "auto"])
def test_accumulation_of_a_launch_file_is_refused(steps, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)
    rule = rf"must be 1, got {steps}: set trainer\.gradient_accumulation_steps"
    with pytest.raises(UserError, match=f"gradient_accumulation_steps of the launch file {rule}"):
        make_accelerator(TrainerConfig(), cpu=True)


def test_bf16_computes_in_bf16_and_keeps_float32_weights(tmp_path):
    seen = []

    class Looking(CrossEntropy):
        def loss(self, drafter, batch, target_outputs, step, *denominators) -> LossOutput:
            seen.append((drafter.head.weight @ drafter.head.weight.T).dtype)
            return super().loss(drafter, batch, target_outputs, step)

    _, drafter, rows = train(tmp_path / "a", Looking(), evaluate=None, precision="bf16")
    _, _, exact = train(tmp_path / "b", Looking(), evaluate=None)
    assert seen == 12 * [torch.bfloat16] + 12 * [torch.float32]
    assert drafter.head.weight.dtype == torch.float32
    assert losses_of(rows) != losses_of(exact)
    # 8 bits of mantissa
    torch.testing.assert_close(losses_of(rows), losses_of(exact), rtol=2e-2, atol=0)
    assert drafter(torch.zeros(1, 2, dtype=torch.long)).dtype == torch.float32
    assert drafter.head.weight.dtype == (drafter.head.weight @ drafter.head.weight.T).dtype


@pytest.mark.parametrize(
    ("precision", "cuda", "native", "wanted"),
    [("auto", True, True, True), ("auto", True, False, False), ("auto", False, True, False),
     ("fp32", True, True, False), ("bf16", True, False, True), ("bf16", False, True, True)],
)  # fmt: skip
def test_auto_is_bfloat16_on_a_gpu_that_has_it_alone(precision, cuda, native, wanted, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: native)
    assert computes_in_bfloat16(precision, cuda) == wanted


@pytest.mark.parametrize("words", [{"cpu": True}, {"cpu": None, "env": True}])
def test_auto_is_float32_for_a_run_on_the_cpu_of_a_machine_with_a_gpu(words, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
    if words.pop("env", False):
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert make_accelerator(TrainerConfig(), **words).mixed_precision == "no"


@pytest.mark.parametrize(("precision", "rounded"), [("auto", True), ("fp32", False)])
def test_products_in_float32_are_rounded_in_steps_alone(tmp_path, precision, rounded):
    """On CUDA; an evaluation compares logits that lie close together."""
    seen = []

    class Looking(CrossEntropy):
        def loss(self, *given):
            seen.append(torch.backends.cuda.matmul.allow_tf32)
            return super().loss(*given)

    def evaluate(drafter, step):
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return {"select": 0.0}

    train(tmp_path, Looking(), evaluate=evaluate, precision=precision, max_steps=2, eval_every=2)
    assert seen == [False, rounded, rounded, False]


@pytest.mark.parametrize(
    ("device", "shares", "fuses"),
    [("cuda", False, True), ("cpu", False, False), ("cuda", True, True)],
)
def test_an_optimiser_on_a_gpu_is_one_kernel(device, shares, fuses, monkeypatch):
    monkeypatch.setattr(Replicated, "shares", shares)
    accelerator = SimpleNamespace(device=torch.device(device))
    placed = Replicated(accelerator, TrainerConfig())
    assert placed.fuses == fuses
    optimizer = make_optimizer(TinyLM(), placed.config, fused=placed.fuses)
    assert optimizer.defaults["fused"] == (fuses or None)


def test_bfloat16_weights_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"must be float32, got torch\.bfloat16"):
        train(tmp_path, drafter=PlainLM().bfloat16())


def test_a_frozen_drafter_is_refused(tmp_path):
    with pytest.raises(UserError, match="no trainable parameter"):
        train(tmp_path, drafter=PlainLM().requires_grad_(False))


def test_the_preview_is_printed_once_before_training(tmp_path, capsys):
    train(tmp_path, describe=lambda batch: f"supervised: {batch.num_supervised}")
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("supervised: ")]) == 1
    assert lines[1].startswith("supervised: ")  # after the evaluation at step 0


def test_a_run_that_goes_on_shows_no_preview(tmp_path, capsys):
    batches = StoppingBatches(2)
    batches.stop_at = 6
    with pytest.raises(Stopped):
        train(tmp_path, batches=batches)
    capsys.readouterr()
    train(tmp_path, describe=lambda batch: "a preview")
    assert "a preview" not in capsys.readouterr().err


# Faults


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_numbers_that_are_not_finite_save_the_batch_and_stop(tmp_path, where):
    class Broken(CrossEntropy):
        def loss(self, drafter, batch, target_outputs, step, *denominators) -> LossOutput:
            output = super().loss(drafter, batch, target_outputs, step)
            one = output.terms["labels"]
            total = one.total
            if step == 6 and where == "loss":
                total = total * torch.nan
            elif step == 6:  # the derivative of sqrt at 0 is infinite, its value is not
                total = total + torch.sqrt(0 * total)
            return LossOutput({"labels": Term(total, one.count)})

    with pytest.raises(RunFault, match=r"step 7.*nan_batch\.safetensors"):
        train(tmp_path, Broken())
    path = tmp_path / "nan_batch.safetensors"
    assert torch.equal(load_file(path)["input_ids"], Batches(2).at(6).input_ids)
    assert torch.equal(load_file(path)["loss_mask"], Batches(2).at(6).loss_mask)
    with safe_open(path, "pt") as file:
        assert file.metadata()["step"] == "7"
    result, _, rows = train(tmp_path, CrossEntropy())  # the state of step 4 was saved and is sound
    assert result.steps == 12
    assert all(loss > 0 for loss in losses_of(rows))


# Stopping and going on


@pytest.mark.parametrize("fuses", [False, True])  # the optimiser as on a GPU
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, fuses, monkeypatch):
    monkeypatch.setattr(Replicated, "fuses", fuses)
    straight, expected, rows = train(tmp_path / "a", log_every=3)
    for stop_at in (3, 7, 10):  # before the first checkpoint, after it, after the second
        batches = StoppingBatches(2)
        batches.stop_at = stop_at
        with pytest.raises(Stopped):
            train(tmp_path / "b", batches=batches, log_every=3)
    result, drafter, resumed_rows = train(tmp_path / "b", log_every=3)
    assert result == straight
    assert resumed_rows == rows  # the objective's counter among them: it is in the checkpoint
    assert same_weights(drafter, expected)


def test_a_finished_run_returns_at_once_with_the_same_weights(tmp_path):
    first, drafter, _ = train(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    batches = StoppingBatches(2)
    batches.stop_at = 0
    again, fresh, _ = train(tmp_path, batches=batches, drafter=TinyLM(0.1))
    assert again == first
    assert same_weights(drafter, fresh)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_never_begins_again(tmp_path):
    first, drafter, rows = train(tmp_path)
    again, other, again_rows = train(tmp_path, resume="never")
    assert again == first
    assert again_rows == rows
    assert same_weights(drafter, other)


def test_going_on_with_another_setting_is_refused(tmp_path):
    batches = StoppingBatches(2)
    batches.stop_at = 6
    with pytest.raises(Stopped):
        train(tmp_path, batches=batches)
    with pytest.raises(UserError, match=r"trainer\.lr was 0\.01 .* now 0\.5"):
        train(tmp_path, lr=0.5)


def test_going_on_with_another_seed_is_refused(tmp_path):
    batches = StoppingBatches(2)
    batches.stop_at = 6
    with pytest.raises(Stopped):
        train(tmp_path, batches=batches)
    with pytest.raises(UserError, match=r"run\.seed was 1 when .* is now 2"):
        train(tmp_path, seed=2)


def test_the_best_weights_by_evaluation_are_kept(tmp_path):
    weights = {}

    def judge(drafter: nn.Module, step: int) -> dict[str, float]:
        assert not drafter.training
        weights[step] = {name: value.clone() for name, value in drafter.state_dict().items()}
        return {"select": -abs(step - 5)}

    result, drafter, rows = train(tmp_path, evaluate=judge)
    assert (result.best_step, result.best_metric) == (5, 0)
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, weights[5][name])
    assert not drafter.training
    assert {"step": 5, "eval": {"select": 0}} in rows
    assert [p.name for p in (tmp_path / "checkpoints/best").iterdir()] == ["step-000005"]


def test_an_evaluation_that_only_looks_keeps_the_last_weights(tmp_path):
    result, drafter, _ = train(tmp_path, evaluate=lambda _, s: {"select": None, "loss": -s})
    last = load_file(tmp_path / "checkpoints/step-000012/drafter.safetensors")
    assert (result.best_step, result.best_metric) == (None, None)
    assert [row["loss"] for row in result.series] == [-row["step"] for row in result.series]
    assert all(torch.equal(value, last[name]) for name, value in drafter.state_dict().items())


def test_an_evaluation_without_a_number_stops_the_run(tmp_path):
    with pytest.raises(RunFault, match="evaluation at step 0 gave nan"):
        train(tmp_path, evaluate=lambda drafter, step: {"select": float("nan")})


def test_without_evaluation_the_last_weights_are_kept(tmp_path):
    result, drafter, _ = train(tmp_path, evaluate=None)
    last = load_file(tmp_path / "checkpoints/step-000012/drafter.safetensors")
    assert result.best_step is None
    assert all(torch.equal(value, last[name]) for name, value in drafter.state_dict().items())


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, capsys):
    straight, expected, rows = train(tmp_path / "a", keep_checkpoints=2)
    batches = StoppingBatches(2)
    batches.stop_at = 11
    with pytest.raises(Stopped):
        train(tmp_path / "b", keep_checkpoints=2, batches=batches)
    damaged = tmp_path / "b/checkpoints/step-000008/state.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (tmp_path / "b/checkpoints/.tmp-step-000009").mkdir()
    (tmp_path / "b/checkpoints/.tmp-step-000009/drafter.safetensors").write_bytes(b"half")
    capsys.readouterr()
    result, drafter, resumed_rows = train(tmp_path / "b", keep_checkpoints=2)
    assert capsys.readouterr().out.count("step-000008 is damaged (state.pt") == 1
    assert (result, resumed_rows) == (straight, rows)
    assert same_weights(drafter, expected)
    assert not list((tmp_path / "b/checkpoints").glob(".tmp-*"))


def test_a_signal_in_the_last_step_leaves_nothing_to_go_on_with(tmp_path):
    class Signalling(Batches):
        def at(self, index: int) -> Batch:
            if index == 11:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().at(index)

    result, drafter, rows = train(tmp_path / "a", batches=Signalling(2))
    straight, expected, straight_rows = train(tmp_path / "b")
    assert (result, rows) == (straight, straight_rows)
    assert same_weights(drafter, expected)


def test_tokens_per_second_of_a_resumed_run_are_its_own(tmp_path, monkeypatch):
    batches = StoppingBatches(2)
    batches.stop_at = 6
    with pytest.raises(Stopped):
        train(tmp_path, batches=batches, eval_every=100)
    clock = itertools.count()  # a second from one look to the next
    monkeypatch.setattr(tracking, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    train(tmp_path, eval_every=100)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    before, first = (row for row in map(json.loads, lines) if row["step"] in (4, 5))
    assert first["tokens_per_s"] == first["num_tokens"] - before["num_tokens"]


def test_the_end_of_a_training_is_on_the_disk_before_it_is_believed(tmp_path, syncs):
    train(tmp_path, max_steps=2)
    file = tmp_path / "finished.json"
    found = [sync for sync in syncs if sync.inode == file.stat().st_ino]
    assert [(one.path != file, one.size) for one in found] == [(True, file.stat().st_size)]
    assert syncs[-1].path == tmp_path
    saved = [sync.path for sync in syncs].index(tmp_path / "checkpoints")
    assert saved < syncs.index(found[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_exits_75(tmp_path, number):
    straight, expected, rows = train(tmp_path / "a")

    class Signalling(Batches):
        def at(self, index: int) -> Batch:
            if index == 5:
                os.kill(os.getpid(), number)
            return super().at(index)

    former = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path / "b", batches=Signalling(2))
    assert stopped.value.code == 75
    assert signal.getsignal(number) is former
    assert (tmp_path / "b/checkpoints/step-000006").is_dir()
    result, drafter, resumed_rows = train(tmp_path / "b")
    assert (result, resumed_rows) == (straight, rows)
    assert same_weights(drafter, expected)


# In processes of their own


def start(folder: Path, *words: str, **environment: str) -> Warm:
    threads = str(torch.get_num_threads())  # sums over other threads differ in their last bits
    variables = {**os.environ, "OMP_NUM_THREADS": threads, **environment}
    return Warm([__file__, str(folder), *words], variables, REPOSITORY, *piped())


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_like_a_straight_one(tmp_path):
    settings = {"max_steps": 200, "save_every": 7, "eval_every": 10, "log_every": 3}
    straight, expected, rows = train(tmp_path / "a", **settings)
    process = start(tmp_path / "b", "crash")
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    # the drafter is loaded from the finished run: nothing is trained here
    result, drafter, killed_rows = train(tmp_path / "b", **settings)
    assert result == straight
    assert killed_rows == rows
    assert same_weights(drafter, expected)


JOINT = {"max_steps": 8, "gradient_accumulation_steps": 2, "eval_every": 4, "dropout": 0.0}
ENDING = {
    **JOINT, "weight_decay": 0.5,
    "refreshed": lambda step, batch, drafter: batch if step < 2 else None,
}  # fmt: skip
# step s reads the sequences 8 s to 8 s + 7, rank 1 every other two of them. Rank 1 has nothing in
# step 1, nobody has in step 2, rank 0 lacks one of two batches in step 3
EMPTY = frozenset({10, 11, 14, 15, *range(16, 24), 24, 25})


def start_two(folder: Path, mode: str, expected: int) -> None:
    """Two processes joined by gloo, which meet at a file: a port may be taken by another program
    before they are there. Both must end with the exit status `expected`."""
    folder.mkdir(exist_ok=True)
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # for accelerate
    common["MEETING"] = str(meeting)
    ranks = [start(folder, mode, RANK=rank, LOCAL_RANK=rank, **common) for rank in ("0", "1")]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    for process in ranks:
        assert process.returncode == expected, f"{process.returncode}: {errors}"


def assert_equal_up_to_summation(one: list[dict], two: list[dict]) -> None:
    """The same numbers added in another order: float32 rounding."""
    assert [row.keys() for row in one] == [row.keys() for row in two]
    for a, b in zip(one, two, strict=True):
        assert (a["step"], a.get("num_tokens")) == (b["step"], b.get("num_tokens"))
        for name in ("loss", "accuracy"):
            if a.get(name) is None:  # an evaluation, or a step that nobody could make
                assert b.get(name) is None
            else:
                assert b[name] == pytest.approx(a[name], rel=1e-6)


@pytest.mark.parametrize("eval_every", [5, 100])
def test_a_finished_training_with_damaged_weights_is_finished_again(tmp_path, eval_every, capsys):
    settings = {"max_steps": 12, "save_every": 4, "eval_every": eval_every}
    first, drafter, _ = train(tmp_path, **settings)
    wanted = {name: p.clone() for name, p in drafter.state_dict().items()}
    for path in (tmp_path / "checkpoints").rglob("drafter.safetensors"):
        if path.parent.name == "step-000012" or path.parent.parent.name == "best":
            path.write_bytes(path.read_bytes()[:-1])
    again, drafter, _ = train(tmp_path, **settings)
    assert "is damaged" in capsys.readouterr().out
    assert (again.steps, again.best_step) == (first.steps, first.best_step)
    assert all(torch.equal(wanted[name], p) for name, p in drafter.state_dict().items())


@pytest.mark.slow
def test_two_processes_equal_one_with_the_same_global_batch(tmp_path):
    one, drafter, rows = train(
        tmp_path / "a", CrossEntropy(), batches=Batches(4, empty=EMPTY), **JOINT
    )
    start_two(tmp_path / "b", "join", 0)
    assert_equal_up_to_summation(rows, rows_of(tmp_path / "b"))
    weights = load_file(tmp_path / "b/result.safetensors")
    for name, value in drafter.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
    two = json.loads((tmp_path / "b/result.json").read_text())
    assert one.skipped_batches == 2  # batches of four sequences
    assert two["skipped_batches"] == 7  # batches of two
    assert two["best_step"] == one.best_step


@pytest.mark.slow
def test_two_processes_take_no_step_where_there_is_nothing_to_train_on(tmp_path):
    """Their batches have text, of which an objective that follows a stream wants none any more."""
    _, drafter, rows = train(tmp_path / "a", CrossEntropy(), batches=Batches(4), **ENDING)
    start_two(tmp_path / "b", "ending", 0)
    assert_equal_up_to_summation(rows, rows_of(tmp_path / "b"))
    assert [row["loss"] for row in rows if "loss" in row][2:] == [None] * 6
    weights = load_file(tmp_path / "b/result.safetensors")
    for name, value in drafter.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(tmp_path):
    start_two(tmp_path / "a", "join", 0)
    start_two(tmp_path / "b", "signal", 75)
    assert (tmp_path / "b/checkpoints/step-000006").is_dir()
    start_two(tmp_path / "b", "join", 0)
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a")
    first, second = (load_file(tmp_path / name / "result.safetensors") for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "says"),
    [("fault", "no such batch"), ("terms", "the terms tokens for a batch of step 1, but labels")],
)
def test_a_fault_on_one_of_two_processes_ends_both(tmp_path, mode, says):
    """Within seconds, and not after the day that a process waits for another: the launcher sees to
    it. The fault is what is said."""
    began = time.monotonic()
    code, out, err = finish(commands.start(*TWO, "-m", __name__, str(tmp_path), mode))
    assert code != 0
    assert says in out + err
    assert time.monotonic() - began < 120


@pytest.mark.slow
def test_two_processes_make_a_step_ready_during_the_one_before(tmp_path):
    """Unless the objective computes its batches with the weights that the step leaves; not a bit of
    the training differs."""
    for mode in ("join", "late"):
        start_two(tmp_path / mode, mode, 0)
    assert rows_of(tmp_path / "late") == rows_of(tmp_path / "join")
    late, early = (load_file(tmp_path / m / "result.safetensors") for m in ("late", "join"))
    assert all(torch.equal(late[name], early[name]) for name in early)
    events = {m: json.loads((tmp_path / m / "events.json").read_text()) for m in ("late", "join")}
    made = [f"batch {index}" for index in range(16)]
    # nobody has a token in step 2
    computed = [f"loss of step {step}" for step in (0, 0, 1, 1, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)]
    for found in events.values():
        assert [one for one in found if one in made] == made
        assert [one for one in found if one not in made] == computed
    for step in (0, 1, 3, 4, 5, 6):
        early, late = (
            events[m].index(f"batch {2 * step + 3}") < events[m].index(f"loss of step {step}")
            for m in ("join", "late")
        )
        assert early
        assert not late


class ToldBatches(Batches):
    """Each batch is told through a pipe that holds a few of them."""

    told: BinaryIO
    message = bytes(1 << 14)

    def at(self, index: int) -> Batch:
        self.told.write(self.message)
        return super().at(index)


def crash(folder: Path) -> None:
    """Train in children that are killed after a random number of batches, at whatever moment of a
    step that is; the last one comes through."""
    generator = random.Random(0)
    for num_batches in [*(generator.randrange(1, 20) for _ in range(6)), None]:
        ends = os.pipe()
        ours, theirs = os.fdopen(ends[0], "rb", 0), os.fdopen(ends[1], "wb", 0)
        child = os.fork()
        if child == 0:
            batches = ToldBatches(2)
            batches.told = theirs
            train(folder, batches=batches, max_steps=200, save_every=7, eval_every=10, log_every=3)
            os._exit(0)
        theirs.close()
        if num_batches is None:
            while ours.read(len(ToldBatches.message)):
                pass
        else:
            BufferedReader(ours).read(num_batches * len(ToldBatches.message))
            time.sleep(generator.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert status == (0 if num_batches is None else signal.SIGKILL)


class SignalledBatches(Batches):
    def at(self, index: int) -> Batch:
        if index == 10 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().at(index)


class Noting(CrossEntropy):
    """Notes when batches are made and losses computed."""

    def __init__(self, late: bool) -> None:
        self.computes_batches, self.events = late, list[str]()

    def denominators(self, batch: Batch, step: int) -> dict[str, float]:
        num_batches = sum(event.startswith("batch") for event in self.events)
        self.events.append(f"batch {num_batches}")
        return super().denominators(batch, step)

    def loss(self, drafter, batch, target_outputs, step, *denominators) -> LossOutput:
        self.events.append(f"loss of step {step}")
        return super().loss(drafter, batch, target_outputs, step)


class BrokenBatches(Batches):
    def at(self, index: int) -> Batch:
        if index == 6 and self.rank == 1:
            raise RunFault("no such batch")
        return super().at(index)


class OtherTerms(Noting):
    """On rank 1 the term has another name."""

    def denominators(self, batch: Batch, step: int) -> dict[str, float]:
        name = ("labels", "tokens")[torch.distributed.get_rank()]
        return {name: super().denominators(batch, step)["labels"]}


def break_down(folder: Path, mode: str) -> None:
    torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    batches, objective = (Batches, OtherTerms) if mode == "terms" else (BrokenBatches, Noting)
    rank = torch.distributed.get_rank()
    train(folder, objective(late=False), batches=batches(2, rank, 2, EMPTY), **JOINT)


def join(folder: Path, mode: str) -> None:
    kind = SignalledBatches if mode == "signal" else Batches
    rank = int(os.environ["RANK"])
    meeting = f"file://{os.environ['MEETING']}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    try:
        batches, objective, settings = kind(2, rank, 2, EMPTY), Noting(mode == "late"), JOINT
        if mode == "ending":
            batches, objective, settings = Batches(2, rank, 2), CrossEntropy(), ENDING
        result, drafter, _ = train(folder, objective, batches=batches, **settings)
        if rank == 0:
            save_file(drafter.state_dict(), folder / "result.safetensors")
            (folder / "result.json").write_text(json.dumps(vars(result)))
            if isinstance(objective, Noting):
                (folder / "events.json").write_text(json.dumps(objective.events))
    finally:  # gloo aborts a process that is left without a word
        torch.distributed.barrier()


def main(words: list[str]) -> int:
    folder, mode = Path(words[0]), words[1]
    if mode == "crash":
        crash(folder)
    elif mode in ("fault", "terms"):
        break_down(folder, mode)
    else:
        join(folder, mode)
    return 0


if __name__ == "__main__":
    end(main)
