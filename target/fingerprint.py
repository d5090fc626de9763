"""What identifies a target: its weights, configuration, tokenizer, chat template and EOS set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from target.gguf import is_gguf

FULL_HASH_BYTES = 64 << 20


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end an answer, ascending: those of the generation config and the tokenizer's
    `eos_token`, at which vLLM and SGLang stop. A token that only the chat template writes does not
    end an answer."""
    return eos_ids_of(model.generation_config, tokenizer)


def eos_ids_of(
    generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """The same of a model that is not loaded."""
    own: Any = tokenizer.eos_token_id
    return tuple(sorted({*_generation_eos(generation), *([] if own is None else [own])}))


def _generation_eos(generation: GenerationConfig | None) -> set[int]:
    found: int | list[int] | None = None if generation is None else generation.eos_token_id
    if found is None:
        return set()
    return {found} if isinstance(found, int) else set(found)


def added_eos(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> str:
    """One line where the tokenizer's `eos_token` is not among the ids of the generation config,
    which alone ended an answer in earlier versions; else ""."""
    own: Any = tokenizer.eos_token_id
    named = sorted(_generation_eos(generation))
    if own is None or not named or own in named:
        return ""
    return (
        f"an answer ends at {_named([own], tokenizer)}, the tokenizer's eos_token, as well as at "
        f"{_named(named, tokenizer)} of the generation config, as vLLM and SGLang stop; what was "
        "made while only the latter ended it is refused"
    )


def _named(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return ", ".join(f"{tokenizer.decode([i])!r} ({i})" for i in ids)


def grown_eos(stored: Mapping[str, object], target: Mapping[str, object]) -> str:
    """Why nothing is used that was made with the fingerprint `stored` of a target whose EOS set has
    grown since; "" where it has not grown."""
    before, now = stored.get("eos_ids"), target.get("eos_ids")
    if not (isinstance(before, list) and isinstance(now, list) and set(before) < set(now)):
        return ""
    return (
        f"was made while the target's answers ended at the token ids {before} alone; they end at "
        f"{now}, the tokenizer's eos_token and the ids of the generation config, as servers stop"
    )


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that the tokenizer has."""
    return max(tokenizer.get_vocab().values()) + 1


def _sha(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """The hash of the id-to-token map; it is equal where two tokenizers have the same map."""
    return _sha(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))


def weights_hash(name: str, model: PreTrainedModel) -> str:
    """The hash of the weight files in a folder; for a Hub model its commit. Of files over 64 MiB
    the size and 64 blocks, spread over the file, are hashed."""
    folder = Path(name)
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if is_gguf(name):  # whatever it is called
        files = [folder]
    elif not folder.is_dir():
        return str(getattr(model.config, "_commit_hash", None) or _sha(name))
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{'' if is_gguf(name) else path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= FULL_HASH_BYTES:
                digest.update(file.read())
            else:
                for block in range(64):
                    file.seek(block * (size - 65536) // 63)
                    digest.update(file.read(65536))
    return digest.hexdigest()[:16]


def fingerprint(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos: tuple[int, ...]
) -> dict[str, Any]:
    """What identifies a target. It is stored with all that is derived from the target and compared
    on load."""
    config = {
        k: v
        for k, v in model.config.to_dict().items()
        if k not in ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    }
    return {
        "weights": weights_hash(name, model),
        "config": _sha(config),
        "quantization": str(
            getattr(model.config, "quantized_from", None)
            or getattr(model.config, "quantization_config", None)
        ),
        "tokenizer": tokenizer_hash(tokenizer),
        "chat_template": _sha(getattr(tokenizer, "chat_template", None)),
        "eos_ids": list(eos),
        "vocab_size": model.config.get_text_config().vocab_size,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
