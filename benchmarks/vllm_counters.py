"""Our `engine_*` counters against vLLM's own, greedy, float32, on held-out prompts of the toy.

    python -m benchmarks.vllm_counters <python of an environment with vllm> <exported drafter>

vLLM serves target and drafter (`method: draft_model`); its tokens must equal ours and its counters
(drafts, drafted, accepted, accepted per position) those of the replay of cached traces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

K, LIMIT, PROMPTS = 4, 64, 24

SERVE = """
import json, sys
from vllm import LLM, SamplingParams
job = json.load(open(sys.argv[1]))
llm = LLM(model=job["target"], dtype="float32", enforce_eager=True, max_model_len=512,
          max_num_seqs=4, disable_log_stats=False, speculative_config={
              "method": "draft_model", "model": job["drafter"], "num_speculative_tokens": job["K"]})
rows = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]],
                    SamplingParams(temperature=0.0, max_tokens=job["limit"], detokenize=False,
                                   stop_token_ids=job["eos"]))
counters = {}
for metric in llm.get_metrics():
    if metric.name.startswith("vllm:spec_decode"):
        value = getattr(metric, "value", None)
        counters[metric.name] = value if value is not None else list(metric.values)
json.dump({"tokens": [list(r.outputs[0].token_ids) for r in rows], "counters": counters},
          open(sys.argv[2], "w"))
"""


def main(arguments: list[str]) -> None:
    from data.generate import GenerationPlan, generate_traces
    from data.prompts import load_prompts
    from data.sampling import Sampling
    from data.target import Target
    from drafters.causal_lm import CausalLMDrafter
    from eval.metrics import summarise
    from eval.offline import OfflineEvaluator
    from eval.policies import make_budget

    python, folder = arguments
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
        job = {
            "target": str(Path("assets/toy/target").resolve()),
            "drafter": str(Path(folder).resolve()),
            "K": K,
            "limit": LIMIT,
            "eos": list(target.eos_ids),
            "prompts": [t.prompt_ids for t in traces],
        }
        (Path(scratch) / "job.json").write_text(json.dumps(job))
        (Path(scratch) / "serve.py").write_text(SERVE)
        quiet = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        command = [python, "serve.py", "job.json", "served.json"]
        subprocess.run(command, cwd=scratch, env={**os.environ, **quiet}, check=True)
        served = json.loads((Path(scratch) / "served.json").read_text())
    prefix = "vllm:spec_decode_num_"
    pairs = {
        "drafts": (ours["engine_drafts"], served["counters"][f"{prefix}drafts"]),
        "drafted": (ours["engine_drafted"], served["counters"][f"{prefix}draft_tokens"]),
        "accepted": (ours["engine_accepted"], served["counters"][f"{prefix}accepted_tokens"]),
        "accepted per position": (
            ours["engine_accepted_per_position"],
            served["counters"][f"{prefix}accepted_tokens_per_pos"],
        ),
    }
    same = sum(a == t.response_ids for a, t in zip(served["tokens"], traces, strict=True))
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
