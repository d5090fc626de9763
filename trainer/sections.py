"""The sections of the configuration that belong to every command: `run`, `model` and `trainer`.

Each section checks its own keys. The comments of its keys are what `train.py --help` prints.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trainer.checks import SEEDS, SIDE_BY_SIDE, require_one_of
from trainer.errors import UserError, require
from trainer.keys import Rule, check_rules, key

# of trainer.*, see `Section.FREE`
FREE_SETTINGS = ("resume", "save_every", "log_every", "keep_checkpoints", "wandb")


class Section:
    """A section of the configuration. `NAME`: its name; `FREE`: keys that change no number of a
    run, so that they may change when it is resumed.

    Of a stored configuration, which somebody else may have written (`phases.received`): `HERE`,
    keys of the machine or the command that it was written on, whose values are never taken (paths,
    addresses, permission to run code); `NAMES`, keys whose values are taken where they are no path
    and no address; `NEEDED`, those of both without which a command would do something else."""

    NAME: ClassVar[str] = "method"
    FREE: ClassVar[tuple[str, ...]] = ()
    HERE: ClassVar[tuple[str, ...]] = ()
    NAMES: ClassVar[tuple[str, ...]] = ()
    NEEDED: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_rules(self.NAME, self)  # type: ignore[arg-type]


@dataclass
class RunConfig(Section):
    NAME: ClassVar[str] = "run"
    FREE: ClassVar[tuple[str, ...]] = ("dir", "stage")
    HERE: ClassVar[tuple[str, ...]] = ("dir",)
    # folder of the run; null: runs/<recipe>-<hash of what the configuration says>
    dir: str | None = None
    # of the training: which prompts, what is drawn as their responses, fresh weights, the order of
    # the text, dropout
    seed: int = key(0, ge=0, le=SEEDS - 1)
    stage: str | None = None  # train up to this stage of the recipe and stop, without a report


DEVICE_MAPS = ("auto", "balanced", "sequential")  # of one process


@dataclass
class ModelConfig(Section):
    NAME: ClassVar[str] = "model"
    HERE: ClassVar[tuple[str, ...]] = ("trust_remote_code", "target_gguf", "parts")
    NAMES: ClassVar[tuple[str, ...]] = ("target", "drafter")
    NEEDED: ClassVar[tuple[str, ...]] = NAMES
    target: str = "assets/toy/target"  # folder or Hub id of the model that is to be served faster
    target_revision: str | None = None  # commit, branch or tag of the target on the Hub
    # GGUF file of the target, for llama.cpp, where model.target is its folder
    target_gguf: str | None = None
    # folder or Hub id of the drafter that training starts from; null: the recipe builds a fresh one
    drafter: str | None = None
    drafter_revision: str | None = None  # commit, branch or tag of the drafter on the Hub
    # of the target; auto: float32 on a CPU, the checkpoint's own dtype elsewhere
    dtype: str = key("auto", one_of=("auto", "float32", "bfloat16", "float16"))
    # where the target's layers lie; null: all on the device of the process; auto, balanced,
    # sequential or {module: device}: over the devices of one process, as transformers does it;
    # fsdp2: sharded over all processes
    device_map: Any = None
    # what of the target is loaded; head: all but its layers, for a recipe that trains on states of
    # data.features_engine or of a store, whose report then has no decoded rows
    parts: str = key("all", one_of=("all", "head"))
    # most memory by device, for model.device_map=auto, such as {0: 20GiB, cpu: 64GiB}
    max_memory: dict[Any, str] = field(default_factory=dict)
    # quantises the target while it is loaded; takes what a checkpoint's quantization_config holds,
    # such as {quant_method: bitsandbytes, load_in_8bit: true}
    quantization: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False  # run Python code that comes with a model

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target", "drafter"):
            given, place = getattr(self, f"{name}_revision"), getattr(self, name)
            if given is not None and place is not None and os.path.isdir(place):
                raise UserError(
                    f"model.{name}_revision={given} is of the Hub, and {place} is a folder here: "
                    "leave it out"
                )
        if isinstance(self.device_map, dict):
            known = all(
                re.fullmatch(r"\d+|cpu|disk|cuda:\d+", str(d)) for d in self.device_map.values()
            )
            rule = "name the device of each module: the number of a GPU, cuda:<number>, cpu or disk"
            require(bool(self.device_map) and known, "model.device_map", rule, self.device_map)
        elif self.device_map is not None:
            require_one_of("model.device_map", self.device_map, (*DEVICE_MAPS, "fsdp2"))
        if self.max_memory and self.device_map not in DEVICE_MAPS:
            raise UserError(
                f"model.max_memory={self.max_memory} is for model.device_map=auto, got "
                f"{self.device_map}"
            )
        if self.quantization and "quant_method" not in self.quantization:
            raise UserError(
                f"model.quantization must name its quant_method, got {self.quantization}: for "
                "example {quant_method: bitsandbytes, load_in_8bit: true}"
            )
        if self.parts == "head":
            for name in ("device_map", "quantization"):
                rule = "be left out with model.parts=head, which loads no layer"
                require(not getattr(self, name), f"model.{name}", rule, getattr(self, name))
        if self.quantization and self.device_map == "fsdp2":
            raise UserError(
                "model.device_map=fsdp2 shards weights that are not quantised: leave out "
                "model.quantization"
            )


@dataclass
class TrainerConfig(Section):
    NAME: ClassVar[str] = "trainer"
    FREE: ClassVar[tuple[str, ...]] = FREE_SETTINGS
    HERE: ClassVar[tuple[str, ...]] = ("resume", "wandb")
    max_steps: int = key(300, ge=1)  # optimiser steps of a stage
    batch_size: int = key(32, ge=1, le=SIDE_BY_SIDE)  # sequences per process per micro-step
    # length of a row that holds several whole texts, which do not see each other; 0: one text a row
    pack_tokens: int = key(0, ge=0, le=SIDE_BY_SIDE, note="0: off")
    gradient_accumulation_steps: int = key(1, ge=1)  # micro-steps per optimiser step
    # processes that share the positions of each text, for texts that are too long for one device;
    # 1: every process trains texts of its own
    context_parallel_size: int = key(1, ge=1)
    # adamw; muon makes the updates of hidden matrices orthogonal and leaves embeddings, output
    # heads, norms and biases to AdamW
    optimizer: str = key("adamw", one_of=("adamw", "muon"))
    lr: float = key(1e-3, gt=0, lt=math.inf)  # highest learning rate of AdamW
    # highest learning rate of Muon, about every singular value of an update of a square matrix
    muon_lr: float = key(0.05, gt=0, lt=math.inf)
    # shape of the learning rate over the steps; hold_cosine holds it first, then lets it fall
    lr_schedule: str = key("hold_cosine", one_of=("constant", "linear", "cosine", "hold_cosine"))
    # steps over which the learning rate rises from 0
    lr_warmup_steps: int = key(0, Rule("lie in 0..trainer.max_steps"))
    # share of trainer.max_steps that hold_cosine holds the rate for
    lr_hold_share: float = key(0.5, ge=0, le=1)
    lr_min_ratio: float = key(0.1, ge=0, le=1)  # last learning rate over the highest one
    weight_decay: float = key(0.0, ge=0)  # of matrices; AdamW's and Muon's
    adam_beta2: float = key(0.999, ge=0, lt=1)  # of AdamW
    max_grad_norm: float = key(1.0, gt=0)  # gradients are scaled down to this norm
    # rank of adapters that are trained on model.drafter and merged at the end; 0: train its weights
    lora_rank: int = key(0, ge=0, le=SIDE_BY_SIDE, note="0: off")
    lora_alpha: float = key(32.0, gt=0)  # scale of the adapters, divided by their rank
    # in which the drafter computes; its weights stay in float32. auto: fp32 on a CPU, bf16 on a GPU
    # that has it, where products that stay in float32 are rounded to TF32
    precision: str = key("auto", one_of=("auto", "fp32", "bf16"))
    gradient_checkpointing: bool = False  # compute layers again in the backward pass: less memory
    # backend of torch.compile, such as inductor; null: do not compile
    compile: str | None = key(None, Rule("be a backend of torch.compile"))
    # continue from the newest checkpoint of the run folder, or never do so
    resume: str = key("auto", one_of=("auto", "never"))
    eval_every: int = key(100, ge=1)  # steps between evaluations on held-out training text
    save_every: int = key(100, ge=1)  # steps between checkpoints
    log_every: int = key(10, ge=1)  # steps between rows of metrics.jsonl
    # newest checkpoints that stay on disk beside the best one; if the newest is damaged, the run
    # resumes from the one before it
    keep_checkpoints: int = key(2, ge=1)
    # log to Weights & Biases, to the project that WANDB_PROJECT names, else to draftsmith
    wandb: str = key("off", one_of=("off", "offline", "online"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile is not None:
            from torch.compiler import list_backends  # takes a second

            names = list_backends(exclude_tags=())
            if self.compile not in names:  # which there are depends on the installation
                raise UserError(
                    f"trainer.compile must be a backend of torch.compile, got {self.compile!r}; "
                    f"available: {', '.join(names)}"
                )
        rule = f"lie in 0..{self.max_steps} (trainer.max_steps)"
        require(0 <= self.lr_warmup_steps <= self.max_steps, "trainer.lr_warmup_steps", rule,
                self.lr_warmup_steps)  # fmt: skip
