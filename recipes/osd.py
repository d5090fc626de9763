"""OSD: a drafter that learns while it serves, from the tokens that the target corrected.

Liu et al. 2023 (ICML 2024), arXiv:2310.07177. Requests are answered by exact speculative decoding;
wherever a draft is rejected, the target's distribution there is a label that costs nothing. After
every interval of `trainer.batch_size` requests (times accumulation and processes) one step is taken
on D(p || q) there, and the new weights serve the next interval. The loss takes raw logits of both,
at temperature 1: as the served temperature falls, p tends to one-hot and the signal with it.

Departures from the published code, which trains the position *after* each correction and every
bonus token (`method.positions=published_code` does that): only rejected positions, at the logits
that drafted them. One forward of the finished answers computes the target's distribution again.

The stream is the training prompts in their order, from the start again when it is over; or
`method.log`, a growing file of requests that another server answers. Its rounds are not known, but
the probability that decoding the same text would have rejected a draft is (eval.offline). It weighs
the position, so that the expected loss is that of serving the text. The prompts are then only the
text of the offline reference and of the evaluation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn

from data.batches import Batch
from data.request_log import FOREIGN, RequestLog
from data.trace_rows import chosen, column
from data.traces import Trace
from drafters.bank import DrafterBank, NaiveBayes
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from recipes import base, distillspec
from recipes.base import Context, Evaluate, Needs, Objective, Stage, Start, check_kind, unwrapped
from recipes.common.divergence import DivergenceConfig
from recipes.common.online import (
    Clock,
    OnlineBatch,
    Replay,
    Served,
    Tally,
    bank_of,
    online_batch,
    publish,
    target_logits,
)
from recipes.common.stream import Stream, check_context
from target.model import Target
from target.outputs import TargetOutputs
from trainer import fsdp2
from trainer.checks import require_read
from trainer.chunked import chunked_divergence
from trainer.errors import UserError, require
from trainer.keys import key
from trainer.losses import LossOutput, Term
from trainer.objective import State
from trainer.shift import supervised

REPLAY_SIZE = 256  # earlier requests that each drafter remembers
POSITIONS = ("rejected", "published_code", "all")


@dataclass
class Config(DivergenceConfig):
    HERE: ClassVar[tuple[str, ...]] = ("log",)
    NEEDED: ClassVar[tuple[str, ...]] = HERE
    K: int = key(5, ge=1)  # tokens drafted per round while serving
    # which tokens of a served answer are trained: those that corrected a draft, those that the
    # published code trains, or all
    positions: str = key("rejected", one_of=POSITIONS)
    # mean over tokens, or over the means of the requests
    reduction: str = key("token", one_of=("token", "sequence"))
    # share of an update's rows that come from earlier requests
    replay_share: float = key(0.0, ge=0, lt=1)
    bank: bool = False  # one drafter for each domain, chosen by the tokens of the prompt
    log: str | None = None  # file of requests to follow instead of serving the prompts
    # seconds to wait for new lines before the log counts as complete
    log_wait_s: float = key(0.0, ge=0)
    # updates between versions that are written for a server; 0: none
    publish_every: int = key(0, ge=0)
    offline: bool = True  # also distil offline, from as many requests, as a row to compare with
    offline_lr: float | None = key(None, gt=0)  # learning rate of stage offline; null: trainer.lr
    draft_layers: int = key(1, ge=1)  # layers of a fresh drafter, where model.drafter is null
    # width of a fresh drafter; null: half the target's
    draft_hidden_size: int | None = key(None, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_read(self, "log_wait_s", self.log is not None, "method.log")
        plain = self.log is None or not self.log.endswith(".gz")
        require(plain, "method.log", "be a file that is not compressed: unpack it", self.log)
        if self.log is not None and self.positions == "published_code":
            raise UserError(
                "method.positions=published_code needs the rounds of serving, which a log does not "
                "hold: leave method.log out, or set rejected or all"
            )

    def offline_distillation(self) -> distillspec.Config:
        return distillspec.Config(divergence=self.divergence, reduction=self.reduction)


class Recipe(base.Recipe):
    needs_layers = "it serves the requests that it trains on"

    def __init__(self, config: Config, target: Target, given: TrainedDrafter | None = None):
        self.config, self.target = config, target
        if given is not None:
            check_kind(given, CausalLMDrafter, "osd")
        processes = PartialState().num_processes
        if config.bank and processes > 1:
            raise UserError(
                f"method.bank=true trains in one process, got {processes}: the "
                "drafters that an interval trains differ from process to process; start one, or "
                "set method.bank=false"
            )
        if config.publish_every and fsdp2.used():
            raise UserError(
                "method.publish_every writes whole weights in one process, FSDP2 shares them out: "
                "launch with scripts/accelerate/ddp.yaml or zero2.yaml, or set it to 0"
            )
        if config.log is not None:
            # a bad log is refused before anything is generated
            look = RequestLog(config.log, target, target.context)
            found = look.read(100)
            nothing = not found and not config.log_wait_s
            look.check(over=nothing)
            if nothing:
                raise UserError(
                    f"method.log={config.log} holds no request yet: name a log with whole lines, "
                    "or set method.log_wait_s to the seconds to wait for them"
                )
        # an engine loads each member, but does not choose among them
        publishes = "method.publish_every writes the weights that a server loads while they train"
        self.no_lora = publishes if config.publish_every else None
        self.unserved = "it serves one drafter, not a bank" if config.bank else None
        self._online = OnlineObjective(config, target)
        self._offline = distillspec.Distillation(config.offline_distillation(), target)

    def stages(self) -> list[Stage]:
        text = Needs({"target": 1.0})
        online = Stage("online", self._online, text, start="base", row="after", prepare=self._begin)
        if not self.config.offline:
            return [online]
        # cosine as published, the rest as the stream has it; as many rows as it has requests
        schedule: dict[str, object] = {"lr_schedule": "cosine"}
        if self.config.offline_lr is not None:
            schedule["lr"] = self.config.offline_lr
        offline = Stage("offline", self._offline, text, schedule, start="base", row="offline")
        return [offline, online]

    def build(self, traces: Sequence[Trace]) -> CausalLMDrafter:
        config = self.config
        width = config.draft_hidden_size or self.target.hidden_size // 2
        return CausalLMDrafter.from_target(
            self.target, num_layers=config.draft_layers, hidden_size=width
        )

    def _begin(self, start: Start) -> TrainedDrafter:
        """Make what serves: the drafter, or a copy of it for each domain of the stream."""
        self._online.begin(start)
        if not self.config.bank:
            return start.drafter
        traces = self._online.stream.traces
        # the prompts of the whole stream, as a labelled set that is known before it begins
        prompts, domains = (t.prompt_ids for t in traces), column(traces, "domain")
        router = NaiveBayes.fit(prompts, domains, self.target.vocab_size)
        bank = DrafterBank.copies_of(check_kind(start.drafter, CausalLMDrafter, "osd"), router)
        self._online.num_members = len(bank.members)
        return bank


class OnlineObjective(Objective):
    """The divergence at the positions that serving, or reading a log, marks. `num_members`: number
    of drafters in the bank, 1 without a bank."""

    computes_batches = True
    num_members = 1

    def __init__(self, config: Config, target: Target):
        self.config, self.target = config, target
        self.divergence = config.parsed_divergence
        self.processes = PartialState()

    def begin(self, start: Start) -> None:
        """Open the stream, in the order of the prompts, and take the drafters to compare with."""
        places = [column(start.traces, name) for name in ("turn", "sample_index", "index")]
        traces = chosen(start.traces, np.lexsort(places))
        names = {"before": "static", "offline": "offline"}
        self.references = {names[row]: d for row, d in start.drafters.items() if row in names}
        self.max_steps = start.max_steps
        self.version = self.requests = 0  # numbers of updates and of requests so far
        self.folder = Path()  # folder of the run
        self.step, self.updated = -1, False  # the present step, and whether it has an update
        self.last: list[Served] = []  # this process's rows of the interval
        self.tally, self.clock = Tally(), Clock()
        self.replay = Replay(REPLAY_SIZE if self.config.replay_share else 0, 0)
        drafter = check_kind(start.drafters["before"], CausalLMDrafter, "osd")
        room = start.max_new_tokens + self.config.K
        check_context(drafter, traces, room)
        self.stream = Stream(
            self.config, self.target, traces, self.references, start.max_new_tokens,
            min(self.target.context, drafter.context), start.held_out,
        )  # fmt: skip

    @property
    def served_version(self) -> int:
        """The version of the weights after the present step."""
        return self.version + self.updated

    # --- the stream ------------------------------------------------------------------------------

    def refresh(self, step: int, context: Context) -> Batch | None:
        """Answer, or read, the requests of this batch with the present weights, and return the
        tokens to train on. None where nothing was rejected: then no step is taken at all."""
        network = context.drafter
        self.tally.add({"update_s": self.clock.stop()})
        index = context.batch.index
        size = len(context.batch.prompts)
        if step != self.step:  # what the step before trained serves from here on
            self.version, self.updated, self.step = self.served_version, False, step
            if step and step % (self.config.publish_every or step + 1) == 0:
                self._publish(network, context.folder)
        self.folder = context.folder
        rows, sums = self.stream.next(network, self.version, index, size, context.seed)
        self.replay.seed = context.seed
        self.last, log = rows, self.stream.log
        batch = self._collect(rows, index) if any(any(row.weights) for row in rows) else None
        self.target.sync()
        gathered = gather_object([([row.plain() for row in rows], sums, self.stream.foreign)])
        for plain, of_rank, foreign in gathered:  # every process holds the same buffer and counts
            self.tally.add(of_rank)
            self.requests += len(plain)
            for row in map(Served.of, plain):
                self.replay.add(row)
                self.updated = self.updated or any(row.weights)
            for line in foreign:
                assert log is not None
                log.skip(FOREIGN, "not written by this target under its sampling", line)
        self.stream.close_log(step, last=step == self.max_steps - 1)
        self.clock.start()
        return batch

    def _collect(self, rows: list[Served], index: int) -> OnlineBatch:
        """Collate the fresh rows and, to the share `replay_share`, rows of earlier intervals."""
        share = self.config.replay_share
        fresh = [row for row in rows if any(row.weights)]
        wanted = len(fresh) * share / (1 - share)  # on average, where it is no whole number
        old = self.replay.draw(wanted, index, self.processes.process_index)
        logits = [self.stream.target_logits[row.number] for row in fresh]
        logits += target_logits(self.target, old) if old else []
        return online_batch([*fresh, *old], logits, index)

    def _publish(self, network: TrainedDrafter, folder: Path) -> None:
        if self.processes.is_main_process:
            place = folder / "published"
            place.mkdir(parents=True, exist_ok=True)
            publish(network, place, self.served_version, self.requests)

    # --- what is said about it -------------------------------------------------------------------

    def evaluated(
        self, evaluate: Evaluate | None, dev: Sequence[Trace] = (), share: base.Share = base.alone
    ) -> Evaluate:
        """Return an evaluation that adds the acceptance on the requests since the last one,
        measured before they were trained on, to that on held-out text. No checkpoint is chosen: the
        weights that serve last are the result."""

        def with_served(drafter: nn.Module, step: int) -> dict[str, object]:
            self.tally.add({"update_s": self.clock.stop()})
            if step == self.max_steps and self.config.publish_every:
                self._publish(unwrapped(drafter), self.folder)
            found = evaluate(drafter, step) if evaluate else {}
            by_domain = found.pop("alpha_by_domain", {})
            found |= {f"alpha[{name}]": value for name, value in by_domain.items()}
            return found | self._series() | {"select": None}

        return with_served

    def _series(self) -> dict[str, object]:
        """The numbers of the requests since the last evaluation, whose sums start again from 0."""
        tally, self.tally = self.tally, Tally()
        row: dict[str, object] = {"request": self.requests, "version": self.served_version}
        if self.stream.log is not None:
            row["log_lines_skipped"] = self.stream.log.num_bad
            row["retokenised_share"] = tally.ratio("retokenised", "requests")
        known = {
            "alpha_prequential": tally.ratio("served", "positions"),
            **{f"alpha_{n}": tally.ratio(n, "positions") for n in self.references},
            "alpha_hat_prequential": _share(tally.sums, "accepted", "rejected"),
            "tokens_per_round_prequential": tally.ratio("emitted", "rounds"),
            "serve_s_per_request": tally.ratio("serve_s", "requests"),
            "update_s_per_request": tally.ratio("update_s", "requests"),
        }
        return row | {name: value for name, value in known.items() if value is not None}

    def state_dict(self) -> State:
        """Return version, place in the stream, the replay buffer, and sums not yet reported."""
        log = self.stream.log
        return {
            "version": self.served_version, "requests": self.requests,
            "sums": dict(self.tally.sums),
            "replay": self.replay.state_dict(),
            "log": None if log is None else log.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: State) -> None:
        stored: dict[str, Any] = state
        self.version, self.requests = stored["version"], stored["requests"]
        self.tally.sums = dict(stored["sums"])
        self.replay.load_state_dict(stored["replay"], self.version)
        if self.stream.log is not None:
            self.stream.log.load_state_dict(stored["log"])

    # --- loss ------------------------------------------------------------------------------------

    def _weights(self, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        """Weigh the N supervised positions. For each drafter of the bank: which positions are its
        own [N] bool, the weights of all positions [N] float, the denominator."""
        rows = supervised(batch.loss_mask).nonzero(as_tuple=True)[0]
        weights = torch.ones(len(rows), device=rows.device)
        members = torch.zeros(len(batch.input_ids), dtype=torch.long, device=rows.device)
        if isinstance(batch, OnlineBatch) and len(rows):
            weights, members = batch.weights, batch.members
        sequences = self.config.reduction == "sequence"
        if sequences:
            total = weights.new_zeros(len(batch.input_ids)).index_add(0, rows, weights)
            weights = weights / total[rows]
        found = []
        for member in range(self.num_members):
            own = members[rows] == member
            count = rows[own].unique().numel() if sequences else float(weights[own].double().sum())
            found.append((own, weights, float(count)))
        return found

    def denominators(self, batch: Batch, step: int) -> dict[str, float]:
        return {f"member_{i}": one[2] for i, one in enumerate(self._weights(batch))}

    def loss(
        self, drafter: nn.Module, batch: Batch, target_outputs: TargetOutputs | None, step: int,
        denominators: Mapping[str, float] | None = None,
    ) -> LossOutput:  # fmt: skip
        """Return for each drafter of the bank the weighted sum of D(p || q) over its trained
        positions. The target's logits come with the batch."""
        rows, index = supervised(batch.loss_mask).nonzero(as_tuple=True)
        network = unwrapped(drafter)
        if (bank := bank_of(network)) is not None:
            assert isinstance(batch, OnlineBatch)
            bank.chosen = batch.members

        def score(unrolled: Iterator[torch.Tensor]) -> LossOutput:
            states, labels = next(unrolled)[rows, index], batch.input_ids[rows, index + 1]
            return self._score(network, states, labels, batch)

        return drafter(batch.text(), None, 1, score)

    def _score(
        self, network: TrainedDrafter, states: torch.Tensor, labels: torch.Tensor, batch: Batch
    ) -> LossOutput:
        """Compute the loss from the drafter's states [N, d] float and the labels [N] int64."""
        terms = dict[str, Term]()
        overlap = torch.zeros((), device=states.device)
        bank = bank_of(network)

        def teacher(places: torch.Tensor, span: slice) -> torch.Tensor:
            """The target's logits [n, V] at some of the N positions."""
            assert isinstance(batch, OnlineBatch)
            return batch.target_logits[places[span]]

        for member, (own, weights, count) in enumerate(self._weights(batch)):
            if bank is not None and not bool(own.any()):
                # no gradient at all: a zero one would still move it
                terms[f"member_{member}"] = Term(states.new_zeros(()), 0.0)
                continue
            head = (network if bank is None else bank.members[member]).output_head(1)
            places = own.nonzero(as_tuple=True)[0]
            logits = functools.partial(teacher, places)
            value = chunked_divergence(
                self.divergence, states[own], head, logits, labels[own], weights[own]
            )
            overlap = overlap + value.overlap.sum()
            terms[f"member_{member}"] = Term(value.total, count)
        return LossOutput(terms, {"overlap": (overlap, float(len(labels)))})


def _share(sums: dict[str, float], part: str, rest: str) -> float | None:
    """The share of sum `part` in `part` and `rest` together; None where both are 0."""
    whole = sums.get(part, 0.0) + sums.get(rest, 0.0)
    return sums.get(part, 0.0) / whole if whole else None
