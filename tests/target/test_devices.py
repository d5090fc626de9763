"""Targets over several devices and quantised ones: the same numbers, another fingerprint."""

from __future__ import annotations

import pytest
import torch

import train
from target.causal_lm import load_causal_lm
from target.devices import own_memory
from target.model import Target
from tests.helpers.commands import command, read_jsonl
from trainer.config import ModelConfig
from trainer.errors import UserError

INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
LAYERS = (0, 1, "final_norm")


def offloaded(*modules):
    """On the CPU, but for `modules` on the disk."""
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head",
             "model.rotary_emb")  # fmt: skip
    return {part: "disk" if part in modules else "cpu" for part in parts}


@pytest.mark.parametrize(
    "device_map",
    [offloaded("model.layers.1"), offloaded("model.embed_tokens", "lm_head", "model.norm"), "auto"],
)
def test_a_spread_target_is_the_same_target(device_map, tiny_target, tiny_folder):
    whole = tiny_target("llama")
    spread = Target.load(str(tiny_folder("llama")), device_map=device_map)
    assert spread.fingerprint == whole.fingerprint
    assert spread.device == torch.device("cpu")
    ids = torch.arange(24).view(2, 12)
    ours, theirs = (t.outputs(ids, layers=LAYERS) for t in (spread, whole))
    assert torch.equal(ours.logits, theirs.logits)
    assert all(torch.equal(ours.hidden[layer], theirs.hidden[layer]) for layer in LAYERS)
    later = spread.outputs(ids, project_later=True).logits[torch.tensor([1]), torch.tensor([3])]
    torch.testing.assert_close(later, theirs.logits[1:, 3, : whole.vocab_size])
    assert torch.equal(spread.embedding(ids), whole.embedding(ids))


def words(folder, target, recipe, *given):
    own = (f"recipe={recipe}", "trainer.max_steps=3", "trainer.log_every=1", "eval.num_prompts=2",
           "eval.timing_prompts=1", *given)  # fmt: skip
    found = [w for w in command(folder, target, *own) if not w.startswith("method.")]
    return [*found, *{"eagle3": ["method.layers=[0,1]"]}.get(recipe, [])]


@pytest.mark.slow
def test_a_run_on_a_spread_target_is_the_same_run(tmp_path, tiny_folder):
    """Generation, a layer that starts as the target's, training, the report."""
    losses = []
    for name, given in (("whole", {}), ("spread", offloaded("model.layers.1", "lm_head"))):
        folder = tmp_path / name
        words_of_it = [f"run.dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
        if given:
            shown = ", ".join(f"{key}: {value}" for key, value in given.items())
            words_of_it.append(f"model.device_map={{{shown}}}")
        assert train.main(words(tmp_path, tiny_folder("llama"), "eagle3", *words_of_it)) == 0
        rows = read_jsonl(folder / "run" / "metrics.jsonl")
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == losses[1]


def test_a_process_takes_its_own_part_of_the_machine():
    free = {0: 80, 1: 81, 2: 82, 3: 83, "cpu": 100}
    assert own_memory(free, 0, 1) == free
    assert own_memory(free, 1, 2) == {1: 81, 3: 83, "cpu": 50}
    assert own_memory({"cpu": 100}, 1, 2) == {"cpu": 50}


# --- quantised -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def int8(tiny_folder):
    pytest.importorskip("bitsandbytes")
    return Target.load(str(tiny_folder("llama")), quantization=INT8)


def test_a_quantised_target_is_another_target_with_a_head_of_its_own(int8, tiny_target):
    whole = tiny_target("llama")
    assert type(int8.model.base_model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
    assert int8.fingerprint != whole.fingerprint
    assert "load_in_8bit" in int8.fingerprint["quantization"]
    ids = torch.arange(24).view(2, 12)
    ours, theirs = (t.outputs(ids, layers=("final_norm",)) for t in (int8, whole))
    assert not torch.equal(ours.logits, theirs.logits)
    assert (ours.logits - theirs.logits).abs().max() < 0.1 * theirs.logits.abs().max()
    torch.testing.assert_close(int8.head.logits(ours.hidden["final_norm"]), ours.logits)


def test_a_checkpoint_that_is_quantised_is_the_target_quantised_as_it_is_loaded(int8, tmp_path):
    int8.model.save_pretrained(tmp_path)
    int8.tokenizer.save_pretrained(tmp_path)
    stored = Target.load(str(tmp_path))
    assert type(stored.model.base_model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
    ids = torch.arange(24).view(2, 12)
    torch.testing.assert_close(stored.outputs(ids).logits, int8.outputs(ids).logits)
    with pytest.raises(UserError, match="fsdp2 shards weights that are not quantised"):
        load_causal_lm(str(tmp_path), "model.target", spread={"device_map": "cpu"})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["distillspec", "eagle3"])
def test_drafters_train_on_a_quantised_target(recipe, int8, tmp_path, tiny_folder, capsys):
    """A fresh causal LM is not quantised with it; an EAGLE layer starts as what is not."""
    given = words(
        tmp_path, tiny_folder("llama"), recipe,
        "model.quantization={quant_method: bitsandbytes, load_in_8bit: true}",
    )  # fmt: skip
    given += ["method.draft_hidden_size=16"] if recipe == "distillspec" else []
    assert train.main(given) == 0
    shown = capsys.readouterr().out
    assert ("a fresh start for q_proj" in shown) == (recipe == "eagle3")
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row][-3:] == [1, 2, 3]


def test_a_quantised_head_is_refused(int8, tiny_folder):
    whole = INT8 | {"llm_int8_skip_modules": ["nothing"]}
    with pytest.raises(UserError, match="output head of LlamaForCausalLM is quantised"):
        Target.load(str(tiny_folder("llama")), quantization=whole).head  # noqa: B018


@pytest.mark.parametrize(
    ("given", "words_of_it"),
    [
        ({"device_map": "cuda"}, "model.device_map must be one of auto, balanced, sequential"),
        ({"device_map": {"": "gpu"}}, "model.device_map must name the device of each module"),
        ({"device_map": {"": "meta"}}, "model.device_map must name the device of each module"),
        ({"device_map": {}}, "model.device_map must name the device of each module"),
        ({"max_memory": {0: "1GiB"}}, "is for model.device_map=auto"),
        ({"quantization": {"load_in_8bit": True}}, "must name its quant_method"),
        ({"device_map": "fsdp2", "max_memory": {0: "1GiB"}}, "is for model.device_map=auto"),
        ({"device_map": "fsdp2", "quantization": INT8}, "weights that are not quantised"),
    ],
)
def test_what_means_nothing_is_refused_before_loading(given, words_of_it):
    with pytest.raises(UserError, match=words_of_it):
        ModelConfig(**given)


@pytest.mark.parametrize(
    ("recipe", "word", "words_of_it"),
    [
        ("distillspec", "model.quantization={quant_method: q}", "model.quantization={'quant_met"),
        ("medusa2", "model.device_map={model: cpu, lm_head: disk}", "whole on one device and not"),
        ("medusa", "model.quantization={quant_method: bitsandbytes, load_in_8bit: true} "
         "eval.engine=vllm", "without model.quantization"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(recipe, word, words_of_it, tmp_path, tiny_folder, capsys):
    given = word.replace(" eval.engine", "\neval.engine").split("\n")
    assert train.main(words(tmp_path, tiny_folder("llama"), recipe, *given)) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error:")]
    assert words_of_it in line
