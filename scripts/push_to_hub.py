"""Upload a run's exported drafter and its report to the Hugging Face Hub.

    python -m scripts.push_to_hub script.run=runs/x script.repo=user/name [script.private=false]

What is uploaded is the folder that an engine loads: transformers' layout of a causal LM, vLLM's of
a head; a drafter that no engine loads (Hydra, a bank) goes in this project's own format. The name
on the Hub then stands wherever a drafter is named, such as `eval.drafter=user/name`. A target that
was trained with its heads (Medusa-2) gets a repository of its own, user/name-target.

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

# in a run's folder, first come first served; the last is no engine's but our own
DRAFTERS = ("export/transformers", "export/vllm/drafter", "export/vllm", "drafter")
TARGET = "export/vllm/target"
REPORTS = ("report.md", "report.json", "report.html")
KEYS = ["script.run", "script.repo", "script.private"]


def push(run: Path, repo: str, private: bool, api: Any) -> list[str]:
    """Upload in one commit a repository; returns their addresses. `api` has `create_repo` and
    `upload_folder` of `huggingface_hub.HfApi`."""
    if not run.is_dir():
        raise UserError(f"script.run: there is no folder {str(run)!r}")
    missing = [name for name in REPORTS if not (run / name).exists()]
    if missing:
        raise UserError(f"script.run: {run} has no {missing[0]}: let the run finish")
    folders = [run / name for name in DRAFTERS]
    folder = next((f for f in folders if any(f.glob("*.json"))), None)
    if folder is None:
        raise UserError(f"script.run: {run} holds no drafter: let the run finish")
    try:
        validate_repo_id(repo)
        validate_repo_id(f"{repo}-target")
    except HFValidationError as error:
        raise UserError(f"script.repo must have the form user/name, got {repo!r}") from error
    target = run / TARGET
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch) / "repository"
        copytree(folder, staged)
        for name in REPORTS:
            copy2(run / name, staged / name)
        for path in (run / "drafter").glob("acceptance_head.*"):  # a head that no engine reads
            copy2(path, staged / path.name)
        card = staged / "README.md"
        if target.exists() and card.exists():  # it names a folder of this machine
            card.write_text(card.read_text().replace(str(target), f"{repo}-target"))
        uploads = {repo: staged} | ({f"{repo}-target": target} if target.exists() else {})
        addresses = []
        for name, content in uploads.items():
            addresses.append(str(api.create_repo(name, private=private, exist_ok=True)))
            api.upload_folder(
                repo_id=name, folder_path=content, commit_message="Upload drafter and report"
            )
    return addresses


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
        addresses = push(
            Path(str(given["script.run"])), str(given["script.repo"]), private, api or HfApi()
        )
    except UserError as error:
        print(f"error: {masked(str(error), get_token())}", file=sys.stderr)
        return 2
    except Exception as error:  # whatever the network raises: its text may quote a header
        reason = masked(f"{type(error).__name__}: {error}", get_token())
        print(f"error: upload failed: {reason[:500]}", file=sys.stderr)
        return 3
    for address in addresses:
        print(f"uploaded: {masked(address, get_token())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
