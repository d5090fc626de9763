"""A model's folder that comes from anyone ends in one line, at once, whatever is in it."""

from __future__ import annotations

import json
import os
import pickle
import socket

import pytest
from safetensors.torch import load_file

from target import folder as module
from target.causal_lm import load_causal_lm
from target.folder import check_folder, check_model, check_sizes, reading
from tests.helpers.commands import pipe
from tests.helpers.tiny import save_tiny
from trainer.errors import RunFault, UserError


@pytest.fixture
def model(tmp_path):
    return save_tiny(tmp_path / "model", "llama")


@pytest.fixture
def unbuilt(monkeypatch):
    """No network may be built."""
    monkeypatch.setattr(
        "target.causal_lm.AutoModelForCausalLM.from_pretrained",
        lambda *_, **__: pytest.fail("it was built"),
    )


def said(folder):
    with pytest.raises(UserError) as caught:
        load_causal_lm(str(folder), "model.target")
    line = str(caught.value)
    assert line.startswith("model.target")
    assert "\n" not in line
    return line


def edited(path, **changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def nested(depth):
    return "[" * depth + "]" * depth


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as here:
        os.chdir(path.parent)  # its name may be 107 bytes long
        here.bind(path.name)


MADE = {"pipe": pipe, "socket": unix_socket, "device": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.parametrize("what", MADE)
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "tokenizer.json", "model.safetensors",
     "additional_chat_templates/x.jinja"],
)  # fmt: skip
def test_what_is_no_regular_file_is_not_opened(model, monkeypatch, what, name):
    monkeypatch.chdir(model)
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    MADE[what](path)
    assert said(model) == f"model.target: the file {path} is a {what}: name a regular file"


@pytest.mark.parametrize("what", MADE)
def test_a_name_that_is_no_folder_and_no_regular_file_is_not_opened(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    MADE[what](tmp_path / "x")
    assert f"{tmp_path / 'x'} is a {what}: name a regular file" in said(tmp_path / "x")


# the index of a checkpoint


def sharded(folder, part):
    """One tensor of the model lies in the file `part`, the others in one of the folder."""
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    parts = dict.fromkeys(names, "model-1.safetensors") | {names[0]: part}
    content = json.dumps({"metadata": {}, "weight_map": parts})
    (folder / "model.safetensors.index.json").write_text(content)


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize(
    "part", ["../other/model.safetensors", "a/../../x", "/dev/zero", "/etc/passwd", "x\0y"]
)
def test_an_index_names_no_file_elsewhere(model, part):
    sharded(model, part)
    line = said(model)
    assert "index.json: weight_map must name files of the folder that it lies in, got " in line
    assert line.endswith("; correct it, or download it again")


@pytest.mark.usefixtures("unbuilt")
def test_an_index_names_no_pipe_however_deep(model):
    (model / "a" / "b").mkdir(parents=True)
    pipe(model / "a" / "b" / "c.safetensors")
    sharded(model, "a/b/c.safetensors")
    assert "a/b/c.safetensors is a pipe: name a regular file" in said(model)


@pytest.mark.usefixtures("unbuilt")
def test_a_part_that_is_missing_is_named(model):
    sharded(model, "gone.safetensors")
    assert "weight_map=gone.safetensors: is not there; download it again" in said(model)


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("content", ["[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{}"])
def test_an_index_that_is_no_table_is_named(model, content):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(content)
    assert "index.json" in said(model)


def test_the_parts_of_a_folder_are_loaded(model):
    (model / "deeper").mkdir()
    sharded(model, "model-1.safetensors")
    check_folder("model.target", model)
    load_causal_lm(str(model), "model.target")


# the tables


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json",
                                  "special_tokens_map.json", "added_tokens.json"])  # fmt: skip
