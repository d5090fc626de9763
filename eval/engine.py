"""Exact speculative decoding, batched: rows accept different lengths and are refilled as they end.

The first token comes out of the prefill and belongs to no round. A round drafts K tokens, verifies
them in one target forward and emits the accepted ones and one more. Rounds run to their full K past
EOS and past the length limit, as engines do: `engine_accepted` counts that, everything else is
counted after cutting the output.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from data.cache import CachedModel
from data.decode import Request
from data.sampling import KeyedRandom, Sampling, warp
from drafters.base import Budget, Drafter, DraftState
from eval.metrics import Round
from eval.verify import verify_chain


@dataclass
class Speculated:
    """One finished answer: response_ids with the ending EOS, cut at the length limit."""

    request: Request
    response_ids: list[int]
    finish_reason: str
    rounds: list[Round]


@dataclass
class _Row:
    request: Request
    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)


class SpeculativeDecoder:
    """`sampling`: of the target, all requests alike; `draft_sampling`: of the drafter, the same
    unless given; `vocab_size`: the target's logits past it are padding and no law has mass there;
    `timed`: synchronise and record seconds per round."""

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter,
        *,
        sampling: Sampling,
        budget: Budget,
        eos_ids: tuple[int, ...],
        max_new_tokens: int,
        batch_size: int,
        draft_sampling: Sampling | None = None,
        vocab_size: int | None = None,
        timed: bool = False,
    ):
        self.target, self.drafter, self.sampling, self.budget = target, drafter, sampling, budget
        self.draft_sampling = draft_sampling or sampling
        self.eos, self.max_new_tokens = set(eos_ids), max_new_tokens
        self.batch_size, self.timed, self.vocab_size = batch_size, timed, vocab_size

    def run(self, requests: Iterable[Request]) -> Iterator[Speculated]:
        """Yield answers as they finish (not in order)."""
        with torch.inference_mode():
            yield from self._run(sorted(requests, key=lambda r: len(r.prompt_ids)))

    def _run(self, waiting: list[Request]) -> Iterator[Speculated]:
        if not waiting:
            return
        self.waiting = waiting
        size = min(self.batch_size, len(waiting))
        depth = self.budget.max_tokens
        capacity = len(waiting[-1].prompt_ids) + self.max_new_tokens + 2 * depth + 2
        device = self.target.device
        self.target.begin(size, capacity)
        self.drafter.begin(size, capacity)
        self.rows: list[_Row | None] = [None] * size
        self.ids = torch.zeros(size, capacity, dtype=torch.long, device=device)
        self.lengths = torch.full((size,), 2, dtype=torch.long, device=device)
        self.keys = torch.zeros(size, dtype=torch.long, device=device)
        self.offsets = torch.arange(-1, depth, device=device)
        yield from self._fill()
        while self.waiting or any(self.rows):
            if any(
                self.rows
            ):  # none is left when all answers ended with the token of their prefill
                yield from self._round()
            free = self.rows.count(None)
            if self.waiting and free >= max(1, size // 8):
                yield from self._fill()
            elif not self.waiting and len(self.rows) > 1 and free >= len(self.rows) / 2:
                self._compact()

    def _fill(self) -> Iterator[Speculated]:
        """Prefill waiting prompts into free rows and commit the first token of each."""
        free = [i for i, row in enumerate(self.rows) if row is None][: len(self.waiting)]
        taken = [self.waiting.pop() for _ in free]
        device = self.ids.device
        lengths = [len(r.prompt_ids) for r in taken]
        ids = torch.zeros(len(taken), max(lengths), dtype=torch.long)
        for i, request in enumerate(taken):
            ids[i, : lengths[i]] = torch.tensor(request.prompt_ids)
        ids = ids.to(device)
        rows = torch.tensor(free, device=device)
        ends = torch.tensor(lengths, device=device)
        kept = sorted(set(lengths))
        logits = self.target.forward(
            ids,
            torch.arange(ids.shape[1], device=device).expand_as(ids),
            used=ids.shape[1],
            rows=None if len(taken) == len(self.rows) else rows,
            first=0,
            logits_to_keep=torch.tensor([n - 1 for n in kept], device=device),
        )
        last = logits[torch.arange(len(taken)), torch.tensor([kept.index(n) for n in lengths])]
        last = last[:, : self.vocab_size]
        self.drafter.prefill(rows, ids, ends, None)
        self.keys[rows] = torch.tensor([r.key for r in taken], device=device)
        if self.sampling.temperature == 0:
            chosen = last.argmax(-1)
        else:
            chosen = KeyedRandom(self.keys[rows]).choice(warp(last, self.sampling), ends, "target")
        self.ids[rows, : ids.shape[1]] = ids
        self.ids[rows, ends] = chosen
        self.lengths[rows] = ends + 1
        for index, request, token in zip(free, taken, chosen.tolist(), strict=True):
            self.rows[index] = _Row(request, [token])
            if token in self.eos or self.max_new_tokens == 1:
                yield self._finish(index)

    def _round(self) -> Iterator[Speculated]:
        longest = max(len(r.request.prompt_ids) + len(r.tokens) if r else 2 for r in self.rows)
        random = KeyedRandom(self.keys)
        active = torch.tensor([row is not None for row in self.rows], device=self.ids.device)
        began = self._clock()
        tree = self.drafter.propose(
            DraftState(self.ids, self.lengths, longest, self.draft_sampling, random), self.budget
        )
        drafted = self._clock()
        depth = tree.tokens.shape[1]
        first = self.lengths.unsqueeze(1)
        positions = first + self.offsets[: depth + 1]
        feed = torch.cat([self.ids.gather(1, first - 1), tree.tokens], 1)
        logits = self.target.forward(
            feed,
            positions,
            used=longest + depth,
            first=longest - 1 if len(self.rows) == 1 else None,
        )
        logits = logits[..., : self.vocab_size]
        verdict = verify_chain(tree, logits, self.sampling, random, self.lengths, active)
        verified = self._clock()
        # commit: drafts, then the emitted token over the first one not accepted; what lies beyond
        # the new length is never read
        self.ids.scatter_(1, positions[:, 1:], tree.tokens)
        self.ids.scatter_(1, first + verdict.accepted.unsqueeze(1), verdict.emitted.unsqueeze(1))
        self.lengths += (verdict.accepted + 1) * active
        host = torch.cat(
            [
                verdict.accepted.unsqueeze(1),
                verdict.emitted.unsqueeze(1),
                tree.lengths.unsqueeze(1),
                tree.tokens,
            ],
            1,
        ).tolist()
        overlaps = verdict.overlap.tolist()
        spent = (drafted - began, verified - drafted, self._clock() - verified)
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            accepted, emitted, submitted, *tokens = host[index]
            new = [*tokens[:accepted], emitted]
            kept = next((i + 1 for i, token in enumerate(new) if token in self.eos), len(new))
            kept = min(kept, self.max_new_tokens - len(row.tokens))
            row.rounds.append(
                Round(
                    prompt_hash=row.request.tag,
                    submitted=submitted,
                    depth=submitted,
                    accepted=min(accepted, kept),
                    emitted=kept,
                    first_reject_pos=accepted + 1 if accepted < min(submitted, kept) else None,
                    draft_forwards=tree.draft_forwards,
                    draft_tokens=tree.draft_tokens,
                    t_draft=spent[0],
                    t_verify=spent[1],
                    t_other=spent[2],
                    ctx_len=len(row.request.prompt_ids) + len(row.tokens),
                    overlap=overlaps[index][: min(accepted + 1, submitted, kept)],
                    truncated=kept < len(new),
                    engine_accepted=accepted,
                )
            )
            row.tokens += new[:kept]
            if row.tokens[-1] in self.eos or len(row.tokens) >= self.max_new_tokens:
                yield self._finish(index)

    def _finish(self, index: int) -> Speculated:
        row = self.rows[index]
        assert row is not None
        self.rows[index] = None
        self.lengths[index] = 2  # a free row keeps computing at the start of its own buffer
        reason = "eos" if row.tokens[-1] in self.eos else "length"
        return Speculated(row.request, row.tokens, reason, row.rounds)

    def _compact(self) -> None:
        live = [i for i, row in enumerate(self.rows) if row is not None]
        if not live:
            return
        index = torch.tensor(live, device=self.ids.device)
        self.target.keep(index)
        self.drafter.keep(index)
        self.rows = [self.rows[i] for i in live]
        self.ids, self.lengths, self.keys = self.ids[index], self.lengths[index], self.keys[index]

    def _clock(self) -> float:
        if self.timed and self.ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
