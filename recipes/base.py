"""What a recipe says about itself; the loop and the phases are elsewhere.

A recipe is `<name>.py` with `Config` (defaults are the vetted setting) and `Recipe`, and
`<name>.yaml` with what differs from the defaults. It is found by its file name.

    class Recipe:
        target_access = "outputs"           # outputs | forward | trainable
        def __init__(self, config: Config, target: Target): ...
        def stages(self) -> list[Stage]: ...
        builds_from_traces = False          # optional; true: `build` counts their tokens
        def build(self, traces) -> Drafter: ...   # a fresh one, where model.drafter is null
        size_search = None                  # optional; before `build`, sees short trainings
        def accept(self, drafter): ...      # refuse a given one that this recipe cannot train
        def enter(self, stage, drafter, max_steps) -> Drafter: ...  # optional, what it trains
        def made_by(self, stage) -> dict | None: ...  # optional: the settings of a stage that
                                                      # other runs may share, kept in the cache
        def observe(self, traces, drafters): ...  # optional; the training text and, by row, the
                                                  # drafters of the stages before ("before": start)
        def begin(self, stage, max_new_tokens): ...
        def evaluated(self, evaluate, dev): ...   # optional; what to evaluate with on the traces
                                                  # `dev` in place of the usual `evaluate`
        def target_request(self, batch, step) -> TargetRequest | None: ...
        def denominators(self, batch, step) -> list[float]: ...   # optional, of the loss terms
        def loss(self, batch, target_outputs, step) -> LossOutput: ...
        def refresh(self, step, context) -> Batch | None: ...     # optional, data drawn anew
        unserved = None                     # optional; why no engine serves what it trains
        no_lora = None                      # optional; why trainer.lora_rank means nothing to it
        packs = False                       # optional; true: several texts may share a row
        def lr_multiplier(self, name) -> float: ...  # optional, of the parameter of that name
        def about(self) -> dict: ...        # optional, what the report says of the drafter
        trains_acceptance = False           # optional; true: its drafter gets an acceptance head

`denominators` are known before the forward pass, so that the loop can sum them over ranks and
accumulation steps before it scales a loss: exact for any mixture of lengths, under DeepSpeed too.

`outputs` aside, a recipe that asks the target itself calls `target.meet()` before processes wait
for each other: before it gathers, and in `loss` before its drafter computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from data.batches import Batch
from data.packing import RawText
from data.target import LayerId
from trainer.config import UserError, suggest

FOLDER = Path(__file__).parent


@dataclass
class NoMethod:
    """For commands that train nothing."""


@dataclass(frozen=True)
class Needs:
    """The text of a stage. `mix`: shares of the sources in `data.batches`, drawn per "batch" or
    per "example"; draft text rises to its share over `ramp_share` of the steps; `teacher`: the
    compressed teacher stored with the traces; `text`: raw text instead of all this."""

    mix: dict[str, float]
    per: str = "batch"
    ramp_share: float = 0.0
    teacher: bool = False
    text: RawText | None = None


@dataclass(frozen=True)
class Stage:
    """One training of the recipe. `start`: from the
    weights of the stage before ("previous") or from where the drafter started ("base"); `row`: how
    the report calls its drafter, None for intermediate stages."""

    name: str
    needs: Needs
    overrides: dict[str, Any] = field(default_factory=dict)  # of trainer.*
    start: str = "previous"
    row: str | None = None


@dataclass(frozen=True)
class TargetRequest:
    layers: tuple[LayerId, ...] = ()
    logits: bool = True


@dataclass
class Context:
    """What `refresh` may use: the stored batch of this step and generation from the drafter as it
    is now. generate(prompts, temperature, max_new_tokens, stream) -> responses [B] of ids.
    outputs() -> what `target_request` asks for on that batch. `seed`: of the run; `folder`: the
    run's."""

    batch: Batch
    generate: Callable[[list[list[int]], float, int, int], list[list[int]]]
    outputs: Callable[[], Any] | None = None
    seed: int = 0
    folder: Path = Path()


def check_kind(drafter: Any, kind: str, recipe: str) -> None:
    if drafter.kind != kind:
        raise UserError(
            f"model.drafter is a drafter of kind {drafter.kind!r}, recipe={recipe} trains "
            f"{kind!r}: name another one, or model.drafter=null to begin anew"
        )


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "base")


def load(name: str) -> tuple[ModuleType, Path | None]:
    """The recipe's module and its YAML."""
    if name not in names():
        raise UserError(
            f"unknown recipe {name!r}; available: {', '.join(names())}{suggest(name, names())}"
        )
    yaml = FOLDER / f"{name}.yaml"
    return importlib.import_module(f"recipes.{name}"), yaml if yaml.exists() else None


def listing() -> str:
    """One line per recipe: its name and the first line of its docstring."""
    lines = []
    for name in names():
        module, _ = load(name)
        lines.append(f"  {name:14} {(module.__doc__ or '').strip().splitlines()[0]}")
    return "\n".join(["recipes:", *lines])
