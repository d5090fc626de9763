"""The sources of requests for online training: prompts that are served here, or a log.

Either way a request ends as a row of the buffer: its answer, the weight of each token in the loss,
and the target's logits there. Every drafter that is compared reads the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from data.request_log import LoggedRequest, RequestLog
from data.split import HeldOut
from data.trace_rows import lengths
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from recipes.common.online import (
    Clock,
    Served,
    Server,
    bank_of,
    draft_logits,
    expected_rounds,
    marks,
    overlap_sum,
    target_logits,
)
from target.model import Target
from target.sampling import Sampling
from trainer.errors import UserError
from trainer.interrupt import stop_requested

SYNC_S = 20.0  # the longest that the main process waits for a log while the others wait for it
Sums = dict[str, float]  # of one interval, on one process


class StreamConfig(Protocol):
    """The settings of a recipe that its stream reads; recipes/osd.py says what they mean."""

    K: int
    positions: str
    log: str | None
    log_wait_s: float


class Stream:
    """The requests of a run. `references`: drafters that are compared and not trained, by name.

    After each interval `target_logits` holds the target's logits [response, V] by number of the
    request, and `foreign` the lines of a log that the target did not write. `over`: whether the log
    has no more lines."""

    def __init__(
        self,
        config: StreamConfig,
        target: Target,
        traces: Sequence[Trace],
        references: Mapping[str, TrainedDrafter],
        max_new_tokens: int,
        context: int,
        held_out: HeldOut | None = None,
    ):
        self.config, self.target, self.traces = config, target, traces
        self.references, self.processes = references, PartialState()
        self.server = Server(target, config.K, max_new_tokens)
        self.target_logits: dict[int, torch.Tensor] = {}
        self.foreign: list[int] = []
        self.log: RequestLog | None = None
        self.over = self._end_printed = False
        if config.log is not None:
            self.log = RequestLog(config.log, target, context, held_out=held_out)

    def next(
        self, network: TrainedDrafter, version: int, index: int, size: int, seed: int
    ) -> tuple[list[Served], Sums]:
        """Answer, or read, the `size` requests of this process in batch `index`; fewer where a log
        is over. Returns them with the sums of their counters."""
        if self.log is None:
            return self._serve(network, version, index, size, seed)
        return self._follow(self.log, network, version, size)

    def _serve(
        self, network: TrainedDrafter, version: int, index: int, size: int, seed: int
    ) -> tuple[list[Served], Sums]:
        """Serve the prompts: request number n is prompt n of the stream, and several processes take
        turns."""
        first = (index * self.processes.num_processes + self.processes.process_index) * size
        rows = []
        for number in range(first, first + size):
            trace = self.traces[number % len(self.traces)]
            sampling = Sampling(trace.temperature, trace.top_k, trace.top_p)
            row = (number, trace.prompt_ids, [], sampling, trace.domain)
            rows.append(Served(*row, _member(network, trace.prompt_ids), version))
        watch = Clock()
        watch.start()
        answers = self.server.answer(network, rows, seed)
        sums = {"serve_s": watch.stop()}
        for row, answer in zip(rows, answers, strict=True):
            row.response_ids = answer.response_ids
            row.weights = marks(answer, self.config.positions)
            for one in answer.rounds:
                add(sums, accepted=one.accepted, rejected=one.rejected, rounds=1,
                    emitted=one.emitted)  # fmt: skip
        self._compare(network, rows, target_logits(self.target, rows), sums)
        return rows, sums

    def _follow(
        self, log: RequestLog, network: TrainedDrafter, version: int, size: int
    ) -> tuple[list[Served], Sums]:
        """Follow the log: its next requests, in turns too; the main process reads for all."""
        rank, first = self.processes.process_index, log.lines
        rows = []
        for offset, one in enumerate(self._read(log, size * self.processes.num_processes)):
            if offset // size == rank:
                row = (first + offset, one.prompt_ids, one.response_ids, one.sampling, one.domain)
                rows.append((Served(*row, _member(network, one.prompt_ids), version), one))
        sums: Sums = {}
        add(sums, retokenised=sum(one.retokenised for _, one in rows))
        return self._weigh(network, rows, sums), sums

    def _read(self, log: RequestLog, count: int) -> list[LoggedRequest]:
        """Read `count` requests, fewer where no more come within `log_wait_s`. Processes sync
        between short waits: none of them may wait for another too long. After a whole wait without
        a line the log is over: it is still read, but no more waited for."""
        found: list[LoggedRequest] = []
        waits = 0.0 if self.over else self.config.log_wait_s
        while True:
            read, fault = list[LoggedRequest](), None
            now = min(waits, SYNC_S)
            if self.processes.is_main_process:
                try:
                    read = log.read(count - len(found), now, stop_requested)
                except UserError as error:
                    fault = error
            mine = read, fault, log.state_dict(), stop_requested()
            read, fault, place, stopped = gather_object([mine])[0]
            if fault is not None:
                raise fault
            log.load_state_dict(place)
            found += read
            if len(found) == count or stopped:
                return found
            if read and not self.over:
                waits = self.config.log_wait_s
            waits -= now
            if waits <= 0:
                self.over = True
                return found

    def close_log(self, step: int, last: bool) -> None:
        """Check the log at its end or the end of the run, and print what became of it: however
        short it is, too much of another model is refused, and one without a line of use."""
        if self.log is None or not (self.over or last):
            return
        self.log.check(over=True)
        if self.processes.is_main_process and (last or not self._end_printed):
            over = f"method.log={self.log.path} is over at step {step + 1}"
            print(self.log.summary() if last else over)
            self._end_printed = True

    def _weigh(
        self, network: TrainedDrafter, read: list[tuple[Served, LoggedRequest]], sums: Sums
    ) -> list[Served]:
        """Weigh the tokens of each response by their expected rejections; leave out the responses
        that another model wrote."""
        self.foreign, rows = [], [row for row, _ in read]
        if not rows:
            return []
        logits = target_logits(self.target, rows)
        own, own_logits = [], []
        for (row, one), p, q in zip(read, logits, draft_logits(network, rows), strict=True):
            found = expected_rounds(row, p, q, self.config.K)
            if found.foreign:
                self.foreign.append(one.line)
                continue
            everything = self.config.positions == "all"
            row.weights = [1.0] * len(row.response_ids) if everything else found.weights
            add(sums, accepted=found.accepted, rejected=found.rejected, rounds=found.rounds,
                emitted=len(row.response_ids) - 1)  # fmt: skip
            own.append(row)
            own_logits.append(p)
        self._compare(network, own, own_logits, sums)
        return own

    def _compare(
        self, network: TrainedDrafter, rows: list[Served], logits: list[torch.Tensor], sums: Sums
    ) -> None:
        """Sum the overlap of every drafter with the target on the same answers, before any of them
        is trained on."""
        self.target_logits = {row.number: p for row, p in zip(rows, logits, strict=True)}
        add(sums, requests=len(rows), positions=sum(len(row.response_ids) for row in rows))
        if not rows:
            return
        for name, drafter in {"served": network, **self.references}.items():
            for row, p, q in zip(rows, logits, draft_logits(drafter, rows), strict=True):
                add(sums, **{name: overlap_sum(p, q, row.sampling)})


def _member(network: TrainedDrafter, prompt_ids: list[int]) -> int:
    """The number of the bank's drafter that answers this prompt, 0 without a bank."""
    bank = bank_of(network)
    return 0 if bank is None else bank.route(prompt_ids)


def add(sums: Sums, **values: float) -> None:
    """Add `values` to the sums of these names."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value)


def check_context(drafter: CausalLMDrafter, traces: Sequence[Trace], room: int) -> None:
    """Refuse prompts that do not fit into the drafter's positions with `room` more tokens."""
    context = drafter.context
    longest = int(lengths(traces, "prompt_ids").max(initial=0))
    if longest + room > context:
        raise UserError(
            f"ContextError: a prompt of {longest} tokens and {room} new ones do not fit into the "
            f"drafter's context of {context}: lower data.max_prompt_tokens or data.max_new_tokens"
        )
