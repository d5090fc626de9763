"""Causal language models in GGUF files, dequantised by transformers into ordinary modules."""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from target.folder import check_config, reading
from target.loading import ACCOUNT, check_finite, check_whole, loaded_tensors
from trainer.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trainer.sections import ModelConfig


def is_gguf(name: str | Path) -> bool:
    return str(name).endswith(".gguf")


def target_gguf(model: ModelConfig) -> Path | None:
    """The GGUF file of the target, where it has one."""
    named = model.target if is_gguf(model.target) else model.target_gguf
    return None if named is None else Path(named)


def load_gguf(
    file: Path, key: str, dtype: torch.dtype, device: torch.device | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer; `quantized_from` in the model's configuration says how it was stored.
    Raises UserError by the name of `key` for a file that is not there, an architecture that
    transformers does not read, and a file without a tokenizer or a token that ends an answer."""
    if not file.is_file():
        raise UserError(f"{key}: the file {file} does not exist")
    reader = read(file, key)
    eos = eos_ids(reader)
    missing = None
    if reader.get_field("tokenizer.ggml.tokens") is None:
        missing = "holds no tokenizer (tokenizer.ggml.tokens)"
    elif not eos:
        missing = "names no token that ends an answer (tokenizer.ggml.eos_token_id)"
    if missing is not None:
        raise UserError(
            f"{key}: {file} {missing}: name the folder of the model that it was converted from"
        )
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    # its bar is drawn into a pipe as well
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    whole = "name the folder of the model that it was converted from"
    with reading(f"{key}: transformers cannot read {file}", remedy=whole), quiet:
        config = AutoConfig.from_pretrained(**where)
        check_config(f"{key}: {file}", config.to_dict())
        tokenizer = AutoTokenizer.from_pretrained(**where)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **where, config=config, dtype=dtype, **ACCOUNT
        )
    model, info = loaded
    unread = [*info["unexpected_keys"], *unread_tensors(reader, model)]
    check_whole(key, str(file), model, info | {"unexpected_keys": unread}, (), quantised=False)
    check_finite(key, str(file), loaded_tensors(model))
    model.generation_config.eos_token_id = eos
    # an ordinary model from here on, which can be moved and saved
    for owner, name in (
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model.config, "quantization_config"),
    ):
        if name in vars(owner):
            delattr(owner, name)
    model.config.quantized_from = quantization(reader)
    model.to(device)  # type: ignore[arg-type] - transformers hides its arguments
    return model.eval(), tokenizer


def read(file: Path, key: str) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(f"{key}={file} needs the package gguf: pip install gguf") from error
    with reading(f"{key}: {file} is damaged, or no GGUF file"):
        return GGUFReader(file)


def unread_tensors(reader: GGUFReader, model: PreTrainedModel) -> list[str]:
    """Names of the tensors in the file that transformers passes over, as it does without a word.
    Experts, several of which make up one tensor of the model, are not among them."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = reader.fields["general.architecture"].contents()
    known = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        return []
    names = get_tensor_name_map(known[architecture], model.config.num_hidden_layers)
    prefix = f"{model.base_model_prefix}."
    read = {
        names.get_name(name, try_suffixes=(".weight", ".bias"))
        or names.get_name(name.removeprefix(prefix), try_suffixes=(".weight", ".bias"))
        for name in model.state_dict()
        if ".experts." not in name
    }
    if None in read:  # the architecture is put together in a way that only transformers knows
        return []
    return [
        tensor.name
        for tensor in reader.tensors
        if tensor.name not in read
        and "_exps." not in tensor.name
        # factors of rotary embeddings that scale nothing
        and not (tensor.name.startswith("rope_") and bool((tensor.data == 1).all()))
    ]


def quantization(reader: GGUFReader) -> str:
    """Types of the file's tensors and how many are of each, such as "gguf: 61 F32, 210 Q4_1"."""
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    return "gguf: " + ", ".join(f"{count} {name}" for name, count in sorted(types.items()))


def rounds_as(file: Path) -> torch.dtype:
    """The dtype that rounds as coarsely as llama.cpp does with the file's weights: it brings the
    other factor of a product to float16 for such weights, and to eight bits for quantised ones,
    which is bfloat16's rounding."""
    kinds = {tensor.tensor_type.name for tensor in read(file, "model.target_gguf").tensors}
    if kinds <= {"F32"}:
        return torch.float32
    return torch.float16 if kinds <= {"F32", "F16"} else torch.bfloat16


def eos_ids(reader: GGUFReader) -> list[int]:
    """Tokens that end a text or a turn. Where the file names none, transformers would take a
    default of the architecture, which is another token in most vocabularies."""
    fields = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot"))
    found = (reader.get_field(name) for name in fields)
    return sorted({int(field.contents()) for field in found if field is not None})
