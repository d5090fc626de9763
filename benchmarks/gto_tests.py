"""Why GTO gains nothing on the toy: is its gradient wrong, its training too weak, or no room left?

    python -m benchmarks.gto_tests [seed ...]       # seeds 0, 1, 2 by default; each is resumable

Seeds that the result holds already stay in it.

From the long base of `benchmarks.gto_claims` and its default tree, for each seed:

- gradient: a head that 20 steps of the token loss have moved from its reference goes a step along
  the negative gradient of the tree term alone, of the token loss, and along a random direction, all
  of the same length. Change of the expected tokens of a round, at the positions of the gradient and
  at those of other texts: does a small step raise it?
- fit: two texts, trained by the tree term alone until nothing changes, against a control whose
  advantage is 1 everywhere (the likelihood of the accepted path alone) and against the token loss.
- room: the expected tokens of the same trees drafted by the target itself.
- more trees: ten times the trees of a step, against the token loss on the same batches.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gto_claims import LOGGED, LONG, WORK, Experiment, tokens
from data.batches import Batch, Batches
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.round import Budget, DraftState, Steps
from eval.metrics import PromptCounters, hierarchical_difference
from eval.replay import TreeReplay
from phases.run import provenance
from recipes import gto
from target.branches import TextBranches
from target.cache import CachedModel
from target.model import Target
from target.nodes import TreeSlots
from target.outputs import TargetOutputs
from target.sampling import Sampling
from trainer.files import write_json

SEEDS = (0, 1, 2)
MOVED_STEPS = 20
TEXTS = 24  # of the gradient, and as many others
LENGTHS = (1e-4, 3e-4, 1e-3, 3e-3)  # of a step, relative to the length of the weights
FIT_STEPS, FIT_EVERY, FIT_LR = 150, 50, 4e-4
MORE_STEPS, MORE_ROWS = 150, 24
MORE: dict[str, Any] = {
    "num_groups": 7,
    "group_size": 8,
}  # 56 trees a text for 16, and 3 x the rows
COUNTED = ("emitted", "rounds")
RESULT = Path("benchmarks/results/gto_tests.json")


class TargetItself(Steps):
    """The target as the drafter of its own trees."""

    start_width, target_layers = 1, ()

    def __init__(self, target: Target):
        self.target = target
        self.text = TextBranches(CachedModel(target.model))

    def branches(self, ids: torch.Tensor, outputs: TargetOutputs) -> TargetItself:
        self.text.read(ids)
        logits = self.target.outputs(ids).logits
        assert logits is not None
        self.behind = logits[0]
        return self

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        self.lengths, self.nodes = state.lengths, TreeSlots(state.lengths)
        self.tokens = state.ids.new_zeros(len(state.lengths), 0)
        return self.behind[state.lengths - 1]

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        self.nodes.add(parents, depth)
        self.tokens = torch.cat([self.tokens, tokens], 1)
        return self.text.score(
            self.tokens, self.lengths, self.nodes.ancestors, self.nodes.depths, tokens.shape[1]
        )


class Tests(Experiment):
    def __init__(self, seed: int):
        super().__init__("default tree")
        self.seed = seed
        self.start = self.base(seed)

    def objective(self, **options: float) -> gto.TreeObjective:
        found = self.recipe({"aggregation": "node_sum", **options}).objective
        found.compare_with(copy.deepcopy(self.start))
        return found

    def expects(self, drafter: TrainedDrafter, traces: Sequence[Trace]) -> float:
        return self.recipe({}).objective.dev_metrics(drafter.eval(), traces)["select"]

    def batch(self, traces: Sequence[Trace]) -> Batch:
        return Batches(traces, {"target": 1.0}, len(traces), seed=0).at(0)

    def outputs(self, batch: Batch, objective: gto.TreeObjective) -> TargetOutputs:
        request = objective.target_request(batch, 0)
        assert request is not None
        return self.target.outputs(
            batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits
        )

    def slope(
        self, drafter: TrainedDrafter, traces: Sequence[Trace], **options: float
    ) -> list[torch.Tensor]:
        """The gradient of the tree term, or of the token loss, by the trained weights."""
        objective, batch = self.objective(**options), self.batch(traces)
        drafter.train()
        drafter.zero_grad()
        outputs = self.outputs(batch, objective)
        output = objective.loss(drafter, batch, outputs, 0)
        weights = [p for p in drafter.parameters() if p.requires_grad]
        terms = [
            term for name, term in output.terms.items()
            if (name == "trees") == (not options["token_weight"])
        ]  # fmt: skip
        total = sum(term.weight * term.total / (term.count or 1) for term in terms)
        assert isinstance(total, torch.Tensor)
        slopes = torch.autograd.grad(total, weights, allow_unused=True)
        return [
            torch.zeros_like(w) if s is None else s for w, s in zip(weights, slopes, strict=True)
        ]

    def moved(self) -> TrainedDrafter:
        folder = WORK / f"moved-{self.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        return self.fit(
            self.start,
            "base",
            self.train[-400:],
            self.seed,
            MOVED_STEPS,
            8,
            LONG.lr["token"],
            folder,
        )[0]

    def gradient(self) -> dict[str, Any]:
        moved = self.moved()
        near, far = self.train[:TEXTS], self.dev
        torch.manual_seed(self.seed)
        slopes = {
            "tree term": self.slope(moved, near, token_weight=0.0),
            "token loss": self.slope(moved, near, token_weight=1.0),
        }
        cosine = _cosine(*slopes.values())
        slopes["random"] = [torch.randn_like(s) for s in slopes["tree term"]]
        weights = [p for p in moved.parameters() if p.requires_grad]
        size = _norm(weights)
        before = [self.expects(moved, texts) for texts in (near, far)]
        found: dict[str, Any] = {
            "reference": [self.expects(self.start, texts) for texts in (near, far)],
            "moved": before,
            "cosine of tree term and token loss": cosine,
        }  # fmt: skip
        for name, slope in slopes.items():
            for length in LENGTHS:
                for sign in (1, -1):
                    other = copy.deepcopy(moved)
                    own = [p for p in other.parameters() if p.requires_grad]
                    with torch.no_grad():
                        for weight, direction in zip(own, slope, strict=True):
                            weight.sub_(direction * (sign * length * size / _norm(slope)))
                    key = f"{name}, {'with' if sign > 0 else 'against'} it, {length:g}"
                    found[key] = [
                        self.expects(other, texts) - was
                        for texts, was in zip((near, far), before, strict=True)
                    ]
        return found

    def fitted(self) -> dict[str, Any]:
        """Expected tokens at two texts after so many steps on them."""
        texts, found = self.train[:2], {}
        moved = self.moved()

        def likelihood(drafter: TrainedDrafter) -> list[torch.Tensor]:
            with mock.patch.object(gto, "advantages", _ones):
                return self.slope(drafter, texts, token_weight=0.0)

        kinds: dict[str, Callable[[TrainedDrafter], list[torch.Tensor]]] = {
            "tree term": lambda d: self.slope(d, texts, token_weight=0.0),
            "tree term, unclipped": lambda d: self.slope(d, texts, token_weight=0.0, epsilon=0.999),
            "rewards as they are": lambda d: self.slope(
                d, texts, token_weight=0.0, debias=False, standardize=False
            ),
            "advantage 1": likelihood,
            "token loss": lambda d: self.slope(d, texts, token_weight=1.0),
        }
        for name, slope in kinds.items():
            drafter = copy.deepcopy(moved)
            weights = [p for p in drafter.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(weights, FIT_LR, betas=(0.9, 0.95), weight_decay=0.0)
            values = [self.expects(drafter, texts)]
            for step in range(1, FIT_STEPS + 1):
                for weight, one in zip(weights, slope(drafter), strict=True):
                    weight.grad = one
                torch.nn.utils.clip_grad_norm_(weights, 0.5)
                optimizer.step()
                if step % FIT_EVERY == 0:
                    values.append(self.expects(drafter, texts))
            found[name] = values
            print(f"fit, {name}: {[round(v, 3) for v in values]}", flush=True)
        return found

    def room(self) -> dict[str, float]:
        objective = self.recipe({}).objective
        drafters: dict[str, Any] = {
            "head": self.start.eval(),
            "target": TargetItself(self.target),
        }
        return {
            name: objective.dev_metrics(drafter, self.dev)["select"]
            for name, drafter in drafters.items()
        }

    def more(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, stage, options in (
            ("gto", "gto", {"aggregation": "node_sum", **MORE}),
            ("gto, lse", "gto", {"aggregation": "lse", **MORE}),
            ("token loss", "base", None),
        ):
            folder = WORK / f"more-{name.replace(' ', '-')}-{self.seed}"
            shutil.rmtree(folder, ignore_errors=True)
            lr = LONG.lr["gto" if stage == "gto" else "token"]
            drafter, seconds = self.fit(
                self.start, stage, self.train, self.seed, MORE_STEPS, MORE_ROWS, lr, folder, options
            )
            rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            found[name] = {
                "seconds_per_step": seconds, "expected": self.expects(drafter, self.dev),
                "logged": [
                    {key: row[key] for key in LOGGED if key in row} for row in rows if "loss" in row
                ],
                "prompts": {f"{t:g}": self.counted(drafter, t) for t in self.held_out},
            }  # fmt: skip
            print(
                f"{name}: {found[name]['expected']:.4f} expected, {seconds:.2f} s a step",
                flush=True,
            )
        return found

    def counted(self, drafter: TrainedDrafter, temperature: float) -> dict[str, str]:
        """Emitted tokens and rounds of each held-out prompt, in order."""
        traces, budget = self.held_out[temperature], Budget.of(self.shape)
        found = TreeReplay(self.target, traces, Sampling(temperature), budget)(drafter)
        return {key: " ".join(f"{getattr(c, key):g}" for c in found) for key in COUNTED}


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([one.detach().norm() for one in tensors]).norm())


def _cosine(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    dot = sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))
    return dot / (_norm(a) * _norm(b))


def _ones(rewards: torch.Tensor, std_floor: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones_like(rewards), torch.zeros(len(rewards), dtype=torch.bool)


def run(seed: int) -> dict[str, Any]:
    """What is measured with this seed; a test that a former run has finished is read."""
    place = WORK / f"tests-{seed}.json"
    found = json.loads(place.read_text()) if place.exists() else {}
    bench: Tests | None = None
    for name in ("room", "gradient", "fitted", "more"):
        if name not in found:
            bench = bench or Tests(seed)
            found[name] = getattr(bench, name)()
            write_json(place, found)
            print(f"seed {seed}, {name} done", flush=True)
    return found


def compared(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The differences of tokens per round between the arms of `more`, over the seeds."""

    def counters(one: dict[str, Any], arm: str, temperature: str) -> list[PromptCounters]:
        columns = [map(float, one["more"][arm]["prompts"][temperature][key].split())
                   for key in COUNTED]  # fmt: skip
        return [
            PromptCounters(str(index), "", 1, **dict(zip(COUNTED, values, strict=True)))
            for index, values in enumerate(zip(*columns, strict=True))
        ]

    out: dict[str, Any] = {}
    for arm in ("gto", "gto, lse"):
        for t in ("0", "1"):
            pairs = [(counters(one, arm, t), counters(one, "token loss", t)) for one in found]
            difference = hierarchical_difference(pairs, "tokens_per_round")
            over = sum(tokens(a) for a, _ in pairs) / sum(tokens(b) for _, b in pairs)
            out[f"{arm} - token loss, T={t}"] = {**difference, "ratio": over}
    return out


if __name__ == "__main__":
    seeds = [int(word) for word in sys.argv[1:]] or list(SEEDS)
    measured = {str(seed): run(seed) for seed in seeds}
    # read after it: another seed may have ended meanwhile
    known = (json.loads(RESULT.read_text())["seeds"] if RESULT.exists() else {}) | measured
    about = provenance(["benchmarks.gto_tests", *sys.argv[1:]])
    table = compared([*known.values()])
    write_json(RESULT, {**about, "compared": table, "seeds": known})
    print(json.dumps(table, indent=1))
