"""What a training step costs on a device, counted on a CPU: how often it waits for one."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from tests.commands import command, own_words, write_jsonl
from trainer.chunked import OutputHead, chunked_divergence
from trainer.divergence import DIVERGENCES
from trainer.loop import Fit

STEPS = 4
# operators whose result, or its size, the host needs to go on
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal",
         "aten._unique2", "aten.unique_consecutive", "aten.unique_dim")  # fmt: skip
INDEXED = ("aten.index", "aten.index_put", "aten.index_put_")  # where an index is a mask
CHUNKED = ("trainer.chunked", "recipes.specdecpp")


class Waits(TorchDispatchMode):
    """Counts operators for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().replace("::", ".").partition(".")[2]
        name = "aten." + name.partition(".")[0]
        masks = name in INDEXED and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        if name in WAITS or masks:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "recipe", ["distillspec", "eagle", "eagle3", "fastdraft", "hydrapp", "medusa", "medusa2"]
)
def test_a_step_waits_equally_often_whatever_its_texts_and_chunks(
    tmp_path, tiny_folder, monkeypatch, recipe
):
    """Steps have texts of other lengths, and every second one has chunks of a few positions."""
    by_stage: dict[object, list[tuple[int, dict[str, int]]]] = defaultdict(list)
    plain = Fit.update

    def update(self, batches, denominators):
        for module in CHUNKED:
            size = 2**24 if self.counters.step % 2 else 600
            monkeypatch.setattr(f"{module}.CHUNK_ELEMENTS", size)
        width = batches[0][0].input_ids.shape[1]
        with Waits() as waits:
            plain(self, batches, denominators)
        by_stage[self.objective].append((width, dict(waits.found)))

    monkeypatch.setattr(Fit, "update", update)
    rows = [{"prompt": "Add 1 and 2. " * n, "response": f"{n}."} for n in (1, 3, 2, 4)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "What is 3 times 3? "}])
    words = command(
        tmp_path, tiny_folder("llama"), f"recipe={recipe}", f"trainer.max_steps={STEPS}",
        "eval.temperatures=0", "eval.num_prompts=1", "eval.timing_prompts=0",
        "data.features=live", "trainer.batch_size=1",
    )  # fmt: skip
    if recipe != "distillspec":
        words = [word for word in words if not word.startswith("method.")]
    words += own_words(recipe, tmp_path)
    if recipe == "eagle3":  # the defaults collide on two layers
        words.append("method.layers=[0,1]")
    assert train.main(words) == 0
    assert by_stage
    for steps in by_stage.values():
        assert len(steps) >= STEPS
        _, *later = steps  # the first one may set things up
        assert all(found == later[0][1] for _, found in later), steps
    assert len({width for steps in by_stage.values() for width, _ in steps}) > 1


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_loss_in_chunks_waits_for_no_device(name, kept, monkeypatch):
    """Nor does its backward pass. Whether it is sound is known when its number is read."""
    monkeypatch.setattr("trainer.chunked.shows_numbers_at_once", lambda device: False)
    states, teacher = torch.randn(7, 4, requires_grad=True), torch.randn(7, 10 if kept else 5)
    weight, ids = torch.randn(5, 4, requires_grad=True), torch.arange(0, 10, 2)
    head, labels = OutputHead(weight, kept=ids if kept else None), torch.zeros(7, dtype=torch.long)
    monkeypatch.setattr("trainer.chunked.CHUNK_ELEMENTS", 30)
    with Waits() as waits:
        divergence = DIVERGENCES[name]()
        chunked_divergence(divergence, states, head, teacher.__getitem__, labels).total.backward()
    assert not waits.found
