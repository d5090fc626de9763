"""EAGLE heads of both versions, made alike."""

from __future__ import annotations

from drafters.eagle import EagleDrafter
from drafters.eagle1 import Eagle1Drafter, Eagle1Settings
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings


def eagle_settings(version, captures, width, **flags):
    made = {1: Eagle1Settings, 3: Eagle3Settings}[version]
    return made(captures, width, **flags)


def build_eagle(target, settings, *, kept=None, **start) -> EagleDrafter:
    """`start`: of EAGLE-3, how a fresh head begins."""
    if isinstance(settings, Eagle1Settings):
        assert kept is None
        assert not start
        return Eagle1Drafter.build(target, settings)
    return Eagle3Drafter.build(target, settings, kept=kept, **start)
