"""Exact laws of the real decoding loop: tabular models behind its cache, every outcome taken.

`TabularModel` stands where `target.cache.CachedModel` stands; like it, it knows only the tokens
written to its slots. `round_laws` runs the real `SpeculativeDecoder` once per path of random
outcomes and returns the exact law of what one round emits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from drafters.causal_lm import CausalLMDrafter
from eval.engine import Speculated, SpeculativeDecoder
from eval.rounds import Round
from target.decode import Request
from target.sampling import Sampling

PADDING = 9  # prompts are longer than any position that a free row of the batch computes at


def dirichlet_table(shape: Sequence[int], seed: int) -> torch.Tensor:
    """[*shape] float64: Dirichlet(1) laws along the last axis."""
    generator = torch.Generator().manual_seed(seed)
    draws = -torch.rand(tuple(shape), generator=generator, dtype=torch.float64).log()
    return draws / draws.sum(-1, keepdim=True)


class TabularModel:
    """table [V] * order + [V]: the law of the next token given the last `order` tokens."""

    device = torch.device("cpu")
    model = None

    def __init__(self, table: torch.Tensor):
        self.table, self.order = table, table.dim() - 1

    def begin(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.tokens = torch.zeros(rows, capacity, dtype=torch.long)

    def keep(self, rows: torch.Tensor) -> None:
        self.rows, self.tokens = len(rows), self.tokens[rows]

    def forward(
        self, ids, positions, *, used, rows=None, first=None, logits_to_keep=0, tree=None,
        layers=(), found=None,
    ):  # fmt: skip
        assert tree is None
        assert not layers, "a table has no states"
        rows = torch.arange(self.rows) if rows is None else rows
        assert ids.shape == positions.shape
        assert len(rows) == len(ids)
        assert int(positions.max()) < used <= self.capacity
        if first is not None:
            assert bool((positions == first + torch.arange(ids.shape[1])).all())
        self.tokens[rows.unsqueeze(1), positions] = ids
        back = range(self.order - 1, -1, -1)
        context = [self.tokens[rows.unsqueeze(1), (positions - i).clamp(min=0)] for i in back]
        logits = self.table[tuple(context)].log()
        if isinstance(logits_to_keep, torch.Tensor):
            return logits[torch.arange(len(rows)), logits_to_keep].unsqueeze(1)
        return logits[:, -logits_to_keep:]  # 0 keeps all


class TabularDrafter(CausalLMDrafter):
    """The project's drafter without a network, which would say how many positions it knows."""

    context = None


def tabular_drafter(table: torch.Tensor) -> CausalLMDrafter:
    """The project's drafter with a table where its network would be."""
    drafter = TabularDrafter(None, None, table.shape[-1], {})
    drafter._cached = TabularModel(table)  # type: ignore[assignment]
    return drafter


@dataclass
class Path:
    """One sequence of outcomes; `fork`: the law of the first call beyond it, if there was one."""

    context: tuple[int, ...]
    outcomes: tuple[int, ...] = ()
    weight: float = 1.0
    cursor: int = 0
    over: bool = False
    fork: list[tuple[int, float]] = field(default_factory=list)


class Enumerating:
    """A random source per batch of keys; a row's key is the index of its path."""

    def __init__(self, paths: list[Path], prompt_lengths: list[int]):
        self.paths, self.prompt_lengths = paths, prompt_lengths

    def __call__(self, keys: torch.Tensor) -> _Source:
        return _Source(self, keys.tolist())

    def outcome(self, key: int, law: list[float], position: int, stream: str) -> int:
        path, start = self.paths[key], self.prompt_lengths[key]
        possible = [(i, weight) for i, weight in enumerate(law) if weight > 0]
        if position < start or path.over:  # a free row, or a later round: no matter
            return possible[0][0]
        if position == start and stream == "target":  # the prefill: given by the context
            return path.context[-1]
        if path.cursor < len(path.outcomes):
            chosen = path.outcomes[path.cursor]
        else:
            path.fork = path.fork or possible
            chosen = possible[0][0]
        path.cursor += 1
        path.over = stream == "target"  # the token that ends the round
        return chosen


