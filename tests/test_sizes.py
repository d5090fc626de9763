"""What a training step takes at the size of an 8B target, counted on a CPU: bytes, operations."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import types

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from data.batches import collate
from data.packing import PackedTraces
from data.shares import TextShares
from data.traces import Trace
from drafters.block import BlockDrafter
from drafters.block_settings import BlockSettings
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings
from drafters.layers import layer_config
from drafters.round import Budget
from eval.offline import OfflineEvaluator
from recipes import dflash, distillspec, eagle3
from target.outputs import TargetOutputs
from target.padding import MOST_TOKENS
from target.sampling import Sampling
from target.shared_text import TextGroup
from tests.helpers.counting import VOCABULARY, Counting, target_of_8b
from tests.helpers.kernels import chosen_as_on_a_gpu
from trainer.config import TrainerConfig
from trainer.logits import LogitsSummary
from trainer.optimizer import make_optimizer

GB = 10**9
# A chunk of a loss has 883 positions. The 110 of a CPU take less memory, and minutes to count.
CHUNK = 2**27
SLOW = pytest.mark.slow
KEPT_TEACHER = 16 * GB  # on a GPU it is kept where it fits
WIDTHS = (
    VOCABULARY,
    32_000,
    3 * 4096,
    5 * 4096,
    12_288,
)  # of tensors that do not grow with the text


def test_bytes_are_counted_from_when_a_storage_is_made_until_nobody_holds_it():
    with Counting() as counts:
        states = torch.zeros(10, 25, requires_grad=True)
        made = states.exp()  # holds its result for the gradient
        view = made[:5]
        assert counts.live == 2 * 1000
        total = made.sum()
        del made, view
        assert counts.live == 2 * 1000 + 4
        total.backward()
        del total
        assert counts.live == 2 * 1000  # the gradient
        assert counts.peak >= 3 * 1000
        assert int(torch.arange(5).sum()) == 10


def batch_of(length, packed):
    """One row: a text of `length` tokens or eight ever longer ones, a quarter of each prompt."""
    ends = [n * length // 36 for n in (0, 1, 3, 6, 10, 15, 21, 28, 36)] if packed else [0, length]
    sizes = [after - before for before, after in itertools.pairwise(ends)]
    prompts = [[1] * max(1, size // 4) for size in sizes]
    responses = [[2] * (size - len(own)) for size, own in zip(sizes, prompts, strict=True)]
    if not packed:
        return collate(prompts, responses, ["target"])
    traces = [trace_of(*pair) for pair in zip(prompts, responses, strict=True)]
    return PackedTraces(traces, "target", length, 1, seed=0).at(0)


def trace_of(prompt, response):
    facts = ("target", "", "", 0, 0, 1.0, 0, 1.0, 0, "eos", "", "")
    return Trace(prompt, response, *facts, lookahead_ids=[2] * 4)


class HeadReads(Counting):
    """Counts the bytes of output matrices, and of gradients by them, that products and casts
    read."""

    read = 0

    def _see(self, func, args, kwargs, result):
        super()._see(func, args, kwargs, result)
        if func.name().partition(".")[0] in ("aten::mm", "aten::addmm", "aten::_to_copy"):
            given = [one for one in args if isinstance(one, torch.Tensor)]
            self.read += sum(one.nbytes for one in given if one.numel() == VOCABULARY * 4096)


@contextlib.contextmanager
def counting(kind=Counting):
    with pytest.MonkeyPatch.context() as patch, chosen_as_on_a_gpu(), kind() as counts:
        patch.setattr("trainer.logits.CHUNK_ELEMENTS", CHUNK)
        # what a trial with numbers that have only a shape would find is kept for later tests
        patch.setattr("trainer.chunked.adds_products_in_float32", lambda device: True)
        patch.setattr("recipes.common.target_logits.HOLD_BYTES", KEPT_TEACHER)
        yield counts


def eagle3_of(target, drafted=None):
    """Recipe and head with all tokens, or with the first `drafted` ones."""
    recipe = eagle3.Recipe(eagle3.Config(draft_vocab_size=0), target)
    kept = None if drafted is None else torch.arange(drafted)
    settings = Eagle3Settings(list(recipe.captures), target.hidden_size)
    drafter = Eagle3Drafter.build(target, settings, kept=kept, layer_from_target=False)
    return recipe.objective, drafter


def dflash_of(target):
    """As published: blocks of 16, five layers, 512 anchors of each text."""
    recipe = dflash.Recipe(dflash.Config(block_size=16, anchors=512), target)
    layers = layer_config(target.model.config)
    layers.num_hidden_layers = recipe.config.draft_layers
    drafter = BlockDrafter(BlockSettings(list(recipe.captures), 5, 16), layers, target)
    return recipe.objective, drafter


def distillspec_of(target):
    recipe = distillspec.Recipe(distillspec.Config(), target)
    recipe.distillation.begin(1)
    return recipe.distillation, recipe.build([])


def take_step(target, objective, drafter, batch, counts, checkpointed, summary=False):
    """A step as the loop makes it under bfloat16, counted once the optimiser has its states.
    `summary`: of the logits, as it is stored beside states."""
    optimizer = make_optimizer(drafter, TrainerConfig())
    for group in optimizer.param_groups:
        group["foreach"] = True  # what torch chooses on a GPU
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    if checkpointed:
        drafter.gradient_checkpointing_enable()
    drafter.train()
    counts.peak, counts.products, counts.attention = counts.live, 0, 0
    counts.shapes.clear()
    request = objective.target_request(batch, 0)
    outputs = target.outputs(
        batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits,
        project_later=True, group=batch.group,
    )  # fmt: skip
    if summary:
        outputs.summary = LogitsSummary(
            torch.zeros(batch.input_ids.shape), torch.zeros_like(batch.input_ids)
        )
    with torch.autocast("cpu", torch.bfloat16):
        output = objective.loss(drafter, batch, outputs, 0, objective.denominators(batch, 0))
    sum(one.weight * one.total / one.count for one in output.terms.values()).backward()
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def one_of(processes):
    """Inside the block, this process is the first of so many, which send it nothing."""
    if processes > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    yield
    if processes > 1:
        dist.destroy_process_group()


@functools.cache
def counts_of_a_step(
    recipe, length, packed, checkpointed, drafted=None, processes=1, summary=False
):
    """`processes`: that share the text; counted is the first of them."""
    with counting() as counts, one_of(processes):
        target = target_of_8b()
        if recipe == "eagle3":
            made = eagle3_of(target, drafted)
        else:
            made = {"dflash": dflash_of, "distillspec": distillspec_of}[recipe](target)
        batch = batch_of(length, packed)
        if processes > 1:
            source = types.SimpleNamespace(at=lambda index: batch)
            batch = TextShares(source, TextGroup(0, processes)).at(0)
        take_step(target, *made, batch, counts, checkpointed, summary)
    how = (
        f"{length} tokens, packed {packed}, checkpointed {checkpointed}, {drafted or 'all'} drafted"
    )
    print(f"{recipe}, {how}: peak {counts.peak / GB:.1f} GB")
    return counts


def grows_twice(shape, length, processes=1):
    """Whether a tensor has entries by the square of the text's length, in two dimensions or one, or
    of the part of it that one of so many processes computes."""
    own = [n for n in shape if n not in WIDTHS]
    part = length // processes
    return sum(n > part // 2 for n in own) > 1 or math.prod(own) >= length * part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "packed"),
    [("eagle3", False), ("eagle3", True), ("distillspec", True), ("dflash", False)],
)
def test_a_step_makes_no_tensor_of_length_squared(recipe, packed):
    """At 32,768 tokens, by target and drafter."""
    length = 2**15
    shapes = counts_of_a_step(recipe, length, packed, True).shapes
    assert any(length in shape for shape in shapes)
    assert not [shape for shape in shapes if grows_twice(shape, length)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "packed", "checkpointed", "bound"),
    [(2**11, False, False, 48), (2**13, False, False, 80), (2**13, True, False, 80),
     (2**15, False, True, 141), (2**15, True, True, 141)],
)  # fmt: skip
def test_an_eagle3_step_at_8b_fits_a_gpu(length, packed, checkpointed, bound):
    """Target in bfloat16, float32 weights of the head over all tokens, and AdamW included. With a
    gradient of the output matrix for each depth the first would take 49.7 GB."""
    counts = counts_of_a_step("eagle3", length, packed, checkpointed)
    assert counts.peak < bound * GB, counts.largest()


@pytest.mark.slow
def test_a_text_of_131072_tokens_fits_devices_that_share_it():
    """Head over 32,000 of the tokens, as for a target of that size."""
    counts = counts_of_a_step("eagle3", 2**17, False, True, 32_000, processes=8)
    assert counts.peak < 141 * GB, counts.largest()
    assert not [shape for shape in counts.shapes if grows_twice(shape, 2**17, 8)]


@pytest.mark.slow
def test_a_draft_model_trains_on_131072_tokens_that_devices_share():
    """Queries, activations and losses are shared too, and the target's pass over the text."""
    counts = counts_of_a_step("distillspec", 2**17, False, True, processes=8)
    assert counts.peak < 141 * GB, counts.largest()
    assert not [shape for shape in counts.shapes if grows_twice(shape, 2**17, 8)]


