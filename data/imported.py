"""Traces that another program generated: the rows of a request log as a trace store.

The store is checked against the target before a row is written: a drafter that is trained on the
text of another model, or of the same model with another tokenizer or penalties, learns the wrong
distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data.prompts import Prompt, Rendered, shown_hash
from data.request_log import FOREIGN, LoggedRequest, RequestLog
from data.tables import shorten
from data.trace_identity import ImportedIdentity
from data.trace_rows import Traces, chosen, column
from data.traces import Trace, TraceStore
from engines.distribution_check import Evidence, judged, measured
from target.decode import Continuation, Request
from target.model import Target
from target.sampling import Sampling
from trainer.checks import require_folder
from trainer.errors import UserError
from trainer.files import fingerprint

KEY = "script.log"
SAMPLE = 16  # greedy rows, and as many drawn ones, that the target reads again
LEAST_GREEDY = 0.99  # share of the greedy tokens that must be the target's own


def import_log(target: Target, path: Path, folder: Path, domains: Sequence[str]) -> Traces:
    """Write the rows of the log `path` that have one of `domains` (all where there are none) to the
    store `folder`, and return them.

    One row is in memory at a time, so the rows are written before they are all known, and the store
    is complete once they are checked. Raises UserError where the rows are not of this target or too
    many of them cannot be used, which removes them again, or where `folder` holds another store.
    """
    log = RequestLog(path, target, target.context, KEY)
    identity = ImportedIdentity(
        path.name, fingerprint(path)["sha256"], sorted(domains), target.fingerprint
    )
    store = TraceStore.open(folder, identity)
    if store.is_complete(()):
        print(f"{folder} holds these rows already")
        return store.load()
    with store.exclusive():
        try:
            with store.writer() as writer:
                for trace in traces_of(log, domains):
                    writer.add(trace)
            store.finish(lambda traces: check_text(target, traces))
        except UserError:
            store.remove()
            raise
    return store.load()


def traces_of(log: RequestLog, domains: Sequence[str]) -> Iterator[Trace]:
    """Yield the traces of the rows of `log`. Of greedy answers to one prompt the first is taken.
    Raises UserError where there is no row, or the ends of too many answers contradict their
    finish_reason.
    """
    target, known, num_traces, retokenised = log.target, set[str](), 0, 0
    draws: Counter[tuple[object, ...]] = Counter()
    for row in log.read_all():
        known.add(row.domain)
        retokenised += row.retokenised
        if domains and row.domain not in domains:
            continue
        try:
            reason = finish_reason(row, target.eos_ids)
        except ValueError as error:
            log.skip(FOREIGN, str(error), row.line)
            continue
        sampling, identity = row.sampling, shown_hash(Rendered(row.prompt_ids))
        draw = (identity, sampling, row.seed)
        draws[draw] += 1
        if sampling.temperature == 0 and draws[draw] > 1:
            continue
        num_traces += 1
        yield Trace(
            prompt_ids=row.prompt_ids, response_ids=row.response_ids, source="target",
            domain=row.domain, conversation_id=identity, turn=0,
            sample_index=draws[draw] - 1, temperature=sampling.temperature,
            top_k=sampling.top_k, top_p=sampling.top_p, seed=row.seed, finish_reason=reason,
            model_hash=target.fingerprint["weights"],
            tokenizer_hash=target.fingerprint["tokenizer"],
            prompt_hash=identity, index=row.line - 1,
        )  # fmt: skip
    if unknown := [name for name in domains if name not in known]:
        raise UserError(
            f"{KEY}={log.path} has no row of the domain {unknown[0]!r}; it has "
            f"{', '.join(sorted(known))}"
        )
    log.check()
    if log.num_bad:
        print(log.summary())
    if repeated := sum(draws.values()) - num_traces:
        print(f"{repeated} greedy answers to a prompt that has one already were left out")
    if retokenised:
        print(f"{retokenised} rows hold text, tokenised here: the server's tokens may differ")
    if not num_traces:
        raise UserError(f"{KEY}={log.path} holds no row that can be used")


def finish_reason(row: LoggedRequest, eos_ids: Sequence[int]) -> str:
    """Why the answer ended: eos, length or stop. ValueError where the log says something else than
    the last token: the target has another set of EOS ids."""
    ended, said = row.response_ids[-1] in eos_ids, row.finish_reason
    if ended and said == "length":
        raise ValueError("finish_reason is length, but the last token is an EOS")
    if not ended and said == "eos":
        raise ValueError(f"finish_reason is eos, but the last token is {row.response_ids[-1]}")
    return "eos" if ended else "stop" if said == "stop" else "length"


def check_text(target: Target, traces: Sequence[Trace]) -> None:
    """Read some of the traces again and print how likely the target finds them. Raises UserError
    where they are not its own text: the greedy tokens must be its likeliest ones, near-ties apart,
    and drawn ones as likely as its entropy says (engines.distribution_check)."""
    first = traces[0]
    decode = target.tokenizer.decode
    print(f"first prompt: {shorten(str(decode(first.prompt_ids)), 200)!r}")
    print(f"its answer: {shorten(str(decode(first.response_ids)), 200)!r}")
    evidence = reread(target, traces)
    said = judged(evidence)
    for greedy in (True, False):
        found = [row for row in evidence if row.greedy == greedy]
        if not found:
            continue
        count = sum(row.num_tokens for row in found)
        mean = sum(row.total for row in found) / count
        what = f"drawn tokens cost {mean:.3f} nats beyond the target's entropy"
        if greedy:
            what = f"greedy tokens are the target's own: {1 - mean:.2%}"
            if not 1 - mean >= LEAST_GREEDY:
                said = f"{1 - mean:.2%} of the greedy tokens are its own, not {LEAST_GREEDY:.0%}"
        print(f"{len(found)} rows, {count} tokens: {what}")
    if said:
        raise UserError(
            f"{KEY}: these are not answers of {target.name} ({said}): name the model that wrote "
            "them as model.target"
        )


def reread(target: Target, traces: Sequence[Trace]) -> list[Evidence]:
    """What some of the answers, SAMPLE of each kind, say about whoever wrote them."""
    sample, is_greedy = list[Trace](), np.array(column(traces, "temperature")) == 0
    for greedy in (True, False):
        rows = np.flatnonzero(is_greedy == greedy)
        sample += chosen(traces, rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE])
    return measured(target, [continuation_of(trace) for trace in sample])


def continuation_of(trace: Trace) -> Continuation:
    """The answer as the decoding of a target gives it."""
    sampling = Sampling(trace.temperature, trace.top_k, trace.top_p)
    request = Request(trace.prompt_ids, 0, sampling)
    return Continuation(request, trace.response_ids, trace.finish_reason)


def open_imported(folder: str | None) -> TraceStore | None:
    """The store `folder` if its rows were imported; None where it is another store, or is missing.
    UserError where the import was cut off, or where no folder can have this name."""
    if folder is None:
        return None
    require_folder("data.traces", folder)
    if not (Path(folder) / "manifest.json").exists():
        return None
    store = TraceStore.open(folder, None, create=False)
    if "log" not in store.identity:
        return None
    if not store.is_complete(()):
        raise UserError(f"data.traces={folder}: its import was cut off; run the same command again")
    return store


def prompts_of(store: TraceStore) -> list[Prompt]:
    """The distinct prompts of an imported store, in the order of the log."""
    traces, found = store.load(), dict[str, int]()
    for i, name in enumerate(traces.column("prompt_hash")):
        found.setdefault(name, i)
    domains, lines = traces.column("domain"), traces.column("index")
    return [
        Prompt(
            None, None, None, domains[i], f"{store.folder} row {lines[i] + 1}",
            conversation_id=name, stored=(traces, i),
        )
        for name, i in found.items()
    ]  # fmt: skip
