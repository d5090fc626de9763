"""Rebuild `assets/toy` end to end: tokenizer, target, supervised drafter, model cards.

    python -m scripts.maintain.make_toy --work /tmp/toy --out assets/toy

If it is stopped, the same command resumes from the last checkpoint in `--work`. The target takes a
few hours on one CPU core, minutes on a GPU; the drafter minutes. Hidden matrices are trained with
Muon (Jordan et al. 2024; torch.optim.Muon), the rest with AdamW. The supervised drafter stops once
its training loss has fallen less than 0.5 % over the last fifth of its steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from data.toy import DOMAINS, Document, documents, sample
from scripts.maintain.toy_card import write_card

SPECIAL = ["<|endoftext|>", "<|pad|>", "<|mask|>", "<|user|>", "<|assistant|>"]
VOCAB_SIZE = 2048
CONTEXT = 512
MATH_DOCUMENTS = 24000
EVAL_DOCUMENTS = 150
TARGET_STEPS = 4400  # of the target in assets/toy
TOKENS_PER_BATCH = 3072
LR, MUON_LR = 3e-3, 5e-3
TARGET_SHAPE: dict[str, int] = dict(
    hidden_size=192,
    intermediate_size=544,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
)
DRAFT_SHAPE: dict[str, int] = dict(
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=32,
)


class Progress(TypedDict):
    """The progress of a training, as its checkpoint holds it. `losses`: of every step."""

    step: int
    tokens: int
    losses: list[float]


def pretraining_documents() -> list[Document]:
    """Collect the text of the training, without the documents that evaluation prompts come from."""
    held_out = {d.text for domain in ("code", "prose") for d in documents(domain, "eval")}
    chosen: list[Document] = []
    for domain in DOMAINS:
        stream = documents(domain, "pretrain")
        if domain == "math":
            chosen += [next(stream) for _ in range(MATH_DOCUMENTS)]
        else:
            found = [d for d in {d.text: d for d in stream}.values() if d.text not in held_out]
            chosen += found * (2 if domain == "prose" else 1)
    return chosen


def build_tokenizer(texts: list[str], out: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `texts`, or load it from `out`."""
    if (out / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(out)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[1],
        model_max_length=CONTEXT,
    )
    fast.save_pretrained(out)
    return fast


def encoded_documents(
    docs: list[Document], tokenizer: PreTrainedTokenizerFast, cache: Path
) -> list[list[int]]:
    """Encode the documents that fit into the context, each with its EOS, or read them from
    `cache`."""
    if not cache.exists():
        rows = tokenizer([d.text for d in docs])["input_ids"]
        rows = [[*row[: CONTEXT - 1], tokenizer.eos_token_id] for row in rows if len(row) < CONTEXT]
        ids = torch.tensor([t for row in rows for t in row], dtype=torch.int16)
        save_file({"ids": ids, "lengths": torch.tensor([len(row) for row in rows])}, cache)
    stored = load_file(cache)
    return [row.tolist() for row in stored["ids"].split(stored["lengths"].tolist())]


def held_out_documents(domain: str, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Encode documents of the domain that are not trained on, each with its EOS."""
    docs = sample((domain,), "eval", EVAL_DOCUMENTS, 0)
    rows: Any = tokenizer([d.text for d in docs])["input_ids"]
    eos: Any = tokenizer.eos_token_id
    return [[*row, eos] for row in rows]


def length_batches(encoded: list[list[int]], tokens_per_batch: int, epoch: int) -> list[list[int]]:
    """Group the texts by similar length, for little padding. Returns indices, groups in random
    order."""
    rng = random.Random(epoch)
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]) + rng.random() * 8)
    groups, group, width = [], [], 0
    for index in order:
        width = max(width, len(encoded[index]))
        if group and width * (len(group) + 1) > tokens_per_batch:
            groups.append(group)
            group, width = [], len(encoded[index])
        group.append(index)
    groups.append(group)
    rng.shuffle(groups)
    return groups


def endless_batches(encoded: list[list[int]]) -> Iterator[list[list[int]]]:
    """Yield the texts of each batch, epoch after epoch."""
    for epoch in itertools.count():
        for group in length_batches(encoded, TOKENS_PER_BATCH, epoch):
            yield [encoded[i] for i in group]


def batch_loss(
    model: LlamaForCausalLM, rows: list[list[int]], device: str, reduction: str = "mean"
) -> torch.Tensor:
    """Compute the cross-entropy of these texts, in nats, [] float."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), 1)
    labels = torch.full((len(rows), width), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = labels[i, : len(row)] = torch.tensor(row)
    logits = model(input_ids=ids.to(device)).logits
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).float(),
        labels[:, 1:].flatten().to(device),
        reduction=reduction,
    )


@torch.no_grad()
def domain_losses(
    model: LlamaForCausalLM, encoded: dict[str, list[list[int]]], device: str
) -> dict[str, float]:
    """Measure the nats per token of each domain's held-out documents, prompt included."""
    losses = {}
    for domain, rows in encoded.items():
        total = sum(
            batch_loss(model, rows[i : i + 16], device, "sum").item()
            for i in range(0, len(rows), 16)
        )
        losses[domain] = round(total / sum(len(row) - 1 for row in rows), 4)
    return losses