@pytest.mark.slow
def test_processes_that_share_a_text_share_its_products():
    """The first of four computes a quarter of them, but for the keys of a head's layer."""
    alone, shared = (
        counts_of_a_step("eagle3", 2**13, False, False, 32_000, processes=processes)
        for processes in (1, 4)
    )
    share = shared.products / alone.products
    print(f"of four that share a text, one computes {share:.3f} of the products")
    assert 0.24 < share < 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "packed", "checkpointed", "bound"),
    [(2**11, False, False, 80), (2**13, False, False, 80), (2**15, True, True, 141)],
)
def test_a_distillspec_step_at_8b_fits_a_gpu(length, packed, checkpointed, bound):
    counts = counts_of_a_step("distillspec", length, packed, checkpointed)
    assert counts.peak < bound * GB, counts.largest()


@pytest.mark.slow
@pytest.mark.parametrize(("length", "checkpointed"), [(2**13, False), (2**15, True)])
def test_a_dflash_step_at_8b_fits_a_gpu(length, checkpointed):
    """Of 80 GB: 512 anchors are as many blocks of 16 in a text of any length. No mask has their
    slots beside the text."""
    counts = counts_of_a_step("dflash", length, False, checkpointed)
    assert counts.peak < 80 * GB, counts.largest()
    assert any(512 * 16 in shape for shape in counts.shapes)
    if length > 512 * 16:
        assert not [shape for shape in counts.shapes if {512 * 16, length} <= set(shape)]


