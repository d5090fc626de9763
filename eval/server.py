"""A vLLM server that runs already, with its drafter: our prompts, its tokens, its own counters.

    vllm serve <target> --speculative-config '{"method": "eagle3", "model": "<export>", ...}'
    python -m scripts.evaluate eval.drafter=<drafter> eval.engine=http://127.0.0.1:8000

Prompts go one by one, as token ids, and `/metrics` is read after each: that gives the counters by
prompt, from which intervals over prompts are formed, and the seconds of decoding. The server drafts
in every round, so its times hold none of plain decoding, and no speed-up is modelled from them. No
other client may use the server meanwhile.
"""

from __future__ import annotations

import time

from engines.completions import ServerError, ask, continuation, served_model
from engines.vllm_run import EngineCounters, Timing, scrape
from engines.web import server_root
from eval.costs import Cost
from eval.measure import Bench, Measurement
from eval.served import answer_counters, asked_one_by_one, engine_costs, engine_row
from target.decode import Request
from trainer.errors import RunFault, UserError

PATIENCE_S = 10.0  # the last round's counters may come after the answer


def check_server(url: str, K: int) -> None:
    """Raise UserError unless the server answers and drafts K tokens per round."""
    positions = len(scrape(url).accepted_per_position)
    if positions != K:
        raise UserError(
            f"eval.K={K}, the server at {url} drafts {positions} tokens a round: set "
            f"eval.K={positions}"
        )


def server_row(bench: Bench, name: str, url: str, cost: Cost) -> Measurement:
    """A row of the report. At temperature 0 the answers must be those of the traces."""
    root, config = server_root(url), bench.config
    answers, counters, timings = [], [], list[Timing]()
    before = scrape(url)
    model, engine = served_model(root), engine_of(root)
    for index, trace in enumerate(bench.traces):
        tokens = continuation(
            root, model, Request(trace.prompt_ids, config.seed + index, bench.sampling),
            max_new_tokens=config.max_new_tokens, eos_ids=bench.target.eos_ids,
            vocab_size=bench.target.vocab_size,
        ).response_ids  # fmt: skip
        now = _settled(url, before, len(tokens) - 1)
        new = now - before
        if new.answers > 1:
            raise RunFault(
                f"the server counted {new.answers} answers and {new.drafts + new.accepted} tokens "
                f"for one answer of {len(tokens) - 1}: another client uses it; measure on a server "
                "of your own"
            )
        one = answer_counters(new, tokens, trace, len(new.accepted_per_position))
        one.speculative_s, one.speculative_tokens = new.decode_s, one.emitted
        counters.append(one)
        timings.append(Timing(new.decode_s, new.drafts, len(tokens) - 1))
        answers.append(tokens)
        before = now
    plain = [trace.response_ids for trace in bench.traces]
    about = {"engine": engine, "draft_sampled": None} | engine_costs([], timings, engine)
    measured = engine_row(bench, name, counters, answers, plain, cost, about, "vllm")
    asked_one_by_one(measured.row)
    return measured


def engine_of(root: str) -> str:
    """The engine's name with its version, which a router or an older server does not give."""
    try:
        version = dict(ask(f"{root}/version")).get("version")
    except (ServerError, TypeError, ValueError):
        version = None
    return f"vllm {version} server" if version else "vllm server"


def _settled(url: str, before: EngineCounters, emitted: int) -> EngineCounters:
    """The counters once they account for all emitted tokens of the answer."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = scrape(url)
        new = now - before
        if new.answers and new.drafts + new.accepted >= emitted:
            return now
        if time.monotonic() > deadline:
            raise RunFault(
                f"the server counts {new.drafts} rounds and {new.accepted} accepted tokens for an "
                f"answer of {emitted} more: it did not draft in every round (give it room: "
                "--max-model-len), or its counters are not of this model"
            )
        time.sleep(0.02)
