"""Trees without decoding: the rounds of decoding, driven by a trace instead of the target.

A deterministic tree is verified by drawing the target's token and following the matching child. The
trace is what the target drew, so the accepted path at a start is the longest one along the trace:
nothing is left to chance, and the target's states of the whole trace come from one parallel pass.
Only the drafter works round by round. Calibration of static trees, from the ranks of the true
tokens, lives here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.round import Budget, Drafter, DraftState
from drafters.text import Text
from drafters.trees.calibrated import MAX_RANKS
from drafters.trees.tree import TOP, TokenTree
from eval.counters import PromptCounters, counters_from_rounds
from eval.offline import check_sampling, columns_of
from eval.rounds import Round
from eval.texts import Texts
from target.model import Target
from target.outputs import TargetOutputs
from target.padding import by_length, right_padded
from target.sampling import KeyedRandom, Sampling, inverse_cdf, keyed_uniform, warp
from trainer.errors import UserError
from trainer.logits import chunk_rows

STARTS = 256  # at most, at which the accuracies of draws are measured, of each depth


class TreeReplay:
    """Replays traces of one sampling with trees of `budget.tree`; counters equal those of decoding.

    `texts`: of these traces, with the states that other replays have read; `on_tokens` is called
    with the response tokens of each round. Raises UserError where such trees cannot be replayed, or
    the traces are of another sampling or have too few look-ahead tokens.
    """

    def __init__(
        self,
        target: Target,
        traces: Sequence[Trace],
        sampling: Sampling,
        budget: Budget,
        texts: Texts | None = None,
        on_tokens: Callable[[int], None] = lambda _: None,
    ):
        self.on_tokens = on_tokens
        if not follows_the_text(budget, sampling):
            raise UserError(
                "acceptance given the text is known for trees of the most likely tokens alone: "
                f"only decoding measures those whose siblings are {budget.form}"
            )
        check_sampling(traces, sampling)
        for trace in traces:
            if len(trace.lookahead_ids) < budget.max_tokens - 1:
                raise UserError(
                    f"traces carry {len(trace.lookahead_ids)} look-ahead tokens, a tree of depth "
                    f"{budget.max_tokens} needs as many: generate them with a larger eval.K"
                )
        self.target, self.sampling, self.budget = target, sampling, budget
        self.texts = texts or Texts(target, traces, 0)

    @torch.inference_mode()
    def __call__(self, drafter: Drafter) -> list[PromptCounters]:
        """Counters of each trace."""
        counters = []
        for index, group in enumerate(self.texts.groups):
            rounds = self._group(drafter, index, group)
            counters += [
                counters_from_rounds(rows, trace.prompt_hash, trace.domain, self.budget.max_tokens)
                for rows, trace in zip(rounds, group, strict=True)
            ]
        return counters

    def _group(self, drafter: Drafter, index: int, group: Sequence[Trace]) -> list[list[Round]]:
        device, depth = self.target.device, self.budget.max_tokens
        ids = self.texts.ids(index)
        capacity = ids.shape[1] + depth + self.budget.max_slots + 2
        padding = (0, capacity - ids.shape[1])
        ids = torch.nn.functional.pad(ids, padding)
        read = self.texts.states(index, drafter.target_layers)
        hidden = {i: torch.nn.functional.pad(s, (0, 0, *padding)) for i, s in read.items()}
        starts = torch.tensor([len(t.prompt_ids) for t in group], device=device)
        widest = int(starts.max())
        drafter.begin(len(group), capacity)
        prompts = {layer: states[:, :widest] for layer, states in hidden.items()}
        rows = torch.arange(len(group), device=device)
        drafter.prefill(rows, ids[:, :widest], starts, TargetOutputs(prompts))
        lengths = starts + 1
        found: list[list[Round]] = [[] for _ in group]
        self.on_tokens(len(group))  # the first of each response is the prefill's
        live = [row for row, trace in enumerate(group) if len(trace.response_ids) > 1]
        at = torch.tensor(live, dtype=torch.long, device=device)
        while live:
            if len(at) < len(lengths):  # some have ended
                drafter.keep(at)
                ids, lengths = ids[at], lengths[at]
                hidden = {layer: states[at] for layer, states in hidden.items()}
            state = DraftState(
                ids, lengths, int(lengths.max()), self.sampling,
                KeyedRandom(torch.zeros_like(lengths)), TargetOutputs(hidden),
            )  # fmt: skip
            tree = drafter.propose(state, self.budget)
            counts, depths = tree.lengths.tolist(), tree.depths.amax(1).tolist()
            tokens, parents = (
                [row[:count] for row, count in zip(one.tolist(), counts, strict=True)]
                for one in (tree.tokens, tree.parents)
            )
            steps, going = [], []
            for place, (row, length) in enumerate(zip(live, lengths.tolist(), strict=True)):
                trace = group[row]
                done = length - len(trace.prompt_ids)
                ahead = (trace.response_ids + trace.lookahead_ids)[done:]
                node, accepted = longest_path(tokens[place], parents[place], ahead)
                room = len(trace.response_ids) - done
                rejected = node in parents[place]
                shape = counts[place], depths[place] if counts[place] else 0
                found[row].append(_round(trace, tree, shape, accepted, rejected, room, done))
                self.on_tokens(found[row][-1].emitted)
                steps.append(accepted + 1)
                if accepted + 1 < room:
                    going.append(place)
            lengths = lengths + torch.tensor(steps, device=device)
            live = [live[place] for place in going]
            at = torch.tensor(going, dtype=torch.long, device=device)
        return found


def follows_the_text(budget: Budget, sampling: Sampling) -> bool:
    """Whether the path that is accepted is the longest one along the target's text."""
    return budget.form == TOP or sampling.temperature == 0


