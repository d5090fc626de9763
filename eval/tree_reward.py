"""The value of drafted trees to the target, at many prefixes of a text and without decoding.

Every node has the probability that the target would follow the path to it; from these come the
expected accepted lengths of all branches, and of the tree (GTO, arXiv:2509.22134). Trees are grown
as in decoding, and scored in one target forward after the cached text, with a row for each prefix.
A prefix of n tokens is those at 0..n-1; its tree competes with the tokens from n on. No gradient
anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from drafters.round import Budget, Drafter, DraftState, Shape
from drafters.trees.tree import TokenTree
from target.cache import CachedModel, place_tree
from target.model import LayerId, Target, TargetOutputs, captured
from target.sampling import KeyedRandom, Sampling
from trainer.chunked import CHUNK_ELEMENTS

AGGREGATIONS = ("lse", "lse_mean", "max", "mean", "node_sum")
ACCEPTANCES = ("greedy", "branch")
CHUNK_SLOTS = 1 << 14  # cache slots over all prefixes that are scored at once


@dataclass
class ScoredTrees:
    """Trees of one shape at P prefixes, with the target's probabilities.

    `log_p` [P, N] float32: log-probability under the target of each node's token, given the path to
    it; `best` [P, N] bool: whether it is the target's first choice there.
    """

    tree: TokenTree
    log_p: torch.Tensor
    best: torch.Tensor

    @cached_property
    def reached(self) -> torch.Tensor:
        """Probability, [P, N] float32, under the target of the whole path down to each node.

        It is summed in log space: products of small numbers leave the range of half precision.
        """
        above = self.tree.ancestors
        return torch.where(above, self.log_p.unsqueeze(1), 0.0).sum(-1).exp()

    @cached_property
    def expected_lengths(self) -> torch.Tensor:
        """Expected accepted tokens, [P, N] float32, if only the path to a node is drafted."""
        return torch.where(self.tree.ancestors, self.reached.unsqueeze(1), 0.0).sum(-1)

    @cached_property
    def leaves(self) -> torch.Tensor:
        """Whether a node has no children, [P, N] bool."""
        nodes = torch.arange(self.log_p.shape[1], device=self.log_p.device)
        return ~(self.tree.parents.unsqueeze(1) == nodes.unsqueeze(1)).any(-1)

    def node_sum(self) -> torch.Tensor:
        """Expected accepted tokens, [P] float32, under lossless verification.

        The sum is exact, because siblings exclude each other.
        """
        return self.reached.sum(-1)

    def reward(self, aggregation: str, eta: float = 1.0) -> torch.Tensor:
        """Reward, [P] float32 in tokens, of the branches' expected lengths L.

        "lse": the smooth maximum (1/eta) log sum exp(eta L), as published, which grows with the
        number of branches; "lse_mean": the same with their mean in place of the sum; "max"; "mean";
        or `node_sum`.
        """
        if aggregation == "node_sum":
            return self.node_sum()
        number = self.leaves.sum(-1)
        if aggregation == "mean":
            return torch.where(self.leaves, self.expected_lengths, 0.0).sum(-1) / number
        lengths = self.expected_lengths.masked_fill(~self.leaves, -torch.inf)
        if aggregation == "max":
            return lengths.amax(-1)
        smooth = (eta * lengths).logsumexp(-1) / eta
        return smooth if aggregation == "lse" else smooth - number.float().log() / eta

    def greedy_depth(self) -> torch.Tensor:
        """Depth, [P] int64, of the path of the drafter's first choices.

        It is less than the tree's depth where they were pruned. First choices come before their
        siblings.
        """
        parents = self.tree.parents
        sibling = parents.unsqueeze(1) == parents.unsqueeze(2)  # [P, N, N]
        first = ~sibling.tril(-1).any(-1)
        return self._depth_of(first)[0]

    def _depth_of(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Depth [P] of the deepest node whose whole path is `wanted` [P, N], and that node [P]; of
        siblings at most one is wanted. 0 and any node where there is none."""
        whole = (wanted.unsqueeze(1) | ~self.tree.ancestors).all(-1)
        depth, node = (self.tree.depths * whole).max(-1)
        return depth, node

    def accepted(self, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [P, D] of an accepted path, 0 after its end, and its length [P].

        "greedy": the target's first choices as far as the tree has them; "branch": the whole branch
        with the largest expected length.
        """
        tree = self.tree
        rows = torch.arange(len(self.log_p), device=self.log_p.device)
        if rule == "greedy":
            lengths, last = self._depth_of(self.best)
        else:
            last = self.expected_lengths.masked_fill(~self.leaves, -torch.inf).argmax(-1)
            lengths = tree.depths[rows, last]
        on_path = tree.ancestors[rows, last] & (lengths > 0).unsqueeze(-1)
        tokens = tree.tokens.new_zeros(len(rows), int(tree.depths.max()))
        where = on_path.nonzero(as_tuple=True)
        tokens[where[0], tree.depths[where] - 1] = tree.tokens[where]
        return tokens, lengths


class TreeScorer:
    """Drafts and scores trees of `shape`.

    `temperature`: the target's, 0: its first choice has probability 1; `chunk_slots`: bounds the
    memory and changes nothing else.
    """

    def __init__(
        self,
        target: Target,
        shape: Shape,
        temperature: float = 1.0,
        chunk_slots: int = CHUNK_SLOTS,
    ):
        self.target, self.budget = target, Budget.of(shape)
        self.temperature, self.chunk_slots = temperature, chunk_slots
        self.model = CachedModel(target.model)

    @torch.no_grad()
    def __call__(
        self, ids: Sequence[int], lengths: Sequence[int], drafters: Sequence[Drafter]
    ) -> list[ScoredTrees]:
        """Scored trees of each drafter at the prefixes of `ids` with these lengths, each at least
        2.

        The text is read once, whole and alone, so that results do not depend on a batch.
        """
        device, size = self.target.device, max(lengths)
        capacity = size + self.budget.max_slots + self.budget.max_tokens + 2
        text = torch.tensor([list(ids[:size])], device=device)
        layers = list(dict.fromkeys(layer for one in drafters for layer in one.target_layers))
        hidden: dict[LayerId, torch.Tensor] = {}
        number = max(1, self.chunk_slots // capacity)
        chunks = [
            torch.tensor(lengths[i : i + number], device=device)
            for i in range(0, len(lengths), number)
        ]
        # drafted as in decoding, whatever precision the training around it has
        with torch.autocast(device.type, enabled=False):
            self.model.begin(1, capacity)
            with captured(self.target.model, layers, hidden):
                positions = torch.arange(size, device=device).unsqueeze(0)
                self.model.forward(text, positions, used=size, first=0, logits_to_keep=1)
            return [
                _joined([self._chunk(text, hidden, chunk, drafter) for chunk in chunks])
                for drafter in drafters
            ]

    def _chunk(
        self,
        text: torch.Tensor,
        hidden: dict[LayerId, torch.Tensor],
        lengths: torch.Tensor,
        drafter: Drafter,
    ) -> ScoredTrees:
        """Scored trees at R prefixes: lengths [R], text [1, S], hidden[layer] [1, S, H]."""
        tree = self._draft(text, hidden, lengths, drafter)
        nodes = place_tree(lengths, tree.ancestors, tree.depths)
        feed = torch.cat([text[0, lengths - 1].unsqueeze(1), tree.tokens], 1)
        used = int(lengths.max()) + tree.tokens.shape[1]
        found: dict[LayerId, torch.Tensor] = {}
        with captured(self.target.model, ("final_norm",), found):
            self.model.repeated(torch.zeros_like(lengths)).forward(
                feed, nodes.positions, used=used, tree=nodes, logits_to_keep=1
            )
        final = found["final_norm"]
        above = (tree.parents + 1).unsqueeze(-1).expand(-1, -1, final.shape[-1])
        return ScoredTrees(tree, *self._scores(final.gather(1, above), tree.tokens))

    def _draft(
        self,
        text: torch.Tensor,
        hidden: dict[LayerId, torch.Tensor],
        lengths: torch.Tensor,
        drafter: Drafter,
    ) -> TokenTree:
        """Draft a tree at each length; tokens after a row's length are masked."""
        number, size = len(lengths), text.shape[1]
        one = torch.zeros(1, dtype=torch.long, device=text.device)
        drafter.begin(1, self.model.capacity)
        seen = {layer: hidden[layer] for layer in drafter.target_layers}
        drafter.prefill(one, text, one + size, TargetOutputs(seen))
        drafter.keep(torch.zeros_like(lengths))
        shared = {layer: states.expand(number, -1, -1) for layer, states in seen.items()}
        state = DraftState(
            text.expand(number, -1), lengths, int(lengths.max()), Sampling(0.0),
            KeyedRandom(torch.zeros_like(lengths)), TargetOutputs(shared),
        )  # fmt: skip
        return drafter.propose(state, self.budget)

    def _scores(
        self, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """log_p and best [R, N] of tokens [R, N] under the target's final states [R, N, H].

        A few nodes at a time: the logits of all nodes would need most of the memory.
        """
        flat, wanted = states.flatten(0, 1), tokens.flatten()
        step = max(1, CHUNK_ELEMENTS // self.target.vocab_size)
        log_p, best = [], []
        for i in range(0, len(flat), step):
            logits = self.target.head.logits(flat[i : i + step]).float()
            token = wanted[i : i + step]
            best.append(logits.argmax(-1) == token)
            if self.temperature == 0:
                log_p.append(torch.where(best[-1], 0.0, -torch.inf))
            else:
                logits = logits / self.temperature
                chosen = logits.gather(1, token.unsqueeze(1)).squeeze(1)
                log_p.append(chosen - logits.logsumexp(-1))
        return torch.cat(log_p).view_as(tokens), torch.cat(best).view_as(tokens)


def _joined(parts: list[ScoredTrees]) -> ScoredTrees:
    trees = [part.tree for part in parts]
    tree = TokenTree(
        torch.cat([t.tokens for t in trees]),
        torch.cat([t.parents for t in trees]),
        None,
        torch.cat([t.lengths for t in trees]),
    )
    return ScoredTrees(
        tree, torch.cat([p.log_p for p in parts]), torch.cat([p.best for p in parts])
    )
