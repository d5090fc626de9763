"""A run: its configuration, its target and its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypedDict

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from phases.check import check_model_pair, check_places
from phases.commands import trained_further
from recipes.common.config import Config
from target.fingerprint import added_eos
from target.model import Target
from target.parts import load_parts
from trainer.checks import is_file, require_folder
from trainer.config import FORMAT, ModelConfig, json_value, load_yaml, to_yaml
from trainer.errors import UserError
from trainer.files import damaged, read_json, write_atomic, write_json
from trainer.lock import lock
from trainer.progress import working
from trainer.redaction import redacted, shell_command
from trainer.setup import make_accelerator, placement

LAPTOP_TARGET = "runs/smollm2"  # of every recipe's preset laptop, as scripts.get_smollm2 writes it
VERSIONS = ("draftsmith", "commit", "python", "torch", "transformers", "accelerate")
# keys of the configuration that say how the target is loaded
OF_TARGET = tuple(
    f"model.{field.name}"
    for field in dataclasses.fields(ModelConfig)
    if not field.name.startswith("drafter")
)


class _Resumed(TypedDict, total=False):
    resumed: list[Mapping[str, object]]


class RunFacts(_Resumed):
    """The part of run.json that is read back. `format`: of the run folder; `contents`: hashes of
    what the run is made of; `resumed`: facts of each part of the run that had other versions. The
    rest is `provenance`."""

    format: int
    contents: dict[str, str]


@dataclass
class Run:
    """A run in progress."""

    config: Config
    accelerator: Accelerator
    target: Target
    folder: Path

    @classmethod
    def open(cls, config: Config, load: Callable[..., Target] | None = None) -> Run:
        """Check the configuration and load the target, by `load_target` unless another function is
        given. Writes no file that stays."""
        check_model_pair(config)
        check_places(config)
        accelerator = make_accelerator(config.trainer)
        placement(accelerator, config.trainer)  # refuses what the launch cannot train
        check_shared_folders(config, accelerator)
        target = (load or load_target)(config, accelerator.device)
        line = added_eos(target.model.generation_config, target.tokenizer)
        if line and accelerator.is_main_process:
            print(f"model.target={target.name}: {line}", flush=True)
        return cls(config, accelerator, target, config.run_dir)

    def barrier(self) -> None:
        """Wait for the other processes. Until all have come, a target that is sharded over them
        goes on serving the others."""
        self.target.sync()
        self.accelerator.wait_for_everyone()


def require_downloaded(model: ModelConfig) -> None:
    """UserError where the target of preset laptop has not been fetched."""
    if model.target == LAPTOP_TARGET and not os.path.exists(model.target):
        raise UserError(
            "is not there yet",
            key="model.target",
            value=model.target,
            remedy="python -m scripts.get_smollm2 downloads it",
        )


@working("loading the target")
def load_target(config: Config, device: torch.device | str) -> Target:
    """Load the target as `model.*` says."""
    model = config.model
    require_downloaded(model)
    if model.parts == "head":
        return load_parts(
            model.target, revision=model.target_revision, dtype=model.dtype, device=device,
            trust_remote_code=model.trust_remote_code,
        )  # fmt: skip
    return Target.load(
        model.target, revision=model.target_revision, dtype=model.dtype, device=device,
        trust_remote_code=model.trust_remote_code, device_map=model.device_map,
        max_memory=model.max_memory, quantization=model.quantization,
    )  # fmt: skip


def check_shared_folders(config: Config, accelerator: Accelerator) -> None:
    """Check that several machines see the same run.dir and data.cache_dir: the first process writes
    a file that all must see. Raises UserError in all of them."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or accelerator.num_processes)
    if here == accelerator.num_processes:
        return
    folders = {"run.dir": config.run_dir, "data.cache_dir": Path(config.data.cache_dir)}
    name, fault = f".seen-{uuid.uuid4().hex}", ""
    made = []
    if accelerator.is_main_process:
        for key, folder in folders.items():
            try:
                made += [] if folder.exists() else [folder]
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            except OSError as error:
                fault = f"{key}={folder} cannot be written ({error.strerror})"
    name, fault = broadcast_object_list([name, fault])
    if fault:
        raise UserError(fault)
    marks = {key: folder / name for key, folder in folders.items()}
    until = time.monotonic() + SHARED_FOLDER_WAIT_S
    while not all(mark.exists() for mark in marks.values()) and time.monotonic() < until:
        time.sleep(0.5)
    unseen = gather_object([key for key, mark in marks.items() if not mark.exists()])
    if accelerator.is_main_process:
        for mark in marks.values():
            mark.unlink()
        for folder in reversed(made):  # one may lie in the other
            with contextlib.suppress(OSError):  # somebody uses it already
                folder.rmdir()
    if unseen:
        key = sorted(unseen)[-1]
        raise UserError(
            f"{key} must lie on a disk that all machines see, {folders[key]} is another folder on "
            "some: name one on a shared disk"
        )


SHARED_FOLDER_WAIT_S = 65.0  # a network disk may remember for a minute that a folder was not there