def longest_path(
    tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]
) -> tuple[int, int]:
    """The deepest node (-1: none) whose path spells the beginning of `text`, and its depth.

    `parents`: parents come before children.
    """
    reached = {-1: 0}  # node -> its depth, for nodes on a matching path
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        depth = reached.get(parent)
        if depth is not None and depth < len(text) and text[depth] == token:
            reached[node] = depth + 1
    return max(reached.items(), key=lambda item: item[1])


def _round(
    trace: Trace, tree: TokenTree, shape: tuple[int, int], accepted: int, rejected: bool,
    room: int, done: int,
) -> Round:  # fmt: skip
    """The record of a round; `shape`: nodes and depth of its tree; `room`: tokens until the end of
    the answer, past which engines accept."""
    submitted, depth = shape
    emitted = min(accepted + 1, room)
    return Round(
        prompt_hash=trace.prompt_hash,
        submitted=submitted,
        depth=depth,
        accepted=min(accepted, emitted),
        emitted=emitted,
        first_reject_pos=accepted + 1 if rejected and accepted < emitted else None,
        draft_forwards=tree.draft_forwards,
        draft_tokens=tree.draft_tokens,
        t_draft=0.0,
        t_verify=0.0,
        t_other=0.0,
        ctx_len=len(trace.prompt_ids) + done,
        overlap=[],
        truncated=emitted < accepted + 1,
        engine_accepted=accepted,
    )


class Accuracies(NamedTuple):
    """[depth][number] each, for `drafters.trees.calibrated`: `ranks`, the target's probability of
    the token with that rank; `draws`, the probability that the token drawn with that number is the
    one that verification accepts."""

    ranks: list[list[float]]
    draws: list[list[float]]