class _Source:
    def __init__(self, shared: Enumerating, keys: list[int]):
        self.shared, self.keys = shared, keys

    def choice(self, probs, positions, stream):
        rows = zip(self.keys, probs.tolist(), positions.tolist(), strict=True)
        return torch.tensor([self.shared.outcome(k, law, p, stream) for k, law, p in rows])

    def flip(self, probability, positions, stream):
        rows = zip(self.keys, probability.tolist(), positions.tolist(), strict=True)
        return torch.tensor(
            [bool(self.shared.outcome(k, [1 - a, a], p, stream)) for k, a, p in rows]
        )


class Replaying:
    """Gives recorded outcomes; at the first call beyond them, tells what was possible. Of more than
    `rows` rows the further ones get the first possible outcome."""

    def __init__(self, outcomes, rows=None):
        self.outcomes, self.rows, self.cursor, self.fork = outcomes, rows, 0, None

    def _of_all(self, laws):
        found = [[(i, w) for i, w in enumerate(law) if w > 0] for law in laws]
        recorded = [self._next(possible) for possible in found[: self.rows]]
        return torch.tensor(recorded + [possible[0][0] for possible in found[len(recorded) :]])

    def _next(self, possible):
        if self.cursor < len(self.outcomes):
            chosen = self.outcomes[self.cursor]
        else:
            self.fork = self.fork or possible
            chosen = possible[0][0]
        self.cursor += 1
        return chosen

    def choice(self, probs, positions, stream):
        return self._of_all(probs.tolist())

    def flip(self, probability, positions, stream):
        return self._of_all([[1 - a, a] for a in probability.tolist()]).bool()


@dataclass(frozen=True)
class Outcome:
    emitted: tuple[int, ...]
    weight: float
    round: Round


def round_laws(
    monkeypatch: Any,
    decoder: Callable[[], SpeculativeDecoder],
    contexts: Iterable[tuple[int, ...]],
    padding: int = PADDING,
) -> dict[tuple[int, ...], list[Outcome]]:
    """All outcomes of one real round after each context (its last token being the newest), with
    their exact weights. `padding` zeros precede the contexts; max_new_tokens must leave the round
    uncut."""
    frontier = [Path(context) for context in contexts]
    found: dict[tuple[int, ...], list[Outcome]] = defaultdict(list)
    while frontier:
        prompts = [[0] * padding + list(path.context[:-1]) for path in frontier]
        source = Enumerating(frontier, [len(prompt) for prompt in prompts])
        monkeypatch.setattr("eval.engine.KeyedRandom", source)
        requests = [Request(p, key, Sampling(1.0), key) for key, p in enumerate(prompts)]
        done: dict[int, Speculated] = {s.request.tag: s for s in decoder().run(requests)}
        assert sorted(done) == list(range(len(frontier)))
        grown = []
        for key, path in enumerate(frontier):
            assert done[key].response_ids[0] == path.context[-1]
            if path.fork:
                grown += [
                    Path(path.context, (*path.outcomes, i), path.weight * w) for i, w in path.fork
                ]
            else:
                first = done[key].rounds[0]
                assert not first.truncated
                emitted = tuple(done[key].response_ids[1 : 1 + first.emitted])
                found[path.context].append(Outcome(emitted, path.weight, first))
        frontier = grown
    return dict(found)


def completed(outcomes: list[Outcome], context: tuple[int, ...], table: torch.Tensor, length: int):
    """[V] * length: the law of `length` tokens when each outcome is completed by the target's own
    conditionals (table of order 2)."""
    size = table.shape[-1]
    total = torch.zeros([size] * length, dtype=torch.float64)
    for outcome in outcomes:
        for tail in product(size, length - len(outcome.emitted)):
            text = (*outcome.emitted, *tail)
            weight = outcome.weight
            for i in range(len(outcome.emitted), length):
                weight *= float(table[(*context, *text)[len(context) + i - 2 :][:2]][text[i]])
            total[text] += weight
    return total


def product(size: int, length: int) -> list[tuple[int, ...]]:
    """All sequences of this length."""
    sequences: list[tuple[int, ...]] = [()]
    for _ in range(length):
        sequences = [(*s, v) for s in sequences for v in range(size)]
    return sequences
