"""A target without its weights: what its configuration and tokenizer tell of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from target.fingerprint import eos_ids
from target.folder import check_config, check_folder, check_model, reading
from target.gguf import is_gguf
from target.model import Target


def outline(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Target:
    """The target in a folder, on the Hub or in a GGUF file, with its parameters on the device
    "meta": it has shapes and no numbers. UserError where it cannot be read."""
    key = "model.target"
    check_folder(key, name)
    where: dict[str, Any] = {"pretrained_model_name_or_path": name, "revision": revision}
    if is_gguf(name):
        path = Path(name)
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with reading(f"{key}: cannot read the configuration and the tokenizer of {name!r}"):
        if Path(name).is_dir():
            check_model(key, Path(name))
        config = AutoConfig.from_pretrained(**where, trust_remote_code=trust_remote_code)
        check_config(key, config.to_dict())
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    return Target(
        model.requires_grad_(False).eval(), tokenizer, name, {}, eos_ids(model, tokenizer)
    )
