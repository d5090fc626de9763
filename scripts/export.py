"""Write a trained drafter for a serving engine.

    python -m scripts.export script.drafter=runs/x/drafter script.engine=vllm script.out=out/vllm

`script.engine` is transformers, vllm, speculators or sglang, as far as it serves the drafter's
kind; a causal-LM drafter has the same layout for the first two. The model card takes its table from
the run's report.json where there is one. `eval.K` sets the drafted tokens a round, `model.target`
names the target where the drafter's folder does not lie in a run; for heads it is loaded, and code
that comes with it runs only with `model.trust_remote_code=true` here, whatever the run says.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from data.target import Target, load_causal_lm
from drafters.acceptance_head import adaptive, adaptive_note, attach
from drafters.base import TrainedDrafter
from drafters.causal_lm import KIND, CausalLMDrafter
from drafters.eagle import EagleDrafter
from drafters.export import hf, sglang, speculators, vllm
from drafters.export.heads import method_of
from drafters.export.hf import model_card
from drafters.load import load_drafter, stored
from drafters.medusa2 import Medusa2Drafter
from eval.report import markdown_table, read_report
from recipes.phases import run
from trainer.checks import require_files, require_folder
from trainer.config import (
    EvalConfig,
    ModelConfig,
    UserError,
    load_yaml,
    parse_overrides,
    require,
)

SERVED_BY = {
    KIND: ("transformers", "vllm"),
    "medusa": ("vllm",),
    "medusa2": ("vllm",),
    "eagle": ("vllm", "sglang"),
    "eagle3": ("vllm", "speculators", "sglang"),
    "hydra": (),
    "bank": (),
}
TEXTS = ["script.drafter", "script.engine", "script.out", "model.target"]
KEYS = [*TEXTS, "model.trust_remote_code", "eval.K"]


def export_drafter(
    drafter: Path,
    engine: str,
    out: Path,
    target: str | None = None,
    K: int | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Export the drafter folder `drafter` to `out`; what is not given comes from its run."""
    if not os.path.exists(drafter / "drafter.json"):
        raise UserError(f"script.drafter: no drafter in {str(drafter)!r} (drafter.json is missing)")
    require_files("script.drafter", drafter)
    require_folder("script.out", out)
    about = stored(drafter, "script.drafter")
    _check_engine(about, engine)
    causal_lm = _causal_lm_settings(drafter, about) if about["kind"] == KIND else None
    folder = drafter.resolve().parent
    stored_config, stored_report = folder / "config.yaml", folder / "report.json"
    config = load_yaml(stored_config) if stored_config.exists() else {}
    report = read_report(stored_report) if stored_report.exists() else None
    model: dict[str, Any] = {"target": target}
    if target is None:
        model = config.get("model", {})
        target = model.get("target")
        if not isinstance(target, str):
            raise UserError(
                f"{drafter} lies in no run folder (no {stored_config} with a target): "
                "name its target with model.target=..."
            )
        print(f"model.target={target}, from {stored_config}")
    _check_out(out, {"model.target": target, "script.drafter": str(drafter)})
    num_tokens: Any = config.get("eval", {}).get("K", EvalConfig.K) if K is None else K
    whole = isinstance(num_tokens, int) and num_tokens >= 1
    require(whole, "eval.K", "be a whole number >= 1", num_tokens)
    card = {
        "report": report,
        "target": target,
        "recipe": config.get("recipe"),
        "table": markdown_table(report["results"]) if report and report["results"] else None,
        "license": "apache-2.0" if target == ModelConfig.target else None,
    }
    if causal_lm is not None:
        return _export_causal_lm(drafter, causal_lm, out, num_tokens, card)
    # in float32, so that the comparison after writing is exact
    loaded = Target.load(
        target,
        revision=model.get("target_revision"),
        dtype="float32",
        trust_remote_code=trust_remote_code,
    )
    head = load_drafter(str(drafter), loaded, key="script.drafter")
    return _export_head(head, engine, out, num_tokens, card)


