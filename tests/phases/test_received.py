"""`train.py config=<run>/config.yaml`: what is taken from a stored configuration, what is not."""

from __future__ import annotations

import shlex

import pytest
import yaml

import train
from phases import pipeline
from tests.helpers.commands import command
from trainer.config import to_yaml
from trainer.errors import UserError


@pytest.fixture
def stored(tmp_path):
    """Write the config.yaml of a run of these words; return its path."""

    def write(*words, **sections):
        config = pipeline.resolve(["recipe=eagle3", *words])[0]
        table = yaml.safe_load(to_yaml(config))
        for name, values in sections.items():
            table[name] = {**table[name], **values} if isinstance(values, dict) else values
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(table))
        return path

    return write


def refused(*words):
    with pytest.raises(UserError) as caught:
        pipeline.resolve([*words])
    assert "\n" not in str(caught.value)
    return caught.value


NAMES = (
    "model.target=org/model", "model.target_revision=abc", "data.prompts=org/chats",
    "data.prompts_split=train_sft", "eval.prompts=questions:math",
    "data.system_prompt=yes/no/maybe",
    "data.chat_template_kwargs={enable_thinking: false}", "method.steps=3", "trainer.lr=1e-4",
    "trainer.max_steps=7", "eval.K=5", "eval.tree=dynamic:25:5:8", "eval.temperatures=[0, 0.7]",
    "eval.policy=fixed", "data.max_new_tokens=33", "run.seed=3", "model.dtype=bfloat16",
)  # fmt: skip


def test_a_stored_configuration_gives_the_same_run(stored, capsys):
    path = stored(*NAMES)
    again, module = pipeline.resolve([f"config={path}"])
    assert again == pipeline.resolve(["recipe=eagle3", *NAMES])[0]
    assert module.__name__ == "recipes.eagle3"
    assert capsys.readouterr().out == ""
    longer = pipeline.resolve([f"config={path}", "trainer.max_steps=600"])[0]
    assert longer.trainer.max_steps == 600
    assert longer.trainer.lr == 1e-4


NOT_TAKEN = [
    ("model", {"trust_remote_code": True}), ("run", {"dir": "runs/my x"}),
    ("data", {"cache_dir": "/scratch/c"}), ("data", {"engine": "vllm", "engine_options": {"a": 1}}),
    ("eval", {"engine": "http://127.0.0.1:9"}), ("trainer", {"resume": "never"}),
    ("trainer", {"wandb": "online"}), ("data", {"features_engine": "http://127.0.0.1:9"}),
    ("data", {"features": "cached", "features_url": "memory://c"}),
]  # fmt: skip


@pytest.mark.parametrize(("section", "values"), NOT_TAKEN)
def test_what_belongs_to_a_machine_is_printed_as_the_words_to_add(stored, capsys, section, values):
    path = stored(**{section: values})
    config = pipeline.resolve([f"config={path}"])[0]
    key, value = list(values.items())[-1]
    assert getattr(getattr(config, section), key) != value
    said = capsys.readouterr().out
    (word,) = shlex.split(said.partition("to use them: ")[2])
    assert (
        said
        == f"config={path}: not taken from it, add these words to use them: {shlex.quote(word)}\n"
    )
    added = pipeline.resolve([f"config={path}", word])[0]
    assert getattr(getattr(added, section), key) == value
    assert capsys.readouterr().out == ""


