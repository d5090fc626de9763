"""Upload a run's exported drafter and its report to the Hugging Face Hub.

    python -m scripts.push_to_hub script.run=runs/x script.repo=user/name [script.private=false] \\
        [dry_run=true]

What is uploaded is the folder that an engine loads: transformers' layout of a causal LM, vLLM's of
a head, SGLang's of one that vLLM does not load; a drafter that no engine loads (Hydra, a bank) goes
in this project's own format. The name on the Hub then stands wherever a drafter is named, such as
`eval.drafter=user/name`. A target that was trained with its heads (Medusa-2) gets a repository of
its own, user/name-target.

A new repository is private unless script.private=false; nothing private goes to one that is public
already. The report goes without the prompts and answers that it shows. Report and card lose what
they say of this machine's folders, and a file that holds a token or a secret of the environment
stops the upload. The token is the one of `hf auth login` or HF_TOKEN; it is never shown. Run again,
the same command replaces the files. `dry_run=true` lists the files with their sizes and prints the
card: nothing is uploaded, and neither a login nor the network is needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import copy2, copytree, ignore_patterns

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from eval.report.schema import read_report, without_readings, write_report
from trainer.checks import is_file
from trainer.config import asks_for_help, parse_overrides
from trainer.errors import UserError, one_line, require
from trainer.files import MARKER
from trainer.redaction import hide, leaks, shown
from trainer.terminal import guard_terminal

# in a run's folder, first come first served; the last is no engine's but our own
DRAFTERS = ("export/transformers", "export/vllm/drafter", "export/vllm", "export/sglang",
            "export/llamacpp", "drafter")  # fmt: skip
TARGET = "export/vllm/target"
REPORTS = ("report.md", "report.json", "report.html")
TEXTS = ["script.run", "script.repo"]
KEYS = [*TEXTS, "script.private", "dry_run"]
LARGEST_HEADER = 100_000_000  # of safetensors, by its own rule
LINKED_BYTES = 1 << 26  # larger files are linked, not copied, to be uploaded


def push(run: Path, repo: str, private: bool, api: HfApi) -> list[str]:
    """Upload drafter and report, and the target if it was trained too, in one commit to each
    repository. Returns the addresses of the repositories."""
    with staged(run, repo) as uploads:
        if private:
            for name in uploads:
                refuse_public(name, api)
        addresses = []
        for name, content in uploads.items():
            addresses.append(str(api.create_repo(name, private=private, exist_ok=True)))
            api.upload_folder(
                repo_id=name, folder_path=content, commit_message="Upload drafter and report"
            )
    return addresses


def describe(run: Path, repo: str, private: bool) -> None:
    """Print what `push` would upload: the files of each repository with their sizes, and its
    card."""
    with staged(run, repo) as uploads:
        for name, content in uploads.items():
            sizes = {
                path.relative_to(content).as_posix(): path.stat().st_size
                for path in sorted(content.rglob("*")) if path.is_file()
            }  # fmt: skip
            made = "private where it is new" if private else "public where it is new"
            count = f"{len(sizes)} file{'s' * (len(sizes) != 1)}"
            print(f"{name}, {made}: {count}, {sum(sizes.values()):,} bytes")
            for file, size in sizes.items():
                print(f"{size:>16,}  {one_line(file)}")
            card = content / "README.md"
            said = _text(card) if card.exists() else ""
            print(f"\nmodel card:\n\n{said}\n" if said else "\nthere is no model card\n")
    print("dry_run=true: nothing was uploaded")


@contextlib.contextmanager
def staged(run: Path, repo: str) -> Iterator[dict[str, Path]]:
    """Inside the block, folders with what is to be uploaded, by the name of the repository: copies
    without the places of this machine. UserError where the run is not finished, holds a secret or
    something else that cannot be published, or where the repository cannot have this name."""
    if not run.is_dir():
        raise UserError(f"script.run: there is no folder {str(run)!r}")
    missing = [name for name in REPORTS if not is_file("script.run: the file", run / name)]
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
    if "/" not in repo:
        raise UserError(f"script.repo must have the form user/name, got {repo!r} without a user")
    target = run / TARGET
    heads = sorted((run / "drafter").glob("acceptance_head.*"))  # one that no engine reads
    _refuse_foreign(run, *(run / name for name in REPORTS), folder, target, *heads)
    report = read_report(run / "report.json")
    with tempfile.TemporaryDirectory() as scratch:
        drafter = Path(scratch) / "drafter"
        _stage(folder, drafter)
        for name in REPORTS:
            copy2(run / name, drafter / name)
        if "readings" in report:
            write_report(without_readings(report), drafter)
        for path in heads:
            copy2(path, drafter / path.name)
        uploads = {repo: drafter}
        if target.exists():
            uploads[f"{repo}-target"] = Path(scratch) / "target"
            _stage(target, uploads[f"{repo}-target"])
            card = drafter / "README.md"
            if card.exists() and (text := _text(card)):  # it names a folder of this machine
                text = text.replace(str(target), f"{repo}-target")
                text = re.sub(rf"[^\s\"'`]*\b{TARGET}\b", f"{repo}-target", text)
                card.write_text(text, encoding="utf-8")
        for content in uploads.values():
            clean(content)
        yield uploads


def _refuse_foreign(run: Path, *places: Path) -> None:
    """UserError where one of `places`, or what is in it, is no file of the run's own folder: a pipe
    or a device, or a link to something else, which was never meant to be published."""
    whole = os.path.realpath(run)
    for place in places:
        for path in (place, *place.rglob("*")):
            own = Path(os.path.realpath(path)).is_relative_to(whole)
            if not own or (path.is_symlink() and not path.is_file()):
                raise UserError(
                    "is a link that leads elsewhere", key=f"script.run: {path}",
                    remedy="put the file itself there, or take the link away",
                )  # fmt: skip
            if not path.is_dir():
                is_file("script.run: the file", path)


def _stage(folder: Path, staged: Path) -> None:
    """Copy a folder without the marker, which holds the hash of the card before it is edited."""
    copytree(folder, staged, copy_function=_copy, ignore=ignore_patterns(MARKER))


def _copy(source: str, destination: str) -> None:
    if Path(source).stat().st_size < LINKED_BYTES:
        copy2(source, destination)
    else:
        Path(destination).symlink_to(Path(source).resolve())


def refuse_public(name: str, api: HfApi) -> None:
    """Refuse to upload something private to a public repository: `create_repo` would not make one
    that exists private."""
    try:
        public = not api.repo_info(name).private
    except RepositoryNotFoundError:
        return
    if public:
        raise UserError(
            f"script.private=true, but {name} is public already: set script.private=false, or name "
            "another repository"
        )


def clean(folder: Path) -> None:
    """Remove this machine's folders from report and card; UserError where a file holds a secret."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        text = _text(path)
        if name in ("README.md", *REPORTS) and text != (without := shown(text)):
            text = without
            path.write_text(text, encoding="utf-8")
        for what, place in leaks(text):
            keys = re.findall(r'"([^"\\]{1,80})"\s*:', text[:place])
            where = f"key {keys[-1]!r}" if keys else f"line {text.count(chr(10), 0, place) + 1}"
            raise UserError(
                f"script.run: {name} holds {what} ({where}): take it out of the run's folder, then "
                "push again"
            )


