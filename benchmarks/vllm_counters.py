"""Our `engine_*` counters against vLLM's own, greedy, float32, on held-out prompts of the toy.

    bash scripts/engine_env.sh
    python -m benchmarks.vllm_counters <exported drafter>

vLLM serves target and drafter (`method: draft_model`); its tokens must equal ours and its counters
(drafts, drafted, accepted, accepted per position) those of the replay of cached traces.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

K, LIMIT, PROMPTS = 4, 64, 24


def main(arguments: list[str]) -> None:
    from data.generate import GenerationPlan, generate_traces
    from data.prompts import load_prompts
    from drafters.causal_lm import CausalLMDrafter
    from engines.vllm_run import Speculation, serve
    from eval.metrics import summarise
    from eval.offline import OfflineEvaluator
    from eval.policies.table import make_budget
    from target.model import Target
    from target.sampling import Sampling

    (folder,) = arguments
    target = Target.load("assets/toy/target")
    prompts = load_prompts("toy", count=PROMPTS, seed=21, toy_split="eval")
    plan = GenerationPlan("toy eval", tuple(prompts), (0.0,), max_new_tokens=LIMIT, lookahead=K)
    with tempfile.TemporaryDirectory() as scratch:
        traces = generate_traces(
            target, plan, Path(scratch) / "traces", batch_size=16, rows_per_shard=64
        )
    drafter = CausalLMDrafter.from_pretrained(folder, target).eval()
    evaluator = OfflineEvaluator(target, traces, Sampling(0.0), make_budget("fixed", K))
    ours = summarise(evaluator(drafter).counters, draws=0)
    served = serve(
        target, {"drafter": Speculation("draft_model", folder, K)}, [t.prompt_ids for t in traces],
        max_new_tokens=LIMIT, sampling=Sampling(0.0), batch_size=4, seed=0,
    )["drafter"]  # fmt: skip
    theirs = served.counters
    assert theirs is not None
    pairs = {
        "drafts": (ours["engine_drafts"], theirs.drafts),
        "drafted": (ours["engine_drafted"], theirs.drafted),
        "accepted": (ours["engine_accepted"], theirs.accepted),
        "accepted per position": (
            ours["engine_accepted_per_position"],
            theirs.accepted_per_position,
        ),
    }
    same = sum(a == t.response_ids for a, t in zip(served.tokens, traces, strict=True))
    result = {
        "drafter": folder,
        "prompts": PROMPTS,
        "same_tokens": same,
        "counters": {name: {"ours": a, "vllm": b} for name, (a, b) in pairs.items()},
        "equal": all(a == b for a, b in pairs.values()),
    }
    print(json.dumps(result, indent=1))
    Path("benchmarks/results").mkdir(exist_ok=True)
    Path("benchmarks/results/vllm_counters.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
