"""What a block drafter has behind its slots: a correction by the tokens before, and a confidence.

One pass predicts all tokens of a block, so that no slot knows what was drafted at those before it.
A correction adds W_2 z_k to the logits of slot k, which follows the token x_{k-1}; x_0 is the
anchor, h_k the slot's state that the output matrix reads, e the target's embedding:

    markov   z_k = W_1[x_{k-1}]                                      (DSpark, arXiv:2607.05147)
    gated    z_k = sigmoid(G [h_k ; W_1[x_{k-1}]]) * W_1[x_{k-1}]    (its gated variant)
    gru      z_k = SiLU(P [h_k ; g_k]), g_k = GRU(e(x_0), .., e(x_{k-1})), and z_1 = 0
                                                                     (Domino, arXiv:2605.29707)

In training the tokens before are those of the text, in a round those of a node's own path. The
gate is the published code's, one for each of the r numbers. W_2 starts at zero, so that a fresh
correction changes nothing.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from drafters.layers import Shared
from trainer.logits import OutputHead

CORRECTIONS = ("none", "markov", "gated", "gru")


class Correction(nn.Module):
    """A correction of rank r; `out` is W_2, over the tokens that the drafter can draft."""

    def __init__(self, rank: int, drafted: int):
        super().__init__()
        self.out = nn.Linear(rank, drafted, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """z [N, T, r] of T slots in their order, with states hidden [N, T, d], and tokens [N, T]
        int64 before each.

        `memory` [N, w]: what the call for the slots before has returned beside, None where the
        first of these is the first that predicts. A correction by one token has none.
        """
        raise NotImplementedError

    def weights_read(self) -> list[nn.Parameter]:
        """What every drafted token reads whole: not the rows that are looked up."""
        return list(self.parameters())


class Markov(Correction):
    def __init__(self, rank: int, drafted: int, vocab_size: int):
        super().__init__(rank, drafted)
        self.lookup = nn.Embedding(vocab_size, rank)
        nn.init.normal_(self.lookup.weight, std=rank**-0.5)

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.lookup(tokens), None

    def weights_read(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p is not self.lookup.weight]


class Gated(Markov):
    def __init__(self, rank: int, drafted: int, vocab_size: int, width: int):
        super().__init__(rank, drafted, vocab_size)
        self.gate = nn.Linear(width + rank, rank)

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = self.lookup(tokens)
        return self.gate(torch.cat([hidden, found], -1)).sigmoid() * found, None


class Recurrent(Correction):
    def __init__(self, rank: int, drafted: int, width: int, state: int, shared: Shared):
        super().__init__(rank, drafted)
        self.shared = shared
        self.gru = nn.GRU(width, state, batch_first=True)
        self.mix = nn.Linear(width + state, rank)

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with torch.no_grad():
            embedded = self.shared.target.embedding(tokens).to(self.mix.weight.dtype)
        before = None if memory is None else memory.unsqueeze(0)
        states, last = self.gru(embedded, before)
        z = F.silu(self.mix(torch.cat([hidden, states], -1)))
        if memory is None:
            z = F.pad(z[:, 1:], (0, 0, 1, 0))
        return z, last[0]


def correction_of(
    name: str, rank: int, state: int, width: int, drafted: int, shared: Shared
) -> Correction | None:
    """The correction of that name; `state`: width of the GRU's, `width`: of the slots'."""
    if name == "none":
        return None
    if name == "gru":
        return Recurrent(rank, drafted, width, state, shared)
    vocab_size = shared.target.vocab_size
    if name == "gated":
        return Gated(rank, drafted, vocab_size, width)
    return Markov(rank, drafted, vocab_size)


class Round:
    """The slots of a round, whose logits follow one after the other.

    `read` [B, n, d + r]: the states from which the output head has made the last ones.
    """

    read: torch.Tensor

    def __init__(self, states: torch.Tensor, head: OutputHead, correction: Correction | None):
        """`states` [B, K, d] of the slots that predict; `head`: with the correction's matrix."""
        self.states, self.head, self.correction = states, head, correction
        self.base = head.base(states)  # one pass over the matrix, before the correction
        self.memory: torch.Tensor | None = None  # [B, 1 + fed, w] of the root and the nodes fed

    def children(
        self, tokens: torch.Tensor, parents: torch.Tensor | None, slot: int
    ) -> torch.Tensor:
        """Logits [B, n, W] of a slot, counted from 0, behind nodes, as `extend` is given them;
        `parents`: None for the root, the anchor."""
        count = tokens.shape[1]
        base, states = self.base[:, slot, None], self.states[:, slot, None].expand(-1, count, -1)
        if self.correction is None:
            self.read = states
            return self.head.finished(base).expand(-1, count, -1)
        memory = None
        if self.memory is not None and parents is not None:
            rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
            memory = self.memory[rows, parents + 1].flatten(0, 1)
        alone = states.flatten(0, 1).unsqueeze(1), tokens.flatten().unsqueeze(1)  # one slot each
        z, memory = self.correction(*alone, memory)
        z = z.view(*tokens.shape, -1)
        if memory is not None:
            known = [] if self.memory is None else [self.memory]
            self.memory = torch.cat([*known, memory.view(*tokens.shape, -1)], 1)
        self.read = torch.cat([states, z], -1)
        return self.head.finished(base, z)


class Confidence(nn.Module):
    """The probability that the token of slot k is accepted, before it is drawn: c_k = sigmoid((w .
    s_k + b) / T_k), of the state s_k that the output head reads: [h_k ; z_k] (DSpark,
    arXiv:2607.05147; the published code has the bias b).

    `temperatures` [K] float: T_k, 1 until they are calibrated.
    """

    temperatures: torch.Tensor

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.out = nn.Linear(width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.register_buffer("temperatures", torch.ones(depth))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """w . s + b of states [..., d + r], [...] float32."""
        return self.out(states.to(self.out.weight.dtype))[..., 0].float()

    def forward(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """c [...] float32 of states [..., d + r] of this depth, counted from 1."""
        return (self.logits(states) / self.temperatures[depth - 1].float()).sigmoid()