def _text(path: Path) -> str:
    """Read a file as text: all of a text file, the header of safetensors, '' for other weights."""
    try:
        if path.suffix != ".safetensors":
            return path.read_text(encoding="utf-8")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return file.read(min(size, LARGEST_HEADER)).decode()
    except UnicodeDecodeError:
        return ""


def _line(text: str) -> str:
    """Write a message on one line, without the token of `hf auth login`."""
    return " ".join(hide(text, [f"token={get_token() or ''}"]).split())


def main(arguments: list[str], api: HfApi | None = None) -> int:
    guard_terminal()
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        given = parse_overrides(arguments, KEYS, TEXTS)
        for key in ("script.run", "script.repo"):
            if not given.get(key):
                raise UserError(f"{key} must be given: {key}=...")
        private, dry_run = given.get("script.private", True), given.get("dry_run", False)
        require(isinstance(private, bool), "script.private", "be true or false", private)
        require(isinstance(dry_run, bool), "dry_run", "be true or false", dry_run)
        run, repo = Path(str(given["script.run"])), str(given["script.repo"])
        if dry_run:
            describe(run, repo, bool(private))
            return 0
        addresses = push(run, repo, bool(private), api or HfApi())
    except UserError as error:
        print(f"error: {_line(str(error))}", file=sys.stderr)
        return 2
    except Exception as error:  # whatever the network raises: its text may quote a header
        reason = _line(f"{type(error).__name__}: {error}")
        print(f"error: upload failed: {reason[:500]}", file=sys.stderr)
        return 3
    for address in addresses:
        print(f"uploaded: {_line(address)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
