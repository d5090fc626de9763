import functools
import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import save_file

import scripts.push_to_hub as module
from eval.report.schema import as_json, write_report
from scripts.push_to_hub import REPORTS, main
from tests.helpers.commands import pipe
from tests.helpers.report_rows import report_with_readings, report_with_tree
from trainer.redaction import MARK

TOKEN = "hf_" + "secretsecretsecretsecret"


def bound(method):
    """A call that `HfApi` itself would refuse is refused here too."""
    signature = inspect.signature(getattr(HfApi, method.__name__))

    @functools.wraps(method)
    def call(self, *positional, **named):
        given = dict(signature.bind(self, *positional, **named).arguments)
        return method(**given)

    return call


class FolderHub:
    """The Hub's calls, on a folder."""

    def __init__(self, folder: Path, failure: Exception | None = None):
        self.folder, self.failure = folder, failure
        self.private: dict[str, bool] = {}

    @bound
    def repo_info(self, repo_id):
        if repo_id not in self.private:
            gone = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
            raise RepositoryNotFoundError("404: not found", response=gone)
        return SimpleNamespace(private=self.private[repo_id])

    @bound
    def create_repo(self, repo_id, *, private=None, exist_ok=False):
        if self.failure:
            raise self.failure
        if (self.folder / repo_id).exists() and not exist_ok:
            raise RuntimeError("409 conflict")
        (self.folder / repo_id).mkdir(parents=True, exist_ok=True)
        self.private.setdefault(repo_id, private)
        return f"https://hub/{repo_id}"

    @bound
    def upload_folder(self, *, repo_id, folder_path, commit_message=None):
        shutil.copytree(folder_path, self.folder / repo_id, dirs_exist_ok=True)


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def hub(tmp_path):
    return FolderHub(tmp_path / "hub")


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    export = run / "export" / "transformers"
    export.mkdir(parents=True)
    for name in ("config.json", "README.md"):
        (export / name).write_text(f"export {name}")
    weights(export / "model.safetensors")
    (export / ".draftsmith.json").write_text("{}")
    write_report(report_with_tree(), run)
    (run / "metrics.jsonl").write_text("run metrics.jsonl")
    return run


def test_uploads_export_and_report_privately(run, hub, capsys):
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 0
    there = hub.folder / "user" / "name"
    assert sorted(path.name for path in there.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "report.html", "report.json", "report.md",
    ]  # fmt: skip
    assert (there / "README.md").read_text() == "export README.md"
    assert hub.private == {"user/name": True}
    assert capsys.readouterr().out == "uploaded: https://hub/user/name\n"
    assert not (run / "export" / "transformers" / "report.md").exists()


def test_prompts_and_answers_stay_here(run, hub):
    write_report(report_with_readings(), run)
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 0
    for name in ("report.md", "report.html", "report.json"):
        assert ("What is a cat?" in (run / name).read_text()) == (name != "report.md")
        assert "What is a cat?" not in (hub.folder / "user" / "name" / name).read_text()


def test_public_on_demand_and_again_on_the_same_repository(run, hub):
    arguments = [f"script.run={run}", "script.repo=user/name", "script.private=false"]
    assert main(arguments, hub) == 0
    (run / "report.md").write_text("newer")
    assert main(arguments, hub) == 0
    assert hub.private == {"user/name": False}
    assert (hub.folder / "user" / "name" / "report.md").read_text() == "newer"


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [
        ("", "there is no folder"),
        ("export", "holds no drafter"),
        ("report.html", "has no report.html"),
    ],
)
def test_an_unfinished_run_is_one_line_and_uploads_nothing(run, hub, capsys, missing, complaint):
    gone = run / missing
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: script.run")
    assert error.count("\n") == 1
    assert complaint in error
    assert not hub.folder.exists()


