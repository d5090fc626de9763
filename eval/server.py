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

from data.traces import Trace
from engines.completions import ServerError, ask, continuation, served_model
from engines.vllm_run import EngineCounters, Timing, scrape
from engines.web import server_root
from eval.costs import Cost
from eval.counters import PromptCounters
from eval.measure import Bench, Measurement
from eval.served import engine_costs, engine_row
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
    model, engine = served_model(root), _engine(root)
    for index, trace in enumerate(bench.traces):
        tokens = continuation(
            root, model, Request(trace.prompt_ids, config.seed + index, bench.sampling),
            max_new_tokens=config.max_new_tokens, eos_ids=bench.target.eos_ids,
            vocab_size=bench.target.vocab_size,
        ).response_ids  # fmt: skip
        now = _settled(url, before, len(tokens) - 1)
        counters.append(_counted(now - before, tokens, trace))
        timings.append(Timing((now - before).decode_s, (now - before).drafts, len(tokens) - 1))
        answers.append(tokens)
        before = now
    plain = [trace.response_ids for trace in bench.traces]
    about = {"engine": engine, "draft_sampled": None} | engine_costs([], timings, engine)
    measured = engine_row(bench, name, counters, answers, plain, cost, about)
    # alpha_hat needs each round, which the server does not report
    row = measured.row
    row.alpha_hat = row.alpha_hat_ci95 = row.tokens_per_round_iid = None
    row.alpha_pos, row.reach_pos = [], []
    assert row.by_domain is not None
    domains = row.by_domain
    for place in (domains["mean"], domains["worst"], *domains["domains"].values()):
        place["alpha_hat"] = None
    return measured


def _engine(root: str) -> str:
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


def _counted(new: EngineCounters, tokens: list[int], trace: Trace) -> PromptCounters:
    """Counters of one answer.

    Only its last round can have been cut, at EOS or at the limit; a cut round emits no token of the
    target's own. Raises RunFault where the counters exceed the answer.
    """
    emitted, K = len(tokens) - 1, len(new.accepted_per_position)
    cut = new.drafts + new.accepted - emitted
    if cut > K or new.answers > 1:
        raise RunFault(
            f"the server counted {new.answers} answers and {new.drafts + new.accepted} tokens for "
            f"one answer of {emitted}: another client uses it; measure on a server of your own"
        )
    return PromptCounters(
        trace.prompt_hash, trace.domain, K, rounds=new.drafts, truncated_rounds=float(cut > 0),
        emitted=emitted, submitted=new.drafted, accepted=emitted - new.drafts + (cut > 0),
        engine_drafts=new.drafts, engine_drafted=new.drafted, engine_accepted=new.accepted,
        engine_accepted_per_position=[float(n) for n in new.accepted_per_position],
        speculative_s=new.decode_s, speculative_tokens=emitted,
    )  # fmt: skip
