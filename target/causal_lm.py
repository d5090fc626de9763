"""Loads a causal language model and its tokenizer from a folder, the Hub or a GGUF file."""

from __future__ import annotations

import contextlib
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from target.devices import Loading
from target.folder import check_config, check_folder, check_model, reading
from target.gguf import is_gguf, load_gguf
from target.loading import (
    ACCOUNT,
    accounted,
    check_finite,
    check_quantization,
    check_whole,
    loaded_tensors,
    weight_files,
)
from trainer.errors import UserError

TEMPLATE_S = 20

if not sys.stderr.isatty():
    transformers_logging.disable_progress_bar()


def load_causal_lm(
    name: str,
    key: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    spread: Loading | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (eval mode) and tokenizer of a local folder or Hub id. Raises UserError, by `key`, also
    where the checkpoint is not the whole model (`target.loading`), and RunFault where the memory
    does not suffice.

    dtype "auto": float32 on CPU (half precision is emulated there), the checkpoint's own elsewhere.
    `spread`: see `target.devices.spread`; the layers of `device_map` "cpu" are left to the caller
    to check for NaN, since each process reads its own part of them.
    """
    check_folder(key, name)
    if dtype == "auto" and torch.device(device).type == "cpu":
        dtype = "float32"
    if is_gguf(name):
        if spread:
            raise UserError(
                f"{key}={name} is dequantised on one device: leave out model.device_map and "
                "model.quantization"
            )
        wanted = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        with accounted(key, name):
            model, tokenizer = load_gguf(Path(name), key, wanted, device)
        _try_template(key, name, tokenizer)
        return model, tokenizer
    given: Loading = {} if spread is None else spread
    if trust_remote_code:
        print(f"model.trust_remote_code=true: code that comes with {name} may run here", flush=True)
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    with reading_model(key, name):
        config, tokenizer, quantised = configured(name, key, **common)
        if quantised and given.get("device_map") == "cpu":
            raise UserError(
                f"model.device_map=fsdp2 shards weights that are not quantised, those of "
                f"{name} are: use auto"
            )
        # straight to its device: every process would hold the model in the host's memory, and one
        # that is quantised cannot be moved once it is loaded
        if quantised or not given:
            given = {"device_map": {"": str(device)}, **given}
        with accounted(key, name):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name, config=config, dtype=dtype, **common, **given, **ACCOUNT
            )
        model, info = loaded
        commit = getattr(config, "_commit_hash", None) or revision
        check_whole(key, name, model, info, weight_files(name, commit), quantised)
    if given.get("device_map") != "cpu":
        check_finite(key, name, loaded_tensors(model))
    return model.eval(), tokenizer


def reading_model(key: str, name: str) -> AbstractContextManager[None]:
    """Inside of it, what transformers says of a folder or a Hub id becomes a UserError."""
    return reading(f"{key}: cannot load {name!r} as a causal language model with its tokenizer")


def configured(
    name: str, key: str, *, revision: str | None, trust_remote_code: bool
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase, bool]:
    """The configuration and the tokenizer of a model that is not a GGUF file, and whether its
    weights are stored quantised. Raises UserError for what can be known to fail without them."""
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    _refuse_adapter(key, name, revision)
    if Path(name).is_dir():
        check_model(key, Path(name))
    else:
        check_config(key, PreTrainedConfig.get_config_dict(name, revision=revision)[0])
    config = AutoConfig.from_pretrained(name, **common)
    quantised = check_quantization(key, name, config)
    tokenizer = AutoTokenizer.from_pretrained(name, **common)
    tokenizer("a")  # settings of its own that no text can be read with
    _try_template(key, name, tokenizer)
    return config, tokenizer, quantised


def _try_template(key: str, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """UserError where a word is not rendered in time: a chat template is a program, which its
    sandbox stops from all but running for ever. One that fails is refused where it is used."""
    rendering = threading.Thread(target=_render_word, args=(tokenizer,), daemon=True)
    rendering.start()
    rendering.join(TEMPLATE_S)
    if rendering.is_alive():
        raise UserError(
            f"its chat template has not rendered one word within {TEMPLATE_S} s",
            key=key,
            value=name,
            remedy="take a checkpoint whose chat_template.jinja you know",
        )


def _render_word(tokenizer: PreTrainedTokenizerBase) -> None:
    with contextlib.suppress(Exception):
        word = [{"role": "user", "content": "a"}]
        tokenizer.apply_chat_template(word, tokenize=False, add_generation_prompt=True)


def _refuse_adapter(key: str, name: str, revision: str | None) -> None:
    """UserError for a folder with an adapter, which transformers would put around its base
    model."""
    if find_adapter_config_file(name, revision=revision):
        raise UserError(
            "it holds an adapter, not a model",
            key=key,
            value=name,
            remedy="merge it into its base model (merge_and_unload of peft) and save that",
        )
