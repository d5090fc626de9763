"""Captured decoding forwards, on a tape in place of a GPU: what eager ones give, and no more."""

from __future__ import annotations

import pytest
import torch

from target.cache import CachedModel
from target.graphs import BEFORE_CAPTURE, Weights
from target.nodes import place_tree
from target.sampling import Sampling
from tests.helpers.tape import decoding_as_on_a_gpu
from tests.helpers.tiny import EOS, VOCAB_SIZE, prompts_of, tiny_model
from tests.target.test_decode import LENGTHS, requests_for, responses

GPU, OTHER, HOST = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


@pytest.mark.parametrize(
    ("devices", "sharded", "captured"),
    [({GPU}, False, True), ({GPU}, True, False), ({GPU, OTHER}, False, False),
     ({GPU, torch.device("meta")}, False, False), ({HOST}, False, False)],
)  # fmt: skip
def test_models_that_lie_whole_on_one_gpu_are_captured(devices, sharded, captured):
    assert Weights(frozenset(devices), sharded).captured == captured


def test_on_a_cpu_nothing_is_captured():
    cached = CachedModel(tiny_model("llama"))
    cached.begin(1, 32)
    assert cached.graphs is None


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0)], ids=["T=0", "T=1"])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mistral", "qwen3_moe"])
def test_plain_decoding_gives_the_same_text(name, batch_size, sampling, monkeypatch):
    """Ten prompts: rows are refilled and dropped; the number of visible slots grows."""
    monkeypatch.setattr("target.cache.FEWEST_SLOTS", 16)
    model = tiny_model(name)
    requests = requests_for(prompts_of(LENGTHS), sampling)
    options = {"batch_size": batch_size, "eos_ids": (EOS, 7, 8), "max_new_tokens": 32}
    usual = responses(model, requests, **options)
    with decoding_as_on_a_gpu() as tapes:
        found = responses(model, requests, **options)
    assert found == usual
    assert sum(tape.graphs for tape in tapes) > 1


class Steps:
    """Two caches of one model that read the same tokens: one eager, one captured."""

    def __init__(self, name, rows=2, capacity=64):
        model = tiny_model(name)
        self.both = CachedModel(model), CachedModel(model)
        self.generator = torch.Generator().manual_seed(0)
        self.length = torch.tensor([20, 13, 17][:rows])
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids, and a copy of them
        prompts = torch.randint(4, VOCAB_SIZE, (rows, 20), generator=self.generator)
        for cached in self.both:
            cached.begin(rows, capacity)
            cached.forward(prompts, torch.arange(20).expand(rows, -1), used=20, first=0)
        self.both[0].graphs = None

    def __call__(self, count=1, *, tree=False, layers=(), **options):
        """Logits and states of both."""
        first = self.length.unsqueeze(1)
        ids = torch.randint(4, VOCAB_SIZE, (len(first), count), generator=self.generator)
        self.given.append((ids, ids.clone()))
        positions, place = first + torch.arange(count), None
        if tree:  # the first node has one child, all others hang on the committed text
            ancestors = torch.eye(count - 1, dtype=torch.bool).expand(len(first), -1, -1).clone()
            ancestors[:, 1, 0] = True
            depths = ancestors.sum(-1)
            place = place_tree(self.length, ancestors, depths)
            positions = place.positions
        options = {"used": int(self.length.max()) + count, "tree": place} | options
        results = []
        for cached in self.both:
            found = {}
            logits = cached.forward(ids, positions, layers=layers, found=found, **options)
            assert list(found) == list(layers)
            results.append([logits, *found.values()])
        self.length = self.length + 1
        return results


def assert_same(results):
    for usual, replayed in zip(*results, strict=True):
        torch.testing.assert_close(usual, replayed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@torch.inference_mode()
def test_forwards_of_several_kinds_take_turns(name):
    """Each has a graph of its own, by shapes and by numbers that a graph cannot change."""
    kinds = [
        {}, {"count": 4}, {"count": 4, "logits_to_keep": 1}, {"count": 4, "tree": True},
        {"count": 5, "tree": True}, {"used": 64}, {"layers": (0,)}, {"layers": ("final_norm", 1)},
    ]  # fmt: skip
    with decoding_as_on_a_gpu() as tapes:
        steps = Steps(name, capacity=128)
        for _ in range(BEFORE_CAPTURE + 4):
            for kind in kinds:
                assert_same(steps(**{"used": 100, **kind}))
    assert [tape.graphs for tape in tapes] == [len(kinds)]


@torch.inference_mode()
def test_inputs_and_results_stay_when_their_graph_runs_again():
    with decoding_as_on_a_gpu():
        steps = Steps("llama")
        for _ in range(BEFORE_CAPTURE):
            steps(layers=(1,))
        kept = [steps(layers=(1,)) for _ in range(3)]
    for results in kept:
        assert_same(results)
    assert all(torch.equal(ids, copied) for ids, copied in steps.given)


@torch.inference_mode()
def test_graphs_go_with_the_buffers_that_they_read():
    with decoding_as_on_a_gpu() as tapes:
        steps = Steps("llama", rows=3)
        for rows in ([0, 1, 2], [2, 1, 0], [1, 2]):  # the first two have the same shapes
            rows = torch.tensor(rows)
            for cached in steps.both:
                cached.keep(rows)
            steps.length = steps.length[rows]
            for _ in range(BEFORE_CAPTURE + 2):
                assert_same(steps())
    assert [tape.graphs for tape in tapes] == [1, 1, 1]


@torch.inference_mode()
def test_prompts_and_refilled_rows_are_not_captured():
    with decoding_as_on_a_gpu() as tapes:
        cached = CachedModel(tiny_model("llama"))
        cached.begin(2, 64)
        ids, positions = torch.full((2, 8), 5), torch.arange(8).expand(2, -1)
        for _ in range(BEFORE_CAPTURE + 2):
            cached.forward(ids, positions, used=8, first=0)
            cached.forward(ids[:1], positions[:1], used=8, first=0, rows=torch.tensor([1]))
            cached.forward(ids, positions, used=8, logits_to_keep=torch.tensor([3, 5]))
    assert not tapes


def test_forwards_with_a_gradient_are_not_captured():
    with decoding_as_on_a_gpu() as tapes, torch.no_grad():
        steps = Steps("llama")
        for _ in range(BEFORE_CAPTURE + 2):
            assert_same(steps())
    assert not tapes


def test_a_model_that_waits_for_the_device_decodes_without_graphs_and_says_so_once():
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("eager")  # which asks what experts there are tokens for
    requests = requests_for(prompts_of(LENGTHS[:3]))
    usual = responses(model, requests)
    with decoding_as_on_a_gpu() as tapes:
        words = "Qwen3MoeForCausalLM decodes without CUDA graphs.*nonzero waits for the device"
        with pytest.warns(UserWarning, match=words):
            found = responses(model, requests)
        assert found == usual
        assert responses(model, requests) == usual  # a second warning would be an error
    assert [tape.graphs for tape in tapes] == [0]
