"""A target without its weights: what its configuration and tokenizer tell of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from target.causal_lm import configured, reading_model
from target.fingerprint import eos_ids, fingerprint
from target.folder import check_config, check_folder
from target.gguf import is_gguf
from target.model import Target
from target.vocabulary import check_template

KEY = "model.target"


def outline(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    whole: bool = True,
) -> Target:
    """The target in a folder, on the Hub or in a GGUF file, with its parameters on the device
    "meta": it has shapes and no numbers. UserError where it cannot be read.

    Its fingerprint is that of the target loaded with this `dtype` on this `device`. It is empty
    where that cannot be known without the weights: of a GGUF file, of a quantised checkpoint, and
    of one that does not name its dtype. `whole`: all files of its weights must be there."""
    check_folder(KEY, name, whole)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    generation = None
    with reading_model(KEY, name):
        if is_gguf(name):
            path = Path(name)
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
            config, quantised = AutoConfig.from_pretrained(**where), True
            check_config(KEY, config.to_dict())
            tokenizer = AutoTokenizer.from_pretrained(**where)
        else:
            config, tokenizer, quantised = configured(name, KEY, **common)
            with contextlib.suppress(OSError):  # none: it follows from the configuration
                generation = GenerationConfig.from_pretrained(name, **common)
        wanted = config.dtype if dtype == "auto" else getattr(torch, dtype)
        if dtype == "auto" and torch.device(device).type == "cpu":
            wanted = torch.float32
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=wanted or torch.float32, trust_remote_code=trust_remote_code
            )
    if generation is not None:
        model.generation_config = generation
    check_template(name, model, tokenizer)
    model.requires_grad_(False).eval()
    eos, known = eos_ids(model, tokenizer), wanted is not None and not quantised
    facts = fingerprint(name, model, tokenizer, eos) if known else {}
    return Target(model, tokenizer, name, facts, eos, parts="none")