def test_a_head_goes_in_vllms_layout_and_what_no_engine_loads_in_our_own(run, hub):
    export, heads = run / "export", run / "export" / "vllm"
    (export / "transformers").rename(heads)
    own = run / "drafter"
    own.mkdir()
    for name in ("drafter.json", "acceptance_head.json", "acceptance_head.safetensors"):
        (own / name).write_text(name)
    assert main([f"script.run={run}", "script.repo=user/head"], hub) == 0
    there = hub.folder / "user" / "head"
    assert (there / "config.json").read_text() == "export config.json"
    assert (there / "acceptance_head.json").exists()
    assert not (there / "drafter.json").exists()
    shutil.rmtree(export)
    assert main([f"script.run={run}", "script.repo=user/own"], hub) == 0
    assert (hub.folder / "user" / "own" / "drafter.json").exists()


def test_a_head_that_only_sglang_loads_goes_in_its_layout_from_the_folder_that_is_named(
    run, hub, tmp_path
):
    """And a name is a name: YAML would end this one at its number."""
    (run / "export" / "transformers").rename(run / "export" / "sglang")
    (run / "drafter").mkdir()
    (run / "drafter" / "drafter.json").write_text("own")
    named = run.rename(tmp_path / "try #2")
    assert main([f"script.run={named}", "script.repo=user/head"], hub) == 0
    there = hub.folder / "user" / "head"
    assert (there / "config.json").read_text() == "export config.json"
    assert not (there / "drafter.json").exists()


def test_a_target_trained_with_its_heads_gets_a_repository_beside_theirs(run, hub, capsys):
    heads = run / "export" / "vllm"
    (run / "export" / "transformers").rename(run / "export" / "drafter")
    heads.mkdir()
    (run / "export" / "drafter").rename(heads / "drafter")
    (heads / "target").mkdir()
    (heads / "target" / "config.json").write_text("merged")
    (heads / "drafter" / "README.md").write_text(f"vllm serve {heads / 'target'}")
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 0
    assert (hub.folder / "user" / "name-target" / "config.json").read_text() == "merged"
    assert (hub.folder / "user" / "name" / "README.md").read_text() == "vllm serve user/name-target"
    assert hub.private == {"user/name": True, "user/name-target": True}
    assert capsys.readouterr().out.count("uploaded: ") == 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["script.repo=a/b/c"], "script.repo must have the form user/name"),
        (["script.repo=name"], "script.repo must have the form user/name, got 'name' without"),
        ([], "script.repo must be given"),
        (["script.repo=a/b", "script.private=maybe"], "script.private must be true or false"),
        (["script.repo=a/b", "script.privat=true"], "did you mean 'script.private'?"),
    ],
)
def test_mistakes_are_one_line(run, hub, capsys, words, complaint):
    assert main([f"script.run={run}", *words], hub) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert not hub.folder.exists()


def test_a_failing_hub_is_one_line_without_the_token(run, tmp_path, capsys):
    other = "hf_" + "x" * 30
    failure = OSError(
        f"401 Unauthorized\nAuthorization: Bearer {TOKEN}\n{other}; Bearer opaque.token"
    )
    hub = FolderHub(tmp_path / "hub", failure)
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: upload failed: OSError: 401 Unauthorized")
    assert shown.err.count("\n") == 1
    for secret in (TOKEN, other, "opaque.token"):
        assert secret not in shown.err


def test_a_token_given_by_mistake_is_not_echoed(run, hub, capsys):
    assert main([f"script.run={run}", f"script.repo={TOKEN}/{TOKEN}/x"], hub) == 2
    assert TOKEN not in "".join(capsys.readouterr())


def test_the_token_of_a_login_is_not_echoed(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "get_token", lambda: "opaque-token-of-a-login")
    hub = FolderHub(tmp_path / "hub", OSError("401: opaque-token-of-a-login is too old"))
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 3
    assert capsys.readouterr().err == f"error: upload failed: OSError: 401: {MARK} is too old\n"


def test_a_call_that_the_hub_would_refuse_is_refused_by_its_stand_in(hub):
    with pytest.raises(TypeError):
        hub.create_repo("user/name", public=True)


