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

import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch

from benchmarks import chat_model
from benchmarks.fastdraft_claims import CELLS, Experiment, Scale, main
from data.batches import Batch
from data.features import write_features
from data.features_layout import FeaturesPlan, features_folder
from data.traces import Trace
from target.outputs import TargetOutputs

SCALE = Scale(
    pretrain=200, continued=100, align=150, rows=8, prompts=chat_model.NUM_TEXTS, held_out=48,
    new_tokens=chat_model.NEW_TOKENS, evaluations=3, work="runs/benchmarks/fastdraft-chat",
)  # fmt: skip
SEEDS = ("0", "1", "2")
PRETRAIN_LR = 2e-3


class ChatModel(Experiment):
    name, result = chat_model.TARGET, "fastdraft_chat"
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
        return chat_model.texts()

    def answers(self, temperature: float) -> Sequence[Trace]:
        return self._traces("held-out prompts", chat_model.held_out(), (temperature,), 0)

    def stored(self) -> Callable[[Batch], TargetOutputs | None]:
        """The target's distribution, from its stored final states."""
        plan = FeaturesPlan(chat_model.LAYERS)
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