@torch.inference_mode()
def measure_accuracies(
    target: Target,
    traces: Sequence[Trace],
    drafter: TrainedDrafter,
    depth: int,
    sampling: Sampling,
    draft_sampling: Sampling | None = None,
    batch_size: int = 16,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Accuracies:
    """The accuracies over the starts of rounds in these texts; those of draws over at most `STARTS`
    of each depth, evenly spread, since each draw takes several passes over the vocabulary.

    The target's probabilities are those at `sampling`, whatever the text was sampled with: at T=0
    the share of starts at which a token is the target's choice, and a draw is a rank. The tokens
    before are the text's own. `draft_sampling`: of the drafter, the target's where None.
    """
    hits, accepted = np.zeros((depth, MAX_RANKS)), np.zeros((depth, MAX_RANKS))
    tried, drawn = np.zeros(depth), np.zeros(depth)
    total = sum(max(0, len(t.response_ids) - 1) for t in traces)
    every = max(1, -(-total // STARTS))
    before = 0  # starts in the texts so far
    for group in by_length(traces, lambda t: t.num_tokens, batch_size):
        rows = [t.prompt_ids + t.response_ids for t in group]
        ids = right_padded(rows)[0].to(target.device)
        outputs = target.outputs(ids, layers=drafter.target_layers, project_later=True)
        assert outputs.logits is not None
        chunk = chunk_rows(target.device, target.vocab_size)
        columns = columns_of(group, ids) if drafter.one_pass else None
        drafts = list(drafter.states(Text(ids, columns=columns), outputs, depth))
        for row, trace in enumerate(group):
            # the first token of an answer is the prefill's, the anchor of the first round
            first, last = len(trace.prompt_ids), len(rows[row]) - 1
            for at in range(first, last, chunk):
                span = slice(at, min(at + chunk, last))
                mass = warp(outputs.logits[row, span], sampling)
                for j, states in enumerate(drafts):
                    skipped = max(0, first + j - at)  # too early for a token of this depth
                    logits = drafter.project(states[row, span][skipped:], j + 1)
                    best = logits.topk(MAX_RANKS, -1).indices
                    found = mass[skipped:].gather(-1, best)
                    hits[j] += found.double().sum(0).cpu().numpy()
                    if sampling.temperature == 0:
                        continue
                    number = before + at - first + skipped
                    chosen = slice(-number % every, None, every)
                    if chosen.start >= len(logits):
                        continue
                    law = warp(logits[chosen], draft_sampling or sampling)
                    numbers = torch.arange(number, number + len(logits), device=ids.device)
                    found = accepted_draws(mass[skipped:][chosen], law, numbers[chosen], j)
                    accepted[j] += found.double().sum(0).cpu().numpy()
                    drawn[j] += len(law)
            tried += np.maximum(0, last - first - np.arange(depth))
            before += max(0, last - first)
        on_tokens(sum(len(trace.response_ids) for trace in group))
    ranks = (hits / np.maximum(tried, 1)[:, None]).tolist()
    if sampling.temperature == 0:
        return Accuracies(ranks, ranks)
    return Accuracies(ranks, (accepted / np.maximum(drawn, 1)[:, None]).tolist())


def accepted_draws(
    p: torch.Tensor, q: torch.Tensor, numbers: torch.Tensor, depth: int
) -> torch.Tensor:
    """[n, MAX_RANKS]: the probability that multi-round rejection accepts the k-th of tokens drawn
    without replacement from q [n, V], where the target has p [n, >= V].

    One that is tried is accepted with the probability that p and q share. A rejected one was drawn
    from what q has beyond p: such a draw, by the number [n] of its start, stands for all.
    """
    q, found = torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1])), []
    reached = torch.ones(len(q), device=q.device)
    for k in range(MAX_RANKS):
        shared = torch.minimum(p, q).sum(-1)
        found.append(reached * shared)
        reached = reached * (1 - shared).clamp_min(0)
        uniform = keyed_uniform(numbers, torch.full_like(numbers, depth), f"rejected {k}")
        token = inverse_cdf((q - p).clamp_min(0), uniform).unsqueeze(1)
        p = (p - q).clamp_min(0)
        p = p / p.sum(-1, keepdim=True).clamp_min(1e-38)
        q = q.scatter(1, token, 0.0)
        q = q / q.sum(-1, keepdim=True).clamp_min(1e-38)
    return torch.stack(found, 1)