NEEDED = [
    ("model", "target", "/models/x"), ("model", "drafter", "runs/a/drafter"),
    ("data", "prompts", "../chats.jsonl"), ("eval", "prompts", "~/held.jsonl"),
    ("data", "traces", "/store"), ("eval", "tree", ["static,file=tree.json"]),
    ("data", "prompts", "s3://bucket/x.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "key", "value"), NEEDED)
def test_without_its_text_and_models_the_command_stops(stored, section, key, value):
    path = stored(**{section: {key: value}, "run": {"dir": "/runs/x"}})
    error = refused(f"config={path}")
    assert (error.key, error.value) == ("config", str(path))
    assert error.rule.startswith(f"its {section}.{key} is of the machine")
    assert error.remedy.endswith("run.dir=/runs/x, or other values of these keys")
    config = pipeline.resolve([f"config={path}", f"{section}.{key}=null"
                            if section == "eval" or key in ("drafter", "traces")
                            else f"{section}.{key}=org/other"])[0]  # fmt: skip
    assert getattr(getattr(config, section), key) in (None, [], "org/other")


def test_a_name_that_exists_here_is_a_path(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = stored("data.prompts=chats")
    assert pipeline.resolve([f"config={path}"])[0].data.prompts == "chats"
    (tmp_path / "chats").mkdir()
    assert "data.prompts" in refused(f"config={path}").rule


def test_paths_of_a_recipes_own_keys_are_not_taken(tmp_path):
    cases = {"osd": ("log", "/requests.jsonl"), "fastdraft": ("corpus", {"/texts": 1.0}),
             "gto": ("reference", "/head")}  # fmt: skip
    for recipe, (key, value) in cases.items():
        config = pipeline.resolve([f"recipe={recipe}"])[0]
        table = yaml.safe_load(to_yaml(config))
        table["method"][key] = value
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(table))
        error = refused(f"config={tmp_path}/config.yaml")
        assert error.rule.startswith(f"its method.{key} is of the machine")


def test_a_revision_belongs_to_the_name_beside_it(stored):
    path = stored(*NAMES)
    config = pipeline.resolve(
        [f"config={path}", "model.target=other/model", "data.prompts=a.jsonl"]
    )[0]
    assert config.model.target_revision is None
    assert config.data.prompts_split == "train"


@pytest.mark.parametrize("word", ["recipe=eagle3", "preset=published"])
def test_a_recipe_or_preset_beside_it_is_refused(stored, word):
    path = stored()
    error = refused(f"config={path}", word)
    assert (error.key, error.value) == ("config", str(path))
    assert error.remedy == f"leave out {word}, or config="
    assert refused(f"config={path}", f"config={path}").rule == "is given twice"


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


DEEP = "recipe: eagle3\ndata: {engine_options: {a: " + "[" * 200 + "]" * 200 + "}}"
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 300))


@pytest.mark.parametrize(
    "text",
    [DEEP, CHAIN, "x: [" + "[]," * 250_000 + "]",
     "", "[]", "3", "recipe: [eagle3]", "recipe: nothing", "recipe: ../../x", BOMB, MERGE_BOMB,
     "a: &a [*a]", "!!python/object/apply:os.system ['true']", "[" * 5000, "a: " + "9" * 5000,
     "a: [", "\x00", "x: " + "y" * (1 << 20), "recipe: eagle3\ntrainer: 3", "recipe: eagle3\n1: 2",
     "recipe: eagle3\ntrainer: {max_steps: many}", "recipe: eagle3\ntrainer: {old_key: 1}",
     "recipe: eagle3\ndata: {prompts: {a: 1}}", "recipe: eagle3\ndry_run: true",
     "recipe: eagle3\nmodel: {drafter: [1]}", "recipe: eagle3\nmethod: [1]",
     "recipe: eagle3\ndata: {2024-01-01: 1}", "recipe: eagle3\nscript: {out: /x}"],
)  # fmt: skip
def test_what_is_no_configuration_is_one_line_at_once(tmp_path, text, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert train.main([f"config={path}"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert len(said.err) < 1000
    assert said.out == ""


def test_a_missing_file_and_a_device_are_one_line(tmp_path):
    assert str(refused(f"config={tmp_path}/x.yaml")).endswith("x.yaml does not exist")
    assert "is a device" in str(refused("config=/dev/zero"))
    assert "is a folder" in str(refused(f"config={tmp_path}"))


def test_words_of_somebody_elses_are_printed_without_escapes(stored, capsys):
    path = stored(run={"dir": "x\x1b[2J\u202e"})
    pipeline.resolve([f"config={path}"])
    assert capsys.readouterr().out.endswith("add these words to use them: run.dir=...\n")


def test_the_words_to_add_give_the_same_run(tmp_path, tiny_folder):
    words = command(tmp_path, tiny_folder("llama"), "eval.temperatures=0", "method.control=false")
    config = pipeline.resolve(words)[0]
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    error = refused(f"config={tmp_path}/config.yaml")
    added = shlex.split(
        error.remedy.removeprefix("add ").removesuffix(", or other values of these keys")
    )
    assert pipeline.resolve([f"config={tmp_path}/config.yaml", *added])[0] == config
