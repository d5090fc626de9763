"""Whether a model was loaded whole: every tensor of the model from its checkpoint, none made up.

transformers fills what a checkpoint lacks with random numbers, and passes over what the model has
no place for. Here both are refused by name, and so are tensors that are not finite. The weights are
not read a second time: names and dtypes stand in the headers of the files, and values are looked at
where they were loaded.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from trainer.errors import RunFault, UserError
from trainer.files import load_json

# arguments of `from_pretrained`: what it loaded comes back, other shapes too, and is judged here
ACCOUNT: Mapping[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
# dtypes of numbers that need no scale, as safetensors and as torch name them
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PLAIN = {"F64", "F32", "F16", "BF16", *map(str, FLOATS)}
# how libraries say that an allocation failed
NO_MEMORY = (
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
)
# buffers that a model computes and older checkpoints hold
COMPUTED = re.compile(r"rotary_emb\.(\w*inv_freq|cos_cached|sin_cached)$|\.masked_bias$")
# what a quantiser writes beside weights and may go unread, since the weights do not depend on it
ASIDE = re.compile(
    r"\.(input|output|act|activation|q|k|v|kv|prob)_(global_)?(scale|zero_point)(_inv|_\d)?$"
    r"|\.(g_idx|weight_g_idx|weight_shape|weight_format)$"
)
SCALE = re.compile(r"scale|absmax|SCB")
ADAPTER = re.compile(r"^base_model\.model\.|\.base_layer\.|\.lora_[AB]\.")


def check_quantization(key: str, name: str, config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is stored quantised. UserError where transformers does not know how:
    it would read the stored numbers without their scales."""
    stored: Any = getattr(config, "quantization_config", None)
    if not stored:
        return False
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    bitsandbytes = isinstance(stored, dict) and (
        stored.get("load_in_4bit") or stored.get("load_in_8bit")
    )
    if not bitsandbytes and method not in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}:
        raise UserError(
            f"its config.json says quantization_config.quant_method={method!r}, which transformers "
            "does not read",
            key=key,
            value=name,
            remedy="use the checkpoint that is not quantised, or one in a format that it reads, "
            "such as fp8, compressed-tensors, gptq or awq",
        )
    return True


class Report(logging.Filter):
    """Holds back transformers' table of what it did not load: one line says it instead."""

    text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "LOAD REPORT" not in message:
            return True
        self.text = re.sub(r"\x1b\[\d*m", "", message)
        return False


@contextmanager
def accounted(key: str, name: str) -> Iterator[None]:
    """Inside the block, a model is loaded. Raises UserError where transformers cannot put tensors
    together, such as the experts of a layer of which one is missing, and RunFault where the memory
    does not suffice."""
    log, report = logging.getLogger("transformers.modeling_utils"), Report()
    log.addFilter(report)
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if is_out_of_memory(error):
            raise RunFault(
                f"{key}={name}: the memory does not suffice to load it "
                f"({' '.join(str(error).split())[:200]}); free some, or make the target smaller: "
                "model.dtype=bfloat16, model.quantization={quant_method: bitsandbytes, "
                "load_in_8bit: true}, or model.device_map=auto, which spreads it over all GPUs, "
                "the CPU's memory and the disk"
            ) from error
        broken = re.findall(r"^(\S+)\s*\| CONVERSION", report.text, re.MULTILINE)
        if not broken:
            raise
        raise UserError(
            f"the tensors that make up {min(broken)!r} do not fit together: one is missing or has "
            "another shape",
            key=key,
            value=name,
            remedy="download or convert it again",
        ) from error
    finally:
        log.removeFilter(report)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device: only CUDA has an error of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return any(words in said for words in NO_MEMORY)


