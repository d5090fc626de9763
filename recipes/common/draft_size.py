"""Which size of a fresh drafter: acceptance after a short training against what drafting costs.

Acceptance grows with the size ever more slowly, the cost of a round in proportion to it, so the
predicted speed-up has a maximum. Layers cost time one after another while width hardly does
(FastDraft, Zafrir et al. 2024): every number of parameters is tried at several depths.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from drafters.causal_lm import CausalLMDrafter, shrunk_config
from eval.costs import cost_of
from eval.policies.table import make_budget
from eval.speed_model import mbsu, modelled_speedup
from target.model import Target
from trainer.config import UserError, require
from trainer.files import read_json, write_json

PREDICTIONS = ("mbsu_params", "mbsu", "modelled_speedup")
FOUND = "size_search.json"
Trial = Callable[[int, str, CausalLMDrafter], dict[str, Any]]


def check_search(config: Any) -> None:
    """Of a recipe's Config: search_parameters, _layers, _steps and _by."""
    require(config.search_by in PREDICTIONS, "method.search_by",
            f"be one of {', '.join(PREDICTIONS)}", config.search_by)  # fmt: skip
    for key in ("search_parameters", "search_layers"):
        numbers = getattr(config, key)
        require(min(numbers, default=1) >= 1, f"method.{key}", "be numbers >= 1", numbers)
    require(bool(config.search_layers), "method.search_layers", "name a depth", [])
    given = [k for k in ("draft_layers", "draft_hidden_size") if getattr(config, k) is not None]
    if config.search_parameters and given:
        raise UserError(
            f"method.search_parameters chooses the size: leave out method.{given[0]}, or the search"
        )


class SizeSearch:
    def __init__(self, config: Any, target: Target):
        if config.search_by == "modelled_speedup" and target.sharded is not None:
            raise UserError(
                "method.search_by=modelled_speedup goes by measured times, which mean nothing with "
                "model.device_map=fsdp2: take mbsu"
            )
        self.config, self.target = config, target
        self.rows: list[dict[str, Any]] = []  # of the shapes tried, best first
        self.shapes = self._shapes()

    @property
    def overrides(self) -> dict[str, Any]:
        """Of trainer.* in a trial."""
        steps = self.config.search_steps
        warmup = round(self.config.warmup_share * steps)
        return {"max_steps": steps, "lr_warmup_steps": warmup, "eval_every": steps}

    def is_done(self, folder: Path) -> bool:
        return (folder / FOUND).exists()

    def run(
        self, folder: Path, trial: Trial, K: int, is_main: bool, barrier: Callable[[], None]
    ) -> None:
        """Train every shape and keep what came of it in `folder`; a second call reads that, since
        times differ from call to call. trial(number, name, drafter) -> what the evaluation on
        held-out text says at the end, tokens_per_round among it."""
        path = folder / FOUND
        if not self.is_done(folder):
            rows = [self._row(number, trial, K) for number in range(len(self.shapes))]
            rows.sort(key=lambda row: -row[self.config.search_by])
            if is_main:
                write_json(path, rows)
        barrier()
        remedy = "delete this file and start the same command again: the sizes are compared anew"
        self.rows = read_json(path, remedy, list)
        if is_main:
            print(self.table())

    def _row(self, number: int, trial: Trial, K: int) -> dict[str, Any]:
        layers, width = self.shapes[number]
        torch.manual_seed(0)
        drafter = self._make(layers, width)
        found = trial(number, f"{layers}x{width}", drafter)
        drafter.eval()  # training left it as it trains, with dropout
        cost = cost_of(drafter, self.target, make_budget("fixed", K))
        tokens = found["tokens_per_round"]
        return {
            "layers": layers, "hidden_size": width,
            "parameters": drafter.num_parameters,
            "parameters_besides_embeddings": _inner_parameters(drafter.model),
            "alpha": found["alpha"], "tokens_per_round": tokens,
            "mbsu_params": mbsu(tokens, 1, cost.round_parameters),
            "mbsu": mbsu(tokens, 1, cost.round_bytes),
            "modelled_speedup": modelled_speedup(tokens, 1, cost.round_time, cost.verify),
        }  # fmt: skip

    def chosen(self) -> CausalLMDrafter:
        return self._make(self.rows[0]["layers"], self.rows[0]["hidden_size"])

    def table(self) -> str:
        lines = [f"{'shape':>9} {'parameters':>11} {'alpha':>6} {'tau':>5} "
                 + " ".join(f"{name:>16}" for name in PREDICTIONS)]  # fmt: skip
        for row in self.rows:
            shape = f"{row['layers']}x{row['hidden_size']}"
            predicted = " ".join(f"{row[name]:16.3f}" for name in PREDICTIONS)
            lines.append(
                f"{shape:>9} {row['parameters']:11} {row['alpha']:6.3f} "
                f"{row['tokens_per_round']:5.2f} {predicted}"
            )
        return "\n".join(lines)

    def _make(self, layers: int, width: int) -> CausalLMDrafter:
        return CausalLMDrafter.from_target(
            self.target, num_layers=layers, hidden_size=width,
            tie_embeddings=self.config.tie_embeddings,
        )  # fmt: skip

    def _shapes(self) -> list[tuple[int, int]]:
        """(layers, width): of every depth the widths that come closest to the numbers asked for."""
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


def _inner_parameters(model: Any) -> int:
    """Without the matrices that look up and score tokens."""
    ends = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    return sum(p.numel() for p in model.parameters() if id(p) not in ends)