@pytest.mark.parametrize("name", ["user/name", "user/name-target"])
def test_what_is_private_does_not_go_to_a_public_repository(run, hub, capsys, name):
    (run / "export" / "vllm" / "target").mkdir(parents=True)
    (run / "export" / "vllm" / "target" / "config.json").write_text("{}")
    hub.private[name] = False
    for words in ([], ["script.private=true"]):
        assert main([f"script.run={run}", "script.repo=user/name", *words], hub) == 2
        assert capsys.readouterr().err == (
            f"error: script.private=true, but {name} is public already: set script.private=false, "
            "or name another repository\n"
        )
    assert not hub.folder.exists()
    assert main([f"script.run={run}", "script.repo=user/name", "script.private=false"], hub) == 0
    assert (hub.folder / name).exists()


def test_a_private_repository_is_uploaded_to_again(run, hub):
    for _ in range(2):
        assert main([f"script.run={run}", "script.repo=user/name"], hub) == 0
    assert hub.private == {"user/name": True}


def weights(path, **metadata):
    save_file({"w": torch.zeros(1)}, path, metadata=metadata)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("config.json", '{"a": 1,\n "auth_to": "glpat-abcdefghij0123456789"}',
         "what looks like a GitLab token (key 'auth_to')"),
        ("tokenizer_config.json", '{"x": ["opaque-value"]}', "the value of MY_API_KEY (key 'x')"),
        ("notes.txt", f"a\nb {TOKEN}", "what looks like a Hugging Face token (line 2)"),
        ("generation_config.json", '{"from": "/home/of-mine/models/x"}',
         "the path of the home folder (key 'from')"),
        ("model.safetensors", None, "the value of MY_API_KEY (key 'made by')"),
        ("report.md", "| command | serve opaque-value |", "the value of MY_API_KEY (line 1)"),
        ("sub/deep.json", '{"k": "opaque-value"}', "the value of MY_API_KEY (key 'k')"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["drafter", "target"])
def test_a_file_with_a_secret_stops_the_upload(
    run, hub, monkeypatch, capsys, name, text, what, where
):
    monkeypatch.setenv("MY_API_KEY", "opaque-value")
    monkeypatch.setenv("HOME", "/home/of-mine")
    folder = run / "export" / "transformers"
    if where == "target":
        folder = run / "export" / "vllm" / "target"
        folder.mkdir(parents=True)
    path = (run if name == "report.md" else folder) / name
    path.parent.mkdir(exist_ok=True)
    weights(path, **{"made by": "opaque-value"}) if text is None else path.write_text(text)
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 2
    assert capsys.readouterr().err == (
        f"error: script.run: {name} holds {what}: take it out of the run's folder, then push "
        "again\n"
    )
    assert not hub.folder.exists()


def test_report_and_card_lose_the_places_of_files_here(run, hub, monkeypatch):
    """Those of a run whose report was written before, or elsewhere."""
    monkeypatch.setenv("HOME", "/home/of-mine")
    text = "<td>/home/of-mine/x</td> `/data/of/team/prompts.jsonl` a/b https://host/path </p>"
    for path in (run / "report.html", run / "export" / "transformers" / "README.md"):
        path.write_text(text)
    command = ["train.py run.dir=/scratch/of-me/run", f"{TOKEN}"]
    report = report_with_tree()
    report["run"]["command"] = command
    (run / "report.json").write_text(json.dumps(as_json(report)))
    weights(run / "export" / "transformers" / "model.safetensors", format="pt")
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 0
    there = hub.folder / "user" / "name"
    for name in ("report.html", "README.md"):
        assert (there / name).read_text() == (
            "<td>~/x</td> `prompts.jsonl` a/b https://host/path </p>"
        )
    content = json.loads((there / "report.json").read_text())
    assert content["run"]["command"] == ["train.py run.dir=run", MARK]
    assert TOKEN in (run / "report.json").read_text()  # the run itself stays as it is


def test_large_weights_are_linked_to_be_uploaded(run, hub, monkeypatch):
    monkeypatch.setattr(module, "LINKED_BYTES", 10)
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 0
    names = ("export/transformers/model.safetensors", "user/name/model.safetensors")
    here, there = run / names[0], hub.folder / names[1]
    assert there.read_bytes() == here.read_bytes()


# --- before it is uploaded -----------------------------------------------------------------------


