"""What a drafter proposes in one round: tokens, who follows whom, and the law of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class TokenTree:
    """A tree of drafted tokens per batch row; a chain is the tree with one path.

    tokens: [B, N] int64, parents before children;
    parents: [N] int64, index of each node's parent, -1 for children of the last committed token;
    laws: [B, N, V] float, the exact distribution each token was drawn from, or None when the
        choice was deterministic (its law is a point mass, whatever the drafter's softmax said);
    lengths: [B] int64, how many leading nodes a row really drafted (a stop rule may end it early);
    draft_forwards, draft_tokens: what the round cost the drafter.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    laws: torch.Tensor | None
    lengths: torch.Tensor
    draft_forwards: int = 0
    draft_tokens: int = 0

    @classmethod
    def chain(
        cls, tokens: torch.Tensor, laws: torch.Tensor | None, lengths: torch.Tensor, **cost: int
    ) -> TokenTree:
        nodes = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
        return cls(tokens, nodes, laws, lengths, **cost)

    @property
    def is_chain(self) -> bool:
        return bool(
            (
                self.parents == torch.arange(-1, len(self.parents) - 1, device=self.parents.device)
            ).all()
        )

    @property
    def depths(self) -> torch.Tensor:
        """[N] int64: 1 for children of the last committed token."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return torch.tensor(depths, dtype=torch.long, device=self.parents.device)

    def ancestors(self) -> torch.Tensor:
        """[N, N] bool: entry (i, j) is true when node i may attend to node j (itself or above
        it)."""
        size = len(self.parents)
        allowed = torch.eye(size, dtype=torch.bool, device=self.parents.device)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                allowed[node] |= allowed[parent]
        return allowed
