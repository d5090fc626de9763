"""The value of drafted trees to the target, at many prefixes of a text and without decoding.

Every node has the probability that the target would follow the path to it; from these come the
expected accepted lengths of all branches, and of the tree (GTO, arXiv:2509.22134). Trees are grown
as in decoding, and scored in few target forwards behind the text, which all prefixes share.
A prefix of n tokens is those at 0..n-1; its tree competes with the tokens from n on. No gradient
anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

from drafters.round import Branching, DraftState, Shape, Steps
from drafters.trees.tree import TokenTree
from target.branches import TextBranches
from target.cache import CachedModel
from target.model import Target, captured
from target.outputs import LayerId, TargetOutputs
from target.sampling import KeyedRandom, Sampling
from trainer.logits import chunk_rows

AGGREGATIONS = ("lse", "lse_mean", "max", "mean", "node_sum")
CHUNK_TOKENS = 1 << 12  # nodes over all prefixes that are scored at once


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

    @property
    def leaves(self) -> torch.Tensor:
        """Whether a node has no children, [P, N] bool."""
        return self.tree.leaves

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

    def accepted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [P, D] of the target's first choices as far as the tree has them, 0 after the end
        of this path, and its length [P]."""
        tree = self.tree
        rows = torch.arange(len(self.log_p), device=self.log_p.device)
        lengths, last = self._depth_of(self.best)
        on_path = tree.ancestors[rows, last] & (lengths > 0).unsqueeze(-1)
        tokens = tree.tokens.new_zeros(len(rows), int(tree.depths.max()))
        where = on_path.nonzero(as_tuple=True)
        tokens[where[0], tree.depths[where] - 1] = tree.tokens[where]
        return tokens, lengths


class TreeScorer:
    """Drafts and scores trees of `shape`, by the target's distribution at temperature 1.

    `chunk_tokens`: nodes that are scored at once, which bounds the memory and changes nothing else.
    """

    def __init__(self, target: Target, shape: Shape, chunk_tokens: int = CHUNK_TOKENS):
        self.target, self.shape, self.chunk_tokens = target, shape, chunk_tokens
        self.text = TextBranches(CachedModel(target.model))

    @cached_property
    def chunk(self) -> int:
        """Positions whose distributions are computed at once. It is chosen once: chunks of another
        size differ in the last bits, which rewards that are standardised blow up."""
        return chunk_rows(self.target.device, self.target.vocab_size)

    @torch.no_grad()
    def __call__(
        self, ids: Sequence[int], lengths: Sequence[int], drafters: Sequence[Branching]
    ) -> list[ScoredTrees]:
        """Scored trees of each drafter at the prefixes of `ids` with these lengths, each at least
        2.

        The text is read once, whole and alone, so that results do not depend on a batch.
        """
        text = torch.tensor([list(ids[: max(lengths)])], device=self.target.device)
        layers = [*(layer for one in drafters for layer in one.target_layers), "final_norm"]
        hidden: dict[LayerId, torch.Tensor] = {}
        number = max(
            1, min(self.chunk_tokens // self.shape.num_nodes, self.chunk // self.shape.width)
        )
        chunks = torch.tensor(lengths, device=text.device).split(number)
        # drafted as in decoding, whatever precision the training around it has
        with torch.autocast(text.device.type, enabled=False):
            with captured(self.target.model, list(dict.fromkeys(layers)), hidden):
                self.text.read(text)
            found = []
            for drafter in drafters:
                seen = {layer: hidden[layer] for layer in drafter.target_layers}
                steps = drafter.branches(text, TargetOutputs(seen))
                trees = [self._grown(steps, text, chunk) for chunk in chunks]
                final = hidden["final_norm"][0]
                # read for all chunks together, since the host waits for it
                most = torch.stack([(~tree.leaves).sum(1).max() for tree in trees]).tolist()
                parts = zip(trees, chunks, most, strict=True)
                found.append(_joined([self._scored(*part, final) for part in parts]))
            return found

    def _grown(self, steps: Steps, text: torch.Tensor, lengths: torch.Tensor) -> TokenTree:
        """The trees that are drafted at prefixes of text [1, S] with these lengths [R]."""
        state = DraftState(
            text.expand(len(lengths), -1), lengths, text.shape[1], Sampling(0.0),
            KeyedRandom(torch.zeros_like(lengths)),
        )  # fmt: skip
        return self.shape.grow(steps, state)

    def _scored(
        self, tree: TokenTree, lengths: torch.Tensor, most: int, text: torch.Tensor
    ) -> ScoredTrees:
        """Score trees at R prefixes: lengths [R]; `most`: nodes with children in one of them; text
        [S, H], its final states.

        The target reads the nodes with children alone: a leaf is scored by the state above it.
        """
        inner = ~tree.leaves
        read = inner.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        ancestors = tree.ancestors.gather(1, read.unsqueeze(2).expand(-1, -1, inner.shape[1]))
        ancestors = ancestors.gather(2, read.unsqueeze(1).expand(-1, most, -1))
        tokens, depths = tree.tokens.gather(1, read), tree.depths.gather(1, read)
        final = text[lengths - 1].unsqueeze(1)
        if most:
            found: dict[LayerId, torch.Tensor] = {}
            with captured(self.target.model, ("final_norm",), found):
                self.text.score(tokens, lengths, ancestors, depths)
            final = torch.cat([final, found["final_norm"]], 1)
        # 0 for children of the prefix, whose state comes first
        above = F.pad(inner.cumsum(1), (1, 0)).gather(1, tree.parents + 1)
        return ScoredTrees(tree, *self._scores(final, above, tree.tokens))

    def _scores(
        self, states: torch.Tensor, above: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """log_p and best [R, N] of tokens [R, N] under the target's final states [R, n, H]; `above`
        [R, N]: the state of each token.

        Some trees at a time: the logits of all would need most of the memory.
        """
        log_p, best = [], []
        number = max(1, self.chunk // states.shape[1])
        for part, up, wanted in zip(
            *(x.split(number) for x in (states, above, tokens)), strict=True
        ):
            rows = torch.arange(len(part), device=part.device).unsqueeze(1)
            logits = self.target.head.logits(part).float()
            best.append(logits.argmax(-1)[rows, up] == wanted)
            log_p.append(logits[rows, up, wanted] - logits.logsumexp(-1)[rows, up])
        return torch.cat(log_p), torch.cat(best)


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
