"""On one GPU: the same tokens, losses and states as on a CPU, and whole runs in half precision.

    python -m pytest -m gpu

Kernels of a GPU round differently, so values agree to a tolerance. Greedy text is that of
transformers' own `generate` on the same GPU.
"""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch

import train
from data.batches import collate
from drafters.round import Budget
from drafters.trees.table import parse_shape
from eval.engine import SpeculativeDecoder
from eval.policies.table import make_budget
from target.cache import CachedModel
from target.decode import Request
from target.graphs import Weights
from target.model import Target
from target.sampling import Sampling, row_key
from tests.eval.test_offline import drafter_of
from tests.helpers.commands import command, own_words
from tests.helpers.tiny import assert_same_greedy, generated, perturbed, prompts_of
from trainer.chunked import chunked_divergence
from trainer.divergence import DIVERGENCES
from trainer.logits import OutputHead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
RECIPES = ["distillspec", "fastdraft", "medusa", "hydrapp", "eagle", "eagle3", "dflash", "osd"]


@pytest.fixture
def target(tiny_folder):
    return Target.load(str(tiny_folder("llama")), dtype="float32", device="cuda")


def test_states_are_those_of_a_cpu(target, tiny_folder):
    ids = torch.tensor(prompts_of([24, 24]))
    usual = Target.load(str(tiny_folder("llama")), dtype="float32")
    layers = (0, "final_norm")
    here = target.outputs(ids.cuda(), layers=layers)
    there = usual.outputs(ids, layers=layers)
    for layer in layers:
        assert torch.allclose(here.hidden[layer].cpu(), there.hidden[layer], rtol=1e-3, atol=1e-4)


def test_random_numbers_of_tokens_are_those_of_a_cpu():
    batch = collate([[1, 2], [3]], [[4, 5, 6], [7, 8]], ["target"] * 2, index=3)
    assert torch.equal(batch.to("cuda").uniform("anchors").cpu(), batch.uniform("anchors"))


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("vocabulary", [64, 8192])  # the larger one goes through torch.compile
def test_losses_and_gradients_are_those_of_a_cpu(name, vocabulary):
    g = torch.Generator().manual_seed(0)
    states, weight = torch.randn(50, 16, generator=g), torch.randn(vocabulary, 16, generator=g)
    logits = 2 * torch.randn(50, vocabulary, generator=g)
    labels = torch.randint(vocabulary, (50,), generator=g)
    found = []
    for device in ("cpu", "cuda"):
        own, matrix = (x.to(device, copy=True).requires_grad_() for x in (states, weight))
        teacher = logits.to(device)
        loss = chunked_divergence(
            DIVERGENCES[name](), own, OutputHead(matrix), lambda span, t=teacher: t[span],
            labels.to(device), chunk_positions=16,
        )  # fmt: skip
        loss.total.backward()
        found.append([x.detach().cpu() for x in (loss.values, own.grad, matrix.grad)])
    for here, there in zip(*found, strict=True):
        assert torch.allclose(here, there, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_text_is_that_of_generate(target, batch_size):
    prompts = prompts_of([5, 17, 9, 30])
    drafter = drafter_of(perturbed(target.model, 0.02), target).eval()
    decoder = SpeculativeDecoder(
        CachedModel(target.model), drafter, sampling=Sampling(0.0), budget=make_budget("fixed", 3),
        eos_ids=target.eos_ids, max_new_tokens=24, batch_size=batch_size,
    )  # fmt: skip
    requests = [Request(p, row_key(0, p, i), Sampling(0.0), i) for i, p in enumerate(prompts)]
    rows = sorted(decoder.run(requests), key=lambda row: row.request.tag)
    assert sum(one.emitted for row in rows for one in row.rounds) > len(rows)
    for prompt, row in zip(prompts, rows, strict=True):
        expected = generated(target.model, prompt, len(row.response_ids))
        assert_same_greedy(target.model, prompt, row.response_ids, expected)


@pytest.mark.parametrize("tree", [None, "dynamic:6:3:2"])
def test_captured_forwards_give_what_eager_ones_do(target, tree, monkeypatch):
    """Answers of one prompt, so that no row is dropped and the graphs are there to be counted."""
    budget = make_budget("fixed", 3) if tree is None else Budget.of(parse_shape(tree))
    drafter, texts = drafter_of(perturbed(target.model, 0.02), target).eval(), []
    request = Request(prompts_of([9])[0], 0, Sampling(0.0), 0)
    for captured in (True, False):
        monkeypatch.setattr(Weights, "captured", captured)
        cached = CachedModel(target.model)
        decoder = SpeculativeDecoder(
            cached, drafter, sampling=Sampling(0.0), budget=budget, eos_ids=(), max_new_tokens=120,
            batch_size=1,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* without CUDA graphs")
            (answer,) = decoder.run([request])
        texts.append(answer.response_ids)
        assert bool(cached.graphs and cached.graphs.graphs) == captured
        assert bool(drafter.cached().graphs and drafter.cached().graphs.graphs) == captured
    assert_same_greedy(target.model, request.prompt_ids, *texts)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("given", [(), ("trainer.pack_tokens=128",)], ids=["ragged", "packed"])
def test_a_run_in_half_precision_ends_with_a_report(tmp_path, tiny_folder, recipe, given):
    if given and recipe in ("fastdraft", "osd"):
        pytest.skip("its texts are not packed")
    words = command(
        tmp_path, tiny_folder("llama"), f"recipe={recipe}", "trainer.precision=bf16",
        "eval.temperatures=[0,1]", *given,
    )  # fmt: skip
    if recipe != "distillspec":
        words = [word for word in words if not word.startswith("method.")]
    words += own_words(recipe, tmp_path)
    if recipe == "eagle3":  # the defaults collide on two layers
        words.append("method.layers=[0,1]")
    assert train.main(words) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    after = [row for row in report["results"] if row["drafter"] == "after"]
    assert after
    assert all(math.isfinite(row["tokens_per_round"]) for row in after)
