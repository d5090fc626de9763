"""The phase between training and report: the drafter in its own format and for an engine."""

from __future__ import annotations

from typing import Any

from drafters.acceptance_head import adaptive, adaptive_note
from drafters.bank import DrafterBank
from drafters.causal_lm import CausalLMDrafter
from drafters.export import hf, vllm
from drafters.export.heads import method_of
from drafters.hydra import HydraDrafter
from drafters.medusa2 import Medusa2Drafter
from eval.report import markdown_table
from recipes.phases.run import Run
from trainer.config import ModelConfig
from trainer.files import whole_folder
from trainer.redaction import shown


def export_run(run: Run, drafter: Any, report: dict[str, Any]) -> None:
    """run/drafter in the project's own format and run/export/<engine>: transformers' layout for a
    causal LM, which vLLM loads too; vLLM's for heads, beside the target where that was trained with
    them. No engine loads Hydra; a bank's members lie in run/drafter as causal LMs."""
    with whole_folder(run.folder / "drafter", ours=True) as partial:
        drafter.save_pretrained(partial)
    if isinstance(drafter, HydraDrafter | DrafterBank):
        return
    K, target, out = run.config.eval.K, run.target, run.folder / "export" / "vllm"
    name = target.name
    if isinstance(drafter, Medusa2Drafter):
        drafter, out = drafter.merged(out / "target", ours=True), out / "drafter"
        name = drafter.shared.target.name
        print(f"export: the target that these heads serve on is {name}")
        name = shown(name, run.folder)
    head = not isinstance(drafter, CausalLMDrafter)
    card = hf.model_card(
        report,
        target=name,
        recipe=run.config.recipe,
        num_assistant_tokens=K,
        table=markdown_table(report["results"]),
        license="apache-2.0" if target.name == ModelConfig.target else None,
        engine="vllm" if head else "transformers",
        method=method_of(drafter) if head else "draft_model",
        note="" if head else adaptive_note(drafter.acceptance),
    )
    if head:
        vllm.export(drafter, out, card=card, ours=True)
        return
    hf.export(
        drafter.model,
        target.tokenizer,
        target.fingerprint["vocab_size"],
        run.folder / "export" / "transformers",
        card=card,
        eos_ids=target.eos_ids,
        ours=True,
        **adaptive(drafter.acceptance, K),
    )
