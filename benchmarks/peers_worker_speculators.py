"""Trains an EAGLE-3 head with speculators as `benchmarks.peers` tells it; see there.

    .venv-speculators/bin/python -m benchmarks.peers_worker_speculators job.json

The tool's own command line, model, data set, collation, trainer and checkpoint, on states of the
target that are stored in its own format. Attention is sdpa and the loss eager, since flex attention
and the fused loss want a GPU; the loader reads in the training process.

Patched: the trainer takes a CPU for its device (it stops without an accelerator); the timer of its
steps stays off, which would wait for an accelerator and log; no progress bar; the order of the rows
is ours instead of its sampler's, packed to the same length. The draft is saved once more beside
the checkpoints, in float32.
"""

# pyright: reportMissingImports=false
# speculators lives in an environment of its own

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from speculators.train import cli, trainer
from speculators.train.config import TrainConfig
from speculators.train.data import ArrowDataset, CollateFn
from torch.utils.data import DataLoader
from transformers import AutoConfig

JOB = json.loads(Path(sys.argv[1]).read_text())
OUT = Path(JOB["out"])


class InOrder:
    """The batches as given; stamps the moment in which each is asked for, and the end."""

    def __init__(self) -> None:
        self.stamps: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return len(JOB["batches"])

    def __iter__(self) -> Iterator[list[int]]:
        for indices in [*JOB["batches"], None]:
            self.stamps.append((time.perf_counter(), time.process_time()))
            if indices is not None:
                yield indices


ORDER = InOrder()


def loaders(**options: object) -> tuple[DataLoader, None]:
    """Make the loader of `_setup_dataloader` without workers, in our order."""
    dtype = options["hidden_states_dtype"]
    data = ArrowDataset(
        options["total_seq_len"], options["data_path"], transfer=options["transfer"],
        on_missing=options["on_missing"], hidden_states_dtype=dtype,
    )  # fmt: skip
    collate = CollateFn(
        options["total_seq_len"], options["hidden_size"], options["num_target_layers"], dtype,
        options["preprocess"],
    )  # fmt: skip
    return DataLoader(data, batch_sampler=ORDER, collate_fn=collate), None


class OnCPU(trainer.Trainer):
    def setup_trainer(self) -> None:
        self.device_type = "cpu"
        super().setup_trainer()

    def run_training(self) -> None:
        super().run_training()
        if JOB["draft"]:
            # its checkpoints are bfloat16: that would round the draft and its copy of the embedding
            self.model.save_pretrained(OUT / "draft")
            row = self.train_loader.dataset[JOB["check"]]
            save_file(unrolled_logits(self.model, row), OUT / "check.safetensors")


@torch.no_grad()
def unrolled_logits(
    model: torch.nn.Module, row: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Compute the draft's logits [columns, V] at every step of the unroll; the last j columns of
    step j have no token to read."""
    found: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, i, output: found.append(output[0]))
    length = len(row["input_ids"]) - 1
    collate = CollateFn(
        length, model.hidden_size, len(JOB["layers"]), torch.float32, cli.shift_batch
    )
    batch = collate([row])
    del batch["error_records"], batch["verifier_last_hidden_states"]
    model(**batch, ttt_steps=JOB["unroll"])
    handle.remove()
    return {str(j): logits[: length - j].contiguous() for j, logits in enumerate(found)}


def write_rows(folder: Path) -> None:
    """The table that its preparation would write; the states lie beside it already. The mask marks
    the same logit indices as ours: the token there and the next one are the response's."""
    table: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for start, ids in json.loads(Path(JOB["rows"]).read_text()):
        table["input_ids"].append(ids)
        table["loss_mask"].append([start <= i < len(ids) - 1 for i in range(len(ids))])
        table["seq_len"].append(len(ids))
    data = Dataset.from_dict(table)
    data.set_format("torch")
    data.save_to_disk(folder)


def write_decoder(path: Path) -> None:
    """One layer of the target's; made of flags, it would have a sliding window of 2048, which our
    loader refuses although no text is as long."""
    config = json.loads(Path(JOB["target"], "config.json").read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": 1, "pad_token_id": None}))


def write_vocabulary(folder: Path) -> dict[str, Path]:
    """The flags that name a reduced vocabulary: where its tokens stand, and which they are."""
    if not JOB["kept"]:
        return {}
    kept = np.array(JOB["kept"])
    known = np.zeros(AutoConfig.from_pretrained(JOB["target"]).vocab_size, bool)
    known[kept] = True
    tables = {"d2t": kept - np.arange(len(kept)), "t2d": known}
    for name, table in tables.items():
        np.save(folder / f"{name}.npy", table)
    return {f"{name}-path": folder / f"{name}.npy" for name in tables}


def main() -> None:
    states, table, decoder = Path(JOB["states"]), OUT / "table", OUT / "decoder.json"
    write_rows(table)
    write_decoder(decoder)
    trainer.get_local_rank = lambda: "cpu"
    trainer._StepTimer.reset = lambda self, enabled: None
    trainer.tqdm = lambda loader, **options: loader
    cli.Trainer = OnCPU
    cli.create_train_val_loaders = loaders
    flags = {
        "verifier-name-or-path": JOB["target"],
        "data-path": table,
        "hidden-states-path": states,
        "save-path": OUT / "checkpoints",
        "speculator-type": "eagle3",
        "draft-config": decoder,
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
        "hidden-states-dtype": "float32",
        "total-seq-len": JOB["tokens"],
        "on-missing": "raise",
        "num-workers": 0,
        "epochs": 1,
        "ttt-steps": JOB["unroll"],
        "optimizer": "adamw",
        "lr": JOB["lr"],
        "weight-decay": JOB["weight_decay"],
        "scheduler-type": "linear",
        "scheduler-warmup-steps": JOB["warmup"],
        "scheduler-total-steps": len(JOB["batches"]),
        "seed": JOB["seed"],
        "mask-token-id": 1,
        **write_vocabulary(OUT),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    # it counts the layers that a state has passed
    words += ["--target-layer-ids", *(str(layer + 1) for layer in JOB["layers"])]
    for norm in ("norm_before_fc", "norm_before_residual", "norm_output"):  # on by default
        words.append(f"--{'' if norm in JOB['norms'] else 'no-'}{norm.replace('_', '-')}")
    cli.main(TrainConfig.resolve(words))
    (OUT / "stamps.json").write_text(json.dumps(ORDER.stamps))


if __name__ == "__main__":
    main()
