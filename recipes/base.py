"""The contract of a recipe: `Recipe`, `Stage`, `Objective`, and how a recipe is loaded by name.

A recipe is `<name>.py` with `Config` (defaults are the vetted setting) and `Recipe`, and
`<name>.yaml` with what differs from the defaults. It is found by its file name. A preset is
`<name>.<preset>.yaml`, read on top of that: `published` holds the setting of the paper. A `Recipe`
makes a drafter and lists the stages that train it; each `Stage` carries the `Objective` it trains
with. The training loop is in `trainer/`, the phases of a run are in `phases/`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from data.batches import Batch
from data.packing import RawText
from data.split import HeldOut
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from recipes.common.config import Config
from recipes.common.divergence import DivergenceConfig, check_step
from target.model import Target
from target.outputs import TargetOutputs, TargetRequest
from trainer.checks import require_one_of
from trainer.config import suggest
from trainer.errors import UserError
from trainer.losses import LossOutput
from trainer.objective import State

if TYPE_CHECKING:
    from recipes.common.draft_size import SizeSearch

FOLDER = Path(__file__).parent

DrafterT = TypeVar("DrafterT", bound=TrainedDrafter)
K = TypeVar("K")
V = TypeVar("V")

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor | float]]  # of LossOutput: (sum, count)
# (drafter, maybe wrapped for several processes; step) -> numbers for JSON. The checkpoint with the
# highest `select` is the best one; where `select` is None the last one is taken.
Evaluate = Callable[[nn.Module, int], dict[str, Any]]


@dataclass
class NoMethod:
    """The empty section `method` of commands that train nothing."""


@dataclass(frozen=True)
class Needs:
    """The text that a stage trains on.

    `mix`: shares of the sources in `data.batches`; `per`: whether a "batch" or each "example" draws
    its source; `ramp_share`: share of the steps over which draft text rises to its share;
    `teacher`: whether batches carry the compressed teacher that is stored with the traces; `text`:
    raw text to read instead of all this."""

    mix: dict[str, float]
    per: str = "batch"
    ramp_share: float = 0.0
    teacher: bool = False
    text: RawText | None = None


@dataclass(frozen=True)
class Start:
    """The state in which a stage begins. `traces`: the training text; `drafters`: the drafters of
    the stages before it by row of the report, where "before" is the one that the run started with;
    `max_steps`: number of steps of the stage; `max_new_tokens`: longest text that the drafter
    writes itself; `held_out`: the turns that are not trained on, for a stage whose text is not
    `traces`."""

    drafter: TrainedDrafter
    traces: Sequence[Trace]
    drafters: Mapping[str, TrainedDrafter]
    max_steps: int
    max_new_tokens: int
    held_out: HeldOut | None = None


@dataclass
class Context:
    """The things that `Objective.refresh` may use. `batch`: the stored batch of this step;
    `drafter`: the drafter with its present weights, without the wrappers of several processes;
    generate(prompts, temperature, max_new_tokens, stream) -> its responses, [B] lists of ids;
    outputs() -> what `target_request` asks for on that batch; `seed` and `folder`: of the run."""

    batch: Batch
    drafter: TrainedDrafter
    generate: Callable[[list[list[int]], float, int, int], list[list[int]]]
    outputs: Callable[[], TargetOutputs | None]
    seed: int = 0
    folder: Path = Path()


class Share(Protocol):
    """Divides work among the processes: each key's value is computed by one of them, and every
    process gets all values, in the order of `sizes`, which says how much work each key is."""

    def __call__(self, sizes: Mapping[K, int], compute: Callable[[K], V]) -> dict[K, V]: ...


def alone(sizes: Mapping[K, int], compute: Callable[[K], V]) -> dict[K, V]:
    """The `Share` of one process."""
    return {key: compute(key) for key in sizes}


class Objective:
    """The loss of a stage, and what it needs of the target. An objective that runs the target by
    itself calls `target.sync()` before processes wait for each other: before it gathers, and in
    `loss` before its drafter computes. `computes_batches`: `refresh` runs drafter or target; where
    it does not, several processes make the batches and denominators of a step during the step
    before it."""

    computes_batches: bool = False

    def target_request(self, batch: Batch, step: int) -> TargetRequest | None:
        """Name the outputs of the frozen target that `loss` needs; None for none."""
        return None

    def denominators(self, batch: Batch, step: int) -> Mapping[str, float]:
        """Return the denominator of each term of the loss, by name. They are known before the
        forward pass, so that the loop can sum them over ranks and accumulation steps before it
        scales a loss: exact for any mixture of lengths, under DeepSpeed too."""
        raise NotImplementedError

    def loss(
        self, drafter: nn.Module, batch: Batch, target_outputs: TargetOutputs | None, step: int,
        denominators: Mapping[str, float] | None = None,
    ) -> LossOutput:  # fmt: skip
        """Compute the terms of the loss. `drafter` may be wrapped for several processes: call it,
        and read attributes of `unwrapped(drafter)`. `target_outputs`: what `target_request` asked
        for; `denominators`: what the loop divides each term by, None where the caller adds the
        terms up in another way."""
        raise NotImplementedError

    def refresh(self, step: int, context: Context) -> Batch | None:
        """Return the batch to train on in place of the stored one; None to take no step on it."""
        return context.batch

    def evaluated(
        self, evaluate: Evaluate | None, dev: Sequence[Trace], share: Share = alone
    ) -> Evaluate | None:
        """Return the function that evaluates the drafter on the held-out training texts `dev`, in
        place of the usual `evaluate`; None for no evaluation. `share` divides work on these texts
        among the processes."""
        return evaluate

    def state_dict(self) -> State:
        """Return what a resumed run needs beside weights and optimiser."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class Stage:
    """One training of the recipe.

    `data`: the text; `overrides`: settings of trainer.* that the stage has its own values for;
    `start`: "previous" to start with the drafter of the stage before, "base" with the one that the
    run started with; `prepare`: makes the module to train out of that drafter; `row`: name of the
    stage's drafter in the report, None for intermediate stages; `packs`: whether several texts may
    share a row; `shares_texts`: whether each position of a text trains by itself, so that processes
    may share a text, which a mean over texts does not allow; `lr_multiplier`: factor on trainer.lr,
    by name of the parameter; `shared`: the settings that decide the stage's weights, where other
    runs may take them from the cache."""

    name: str
    objective: Objective
    data: Needs
    overrides: Mapping[str, object] = field(default_factory=dict)
    prepare: Callable[[Start], TrainedDrafter] = lambda start: start.drafter
    start: str = "previous"
    row: str | None = None
    packs: bool = False
    shares_texts: bool = False
    lr_multiplier: Callable[[str], float] = lambda name: 1.0
    shared: Mapping[str, object] | None = None


