"""Exact speculative decoding, batched: rows accept different lengths and are refilled as they end.

The first token comes out of the prefill and belongs to no round. A round drafts a chain of K tokens
or a tree, verifies it in one target forward and emits the accepted tokens and one more. Rounds run
to their full K past EOS and past the length limit, as engines do: `engine_accepted` counts that,
everything else is counted after cutting the output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from drafters.round import Budget, Drafter, DraftState
from drafters.trees.tree import TokenTree
from eval.rounds import Round, RoundIds
from eval.verifiers.base import Verdict, Verification, Verifier
from eval.verifiers.token import Token
from target.cache import CachedModel
from target.decode import Request
from target.nodes import place_tree
from target.outputs import LayerId, TargetOutputs
from target.sampling import KeyedRandom, Sampling, warp
from trainer.errors import RunFault


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
    unless given; `vocab_size`: the target's logits past it are padding without probability;
    `timed`: synchronise and record seconds per round; `verifier`: token by token unless given;
    `shown`: tags of the requests whose rounds keep their token ids; `on_tokens` is called with the
    number of tokens that each forward adds to an answer."""

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
        verifier: Verifier | None = None,
        shown: Collection[str] = (),
        on_tokens: Callable[[int], None] = lambda _: None,
    ):
        self.shown, self.on_tokens = tuple(shown), on_tokens
        self.verifier = verifier or Token()
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
        # the last round may begin one token before the limit and lie on a row's last nodes
        capacity = len(waiting[-1].prompt_ids) + self.max_new_tokens + depth + 2
        capacity += self.budget.max_slots
        self.capacity = capacity
        device = self.target.device
        self.target.begin(size, capacity)
        self.drafter.begin(size, capacity)
        if self.budget.stop is not None:
            self.budget.stop.begin(size, device)
        self.rows: list[_Row | None] = [None] * size
        self.ids = torch.zeros(size, capacity, dtype=torch.long, device=device)
        self.lengths = torch.full((size,), 2, dtype=torch.long, device=device)
        self.keys = torch.zeros(size, dtype=torch.long, device=device)
        self.offsets = torch.arange(-1, depth, device=device)
        self.hidden: dict[LayerId, torch.Tensor] = {}
        yield from self._fill()
        while self.waiting or any(self.rows):
            if any(self.rows):  # none where all answers ended with the token of their prefill
                yield from self._round()
            free = self.rows.count(None)
            if self.waiting and free >= max(1, size // 8):
                yield from self._fill()
            # each compaction drops the graphs that a GPU has captured, a CPU is rid of the rows
            elif not self.waiting and free >= (len(self.rows) / 2 if self.ids.is_cuda else 1):
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
        found: dict[LayerId, torch.Tensor] = {}
        last = self.target.forward(
            ids,
            torch.arange(ids.shape[1], device=device).expand_as(ids),
            used=ids.shape[1],
            rows=None if len(taken) == len(self.rows) else rows,
            first=0,
            logits_to_keep=ends - 1,
            layers=self.drafter.target_layers,
            found=found,
        )[:, 0, : self.vocab_size]
        for layer, states in found.items():
            if layer not in self.hidden:
                shape = (len(self.rows), self.capacity, states.shape[-1])
                self.hidden[layer] = states.new_zeros(shape)
            self.hidden[layer][rows, : ids.shape[1]] = states
        self.drafter.prefill(rows, ids, ends, TargetOutputs(found) if found else None)
        if self.budget.stop is not None:
            self.budget.stop.renew(rows)
        self.keys[rows] = torch.tensor([r.key for r in taken], device=device)
        if self.sampling.temperature == 0:
            chosen = last.argmax(-1)
        else:
            chosen = KeyedRandom(self.keys[rows]).choice(warp(last, self.sampling), ends, "target")
        self.ids[rows, : ids.shape[1]] = ids
        self.ids[rows, ends] = chosen
        self.lengths[rows] = ends + 1
        self.on_tokens(len(taken))
        for index, request, token in zip(free, taken, chosen.tolist(), strict=True):
            self.rows[index] = _Row(request, [token])
            if token in self.eos or self.max_new_tokens == 1:
                yield self._finish(index)

    def _round(self) -> Iterator[Speculated]:
        longest = max(len(r.request.prompt_ids) + len(r.tokens) if r else 2 for r in self.rows)
        random = KeyedRandom(self.keys)
        active = torch.tensor([row is not None for row in self.rows], device=self.ids.device)
        began = self._clock()
        outputs = TargetOutputs(self.hidden) if self.hidden else None
        tree = self.drafter.propose(
            DraftState(self.ids, self.lengths, longest, self.draft_sampling, random, outputs),
            self.budget,
        )
        drafted = self._clock()
        found: dict[LayerId, torch.Tensor] = {}
        verdict = self._verify(tree, longest, random, active, found)
        verified = self._clock()
        accepted_tokens = self._commit(tree, verdict, found)
        if self.budget.stop is not None:
            self.budget.stop.verified(verdict.accepted, tree.lengths)
        self.lengths += (verdict.accepted + 1) * active
        host = self._on_host(tree, verdict, accepted_tokens)
        overlaps = [[]] * len(host) if verdict.overlap is None else verdict.overlap.tolist()
        spent = (drafted - began, verified - drafted, self._clock() - verified)
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            accepted, emitted, submitted, rejected, depth, *tokens = host[index]
            new = [*tokens[:accepted], emitted]
            kept = next((i + 1 for i, token in enumerate(new) if token in self.eos), len(new))
            kept = min(kept, self.max_new_tokens - len(row.tokens))
            row.rounds.append(
                Round(
                    prompt_hash=row.request.tag,
                    submitted=submitted,
                    depth=depth,
                    accepted=min(accepted, kept),
                    emitted=kept,
                    first_reject_pos=accepted + 1 if rejected and accepted < kept else None,
                    draft_forwards=tree.draft_forwards,
                    draft_tokens=tree.draft_tokens,
                    t_draft=spent[0],
                    t_verify=spent[1],
                    t_other=spent[2],
                    ctx_len=len(row.request.prompt_ids) + len(row.tokens),
                    overlap=overlaps[index][: min(accepted + 1, submitted, kept)],
                    truncated=kept < len(new),
                    engine_accepted=accepted,
                    ids=_ids(tree, verdict, index, new[:kept], submitted)
                    if row.request.tag in self.shown
                    else None,
                )
            )
            row.tokens += new[:kept]
            self.on_tokens(kept)
            if row.tokens[-1] in self.eos or len(row.tokens) >= self.max_new_tokens:
                yield self._finish(index)

    def _verify(
        self,
        tree: TokenTree,
        longest: int,
        random: KeyedRandom,
        active: torch.Tensor,
        found: dict[LayerId, torch.Tensor],
    ) -> Verdict:
        """One target forward on the last committed token and what was drafted behind it; `found`
        receives the states that the drafter reads."""
        nodes = tree.tokens.shape[1]
        first = self.lengths.unsqueeze(1)
        feed = torch.cat([self.ids.gather(1, first - 1), tree.tokens], 1)
        if tree.is_chain:
            place, positions = None, first + self.offsets[: nodes + 1]
        else:
            place = place_tree(self.lengths, tree.ancestors, tree.depths)
            positions = place.positions
        logits = self.target.forward(
            feed,
            positions,
            used=longest + nodes,
            first=longest - 1 if len(self.rows) == 1 and place is None else None,
            tree=place,
            layers=self.drafter.target_layers,
            found=found,
        )[..., : self.vocab_size]
        if self.sampling.temperature > 0 and tree.form not in self.verifier.judges:
            raise RunFault(
                f"the verifier {self.verifier.name} judges {', '.join(self.verifier.judges)}: what "
                f"was drafted is {tree.form}"
            )
        return self.verifier(
            Verification(tree, logits, self.sampling, random, self.lengths, active)
        )

    def _commit(
        self, tree: TokenTree, verdict: Verdict, found: dict[LayerId, torch.Tensor]
    ) -> torch.Tensor:
        """Write the accepted tokens, the emitted one over the first not accepted, and the target's
        states of what is committed now; what lies beyond the new length is never read. Returns
        [B, D] tokens of which the first `accepted` count."""
        first = self.lengths.unsqueeze(1)
        if verdict.path is None:
            tokens = tree.tokens
            states_of = positions = first + self.offsets[: tokens.shape[1] + 1]
            for layer, states in found.items():
                index = states_of.unsqueeze(-1).expand_as(states)
                self.hidden[layer].scatter_(1, index, states)
        else:
            path = verdict.path
            taken = path >= 0
            tokens = tree.tokens.gather(1, path.clamp(min=0))
            depth = torch.arange(path.shape[1], device=path.device)
            # nodes that are not on the path stand for the last committed token, moved onto itself
            source = torch.where(taken, first + path, first - 1)
            destination = torch.where(taken, first + depth, first - 1)
            self.target.move(source, destination)
            positions = first + self.offsets[: path.shape[1] + 1]
            at = torch.cat([first - 1, destination], 1)
            node = torch.cat([torch.zeros_like(first), torch.where(taken, path + 1, 0)], 1)
            for layer, states in found.items():
                size = states.shape[-1]
                chosen = states.gather(1, node.unsqueeze(-1).expand(-1, -1, size))
                self.hidden[layer].scatter_(1, at.unsqueeze(-1).expand(-1, -1, size), chosen)
        self.ids.scatter_(1, positions[:, 1:], tokens)
        emitted_at = first + verdict.accepted.unsqueeze(1)
        self.ids.scatter_(1, emitted_at, verdict.emitted.unsqueeze(1))
        return tokens

    @staticmethod
    def _on_host(tree: TokenTree, verdict: Verdict, tokens: torch.Tensor) -> list[list[int]]:
        """Read the numbers of a round with one copy from the device: of each row, what was
        accepted, emitted, submitted and rejected, the depth of its tree, and `tokens`."""
        depth = tree.lengths if tree.is_chain else tree.depths.amax(1) * (tree.lengths > 0)
        rejected = verdict.rejected
        if rejected is None:
            rejected = verdict.accepted < tree.lengths
        numbers = (verdict.accepted, verdict.emitted, tree.lengths, rejected.long(), depth)
        return torch.cat([*(one.unsqueeze(1) for one in numbers), tokens], 1).tolist()

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
        if self.budget.stop is not None:
            self.budget.stop.keep(index)
        self.rows = [self.rows[i] for i in live]
        self.ids, self.lengths, self.keys = self.ids[index], self.lengths[index], self.keys[index]
        self.hidden = {layer: states[index] for layer, states in self.hidden.items()}

    def _clock(self) -> float:
        if self.timed and self.ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def _ids(
    tree: TokenTree, verdict: Verdict, row: int, emitted: list[int], submitted: int
) -> RoundIds:
    drafted = tree.tokens[row, :submitted].tolist()
    if verdict.path is None:
        return RoundIds(drafted, emitted)
    path = [node for node in verdict.path[row].tolist() if node >= 0]
    return RoundIds(drafted, emitted, tree.parents[row, :submitted].tolist(), path)
