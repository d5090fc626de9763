"""The setting `method.divergence`, for the recipes that have one."""

from __future__ import annotations

from dataclasses import dataclass

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

    # loss between the target's distribution and the drafter's, as jsd:0.3, lk_hybrid:3, kl_mix:0.9
    divergence: str = key("fkl", Rule(choices(DIVERGENCES)))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.divergence = spelled(self.parsed_divergence)  # one spelling for one divergence

    @property
    def parsed_divergence(self) -> Divergence:
        """The divergence that `divergence` names."""
        return parse_divergence(self.divergence, "method.divergence")
