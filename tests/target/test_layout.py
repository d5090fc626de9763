"""Weights laid out for a few rows: same values, same text, one copy."""

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.base import TrainedDrafter
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.text import Text
from target import layout
from target.adapted import AdaptedTarget, LoraSettings
from target.layout import can_pack, laid_out, lay_out
from target.model import Target, output_head
from trainer.compiled import compiled
from trainer.logits import OutputHead


def model(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=192, intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


packs = pytest.mark.skipif(not can_pack(), reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PACKED", 1)
    monkeypatch.setattr(layout, "made_by_intel", lambda: False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 26, 300])
def test_outputs_are_those_of_the_usual_layout(tied: bool, rows: int) -> None:
    usual, ours = model(tied), model(tied)
    lay_out(ours)
    ids = torch.randint(1024, (1, rows))
    with torch.inference_mode():
        before, after = usual(input_ids=ids).logits, ours(input_ids=ids).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=2e-6)
    assert after.argmax(-1).equal(before.argmax(-1))


@packs
def test_large_matrices_exist_once_and_are_saved_as_they_were() -> None:
    usual, ours = model(True), model(True)
    lay_out(ours)
    layers = ours.model.layers[0]
    up = layers.mlp.up_proj.weight
    assert up.is_mkldnn
    assert (up.shape, up.numel(), up.dtype) == ((768, 192), 768 * 192, torch.float32)
    assert not layers.self_attn.k_proj.weight.is_mkldnn  # 12,288 elements gain nothing
    assert not ours.get_input_embeddings().weight.is_mkldnn
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in usual.parameters())
    for name, tensor in usual.state_dict().items():
        assert ours.state_dict()[name].equal(tensor), name


@packs
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch has no MKL")
def test_smaller_matrices_stay_where_mkl_multiplies_one_row_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "made_by_intel", lambda: True)
    monkeypatch.setattr(layout, "PACKED", 1024 * 192)  # those of the output matrix
    ours = model(True)
    lay_out(ours)
    assert not ours.model.layers[0].mlp.up_proj.weight.is_mkldnn
    assert layout.blocked(ours.lm_head) is not None
    drafter = nn.ModuleList([nn.Linear(192, 768), nn.Linear(192, 1024)])
    with laid_out(drafter):
        assert [layout.blocked(layer) is not None for layer in drafter] == [False, True]


def test_laid_out_model_is_saved_as_it_was(tmp_path) -> None:
    usual, ours = model(True), model(True)
    lay_out(ours)
    ours.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, tensor in usual.state_dict().items():
        assert again.state_dict()[name].equal(tensor), name


@packs
def test_output_head_shares_the_blocked_copy_and_has_gradients_without_it() -> None:
    ours = model(True)
    plain = output_head(ours, 1000)
    lay_out(ours)
    head = output_head(ours, 1000)
    assert plain.blocked is None
    assert head.blocked is not None
    states = torch.randn(3, 5, 192)
    with torch.no_grad():
        torch.testing.assert_close(head.logits(states), plain.logits(states), rtol=1e-5, atol=2e-6)
    states.requires_grad_(True)
    found, expected = (
        torch.autograd.grad(one.logits(states).square().sum(), states)[0] for one in (head, plain)
    )
    torch.testing.assert_close(found, expected)
    logits = ours.lm_head(states)
    assert logits.requires_grad, "through the layer of the model too"


@packs
def test_a_copy_of_the_model_multiplies_by_its_own_weight() -> None:
    ours = model(False)
    lay_out(ours)
    other = copy.deepcopy(ours)
    ids = torch.ones(1, 2, dtype=torch.long)
    with torch.inference_mode():
        expected = ours(input_ids=ids).logits
        torch.testing.assert_close(other(input_ids=ids).logits, expected, rtol=1e-5, atol=2e-6)
        other.model.layers[0].mlp.up_proj.weight.data.zero_()
        assert not other(input_ids=ids).logits.equal(expected)
        other.lm_head.weight.data.zero_()
        assert not other(input_ids=ids).logits.any()
        assert ours(input_ids=ids).logits.equal(expected)


@packs
def test_gradients_pass_through_the_blocked_matrices() -> None:
    usual, ours = model(True), model(True)
    lay_out(ours)
    found = []
    for one in (usual, ours):
        torch.manual_seed(1)
        states = torch.randn(2, 7, 192, requires_grad=True)
        logits = one(inputs_embeds=states).logits
        found.append(torch.autograd.grad(logits.square().sum(), states)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@packs
def test_laid_out_twice_is_laid_out_once() -> None:
    ours = model(True)
    lay_out(ours)
    weight = ours.model.layers[0].mlp.up_proj.weight
    lay_out(ours)
    assert ours.model.layers[0].mlp.up_proj.weight is weight


def test_without_the_operators_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout, "OPERATORS", ("_no_such_operator",))
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    ours = model(True)
    lay_out(ours)
    assert "lacks mkldnn._no_such_operator" in capsys.readouterr().out
    assert output_head(ours, 1024).blocked is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_and_trained_weights_stay(dtype: torch.dtype) -> None:
    ours = model(True).to(dtype)
    lay_out(ours)
    assert not ours.model.layers[0].mlp.up_proj.weight.is_mkldnn
    trained = model(True).requires_grad_(True)
    lay_out(trained)
    assert not trained.model.layers[0].mlp.up_proj.weight.is_mkldnn


