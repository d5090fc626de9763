"""Upload a run's exported drafter and its report to the Hugging Face Hub.

    python -m scripts.push_to_hub script.run=runs/x script.repo=user/name [script.private=false]

A new repository is private unless script.private=false; one that exists keeps its visibility. The
token is the one of `hf auth login` or HF_TOKEN; it is never shown. Run again, the same command
replaces the files.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from shutil import copy2, copytree
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from trainer.config import UserError, parse_overrides

EXPORT = Path("export/transformers")
REPORTS = ("report.md", "report.json", "report.html")
KEYS = ["script.run", "script.repo", "script.private"]


def push(run: Path, repo: str, private: bool, api: Any) -> str:
    """Upload in one commit; returns the repository's address. `api` has `create_repo` and
    `upload_folder` of `huggingface_hub.HfApi`."""
    if not run.is_dir():
        raise UserError(f"script.run: there is no folder {str(run)!r}")
    if not (run / EXPORT / "config.json").exists():
        raise UserError(
            f"script.run: {run / EXPORT} holds no export: let the run finish, "
            "or write it with scripts.export"
        )
    missing = [name for name in REPORTS if not (run / name).exists()]
    if missing:
        raise UserError(f"script.run: {run} has no {missing[0]}: let the run finish")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"script.repo must have the form user/name, got {repo!r}") from error
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch) / "repository"
        copytree(run / EXPORT, staged)
        for name in REPORTS:
            copy2(run / name, staged / name)
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=staged, commit_message="Upload drafter and report"
        )
    return str(address)


def masked(text: str, *secrets: str | None) -> str:
    """`text` on one line, without `secrets` and anything that looks like a token."""
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    text = re.sub(r"\bhf_\w{8,}|(?<=Bearer )\S+", "***", text)
    return " ".join(text.split())


def main(arguments: list[str], api: Any = None) -> int:
    try:
        given = parse_overrides(arguments, KEYS)
        for key in ("script.run", "script.repo"):
            if not given.get(key):
                raise UserError(f"{key} must be given: {key}=...")
        private = given.get("script.private", True)
        if not isinstance(private, bool):
            raise UserError(f"script.private must be true or false, got {private!r}")
        address = push(
            Path(str(given["script.run"])), str(given["script.repo"]), private, api or HfApi()
        )
    except UserError as error:
        print(f"error: {masked(str(error), get_token())}", file=sys.stderr)
        return 2
    except Exception as error:  # whatever the network raises: its text may quote a header
        reason = masked(f"{type(error).__name__}: {error}", get_token())
        print(f"error: upload failed: {reason[:500]}", file=sys.stderr)
        return 3
    print(f"uploaded: {masked(address, get_token())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
