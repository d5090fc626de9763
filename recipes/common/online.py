"""The parts of online training: serving an interval, marking rejections, replay, publication.

An interval is served with one set of weights; the tokens that the target corrected in it become a
batch. The state that outlives a step is made of numbers and lists, so that a checkpoint can hold
it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from data.batches import Batch, collate
from drafters.bank import DrafterBank
from drafters.base import TrainedDrafter, weights_hash
from drafters.text import Text
from eval.engine import Speculated, SpeculativeDecoder
from eval.policies.table import make_budget
from eval.walk import rejections
from target.cache import CachedModel
from target.decode import Request
from target.model import Target
from target.sampling import Sampling, row_key, surprise, warp
from trainer.errors import RunFault
from trainer.files import write_json

KEEP_PUBLISHED = 2
# limits beyond which a logged response is not the target's: share of tokens that it could not have
# drawn; nats a token beyond its entropy, which another precision than ours may cost, besides three
# standard errors
FOREIGN_SHARE, FOREIGN_NATS = 0.1, 0.5


@dataclass
class Served:
    """One answered request in the buffer. `weights` [response]: the weight in the loss of each
    token of the response; `member`: number of the bank's drafter that drafted, 0 without a bank;
    `version`: version of the weights that it drafted with."""

    number: int
    prompt_ids: list[int]
    response_ids: list[int]
    sampling: Sampling
    domain: str
    member: int
    version: int
    weights: list[float] = dataclasses.field(default_factory=list)

    def plain(self) -> dict[str, object]:
        """Return the fields as plain containers, for checkpoints and other processes."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Served:
        """Make a request again from what `plain` returned."""
        return cls(**{**stored, "sampling": Sampling(**stored["sampling"])})


@dataclass
class OnlineBatch(Batch):
    """A batch with its targets. target_logits [N, V] float and weights [N] float of the N
    supervised positions, row by row, left to right; members [B] int64: number of the bank's drafter
    that each row trains."""

    target_logits: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, 0))
    weights: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))
    members: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0).long())


def online_batch(
    rows: Sequence[Served], target_logits: Sequence[torch.Tensor], index: int
) -> OnlineBatch:
    """Collate the tokens of `rows` that have a weight. `target_logits`: [response, V] of each row.
    A token is trained at the logits before it: the mask is over tokens, `trainer.shift` owns the
    shift."""
    prompts, responses = [r.prompt_ids for r in rows], [r.response_ids for r in rows]
    whole = collate(prompts, responses, ["target"] * len(rows), index)
    mask, trained_weights, picked = torch.zeros_like(whole.loss_mask), [], []
    for i, row in enumerate(rows):
        weights = torch.tensor(row.weights)
        trained = weights > 0
        first = len(row.prompt_ids)
        mask[i, first : first + len(trained)] = trained
        trained_weights.append(weights[trained])
        picked.append(target_logits[i][trained.to(target_logits[i].device)])
    assert not bool((mask & ~whole.loss_mask).any()), "padding or a prompt would be trained"
    fields = {**vars(whole), "loss_mask": mask, "num_supervised": int(mask.sum())}
    members = torch.tensor([row.member for row in rows])
    return OnlineBatch(
        **fields, target_logits=torch.cat(picked), weights=torch.cat(trained_weights),
        members=members,
    )  # fmt: skip


def bank_of(drafter: TrainedDrafter) -> DrafterBank | None:
    """Return the drafter as a bank of several; None where it is a single one."""
    return drafter if isinstance(drafter, DrafterBank) else None


# --- serving -------------------------------------------------------------------------------------


class Server:
    """The speculative engine with weights that stay the same until an interval is over."""

    def __init__(self, target: Target, K: int, max_new_tokens: int):
        self.target, self.K, self.max_new_tokens = target, K, max_new_tokens
        self.cached = CachedModel(target.model)

    def answer(
        self, drafter: TrainedDrafter, asked: Sequence[Served], seed: int
    ) -> list[Speculated]:
        """Answer the requests side by side, in the order of `asked`. The draws depend on (seed,
        prompt, number) alone. RunFault if a weight of the drafter changes meanwhile."""
        groups: dict[Sampling, list[Served]] = defaultdict(list)
        for one in asked:
            groups[one.sampling].append(one)
        training = drafter.training
        drafter.eval()
        before = _stamp(drafter)
        answers: dict[int, Speculated] = {}
        for sampling, group in groups.items():
            decoder = SpeculativeDecoder(
                self.cached, drafter, sampling=sampling, budget=make_budget("fixed", self.K),
                eos_ids=self.target.eos_ids, max_new_tokens=self.max_new_tokens,
                batch_size=len(group), vocab_size=self.target.vocab_size,
            )  # fmt: skip
            requests = [
                Request(r.prompt_ids, row_key(seed, r.prompt_ids, r.number), sampling, r.number)
                for r in group
            ]
            for done in decoder.run(requests):
                answers[done.request.tag] = done
                if _stamp(drafter) != before:
                    raise RunFault(
                        "StateError: the drafter's weights changed while it served: what it drafted"
                        " and what was verified would belong to two distributions"
                    )
        drafter.train(training)
        return [answers[one.number] for one in asked]


