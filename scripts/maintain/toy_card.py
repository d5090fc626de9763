"""The model card of `assets/toy`: the text of its training, how answers end, samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from data.toy import DOMAINS, sample
from target.cache import CachedModel
from target.decode import Continuation, Request, decode
from target.model import Target
from target.sampling import Sampling, row_key

CARD = """# The embedded toy

A tiny target and its supervised drafter, so that every recipe runs on a laptop in minutes. Rebuilt
end to end by `python -m scripts.maintain.make_toy --work <scratch> --out assets/toy`.

| | target | draft ("before") |
| --- | ---: | ---: |
{table}

Llama architecture, byte-level BPE of {vocabulary} tokens with reserved `<|mask|>`, `<|user|>` and
`<|assistant|>`, context of {context}; float16 on disk, computed in float32. Text:
functions of Python's standard library and its tests (`code`), its documentation strings and the
language reference (`prose`, twice per epoch), and generated word problems (`math`); the modules
that evaluation prompts are drawn from were left out. The drafter is trained on the same text by
cross-entropy at a constant rate, until its loss falls less than 0.5 % over a fifth of its steps.
It has seen nothing of the target.

Of {count} held-out prompts per domain, at most {limit} new tokens:

| domain | T=0 ends with EOS | mean length | T=1 ends with EOS | mean length | entropy, nats/token |
| --- | ---: | ---: | ---: | ---: | ---: |
{ends}

Licence: Apache-2.0 for the weights; the standard library is under the PSF licence.

## Samples of the target, T=1

{samples}
"""


def write_card(
    out: Path, device: str, vocabulary: int, context: int, count: int = 60, limit: int = 192
) -> None:
    """Write README.md of the folder. `count`: held-out prompts per domain; `limit`: tokens of an
    answer."""
    facts = [json.loads((out / name / "training.json").read_text()) for name in ("target", "draft")]
    rows = [
        [f["parameters"] for f in facts],
        [f["steps"] for f in facts],
        [f["tokens"] for f in facts],
    ]
    rows += [[f["held_out_nats_per_token"][d] for f in facts] for d in DOMAINS]
    names = ["parameters", "steps", "tokens", *(f"held-out nats per token, {d}" for d in DOMAINS)]
    table = "\n".join(f"| {n} | {a} | {b} |" for n, (a, b) in zip(names, rows, strict=True))
    target = Target.load(str(out / "target"), device=device)
    ends, samples = [], []
    for domain in DOMAINS:
        documents_ = sample((domain,), "eval", count, 1)
        cells = []
        for temperature in (0.0, 1.0):
            requests = [
                Request(ids, row_key(0, ids, 0), Sampling(temperature), ids)
                for ids in (target.tokenizer(d.prompt).input_ids for d in documents_)
            ]
            found = list(
                decode(
                    CachedModel(target.model),
                    requests,
                    max_new_tokens=limit,
                    eos_ids=target.eos_ids,
                    batch_size=20,
                )
            )
            ended = sum(row.finish_reason == "eos" for row in found) / len(found)
            length = sum(len(row.response_ids) for row in found) / len(found)
            cells.append(f"{ended:.0%} | {length:.0f}")
        shown = [target.tokenizer.decode(row.request.tag + row.response_ids) for row in found[:2]]
        samples += [f"```\n{text}\n```" for text in shown]
        ends.append(f"| {domain} | {' | '.join(cells)} | {mean_entropy(target, found):.2f} |")
    (out / "README.md").write_text(
        CARD.format(
            table=table,
            vocabulary=vocabulary,
            context=context,
            count=count,
            limit=limit,
            ends="\n".join(ends),
            samples="\n\n".join(samples),
        )
    )


def mean_entropy(target: Target, rows: Sequence[Continuation]) -> float:
    """Measure the entropy of the target's distribution on its own samples, in nats per token."""
    total, positions = 0.0, 0
    for row in rows:
        ids = torch.tensor([row.request.tag + row.response_ids], device=target.device)
        logits = target.outputs(ids).logits
        assert logits is not None
        first = len(row.request.tag) - 1
        log_p = logits[0, first:-1].float().log_softmax(-1)
        total += float(-(log_p.exp() * log_p).sum())
        positions += len(log_p)
    return total / positions
