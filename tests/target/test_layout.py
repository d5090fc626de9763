"""Weights laid out for a few rows: same values, same text, one copy."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from target import layout
from target.layout import can_pack, lay_out
from target.model import output_head
from trainer.chunked import OutputHead


def model(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=192, intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PACKED", 1)


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


def test_large_matrices_lie_by_columns_once_and_read_as_before() -> None:
    usual, ours = model(True), model(True)
    lay_out(ours)
    layers = ours.model.layers[0]
    assert layers.mlp.up_proj.weight.stride() == (1, 768)
    assert layers.mlp.up_proj.weight.untyped_storage().nbytes() == 4 * 192 * 768
    assert layers.self_attn.k_proj.weight.stride() == (192, 1)  # 12,288 elements gain nothing
    assert ours.get_input_embeddings().weight.stride() == (192, 1)
    for name, tensor in usual.state_dict().items():
        assert ours.state_dict()[name].equal(tensor), name


def test_laid_out_model_is_saved_as_it_was(tmp_path) -> None:
    usual, ours = model(True), model(True)
    lay_out(ours)
    ours.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, tensor in usual.state_dict().items():
        assert again.state_dict()[name].equal(tensor), name


@pytest.mark.skipif(not can_pack(), reason="this PyTorch has no oneDNN")
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


@pytest.mark.skipif(not can_pack(), reason="this PyTorch has no oneDNN")
def test_a_copy_of_the_model_multiplies_by_its_own_weight() -> None:
    ours = model(False)
    lay_out(ours)
    other = copy.deepcopy(ours)
    other.lm_head.weight.data.zero_()
    with torch.inference_mode():
        assert not other(input_ids=torch.ones(1, 2, dtype=torch.long)).logits.any()
        assert ours(input_ids=torch.ones(1, 2, dtype=torch.long)).logits.any()


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
    assert ours.model.layers[0].mlp.up_proj.weight.stride() == (192, 1)
    trained = model(True).requires_grad_(True)
    lay_out(trained)
    assert trained.model.layers[0].mlp.up_proj.weight.stride() == (192, 1)


def test_head_with_other_weights_has_no_blocked_copy() -> None:
    with pytest.raises(ValueError, match="blocked"):
        OutputHead(torch.zeros(4, 3), blocked=torch.zeros(5, 3))
