"""What others give us runs no code, leaves its folder for no file, and sees no secret."""

from __future__ import annotations

import ast
import contextlib
import html
import io
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

import train
from drafters.export import hf
from drafters.export.card import Export
from engines.vllm_server import PYTHON_VARIABLE
from eval.config import EvalConfig
from phases import exits, pipeline, run
from recipes.common.config import compose
from scripts import evaluate
from target.causal_lm import load_causal_lm
from tests.helpers.commands import ROOT, command, write_jsonl
from tests.scripts.test_setup import ROOMS
from trainer.config import FORMAT, TrainerConfig, to_yaml
from trainer.errors import UserError
from trainer.redaction import MARK, shown_command
from trainer.tracking import Tracker

SECRETS = {"HF_TOKEN": "hf_secretsecretsecret", "OPENAI_API_KEY": "sk-secretsecret",
           "WANDB_API_KEY": "f" * 40}  # fmt: skip
SOURCES = [ROOT / "train.py", *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]


def called(tree):
    """(dotted name, keywords) of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            keywords = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            yield ast.unparse(node.func), keywords


def test_nothing_that_is_read_can_run_code():
    assert len(SOURCES) > 200
    for path in SOURCES:
        for name, keywords in called(ast.parse(path.read_text())):
            at = f"{path.relative_to(ROOT)}: {name}"
            assert name not in ("eval", "exec", "pickle.load", "pickle.loads", "os.system"), at
            if name == "torch.load":
                assert keywords.get("weights_only") is True, at
            assert not name.endswith("yaml.load"), f"{at}: yaml.safe_load it is"
            assert keywords.get("shell") is not True, at


@pytest.fixture
def foreign(tiny_folder, tmp_path):
    """A model whose configuration names code of its own, which leaves a mark when it runs."""
    folder, mark = tmp_path / "foreign", tmp_path / "it-ran"
    shutil.copytree(tiny_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {
        "AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'foreign'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    return folder, mark


def test_code_of_a_model_runs_only_where_that_is_asked_for_and_said(foreign, capsys, monkeypatch):
    folder, mark = foreign
    with pytest.raises(UserError, match=r"model\.target: cannot load"):
        load_causal_lm(str(folder), "model.target")
    assert not mark.exists()
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder.parent / "modules"))
    load_causal_lm(str(folder), "model.target", trust_remote_code=True)
    assert mark.exists()
    assert f"code that comes with {folder} may run here" in capsys.readouterr().out


def test_a_drafter_with_code_of_its_own_is_measured_and_exported_where_that_is_asked_for(
    foreign, tiny_target, monkeypatch, tmp_path
):
    folder, mark = foreign
    target, config = tiny_target("llama"), EvalConfig(drafter=str(folder))
    with pytest.raises(UserError, match=r"set model\.trust_remote_code=true"):
        evaluate.drafter_of(config, target)
    assert not mark.exists()
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder.parent / "modules"))
    drafter = evaluate.drafter_of(config, target, trusted=True)
    assert hf.write(drafter, tmp_path / "out", Export("card", "org/target", 3)).exists()


@pytest.mark.slow
def test_names_in_a_prompt_file_are_only_text(tiny_folder, tmp_path):
    """As a domain or an id they could name a file elsewhere, or run in the report's page."""
    folder = tmp_path / "here" / "deep"
    words = command(folder, tiny_folder("llama"), "eval.temperatures=0", "method.control=false")
    evil = ["../../../evil", "/tmp/evil", "<script>alert(1)</script>", "a\x00b", "..", "x" * 300]
    for name in ("train", "eval"):
        rows = [
            {"prompt": f"{name} {i}: ", "domain": text, "conversation_id": text, "id": text}
            for i, text in enumerate(evil)
        ]
        write_jsonl(folder / f"{name}.jsonl", rows)
    assert train.main(words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"here"}
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"deep"}
    assert {path.name for path in folder.iterdir()} == {"run", "cache", "train.jsonl", "eval.jsonl"}
    assert "<script>alert" not in (folder / "run" / "report.html").read_text()


