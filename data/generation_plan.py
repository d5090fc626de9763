"""The settings that decide which traces a store of target text holds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.prompts import Prompt
from data.trace_identity import TraceIdentity
from target.model import Target

# settings of a plan that have the same names in data.*
DRAWN = ("top_k", "top_p", "max_new_tokens", "samples_per_prompt")
TEACHER = ("teacher_top_k", "teacher_samples")


@dataclass(frozen=True)
class GenerationPlan:
    """Every setting that decides which traces a store holds."""

    source: str  # description, for readers
    prompts: tuple[Prompt, ...]
    temperatures: tuple[float, ...]  # cycled over prompts and samples
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 96
    samples_per_prompt: int = 1
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    lookahead: int = 0
    teacher_top_k: int = 0
    teacher_samples: int = 0
    system_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    long_prompts: str = "refuse"
    # by a serving engine, which draws its own random numbers; of the report's text: its name
    served: bool | str = False

    @classmethod
    def from_config(
        cls, config: DataConfig, prompts: Sequence[Prompt], seed: int
    ) -> GenerationPlan:
        """The plan of a configuration for these prompts."""
        shown = ("system_prompt", "chat_template_kwargs", "max_prompt_tokens", "long_prompts")
        return cls(
            source=config.prompts,
            prompts=tuple(prompts),
            temperatures=tuple(config.temperature),
            stop_strings=tuple(config.stop_strings),
            seed=seed,
            served=config.engine != "hf",
            **{name: getattr(config, name) for name in (*DRAWN, *TEACHER, *shown)},
        )

    @property
    def stored_tokens(self) -> int:
        """Upper bound of a row's response, look-ahead and fixed tokens."""
        fixed = any(p.response is not None for p in self.prompts)
        return self.max_new_tokens * (1 + fixed) + self.lookahead

    @property
    def prompts_hash(self) -> str:
        """Hash of what the target is shown: reports with the same hash are comparable."""
        return self._hash([p.hash for p in self.prompts])

    def _hash(self, *parts: object) -> str:
        text = json.dumps([*parts, self.system_prompt, self.chat_template_kwargs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def identity(self, target: Target) -> TraceIdentity:
        """Identity of the store that holds these traces of this target."""
        # all that a trace takes over from its prompt, and which prompts are left out
        rows = [[p.hash, p.response, p.domain, p.conversation_id] for p in self.prompts]
        same = (*DRAWN, "seed", "lookahead", *TEACHER, "served")
        return TraceIdentity(
            prompts=self.source,
            prompts_hash=self._hash(rows, self.max_prompt_tokens, self.long_prompts),
            target=target.fingerprint,
            temperatures=list(self.temperatures),
            stop_strings=list(self.stop_strings),
            **{name: getattr(self, name) for name in same},
        )


def traces_folder(plan: GenerationPlan, target: Target, cache_dir: str | Path) -> Path:
    """Folder of the store of these traces, the same for all runs that need them."""
    identity = json.dumps(dataclasses.asdict(plan.identity(target)), sort_keys=True)
    return Path(cache_dir) / "traces" / hashlib.sha256(identity.encode()).hexdigest()[:12]
