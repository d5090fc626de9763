"""The part of the speculators library's configuration that names the method and the target."""

from __future__ import annotations

from pathlib import Path

from drafters.formats.keys import Proposal, SpeculatorsConfig
from trainer.errors import UserError


def check_proposal(folder: Path, config: SpeculatorsConfig, algorithm: str) -> None:
    """Check `speculators_config` of an export; UserError where its readers would refuse it."""
    method: Proposal = (config.get("proposal_methods") or [{}])[0]
    default, proposed = config.get("default_proposal_method"), method.get("proposal_type")
    needed = {
        "algorithm": config.get("algorithm") == algorithm,
        "proposal_methods": isinstance(method.get("speculative_tokens"), int),
        "default_proposal_method": default == proposed == "greedy",
        "verifier": bool((config.get("verifier") or {}).get("name_or_path")),
    }
    for key, good in needed.items():
        if not good:
            raise UserError(f"{folder}: key 'speculators_config.{key}' is missing or wrong")
