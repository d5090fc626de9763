"""torch.compile of the layers: the same losses, nothing left behind, a broken backend is said."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

import train
from data.batches import collate
from drafters.eagle import EagleDrafter
from recipes import eagle3
from target import attention
from target.attention import Capability
from tests.eval.test_engine import target_of
from tests.helpers.commands import command, read_jsonl
from tests.helpers.kernels import GPU
from tests.helpers.tiny import tiny_model
from trainer.compiled import compiled
from trainer.config import TrainerConfig
from trainer.errors import UserError
from trainer.loop import Fit

METHOD = {
    "distillspec": ["method.draft_hidden_size=16"],
    "eagle3": ["method.layers=[0,1]", "method.steps=3"],
}


def losses(folder, target, recipe, backend):
    given = (f"recipe={recipe}", f"run.dir={folder / backend}", f"trainer.compile={backend}",
             "trainer.max_steps=3", "trainer.log_every=1", "eval.num_prompts=1",
             "eval.timing_prompts=0", "eval.temperatures=0")  # fmt: skip
    words = [w for w in command(folder, target, *given) if not w.startswith("method.")]
    assert train.main([*words, *METHOD[recipe]]) == 0
    return [row["loss"] for row in read_jsonl(folder / backend / "metrics.jsonl") if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("distillspec", "eager"),
        ("eagle3", "eager"),
        ("eagle3", "inductor"),
    ],
)
def test_compiled_layers_of_drafter_and_target_lose_what_plain_ones_do(
    recipe, backend, tmp_path, tiny_folder, monkeypatch, capsys
):
    monkeypatch.setattr("phases.stage.dev_evaluation", lambda *given, **options: None)
    # live at every step, or nothing of the target is compiled
    monkeypatch.setattr("data.cached_logits.CachedLogits.fits", lambda self: False)
    widths, update = set(), Fit.update

    def watched(self, batches, denominators):
        found = {batch.input_ids.shape[1] for batch, _ in batches}
        widths.update((self.config.compile, self.folder.name, width) for width in found)
        update(self, batches, denominators)

    monkeypatch.setattr(Fit, "update", watched)
    target = tiny_folder("gemma3")
    plain = losses(tmp_path, target, recipe, "null")
    assert "compile layers" not in capsys.readouterr().err
    torch._dynamo.reset()
    counters.clear()
    assert losses(tmp_path, target, recipe, backend) == pytest.approx(plain, rel=1e-5)
    assert "the first steps compile layers too" in capsys.readouterr().err
    assert counters["stats"]["unique_graphs"] >= 2  # of the target and of the drafter
    assert not counters["graph_break"]
    # rows are as long as their longest text, or, to be compiled, as few lengths as will do
    stages = {stage for _, stage, _ in widths}
    assert sum(made == backend for made, _, _ in widths) == len(stages)
    assert sum(made is None for made, _, _ in widths) > len(stages) or recipe == "eagle3"
    torch._dynamo.reset()


def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(attention, "_compiled", functools.partial(attention._compiled, "eager"))
    monkeypatch.setattr(Capability, "here", lambda *where: GPU)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_layers_read_packed_rows_in_one_graph(monkeypatch):
    as_on_a_gpu(monkeypatch)
    target = target_of(tiny_model("llama"))
    rows = [torch.cat([torch.arange(n) for n in ends])[None] for ends in ([9, 7], [3, 8, 12], [30])]

    def read():
        return [
            target.outputs(9 + positions, positions, layers=["final_norm"], logits=False)
            for positions in rows
        ]

    plain = read()
    torch._dynamo.reset()
    counters.clear()
    with compiled("eager", target.model):
        found = read()
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one.hidden["final_norm"], other.hidden["final_norm"])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 3
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("fused_attention", [False, True])
def test_an_epoch_is_compiled_in_few_graphs_without_a_break(fused_attention, monkeypatch):
    """Rows have one of eight lengths. The layer's queries are columns of any number, so that there
    are almost as many shapes as batches, which one graph serves."""
    if fused_attention:
        as_on_a_gpu(monkeypatch)
    target = target_of(tiny_model("llama"))
    recipe = eagle3.Recipe(eagle3.Config(draft_vocab_size=0, layers=[0, 1], steps=2), target)
    drafter, objective = recipe.build([]), recipe.objective
    shapes, step = set(), EagleDrafter._step

    def watched(self, x, residual, positions, keys, *others):
        shapes.add((x.shape, keys.shape))
        return step(self, x, residual, positions, keys, *others)

    monkeypatch.setattr(EagleDrafter, "_step", watched)
    drawn, graphs = np.random.default_rng(0), []
    torch._dynamo.reset()
    counters.clear()
    with compiled("eager", target.model), compiled("eager", drafter.train()):
        for _ in range(24):
            sizes = [(int(n / drawn.uniform(2, 5)), int(n)) for n in drawn.integers(6, 190, 2)]
            prompts = [[5] * of_prompt for of_prompt, _ in sizes]
            responses = [[7] * (n - of_prompt) for of_prompt, n in sizes]
            batch = collate(prompts, responses, ["target"] * 2, 0, range(24, 216, 24))
            layers = objective.target_request(batch, 0).layers
            outputs = target.outputs(
                batch.input_ids, batch.position_ids, layers=layers, logits=False
            )
            output = objective.loss(drafter, batch, outputs, 0, objective.denominators(batch, 0))
            sum(term.total for term in output.terms.values()).backward()
            graphs.append(counters["stats"]["unique_graphs"])
    print(f"{graphs[-1]} graphs for {len(shapes)} shapes of a layer's input: {graphs}")
    assert len(shapes) > 20
    assert graphs[-1] == graphs[11] < 12
    assert not counters["graph_break"]
    torch._dynamo.reset()


class Network(nn.Module):
    compiled_methods = ("double",)

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2))
        self.inner = nn.Module()
        tied = nn.Linear(2, 2)
        self.inner.layers = nn.ModuleList([tied, nn.Linear(2, 2), tied])

    def double(self, x):
        return 2 * x


def test_layers_and_named_methods_are_compiled_and_given_back():
    network = Network()
    own = [network, *network.inner.layers]
    with compiled("eager", network):
        assert "double" in vars(network)
        assert all("forward" in vars(layer) for layer in network.inner.layers)
        assert "forward" not in vars(network.body[0])
        assert torch.equal(network.double(torch.ones(2)), torch.full((2,), 2.0))
    assert not any(name in vars(one) for one in own for name in ("double", "forward"))
    with compiled(None, network):
        assert "double" not in vars(network)


def test_a_backend_that_does_not_work_is_one_line():
    def broken(graph, inputs):
        raise RuntimeError("no compiler\nfound")

    network = Network()
    said = pytest.raises(UserError, match=r"no compiler found.*set it to null")
    with said, compiled(broken, network):
        network.double(torch.ones(2))


def test_an_unknown_backend_is_refused():
    TrainerConfig(compile="inductor")
    with pytest.raises(UserError, match=r"trainer\.compile must be a backend of.*inductor"):
        TrainerConfig(compile="inducter")
