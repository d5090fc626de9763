"""What counts as a secret, and what is left of a path."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from trainer.redaction import (
    MARK,
    REPOSITORY,
    environment_secrets,
    hide,
    is_secret_key,
    leaks,
    redacted,
    shell_command,
    shown,
    shown_command,
)

HUB, JWT = "hf_" + "aB3" * 11, "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abc_def"
FORMS = [
    HUB, "sk-proj-abcdefgh1234", "sk-ant-api03-abcdef", "sk-abcdefghijkl4567", "ghp_" + "a1" * 18,
    "github_pat_" + "a_" * 20, "glpat-abcdefghij0123456789", "AKIAABCDEFGHIJKLMNOP",
    "AIza" + "x" * 35, "xoxb-1234567890-abc", "wandb_v1_" + "a" * 30, JWT,
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow+/=\nabc\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip
# what a form must not be taken for
HARMLESS = [
    "hf_hub_download", "hf_transfer", "sk-learn-contrib", "task-specific-decoding-of-drafts1",
    "max_new_tokens: 96", "eyJ", "Basic arithmetic of numbers", "Bearer of bad news", "a@b.org",
    "https://host:8000/v1?page=2#split=train&column=text", "2.91 [2.80, 3.02]", "e4d0e16ab4d86e2",
    "Qwen/Qwen3-8B", "Answer with one token: yes or no.",
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["token", "hf_token", "HF_TOKEN", "api_key", "api-key", "openai.key", "apiKey", "APIKEY",
     "client_secret", "Password", "passwd", "authorization", "credential", "credentials",
     "authToken"],
)  # fmt: skip
def test_a_secret_by_its_last_word(name):
    assert is_secret_key(name)
    assert redacted({"a": [{name: "x"}]}) == {"a": [{name: MARK}]}


@pytest.mark.parametrize(
    "name",
    ["max_new_tokens", "pack_tokens", "num_tokens", "tokenizer_hash", "tokenizer", "keys", "monkey",
     "keyboard", "secretary", "token_ids", "key_by", "tokens_per_round"],
)  # fmt: skip
def test_no_secret_by_its_last_word(name):
    assert not is_secret_key(name)
    assert redacted({name: "x"}) == {name: "x"}


def test_under_a_secret_key_all_text_and_no_small_number_is_one():
    tree = {"token": ["a", {"b": "c"}], "eos_token": 151645, "key": None, "secret": True,
            "password": 1234567890, "api_key": ""}  # fmt: skip
    assert redacted(tree) == {**tree, "token": [MARK, {"b": MARK}], "password": MARK}
    assert redacted(redacted(tree)) == redacted(tree)


@pytest.mark.parametrize("form", FORMS)
def test_known_tokens_are_found_in_any_text_and_as_keys(form):
    assert redacted({f"a {form}": [f"b {form} c"]}) == {f"a {MARK}": [f"b {MARK} c"]}
    assert hide(f"see {form}.") == f"see {MARK}."
    assert len(list(leaks(f'{{"a": "{form}"}}'))) == 1


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_text_stays(text):
    assert redacted(text) == text
    assert shown(text) == text
    assert not list(leaks(text))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("http://me:pw@host:8000/v1", f"http://{MARK}@host:8000/v1"),
        ("https://me:p@ss@host", f"https://{MARK}@host"),
        ("https://host/x?token=abc&b=1", f"https://host/x?token={MARK}&b=1"),
        ("https://host/x?a=1&X-Amz-Signature=abc", f"https://host/x?a=1&X-Amz-Signature={MARK}"),
        ("Authorization: Bearer opaque.token", f"Authorization: Bearer {MARK}"),
    ],
)
def test_of_an_address_the_rest_stays(text, clean):
    assert redacted(text) == clean
    assert redacted(clean) == clean
    assert not list(leaks(clean))


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        ("args: {'api_key': ['opaque'], 'port': 1}", f"args: {{'api_key': [{MARK}], 'port': 1}}"),
        ("got {'hf_token': 'two words'}", f"got {{'hf_token': {MARK}}}"),
        ("got {'hf_token': 'cut sho...: mend it", f"got {{'hf_token': {MARK}"),
        ("vllm --api-key opaque --port 1", f"vllm --api-key {MARK} --port 1"),
        ("401 for token=opaque, again", f"401 for token={MARK}, again"),
        ("Authorization: Basic opaque", f"Authorization: {MARK}"),
        ("got ['me:opaque@host:8000']", f"got ['me:{MARK}@host:8000']"),
        ("arguments have the form key=value, got 'x'",) * 2,
        ("script.token must be given: script.token=...",) * 2,
        ("unknown key 'data.tokn'; did you mean",) * 2,
    ],
)  # fmt: skip
def test_a_line_for_the_terminal_hides_what_stands_beside_a_secrets_key(line, clean):
    assert hide(line) == clean
    assert hide(clean) == clean


def test_a_line_for_the_terminal_hides_what_was_given_as_a_secret(monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_KEY", "value-of-the-environment")
    monkeypatch.setenv("OTHER_KEY", "short")
    assert ("OTHER_KEY", "short") not in environment_secrets()
    words = ["data.engine_options={api_key: [opaque], port: 8000}", "method.token=bare", "x=y: {",
             "z=&a [*a]", "d=2024-13-45"]  # fmt: skip
    said = "opaque is too old, bare too; value-of-the-environment, short; port 8000"
    assert hide(said, words) == f"{MARK} is too old, {MARK} too; {MARK}, short; port 8000"
    assert hide("token = tokenizer.eos", words, pairs=False) == "token = tokenizer.eos"


def test_a_path_is_relative_to_the_repository_the_folder_or_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    run = tmp_path / "team" / "run"
    tree = {
        str(REPOSITORY / "runs" / "x"): [f"{run}/export/vllm/target", str(run)],
        "b": ["/data/of/others/a.jsonl", f"see {tmp_path}/me/models/x, or file:///etc/y."],
        "c": "T=0 / T=1, a/b, tokens/s, http://host/v1/x, ~/z, </p>, './run'",
        "d": 3,
    }
    assert shown(tree, run) == {
        "runs/x": ["export/vllm/target", "run"],
        "b": ["a.jsonl", "see ~/models/x, or y."],
        "c": tree["c"],
        "d": 3,
    }
    assert shown(str(run / "a")) == "a"
    spaced = tmp_path / "me" / "my models" / "x y"
    spaced.mkdir(parents=True)
    assert shown(str(spaced)) == "~/my models/x y"
    monkeypatch.setenv("HOME", "/")
    assert shown("/data/x") == "x"


def test_a_command_is_shown_without_secrets_and_places(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    here = tmp_path / "project"
    (here / "my runs").mkdir(parents=True)
    monkeypatch.chdir(here)
    words = [
        "python", "train.py", "recipe=distillspec", f"run.dir={here}/my runs", "trainer.lr=5e-5",
        "data.engine_options={hf_token: opaque two, port: 1}", "data.cache_dir=/scratch/me",
        f"model.target={tmp_path}/models/x", f"eval.prompts={tmp_path}",
        "eval.engine=http://me:pw@host", "method.api_key=opaque", "data.temperature=[0, 1.0]",
        f"method.corpus={{{tmp_path}/a.txt: 1}}", "model.quantization={api_key: opaque",
        "data.system_prompt=One token:\n'yes'",
    ]  # fmt: skip
    expected = [
        "python", "train.py", "recipe=distillspec", "run.dir=my runs", "trainer.lr=5e-5",
        f"data.engine_options={{hf_token: '{MARK}', port: 1}}", "data.cache_dir=me",
        "model.target=x", "eval.prompts=~",
        f"eval.engine=http://{MARK}@host", f"method.api_key={MARK}", "data.temperature=[0, 1.0]",
        "method.corpus={a.txt: 1}", f"model.quantization={{api_key: {MARK}",
        "data.system_prompt=One token:\n'yes'",
    ]  # fmt: skip
    shown_words = shlex.split(shown_command(words))
    assert shown_words == expected
    whole = [*words[:5], expected[5], *words[6:9], *expected[9:11], *words[11:13], expected[13],
             words[14]]  # fmt: skip
    assert shlex.split(shell_command(words)) == whole


def test_leaks_are_tokens_values_of_the_environment_and_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("MY_PASSWORD", "opaque-value")
    assert not list(leaks("/home/meadow/x /srv/home/me/x ~/x me"))
    assert list(leaks("in /home/me/x")) == [("the path of the home folder", 3)]
    assert list(leaks("an opaque-value")) == [("the value of MY_PASSWORD", 3)]
    assert Path.home() == Path("/home/me")