def check_whole(
    key: str,
    name: str,
    model: PreTrainedModel,
    info: Mapping[str, Any],
    files: Sequence[Path],
    quantised: bool,
) -> None:
    """UserError unless model and checkpoint have the same tensors; prints what is left out.

    `info`: what `from_pretrained` says it did, with `ACCOUNT`. `files`: of the weights, see
    `weight_files`. `quantised`: whether a quantiser reads them.
    """
    kind, prefix = type(model).__name__, f"{model.base_model_prefix}."
    own, stored = model.state_dict(), stored_dtypes(files)

    def place(tensor: str) -> str | None:
        """The name in the model of a tensor of the checkpoint."""
        names = tensor, prefix + tensor, tensor.removeprefix(prefix)
        return next((one for one in names if one in own), None)

    method = getattr(model, "quantization_method", None) if quantised else None
    if method == "bitsandbytes" and all(dtype in PLAIN for dtype in stored.values()):
        raise UserError(
            "config.json says that it is stored quantised, and its weights are not", key=key,
            value=name, remedy="take quantization_config out of its config.json",
        )  # fmt: skip
    _check_dtypes(key, name, stored, {t: own[p] for t in stored if (p := place(t))}, quantised)
    placed = {place(tensor) for tensor in stored}
    # a class may also list what it need not find: right for buffers alone
    listed = _any_of(model._keys_to_ignore_on_load_missing or ("(?!)",))
    missing = set(info["missing_keys"]) | {
        tensor
        for tensor, _ in model.named_parameters()
        if listed.search(tensor) and stored and tensor not in placed
    }
    buffers = {tensor.removeprefix(prefix) for tensor, _ in model.named_buffers()}
    unread = {
        tensor
        for tensor in info["unexpected_keys"]
        if tensor.removeprefix(prefix) not in buffers
        and not COMPUTED.search(tensor)
        and not (quantised and ASIDE.search(tensor))
    }
    unread -= _zero_biases(files, unread)
    shapes = sorted(info["mismatched_keys"])
    if faults := _faults(kind, missing, shapes, unread):
        remedy = _remedy(missing, unread, bool(shapes))
        if name.endswith(".gguf"):
            remedy = "name the folder of the model that it was converted from"
        raise UserError("; ".join(faults), key=key, value=name, remedy=remedy)
    skipped = _any_of([COMPUTED.pattern, *(model._keys_to_ignore_on_load_unexpected or ())])
    aside = {tensor for tensor in stored if place(tensor) is None and skipped.search(tensor)}
    if aside := aside | set(info["unexpected_keys"]):
        print(
            f"{key}={name}: left out, as {kind} has no place for it: {_groups(aside)}",
            flush=True,
        )


def _faults(kind: str, missing: set[str], shapes: list[Any], unread: set[str]) -> list[str]:
    """What is said of a checkpoint with other tensors than a model of class `kind`."""
    faults = []
    if missing:
        faults.append(f"the checkpoint lacks {_named(missing)}")
    if shapes:
        tensor, found, wanted = shapes[0]
        more = f" (and {len(shapes) - 1} more)" if len(shapes) > 1 else ""
        faults.append(
            f"tensor {tensor!r} has shape {list(found)}, by config.json it has {list(wanted)}{more}"
        )
    if unread:
        faults.append(f"{kind} has no place for {_named(unread)}")
    return faults


def _check_dtypes(
    key: str,
    name: str,
    stored: Mapping[str, str],
    placed: Mapping[str, torch.Tensor],
    quantised: bool,
) -> None:
    """UserError for quantised numbers that were read as they are, without their scales.

    `placed`: tensors of the model, by their names in the checkpoint."""
    modules: dict[str, list[str]] = {}
    for tensor in stored:
        modules.setdefault(tensor.rpartition(".")[0], []).append(tensor)
    wrong = []
    for tensor, dtype in stored.items():
        float8 = "F8_E" in dtype or "float8" in dtype
        if quantised:
            beside = modules[tensor.rpartition(".")[0]]
            bare = float8 and not any(SCALE.search(other) for other in beside)
        else:  # masks and positions are whole numbers in the model too
            read = placed[tensor].is_floating_point() if tensor in placed else False
            bare = dtype not in PLAIN and (float8 or read or tensor.endswith("weight"))
        if bare:
            wrong.append(tensor)
    if wrong:
        lacks = "their scales" if quantised else "a quantization_config that says how to read them"
        raise UserError(
            f"it stores {stored[wrong[0]]} numbers without {lacks}: {_named(wrong)}",
            key=key,
            value=name,
            remedy="use the checkpoint that is not quantised, or one whose quantisation "
            "transformers reads",
        )


def check_plain(key: str, name: str, files: Sequence[Path]) -> None:
    """UserError where a head is stored as numbers of one byte, which no head has scales for."""
    stored = stored_dtypes(files)
    wrong = [tensor for tensor, dtype in stored.items() if dtype.startswith(("F8_", "I8", "U8"))]
    if wrong:
        raise UserError(
            f"it stores {stored[wrong[0]]} numbers without their scales: {_named(wrong)}",
            key=key,
            value=name,
            remedy="use the head that is not quantised",
        )


