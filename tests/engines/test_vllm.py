"""vLLM against our own engine and replay: same tokens, same counters, greedy, float32.

A case is a method of vLLM, our drafter, and how it is exported; all are served by one process.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from data.batches import Batches
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import load_prompts
from data.traces import Trace
from drafters.causal_lm import CausalLMDrafter
from drafters.export.card import Export
from drafters.export.hf import export
from drafters.kinds import kind_of
from drafters.round import Budget
from drafters.text import Text
from engines.vllm_run import Speculation, serve
from eval.config import EvalConfig
from eval.costs import Cost
from eval.measure import Bench
from eval.metrics import paired_difference
from eval.offline import OfflineEvaluator
from eval.plain import NEAR_TIE
from eval.served import prompt_counters, served_row
from target.model import Target
from target.sampling import Sampling
from tests.helpers.by_heart import block_drafter

pytestmark = pytest.mark.engine

K, PROMPTS = 4, 12
LEARNT = 6  # answers, by block drafters
CONFIG = EvalConfig(
    num_prompts=PROMPTS, max_new_tokens=48, temperatures=[0.0], K=K, timing_prompts=0,
    bootstrap_draws=20,
)  # fmt: skip
# of a row: what takes the drafter's law, which vLLM does not tell, where the row came from, and
# costs, which are vLLM's own
UNTOLD = {
    "alpha", "alpha_ci95", "greedy_match", "greedy_match_ci95", "by_domain", "measured_by",
    "identical_to_plain", "num_compared", "cost_source", "cost_ratio", "verify_cost",
    "modelled_speedup", "engine", "draft_sampled", "draft_time_share", "token_s", "round_s",
    "round_cost", "differing_prompts", "calibration", "alpha_by_depth", "draft_vocabulary",
}  # fmt: skip
NO_COST = Cost(0.0, 1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Case:
    """`load(target, traces)` -> our drafter, where it is a head trained on these;
    `export(drafter, target, folder)` writes it for vLLM."""

    name: str
    method: str
    load: Callable[[Target, list[Trace]], Any]
    export: Callable[[Any, Target, Path], object]


def load_causal_lm(target, traces):
    return CausalLMDrafter.from_pretrained("assets/toy/draft", target)


def export_causal_lm(drafter, target, folder):
    export(
        drafter.model, target.tokenizer, target.model.config.vocab_size, folder,
        num_assistant_tokens=K, card="", eos_ids=target.eos_ids,
    )  # fmt: skip


def head(recipe, num_steps=30, **options):
    """A head trained on few texts for so long that drafts are accepted beyond the first."""

    def load(target, traces):
        module = importlib.import_module(f"recipes.{recipe}")
        method = module.Recipe(module.Config(**options), target)
        torch.manual_seed(0)
        drafter, objective = method.build(traces), method.stages()[-1].objective
        batches = Batches(traces, {"target": 1.0}, 16, seed=0)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
        for step in range(num_steps):
            batch = batches.at(step)
            request = objective.target_request(batch, step)
            outputs = target.outputs(
                batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits
            )
            terms = objective.loss(drafter, batch, outputs, step).terms
            optimizer.zero_grad()
            sum(one.weight * one.total / one.count for one in terms.values()).backward()
            optimizer.step()
        return drafter

    return load


def export_flat(drafter, target, folder):
    kind_of(drafter).writers["vllm"](drafter, folder, Export("", "", K))


def export_for_transformers(drafter, target, folder):
    kind_of(drafter).writers["transformers"](drafter, folder, Export("", "", K))


def export_speculators(drafter, target, folder):
    kind_of(drafter).writers["speculators"](drafter, folder, Export("", target.name, K))


def block(**options):
    """A block drafter that knows the first answers by heart."""

    def load(target, traces):
        texts = [(trace.prompt_ids, trace.response_ids) for trace in traces[:LEARNT]]
        return block_drafter(target, texts, K, layers=[1, 4], **options)

    return load


whole_block, reduced_block = block(), block(reduced=True)
eagle3 = head("eagle3", 40, layers=[1, 3, 5], steps=K, draft_vocab_size=1024)
CASES = [
    Case("draft_model", "draft_model", load_causal_lm, export_causal_lm),
    Case("medusa", "medusa", head("medusa"), export_flat),
    Case("medusa reduced vocabulary", "medusa", head("medusa", draft_vocab_size=512), export_flat),
    Case("eagle", "eagle", head("eagle", steps=2), export_flat),
    Case("eagle3", "eagle3", eagle3, export_flat),
    Case("eagle3 whole vocabulary", "eagle3", head("eagle3", 40, steps=K), export_flat),
    Case("eagle3 speculators", "eagle3", eagle3, export_speculators),
    Case("dflash", "dflash", whole_block, export_flat),
    Case("dflash of transformers", "dflash", whole_block, export_for_transformers),
    Case("dflash causal", "dflash", block(causal=True), export_flat),
    Case("dflash reduced vocabulary", "dflash", reduced_block, export_flat),
    Case("dflash speculators", "dflash", reduced_block, export_speculators),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@torch.inference_mode()
def decided(target, drafters, trace):
    """Whether no two best logits, of the target or of a drafter at any depth, come so close that
    another kernel could swap them."""
    ids = torch.tensor([trace.prompt_ids + trace.response_ids + trace.lookahead_ids])
    first = len(trace.prompt_ids) - 1
    laws = [target.outputs(ids).logits[0, first:-1]]
    for drafter in drafters:
        outputs = target.outputs(ids, layers=drafter.target_layers, logits=False)
        for depth, states in enumerate(drafter.states(Text(ids), outputs, K), start=1):
            laws.append(drafter.project(states[0, first + depth : -1], depth))
    best = [law.topk(2).values for law in laws]
    return min(float((top[:, 0] - top[:, 1]).min()) for top in best) > NEAR_TIE


@pytest.fixture(scope="module")
def target(vllm_python):
    return Target.load("assets/toy/target", dtype="float32")


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory):
    """The target's answers to prompts of the toy, by our own decoding."""
    prompts = load_prompts("toy", count=3 * PROMPTS, seed=21, toy_split="eval")
    plan = GenerationPlan(
        "toy eval", tuple(prompts), (0.0,), max_new_tokens=CONFIG.max_new_tokens, lookahead=K
    )
    folder = tmp_path_factory.mktemp("traces") / "traces"
    return list(generate_traces(target, plan, folder, batch_size=16, rows_per_shard=64))


