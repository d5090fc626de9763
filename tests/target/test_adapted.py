"""LoRA around a target: the target stays as it is, and what it becomes can be saved and merged."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from target.adapted import AdaptedTarget, LoraSettings
from target.model import Target, decoder_layers
from tests.helpers.tiny import ARCHITECTURES, generated, prompts_of, save_tiny
from trainer.errors import UserError

IDS = torch.tensor(prompts_of([13, 13]))
PLAIN = LoraSettings()


def changed(target, settings=PLAIN, seed=0):
    """With an adapter that does something."""
    adapted = AdaptedTarget(target, settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parts in adapted.modules().values():
            for parameter in parts.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapted


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_target_never_sees_its_adapter(name, tiny_target):
    target = tiny_target(name)
    before, names = logits_of(target.model), [n for n, _ in target.model.named_parameters()]
    fresh = AdaptedTarget(target, PLAIN)
    assert not fresh.changes
    assert torch.equal(logits_of(fresh.model), before)
    adapted = changed(target)
    assert adapted.changes
    assert (logits_of(adapted.model) - before).abs().max() > 1e-2
    assert torch.equal(logits_of(target.model), before)
    assert [n for n, _ in target.model.named_parameters()] == names
    assert not any(p.requires_grad for p in target.model.parameters())


def test_no_weight_exists_twice_and_every_copy_has_its_own_adapter(tiny_target):
    target = tiny_target("llama_tied")
    adapted = changed(target)
    copied = copy.deepcopy(adapted)
    own = {id(p) for p in target.model.parameters()}
    for one in (adapted, copied):
        frozen = [p for n, p in one.model.named_parameters() if "lora_" not in n]
        assert {id(p) for p in frozen} == own
    mine, its = (
        [p for parts in one.modules().values() for p in parts.parameters()]
        for one in (adapted, copied)
    )
    assert all(torch.equal(a, b) and a is not b for a, b in zip(mine, its, strict=True))
    with torch.no_grad():
        its[0].zero_()
    assert bool(mine[0].any())


def test_states_and_head_give_the_models_logits_with_a_gradient(tiny_target):
    for lm_head in (False, True):
        adapted = changed(tiny_target("llama"), LoraSettings(lm_head=lm_head))
        logits = adapted.head().logits(adapted.states(IDS))
        torch.testing.assert_close(logits, logits_of(adapted.model), rtol=1e-4, atol=1e-4)
        logits.square().mean().backward()
        for name, parts in adapted.modules().items():
            assert all(p.grad is not None and p.grad.any() for p in parts.parameters()), name
        assert ("lm_head" in adapted.modules()) == lm_head


def test_an_adapter_on_the_head_is_refused_where_it_is_the_embedding(tiny_target):
    with pytest.raises(UserError, match=r"method\.lora_lm_head must be false"):
        AdaptedTarget(tiny_target("llama_tied"), LoraSettings(lm_head=True))


def test_what_peft_refuses_is_one_line(tiny_target, monkeypatch):
    def refuse(*_):
        raise ValueError("no dropout\nhere")

    monkeypatch.setattr("peft.get_peft_model", refuse)
    with pytest.raises(
        UserError, match=r"peft cannot adapt LlamaForCausalLM .* \(no dropout here\)"
    ):
        AdaptedTarget(tiny_target("llama"), LoraSettings())


def test_the_fingerprint_is_that_of_target_and_adapter(tiny_target):
    target = tiny_target("llama")
    found = [changed(target, seed=seed).as_target().fingerprint for seed in (0, 0, 1)]
    found.append(changed(target, LoraSettings(rank=8)).as_target().fingerprint)
    weights = [one.pop("weights") for one in found]
    own = dict(target.fingerprint)
    assert weights[0] == weights[1]
    assert len({own.pop("weights"), *weights}) == 4
    assert all(rest == own for rest in found)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_padded", "gpt2", "qwen3_moe"])
def test_the_merged_target_is_an_ordinary_model_with_the_same_law(name, tiny_target, tmp_path):
    target = tiny_target(name)
    before, adapted = logits_of(target.model), changed(target)
    expected = logits_of(adapted.model)
    merged = adapted.merged(tmp_path / "merged")
    loaded = Target.load(str(tmp_path / "merged"))
    for model in (merged.model, loaded.model):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)
        assert not [n for n, _ in model.named_parameters() if "lora_" in n]
    assert merged.fingerprint["weights"] != adapted.as_target().fingerprint["weights"]
    assert loaded.eos_ids == target.eos_ids
    prompt = IDS[0].tolist()
    ours, theirs = (generated(model, prompt, 8) for model in (adapted.model, loaded.model))
    assert ours == theirs
    assert torch.equal(logits_of(adapted.model), expected)
    assert torch.equal(logits_of(target.model), before)


def test_saved_it_is_an_adapter_of_peft(tiny_target, tiny_folder, tmp_path):
    for lm_head in (False, True):
        settings = LoraSettings(rank=4, lm_head=lm_head)
        adapted = changed(tiny_target("llama"), settings)
        folder = tmp_path / str(lm_head)
        adapted.save(folder)
        again = AdaptedTarget(tiny_target("llama"), settings)
        again.load(folder)
        assert torch.equal(logits_of(again.model), logits_of(adapted.model))
        assert again.as_target().fingerprint == adapted.as_target().fingerprint
        model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama")).eval()
        theirs = logits_of(PeftModel.from_pretrained(model, folder))
        assert torch.equal(theirs, logits_of(adapted.model))


def test_an_adapter_of_another_target_is_refused(tiny_target, tmp_path):
    changed(tiny_target("llama")).save(tmp_path)
    with pytest.raises(UserError, match="holds an adapter of another shape"):
        AdaptedTarget(tiny_target("gpt2"), PLAIN).load(tmp_path)


def test_computing_layers_again_changes_no_gradient_and_no_cache(tiny_folder, tmp_path):
    target = Target.load(str(save_tiny(tmp_path, "gpt2", attn_pdrop=0.5, resid_pdrop=0.5)))
    calls, found = [], []
    for checkpointed in (False, True):
        adapted = changed(target)
        if checkpointed:
            adapted.checkpoint()
        calls.append(0)
        first = decoder_layers(adapted.model)[0].ln_1

        def count(*_, place=checkpointed):
            calls[place] += 1

        first.register_forward_hook(count)
        adapted.states(IDS).square().mean().backward()
        found.append([p.grad for parts in adapted.modules().values() for p in parts.parameters()])
        assert generated(adapted.model, IDS[0].tolist(), 6) == generated(
            adapted.merged(tmp_path / "merged").model, IDS[0].tolist(), 6
        )
        assert not any(module.training for module in adapted.model.modules())
    assert calls[1] == calls[0] + 1
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_an_adapter_without_a_rank_is_refused():
    with pytest.raises(UserError, match=r"method\.lora_rank must be >= 1, got 0"):
        LoraSettings(rank=0)
