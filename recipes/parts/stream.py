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
from data.sampling import Sampling
from data.target import Target
from data.traces import Trace
from drafters.bank import DrafterBank
from recipes.parts.online import (
    FOREIGN_SHARE,
    Clock,
    Served,
    Server,
    draft_laws,
    expected_rounds,
    marks,
    overlap_sum,
    target_laws,
)
from trainer.config import UserError

Sums = dict[str, float]  # of one interval, on one process


class Stream:
    """`config`: the recipe's own; `references`: drafters that only watch, by name. `laws`: of the
    last interval, the target's logits [response, V] by the number of the request."""

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
        self.log: RequestLog | None = None
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
        return self._weigh(network, [row for row, _ in rows], sums), sums

    def _read(self, log: RequestLog, count: int) -> list[LoggedRequest]:
        read, fault = list[LoggedRequest](), None
        if self.processes.is_main_process:
            try:
                read = log.read(count, self.config.log_wait_s)
            except UserError as error:
                fault = error
        read, fault, place = gather_object([(read, fault, log.state_dict())])[0]
        if fault is not None:
            raise fault
        log.load_state_dict(place)
        return read

    def _weigh(self, network: Any, rows: list[Served], sums: Sums) -> list[Served]:
        """Expected rejections of each response; what another model wrote is left out."""
        if not rows:
            return []
        laws = target_laws(self.target, rows)
        kept, kept_laws = [], []
        for row, p, q in zip(rows, laws, draft_laws(network, rows), strict=True):
            found = expected_rounds(row, p, q, self.config.K)
            if found.foreign > FOREIGN_SHARE:
                add(sums, foreign=1)
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