def _stamp(drafter: torch.nn.Module) -> list[int]:
    """A version number per parameter, which changes with every write into it."""
    return [parameter._version for parameter in drafter.parameters()]


def marks(answer: Speculated, positions: str) -> list[float]:
    """Mark the tokens to train, [response]: 1 where a token is trained, else 0. "rejected": the
    tokens that corrected a draft; "all": every token; "published_code": the tokens that the
    authors' code trains, each behind the last one of a block, bonus tokens included."""
    size, start = len(answer.response_ids), len(answer.request.prompt_ids)
    if positions == "all":
        return [1.0] * size
    found = [0.0] * size
    for one in answer.rounds:
        at = one.ctx_len - start
        if positions == "published_code":
            at += one.emitted
        elif one.rejected:
            at += one.accepted
        else:
            continue
        if at < size:
            found[at] = 1.0
    return found


# --- both models on what was answered ------------------------------------------------------------


def _padded(rows: Sequence[Served], device: torch.device) -> torch.Tensor:
    texts = [row.prompt_ids + row.response_ids for row in rows]
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for i, text in enumerate(texts):
        ids[i, : len(text)] = torch.tensor(text)
    return ids.to(device)


def _span(row: Served) -> slice:
    """The logit indices that score the response of `row`."""
    first = len(row.prompt_ids) - 1
    return slice(first, first + len(row.response_ids))


@torch.no_grad()
def target_logits(target: Target, rows: Sequence[Served]) -> list[torch.Tensor]:
    """Run the target once: its logits [response, V] of each row."""
    ids = _padded(rows, target.device)
    states = target.outputs(ids, layers=("final_norm",), logits=False).hidden["final_norm"]
    return [target.head.teacher_logits(states[i, _span(row)]) for i, row in enumerate(rows)]


@torch.no_grad()
def draft_logits(drafter: TrainedDrafter, rows: Sequence[Served]) -> Iterator[torch.Tensor]:
    """Run the drafter once and yield its logits [response, V] of each row, one at a time; of a
    bank, those of the row's member."""
    found: dict[int, tuple[TrainedDrafter, torch.Tensor]] = {}
    bank = bank_of(drafter)
    training = drafter.training
    drafter.eval()
    for member in [0] if bank is None else sorted({row.member for row in rows}):
        own = [i for i, row in enumerate(rows) if bank is None or row.member == member]
        network = drafter if bank is None else bank.members[member]
        group = [rows[i] for i in own]
        states = next(network.states(Text(_padded(group, _device(network))), None, 1))
        for place, i in enumerate(own):
            found[i] = network, states[place, _span(rows[i])]
    drafter.train(training)
    for i in range(len(rows)):
        network, states = found.pop(i)
        yield network.project(states, 1)


def _device(network: torch.nn.Module) -> torch.device:
    return next(network.parameters()).device


@torch.no_grad()
def overlap_sum(p: torch.Tensor, q: torch.Tensor, sampling: Sampling) -> float:
    """Sum sum_v min(p, q) over n positions, p and q logits [n, V] under `sampling`; at T=0 count
    the equal choices."""
    return float(torch.minimum(warp(p, sampling), warp(q, sampling)).sum())


@dataclass
class Expected:
    """The expected decoding of one logged response. `weights` [response]: the probability that
    decoding it with this drafter would have rejected a draft at the token; `accepted`, `rejected`,
    `rounds`: expected counts; `foreign`: whether another model wrote the response."""

    weights: list[float]
    accepted: float
    rejected: float
    rounds: float
    foreign: bool


@torch.no_grad()
def expected_rounds(row: Served, p: torch.Tensor, q: torch.Tensor, K: int) -> Expected:
    """Expect the rounds of decoding `row`, with target logits p and draft logits q [response, V].
    Given the text, a draft is accepted with probability min(1, q/p), whatever server wrote it:
    exact for any lossless one."""
    ids = torch.tensor(row.response_ids, device=p.device).unsqueeze(-1)
    p_all = warp(p, row.sampling)
    p_drawn = p_all.gather(-1, ids)[:, 0].double()
    q_drawn = warp(q, row.sampling).gather(-1, ids)[:, 0].double()
    accept = q_drawn if row.sampling.temperature == 0 else (q_drawn / p_drawn).clamp(max=1.0)
    tested, rejected, rounds = rejections(
        accept.nan_to_num(0.0).cpu().numpy(), len(row.response_ids), K
    )
    counts = float(tested.sum() - rejected.sum()), float(rejected.sum())
    return Expected(rejected.tolist(), *counts, rounds, _is_foreign(p_all, p_drawn, ids[:, 0]))


