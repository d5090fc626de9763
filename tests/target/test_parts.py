"""The parts of a target that heads need, read out of its checkpoint."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from target.model import Target, decoder_layers
from target.parts import load_parts
from tests.helpers.tiny import ARCHITECTURES, save_tiny
from trainer.errors import UserError

INDEX = "model.safetensors.index.json"


def split(folder, apart=lambda tensor: ".layers." in tensor):
    """The checkpoint of a folder in two files: what is `apart`, and the rest."""
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + apart(name)}-of-00002.safetensors" for name in tensors}
    for file in sorted(set(files.values())):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_are_those_of_the_whole_target(tiny_target, tiny_folder, architecture):
    whole, parts = tiny_target(architecture), load_parts(str(tiny_folder(architecture)))
    assert parts.fingerprint == whole.fingerprint
    assert (parts.device, parts.vocab_size) == (whole.device, whole.vocab_size)
    ids = torch.arange(4, 20).unsqueeze(0)
    states = whole.outputs(ids, layers=("final_norm",), logits=False).hidden["final_norm"]
    assert torch.equal(parts.head.logits(states), whole.head.logits(states))
    assert torch.equal(parts.embedding(ids), whole.embedding(ids))
    assert torch.equal(parts.norm(3 * states), whole.norm(3 * states))
    assert all(p.is_meta for p in decoder_layers(parts.model).parameters())
    with pytest.raises(UserError, match="states of this text are not stored"):
        parts.outputs(ids)


def test_tied_matrices_are_one(tiny_folder):
    model = load_parts(str(tiny_folder("llama_tied"))).model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_layer_is_read_for_as_long_as_it_is_needed(tiny_target, tiny_folder):
    whole, parts = tiny_target("qwen3"), load_parts(str(tiny_folder("qwen3")))
    layer = decoder_layers(parts.model)[-1]
    with parts.in_place(layer):
        read = {name: p.clone() for name, p in layer.named_parameters()}
    assert all(p.is_meta for p in layer.parameters())
    for name, p in decoder_layers(whole.model)[-1].named_parameters():
        assert torch.equal(read[name], p.to_dense() if p.is_mkldnn else p)


def test_files_of_layers_need_not_be_there(tmp_path):
    folder = split(save_tiny(tmp_path / "tiny", "llama"))
    whole = Target.load(str(folder))
    (folder / "model-00002-of-00002.safetensors").unlink()
    parts = load_parts(str(folder))
    states = torch.randn(3, whole.hidden_size)
    assert torch.equal(parts.head.logits(states), whole.head.logits(states))
    with pytest.raises(UserError, match="is not there"):
        Target.load(str(folder))
    layer = parts.in_place(decoder_layers(parts.model)[-1])
    with pytest.raises(UserError, match=r"00002-of-00002\.safetensors with .* is not there"), layer:
        pass


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), "has no tensor 'model.norm.weight'"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(9, 32)}), r"shape \[9, 32\], by"),
        (lambda t: t["lm_head.weight"].fill_(torch.nan), "NaN or Inf in tensor 'lm_head.weight'"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(100, 32).char()}), "is quantised"),
    ],
)
def test_a_checkpoint_that_lacks_a_part_is_refused(tmp_path, spoil, says):
    folder = save_tiny(tmp_path / "tiny", "llama")
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=says) as error:
        load_parts(str(folder))
    assert "\n" not in str(error.value)


def test_an_index_that_misplaces_a_part_is_refused(tmp_path):
    folder = split(save_tiny(tmp_path / "tiny", "llama"))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"lacks 'lm_head\.weight', which its index places there"):
        load_parts(str(folder))


def test_other_formats_are_refused(tmp_path):
    folder = save_tiny(tmp_path / "tiny", "llama")
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights in safetensors"):
        load_parts(str(folder))
    quantised = tmp_path / "quantised"
    shutil.copytree(save_tiny(tmp_path / "other", "llama"), quantised)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="must not be quantised"):
        load_parts(str(quantised))