class NoHub:
    """No call may be made."""

    def __getattr__(self, name):
        pytest.fail(f"the Hub was asked: {name}")


def test_a_dry_run_lists_the_files_and_prints_the_card_without_login_or_network(
    run, monkeypatch, capsys
):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    (run / "export" / "transformers" / "README.md").write_text("# Card\nmade in /data/of/me/run")
    (run / "export" / "vllm" / "target").mkdir(parents=True)
    (run / "export" / "vllm" / "target" / "config.json").write_text("{}")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = [f"script.run={run}", "script.repo=user/name", "dry_run=true"]
    assert main(words, NoHub()) == 0
    lines = capsys.readouterr().out.splitlines()
    weights = (run / "export" / "transformers" / "model.safetensors").stat().st_size
    listed = {
        "README.md": len("# Card\nmade in run"), "config.json": 18, "model.safetensors": weights,
        **{name: (run / name).stat().st_size for name in sorted(REPORTS)},
    }  # fmt: skip
    total = sum(listed.values())
    assert lines[0] == f"user/name, private where it is new: 6 files, {total:,} bytes"
    assert [line.split() for line in lines[1:7]] == [[f"{n:,}", name] for name, n in listed.items()]
    assert lines[7:13] == ["", "model card:", "", "# Card", "made in run", ""]
    assert lines[13] == "user/name-target, private where it is new: 1 file, 2 bytes"
    assert lines[-1] == "dry_run=true: nothing was uploaded"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_dry_run_says_what_an_upload_would_refuse(run, capsys):
    words = [f"script.run={run}", "script.repo=user/name"]
    assert main([*words, "dry_run=maybe"], NoHub()) == 2
    assert "dry_run must be true or false, got 'maybe'" in capsys.readouterr().err
    (run / "export" / "transformers" / "notes.txt").write_text(TOKEN)
    assert main([*words, "dry_run=true"], NoHub()) == 2
    shown = capsys.readouterr()
    assert "notes.txt holds what looks like a Hugging Face token" in shown.err
    assert shown.out == ""


def linked(to):
    return lambda path: path.symlink_to(to)


@pytest.mark.parametrize(
    "place", ["report.md", "export/transformers/x.json", "export/transformers/a/b/c"]
)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (pipe, "is a pipe: name a regular file"),
        (linked("/dev/zero"), "is a link that leads elsewhere; put the file itself there"),
        (linked("/etc/passwd"), "is a link that leads elsewhere; put the file itself there"),
        (linked("/etc"), "is a link that leads elsewhere; put the file itself there"),
        (linked("."), "is a link that leads elsewhere; put the file itself there"),
        (linked("nowhere"), "is a link that leads elsewhere; put the file itself there"),
    ],
)
def test_a_run_of_somebody_else_publishes_no_file_from_elsewhere(run, capsys, place, make, says):
    path = run / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    for words in ([], ["dry_run=true"]):
        assert main([f"script.run={run}", "script.repo=user/name", *words], NoHub()) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: script.run")
        assert says in err or (place == "report.md" and "report.md" in err)
        assert err.count("\n") == 1


def test_a_link_inside_the_run_is_followed(run, hub):
    (run / "export" / "transformers" / "config.json").rename(run / "kept.json")
    (run / "export" / "transformers" / "config.json").symlink_to(run / "kept.json")
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 0
    assert (hub.folder / "user" / "name" / "config.json").read_text() == "export config.json"


def test_a_card_that_is_no_text_is_one_line(run, hub, capsys):
    (run / "export" / "transformers" / "README.md").write_bytes(b"\xff\xfe")
    assert main([f"script.run={run}", "script.repo=user/name", "dry_run=true"], hub) == 0
    assert "there is no model card" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "run report.json", '{"schema": 1}', "[" * 5000])
def test_a_damaged_report_is_one_line_and_uploads_nothing(run, hub, capsys, text):
    (run / "report.json").write_text(text)
    assert main([f"script.run={run}", "script.repo=user/name"], hub) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "report.json" in said
    assert said.count("\n") == 1
    assert not hub.folder.exists()
