"""Trains an EAGLE-3 head with nvidia-modelopt as `benchmarks.peers` tells it; see there.

    .venv-modelopt/bin/python -m benchmarks.peers_worker_modelopt job.json

Online: the target runs in the same process. Modelopt leaves the loop to the caller, so it is the
shortest that trains: AdamW in its fused form (the default of the trainer that modelopt's own
examples use), the loss that the model returns, clipping. torch.compile is off: modelopt asks for it
with fixed shapes, so every new length of a batch would be compiled again.

Patched: the masks of the unrolled steps, which modelopt keeps by step alone, are kept by length
too; else every batch must be padded to one width.
"""

# pyright: reportMissingImports=false
# modelopt lives in an environment of its own

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import modelopt.torch.speculative as mtsp
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup


def build(job: dict[str, Any]) -> torch.nn.Module:
    """Modelopt's EAGLE-3 in the shape of the target's layers, everything else as it has it."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["target"], dtype=torch.float32, attn_implementation="sdpa"
    )
    config = model.config
    shape = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
             "rms_norm_eps", "initializer_range")  # fmt: skip
    rope = dict(config.rope_parameters)
    architecture = {name: getattr(config, name) for name in shape} | {
        "eagle_aux_hidden_state_layer_ids": job["layers"],  # outputs, from 0, as ours
        "draft_vocab_size": len(job["kept"] or range(config.vocab_size)),
        "has_lm_head": job["own_head"],
        "rope_scaling": rope,
        "rope_theta": rope["rope_theta"],
        "torch_dtype": "float32",
    }
    options = {
        "eagle_architecture_config": architecture,
        "eagle_ttt_steps": job["unroll"],
        "eagle_use_torch_compile": False,
        "eagle_export_rope_scaling": {},  # else it writes YaRN, which was not trained
    }
    mtsp.convert(model, [("eagle", options)])
    module = model.eagle_module
    kept = torch.tensor(job["kept"]) if job["kept"] else torch.arange(config.vocab_size)
    if job["kept"]:
        module.d2t.copy_(kept - torch.arange(len(kept)))
    if hasattr(module, "lm_head"):  # at random, where ours and speculators' are copies
        with torch.no_grad():
            module.lm_head.weight.copy_(model.lm_head.weight[kept])
    return model.train()


def collate(rows: list[tuple[int, list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [B, L] right-padded; the supervised logit indices [B, L]: the token there and the next
    one are the response's."""
    width = max(len(ids) for _, ids in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width)
    for i, (start, row) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, start : len(row) - 1] = 1
    return ids, mask


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    out = Path(job["out"])
    rows = [(start, ids) for start, ids in json.loads(Path(job["rows"]).read_text())]
    torch.manual_seed(job["seed"])
    model = build(job)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=job["lr"], weight_decay=job["weight_decay"], fused=True
    )
    schedule = get_linear_schedule_with_warmup(optimizer, job["warmup"], len(job["batches"]))
    masks: dict[int, dict[int, torch.Tensor]] = {}
    stamps = []
    for indices in job["batches"]:
        stamps.append((time.perf_counter(), time.process_time()))
        ids, mask = collate([rows[i] for i in indices])
        model._cached_attn_blk_masks = masks.setdefault(ids.shape[1], {})
        loss = model(input_ids=ids, loss_mask=mask).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, job["max_grad_norm"])
        optimizer.step()
        schedule.step()
    stamps.append((time.perf_counter(), time.process_time()))
    if job["draft"]:
        model.get_exporter().export(out / "draft")
        save_file(unrolled_logits(model, rows[job["check"]][1]), out / "check.safetensors")
    (out / "stamps.json").write_text(json.dumps(stamps))  # last: the rest is complete


@torch.no_grad()
def unrolled_logits(model: torch.nn.Module, ids: list[int]) -> dict[str, torch.Tensor]:
    """Compute the draft's logits [columns, V] at every step of the unroll; column c of step j
    stands at c + j."""
    found: list[torch.Tensor] = []
    head = getattr(model.eagle_module, "lm_head", None)
    if head is None:
        head = model.lm_head
    handle = head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    model._cached_attn_blk_masks = {}
    model(input_ids=torch.tensor([ids]), loss_mask=torch.ones(1, len(ids)))
    handle.remove()
    found = found[-model.eagle_ttt_steps :]  # before them, perhaps the target's own
    return {str(j): logits[j : len(ids) - 1].contiguous() for j, logits in enumerate(found)}


if __name__ == "__main__":
    main(sys.argv[1])
