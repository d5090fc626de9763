"""The commands of servers: they parse, they say what the run itself would start, and the training
that they name is the one that was asked for."""

import json
import re
import shlex

import pytest

from engines.states import states_options
from engines.vllm_server import command_line
from phases import pipeline
from recipes import base
from scripts.serve import ENGINES, commands, main, resolve
from target.outline import outline


def listed(text):
    """The words of each command."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("recipe", base.names())
def test_every_recipe_has_commands_for_every_engine(recipe, tiny_folder):
    target = f"model.target={tiny_folder('llama', layers=8)}"
    for engine in ENGINES:
        text = commands(resolve([f"recipe={recipe}", target, f"script.engine={engine}"]))
        (train,) = (words for words in listed(text) if "train.py" in words)
        config, _ = pipeline.resolve(train[3:])
        assert config.recipe == recipe
        last = text.rpartition("#")[2]
        assert f"script.out={config.run_dir}/export/{engine}" in last or "not serve" in last
        assert config.data.engine == ("hf" if engine == "llamacpp" else "openai")
        assert (config.data.features_engine != "hf") == ("StatesConnector" in text)


def test_the_states_are_those_that_the_run_asks_for(tiny_folder, tmp_path):
    folder = tiny_folder("llama", layers=8)
    given = [f"model.target={folder}", "method.layers=[2,5,6]", f"script.folder={tmp_path}/a b"]
    text = commands(resolve(["recipe=eagle3", *given]))
    words = next(words for words in listed(text) if "--kv-transfer-config" in words)
    target = outline(str(folder))
    asked = command_line(states_options(target, [2, 5, 6, "final_norm"], tmp_path / "a b"))
    assert words[-len(asked) :] == asked
    assert '_ids": [3, 6, 7, 8]' in words[words.index("--speculative-config") + 1]
    assert "2 as 3, 5 as 6, 6 as 7, final_norm as 8" in text
    assert f"mkdir -p '{tmp_path}/a b'" in text


def test_what_was_asked_for_reaches_the_servers(tiny_folder):
    target = f"model.target={tiny_folder('llama', layers=8)}"
    given = [
        target,
        "data.chat_template_kwargs={enable_thinking: false}",
        "eval.K=3",
        "run.dir=runs/x",
    ]
    text = commands(resolve(["recipe=eagle3", *given, "model.dtype=bfloat16"]))
    assert text.count("--dtype bfloat16") == 3
    last = listed(text)[-1]
    assert json.loads(last[last.index("--default-chat-template-kwargs") + 1]) == {
        "enable_thinking": False
    }
    assert last[-2:] == ["--dtype", "bfloat16"]
    speculative = json.loads(last[last.index("--speculative-config") + 1])
    assert speculative["model"] == "runs/x/export/vllm"
    assert speculative["num_speculative_tokens"] == 3
    gguf = commands(resolve(["recipe=eagle3", *given, "script.engine=llamacpp"]))
    assert "model.target_gguf=TARGET.gguf" in gguf
    assert "llama-server -m TARGET.gguf" in gguf
    block = commands(resolve(["recipe=dflash", target, "eval.K=40", "eval.tree=null"]))
    assert json.loads(listed(block)[-1][-1])["num_speculative_tokens"] == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["script.engine=tensorrt"], r"script\.engine must be one of vllm, sglang, llamacpp"),
        (["recipe=eagle3", "model.target=nowhere/at/all"], r"model\.target"),
        (["recipe=eagle3", "model.drafter=org/head"], r"method\.layers must name the layers that"),
        (["recipe=eagle3", "script.enigne=vllm"], r"unknown key 'script\.enigne'"),
        (["script.engine=vllm"], "name one recipe as recipe=<name>"),
    ],
)
def test_a_wrong_word_is_one_line(words, says, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert re.search(says, error)
    assert error.count("\n") == 1