# where a run takes free keys or free text, and goes on; the names are read by the target's template
TEMPLATE = "{% if hf_token or api_key or note %}{% endif %}"
PLAIN = "opaque-and-of-no-known-form"
GIVEN = {
    "data.chat_template_kwargs": "{hf_token: %s, api_key: [%s], note: see http://me:%s@host/}",
    "data.system_prompt": "%s",
}
ROTATED = ("ghp_" + "a1b2" * 9, PLAIN, "pass-word", "glpat-abcdefghij0123456789")
FIRST = ("hf_" + "A1b2" * 8, PLAIN[::-1], "first-password", "sk-ant-api03-abcdefghij")
OF_THE_ENVIRONMENT = "a-value-of-the-environment-that-names-no-secret"


def secret_words(folder, tiny_folder, secrets):
    chat, own = Path(tiny_folder("llama", chat_template=True)), folder / "of-a-model"
    if not own.exists():
        shutil.copytree(chat, own)
        template = own / "chat_template.jinja"
        template.write_text(TEMPLATE + template.read_text())
    given = {key: value % secrets[3 * i : 3 * i + 3] for i, (key, value) in enumerate(
        GIVEN.items())}  # fmt: skip
    return command(
        folder, own, "eval.temperatures=0", "method.control=false", "trainer.wandb=offline",
        *(f"{key}={value}" for key, value in given.items()),
    )  # fmt: skip


