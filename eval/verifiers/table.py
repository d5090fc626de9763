"""The verifiers that have a name."""

from __future__ import annotations

from eval.verifiers.base import Verifier
from eval.verifiers.multi_round import MultiRound
from eval.verifiers.token import Token
from eval.verifiers.typical import Typical
from trainer.specs import parse

VERIFIERS: dict[str, type[Verifier]] = {one.name: one for one in (Token, MultiRound, Typical)}


def parse_verifier(text: str) -> Verifier:
    return parse("eval.verifier", text, VERIFIERS)
