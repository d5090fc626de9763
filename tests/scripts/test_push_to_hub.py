import shutil
from pathlib import Path

import pytest

from scripts.push_to_hub import main, masked

TOKEN = "hf_" + "secretsecretsecretsecret"


class FolderHub:
    """The Hub's two calls, on a folder."""

    def __init__(self, folder: Path, failure: Exception | None = None):
        self.folder, self.failure = folder, failure
        self.private: dict[str, bool] = {}

    def create_repo(self, repo_id, *, private=None, exist_ok=False):
        if self.failure:
            raise self.failure
        if (self.folder / repo_id).exists() and not exist_ok:
            raise RuntimeError("409 conflict")
        (self.folder / repo_id).mkdir(parents=True, exist_ok=True)
        self.private.setdefault(repo_id, private)
        return f"https://hub/{repo_id}"

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
    for name in ("config.json", "model.safetensors", "README.md"):
        (export / name).write_text(f"export {name}")
    for name in ("report.md", "report.json", "report.html", "metrics.jsonl"):
        (run / name).write_text(f"run {name}")
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


def test_masked_hides_secrets_of_any_form():
    assert masked("key abc123 used", "abc123", None) == "key *** used"
    assert masked("hf_ab stays, hf_abcdefghij goes") == "hf_ab stays, *** goes"