def _is_foreign(p: torch.Tensor, p_drawn: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether the target cannot have written these ids [n], drawn with probability p_drawn [n] from
    p [n, V]."""
    possible = p_drawn > 0
    if float((~possible).double().mean()) > FOREIGN_SHARE:
        return True
    beyond, variance = (float(one.sum()) for one in surprise(p[possible], ids[possible]))
    return beyond > FOREIGN_NATS * len(p) + 3 * variance**0.5


# --- what outlives a step ------------------------------------------------------------------------


class Replay:
    """A uniform sample of all requests that were ever in the buffer, `size` rows for each member
    (reservoir sampling, Vitter 1985), a function of the seed and the numbers of the requests."""

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed
        self.rows: list[Served] = []
        self.seen: dict[int, int] = {}

    def add(self, row: Served) -> None:
        """Let `row` into the sample by chance, if any of its tokens is trained."""
        if not self.size or not any(row.weights):
            return
        count = self.seen[row.member] = self.seen.get(row.member, 0) + 1
        own = [i for i, other in enumerate(self.rows) if other.member == row.member]
        if count <= self.size:
            self.rows.append(row)
            return
        place = int(np.random.default_rng([self.seed, row.number, 1]).integers(count))
        if place < self.size:
            self.rows[own[place]] = row

    def draw(self, count: float, index: int, rank: int) -> list[Served]:
        """Draw at most `count` different rows on average, keyed by batch and rank."""
        rng = np.random.default_rng([self.seed, index, rank, 2])
        chosen = rng.permutation(len(self.rows))[: int(count + rng.random())]
        return [self.rows[i] for i in chosen.tolist()]

    def state_dict(self) -> dict[str, object]:
        """Return the sample as plain containers."""
        return {"rows": [row.plain() for row in self.rows], "seen": dict(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        """Restore what `state_dict` returned; RunFault if a row is newer than `version`."""
        self.rows = [Served.of(row) for row in state["rows"]]
        self.seen = dict(state["seen"])
        newer = [row.number for row in self.rows if row.version > version]
        if newer:
            raise RunFault(
                f"StateError: the buffer holds request {newer[0]}, drafted by weights newer than "
                f"the checkpoint's version {version}: resume from another checkpoint"
            )


class Tally:
    """Sums over the requests since the last evaluation."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def ratio(self, above: str, below: str) -> float | None:
        """Divide one sum by another; None where that is 0."""
        bottom = self.sums.get(below, 0.0)
        return self.sums.get(above, 0.0) / bottom if bottom else None


def publish(drafter: TrainedDrafter, folder: Path, version: int, requests: int) -> Path:
    """Write the drafter for a server to load, whole or not at all, and return its folder. The file
    `latest.json` names the newest version; older ones are removed. RunFault where weights are not
    finite or the disk is full. The folder that `latest.json` names is never written again: a server
    may be loading it."""
    latest, weights = folder / "latest.json", weights_hash(drafter)
    named = _named(latest)
    place = folder / f"version-{version:06d}"
    if named.get("folder") == place.name and place.is_dir():
        if named.get("weights") == weights:
            return place
        place = folder / f"version-{version:06d}-{weights}"
    if not all(bool(torch.isfinite(p).all()) for p in drafter.parameters()):
        raise RunFault(
            f"version {version} of the drafter holds weights that are not finite: it is not "
            "published, the version before it stays; lower trainer.lr"
        )
    partial = place.with_name(f".tmp-{place.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        drafter.save_pretrained(partial)
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
        about = {"version": version, "requests": requests, "folder": place.name, "weights": weights}
        write_json(latest, about)
    except (OSError, RuntimeError, SafetensorError) as error:  # safetensors wraps a full disk
        raise RunFault(
            f"version {version} of the drafter cannot be published in {folder} ({error}): make "
            "room and rerun the same command"
        ) from error
    found = sorted(folder.glob("version-*"))
    stay = found[: found.index(place) + 1][-KEEP_PUBLISHED:]
    for other in set(found) - set(stay):  # older ones, and newer ones of a run that was killed
        shutil.rmtree(other, ignore_errors=True)
    return place


def _named(latest: Path) -> dict[str, object]:
    """Read `latest.json`; {} where it is missing or damaged."""
    try:
        return dict(json.loads(latest.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


class Clock:
    """A stopwatch."""

    def __init__(self) -> None:
        self.began: float | None = None

    def start(self) -> None:
        self.began = time.perf_counter()

    def stop(self) -> float:
        """Return the seconds since `start`; 0 where the clock does not run."""
        spent = 0.0 if self.began is None else time.perf_counter() - self.began
        self.began = None
        return spent
