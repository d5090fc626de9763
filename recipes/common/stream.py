"""Where the requests of online training come from: prompts that are served here, or a log.

Either way a request ends as a row of the buffer: its answer, how much each token of it is trained,
and what the target says there. Every drafter that is compared reads the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from data.request_log import LoggedRequest, RequestLog
from data.traces import Trace
from drafters.bank import DrafterBank
from recipes.common.online import (
    Clock,
    Served,
    Server,
    draft_laws,
    expected_rounds,
    marks,
    overlap_sum,
    target_laws,
)
from target.model import Target
from target.sampling import Sampling
from trainer.config import UserError
from trainer.interrupt import stop_requested

MEETING_S = 20.0  # the longest that the main process waits for a log while the others wait for it
Sums = dict[str, float]  # of one interval, on one process


class Stream:
    """`config`: the recipe's own; `references`: drafters that only watch, by name. Of the last
    interval `laws`, the target's logits [response, V] by the number of the request, and `foreign`,
    the lines of a log that the target did not write. `over`: a log has no more lines now."""

    def __init__(
        self,
        config: Any,
        target: Target,
        traces: Sequence[Trace],
        references: dict[str, Any],
        max_new_tokens: int,
        context: int,
    ):
        self.config, self.target, self.traces = config, target, list(traces)
        self.references, self.processes = references, PartialState()
        self.server = Server(target, config.K, max_new_tokens)
        self.laws: dict[int, torch.Tensor] = {}
        self.foreign: list[int] = []
        self.log: RequestLog | None = None
        self.over = self._told = False
        if config.log is not None:
            self.log = RequestLog(config.log, target, context)

    def next(
        self, network: Any, version: int, index: int, size: int, seed: int
    ) -> tuple[list[Served], Sums]:
        """Of batch `index`, `size` requests of this process; fewer where a log is over."""
        if self.log is None:
            return self._serve(network, version, index, size, seed)
        return self._follow(self.log, network, version, size)

    def _serve(
        self, network: Any, version: int, index: int, size: int, seed: int
    ) -> tuple[list[Served], Sums]:
        """Request number n is prompt n of the stream; several processes take turns."""
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
        self._compare(network, rows, target_laws(self.target, rows), sums)
        return rows, sums

    def _follow(
        self, log: RequestLog, network: Any, version: int, size: int
    ) -> tuple[list[Served], Sums]:
        """The next logged requests, in turns too; the main process reads for all."""
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
        """Processes meet between short waits: none of them may wait for another too long. Once a
        whole wait was in vain the log is over: it is still read, but no more waited for."""
        found: list[LoggedRequest] = []
        waits = 0.0 if self.over else self.config.log_wait_s
        while True:
            read, fault = list[LoggedRequest](), None
            now = min(waits, MEETING_S)
            if self.processes.is_main_process:
                try:
                    read = log.read(count - len(found), now, stop_requested)
                except UserError as error:
                    fault = error
            told = read, fault, log.state_dict(), stop_requested()
            read, fault, place, stopped = gather_object([told])[0]
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
        """Of a log that is over, or of the run: however short, too much of it is too much."""
        if self.log is None or not (self.over or last):
            return
        self.log.check()
        if self.processes.is_main_process and (last or not self._told):
            over = f"method.log={self.log.path} is over at step {step + 1}"
            print(self.log.summary() if last else over)
            self._told = True

    def _weigh(
        self, network: Any, read: list[tuple[Served, LoggedRequest]], sums: Sums
    ) -> list[Served]:
        """Expected rejections of each response; what another model wrote is left out."""
        self.foreign, rows = [], [row for row, _ in read]
        if not rows:
            return []
        laws = target_laws(self.target, rows)
        kept, kept_laws = [], []
        for (row, one), p, q in zip(read, laws, draft_laws(network, rows), strict=True):
            found = expected_rounds(row, p, q, self.config.K)
            if found.foreign:
                self.foreign.append(one.line)
                continue
            everything = self.config.positions == "all"
            row.weights = [1.0] * len(row.response_ids) if everything else found.weights
            add(sums, accepted=found.accepted, rejected=found.rejected, rounds=found.rounds,
                emitted=len(row.response_ids) - 1)  # fmt: skip
            kept.append(row)
            kept_laws.append(p)
        self._compare(network, kept, kept_laws, sums)
        return kept

    def _compare(
        self, network: Any, rows: list[Served], laws: list[torch.Tensor], sums: Sums
    ) -> None:
        """The overlap of every drafter with the target on the same answers, before any of them is
        trained on."""
        self.laws = {row.number: law for row, law in zip(rows, laws, strict=True)}
        add(sums, requests=len(rows), positions=sum(len(row.response_ids) for row in rows))
        if not rows:
            return
        for name, drafter in {"served": network, **self.references}.items():
            for row, p, q in zip(rows, laws, draft_laws(drafter, rows), strict=True):
                add(sums, **{name: overlap_sum(p, q, row.sampling)})


def _member(network: Any, prompt_ids: list[int]) -> int:
    return network.route(prompt_ids) if isinstance(network, DrafterBank) else 0


def add(sums: Sums, **values: float) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value)
