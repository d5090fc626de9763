"""What a recipe says about itself; the loop and the phases are elsewhere.

A recipe is `<name>.py` with `Config` (defaults are the vetted setting) and `Recipe`, and
`<name>.yaml` with what differs from the defaults. It is found by its file name. A preset is
`<name>.<preset>.yaml`, read on top of that: `published` holds the setting of the paper. A `Recipe`
makes a drafter and lists the stages that train it; each `Stage` carries the `Objective` it trains
with.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from data.batches import Batch
from data.packing import RawText
from data.traces import Trace
from drafters.base import TrainedDrafter
from recipes.common.config import Config
from target.model import TargetOutputs, TargetRequest
from trainer.checks import require_one_of
from trainer.config import UserError, suggest
from trainer.losses import LossOutput
from trainer.objective import State

if TYPE_CHECKING:
    from recipes.common.draft_size import SizeSearch

FOLDER = Path(__file__).parent

Evaluate = Callable[[Any, int], dict[str, Any]]  # (drafter, step) -> numbers for JSON


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
class Start:
    """What a stage begins with. `traces`: the training text; `drafters`: by row of the report,
    those of the stages before it, "before" is where the run started; `max_steps`: of the stage;
    `max_new_tokens`: of the drafter's own text."""

    drafter: Any
    traces: Sequence[Trace]
    drafters: dict[str, Any]
    max_steps: int
    max_new_tokens: int


@dataclass
class Context:
    """What `Objective.refresh` may use. `batch`: the stored one of this step; `drafter`: as it is
    now, without the wrappers of several processes; generate(prompts, temperature, max_new_tokens,
    stream) -> its responses, [B] lists of ids; outputs() -> what `target_request` asks for on that
    batch; `seed` and `folder`: of the run."""

    batch: Batch
    drafter: Any
    generate: Callable[[list[list[int]], float, int, int], list[list[int]]]
    outputs: Callable[[], TargetOutputs | None]
    seed: int = 0
    folder: Path = Path()


class Objective:
    """What a stage trains on. One that asks the target by itself calls `target.sync()` before
    processes wait for each other: before it gathers, and in `loss` before its drafter computes."""

    def target_request(self, batch: Batch, step: int) -> TargetRequest | None:
        """What `loss` needs of the frozen target; None for nothing."""
        return None

    def denominators(self, batch: Batch, step: int) -> Sequence[float]:
        """One per term of the loss. They are known before the forward pass, so that the loop can
        sum them over ranks and accumulation steps before it scales a loss: exact for any mixture of
        lengths, under DeepSpeed too."""
        return [batch.num_supervised]

    def loss(
        self, drafter: nn.Module, batch: Batch, target_outputs: TargetOutputs | None, step: int
    ) -> LossOutput:
        """`drafter` may be wrapped for several processes: it is called, and `unwrapped` gives its
        attributes."""
        raise NotImplementedError

    def refresh(self, step: int, context: Context) -> Batch | None:
        """The batch that is trained on in place of the stored one; None for none."""
        return context.batch

    def evaluated(self, evaluate: Evaluate | None, dev: Sequence[Trace]) -> Evaluate | None:
        """What to evaluate the drafter with on the held-out training texts `dev`, in place of the
        usual `evaluate`."""
        return evaluate

    def state_dict(self) -> State:
        """What a resumed run needs beside weights and optimiser."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`."""


@dataclass(frozen=True)
class Stage:
    """One training of the recipe.

    `data`: its text; `overrides`: of trainer.*; `prepare`: makes what is trained of the drafter it
    starts with, which is that of the stage before ("previous") or where the run started ("base");
    `row`: how the report calls its drafter, None for intermediate stages; `packs`: several texts
    may share a row; `lr_multiplier`: of trainer.lr, by the parameter's name; `shared`: the settings
    that decide the stage's weights, where other runs may take them from the cache."""

    name: str
    objective: Objective
    data: Needs
    overrides: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Start], Any] = lambda start: start.drafter
    start: str = "previous"
    row: str | None = None
    packs: bool = False
    lr_multiplier: Callable[[str], float] = lambda name: 1.0
    shared: dict[str, Any] | None = None


class Recipe:
    """`builds_from_traces`: `build` counts their tokens; `size_search`: short trainings before
    `build`; `unserved`: why no engine serves what it trains; `no_lora`: why trainer.lora_rank means
    nothing to it; `trains_acceptance`: its drafter gets an acceptance head."""

    builds_from_traces: bool = False
    size_search: SizeSearch | None = None
    unserved: str | None = None
    no_lora: str | None = None
    trains_acceptance: ClassVar[bool] = False

    def build(self, traces: Sequence[Trace]) -> TrainedDrafter:
        """A fresh drafter, where model.drafter is null."""
        raise NotImplementedError

    def accept(self, drafter: Any) -> None:
        """Refuse a given drafter that this recipe cannot train, by UserError."""
        raise NotImplementedError

    def stages(self) -> list[Stage]:
        """In order. The same objects each time: objectives keep their state."""
        raise NotImplementedError

    @staticmethod
    def describe(config: Config) -> str:
        """What the stages read beside the traces, for `dry_run`."""
        return ""

    def about(self) -> dict[str, Any]:
        """What the report says of the trained drafter beside the usual facts."""
        return {}


def unwrapped(drafter: nn.Module) -> Any:
    """The drafter itself, of what several processes train."""
    return getattr(drafter, "module", drafter)


def check_kind(drafter: Any, kind: str, recipe: str) -> None:
    if drafter.kind != kind:
        raise UserError(
            f"model.drafter is a drafter of kind {drafter.kind!r}, recipe={recipe} trains "
            f"{kind!r}: name another one, or model.drafter=null to begin anew"
        )


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "base")


def load(name: str, preset: str | None = None) -> tuple[ModuleType, list[Path]]:
    """The recipe's module and its YAML files: its own, and that of the preset."""
    if name not in names():
        raise UserError(
            f"unknown recipe {name!r}; available: {', '.join(names())}{suggest(name, names())}"
        )
    files = [path for path in (FOLDER / f"{name}.yaml",) if path.exists()]
    if preset is not None:
        known = presets(name)
        require_one_of("preset", preset, tuple(known) or ("left out: this recipe has none",))
        files.append(known[preset])
    return importlib.import_module(f"recipes.{name}"), files


def presets(name: str) -> dict[str, Path]:
    """The recipe's presets by name, and their YAML files."""
    return {path.name.split(".")[1]: path for path in sorted(FOLDER.glob(f"{name}.*.yaml"))}


def listing() -> str:
    """One line per recipe: its name and the first line of its docstring."""
    lines = []
    for name in names():
        module, _ = load(name)
        lines.append(f"  {name:14} {(module.__doc__ or '').strip().splitlines()[0]}")
    return "\n".join(["recipes:", *lines])