def test_head_with_other_weights_has_no_blocked_copy() -> None:
    with pytest.raises(ValueError, match="blocked"):
        OutputHead(torch.zeros(4, 3), blocked=torch.zeros(5, 3))


@packs
def test_what_reads_a_blocked_matrix_gets_it_as_it_was(
    tiny_folder, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    usual = Target.load(str(tiny_folder("llama", layers=4)))
    monkeypatch.setattr(layout, "BLOCKED", 1)
    target = Target.load(str(tiny_folder("llama", layers=4)))
    matrix = target.model.model.layers[-1].mlp.up_proj.weight
    assert matrix.is_mkldnn
    assert target.fingerprint == usual.fingerprint
    torch.manual_seed(0)
    drafter = Eagle3Drafter.build(target, Eagle3Settings([2], target.model.config.hidden_size))
    expected = usual.model.model.layers[-1]
    assert drafter.layer.mlp.up_proj.weight.equal(expected.mlp.up_proj.weight)

    adapted = AdaptedTarget(target, LoraSettings())
    for parts in adapted.modules().values():
        torch.nn.init.normal_(parts["B"].weight, std=0.1)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        before = adapted.model(input_ids=ids).logits
        assert not before.equal(target.model(input_ids=ids).logits)
        merged = adapted.merged(tmp_path / "merged")
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
        for model in (merged.model, loaded, copy.deepcopy(adapted).model):
            torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)
    assert matrix.is_mkldnn


def drafters(target: Target) -> list[TrainedDrafter]:
    torch.manual_seed(0)
    width = target.model.config.hidden_size
    return [
        Eagle3Drafter.build(target, Eagle3Settings([2], width), kept=torch.arange(3, 20)),
        MedusaDrafter(MedusaSettings(num_heads=2, num_layers=1, own_head=True), target),
    ]


@packs
@pytest.mark.parametrize("index", [0, 1])
def test_a_drafter_is_laid_out_while_it_is_measured(
    index: int, tiny_folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(str(tiny_folder("llama", layers=4)))
    drafter = drafters(target)[index]
    monkeypatch.setattr(layout, "BLOCKED", 1)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    outputs = target.outputs(ids, layers=drafter.target_layers)

    def logits() -> torch.Tensor:
        states = list(drafter.states(Text(ids), outputs, 2))
        return torch.stack([drafter.project(one, depth) for depth, one in enumerate(states, 1)])

    with torch.inference_mode():
        expected = logits()
        with suppress(KeyError), laid_out(drafter, "no drafter"), laid_out(drafter):
            assert drafter.output_head(1).blocked is not None
            torch.testing.assert_close(logits(), expected, rtol=1e-5, atol=2e-6)
            raise KeyError
        assert drafter.output_head(1).blocked is None
        assert logits().equal(expected)
    assert not [m for m in drafter.modules() if isinstance(m, layout._TwiceStored)]
    for name, tensor in drafter.state_dict().items():
        assert tensor.equal(before[name]), name
    logits().exp().sum().backward()
    assert all(p.grad is not None for n, p in drafter.named_parameters() if "lm_head" in n)


@packs
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_computes_a_laid_out_target_in_its_own_type(
    grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "BLOCKED", 1)  # also what reads the values of attention
    usual, ours = model(True), model(True)
    lay_out(ours)
    torch.manual_seed(0)
    states = torch.randn(2, 6, 192, requires_grad=grad)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        found = ours(inputs_embeds=states).logits
    expected = usual(inputs_embeds=states).logits
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.02)
    if grad:
        mine, its = (
            torch.autograd.grad(one.float().square().sum(), states)[0] for one in (found, expected)
        )
        torch.testing.assert_close(mine, its, rtol=0.1, atol=0.02 * float(its.abs().max()))


@pytest.mark.slow
@packs
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_leave_the_layout_alone(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "BLOCKED", 1)
    usual, ours = model(True), model(True)
    lay_out(ours)
    ids = torch.randint(1024, (1, 7))
    with torch.no_grad(), compiled(backend, ours.model):
        found = ours(input_ids=ids).logits
        torch.testing.assert_close(found, usual(input_ids=ids).logits, rtol=1e-5, atol=2e-6)
