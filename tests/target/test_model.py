"""The target: outputs of its layers, its fingerprint, its vocabulary, readable refusals."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from target import causal_lm
from target.causal_lm import load_causal_lm
from target.fingerprint import (
    added_eos,
    eos_ids,
    grown_eos,
    tokenizer_hash,
    vocabulary_size,
    weights_hash,
)
from target.model import Target, decoder_layers
from target.rotary import context_of
from target.vocabulary import check_same_vocabulary
from tests.helpers.tiny import (
    ARCHITECTURES,
    CONTEXT,
    EOS,
    PADDED_WIDTH,
    VOCAB_SIZE,
    prompts_of,
    save_tiny,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from trainer.errors import UserError


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layer_outputs_equal_transformers_hidden_states(name, tiny_target):
    target = tiny_target(name, layers=3)
    ids = torch.tensor(prompts_of([20, 20]))
    found = target.outputs(ids, layers=[2, 0, "final_norm", 1])
    with torch.no_grad():
        plain = target.model(ids, output_hidden_states=True)
    assert set(found.hidden) == {0, 1, 2, "final_norm"}
    for layer in (0, 1):  # the last hidden state of transformers is after the final norm
        assert torch.equal(found.hidden[layer], plain.hidden_states[layer + 1])
    assert torch.equal(found.hidden["final_norm"], plain.hidden_states[-1])
    assert torch.equal(found.logits, plain.logits)
    assert not torch.equal(found.hidden[2], found.hidden["final_norm"])
    head = target.model.get_output_embeddings()
    torch.testing.assert_close(head(found.hidden["final_norm"]), plain.logits)


def test_outputs_leave_no_hooks_and_no_gradient(tiny_target):
    target = tiny_target("llama")
    ids = torch.tensor(prompts_of([5]))
    found = target.outputs(ids, layers=[0, "final_norm"], logits=False)
    assert found.logits is None
    assert not found.hidden[0].requires_grad
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not any(m._forward_hooks for m in target.model.modules())
    with pytest.raises(IndexError):  # an id outside the embedding: the hooks go all the same
        target.outputs(ids + 10_000, layers=[0])
    assert not any(m._forward_hooks for m in target.model.modules())


@pytest.mark.parametrize("name", ["llama", "llama_padded", "gemma3"])
def test_logits_are_made_where_they_are_looked_at(name, tiny_target):
    """Of the true vocabulary, and without any layer asked for."""
    target = tiny_target(name)
    ids = torch.arange(12).view(2, 6)
    whole = target.outputs(ids).logits[..., : target.vocab_size]
    found = target.outputs(ids, layers=[0], project_later=True)
    assert set(found.hidden) == {0, "final_norm"}
    at = torch.tensor([0, 1, 1]), torch.tensor([5, 0, 3])
    torch.testing.assert_close(found.logits[at], whole[at])


def test_right_padding_changes_no_real_position(tiny_target):
    for name in ("llama", "gemma3", "mistral", "gpt2"):
        target = tiny_target(name)
        text = prompts_of([30])[0]
        padded = torch.tensor([text[:18] + [0] * 12, text])
        both = target.outputs(padded, layers=[1])
        alone = target.outputs(torch.tensor([text[:18]]), layers=[1])
        torch.testing.assert_close(both.logits[0, :18], alone.logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(both.hidden[1][0, :18], alone.hidden[1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "said"),
    [([2], "0..1"), ([-1], "-1"), (["last"], "'last'"), ([0, 0], "distinct"), ([0.0], "0.0")],
)
def test_layers_that_are_not_there_or_doubled_are_refused(layers, said, tiny_target):
    with pytest.raises(UserError, match=said):
        tiny_target("llama").outputs(torch.tensor([[5]]), layers=layers)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decoder_layers_are_the_layers_of_the_model(name):
    # as many experts as layers, so that a list of experts cannot pass for the layers
    layers = decoder_layers(tiny_model(name, layers=4))
    assert len(layers) == 4
    assert all(
        "Layer" in type(layer).__name__ or "Block" in type(layer).__name__ for layer in layers
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loading_keeps_weights_vocabulary_and_eos(name, tiny_folder):
    for sharded in (False, True):
        folder = tiny_folder(name, sharded=sharded)
        assert (len(list(folder.glob("*.safetensors"))) > 1) == sharded
        target = Target.load(str(folder))
        assert target.model.dtype == torch.float32
        assert not target.model.training
        ids = torch.tensor(prompts_of([12]))
        assert torch.equal(target.outputs(ids).logits, tiny_model(name)(ids).logits)
        assert target.vocab_size == VOCAB_SIZE
        assert target.logits_width == (PADDED_WIDTH if name == "llama_padded" else VOCAB_SIZE)
        assert target.eos_ids == (EOS,)
        assert target.context == CONTEXT


def test_texts_end_where_rotary_frequencies_change(tiny_target):
    """transformers chooses those of Phi-4-mini for a whole batch by its longest text."""
    target = tiny_target("llama")
    assert target.context == context_of(target.model.config) == CONTEXT
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24}
    config = tiny_config("llama", rope_parameters=rotary | factors)
    assert context_of(config) == 24
    model = AutoModelForCausalLM.from_config(config).eval()
    assert Target(model, tiny_tokenizer(), "x", {}, (EOS,)).context == 24
    short, long = torch.arange(4, 12)[None], torch.arange(4, 34)[None]
    alone = model(short).logits[0]
    batch = torch.cat([F.pad(short, (0, 22)), long])
    assert not torch.allclose(model(batch).logits[0, :8], alone, atol=1e-4)
    torch.testing.assert_close(model(batch[:, :24]).logits[0, :8], alone)


def test_logits_made_later_are_the_targets_own_under_autocast(tiny_target):
    target, ids = tiny_target("llama"), torch.tensor([[5, 9, 12, 7]])
    outputs = target.outputs(ids, project_later=True)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = target.head.logits(outputs.logits.states)
        later = outputs.logits[0]
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(later, target.outputs(ids).logits[0, :, : target.vocab_size])


def test_weights_go_straight_to_their_device(tiny_folder, monkeypatch):
    """Loaded on the CPU and moved, each process of a machine would hold a copy there first."""
    monkeypatch.setattr(torch.nn.Module, "to", None)
    model, _ = load_causal_lm(str(tiny_folder("llama")), "model.target", device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_folder_that_is_no_model_is_one_readable_error(tmp_path, tiny_folder):
    with pytest.raises(UserError, match=r"model\.target: cannot load"):
        Target.load(str(tmp_path))
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "no_tokenizer")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match=r"model\.target: cannot load"):
        Target.load(str(folder))


def test_a_chat_template_that_does_not_end_is_refused(tmp_path, monkeypatch):
    """Before the weights are read. This one ends a little later, in its thread."""
    folder = save_tiny(tmp_path / "endless", "llama", chat_template=True)
    loops = "{% for a in range(9000) %}{% for b in range(900) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loops)
    monkeypatch.setattr(causal_lm, "TEMPLATE_S", 0.1)
    monkeypatch.setattr(causal_lm, "accounted", None)
    with pytest.raises(UserError, match="has not rendered one word") as caught:
        Target.load(str(folder))
    assert caught.value.key == "model.target"


def test_the_tokenizer_and_the_generation_config_name_the_eos_together():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(chat_template=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|endoftext|>", "<|turn|>")
    cases = [([7, 3, 7], (EOS, 3, 7)), (5, (EOS, 5)), ([EOS, 5], (EOS, 5)), (None, (EOS,))]
    for value, expected in cases:
        model.generation_config.eos_token_id = value
        assert eos_ids(model, tokenizer) == expected
    assert added_eos(model.generation_config, tokenizer) == ""
    model.generation_config.eos_token_id = 7
    line = added_eos(model.generation_config, tokenizer)
    assert line.startswith("an answer ends at '<|endoftext|>' (0), the tokenizer's eos_token, as")
    assert "well as at '\"' (7) of the generation config" in line
    tokenizer.eos_token = None
    assert eos_ids(model, tokenizer) == (7,)
    assert added_eos(model.generation_config, tokenizer) == ""
    model.generation_config.eos_token_id = None
    assert eos_ids(model, tokenizer) == ()


# --- fingerprint -------------------------------------------------------------------------------


def changed_keys(one: dict, other: dict) -> set[str]:
    assert one.keys() == other.keys()
    return {key for key in one if one[key] != other[key]}


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "model", "llama", chat_template=True)


def test_fingerprint_is_the_same_for_the_same_files(folder, tmp_path):
    first = Target.load(str(folder)).fingerprint
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert Target.load(str(copy)).fingerprint == first
    assert json.loads(json.dumps(first)) == first


def test_an_eos_set_that_grew_is_the_reason():
    before, now = {"weights": "a", "eos_ids": [0]}, {"weights": "a", "eos_ids": [0, 5]}
    assert "ended at the token ids [0] alone; they end at [0, 5]" in grown_eos(before, now)
    for one, other in ((now, before), (now, now), ({"eos_ids": [7]}, now), ({}, now)):
        assert grown_eos(one, other) == ""


def test_fingerprint_tells_what_changed(folder, tmp_path):
    first = Target.load(str(folder)).fingerprint

    other_weights = save_tiny(tmp_path / "weights", "llama", seed=1, chat_template=True)
    assert changed_keys(first, Target.load(str(other_weights)).fingerprint) == {"weights"}

    template = shutil.copytree(folder, tmp_path / "template")
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(template)
    assert changed_keys(first, Target.load(str(template)).fingerprint) == {"chat_template"}

    eos = shutil.copytree(folder, tmp_path / "eos")
    settings = json.loads((eos / "generation_config.json").read_text())
    (eos / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [0, 5]}))
    assert changed_keys(first, Target.load(str(eos)).fingerprint) == {"eos_ids"}

    rope = shutil.copytree(folder, tmp_path / "rope")
    settings = json.loads((rope / "config.json").read_text())
    (rope / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    assert changed_keys(first, Target.load(str(rope)).fingerprint) == {"config"}

    assert changed_keys(first, Target.load(str(folder), dtype="bfloat16").fingerprint) == {"dtype"}


def test_weights_hash_sees_one_changed_byte_in_any_shard(tmp_path):
    folder = save_tiny(tmp_path / "m", "llama", sharded=True)
    model = tiny_model("llama")
    hashes = {weights_hash(str(folder), model)}
    shards = sorted(folder.glob("*.safetensors"))
    for path in shards:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        hashes.add(weights_hash(str(folder), model))
    assert len(hashes) == len(shards) + 1


# --- vocabulary --------------------------------------------------------------------------------


def test_vocabulary_check_names_the_first_differing_id():
    tokenizer = tiny_tokenizer()
    check_same_vocabulary(tokenizer, tiny_tokenizer(chat_template=True), "draft")
    assert tokenizer_hash(tokenizer) == tokenizer_hash(tiny_tokenizer(chat_template=True))

    other = tiny_tokenizer()
    other.add_tokens(["extra"])
    assert vocabulary_size(other) == VOCAB_SIZE + 1
    assert tokenizer_hash(other) != tokenizer_hash(tokenizer)
    for ours, theirs, said in ((tokenizer, other, "'extra' and None"), (other, tokenizer, "None")):
        with pytest.raises(UserError, match=rf"first id {VOCAB_SIZE} \(.*{said}"):
            check_same_vocabulary(ours, theirs, "draft")


def test_vocabulary_check_sees_swapped_ids(tmp_path):
    folder = tmp_path / "swapped"
    tiny_tokenizer().save_pretrained(folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    swapped = type(tiny_tokenizer()).from_pretrained(folder)
    smaller = min(vocabulary["a"], vocabulary["b"])
    with pytest.raises(UserError, match=rf"2 ids differently, first id {smaller} \('b' and 'a'\)"):
        check_same_vocabulary(tiny_tokenizer(), swapped, "draft")


def test_the_tokenizer_is_asked_once_for_its_vocabulary(tiny_target, monkeypatch):
    target = Target.load(tiny_target("llama").name)
    asked = []
    listed = target.tokenizer.get_vocab
    monkeypatch.setattr(target.tokenizer, "get_vocab", lambda: asked.append(1) or listed())
    assert [target.vocab_size for _ in range(3)] == [100] * 3
    assert len(asked) <= 1
