"""What vLLM's own clock says of rounds and of plain decoding."""

from __future__ import annotations

import pytest

from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import load_prompts
from drafters.causal_lm import CausalLMDrafter
from eval.config import EvalConfig
from eval.costs import Cost
from eval.measure import Bench
from eval.report.schema import build_report
from eval.report.tables import notes
from phases.serve import served_rows
from target.model import Target
from target.sampling import Sampling

pytestmark = pytest.mark.engine

K = 4
CONFIG = EvalConfig(
    num_prompts=12, max_new_tokens=48, temperatures=[0.0], K=K, timing_prompts=8, engine="vllm",
    batch_size=4, bootstrap_draws=20,
)  # fmt: skip


def test_rounds_are_timed_and_explain_the_measured_speedup(vllm_python, tmp_path):
    """Counted by tokens in place of rounds, the modelled speed-up would be 2.3 times as high. Other
    work on the machine changes the ratio of rounds to tokens, and both speed-ups alike."""
    target = Target.load("assets/toy/target", dtype="float32")
    prompts = load_prompts("toy", count=CONFIG.num_prompts, seed=21, toy_split="eval")
    plan = GenerationPlan("toy eval", tuple(prompts), (0.0,), max_new_tokens=48, lookahead=K)
    traces = list(generate_traces(target, plan, tmp_path, batch_size=8, rows_per_shard=64))
    bench = Bench(target, traces, Sampling(0.0), CONFIG, {"name": "toy", "hash": ""})
    drafter = CausalLMDrafter.from_pretrained("assets/toy/draft", target)
    (row,) = served_rows(bench, "drafter", drafter, Cost(0.1, 1.0, 0.1, 0.1), None)
    build_report({}, {}, {}, [row], [], [])
    assert "threads of a CPU, in eager mode, batch 1" in row.cost_source
    for low, median, high in (row.token_s, row.round_s):
        assert 0 < low <= median <= high < 1
    (note,) = [one for one in notes([row]) if "round" in one]
    assert f"as much as {row.round_cost:.2f} such tokens" in note
    # means and medians of other prompts, but the same times
    assert row.modelled_speedup == pytest.approx(row.speedup, rel=0.4)
