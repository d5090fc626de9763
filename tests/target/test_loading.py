"""Models that do not load whole are refused by name; what loads is the checkpoint, every time."""

from __future__ import annotations

import json
import shutil

import numpy
import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import train
from target.causal_lm import load_causal_lm
from target.loading import is_finite, loaded_tensors, not_finite
from target.model import Target
from tests.helpers.commands import command
from tests.helpers.tiny import VOCAB_SIZE, tiny_tokenizer
from trainer.errors import RunFault, UserError

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def changed(tiny_folder, tmp_path):
    """changed(arch, change of the tensors, keys of config.json) -> a copy of a tiny model."""

    def make(arch="llama", change=None, **config):
        folder = shutil.copytree(tiny_folder(arch), tmp_path / "model")
        file = folder / "model.safetensors"
        if change is not None:
            save_file(change(load_file(file)), file, metadata={"format": "pt"})
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | config))
        return folder

    return make


def refused(folder, key="model.target"):
    with pytest.raises(UserError) as caught:
        load_causal_lm(str(folder), key)
    assert (caught.value.key, caught.value.value) == (key, str(folder))
    assert "\n" not in str(caught.value)
    return caught.value


def loaded(folder):
    """The tensors, the same whatever is drawn."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model, _ = load_causal_lm(str(folder), "model.target")
        found.append(model.state_dict())
    first, second = found
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    return first


def without(part):
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


def renamed(old, new):
    return lambda tensors: {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in tensors.items()
    }


def adapted(tensors):
    tensors = renamed("", "base_model.model.")(tensors)
    matrix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors[f"{matrix}.base_layer.weight"] = tensors.pop(f"{matrix}.weight")
    return tensors | {f"{matrix}.lora_A.default.weight": torch.zeros(2, 32)}


def with_bias(value):
    name = "model.layers.0.self_attn.q_proj.bias"
    return lambda tensors: tensors | {name: torch.full((32,), value)}


# --- tensors of the model, tensors of the checkpoint ---------------------------------------------


@pytest.mark.parametrize(
    ("arch", "change", "config", "rule", "remedy"),
    [
        ("llama", without("lm_head"), {}, "lacks tensor 'lm_head.weight'", "download or convert"),
        ("llama", without(".layers.1."), {}, "lacks 9 tensors, such as 'model.layers.1.", "again"),
        ("llama", without(UP), {}, f"lacks tensor '{UP}'", "again"),
        ("llama_tied", without("embed_tokens"), {}, "lacks 2 tensors, such as 'lm_head", "again"),
        ("gpt2", without("h.0.attn.c_attn.bias"), {}, "h.0.attn.c_attn.bias'", "again"),
        ("llama", None, {"num_hidden_layers": 3}, "lacks 9 tensors", "again"),
        ("llama", None, {"num_hidden_layers": 1}, "no place for 9 tensors", "config.json"),
        ("llama", with_bias(1.0), {}, "no place for tensor 'model.layers.0.self", "config.json"),
        ("llama", None, {"vocab_size": 112}, "[100, 32], by config.json it has", "config.j"),
        ("llama", None, {"intermediate_size": 96}, "(and 5 more)", "correct config.json"),
        ("llama", renamed("", "_orig_mod."), {}, "lacks 21", "names carry '_orig_mod.'"),
        ("llama", renamed("", "module."), {}, "lacks 21", "names carry 'module.'"),
        ("llama", renamed("", "language_model."), {}, "lacks 21", "carry 'language_model.'"),
        ("llama", renamed("model.", "model.language_model."), {}, "lacks 20", "'language_model.'"),
        ("llama", adapted, {}, "lacks 21 tensors", "merge the adapter into the model first"),
        ("qwen3_moe", without("layers.0.mlp.experts.2."), {}, "has shape [3, 32, 32]", "config"),
        ("qwen3_moe", without("0.mlp.experts.2.gate_proj"), {}, "experts.gate_up_proj'", "again"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_whole_is_refused_by_name(
    changed, arch, change, config, rule, remedy, caplog
):
    error = refused(changed(arch, change, **config))
    assert rule in error.rule
    assert remedy in error.remedy
    assert "LOAD REPORT" not in caplog.text


def test_what_transformers_renames_is_loaded_as_it_is(changed, tiny_folder):
    whole = loaded(tiny_folder("llama"))
    found = loaded(changed("llama", renamed("model.", "")))  # as a decoder alone is saved
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("options", [{"sharded": True}, {"tie_word_embeddings": True}])
def test_shards_and_tied_matrices_are_whole(tiny_folder, options):
    assert loaded(tiny_folder("llama", **options))


def test_an_index_that_lacks_a_shard_is_a_model_that_lacks_its_tensors(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama", sharded=True), tmp_path / "model")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    lost = index["weight_map"]["lm_head.weight"]
    index["weight_map"] = {n: file for n, file in index["weight_map"].items() if file != lost}
    path.write_text(json.dumps(index))
    assert "lacks tensor 'lm_head.weight'" in refused(folder).rule


def test_a_class_cannot_excuse_a_missing_parameter(changed, monkeypatch):
    """Code that comes with a model may list parameters which need not be there."""
    kind = AutoModelForCausalLM._model_mapping[AutoConfig.for_model("llama").__class__]
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_missing", [r"lm_head\.weight"])
    assert "lacks tensor 'lm_head.weight'" in refused(changed("llama", without("lm_head"))).rule


def test_an_adapter_is_not_put_around_its_base_model(changed):
    folder = changed()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somewhere"}')
    error = refused(folder)
    assert error.rule == "it holds an adapter, not a model"
    assert "merge it into its base model" in error.remedy


def test_a_run_stops_before_its_folder_is_made(changed, tmp_path, capsys):
    words = command(tmp_path, changed("llama", without(UP)), "recipe=distillspec")
    assert train.main(words) == 2
    assert not (tmp_path / "run").exists()
    err = capsys.readouterr().err.splitlines()  # on a busy machine it says that it is loading
    assert [line for line in err if line.startswith("error:")] == err[-1:]


# --- what is left out ----------------------------------------------------------------------------


def test_what_a_class_leaves_out_is_said_in_one_line(tmp_path, capsys):
    config = AutoConfig.for_model(
        "qwen3_next", vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=1, num_experts=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=32,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=1,
        layer_types=["full_attention"], linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    layer = {f"mtp.layers.0.{part}.weight": torch.ones(3) for part in ("a", "b", "c")}
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(3)} | layer, file, {"format": "pt"})
    load_causal_lm(str(tmp_path), "model.target")
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"model.target={tmp_path}: left out, as Qwen3NextForCausalLM has no place for it: "
        "mtp.fc.weight (1), mtp.layers.* (3)"
    ]


@pytest.mark.parametrize(
    ("arch", "name", "shape"),
    [
        ("llama", "model.layers.1.self_attn.rotary_emb.inv_freq", (4,)),
        ("gpt2", "transformer.h.0.attn.bias", (1, 1, 8, 8)),
        ("gpt2", "h.0.attn.masked_bias", ()),
    ],
)
def test_buffers_of_older_checkpoints_are_left_out(changed, capsys, arch, name, shape):
    load_causal_lm(str(changed(arch, lambda t: t | {name: torch.ones(shape)})), "model.target")
    [line] = capsys.readouterr().out.splitlines()
    assert name.rpartition(".")[2] + " (1)" in line


def test_a_bias_of_zeros_is_none(changed, tiny_folder):
    """GPTQ's tools write one for every layer."""
    found = loaded(changed("llama", with_bias(0.0)))
    assert all(torch.equal(found[name], t) for name, t in loaded(tiny_folder("llama")).items())


