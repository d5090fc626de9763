"""Divergences by name with their options, such as `jsd:0.3`.

Each formula of `trainer.losses` becomes a class whose fields are the formula's options.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from trainer.device import shows_numbers_at_once
from trainer.errors import RunFault, UserError, require
from trainer.losses import (
    FORMULAS,
    CompressedTeacher,
    bucket,
    compressed_ce,
    sums_to_one,
    warm,
    wide,
)
from trainer.specs import parse, spelled

# A KL in float32 is off by the rounding of the two log-sums and of a sum over V: a few 1e-6 for
# large vocabularies. Anything lower means that precision was lost before the logits came here.
NEGATIVE_TOLERANCE = -1e-5
LINEAR_IN_P = ("fkl", "ce_soft")
UPPER = {"beta": 1.0, "mix": 1.0, "eta": math.inf}  # of the formulas' own options, from 0


@dataclass(frozen=True)
class Divergence:
    """A divergence between target p and drafter q with its options: q = softmax(z /
    draft_temperature), p likewise; `temperature_scale` multiplies by draft_temperature^2 (Hinton et
    al. 2015)."""

    name: ClassVar[str] = ""
    formula: ClassVar[Callable[..., Tensor]]
    # whether it measures acceptance, for which p has the mass that it has over its own vocabulary
    # where the drafter's is reduced; the others take p renormalised to the ids that are kept
    whole_mass: ClassVar[bool] = False

    draft_temperature: float = field(default=1.0, kw_only=True)
    teacher_temperature: float = field(default=1.0, kw_only=True)
    temperature_scale: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            most = UPPER[name]
            rule = "be >= 0" if most == math.inf else f"lie in [0, {most:g}]"
            require(0 <= value <= most and math.isfinite(value), name, rule, value)
        for name in ("draft_temperature", "teacher_temperature"):
            value = getattr(self, name)
            require(1e-5 <= value < math.inf, name, "be >= 1e-05", value)

    @property
    def options(self) -> dict[str, float]:
        """The options of the formula, by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.kw_only}

    def instead(self, name: str) -> Divergence:
        """The divergence of that name, at the same temperatures."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.kw_only}
        return self if name == self.name else DIVERGENCES[name](**shared)

    def check_compressed(self, approx: str | None, key: str = "approx") -> None:
        """UserError where a compressed teacher cannot give this divergence; `key`: of `approx`."""
        if self.name == "ce_hard":
            return
        if self.teacher_temperature != 1:
            raise UserError(
                "CompressedTeacherError: p at another temperature cannot be computed from part of "
                f"p, got teacher_temperature {self.teacher_temperature}: use the full logits"
            )
        if self.name not in LINEAR_IN_P and approx is None:
            raise UserError(
                f"CompressedTeacherError: {self.name} is not linear in p, so samples of p bias it: "
                f"use fkl, the full logits, or {key}=bucket"
            )

    def check_reduced(self, key: str = "divergence") -> None:
        """UserError where a reduced draft vocabulary cannot have this divergence; `key`: its
        setting."""
        if self.whole_mass and self.teacher_temperature != 1:
            raise UserError(
                "must have teacher_temperature=1 where the draft vocabulary is reduced: how much "
                "of p lies outside of it is known there alone",
                key=key,
                value=spelled(self),
                remedy="leave it out, or train with method.draft_vocab_size=0",
            )

    def __call__(
        self,
        draft_logits: Tensor,
        teacher: Tensor | CompressedTeacher | None,
        labels: Tensor | None = None,
        *,
        approx: str | None = None,
    ) -> Tensor:
        """The divergence per position, [N] float32, differentiable in the draft.

        draft_logits, teacher: [N, V] float, before temperature. labels: [N] int64, for ce_hard. A
        compressed teacher gives, for fkl, the cross-entropy: the gradient is that of fkl, the value
        is larger by the entropy of p. With approx="bucket" its tail is one token and the value a
        lower bound of the divergence (data processing). Raises RunFault where a value is infinite,
        not a number or negative; on a device that the host would have to wait for, such a value is
        NaN instead.
        """
        require(approx in (None, "bucket"), "approx", "be null or bucket", approx)
        if self.name == "ce_hard" or not isinstance(teacher, CompressedTeacher):
            full = None if isinstance(teacher, CompressedTeacher) else teacher
            values, good = self.unchecked(draft_logits, full, labels)
        else:
            values, good = self._of_compressed(draft_logits, teacher, approx)
        if not shows_numbers_at_once(good.device):
            return torch.where(good, values, math.nan)
        if not bool(good.all()):
            self.complain(draft_logits, teacher, values.detach())
        return values

    def unchecked(
        self,
        draft_logits: Tensor,
        teacher: Tensor | None,
        labels: Tensor | None = None,
        *,
        mean_reward: Tensor | None = None,
        log_mass: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The divergence per position, and where it is sound, [N] bool; it waits for no device.

        mean_reward: see `losses.tvd_pp`; log_mass: see `losses.tvd`, for a divergence with
        `whole_mass`.
        """
        draft = warm(draft_logits, self.draft_temperature)
        if self.name == "ce_hard":
            if labels is None:
                raise UserError("ce_hard needs labels, got none")
            return self._scaled(type(self).formula(draft, labels))
        if teacher is None:
            raise UserError(f"{self.name} needs the logits of the target, got none")
        further = {"mean_reward": mean_reward} if self.name == "tvd_pp" else {}
        if self.whole_mass:
            further["log_mass"] = log_mass
        target = warm(teacher, self.teacher_temperature)
        return self._scaled(type(self).formula(draft, target, **self.options, **further))

    def _of_compressed(
        self, draft_logits: Tensor, teacher: CompressedTeacher, approx: str | None
    ) -> tuple[Tensor, Tensor]:
        """`unchecked` of part of p."""
        self.check_compressed(approx)
        draft, sound = warm(draft_logits, self.draft_temperature), sums_to_one(teacher)
        if approx is None:
            if teacher.tail_ids is None:
                sound = sound & (teacher.log_tail.float().exp() <= 1e-3).all()
            values, good = self._scaled(compressed_ce(draft, teacher))
        else:
            found = type(self).formula(*bucket(draft, teacher), **self.options)
            values, good = self._scaled(found)
        return values, good & sound

    def _scaled(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The values [N] of the formula by `temperature_scale`, and where they are sound."""
        # the surrogate has any sign
        floor = -math.inf if self.name == "tvd_pp" else NEGATIVE_TOLERANCE
        good = values.detach().isfinite() & (values.detach() >= floor)
        return values * self.draft_temperature**2 if self.temperature_scale else values, good

    def complain(
        self, draft_logits: Tensor, teacher: Tensor | CompressedTeacher | None, values: Tensor
    ) -> None:
        """Raise with the reason why these values are not sound."""
        draft = warm(draft_logits, self.draft_temperature)
        complain(self.name, draft, None if self.name == "ce_hard" else teacher, values)


def _named(formula: Callable[..., Tensor]) -> type[Divergence]:
    """The class of a formula; its options are the parameters that are numbers."""
    parameters = inspect.signature(formula).parameters
    options: list[tuple[str, type, float]] = [
        (parameter.name, float, parameter.default)
        for parameter in parameters.values()
        if isinstance(parameter.default, float)
    ]
    own = {
        "name": formula.__name__,
        "formula": staticmethod(formula),
        "whole_mass": "log_mass" in parameters,
    }
    return dataclasses.make_dataclass(
        formula.__name__, options, bases=(Divergence,), namespace=own, frozen=True
    )


DIVERGENCES: dict[str, type[Divergence]] = {f.__name__: _named(f) for f in FORMULAS}
CE_HARD = DIVERGENCES["ce_hard"]()  # the plain cross-entropy: no temperature of a distillation


def parse_divergence(text: str, key: str = "divergence") -> Divergence:
    """The divergence that `text` names: `name[:option][,draft_temperature=...]
    [,teacher_temperature=...]`. Raises UserError, by `key`."""
    return parse(key, text, DIVERGENCES)


def complain(
    name: str, draft: Tensor, teacher: Tensor | CompressedTeacher | None, values: Tensor
) -> None:
    """Raise RunFault or UserError with the reason why values are broken; it may sync the host."""
    models = {"draft": draft}
    if isinstance(teacher, Tensor):
        models["target"] = teacher
    elif teacher is not None and not bool(sums_to_one(teacher)):
        raise RunFault("stored log-probs of the target do not sum to one: rebuild the traces")
    for who, logits in models.items():
        if not bool(wide(logits).logsumexp(-1).isfinite().all()):
            raise RunFault(f"logits of the {who} contain NaN or Inf at a trained position")
    if not bool(values.isfinite().all()):
        raise RunFault(
            f"{name} is infinite: one model excludes a token that the other produces: use tvd or "
            "jsd, or the same top-k and top-p for both"
        )
    if bool((values < NEGATIVE_TOLERANCE).any()) and name != "tvd_pp":
        lowest = values.min().item()
        raise RunFault(f"{name} is negative ({lowest:.3g}): the log-probabilities lost precision")
    assert isinstance(teacher, CompressedTeacher)
    mass = teacher.log_tail.float().exp().max().item()
    raise UserError(
        f"CompressedTeacherError: the stored top-k leaves out {mass:.3g} of the mass, limit 0.001: "
        "store samples of the tail (teacher_samples), raise teacher_top_k, or set approx=bucket"
    )