def check_finite(key: str, name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """UserError where a tensor holds NaN or Inf."""
    refuse_not_finite(key, name, not_finite(tensors))


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    return [name for name, values in tensors if not is_finite(values)]


def refuse_not_finite(key: str, name: str, found: Sequence[str]) -> None:
    """UserError where `found`, the result of `not_finite`, names a tensor."""
    if found:
        raise UserError(
            f"NaN or Inf in {_named(found)}",
            key=key,
            value=name,
            remedy="use an earlier checkpoint, or download or convert it again",
        )


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite, in one pass without a copy. Whole numbers are."""
    if isinstance(values, DTensor):
        values = values.to_local()
    if not values.is_floating_point() or not values.numel() or values.is_meta:
        return True
    if values.itemsize == 1:  # numbers of one byte have no order of their own
        return all(bool(part.float().isfinite().all()) for part in values.flatten().split(1 << 20))
    low, high = torch.aminmax(values.detach())  # NaN, where there is one
    return bool(low.isfinite() and high.isfinite())


def loaded_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a loaded model, tied ones once, and the scales of a quantised one. Those
    that lie elsewhere come to the CPU one module at a time, from the disk as for every pass."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
    for path, module in model.named_modules():
        if has_offloaded_params(module):
            with align_module_device(module, torch.device("cpu")):
                yield from module.named_parameters(path, recurse=False)


def weight_files(name: str, revision: str | None) -> list[Path]:
    """The files of a checkpoint that transformers has read; none where they are of another kind."""
    folder = Path(name)
    if not folder.is_dir():  # it was fetched
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (folder / whole).exists():
            return [folder / whole]
        index = folder / f"{whole}.index.json"
        if index.exists():
            parts: dict[str, str] = load_json(index)["weight_map"]
            return sorted({folder / part for part in parts.values()})
    return []


def stored_dtypes(files: Sequence[Path]) -> dict[str, str]:
    """The dtype of each tensor of a checkpoint, from the headers of its files."""
    found: dict[str, str] = {}
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                found |= {tensor: file.get_slice(tensor).get_dtype() for tensor in file.keys()}  # noqa: SIM118
            continue
        try:
            content = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        except RuntimeError:  # torch's format before 2020, which is older than all such dtypes
            continue
        except Exception as error:  # whatever a damaged pickle raises
            raise ValueError(
                f"{path.name}: Weights only load failed, it is damaged or holds more than tensors"
            ) from error
        if not isinstance(content, dict):
            raise ValueError(f"{path.name} holds no table of tensors")
        found |= {t: str(v.dtype) for t, v in content.items() if isinstance(v, torch.Tensor)}
    return found


def _zero_biases(files: Sequence[Path], unread: set[str]) -> set[str]:
    """The biases among `unread` that hold zeros alone, as GPTQ's tools write them for layers that
    have none: they change nothing."""
    found: set[str] = set()
    biases = {tensor for tensor in unread if tensor.endswith(".bias")}
    for path in files if biases else ():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                there = biases.intersection(file.keys())
                found |= {tensor for tensor in there if not file.get_tensor(tensor).any()}
    return found


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"({p})" for p in patterns))


def _named(tensors: Collection[str]) -> str:
    """The number of tensors and one of them, as "3 tensors, such as 'a.weight'"."""
    first = repr(min(tensors))
    return f"tensor {first}" if len(tensors) == 1 else f"{len(tensors)} tensors, such as {first}"


def _groups(tensors: Iterable[str]) -> str:
    """Tensors by the part of the model that they belong to, as "mtp.* (15), x.*.inv_freq (8)"."""
    parts: dict[str, Counter[str]] = {}
    for tensor in tensors:
        pattern = re.sub(r"\.\d+(?=\.)", ".*", tensor)
        part = ".".join(pattern.split("*")[0].split(".")[:2]).rstrip(".")
        parts.setdefault(part, Counter())[pattern] += 1
    shown = []
    for part, patterns in sorted(parts.items()):
        few = patterns if len(patterns) <= 2 else {f"{part}.*": patterns.total()}
        shown += [f"{pattern} ({count})" for pattern, count in sorted(few.items())]
    return ", ".join(shown)


def _remedy(missing: set[str], unread: set[str], shapes: bool) -> str:
    if any(ADAPTER.search(tensor) for tensor in unread):
        return (
            "merge the adapter into the model first (merge_and_unload of peft) and save the result"
        )
    if any(SCALE.search(tensor) for tensor in unread):
        return (
            "its quantisation is not the one that config.json names: use the checkpoint that is "
            "not quantised"
        )
    if missing and unread and (added := _added(min(missing), unread)):
        return f"the names carry {added!r}: rename the tensors, or save the model that is wrapped"
    if missing and not shapes:
        return "download or convert it again, with all of its files"
    return "correct config.json, or save the model together with its own configuration"


def _added(wanted: str, names: Iterable[str]) -> str | None:
    """The parts that one of `names` has beside those of `wanted`, such as "_orig_mod."."""
    parts = wanted.split(".")
    for name in sorted(names):
        longer = name.split(".")
        more = len(longer) - len(parts)
        for i in range(len(parts) + 1 if more > 0 else 0):
            if longer[:i] == parts[:i] and longer[i + more :] == parts[i:]:
                return ".".join(longer[i : i + more]) + "."
    return None
