"""What is known of a target without its weights."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GenerationConfig

from target.model import Target
from target.outline import outline
from tests.helpers.tiny import ARCHITECTURES, EOS, save_tiny
from trainer.errors import UserError


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_outline_is_that_of_the_loaded_target(tiny_target, tiny_folder, architecture):
    whole, bare = tiny_target(architecture), outline(str(tiny_folder(architecture)))
    assert (bare.has_layers, whole.has_layers) == (False, True)
    assert bare.fingerprint == whole.fingerprint
    for name in ("num_layers", "vocab_size", "hidden_size", "context", "eos_ids", "logits_width"):
        assert getattr(bare, name) == getattr(whole, name)
    shapes = {name: p.shape for name, p in whole.model.named_parameters()}
    assert {name: p.shape for name, p in bare.model.named_parameters()} == shapes


def test_the_ends_of_the_generation_config_and_the_dtype_are_in_it(tmp_path):
    folder = str(save_tiny(tmp_path / "tiny", "llama"))
    GenerationConfig(eos_token_id=[EOS, 9]).save_pretrained(folder)
    whole, bare = Target.load(folder, dtype="bfloat16"), outline(folder, dtype="bfloat16")
    assert bare.fingerprint == whole.fingerprint
    assert bare.eos_ids == (EOS, 9)
    assert bare.fingerprint["dtype"] == "bfloat16"


def test_on_a_gpu_the_dtype_is_the_checkpoints(tmp_path):
    folder = str(save_tiny(tmp_path / "tiny", "llama"))
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    for stored in ("float16", "float32"):
        (tmp_path / "tiny" / "config.json").write_text(json.dumps(config | {"dtype": stored}))
        assert outline(folder, device="cuda").fingerprint["dtype"] == stored
    config.pop("dtype")
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    assert outline(folder, device="cuda").fingerprint == {}  # only its tensors tell
    assert outline(folder).model.dtype == torch.float32


@pytest.mark.parametrize(("content", "says"), [("{", "is damaged"), ('{"model_type": "no"}', "no")])
def test_what_cannot_be_a_target_is_refused(tmp_path, content, says):
    folder = str(save_tiny(tmp_path / "tiny", "llama"))
    (tmp_path / "tiny" / "config.json").write_text(content)
    with pytest.raises(UserError, match=says) as error:
        outline(folder)
    with pytest.raises(UserError) as other:
        Target.load(folder)
    assert str(error.value) == str(other.value)
