"""The anchors that block drafters are trained behind, and what the recipe refuses."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file

import train
from data.batches import Batches, collate
from data.packing import PackedTraces
from recipes import dflash
from recipes.common.block import drawn_anchors
from target.shared_text import TextGroup
from tests.helpers.commands import command, read_jsonl
from tests.recipes.test_heads import batch_of, make, outputs_of, recipe_of
from tests.recipes.test_packed_texts import one_a_row, packed, texts_of
from trainer.errors import UserError

COUNT = 3


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    return texts_of(target, tmp_path_factory.mktemp("traces"))


def by_text(batch, anchors):
    """The places of the anchors in each text."""
    found = []
    for text, (row, first) in enumerate(batch.starts()):
        size = len(batch.prompts[text]) + len(batch.responses[text])
        found.append(anchors[row, first : first + size].nonzero()[:, 0].tolist())
    assert sum(map(len, found)) == int(anchors.sum())
    return found


@pytest.mark.parametrize("packs", [False, True])
def test_so_many_anchors_of_each_text_as_asked_for_where_a_token_follows(packs, target, traces):
    batch = packed(traces).at(1)
    batch = batch if packs else one_a_row(batch)
    drawn = by_text(batch, drawn_anchors(batch, COUNT))
    texts = zip(batch.prompts, batch.responses, strict=True)
    for places, (prompt, response) in zip(drawn, texts, strict=True):
        possible = range(max(1, len(prompt)), len(prompt) + len(response) - 1)
        assert len(places) == min(COUNT, len(possible))
        assert set(places) <= set(possible)
    assert any(places != sorted(places)[:1] for places in drawn)
    every = by_text(batch, drawn_anchors(batch, 1000))
    assert every == by_text(batch, recipe_anchors(batch))


def recipe_anchors(batch):
    """All that decoding can begin a round behind."""
    return torch.nn.functional.pad(batch.supervised(1), (0, 1))


def test_anchors_are_those_of_the_seed_the_batch_and_the_epoch(traces):
    """Whatever was read before, in whatever row and on whatever process."""

    def at(index, seed=0, **options):
        batch = Batches(traces, {"target": 1.0}, 4, seed=seed, **options).at(index)
        return batch, by_text(batch, drawn_anchors(batch, COUNT))

    batch, drawn = at(5)
    assert at(5)[1] == drawn  # a run that goes on there has read no other batch
    halves = [at(5, rank=rank, world=2)[0] for rank in range(2)]
    assert len({tuple(map(tuple, one.responses)) for one in halves}) == 2
    same = dataclasses.replace(batch, index=5 + len(traces))  # the texts in another epoch
    assert by_text(same, drawn_anchors(same, COUNT)) != drawn
    same = dataclasses.replace(batch, seed=1)
    assert by_text(same, drawn_anchors(same, COUNT)) != drawn
    joined = PackedTraces(traces, "target", 64, 3, seed=0).at(2)
    alone = collate(joined.prompts, joined.responses, joined.sources, joined.index)
    assert by_text(joined, drawn_anchors(joined, COUNT)) == by_text(
        alone, drawn_anchors(alone, COUNT)
    )


def test_processes_that_share_texts_draw_the_anchors_of_one(traces, monkeypatch):
    monkeypatch.setattr("target.shared_text.BLOCK", 5)
    batch = Batches(traces, {"target": 1.0}, 4, seed=0).at(0)
    anchors = drawn_anchors(batch, COUNT)
    parts = [batch.shared(TextGroup(part, 2)) for part in range(2)]
    for part in parts:
        assert torch.equal(drawn_anchors(part, COUNT), anchors)
    whole = batch.supervised(2, anchors)
    shares = [part.supervised(2, anchors) for part in parts]
    assert torch.equal(shares[0] | shares[1], whole)
    assert not bool((shares[0] & shares[1]).any())


def test_only_the_blocks_behind_anchors_are_computed_and_trained(target, traces):
    few, batch = make("dflash", target, traces, anchors=2), batch_of(traces)
    sizes = []
    few.drafter.norm.register_forward_hook(lambda own, given, made: sizes.append(made.shape[1]))
    terms = few.loss(batch, outputs_of(few, batch), 0).terms
    assert sizes == [2 * few.drafter.settings.block_size]
    counts = {name: float(term.count) for name, term in terms.items()}
    assert counts == few.denominators(batch, 0)
    assert counts["depth_1_divergence"] == 2 * len(batch.prompts)
    every = make("dflash", target, traces, anchors=0).denominators(batch, 0)
    assert all(counts[name] < every[name] for name in counts)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": [0, 2]}, r"layer id must lie in 0\.\.1"),
        ({"layers": [1, 1]}, "distinct"),
        ({"block_size": 1}, r"method\.block_size must be >= 2"),
        ({"draft_layers": 0}, r"method\.draft_layers must be >= 1"),
        ({"anchors": -1}, r"method\.anchors must be >= 0"),
        ({"mask_token": 100}, r"method\.mask_token must lie in 0\.\.99"),
        ({"mask_token": 50}, r"method\.mask_token must be a special token"),
    ],
)
def test_bad_settings_are_refused(options, says, target, traces):
    with pytest.raises(UserError, match=says):
        make("dflash", target, traces, **options)


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_size", 5), ("causal", True), ("from_anchor", True), ("draft_layers", 2),
     ("mask_token", 2)],
)  # fmt: skip
def test_a_trained_drafter_keeps_its_network(key, value, target, traces):
    usual = recipe_of("dflash", target, draft_layers=5, block_size=8).build(traces)
    with pytest.raises(UserError, match=rf"model\.drafter has {key}=.*, got method\.{key}={value}"):
        plain_recipe(target, usual, **{key: value})
    other = plain_recipe(target, None, **{key: value}).build(traces)
    assert plain_recipe(target, other, **{key: value}).depth == other.max_depth
    assert plain_recipe(target, other).depth == other.max_depth
    with pytest.raises(UserError, match="reads the layers"):
        plain_recipe(target, other, layers=[1])


def test_jetspecs_block_is_causal_and_learns_distributions(target, traces):
    recipe = recipe_of("block_head", target)
    assert recipe.build(traces).settings.causal
    assert recipe.objective.divergence.name == "fkl"


def plain_recipe(target, given, **options):
    """With the defaults of the recipe's `Config`, not those of the tests."""
    return dflash.Recipe(dflash.Config(**options), target, given)


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_goes_on_from_its_second_step_is_the_straight_one(tmp_path, tiny_folder):
    """Every loss and every weight, anchors drawn and texts in rows."""
    words = command(
        tmp_path, tiny_folder("llama", layers=4), "recipe=dflash", "trainer.max_steps=5",
        "trainer.save_every=1", "trainer.log_every=1", "trainer.pack_tokens=64",
        "trainer.batch_size=1", "method.anchors=2", "eval.num_prompts=1", "eval.timing_prompts=0",
        "eval.tree=[]",
    )  # fmt: skip
    words = [word for word in words if not word.startswith("method.draft_hidden_size")]
    run, found = tmp_path / "run", []
    for again in (False, True):
        assert train.main(words) == 0
        rows = [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
        weights = load_file(run / "drafter" / "model.safetensors")
        found.append(([(row["step"], row["loss"], row["grad_norm"]) for row in rows], weights))
        if again:
            break
        (stage,) = run.glob("stages/*")
        for checkpoint in stage.glob("checkpoints/step-*"):
            if int(checkpoint.name.removeprefix("step-")) > 2:
                shutil.rmtree(checkpoint)
        shutil.rmtree(run / "drafter")
        (run / "report.json").unlink()
        (stage / "finished.json").unlink()
    (losses, weights), (later, others) = found
    assert losses == later
    assert len(losses) == 5
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
