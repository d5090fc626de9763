"""torch.compile of the layers: the same losses, nothing left behind, a broken backend is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import train
from tests.commands import command, read_jsonl
from trainer.compiled import compiled
from trainer.config import TrainerConfig, UserError
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


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("distillspec", "eager"),
        ("eagle3", "eager"),
        pytest.param("eagle3", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_of_drafter_and_target_lose_what_plain_ones_do(
    recipe, backend, tmp_path, tiny_folder, monkeypatch
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
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    assert losses(tmp_path, target, recipe, backend) == pytest.approx(plain, rel=1e-5)
    assert counters["stats"]["unique_graphs"] >= before + 2  # of the target and of the drafter
    # rows are as long as their longest text, or, to be compiled, as few lengths as will do
    stages = {stage for _, stage, _ in widths}
    assert sum(made == backend for made, _, _ in widths) == len(stages)
    assert sum(made is None for made, _, _ in widths) > len(stages) or recipe == "eagle3"
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
