"""GTO: what its trees are worth, what its loss is, what it trains, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch

from data.batches import collate
from data.sampling import Sampling
from drafters.eagle import EagleDrafter, EagleSettings
from eval.tree_reward import TreeScorer
from recipes.gto import Config, Recipe
from tests.heads import randomised
from tests.recipes.test_heads import batch_of, outputs_of
from tests.tiny import VOCAB_SIZE
from trainer.config import UserError

SMALL = {"num_groups": 2, "group_size": 3, "tree": "dynamic:8:3:3"}
EAGLE3 = {"steps": 2, "layers": [0, 1]}


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


def text_rows(target, count=3, length=12):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(4, VOCAB_SIZE, (count, 6 + length), generator=generator).tolist()
    return [row[:6] for row in rows], [row[6:] for row in rows]


def tuned(target, *, moved=True, base="eagle3", **options):
    """At stage gto; `moved`: the drafter is not the reference any more."""
    given = {"base_options": EAGLE3} if base == "eagle3" else {}
    recipe = Recipe(Config(**{"base": base, **SMALL, **given, **options}), target)
    torch.manual_seed(0)
    drafter = randomised(recipe.build([]), 0.1)
    *_, stage = recipe.stages()
    drafter = recipe.enter(stage, drafter, 8)
    recipe.begin(stage, 12)
    recipe.drafter = randomised(drafter, 0.05, 5) if moved else drafter
    return recipe


def texts(target):
    prompts, responses = text_rows(target)
    return collate(prompts, responses, ["target"] * len(prompts))


def terms_of(recipe, batch, step=0):
    terms = recipe.loss(batch, outputs_of(recipe, batch), step).terms
    assert [float(n) for _, n, _ in terms] == recipe.denominators(batch, step)
    return terms


def loss_of(recipe, batch):
    return sum(weight * total / max(float(n), 1) for total, n, weight in terms_of(recipe, batch))


def test_smoke(target):
    recipe = tuned(target)
    loss = loss_of(recipe, texts(target))
    loss.backward()
    print(loss, recipe.loss(texts(target), outputs_of(recipe, texts(target)), 0).metrics)