@pytest.mark.parametrize(
    "content", ["[1]", "3", nested(100_000), f'{{"a": {nested(900)}}}', "\xff"]
)
def test_a_file_that_is_no_table_is_named(model, name, content):
    (model / name).write_text(content, encoding="latin1")
    line = said(model)
    assert line.startswith(f"model.target: {model / name} is damaged (")
    assert line.endswith("); correct it, or download it again")


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "anything.json"])
def test_a_file_that_is_far_too_large_is_not_read(model, name):
    (model / name).touch()
    os.truncate(model / name, 1 << 40)
    assert f"{model / name} must have at most 268435456 bytes" in said(model)


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("num_hidden_layers", 1_000_000, "must be at most 10000, got 1000000"),
        ("num_hidden_layers", 9000, "must fit the weights, which are at most 21 tensors"),
        ("num_hidden_layers", 0, "must be a whole number >= 1, got 0"),
        ("num_attention_heads", 0, "must be a whole number >= 1, got 0"),
        ("num_attention_heads", True, "must be a whole number >= 1, got True"),
        ("num_attention_heads", 10**9, "must fit the weights"),
        ("num_key_value_heads", 0, "must be a whole number >= 1, got 0"),
        ("hidden_size", -1, "must be a whole number >= 1, got -1"),
        ("hidden_size", float("nan"), "must be a number, not NaN"),
        ("hidden_size", 10**8, "must fit the weights"),
        ("intermediate_size", 10**8, "must fit the weights"),
        ("vocab_size", 10**9, "must fit the weights"),
        ("vocab_size", "100", "must be a whole number >= 1, got '100'"),
        ("max_position_embeddings", -1, "must be a whole number >= 1, got -1"),
        ("head_dim", -8, "must be a whole number >= 1, got -8"),
        ("rms_norm_eps", -1.0, "must be a number >= 0, got -1.0"),
        ("rms_norm_eps", float("nan"), "must be a number, not NaN"),
        ("rms_norm_eps", float("inf"), "must be a number >= 0, got inf"),
        ("attention_dropout", [float("nan")], "must be a number, not NaN"),
        ("rope_scaling", [], "must be a table, got []"),
        ("rope_parameters", [1], "must be a table, got [1]"),
        ("quantization_config", [1], "must be a table, got [1]"),
        ("quantization_config", "fp8", "must be a table, got 'fp8'"),
        ("rope_theta", 0, "must be a number > 0, got 0"),
        ("eos_token_id", "x", "must be a token's number, or a list of such, got 'x'"),
        ("eos_token_id", [[0]], "must be a token's number, or a list of such, got [[0]]"),
    ],
)
def test_a_configuration_that_no_model_has_is_named(model, key, value, rule):
    edited(model / "config.json", **{key: value})
    assert f"model.target: {model / 'config.json'}: {key} {rule}" in said(model)


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize(
    ("table", "inner", "rule"),
    [
        ("text_config", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        ("vision_config", {"hidden_size": -1}, "hidden_size must be a whole number >= 1"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 0}, "factor must be a number > 0"),
        ("quantization_config", {"bits": float("nan")}, "bits must be a number, not NaN"),
    ],
)
def test_so_is_one_inside_it(model, table, inner, rule):
    edited(model / "config.json", **{table: inner})
    assert f"config.json: {table}: {rule}" in said(model)


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("value", ["x", -1, 10**12, [[0]], {"a": 1}, float("nan"), True])
def test_what_ends_an_answer_is_a_token(model, value):
    edited(model / "generation_config.json", eos_token_id=value)
    assert "generation_config.json: eos_token_id must be a" in said(model)


def test_sizes_of_each_layer_and_of_quantised_weights_are_no_mistake(model):
    config = json.loads((model / "config.json").read_text())
    module.check_config("x", config | {"intermediate_size": [64, 0], "num_key_value_heads": None})
    files, half = [model / "model.safetensors"], (model / "model.safetensors").stat().st_size // 2
    check_sizes("x", {"hidden_size": 1, "vocab_size": 16 * half}, files, ("vocab_size",), bits=1)
    with pytest.raises(UserError, match="vocab_size must fit the weights"):
        check_sizes("x", {"hidden_size": 1, "vocab_size": 3 * half}, files, ("vocab_size",))


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("tokenizer_config.json", {"model_max_length": "x"}, "TypeError"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "AttributeError"),
        ("tokenizer_config.json", {"eos_token": ["x"]}, "TypeError"),
        ("config.json", {"hidden_act": "evil"}, "KeyError: 'evil'"),
        ("config.json", {"model_type": ["llama"]}, "TypeError"),
        ("config.json", {"pad_token_id": 10**9}, "AssertionError"),
        ("config.json", {"rope_parameters": {"rope_theta": "x"}}, "TypeError"),
        ("config.json", {"dtype": "evil"}, "AttributeError"),
        ("config.json", {"quantization_config": {"quant_method": ["x"]}}, "TypeError"),
    ],
)
def test_whatever_a_library_raises_is_one_line(model, name, changed, says):
    edited(model / name, **changed)
    line = said(model)
    assert line.startswith(f"model.target: cannot load {str(model)!r} as a causal language model")
    assert says in line


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", b"\x80\x02}q\x00(X\x01", pickle.dumps(3, 2), b"PK\x03\x04" + b"\0" * 60,
     pickle.dumps({"a": print}, 2), b"\x80\x02" + b"]" * 10_000 + b"a" * 9_999 + b"."],
)  # fmt: skip
def test_a_damaged_pickle_is_one_line(model, content):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(content)
    assert said(model).startswith("model.target: cannot load ")


@pytest.mark.slow
def test_what_is_stored_plain_is_not_read_as_quantised(model):
    pytest.importorskip("bitsandbytes")
    edited(model / "config.json", quantization_config={"load_in_4bit": True})
    assert "it is stored quantised, and its weights are not; take" in said(model)


def test_the_memory_is_no_mistake_of_the_file_and_a_mistake_keeps_its_words():
    with pytest.raises(RunFault, match="x: the memory does not suffice"), reading("x"):
        raise MemoryError
    with pytest.raises(UserError, match=r"^as it is$"), reading("x"):
        raise UserError("as it is")
    with pytest.raises(UserError, match=r"^x \(OSError: no network\)$"), reading("x"):
        raise OSError("no network")
    with pytest.raises(UserError, match=r"^x \(KeyError: 'a'\); do this$"), reading("x", "do this"):
        raise KeyError("a")


def test_a_folder_without_weights_is_left_to_its_reader(model):
    (model / "model.safetensors").unlink()
    check_model("model.target", model)
