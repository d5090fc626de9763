"""What others give us runs no code, leaves its folder for no file, and sees no secret."""

from __future__ import annotations

import ast
import json
import shutil

import pytest

import train
from data.target import load_causal_lm
from tests.commands import ROOT, command, write_jsonl
from tests.scripts.test_setup import ROOMS
from trainer.config import UserError

SECRETS = {"HF_TOKEN": "hf_secretsecretsecret", "OPENAI_API_KEY": "sk-secretsecret",
           "WANDB_API_KEY": "f" * 40}  # fmt: skip
SOURCES = [ROOT / "train.py", *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]


def called(tree):
    """(dotted name, keywords) of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            keywords = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            yield ast.unparse(node.func), keywords


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_that_is_read_can_run_code(path):
    for name, keywords in called(ast.parse(path.read_text())):
        assert name not in ("eval", "exec", "pickle.load", "pickle.loads", "os.system"), name
        if name == "torch.load":
            assert keywords.get("weights_only") is True
        if name.endswith("yaml.load"):
            raise AssertionError("yaml.safe_load it is")
        assert keywords.get("shell") is not True, name


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


def test_no_secret_is_written_or_shown(tiny_folder, tmp_path, monkeypatch, capfd):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    words = command(tmp_path, tiny_folder("llama"), "eval.temperatures=0", "method.control=false")
    assert train.main(words) == 0
    shown = capfd.readouterr()
    texts = [shown.out.encode(), shown.err.encode()]
    texts += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 20
    for value in SECRETS.values():
        assert not any(value.encode() in text for text in texts)
