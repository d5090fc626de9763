"""What the process that tests/helpers/warm.py forks has imported: all that a command may."""

import importlib
import pkgutil
from pathlib import Path

import accelerate.commands.launch  # noqa: F401
import torch.distributed.run  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from data import toy

ROOT = Path(__file__).resolve().parents[2]
for room in ("data", "drafters", "eval", "phases", "recipes", "target", "trainer"):
    for module in pkgutil.walk_packages([str(ROOT / room)], f"{room}."):
        importlib.import_module(module.name)
for split in ("train", "eval"):  # parses modules of Python once
    toy.sample(toy.DOMAINS, split, 1, 0)
