"""The stages of FastDraft, and DistillSpec's claims D1 and D3, on a chat model.

    python -m benchmarks.fastdraft_chat          # seeds 0, 1 and 2, resumable
    python -m benchmarks.fastdraft_chat 0 1      # these seeds
    python -m benchmarks.fastdraft_chat report   # only the statistics of what is there

As `benchmarks.fastdraft_claims`, for SmolLM2-135M-Instruct, with the answers and held-out prompts
of `benchmarks.queue`'s cells (their table names the commands that make them) and a fresh drafter of
11 M parameters, that of the laptop presets. Further cells: `mixed` takes all the raw steps on the
mixture of the second stage; `control` goes on with raw text for as many supervised tokens as an
alignment takes, from the same drafter. Settings were committed before the run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.fastdraft_claims import CELLS, Experiment, Scale, main
from data.batches import Batch
from data.features import write_features
from data.features_layout import FeaturesPlan, features_folder
from data.prompts import load_prompts
from data.traces import Trace, TraceStore
from phases.dev import split_dev
from target.outputs import TargetOutputs

SCALE = Scale(200, 100, 150, 8, 740, 48, 96, 3, "runs/benchmarks/fastdraft-chat")
SEEDS = ("0", "1", "2")
PRETRAIN_LR = 2e-3


class ChatModel(Experiment):
    name, result = "runs/smollm2", "fastdraft_chat"
    cells = MappingProxyType(
        {cell: found for cell, found in CELLS.items() if "own responses" not in cell}
        | {
            "mixed": ("continue", None, "raw", "ce_hard"),
            "control": ("continue", "continued", "raw", "ce_hard"),
        }
    )
    claims = MappingProxyType({
        "D1 aligned by fkl > continued": ("aligned, fkl", "continued", None, 0.03),
        "D1 aligned by fkl > control": ("aligned, fkl", "control", None, 0.03),
        "D3 fkl > hard labels": ("aligned, fkl", "aligned", None, 0.005),
        "F1 continuing lifts code by 0.15": ("continued", "pretrained", "code", 0.15),
        "F3 aligned > continued": ("aligned", "continued", None, 0.0),
        "prose, then both > both throughout": ("continued", "mixed", None, 0.0),
        "pre-trained > scratch, equal tokens": ("aligned", "scratch", None, 0.0),
    })  # fmt: skip
    findings = MappingProxyType({})
    domains, judged = ("code", "instructions", "math"), ("0.6", "1")
    options = MappingProxyType[str, Any]({
        "pretrain_lr": PRETRAIN_LR, "continue_lr": 1e-3, "draft_layers": 4,
        "draft_hidden_size": 192,
    })  # fmt: skip

    def texts(self) -> tuple[Sequence[Trace], list[Trace]]:
        """Some of its answers, which are in order of their domain."""
        train, dev = split_dev(TraceStore.open("runs/real/traces", None, create=False).load(), 0)
        return random.Random(0).sample(train, self.scale.prompts), dev

    def answers(self, temperature: float) -> Sequence[Trace]:
        prompts = load_prompts("runs/real/prompts.jsonl", count=self.scale.held_out, seed=0)
        return self._traces("held-out prompts", prompts, (temperature,), 0)

    def stored(self) -> Callable[[Batch], TargetOutputs | None]:
        """The target's distribution, from its stored final states."""
        plan = FeaturesPlan((26, "final_norm"))  # the store of `benchmarks.heads`, heads_chat
        folder = features_folder(self.target, self.train, plan, "runs/cache")
        store = write_features(self.target, self.train, plan, folder, batch_size=32)

        @torch.no_grad()
        def outputs(batch: Batch) -> TargetOutputs | None:
            found = store.outputs(batch, self.target.device)
            assert found is not None
            return TargetOutputs(logits=self.target.head.logits(found.hidden["final_norm"]))

        return outputs

    def overrides(self, cell: str) -> dict[str, Any]:
        if cell == "mixed":
            return {"max_steps": self.scale.pretrain + self.scale.continued, "lr": PRETRAIN_LR}
        if cell == "control":
            wanted = self.scale.align * self.tokens["target"]
            return {"max_steps": max(1, round(wanted / self.raw_tokens(cell)))}
        return {}


if __name__ == "__main__":
    main(ChatModel, SCALE, sys.argv[1:] or [*SEEDS])