# --- quantised -----------------------------------------------------------------------------------


def float8(scale):
    """The matrices of the layers as float8, each with one scale under this name, or none."""

    def change(tensors):
        made = {}
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight"):
                step = tensor.abs().max() / 448
                made[name] = (tensor / step).to(torch.float8_e4m3fn)
                if scale:
                    made[name.replace("weight", scale)] = step.clone()
            else:
                made[name] = tensor
        return made

    return change


def test_a_known_quantisation_is_read_with_its_scales(changed, tiny_folder):
    found = loaded(changed("llama", float8("weight_scale_inv"), quantization_config=FP8))
    whole = loaded(tiny_folder("llama"))
    near = [(found[n] - t).abs().max() < 0.04 * t.abs().max() for n, t in whole.items()]
    assert all(near)


@pytest.mark.parametrize(
    ("scale", "quantised", "rule"),
    [
        ("weight_scale", {"quant_method": "tomorrow"}, "quant_method='tomorrow', which"),
        ("weight_scale", None, "stores F8_E4M3 numbers without a quantization_config"),
        (None, None, "stores F8_E4M3 numbers without a quantization_config"),
        ("weight_scale", FP8, "no place for 14 tensors"),
        (None, FP8, "stores F8_E4M3 numbers without their scales: 14 tensors"),
    ],
)
def test_numbers_without_their_scales_are_refused(changed, scale, quantised, rule):
    given = {} if quantised is None else {"quantization_config": quantised}
    error = refused(changed("llama", float8(scale), **given))
    assert rule in error.rule
    assert "not quantised" in error.remedy


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_whole_numbers_are_no_weights(changed, dtype):
    change = lambda tensors: tensors | {UP: (tensors[UP] * 9).to(dtype)}  # noqa: E731
    assert UP in refused(changed("llama", change)).rule