def _check_out(out: Path, read: dict[str, str]) -> None:
    """What is read must not lie where it is written to."""
    place = out.resolve()
    for key, name in read.items():
        source = Path(name).resolve()
        if source.exists() and (place == source or place in source.parents):
            raise UserError(
                f"script.out={out} would replace {key}={name}: name a new folder beside it"
            )


def _check_engine(about: dict[str, Any], engine: str) -> None:
    kind = about["kind"]
    if kind == "eagle" and about["settings"].get("version") == 3:
        kind = "eagle3"
    engines = SERVED_BY[kind]
    if not engines:
        served = "; ".join(f"{one}: {', '.join(by)}" for one, by in SERVED_BY.items() if by)
        raise UserError(
            f"script.engine={engine}: no engine loads {kind.capitalize()}, its own format is all "
            f"there is; engines serve {served}"
        )
    what = "" if kind == KIND else f" for a drafter of kind {kind!r}"
    if engine not in engines:
        names = ", ".join(engines)
        raise UserError(f"script.engine must be one of {names}{what}, got {engine!r}")


def _export_causal_lm(
    drafter: Path,
    settings: tuple[int, list[int], str],
    out: Path,
    num_tokens: int,
    card: dict[str, Any],
) -> Path:
    vocab_size, eos_ids, dtype = settings
    model, tokenizer = load_causal_lm(str(drafter), "script.drafter", dtype=dtype)
    whole = CausalLMDrafter(model, tokenizer, vocab_size, {})
    attach(whole, drafter, "script.drafter")
    return hf.export(
        model,
        tokenizer,
        vocab_size,
        out,
        card=model_card(
            **card, num_assistant_tokens=num_tokens, note=adaptive_note(whole.acceptance)
        ),
        eos_ids=eos_ids,
        **adaptive(whole.acceptance, num_tokens),
    )


def _export_head(
    drafter: TrainedDrafter, engine: str, out: Path, num_tokens: int, card: dict[str, Any]
) -> Path:
    num_tokens = min(num_tokens, drafter.max_depth or num_tokens)
    if isinstance(drafter, Medusa2Drafter):  # its heads serve on the target trained with them
        drafter, out = drafter.merged(out / "target"), out / "drafter"
        card = card | {"target": drafter.shared.target.name}
    text = model_card(
        **card, num_assistant_tokens=num_tokens, engine=engine, method=method_of(drafter)
    )
    if engine == "vllm":
        return vllm.export(drafter, out, card=text)
    assert isinstance(drafter, EagleDrafter)
    if engine == "sglang":
        return sglang.export(drafter, out, card=text)
    name = card["target"]
    return speculators.export(drafter, out, card=text, target=name, num_tokens=num_tokens)


def _causal_lm_settings(drafter: Path, about: dict[str, Any]) -> tuple[int, list[int], str]:
    """The target's configured vocabulary and ends, and the dtype of the weights."""
    try:
        dtype = json.loads((drafter / "config.json").read_text()).get("dtype") or "float32"
        return about["target"]["vocab_size"], about["target"]["eos_ids"], dtype
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"script.drafter: {drafter} is damaged ({error!r})") from error


def main(arguments: list[str]) -> int:
    try:
        given = parse_overrides(arguments, KEYS, TEXTS)
        for key in ("script.drafter", "script.engine", "script.out"):
            if not given.get(key):
                raise UserError(f"{key} must be given: {key}=...")
        trust = given.get("model.trust_remote_code", False)
        require(isinstance(trust, bool), "model.trust_remote_code", "be true or false", trust)
        out = export_drafter(
            Path(str(given["script.drafter"])),
            str(given["script.engine"]),
            Path(str(given["script.out"])),
            given.get("model.target"),
            given.get("eval.K"),
            trust,
        )
    except Exception as error:
        return run.fail(error)
    print(f"exported: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