def said(main, words):
    """(exit code, all that the command shows)."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = main(words)
    return code, shown.getvalue()


@pytest.fixture(scope="module")
def hidden(tmp_path_factory, tiny_folder):
    """A run with secrets wherever it takes some: its folder, its words and what it showed."""
    folder = tmp_path_factory.mktemp("hidden") / "of-this-machine"
    words = secret_words(folder, tiny_folder, FIRST)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SECRETS, "A_VARIABLE": OF_THE_ENVIRONMENT}.items():
            patch.setenv(name, value)
        code, shown = said(train.main, words)
    assert code == 0, shown
    return folder, words, shown


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_secret_is_written_or_shown(hidden):
    folder, _, shown = hidden
    texts = {"shown": shown.encode(), **files_of(folder)}
    assert len(texts) > 20
    for value in (*SECRETS.values(), *FIRST):
        assert not [name for name, text in texts.items() if value.encode() in text], value
    run = folder / "run"
    for name in ("config.yaml", "run.json", "report.json", "export/transformers/README.md"):
        assert MARK in (run / name).read_text(), name
    assert html.escape(MARK) in (run / "report.html").read_text()
    assert html.escape(MARK) in (run / "report.md").read_text()


def test_what_others_may_read_does_not_say_where_files_lie(hidden):
    folder, words, _ = hidden
    run = folder / "run"
    public = [*run.glob("report.*"), *(run / "export").rglob("*"), *(run / "drafter").rglob("*")]
    public = [path for path in public if path.is_file()]
    assert len(public) > 10
    for path in public:
        assert folder.parent.name.encode() not in path.read_bytes(), path
    report = json.loads((run / "report.json").read_text())
    assert report["target"]["name"] == "of-a-model"
    assert {row["prompts"]["name"] for row in report["results"]} == {"eval.jsonl"}
    assert f"data.prompts={folder / 'train.jsonl'}" in words
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"]["prompts"] == str(folder / "train.jsonl")  # it can be run again
    # this stays here: the command as a shell runs it again
    command = shlex.split(json.loads((run / "run.json").read_text())["command"])
    assert f"data.prompts={folder / 'train.jsonl'}" in command


def test_wandb_is_given_the_configuration_and_nothing_of_this_machine(hidden):
    folder, words, _ = hidden
    found = files_of(folder / "run" / "wandb")
    records = [path for path in found if path.suffix == ".wandb"]
    assert len(records) == 2  # of the training and of the report
    for path in records:
        assert MARK.encode() in found[path]
        assert b'"num_prompts":8' in found[path]
        assert b"train.jsonl" in found[path]
    own = [folder.parent.name, sys.executable, str(ROOT), words[3], OF_THE_ENVIRONMENT,
           "first batch, row 0"]  # fmt: skip
    for path, content in found.items():
        assert OF_THE_ENVIRONMENT.encode() not in content, path
        if not path.name.startswith("debug"):  # W&B's own log stays here
            assert not [value for value in own if value.encode() in content], path
    assert not [path for path in found if path.name in ("output.log", "wandb-metadata.json")]


def test_wandb_collects_nothing_by_itself(tmp_path):
    """It does so seconds after the start, when a small run may be over."""
    tracker = Tracker(TrainerConfig(wandb="offline"), tmp_path, "name", {})
    settings = tracker._wandb.settings
    tracker.finish()
    assert settings.x_disable_machine_info  # the words of the command, programs, user, processor
    assert settings.disable_git
    assert settings.disable_code
    assert settings.console == "off"
    assert settings.host == ""


def test_another_secret_finds_the_same_run(hidden, tiny_folder, monkeypatch):
    folder, words, _ = hidden
    rotated = secret_words(folder, tiny_folder, ROTATED)
    assert rotated != words
    code, shown = said(train.main, rotated)
    assert (code, "report: " in shown) == (0, True), shown
    nameless = [[w for w in some if not w.startswith("run.dir=")] for some in (words, rotated)]
    first, second = (pipeline.resolve(some)[0] for some in nameless)
    assert first.run_dir == second.run_dir
    assert first.data.chat_template_kwargs["hf_token"] == FIRST[0]  # the run itself has it
    other = [word.replace("note: see", "note: watch") for word in rotated]
    code, shown = said(train.main, other)
    assert code == 2
    assert "data.chat_template_kwargs differ" in shown


def test_a_run_that_was_stored_with_its_secret_is_found_again(tmp_path):
    """Whoever writes it there by hand."""
    words = [
        "recipe=medusa", f"run.dir={tmp_path}", "data.engine=vllm",
        "data.engine_options={api_key: %s}",
    ]  # fmt: skip
    first, second = (
        pipeline.resolve([word.replace("%s", secret) for word in words])[0]
        for secret in ("first", "second")
    )
    stored = to_yaml(first)
    assert "first" not in stored
    (tmp_path / "config.yaml").write_text(stored.replace(MARK, "first"))
    (tmp_path / "run.json").write_text(f'{{"contents": {{}}, "format": {FORMAT}}}')
    run.check_folder(second, ["python", "train.py"])


def test_a_stored_configuration_asks_for_its_secrets_again(hidden):
    folder, words, _ = hidden
    asked = [f"eval.drafter={folder / 'run' / 'drafter'}", "dry_run=true"]
    for key in (*GIVEN, None):
        code, shown = said(evaluate.main, asked)
        if key is None:
            assert code == 0, shown
            return
        missing = next(name for name in reversed(GIVEN) if f"{name}=" not in " ".join(asked))
        assert code == 2
        assert shown == (
            f"error: {missing} holds a secret, which a stored configuration leaves out: pass it "
            f"again on the command line as {missing}=...\n"
        )
        asked.append(next(word for word in words if word.startswith(f"{missing}=")))


NOT_RUN_HERE = [
    ["data.engine=vllm", "data.engine_options={hf_token: SECRET, api_key: [SECRET], a: {k: 1}}"],
    ["model.quantization={quant_method: awq, secret: SECRET}"],
    ["model.device_map=auto", "model.max_memory={0: 1GiB, password: SECRET}"],
    ["data.stop_strings=[Bearer SECRET]"],
]  # fmt: skip


@pytest.mark.parametrize("words", NOT_RUN_HERE, ids=lambda words: words[-1].partition("=")[0])
def test_no_secret_of_a_configuration_is_shown_stored_or_part_of_its_identity(
    words, tmp_path, monkeypatch
):
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)  # of vLLM, which need not be installed

    def made(secret):
        given = [word.replace("SECRET", secret) for word in words]
        recipe = [] if words[0].startswith("recipe=") else ["recipe=distillspec"]
        taken = {word.partition("=")[0] for word in [*recipe, *given]}
        rest = command(tmp_path, "assets/toy/target")
        rest = [word for word in rest if word.partition("=")[0] not in {*taken, "recipe"}]
        return [*recipe, *given, *(word for word in rest if not word.startswith("method."))]

    first = made("opaque-one")
    code, shown = said(train.main, [*first, "dry_run=true"])
    assert code == 0, shown
    config = pipeline.resolve(first)[0]
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    written = (tmp_path / "config.yaml").read_text()
    for text in (shown, written, shown_command(first), json.dumps(config.identity())):
        assert "opaque-one" not in text
        assert MARK in text
    assert config.hash() == pipeline.resolve(made("opaque-two"))[0].hash()
    with pytest.raises(UserError, match="holds a secret, which a stored configuration leaves out"):
        compose(config.recipe, type(config.method), (tmp_path / "config.yaml",), [])


WRONG = [
    ["data.engine_options={hf_token: SECRET}"],
    ["data.servers=['http://me:SECRET@host']"],
    ["data.servers=[me:SECRET@host]", "data.engine=openai"],
    ["data.servers=['http://h/?key=SECRET']", "data.engine=openai"],
    ["eval.engine=http://me:SECRET@host:8000"],
    ["model.max_memory={api_key: SECRET}"],
    ["model.quantization={api_key: SECRET}"],
    ["model.quantization={api_key: SECRET"],
    ["model.device_map=[{token: SECRET}]"],
    ["model.device_map={apiKey: SECRET}"],
    ["data.system_prompt=Bearer SECRET", "dry_run=maybe"],
    ["data.prompts=https://me:SECRET@host/x.jsonl"],
    ["recipe=fastdraft", "method.corpus={'https://host/x?token=SECRET': 1}"],
    ["recipe=fastdraft", "method.corpus={'org/name#token=SECRET': 1}"],
    ["hf_token=SECRET"],
    ["--hf-token=SECRET"],
    ["method.data_mix={token: SECRET}"],
]


def test_a_secret_that_an_evaluation_does_not_read_is_not_asked_for(tmp_path):
    words = ["data.engine=vllm", "data.engine_options={api_key: SECRET}", "eval.engine=own"]
    config = pipeline.resolve(["recipe=distillspec", *words])[0]
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "drafter.json").write_text("{}")
    asked = evaluate.resolve([f"eval.drafter={tmp_path / 'drafter'}"])
    assert (asked.data.engine, asked.data.engine_options) == ("hf", {})


@pytest.mark.parametrize("words", WRONG, ids=lambda words: words[-1].partition("=")[0])
def test_an_error_does_not_repeat_a_secret(words):
    given = [word.replace("SECRET", "opaque.one") for word in words]
    if not given[0].startswith("recipe="):
        given.insert(0, "recipe=distillspec")
    code, shown = said(train.main, [*given, "dry_run=true"] if "dry" not in given[-1] else given)
    assert code == 2, shown
    assert shown.splitlines()[-1].startswith("error: ")
    assert "opaque.one" not in shown


def test_an_error_of_ours_shows_its_lines_and_no_secret(monkeypatch, capsys):
    def fails(words):
        raise KeyError(f"the service says {words[0].partition(': ')[2][:-1]} is too old")

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["x", "data.engine_options={api_key: opaque}"])
    with pytest.raises(KeyError) as raised:
        exits.end(fails)
    sys.excepthook(raised.type, raised.value, raised.tb)
    shown = capsys.readouterr().err
    assert 'raise KeyError(f"the service says' in shown
    assert f"KeyError: 'the service says {MARK} is too old'" in shown
    assert "opaque" not in shown
