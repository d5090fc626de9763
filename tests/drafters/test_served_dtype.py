"""A drafter is measured in the dtype in which an engine loads it: the target's."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import torch

import train
from drafters.causal_lm import CausalLMDrafter
from drafters.served_dtype import in_served_dtype
from drafters.training_free.lookup import PromptLookup
from eval.measure import Bench
from target.model import Target
from tests.helpers.commands import command


def test_weights_are_in_the_targets_dtype_inside_the_block_alone(tiny_target, tiny_folder):
    target = tiny_target("llama")
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    half = Target.load(str(tiny_folder("llama")), dtype="bfloat16")
    with contextlib.suppress(KeyError), in_served_dtype([drafter, PromptLookup()], half):
        assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
        assert all(b.dtype != torch.bfloat16 for b in drafter.buffers())
        raise KeyError
    after = drafter.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with in_served_dtype([drafter], target):
        assert all(p.data_ptr() == after[n].data_ptr() for n, p in drafter.named_parameters())


RECIPES = ("distillspec", "medusa2", "hydrapp", "eagle", "eagle3", "dflash", "specdecpp")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_report_beside_a_target_in_bfloat16(tmp_path, tiny_folder, recipe, monkeypatch):
    seen = []
    replayed = Bench.replayed

    def watched(bench, name, drafter, *rest):
        if name != "target" and isinstance(drafter, torch.nn.Module):
            seen.extend(p.dtype for p in drafter.drafting_parameters())
        return replayed(bench, name, drafter, *rest)

    monkeypatch.setattr(Bench, "replayed", watched)
    words = command(
        tmp_path, tiny_folder("llama"), f"recipe={recipe}", "model.dtype=bfloat16",
        "eval.temperatures=[0,1]",
    )  # fmt: skip
    if recipe != "distillspec":
        words = [word for word in words if not word.startswith("method.")]
    if recipe == "eagle3":  # the defaults collide on two layers
        words.append("method.layers=[0,1]")
    assert train.main(words) == 0
    assert set(seen) == {torch.bfloat16}
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    after = [row for row in report["results"] if row["drafter"] == "after"]
    assert after
    assert all(math.isfinite(row["tokens_per_round"]) for row in after)