def train(
    model: LlamaForCausalLM,
    encoded: list[list[int]],
    held_out: dict[str, list[list[int]]],
    work: Path,
    steps: int,
    plateau: bool,
    device: str,
) -> Progress:
    """Train to `steps` with the rate falling over the last quarter; or, with `plateau`, at the full
    rate until the loss is flat. A checkpoint in `work` is resumed."""
    work.mkdir(parents=True, exist_ok=True)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    base = [MUON_LR, LR]
    state: Progress = {"step": 0, "tokens": 0, "losses": []}
    saved = work / "checkpoint.pt"
    if saved.exists():
        loaded = torch.load(saved, weights_only=True, map_location="cpu")
        model.load_state_dict(loaded["model"])
        for optimizer, part in zip(optimizers, loaded["optimizers"], strict=True):
            optimizer.load_state_dict(part)
        state = loaded["state"]
    began, began_tokens = time.monotonic(), state["tokens"]
    batches = itertools.islice(endless_batches(encoded), state["step"], None)
    while state["step"] < steps:
        tested = plateau and state["step"] >= 2000 and state["step"] % 200 == 0
        if tested and is_flat(state["losses"]):
            break
        rows = next(batches)
        fraction = 0.0 if plateau else state["step"] / steps
        scale = min(1.0, (state["step"] + 1) / 100, max(0.02, (1 - fraction) / 0.25))
        for optimizer, rate in zip(optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        loss = batch_loss(model, rows, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state["step"] += 1
        state["tokens"] += sum(map(len, rows))
        state["losses"].append(round(loss.item(), 4))
        if state["step"] % 100 == 0 or state["step"] == steps:
            rate = (state["tokens"] - began_tokens) / (time.monotonic() - began)
            row: dict[str, object] = {
                "step": state["step"],
                "tokens": state["tokens"],
                "tokens_per_s": round(rate),
                "loss": round(sum(state["losses"][-100:]) / 100, 4),
            }
            if state["step"] % 500 == 0 or state["step"] == steps:
                row["held_out"] = domain_losses(model, held_out, device)
            print(json.dumps(row), flush=True)
            with (work / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
            save_checkpoint(saved, model, optimizers, state)
    return state


def save_checkpoint(
    file: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], state: Progress
) -> None:
    """Replace the checkpoint as a whole: one that is stopped midway leaves the last one there."""
    part = file.with_suffix(".part")
    torch.save(
        {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "state": state,
        },
        part,
    )
    part.replace(file)


def is_flat(losses: list[float]) -> bool:
    """Whether the loss fell by less than 0.5 % from one fifth of the steps to the last."""
    fifth = len(losses) // 5
    late, before = sum(losses[-fifth:]), sum(losses[-2 * fifth : -fifth])
    return (before - late) / before < 0.005


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save the weights in float16, with a configuration that has them computed in float32."""
    half = model.half()
    half.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=1)
    half.save_pretrained(out)
    # half the size on disk, but computed in float32 everywhere: dtype "auto" reads this
    config = json.loads((out / "config.json").read_text()) | {"dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=TARGET_STEPS)
    parser.add_argument("--draft-steps", type=int, default=6000)
    parser.add_argument("--part", choices=["all", "target", "draft", "card"], default="all")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    docs = pretraining_documents()
    if arguments.part in ("draft", "card"):  # the target is there, and the ids must be its own
        tokenizer = AutoTokenizer.from_pretrained(arguments.out / "target")
    else:
        tokenizer = build_tokenizer([d.text for d in docs], arguments.work / "tokenizer")
    encoded = encoded_documents(docs, tokenizer, arguments.work / "documents.safetensors")
    held_out = {domain: held_out_documents(domain, tokenizer) for domain in DOMAINS}
    print(f"{len(encoded)} documents, {sum(map(len, encoded))} tokens", flush=True)

    common: dict[str, object] = dict(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_theta=10000.0,
    )
    for name, shape, steps, plateau in (
        ("target", TARGET_SHAPE, arguments.steps, False),
        ("draft", DRAFT_SHAPE, arguments.draft_steps, True),
    ):
        if arguments.part not in ("all", name):
            continue
        model = LlamaForCausalLM(LlamaConfig.from_dict({**common, **shape}))
        if device == "cuda":
            torch.nn.Module.cuda(model)
        print(name, sum(p.numel() for p in model.parameters()), "parameters", flush=True)
        state = train(model, encoded, held_out, arguments.work / name, steps, plateau, device)
        losses = domain_losses(model.float(), held_out, device)
        save_model(model, tokenizer, arguments.out / name)
        facts = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": state["step"],
            "tokens": state["tokens"],
            "held_out_nats_per_token": losses,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
        }
        file = arguments.out / name / "training.json"
        file.write_text(json.dumps(facts, indent=1) + "\n")
    if (arguments.out / "target").exists() and (arguments.out / "draft").exists():
        write_card(arguments.out, device, VOCAB_SIZE, CONTEXT)


if __name__ == "__main__":
    main()
