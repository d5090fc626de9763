"""A bank of draft rollouts: every policy of draft length measured on the same drafts and coins.

From positions of the target's text one chain of `K` tokens is drafted, with the probability, the
acceptance head's score and the coin of every token. A policy then cuts each chain somewhere, so a
grid of policies costs one drafting (Huang et al. 2024, SpecDec++, sweep thresholds; common random
numbers make their differences small). Places lie evenly in the text, and each counts for a policy
as often as that policy's own rounds start there (`OwnRounds`): decoding begins more rounds where it
fails, and a policy that stops in time fails elsewhere than chains of fixed length. Rounds are cut
at the end of text and at the length limit, as decoding cuts them. Rounds behind which a whole
draft does not fit into the drafter's context are left out: under every policy they draft nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.round import Budget, DraftState
from drafters.trees.tree import TokenTree
from eval.counters import PromptCounters
from eval.offline import OfflineEvaluator
from eval.policies.base import Recorder
from eval.row import Rates
from eval.speed_model import modelled_speedup
from eval.stops import drafted_lengths
from eval.walk import visits
from target.model import Target
from target.outputs import TargetOutputs
from target.padding import by_length
from target.sampling import KeyedRandom, Sampling, keyed_uniform, row_key, warp
from trainer.errors import UserError

FAMILIES = ("fixed", "confidence", "product", "heuristic", "head")  # that a report compares
STARTS = 8  # rounds per prompt
REPEATS = 16  # walks along a text, under a policy whose rounds depend on those before


@dataclass
class Rollouts:
    """P prompts with S rollouts of K tokens each, in the order of the text.

    `confidence`, `probability`, `score` [P, S, K] float: `Signals` of each token, with the score of
    the token itself, NaN for the last one and without a head; `ratio`: probability of acceptance,
    p/q at most 1; `uniform`: its coin; `ends`: whether it is an EOS; `room` [P, S]: tokens until
    the end of the answer; `rounds` [P]: number of places at which rounds may start, for which the
    rollouts of a prompt stand; `own`: the rounds of each policy along the texts, None: one starts
    at each of these places.
    """

    traces: list[Trace]
    confidence: torch.Tensor
    probability: torch.Tensor
    score: torch.Tensor
    ratio: torch.Tensor
    uniform: torch.Tensor
    ends: torch.Tensor
    room: torch.Tensor
    rounds: list[float]
    own: OwnRounds | None = None

    @property
    def K(self) -> int:
        """Tokens of each rollout."""
        return self.ratio.shape[-1]

    @property
    def scored(self) -> bool:
        """Whether tokens have the score of an acceptance head."""
        return self.K > 1 and not bool(self.score[..., 0].isnan().any())

    def counters(self, budget: Budget) -> list[PromptCounters]:
        """Counters of each prompt under this policy.

        Its rollouts count as rounds, one after the other, each for as many as the policy starts
        there. Raises UserError where the policy drafts more than K tokens.
        """
        if budget.max_tokens > self.K:
            raise UserError(f"rollouts hold {self.K} tokens, a policy needs {budget.max_tokens}")
        rule, num_prompts = budget.stop, len(self.traces)
        weights = self.weights(budget)
        if rule is not None:
            rule.begin(num_prompts, self.ratio.device)
        rounds = []
        for turn in range(self.ratio.shape[1]):
            lengths = self._lengths(budget, turn)
            accepted = self.accepted(turn).clamp(max=lengths)
            if rule is not None:
                rule.verified(accepted, lengths)
            cut = _cut(lengths, accepted, self.ends[:, turn], self.room[:, turn])
            judged = rule is not None and rule.judges_last
            judging = (lengths < budget.max_tokens) & judged
            one = cut | {"judging": judging, "rounds": torch.ones_like(lengths)}
            rounds.append({name: own.double() * weights[:, turn] for name, own in one.items()})
        none = torch.zeros(num_prompts, dtype=torch.double, device=self.ratio.device)
        sums = {name: sum((one[name] for one in rounds), none) for name in rounds[0]}
        return [self._prompt(row, sums, budget) for row in range(num_prompts)]

    def weights(self, budget: Budget) -> torch.Tensor:
        """Rounds of the policy, [P, S], that each rollout stands for."""
        alike = torch.tensor(self.rounds, dtype=torch.double) / self.ratio.shape[1]
        weights = alike.unsqueeze(1).expand(-1, self.ratio.shape[1])
        if self.own is not None:
            places = self.own.lengths.unsqueeze(1) - self.room
            weights = weights * self.own.visits(budget).gather(1, places)
        return weights.to(self.ratio.device)

    def accepted(self, turn: int) -> torch.Tensor:
        """Number of tokens, [P], before the first rejection among all K."""
        passed = self.uniform[:, turn] < self.ratio[:, turn]
        return passed.long().cumprod(-1).sum(-1)

    def _lengths(self, budget: Budget, turn: int) -> torch.Tensor:
        """Length, [P], at which the policy cuts each chain."""
        signals = (own[:, turn] for own in (self.confidence, self.probability, self.score))
        return _lengths(budget, *signals)

    def _prompt(self, row: int, sums: dict[str, torch.Tensor], budget: Budget) -> PromptCounters:
        trace = self.traces[row]
        one = PromptCounters(trace.prompt_hash, trace.domain, budget.max_tokens)
        for name, values in sums.items():
            setattr(one, name, float(values[row]))
        return one


@dataclass
class OwnRounds:
    """Where the rounds of a policy start along P texts of at most N tokens.

    `accept` [P, N, K] float64: probability that each token of a round is accepted, given the text;
    `confidence`, `probability`, `score` [P, N, K]: `Signals` of these tokens, as in `Rollouts`;
    `lengths` [P] int64; `uniform` [P, REPEATS, N + K]: a coin for each token of each walk.
    """

    accept: torch.Tensor
    confidence: torch.Tensor
    probability: torch.Tensor
    score: torch.Tensor
    lengths: torch.Tensor
    uniform: torch.Tensor

    def visits(self, budget: Budget) -> torch.Tensor:
        """Expected rounds, [P, N] float64, that start at each token; for a policy whose rounds
        depend on those before, the mean of walks along the text."""
        rule, K = budget.stop, budget.max_tokens
        if rule is not None and not rule.replayable:
            return self._walked(budget)
        flat = [one.flatten(0, 1) for one in (self.confidence, self.probability, self.score)]
        if rule is not None:
            rule.begin(len(flat[0]), flat[0].device)
        drafted = _lengths(budget, *flat).view(self.accept.shape[:2])
        given = (self.accept[..., :K].numpy(), drafted.numpy(), self.lengths.numpy())
        return torch.from_numpy(visits(*given))

    def _walked(self, budget: Budget) -> torch.Tensor:
        rule, K = budget.stop, budget.max_tokens
        assert rule is not None
        prompts, repeats, _ = self.uniform.shape
        row = torch.arange(prompts).repeat_interleave(repeats)
        coins, lengths = self.uniform.flatten(0, 1), self.lengths[row]
        found = torch.zeros(self.accept.shape[:2], dtype=torch.double)
        at = torch.ones_like(row)
        rule.begin(len(row), at.device)
        while bool((live := at < lengths).any()):
            found.index_put_((row[live], at[live]), torch.ones(1).double(), accumulate=True)
            here = row, at.clamp(max=found.shape[1] - 1)
            signals = self.confidence[here], self.probability[here], self.score[here]
            drafted = _lengths(budget, *signals)
            coin = coins.gather(1, here[1].unsqueeze(1) + torch.arange(K))
            passed = (coin < self.accept[here][:, :K]).long().cumprod(1).sum(1)
            accepted = torch.minimum(passed, drafted)
            rule.verified(accepted, drafted)
            at = at + accepted + 1
        return found / repeats


def _lengths(
    budget: Budget, confidence: torch.Tensor, probability: torch.Tensor, score: torch.Tensor
) -> torch.Tensor:
    """Lengths [n] at which the policy cuts chains with these signals, [n, K]."""
    K = budget.max_tokens
    if budget.stop is None:
        return torch.full_like(confidence[:, 0], K, dtype=torch.long)
    signals = (one[:, :K] for one in (confidence, probability, score))
    return drafted_lengths(budget.stop, *signals)


def _cut(
    lengths: torch.Tensor, accepted: torch.Tensor, ends: torch.Tensor, room: torch.Tensor
) -> dict[str, torch.Tensor]:
    """One round of each prompt, cut as `eval.engine` cuts it; [P] each, `ends` [P, K]."""
    first_end = torch.where(ends.any(-1), ends.long().argmax(-1) + 1, ends.shape[-1] + 2)
    emitted = torch.minimum(torch.minimum(accepted + 1, first_end), room)
    return {
        "submitted": lengths,
        "emitted": emitted,
        "accepted": torch.minimum(accepted, emitted),
        "rejections": (accepted < lengths) & (accepted < emitted),
    }


@torch.inference_mode()
def draw(
    target: Target,
    drafter: TrainedDrafter,
    traces: Sequence[Trace],
    sampling: Sampling,
    K: int,
    *,
    draft_sampling: Sampling | None = None,
    starts: int = STARTS,
    seed: int = 0,
    batch_size: int = 32,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Rollouts:
    """Draft rollouts from `starts` positions of every trace whose response has one.

    Only from positions at which a whole draft fits into what target and drafter see: beyond them
    decoding drafts nothing. They use `sampling`, whatever the text was sampled with;
    `draft_sampling`: of the drafter, the same unless given. `on_tokens` is called after each batch
    with the number of drafted tokens. Raises UserError where no trace has two tokens there.
    """
    context = min(target.context, drafter.context or target.context)
    limits = {id(t): min(len(t.response_ids), context - K - len(t.prompt_ids) + 1) for t in traces}
    usable = [trace for trace in traces if limits[id(trace)] > 1]
    if not usable:
        raise UserError(
            f"rollouts of {K} tokens need at least one target trace with two tokens in the first "
            f"{context - K} positions, after which a whole draft would not fit"
        )
    draft_sampling = draft_sampling or sampling
    rng = np.random.default_rng(seed)
    places = [_places(limits[id(t)], starts, float(rng.random())) for t in usable]
    rows = [(i, int(place)) for i, own in enumerate(places) for place in own]
    tokens = [len(usable[p].prompt_ids) + n + K for p, n in rows]  # that the target reads
    shape = (len(rows), K)
    names = ("confidence", "probability", "score", "ratio", "uniform", "ends")
    table = {name: torch.zeros(shape, dtype=torch.double) for name in names}
    for taken in by_length(range(len(rows)), lambda r: tokens[r], batch_size):
        texts = [
            usable[p].prompt_ids + usable[p].response_ids[:n] for p, n in (rows[r] for r in taken)
        ]
        keys = [row_key(seed, usable[p].prompt_ids, n) for p, n in (rows[r] for r in taken)]
        found = _group(target, drafter, texts, keys, sampling, draft_sampling, K)
        for name, values in found.items():
            table[name][taken] = values.double().cpu()
        on_tokens(len(taken) * K)
    room = torch.tensor([len(usable[p].response_ids) - n for p, n in rows])
    laid = {name: values.view(len(usable), starts, K) for name, values in table.items()}
    ends = laid.pop("ends") > 0
    rounds = [limits[id(trace)] - 1.0 for trace in usable]
    own = own_rounds(target, drafter, usable, sampling, draft_sampling, K, rng)
    return Rollouts(
        usable, **laid, ends=ends, room=room.view(len(usable), starts), rounds=rounds, own=own
    )


def own_rounds(
    target: Target,
    drafter: TrainedDrafter,
    traces: Sequence[Trace],
    sampling: Sampling,
    draft_sampling: Sampling,
    K: int,
    rng: np.random.Generator,
) -> OwnRounds:
    """The rounds of any policy along these traces.

    One starts at each token of a text of another sampling, which has no information on rejections.
    """
    width = max(len(trace.response_ids) for trace in traces)
    rows = {id(trace): row for row, trace in enumerate(traces)}
    signals = torch.full((3, len(traces), width, K), torch.nan)
    accept = torch.zeros(len(traces), width, K, dtype=torch.double)
    own = [t for t in traces if Sampling(t.temperature, t.top_k, t.top_p) == sampling]
    groups = ()
    if own:
        offline = OfflineEvaluator(target, own, sampling, Budget(K), engine_counters=False)
        groups = offline.along(drafter, draft_sampling, drafter.judges)
    for group in groups:
        at, size = torch.tensor([rows[id(t)] for t in group.traces]), group.accept.shape[1]
        accept[at, :size] = torch.from_numpy(group.accept)
        found = torch.stack([group.confidence, group.probability, group.score])
        signals[:, at, :size] = found.float().cpu()
    repeats = 1 if sampling.temperature == 0 else REPEATS
    uniform = torch.from_numpy(rng.random((len(traces), repeats, width + K)))
    lengths = torch.tensor([len(trace.response_ids) for trace in traces])
    return OwnRounds(accept, *signals, lengths=lengths, uniform=uniform)


def _places(length: int, count: int, shift: float) -> np.ndarray:
    """`count` indices in 1..length-1, in order and evenly spread, by systematic sampling.

    `shift`, in [0, 1), is the only random number.
    """
    wanted = (np.arange(count) + shift) / count * (length - 1)
    return 1 + np.minimum(wanted.astype(int), length - 2)


def _group(
    target: Target,
    drafter: TrainedDrafter,
    texts: list[list[int]],
    keys: list[int],
    sampling: Sampling,
    draft_sampling: Sampling,
    K: int,
) -> dict[str, torch.Tensor]:
    """Draft one rollout after each text; values are [B, K]."""
    device, longest = target.device, max(map(len, texts))
    ids = torch.zeros(len(texts), longest + 2 * K + 2, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    ids = ids.to(device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    random = KeyedRandom(torch.tensor(keys, device=device))
    layers, outputs = drafter.target_layers, TargetOutputs()
    if layers:
        outputs = target.outputs(ids[:, :longest], layers=layers, logits=False)
    drafter.begin(len(texts), ids.shape[1])
    rows = torch.arange(len(texts), device=device)
    prompt = TargetOutputs({layer: states[:, :-1] for layer, states in outputs.hidden.items()})
    drafter.prefill(rows, ids[:, : longest - 1], lengths - 1, prompt)
    recorder = Recorder(drafter.judges)
    state = DraftState(ids, lengths, longest, draft_sampling, random, outputs)
    tree = drafter.propose(state, Budget(K, recorder))
    found = _judged(target, ids, lengths, tree, sampling)
    scores = [one.score for one in recorder.seen[1:]] if recorder.uses_head else []
    unknown = torch.full_like(found["ratio"][:, 0], torch.nan)
    scores += [unknown] * (K - len(scores))  # type: ignore[list-item]
    coins = [keyed_uniform(random.keys, lengths + i, "accept") for i in range(K)]
    return found | {
        "confidence": torch.stack([one.confidence for one in recorder.seen], 1),
        "probability": torch.stack([one.probability for one in recorder.seen], 1),
        "score": torch.stack(scores, 1),  # type: ignore[arg-type]
        "uniform": torch.stack(coins, 1),
        "ends": torch.isin(tree.tokens, torch.tensor(target.eos_ids, device=device)),
    }


def _judged(
    target: Target, ids: torch.Tensor, lengths: torch.Tensor, tree: TokenTree, sampling: Sampling
) -> dict[str, torch.Tensor]:
    """Probability, [B, K], that the target accepts each drafted token."""
    K = tree.tokens.shape[1]
    at = lengths.unsqueeze(1) + torch.arange(K, device=ids.device)
    whole = ids.scatter(1, at, tree.tokens)[:, : int(lengths.max()) + K]
    logits = target.outputs(whole, project_later=True).logits
    assert logits is not None
    rows = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    p = warp(logits[rows, at - 1], sampling)
    drafted = tree.tokens.unsqueeze(-1)
    accept = p.gather(-1, drafted)[..., 0]
    if tree.probs is not None:  # else drafted for sure
        accept = accept / tree.probs.gather(-1, drafted)[..., 0]
    return {"ratio": accept.clamp(max=1.0)}


# --- numbers from counters ----------------------------------------------------------------------


def at_cost(counters: Iterable[PromptCounters], cost_ratio: float) -> list[PromptCounters]:
    """The same with time in place of rounds, in target forwards, where a drafted token costs
    `cost_ratio`: tokens per round are then tokens per time, the modelled speed-up, and everything
    in `eval.metrics` compares that."""
    return [
        dataclasses.replace(one, rounds=one.rounds + cost_ratio * (one.submitted + one.judging))
        for one in counters
    ]


def rates(counters: Sequence[PromptCounters]) -> Rates:
    """The rates of these rounds, together."""
    names = ("rounds", "emitted", "submitted", "accepted", "judging")
    total = {name: sum(getattr(one, name) for one in counters) for name in names}
    return {
        "discards_per_token": (total["submitted"] - total["accepted"]) / total["emitted"],
        "verification_rate": total["rounds"] / total["emitted"],
        "submitted_per_round": total["submitted"] / total["rounds"],
        "draft_steps_per_round": (total["submitted"] + total["judging"]) / total["rounds"],
        "tokens_per_round": total["emitted"] / total["rounds"],
    }


def speed(counters: Sequence[PromptCounters], cost_ratio: float) -> float:
    """Modelled speed-up at this cost of a drafted token."""
    found = rates(counters)
    return modelled_speedup(found["tokens_per_round"], found["draft_steps_per_round"], cost_ratio)