@pytest.fixture(scope="module")
def bench(target, drafters, answers):
    """Some of these answers, of which the heads have learnt enough to be accepted."""
    known = drafters.values()
    traces = [trace for trace in answers if decided(target, known, trace)][:PROMPTS]
    assert len(traces) == PROMPTS
    return Bench(target, traces, Sampling(0.0), CONFIG, {"name": "toy", "hash": ""})


@pytest.fixture(scope="module")
def drafters(target, answers):
    found: dict[Any, Any] = {}  # one training for both layouts
    for case in CASES:
        again = next((c for c in CASES if c.name in found and c.load is case.load), None)
        found[case.name] = found[again.name] if again else case.load(target, answers).eval()
    return found


@pytest.fixture(scope="module")
def served(bench, drafters, tmp_path_factory):
    """What vLLM made of every case, and of the target alone under the name "plain"."""
    jobs: dict[str, Speculation | None] = {"plain": None}
    for case in CASES:
        folder = tmp_path_factory.mktemp("exports") / "export"
        case.export(drafters[case.name], bench.target, folder)
        jobs[case.name] = Speculation(case.method, folder, K)
    prompts = [trace.prompt_ids for trace in bench.traces]
    return serve(
        bench.target, jobs, prompts, max_new_tokens=CONFIG.max_new_tokens, sampling=Sampling(0.0),
        batch_size=4, seed=0, warm_up=2,
    )  # fmt: skip


def same(a, b):
    """Equal, but for the order in which a mean was summed."""
    return a == pytest.approx(b) if isinstance(a, float) and isinstance(b, float) else a == b


def test_plain_decoding_equals_ours(bench, served):
    assert served["plain"].tokens == [trace.response_ids for trace in bench.traces]
    endings = {trace.finish_reason for trace in bench.traces}
    assert endings == {"eos", "length"}  # both ways in which the last round is cut


@each_case
def test_tokens_equal_plain_decoding(bench, served, case):
    assert served[case.name].tokens == served["plain"].tokens


@each_case
def test_every_round_equals_ours(bench, drafters, served, case):
    ours = bench.decoded(case.name, drafters[case.name], NO_COST)
    rounds = {trace.prompt_hash: [] for trace in bench.traces}
    for one in ours.rounds:
        rounds[one.prompt_hash].append([one.submitted, one.engine_accepted])
    assert served[case.name].rounds == list(rounds.values())
    # not equal because nothing is accepted
    assert min(ours.row.engine_accepted_per_position[:3]) > 0, ours.row
    assert ours.row.engine_accepted > 2 * PROMPTS


@each_case
def test_the_report_row_equals_replay_and_decoding(bench, drafters, served, case):
    name, drafter = case.name, drafters[case.name]
    row = served_row(bench, name, served[name], served["plain"], NO_COST).row
    counters = served[name].counters
    assert row.measured_by == "vllm"
    assert row.identical_to_plain == 1.0
    assert row.lossless
    assert row.engine_drafts == counters.drafts
    assert row.engine_drafted == counters.drafted
    assert row.engine_accepted == counters.accepted
    assert row.engine_accepted_per_position == counters.accepted_per_position
    assert row.engine_tokens_per_round == counters.tokens_per_round
    for ours in (bench.replayed(name, drafter, NO_COST), bench.decoded(name, drafter, NO_COST)):
        theirs, own = vars(row), vars(ours.row)
        differing = {name for name in theirs if not same(theirs[name], own[name])}
        assert differing <= UNTOLD


def test_sampled_acceptance_is_what_replay_expects_of_the_same_answers(bench, drafters, tmp_path):
    """At temperature 1, given vLLM's own answers. 64 prompts gave 2.06 tokens a round against 2.07
    expected; with the CPU kernel not repaired, 1.04."""
    target, drafter, sampling = bench.target, drafters["draft_model"], Sampling(1.0)
    export_causal_lm(drafter, target, tmp_path / "export")
    prompts = [trace.prompt_ids for trace in bench.traces] * 2
    served = serve(
        target, {"sampled": Speculation("draft_model", tmp_path / "export", K)}, prompts,
        max_new_tokens=CONFIG.max_new_tokens, sampling=sampling, batch_size=8, seed=3,
    )["sampled"]  # fmt: skip
    traces = [
        dataclasses.replace(
            trace, prompt_hash=str(index), response_ids=tokens, lookahead_ids=[], temperature=1.0
        )
        for index, (trace, tokens) in enumerate(zip(bench.traces * 2, served.tokens, strict=True))
    ]
    replay = OfflineEvaluator(target, traces, sampling, Budget(K), engine_counters=False)
    expected = replay(drafter).counters
    found = [prompt_counters(served, index, trace, K) for index, trace in enumerate(traces)]
    difference = paired_difference(found, expected, "tokens_per_round")
    assert abs(difference["diff"]) < 0.2, difference
    assert difference["p"] > 0.001, difference
