"""The setting `method.divergence`, for the recipes that have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trainer.config import Section
from trainer.divergence import DIVERGENCES, Divergence, parse_divergence
from trainer.errors import UserError
from trainer.keys import Rule, key
from trainer.specs import choices, spelled


def check_step(key: str, divergence: object, micro_steps: int, num_processes: int) -> None:
    """UserError for tvd_pp, which the setting `key` names, where a step has several batches. Mean
    and deviation of its rewards are those of one batch, and are known only after the forward pass:
    the gradient would not be that of all batches together."""
    if str(divergence).partition(",")[0] == "tvd_pp" and micro_steps * num_processes > 1:
        raise UserError(
            "its mean and deviation are those of one batch, and a step has "
            f"{micro_steps * num_processes} (trainer.gradient_accumulation_steps={micro_steps}, "
            f"processes: {num_processes})",
            key=key,
            value=divergence,
            remedy="train in one process with trainer.gradient_accumulation_steps=1 and a larger "
            "trainer.batch_size, or take tvd",
        )


@dataclass
class DivergenceConfig(Section):
    """Settings of a method with a divergence. `divergence`: a name of trainer/divergence.py with
    its options."""

    MOVED: ClassVar[Mapping[str, str]] = {
        "beta": "method.divergence=jsd:<beta>",
        "eta": "method.divergence=lk_hybrid:<eta>",
        "mix": "method.divergence=kl_mix:<mix>",
        "draft_temperature": "method.divergence=<name>,draft_temperature=<value>",
        "teacher_temperature": "method.divergence=<name>,teacher_temperature=<value>",
        "loss_temperature_scale": "method.divergence=<name>,temperature_scale=true",
    }

    # loss between the target's distribution and the drafter's, as jsd:0.3, lk_hybrid:3, kl_mix:0.9
    divergence: str = key("fkl", Rule(choices(DIVERGENCES)))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.divergence = spelled(self.parsed_divergence)  # one spelling for one divergence

    @property
    def parsed_divergence(self) -> Divergence:
        """The divergence that `divergence` names."""
        return parse_divergence(self.divergence, "method.divergence")

    @classmethod
    def translated(cls, stored: dict[str, object]) -> dict[str, object]:
        """Translate the options of earlier versions, which were keys of their own."""
        new = {key: value for key, value in stored.items() if key not in cls.MOVED}
        given: dict[str, Any] = dict(stored)
        name = given.get("divergence", cls.divergence)
        if "loss_temperature_scale" in given:
            given["temperature_scale"] = given.pop("loss_temperature_scale")
        kind = DIVERGENCES.get(name)
        if kind is not None and len(new) < len(stored):
            fields = kind.__dataclass_fields__
            new["divergence"] = spelled(kind(**{k: given[k] for k in fields if k in given}))
        return new
