"""Training at the size of an 8B target on a CPU: floating point numbers that have only a shape.

Integers are real, so that masks, indices and counts are those of a run; tensors of floating point
numbers have a shape, a dtype and a storage of a size, and no content. A flag computed from such
numbers, that a loss is sound for example, reads as true.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary
from transformers import Qwen3Config, Qwen3ForCausalLM

from target.attention import BLOCK
from target.model import Target

aten = torch.ops.aten
FLEX = (flex_attention, flex_attention_backward)
SDPA = aten._scaled_dot_product_flash_attention_for_cpu
VOCABULARY = 151_936


class Counting(TorchDispatchMode):
    """Inside the block, counts what operators take.

    `live`, `peak`: bytes of storages that somebody holds, now and at most; `shapes`: of all results
    that are no single number; `products`, `attention`: floating point operations, a product and a
    sum each, of matrices and of scores. `real_below`: tensors of fewer floating point numbers are
    real when they are made, so that numpy can read them; whatever is computed from shapes alone is
    not written to them.
    """

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.products = self.attention = self.real_below = 0
        self.shapes: set[tuple[int, ...]] = set()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages = WeakIdKeyDictionary()
        self._held: dict[str, int] = defaultdict(int)
        self._at_peak: dict[str, int] = {}

    def __enter__(self) -> Counting:
        self._plain = torch.nn.Module._apply
        torch.nn.Module._apply = _apply  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.nn.Module._apply = self._plain  # type: ignore[method-assign]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(isinstance(one, FakeTensor) for one in given):
            result = self._of_shapes(func, args, kwargs, given)
        elif given:
            result = func(*args, **kwargs)
        else:
            result = self._made(func, args, kwargs)
        self._see(func, args, kwargs, result)
        return result

    def _of_shapes(self, func, args, kwargs, given):
        if func is aten._local_scalar_dense.default:
            return True if given[0].dtype == torch.bool else 1.0
        if func is aten.allclose.default:
            return True
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0].fill_(True) if args[0].dtype == torch.bool else args[0]
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            args = (args[0], _numbers(args[1]), *args[2:])
        with self.fake:
            return func(*args, **kwargs)

    def _made(self, func, args, kwargs):
        """What an operator makes of no tensor, of whatever dtype."""
        with self.fake:
            result = func(*args, **kwargs)
        known = not isinstance(result, torch.Tensor) or not result.is_floating_point()
        small = known or result.numel() < self.real_below
        return func(*args, **kwargs) if small else result

    def _see(self, func, args, kwargs, result) -> None:
        packet = getattr(func, "overloadpacket", func)
        if func in FLEX:
            mask = next(one for one in args if isinstance(one, tuple) and len(one) > 5)
            self.attention += _of_blocks(args[0], mask) * (5 if func is FLEX[1] else 2) // 2
        elif packet is SDPA:
            causal = kwargs.get("is_causal") or (len(args) > 4 and args[4])
            self.attention += sdpa_flop_count(*(x.shape for x in args[:3])) // (2 if causal else 1)
        elif packet in flop_registry:
            # addmm's `out_dtype` stands where the formula has the shape of the result
            given = [one for one in args if not isinstance(one, torch.dtype)]
            self.products += flop_registry[packet](*given, **kwargs, out_val=result)
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self.shapes.add(tuple(one.shape))
                self._hold(one.untyped_storage(), f"{func} {tuple(one.shape)} {one.dtype}")
        if self.live > self.peak:
            self.peak, self._at_peak = self.live, dict(self._held)

    def _hold(self, storage: torch.UntypedStorage, name: str) -> None:
        if storage not in self._storages:
            size = self._storages[storage] = storage.nbytes()
            weakref.finalize(storage, self._add, name, -size)
            self._add(name, size)

    def _add(self, name: str, size: int) -> None:
        self.live += size
        self._held[name] += size

    def largest(self, count: int = 12) -> str:
        """What was held at the peak, by the operator that made it."""
        found = sorted(self._at_peak.items(), key=lambda pair: -pair[1])[:count]
        return "\n".join(f"{size / 1e9:7.2f} GB {name}" for name, size in found)


def _of_blocks(queries: torch.Tensor, mask: tuple) -> int:
    """Operations of attention over the blocks that a mask lists, as `BlockMask.as_tuple` has it."""
    _, _, masked, _, whole, *_ = mask
    heads, width = queries.shape[1], queries.shape[3]
    return 4 * int(masked.sum() + whole.sum()) * BLOCK**2 * heads * width


@dataclass
class Words:
    """A tokenizer that has a vocabulary and nothing else."""

    size: int = VOCABULARY

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.size)}


def target_of_8b() -> Target:
    """A target in bfloat16 with the shape of Qwen3-8B, made inside of `Counting`."""
    config = Qwen3Config(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, intermediate_size=12_288, vocab_size=VOCABULARY, dtype=torch.bfloat16,
        max_position_embeddings=40_960, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).bfloat16().eval().requires_grad_(False)
    return Target(model, Words(), "8B", {}, (0,))


def _numbers(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices with a mask as the numbers it selects, which are known, unlike what it selects of."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        masked = index is not None and index.dtype == torch.bool
        found += index.nonzero(as_tuple=True) if masked else [index]
    return found


def _apply(module: torch.nn.Module, fn: Callable, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply`, which cannot swap a parameter without content that somebody refers to."""
    for child in module.children():
        child._apply(fn)
    for owned in (module._parameters, module._buffers):
        for name, one in owned.items():
            with torch.no_grad():
                made = one if one is None else fn(one)
            if made is not one:
                parameter = isinstance(one, torch.nn.Parameter)
                owned[name] = torch.nn.Parameter(made, one.requires_grad) if parameter else made
    return module
