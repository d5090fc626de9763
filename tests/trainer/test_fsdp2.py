"""FSDP2's groups, and what processes send each other. Numbers: `test_placements.py`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint as recompute

from phases.exits import end
from tests.helpers.commands import TWO, finish, start
from trainer.config import TrainerConfig
from trainer.errors import UserError
from trainer.fsdp2 import ASKED, FSDP2, precision_of, take_over
from trainer.optimizer import make_optimizer


@pytest.mark.parametrize(
    ("precision", "cuda", "micro_steps", "sent"),
    [("fp32", True, 1, None), ("bf16", False, 1, torch.bfloat16), ("bf16", True, 2, None),
     ("auto", False, 1, None)],
)  # fmt: skip
def test_gradients_are_sent_in_the_precision_of_the_training(precision, cuda, micro_steps, sent):
    config = TrainerConfig(precision=precision, gradient_accumulation_steps=micro_steps)
    policy = precision_of(config, cuda)
    assert (policy.param_dtype, policy.reduce_dtype) == (None, sent)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [("fsdp_offload_params", "more processes"),
     ("fsdp_activation_checkpointing", r"trainer\.gradient_checkpointing=true")],
)  # fmt: skip
def test_an_option_of_the_launch_file_that_would_be_passed_over_is_refused(
    option, remedy, monkeypatch
):
    monkeypatch.setenv(ASKED, "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(option.upper(), "true")
    with pytest.raises(UserError, match=f"{option} must be false, got true: .*{remedy}"):
        take_over()
    monkeypatch.setenv(ASKED, "true")
    monkeypatch.setenv(option.upper(), "false")
    take_over()


class Layered(nn.Module):
    """Layers, one of them called twice, and a head that is read and not called."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleList([nn.Linear(4, 7, bias=False)])

    def forward(self, ids):
        x = self.embed(ids)
        for layer in (*self.layers, self.layers[1]):
            made = recompute(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = torch.tanh(made)
        return x @ self.heads[0].weight.T


@pytest.fixture
def process():
    """A group of one process, whose collectives run."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("checkpointed", "optimizer", "fused"),
    [(False, "adamw", False), (True, "adamw", True), (False, "muon", False), (False, "muon", True)],
)
def test_every_layer_is_a_group_and_a_step_is_that_of_the_whole(
    process, checkpointed, optimizer, fused
):
    torch.manual_seed(0)
    plain, ids = Layered(checkpointed), torch.arange(7)[None]
    config = TrainerConfig(optimizer=optimizer)
    placed = FSDP2(Accelerator(cpu=True), config)
    model, own = placed.prepare(plain, lambda m: make_optimizer(m, config, fused=fused))
    groups = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert groups == ["", "layers.0", "layers.1", "layers.2", "heads.0"]
    reference = make_optimizer(plain, config)
    for _ in range(2):
        placed.gather(model)
        with torch.inference_mode():  # an evaluation calls layers, and not the whole
            model.layers[0](torch.ones(1, 4))
        for last in (False, True):
            for network in (model, plain):
                with placed.micro_step(model, last):
                    network(ids).square().mean().backward()
        norm = placed.clip(model)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), config.max_grad_norm)
        assert torch.allclose(norm, expected)
        for one in (own, reference):
            one.step()
            one.zero_grad()
        state = placed.optimizer_state(model, own.optimizer)
        own.optimizer.state.clear()
        placed.load_optimizer_state(model, own.optimizer, state)
    weights = placed.weights(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value)


@pytest.mark.slow
def test_weights_are_sent_in_bfloat16_for_steps_and_exact_for_evaluations():
    code, _, err = finish(start(*TWO, "-m", "tests.trainer.test_fsdp2"))
    assert code == 0, err[-3000:]


def send(words: list[str]) -> int:
    """One of two processes. A step after an evaluation has the weights of any other, so that a run
    goes on as if there had been none."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain, config = Layered(False), TrainerConfig(precision="bf16")
    placed = FSDP2(Accelerator(cpu=True), config)
    model, _ = placed.prepare(plain, lambda m: make_optimizer(m, config))
    exact = {name: one.detach().clone() for name, one in plain.named_parameters()}
    rounded = {name: one.bfloat16().float() for name, one in exact.items()}
    for asked, expected in ((False, rounded), (True, exact), (False, rounded), (False, rounded)):
        placed.gather(model, exact=asked)
        for name, one in model.named_parameters():
            assert torch.equal(one, expected[name]), (name, asked)
    for name, one in placed.weights(model).items():
        assert torch.equal(one, exact[name])
    return 0


if __name__ == "__main__":
    end(send)