class Recipe:
    """A method: the drafter it builds, and the stages that train it.

    `size_search`: short trainings that choose the drafter's size before `build`; `unserved`: why no
    engine serves the trained drafter, None if one does; `no_lora`: why trainer.lora_rank does not
    apply, None if it does; `trains_acceptance`: whether the drafter gets an acceptance head;
    `needs_layers`: what it does with the target's layers, None if stored states are enough."""

    size_search: SizeSearch | None = None
    unserved: str | None = None
    no_lora: str | None = None
    trains_acceptance: ClassVar[bool] = False
    needs_layers: ClassVar[str | None] = None

    def __init__(self, config: object, target: Target, given: TrainedDrafter | None = None):
        """`config`: of the recipe's own `Config`; `given`: the trained drafter that model.drafter
        names. UserError if the recipe cannot train that, or no drafter of this target."""
        raise NotImplementedError

    @property
    def unroll(self) -> tuple[str, int] | None:
        """The key that says over how many drafting steps training unrolls the drafter on its own
        states, and that number; None for a drafter that is not unrolled."""
        return None

    @property
    def trains(self) -> type[TrainedDrafter]:
        """The class of the drafter that it trains."""
        return CausalLMDrafter

    @property
    def builds_from_traces(self) -> bool:
        """Whether `build` reads the traces, so that it must wait for them."""
        return False

    def build(self, traces: Sequence[Trace]) -> TrainedDrafter:
        """Build a fresh drafter, where model.drafter is null."""
        raise NotImplementedError

    def widen(self, drafter: TrainedDrafter, traces: Sequence[Trace]) -> None:
        """Let model.drafter draft further tokens of these texts, where the settings ask for it."""

    def stages(self) -> list[Stage]:
        """List the stages in order. The same objects each time: objectives keep their state."""
        raise NotImplementedError

    @staticmethod
    def max_depth(method: Any) -> int | None:  # noqa: ANN401 - the recipe's own `Config`
        """The most tokens of a round that a drafter of these settings drafts; None: any number."""
        return None

    @staticmethod
    def has_slots(method: Any) -> bool:  # noqa: ANN401 - the recipe's own `Config`
        """Whether a drafter of these settings drafts each token without those before it."""
        return False

    @staticmethod
    def check_launch(config: Config, num_processes: int) -> None:
        """Refuse settings that `num_processes` processes cannot train, before anything is
        loaded."""
        if isinstance(config.method, DivergenceConfig):
            micro_steps = config.trainer.gradient_accumulation_steps
            check_step("method.divergence", config.method.divergence, micro_steps, num_processes)

    @staticmethod
    def describe(config: Config) -> str:
        """Describe for `dry_run` what the stages read beside the traces."""
        return ""

    def calibrate(self, drafter: TrainedDrafter, dev: Sequence[Trace]) -> None:
        """Fit to held-out text what the trained drafter says of its own tokens, before it is
        measured and saved."""

    def about(self) -> dict[str, object]:
        """Return what the report says of the trained drafter beside the usual facts."""
        return {}


def unwrapped(drafter: nn.Module) -> TrainedDrafter:
    """Return the drafter inside of the wrapper that DDP or DeepSpeed puts around it."""
    inner = getattr(drafter, "module", drafter)
    assert isinstance(inner, TrainedDrafter), "objectives of recipes train drafters"
    return inner


def check_kind(drafter: TrainedDrafter, wanted: type[DrafterT], recipe: str) -> DrafterT:
    """Return `drafter`, of the kind that `recipe` trains; UserError for any other kind, those of
    subclasses of `wanted` included."""
    if isinstance(drafter, wanted) and drafter.kind == wanted.kind:
        return drafter
    raise UserError(
        f"model.drafter is a drafter of kind {drafter.kind!r}, recipe={recipe} trains "
        f"{wanted.kind!r}: name another one, or set model.drafter=null to start with a fresh one"
    )


def names() -> list[str]:
    """List the names of all recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "base")


def load(name: str, preset: str | None = None) -> tuple[ModuleType, list[Path]]:
    """Load a recipe: its module, and its YAML files, its own and that of the preset."""
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
    """List the recipes, a line each: the name and the first line of the docstring."""
    lines = []
    for name in names():
        module, _ = load(name)
        lines.append(f"  {name:14} {(module.__doc__ or '').strip().splitlines()[0]}")
    return "\n".join(["recipes:", *lines])
