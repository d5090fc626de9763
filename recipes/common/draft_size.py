"""The search for the size of a fresh drafter: acceptance after a short training against its cost.

Acceptance grows with the size ever more slowly, the cost of a round in proportion to it, so the
predicted speed-up has a maximum. Layers cost time one after another while width hardly does
(FastDraft, Zafrir et al. 2024): every number of parameters is tried at several depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafters.causal_lm import CausalLMDrafter, shrunk_config
from eval.costs import cost_of
from eval.policies.table import make_budget
from eval.speed_model import mbsu, modelled_speedup
from target.model import Target
from trainer.checks import require_read
from trainer.errors import UserError
from trainer.files import read_json, write_json

FOUND = "size_search.json"
WARMUP_SHARE = 0.02  # of the steps on raw text, over which the learning rate rises


class ShapeRow(TypedDict):
    """One shape in `size_search.json` and in the report."""

    layers: int
    hidden_size: int
    parameters: int
    parameters_besides_embeddings: int
    alpha: float
    tokens_per_round: float
    mbsu_params: float
    mbsu: float
    modelled_speedup: float


PREDICTIONS: Mapping[str, Callable[[ShapeRow], float]] = {
    "mbsu_params": lambda row: row["mbsu_params"],
    "mbsu": lambda row: row["mbsu"],
    "modelled_speedup": lambda row: row["modelled_speedup"],
}


class SearchConfig(Protocol):
    """The settings of a recipe that its search reads; recipes/fastdraft.py says what they mean."""

    search_parameters: list[int]
    search_layers: list[int]
    search_steps: int
    search_by: str
    draft_layers: int | None
    draft_hidden_size: int | None
    tie_embeddings: bool | None


@dataclass(frozen=True)
class TrialResult:
    """The acceptance on held-out text at the end of a short training."""

    alpha: float
    tokens_per_round: float


Trial = Callable[[int, str, CausalLMDrafter], TrialResult]  # (number, name, drafter)


def check_search(config: SearchConfig) -> None:
    """UserError for settings of the search that nothing reads, or that exclude each other."""
    given = [k for k in ("draft_layers", "draft_hidden_size") if getattr(config, k) is not None]
    searches = bool(config.search_parameters)
    for key in ("search_by", "search_steps"):
        require_read(config, key, searches, "method.search_parameters")
    if searches and given:
        raise UserError(
            f"method.search_parameters chooses the size: leave out method.{given[0]}, or the search"
        )


class SizeSearch:
    """The search of one recipe. `rows`: the shapes that were tried, the chosen one first."""

    def __init__(self, config: SearchConfig, target: Target):
        if config.search_by == "modelled_speedup" and target.sharded is not None:
            raise UserError(
                "method.search_by=modelled_speedup goes by measured times, which mean nothing with "
                "model.device_map=fsdp2: take mbsu"
            )
        self.config, self.target = config, target
        self.rows: list[ShapeRow] = []
        self.shapes = self._shapes()

    @property
    def overrides(self) -> dict[str, object]:
        """The settings of trainer.* that a trial has its own values for."""
        steps = self.config.search_steps
        warmup = round(WARMUP_SHARE * steps)
        return {"max_steps": steps, "lr_warmup_steps": warmup, "eval_every": steps}

    def is_done(self, folder: Path) -> bool:
        """Whether `folder` holds the result of a search."""
        return (folder / FOUND).exists()

    def run(
        self, folder: Path, trial: Trial, K: int, is_main: bool, barrier: Callable[[], None]
    ) -> None:
        """Train every shape and write the result to `folder`; a second call reads it, since times
        differ from call to call."""
        path = folder / FOUND
        if not self.is_done(folder):
            rows = [self._row(number, trial, K) for number in range(len(self.shapes))]
            predicted = PREDICTIONS[self.config.search_by]
            rows.sort(key=lambda row: -predicted(row))
            if is_main:
                write_json(path, rows)
        barrier()
        remedy = "delete this file and rerun the same command, which compares the sizes again"
        self.rows = read_json(path, remedy, list)
        if is_main:
            print(self.table())

    def _row(self, number: int, trial: Trial, K: int) -> ShapeRow:
        layers, width = self.shapes[number]
        torch.manual_seed(0)
        drafter = self._make(layers, width)
        result = trial(number, f"{layers}x{width}", drafter)
        drafter.eval()  # after training, it still has dropout on
        cost = cost_of(drafter, self.target, make_budget("fixed", K))
        tokens = result.tokens_per_round
        return {
            "layers": layers,
            "hidden_size": width,
            "parameters": drafter.num_parameters,
            "parameters_besides_embeddings": _inner_parameters(drafter.model),
            "alpha": result.alpha,
            "tokens_per_round": tokens,
            "mbsu_params": mbsu(tokens, 1, cost.round_parameters),
            "mbsu": mbsu(tokens, 1, cost.round_bytes),
            "modelled_speedup": modelled_speedup(tokens, 1, cost.round_time, cost.verify),
        }

    def chosen(self) -> CausalLMDrafter:
        """Build a fresh drafter of the chosen shape."""
        return self._make(self.rows[0]["layers"], self.rows[0]["hidden_size"])

    def table(self) -> str:
        """Format the rows for the terminal."""
        predictions = " ".join(f"{name:>16}" for name in PREDICTIONS)
        lines = [f"{'shape':>9} {'parameters':>11} {'alpha':>6} {'tau':>5} {predictions}"]
        for row in self.rows:
            shape = f"{row['layers']}x{row['hidden_size']}"
            predicted = " ".join(f"{value(row):16.3f}" for value in PREDICTIONS.values())
            lines.append(
                f"{shape:>9} {row['parameters']:11} {row['alpha']:6.3f} "
                f"{row['tokens_per_round']:5.2f} {predicted}"
            )
        return "\n".join(lines)

    def _make(self, layers: int, width: int) -> CausalLMDrafter:
        return CausalLMDrafter.from_target(
            self.target,
            num_layers=layers,
            hidden_size=width,
            tie_embeddings=self.config.tie_embeddings,
        )

    def _shapes(self) -> list[tuple[int, int]]:
        """List the shapes to try as (layers, width): of every depth, the widths that come closest
        to the requested numbers of parameters."""
        config = self.target.model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or self.target.hidden_size // heads
        widths = range(head_dim, self.target.hidden_size + 1, head_dim)
        found: dict[tuple[int, int], None] = {}
        for layers in self.config.search_layers:
            sizes = {width: self._size(layers, width) for width in widths}
            for wanted in self.config.search_parameters:
                found[layers, min(sizes, key=lambda width: abs(sizes[width] - wanted))] = None
        return sorted(found)

    def _size(self, layers: int, width: int) -> int:
        shape = shrunk_config(self.target, layers, width, self.config.tie_embeddings)
        with torch.device("meta"):
            return _inner_parameters(AutoModelForCausalLM.from_config(shape))


def _inner_parameters(model: PreTrainedModel) -> int:
    """Count the parameters, without the matrices that look up and score tokens."""
    output = model.get_output_embeddings()
    assert output is not None, "a causal LM scores tokens"
    ends = {id(matrix.weight) for matrix in (model.get_input_embeddings(), output)}
    return sum(p.numel() for p in model.parameters() if id(p) not in ends)
