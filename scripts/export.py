"""Write a trained drafter for a serving engine.

    python -m scripts.export script.drafter=runs/x/drafter script.engine=vllm script.out=out/vllm

`script.engine` is transformers or vllm; a causal-LM drafter has the same layout for both. The model
card takes its table from the run's report.json where there is one. `eval.K` sets the drafted tokens
a round, `model.target` names the target where the drafter's folder does not lie in a run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from data.target import load_causal_lm
from drafters.causal_lm import KIND
from drafters.export.hf import export, model_card
from eval.report import markdown_table, read_report
from trainer.config import (
    EvalConfig,
    ModelConfig,
    RunFault,
    UserError,
    load_yaml,
    parse_overrides,
    require,
)

ENGINES = ("transformers", "vllm")
KEYS = ["script.drafter", "script.engine", "script.out", "model.target", "eval.K"]


def export_drafter(
    drafter: Path, engine: str, out: Path, target: str | None = None, K: int | None = None
) -> Path:
    """Export the drafter folder `drafter` to `out`; what is not given comes from its run."""
    if engine not in ENGINES:
        raise UserError(f"script.engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    vocab_size, eos_ids, dtype = _about(drafter)
    run = drafter.resolve().parent
    config = load_yaml(run / "config.yaml") if (run / "config.yaml").exists() else {}
    report = read_report(run / "report.json") if (run / "report.json").exists() else None
    if target is None:
        target = config.get("model", {}).get("target")
    if target is None:
        raise UserError(
            f"{drafter} lies in no run folder (no {run / 'config.yaml'}): "
            "name its target with model.target=..."
        )
    num_tokens: Any = config.get("eval", {}).get("K", EvalConfig.K) if K is None else K
    whole = isinstance(num_tokens, int) and num_tokens >= 1
    require(whole, "eval.K", "be a whole number >= 1", num_tokens)
    model, tokenizer = load_causal_lm(str(drafter), "script.drafter", dtype=dtype)
    card = model_card(
        report,
        target=target,
        recipe=config.get("recipe"),
        num_assistant_tokens=num_tokens,
        table=markdown_table(report["results"]) if report and report["results"] else None,
        license="apache-2.0" if target == ModelConfig.target else None,
    )
    return export(
        model,
        tokenizer,
        vocab_size,
        out,
        num_assistant_tokens=num_tokens,
        card=card,
        eos_ids=eos_ids,
    )


def _about(drafter: Path) -> tuple[int, list[int], str]:
    """The target's configured vocabulary and ends, and the dtype of the weights."""
    if not (drafter / "drafter.json").exists():
        raise UserError(f"script.drafter: no drafter in {str(drafter)!r} (drafter.json is missing)")
    try:
        about = json.loads((drafter / "drafter.json").read_text())
        if about["kind"] != KIND:
            raise UserError(
                f"script.drafter: a drafter of kind {about['kind']!r} has no exporter; "
                f"available: {KIND}"
            )
        dtype = json.loads((drafter / "config.json").read_text()).get("dtype") or "float32"
        return about["target"]["vocab_size"], about["target"]["eos_ids"], dtype
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"script.drafter: {drafter} is damaged ({error!r})") from error


def main(arguments: list[str]) -> int:
    try:
        given = parse_overrides(arguments, KEYS)
        for key in ("script.drafter", "script.engine", "script.out"):
            if not given.get(key):
                raise UserError(f"{key} must be given: {key}=...")
        out = export_drafter(
            Path(str(given["script.drafter"])),
            str(given["script.engine"]),
            Path(str(given["script.out"])),
            given.get("model.target"),
            given.get("eval.K"),
        )
    except (UserError, RunFault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 3
    print(f"exported: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