@pytest.mark.slow
@pytest.mark.parametrize("length", [2**11, 2**13, pytest.param(2**15, marks=SLOW)])
def test_an_evaluation_at_8b_fits_a_gpu(length):
    """Of as many texts as are read together, in chunks that the memory of 80 GB leaves room for."""
    with counting() as counts, pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.logits.free_bytes", lambda device: 80 * GB - counts.live)
        target = target_of_8b()
        _, drafter = eagle3_of(target)
        text = trace_of([1] * (length // 4), [2] * (length - length // 4))
        texts = [text] * max(1, MOST_TOKENS // length)
        evaluator = OfflineEvaluator(target, texts, Sampling(1.0), Budget(4))
        counts.peak, counts.real_below = counts.live, 2**20
        evaluator(drafter.eval())
    print(f"evaluation of {len(texts)} texts of {length} tokens: peak {counts.peak / GB:.1f} GB")
    assert counts.peak < 80 * GB, counts.largest()
    positions = {math.prod(shape[:-1]) for shape in counts.shapes if shape[-1:] == (VOCABULARY,)}
    positions.discard(4096)  # the output matrix, transposed
    assert 1000 < max(positions) <= 2**29 // VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize(("drafted", "summary"), [(None, False), (32_000, False), (32_000, True)])
def test_an_eagle3_step_computes_the_target_and_every_head_once(drafted, summary):
    """The operations that its formulas need, as a share of all that matrix products and attention
    take. With a summary of the target's logits, those of the drafted tokens only."""
    length, width, groups, inner, steps = 2**13, 4096, 1024, 12_288, eagle3.Config().steps
    options = ([drafted] if drafted else []) + [1, True] * summary
    counts = counts_of_a_step("eagle3", length, False, False, *options)
    batch = batch_of(length, packed=False)
    positions = [int(batch.supervised(depth).sum()) for depth in range(1, steps + 1)]
    columns, layer = positions[0], 2 * width**2 + 2 * width * groups + 3 * width * inner
    # weights times positions: twice that forward, and twice that for each of two gradients
    drafting = 3 * (2 * width * groups * 2) * (length + (steps - 1) * columns)
    drafting += 3 * (2 * width**2 + width**2 + 3 * width * inner) * steps * columns
    drafting += 3 * width * (drafted or VOCABULARY) * sum(positions)
    drafting += 2 * 3 * width**2 * length  # the captured states have no gradient
    rows = drafted if summary else VOCABULARY
    frozen = 36 * layer * length + width * rows * positions[0]
    # scores and what they weigh, forward 2 and backward 5 products
    pairs = sum(range(length - columns, length))
    scores = 2 * width * (36 * length**2 // 2 * 2 + 7 * steps * pairs)
    useful = 2 * (drafting + frozen) + scores
    share = useful / (counts.products + counts.attention)
    how = f"{drafted or 'all'} drafted, summary {summary}"
    print(f"useful share of all operations, {how}: {share:.3f}")
    assert 0.9 <= share <= 1.001


@pytest.mark.slow
def test_an_eagle3_loss_reads_its_head_less_often_than_it_computes():
    """With chunks as large as a GPU of 80 GB has room for. A position needs three products with the
    output matrix, 3.7 GFLOP, in whose time an H100 reads 12 MB."""
    with counting(HeadReads) as counts, pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.logits.free_bytes", lambda device: 80 * GB - counts.live)
        target = target_of_8b()
        objective, drafter = eagle3_of(target)
        batch, width = batch_of(2**13, packed=False), target.hidden_size
        states = torch.empty(*batch.input_ids.shape, width, dtype=torch.bfloat16)
        outputs = TargetOutputs(dict.fromkeys(objective.target_request(batch, 0).layers, states))
        counts.read = 0
        with torch.autocast("cpu", torch.bfloat16):
            objective.loss(drafter, batch, outputs, 0, objective.denominators(batch, 0))
    positions = sum(int(batch.supervised(depth).sum()) for depth in range(1, objective.depth + 1))
    print(f"the heads' matrices: {counts.read / positions / 1e6:.1f} MB read for each position")
    assert counts.read < 12e6 / 4 * positions