def test_packed_numbers_are_not_taken_for_another_shape(changed):
    change = lambda tensors: tensors | {UP: torch.zeros(64, 16, dtype=torch.uint8)}  # noqa: E731
    assert "stores U8 numbers without" in refused(changed("llama", change)).rule


def test_so_in_files_that_torch_wrote(changed):
    folder = changed("llama", float8(None))
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    assert "stores torch.float8_e4m3fn numbers without" in refused(folder).rule


def test_a_file_with_more_than_tensors_is_one_readable_error(changed):
    folder = changed()
    (folder / "model.safetensors").unlink()
    torch.save({"model": torch.nn.Linear(2, 2)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"cannot load .*Weights only load failed"):
        load_causal_lm(str(folder), "model.target")


# --- finite --------------------------------------------------------------------------------------


def broken(*names):
    def change(tensors):
        for name, value in zip(names, (torch.nan, torch.inf, -torch.inf), strict=False):
            tensors[name].view(-1)[-1] = value
        return tensors

    return change


def test_tensors_that_are_not_finite_are_counted(changed):
    error = refused(changed("llama", broken(UP, "model.norm.weight", "lm_head.weight")))
    assert error.rule == "NaN or Inf in 3 tensors, such as 'lm_head.weight'"


def test_a_tied_tensor_is_counted_once(changed):
    error = refused(changed("llama_tied", broken("model.embed_tokens.weight")))
    assert error.rule == "NaN or Inf in tensor 'model.embed_tokens.weight'"


PARTS = ("model.embed_tokens", "model.layers.1", "model.norm", "lm_head", "model.rotary_emb")


@pytest.mark.parametrize(
    "places", ["cpu", dict.fromkeys(PARTS, "cpu") | {"model.layers.0": "disk"}], ids=str
)
def test_weights_of_a_spread_model_are_looked_at(changed, places):
    folder = changed("llama", broken(UP))
    with pytest.raises(UserError) as caught:
        Target.load(str(folder), device_map=places)
    assert caught.value.rule == f"NaN or Inf in tensor '{UP}'"


def test_so_are_weights_that_wait_for_their_device(tiny_folder):
    model, _ = load_causal_lm(str(tiny_folder("llama")), "model.target")
    expected = {name: t.clone() for name, t in model.named_parameters()}
    cpu_offload(model, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    found = dict(loaded_tensors(model))
    assert expected.keys() == found.keys()
    assert not_finite(loaded_tensors(model)) == []
    model.model.norm._hf_hook.weights_map["weight"][3] = torch.nan
    assert not_finite(loaded_tensors(model)) == ["model.norm.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16,
                                   torch.float8_e4m3fn, torch.float8_e5m2])  # fmt: skip
def test_finite_in_every_dtype(dtype):
    values = torch.tensor([1.0, -448.0, 0.0]).to(dtype)
    assert is_finite(values)
    assert not is_finite(torch.tensor([1.0, torch.nan]).to(dtype))
    assert is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(torch.arange(3))


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        OSError(12, "Cannot allocate memory"),
        numpy._core._exceptions._ArrayMemoryError((9,), numpy.dtype("float32")),
    ],
)  # fmt: skip
def test_a_model_that_is_too_large_is_a_fault_with_its_remedy(tiny_folder, monkeypatch, error):
    def load(*arguments, **options):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(RunFault) as caught:
        load_causal_lm(str(tiny_folder("llama")), "model.target")
    said = str(caught.value)
    for word in ("model.dtype", "model.device_map", "model.quantization"):
        assert word in said


# --- tokens without rows -------------------------------------------------------------------------


def with_tokens(folder, template):
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|begin|>", "<|image|>"]})
    tokenizer.chat_template = template.replace("TURN", "<|begin|>")
    tokenizer.save_pretrained(folder)
    return folder


def test_a_template_that_writes_a_token_without_a_row_is_refused(changed):
    folder = with_tokens(changed(), "{% for m in messages %}TURN{{ m.content }}{% endfor %}")
    with pytest.raises(UserError) as caught:
        Target.load(str(folder))
    assert (caught.value.key, caught.value.value) == ("model.target", str(folder))
    assert caught.value.rule == (
        "its chat template writes '<|begin|>', token 100, but the target's embedding has 100 rows"
    )


def test_a_token_without_a_row_is_refused_where_a_text_has_it(changed):
    """One that no text has is not: Gemma 3's text models have such a token."""
    folder = with_tokens(changed(), "{% for m in messages %}{{ m.content }}{% endfor %}")
    target = Target.load(str(folder))
    assert target.vocab_size == 100
    target.check_ids([5, 99], "a.jsonl row 1")
    with pytest.raises(UserError) as caught:
        target.check_ids([5, 101, 99], "a.jsonl row 1")
    assert caught.value.key == "a.jsonl row 1"
    assert caught.value.rule.startswith("the text has '<|image|>', token 101, but the target's")
