"""The verifiers that have a name."""

from __future__ import annotations

from drafters.trees.tree import WITHOUT_REPLACEMENT
from eval.verifiers.base import Verifier
from eval.verifiers.block import Block
from eval.verifiers.lenient import Lenient
from eval.verifiers.multi_round import MultiRound
from eval.verifiers.token import Token
from eval.verifiers.typical import Typical
from target.sampling import Sampling
from trainer.specs import parse

VERIFIERS: dict[str, type[Verifier]] = {
    one.name: one for one in (Token, Block, MultiRound, Typical, Lenient)
}


def exact_verifier(form: str, sampling: Sampling) -> Verifier:
    """The lossless rule for drafts of this form; at temperature 0 all trees are judged alike."""
    sampled = form == WITHOUT_REPLACEMENT and sampling.temperature > 0
    return MultiRound() if sampled else Token()


def parse_verifier(text: str) -> Verifier:
    return parse("eval.verifier", text, VERIFIERS)
