"""Trees of drafted tokens: what a drafter proposes in one round.

A node's children are candidates for the position after it. A chain is the tree with one path.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

# How the children of a node were chosen. top: the most likely tokens; without_replacement: drawn in
# the order of their indices, with the distribution at the parent's position as that of each, the
# earlier siblings not yet removed; iid: drawn independently of each other.
TOP, WITHOUT_REPLACEMENT, IID = "top", "without_replacement", "iid"
CHAIN = "chain"  # no node has a sibling


@dataclass
class TokenTree:
    """A tree of drafted tokens per batch row.

    tokens: [B, N] int64, parents before children;
    parents: [B, N] int64, index of each node's parent, -1 for children of the last committed token;
    probs: [B, N, V] float, the exact distribution that each token was drawn from, or None when the
        choice was deterministic (then it is a point mass, whatever the drafter's softmax is);
    lengths: [B] int64, how many leading nodes a row really drafted (a stop rule may end it early);
    is_chain: node i follows node i - 1 in every row;
    siblings: how the children of a node were chosen, which decides how they may be verified; it
        means nothing for a chain;
    draft_forwards, draft_tokens: forward passes of the drafter in this round, and tokens fed.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    probs: torch.Tensor | None
    lengths: torch.Tensor
    is_chain: bool = False
    siblings: str = TOP
    draft_forwards: int = 0
    draft_tokens: int = 0

    @classmethod
    def chain(
        cls,
        tokens: torch.Tensor,
        probs: torch.Tensor | None,
        lengths: torch.Tensor,
        draft_forwards: int = 0,
        draft_tokens: int = 0,
    ) -> TokenTree:
        """The tree with one path: tokens [B, N], probs [B, N, V] or None, lengths [B]."""
        nodes = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
        return cls(
            tokens, nodes, probs, lengths, is_chain=True, draft_forwards=draft_forwards,
            draft_tokens=draft_tokens,
        )  # fmt: skip

    @property
    def form(self) -> str:
        """The form of drafts that a verifier must be able to judge."""
        return CHAIN if self.is_chain else self.siblings

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """Attention mask [B, N, N] bool: node i attends to node j, itself or above it."""
        return ancestors(self.parents)

    @cached_property
    def depths(self) -> torch.Tensor:
        """Depth of each node, [B, N] int64: 1 for children of the last committed token."""
        return self.ancestors.sum(-1)

    @cached_property
    def leaves(self) -> torch.Tensor:
        """Whether a node has no children, [B, N] bool."""
        nodes = torch.arange(self.parents.shape[1], device=self.parents.device)
        return ~(self.parents.unsqueeze(1) == nodes.unsqueeze(1)).any(-1)

    @cached_property
    def names(self) -> torch.Tensor:
        """A hash of each row's tokens and parents, [B] int64: the same for the same tree."""
        entries = torch.cat([self.tokens, self.parents], 1)
        factors = torch.full_like(entries[0], 0x5851F42D4C957F2D).cumprod(0)  # wraps around
        return ((entries + 2) * factors).sum(1)


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Ancestors [B, N, N] bool of each node, itself included.

    `parents`: [B, N] int64, each before its children.
    """
    batch, size = parents.shape
    # a last row that has no ancestors stands for the committed text above the roots
    allowed = torch.eye(size + 1, size, dtype=torch.bool, device=parents.device)
    allowed = allowed.repeat(batch, 1, 1)
    above = F.pad(parents.masked_fill(parents < 0, size), (0, 1), value=size)
    for _ in range((size - 1).bit_length()):  # each time paths of twice the length
        allowed |= allowed.gather(1, above.unsqueeze(-1).expand(-1, -1, size))
        above = above.gather(1, above)
    return allowed[:, :size]