def check_folder(config: Config, command: Sequence[str]) -> None:
    """Refuse a run folder that holds another configuration. A key that is missing there, since it
    is newer than the run, had what is its default now. `command`: the words of this command."""
    require_folder("run.dir", config.run_dir)
    stored = config.run_dir / "config.yaml"
    if not stored.exists():
        return
    for path in config.run_dir.rglob("*"):  # it may come from somebody else
        if not path.is_dir():
            is_file("run.dir: the file", path)
    before, changed = redacted(load_yaml(stored)), []
    for section, now in config.settings().items():
        former = before.get(section)
        if not isinstance(now, dict):
            changed += [section] if now != former else []
            continue
        defaults = json_value(dataclasses.asdict(type(getattr(config, section))()))
        former = defaults | (former if isinstance(former, dict) else {})
        changed += [f"{section}.{key}" for key in now if now[key] != former.get(key)]
    if changed:
        named = f"{', '.join(changed[:3])}{', ...' * (len(changed) > 3)} differ"
        same = {"recipe", "model.target", "model.target_revision"}.isdisjoint(changed)
        raise UserError(
            f"holds a run of another configuration ({named})",
            key="run.dir",
            value=str(config.run_dir),
            remedy=_remedy(config.run_dir, command, same),
        )
    if not (config.run_dir / "report.json").exists():
        read_facts(config.run_dir)


def _remedy(folder: Path, command: Sequence[str], continues: bool) -> str:
    """What to do instead of training in a folder that holds another run. `continues`: whether its
    drafter is one that this command could start from."""
    if continues and (folder / "drafter" / "drafter.json").exists():
        further = trained_further(command, folder)
        return f"choose another run.dir, or train its drafter further in a new run: {further}"
    return "choose another run.dir"


def claim(run: Run, command: list[str], contents: dict[str, str]) -> None:
    """Write config.yaml and run.json, or check that the folder was begun with the same `contents`:
    hashes of the target, the text and the starting drafter, which a path alone does not fix. A
    report of an earlier part of the run is deleted."""
    stored = run.folder / "config.yaml"
    if run.accelerator.is_main_process:
        run.folder.mkdir(parents=True, exist_ok=True)
        while _locks:
            _locks.pop().close()  # of the run before in this process
        said = f"run.dir={run.folder} is being worked on by another process: wait for it, or choose"
        _locks.append(lock(run.folder / ".lock", f"{said} another run.dir"))
    if stored.exists():
        facts = read_facts(run.folder)
        changed = [name for name in contents if facts["contents"].get(name) != contents[name]]
        if changed:
            raise UserError(
                f"was begun with another {', '.join(changed)} under the same name",
                key="run.dir",
                value=str(run.folder),
                remedy=_remedy(run.folder, command, "target" not in changed),
            )
        if run.accelerator.is_main_process:
            _note_versions(run.folder, facts, command)
    elif run.accelerator.is_main_process:
        processes = {
            "distributed": placement(run.accelerator, run.config.trainer).name,
            "num_processes": run.accelerator.num_processes,
        }
        facts = {"format": FORMAT} | provenance(command) | processes | {"contents": contents}
        write_json(run.folder / "run.json", facts)
        write_atomic(stored, to_yaml(run.config))
    if run.accelerator.is_main_process:
        (run.folder / "report.json").unlink(missing_ok=True)
    run.barrier()


def read_facts(folder: Path) -> RunFacts:
    """Read run.json: how the run was begun, and in `resumed` how it was resumed."""
    remedy = "without it nobody knows what this run was begun with: choose another run.dir"
    facts: RunFacts = read_json(folder / "run.json", remedy)  # type: ignore[assignment] - checked below
    if not isinstance(facts.get("contents"), dict):
        raise damaged(folder / "run.json", "it names no contents", remedy)
    if facts.get("format") != FORMAT:
        raise UserError(
            f"holds a run in format {facts.get('format')}, this version writes format {FORMAT}",
            key="run.dir", value=str(folder), remedy="choose another run.dir",
        )  # fmt: skip
    return facts


def _note_versions(folder: Path, facts: RunFacts, command: list[str]) -> None:
    """Print and record that a run is resumed under other versions: its numbers are of both."""
    now, resumed = provenance(command), facts.get("resumed", [])
    before: Mapping[str, object] = resumed[-1] if resumed else facts
    changed = [name for name in VERSIONS if before.get(name) != now[name]]
    if not changed:
        return
    named = "; ".join(f"{name} {before.get(name)}, now {now[name]}" for name in changed)
    print(
        f"run.dir={folder} is resumed under other versions ({named}): its losses may differ "
        "slightly"
    )
    row = {name: now[name] for name in ("date", "command", "machine", *VERSIONS)}
    facts["resumed"] = [*resumed, row]
    write_json(folder / "run.json", facts)


_locks: list[IO[str]] = []  # of the run folder, held as long as this process works on it


def provenance(command: list[str]) -> dict[str, object]:
    """Describe what makes the numbers of this command: versions, machine, date."""
    import accelerate
    import transformers

    try:
        version = importlib.metadata.version("draftsmith")
    except importlib.metadata.PackageNotFoundError:  # its dependencies came from elsewhere
        version = None
    processor = torch.cpu.get_capabilities().get("cpu_name")
    parts = [platform.machine(), processor, f"{os.cpu_count()} cores"]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name(0))
    return {
        "command": shell_command(command),
        "date": datetime.date.today().isoformat(),
        "draftsmith": version,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "machine": ", ".join(str(part) for part in parts if part),
    }


def _commit() -> str | None:
    """The commit that is checked out here; None outside of a repository and without git."""
    asked = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None
