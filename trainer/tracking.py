"""Where numbers go: `metrics.jsonl`, and Weights & Biases if asked for.

`metrics.jsonl` is the record: one JSON object a line, each with `step` (optimiser steps done) and,
where a recipe has several stages, `stage`. After a resume it is cut back to the checkpoint, so the
file reads as if the run had never stopped. Weights & Biases cannot be cut back: there a resumed
run shows the repeated steps twice.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from trainer.checkpoint import save_batches
from trainer.config import RunFault, TrainerConfig, UserError
from trainer.files import write_atomic
from trainer.losses import LossOutput
from trainer.redaction import shown


class Tracker:
    """Writes rows to `folder/metrics.jsonl` and W&B; on all but the main process it does nothing.

    With `stage`, rows carry it and `truncate` leaves the rows of other stages alone, so that all
    stages of a run share one file.
    """

    def __init__(
        self,
        config: TrainerConfig,
        folder: Path,
        run_name: str,
        resolved_config: dict[str, Any],
        is_main: bool = True,
        stage: str | None = None,
    ) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self.stage = stage
        self.is_main = is_main
        self._wandb: Any = None
        if is_main:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if config.wandb != "off":
                self._wandb = _start_wandb(config, self.path.parent, run_name, resolved_config)
                prefix = stage or "train"
                self._wandb.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def log(self, row: dict[str, Any]) -> None:
        """Append one row; it is in the file when this returns (a kill loses at most this line)."""
        if not self.is_main:
            return
        if self.stage is not None:
            row = {"stage": self.stage, **row}
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise RunFault(f"cannot write {self.path}: {error}") from error
        if self._wandb is not None:
            flat = _flatten(row, f"{self.stage or 'train'}/")
            self._wandb.log({key: value for key, value in flat.items() if value is not None})

    def truncate(self, step: int) -> None:
        """Keep the rows with `step` up to this one (-1: none); drop a line cut short by a kill."""
        if not self.is_main or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # only the last line can be torn: rows are appended one by one
            if row.get("stage") != self.stage or row["step"] <= step:
                kept.append(line + "\n")
        write_atomic(self.path, "".join(kept))

    def finish(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


def track_report(
    config: TrainerConfig,
    folder: Path,
    run_name: str,
    resolved_config: dict[str, Any],
    numbers: dict[str, Any],
    files: Sequence[Path],
) -> None:
    """The finished report in W&B, if asked for: its `numbers` as the run's summary, its `files` as
    an artifact."""
    if config.wandb == "off":
        return
    wandb_run = _start_wandb(config, folder, run_name, resolved_config)
    import wandb

    wandb_run.summary.update({k: v for k, v in numbers.items() if v is not None})
    artifact = wandb.Artifact(f"report-{wandb_run.id}", type="report")
    for file in files:
        artifact.add_file(str(file))
    wandb_run.log_artifact(artifact)
    wandb_run.finish()


def _start_wandb(config: TrainerConfig, folder: Path, name: str, resolved: dict[str, Any]) -> Any:
    try:
        import wandb
        import wandb.errors
    except ImportError as error:
        raise UserError(
            f"trainer.wandb={config.wandb} needs the wandb package: pip install wandb, or "
            "set trainer.wandb=off"
        ) from error
    id_file = folder / "wandb_id"  # the same command continues the same W&B run
    if not id_file.exists() or not id_file.read_text().strip():
        write_atomic(id_file, secrets.token_hex(4))
    settings: dict[str, Any] = {
        "project": config.wandb_project,
        "name": name,
        "config": shown(resolved, folder),
        "dir": str(folder),
        "id": id_file.read_text().strip(),
        # nothing that W&B collects by itself: the terminal (prompts are previewed there), the words
        # of the command, names of host, user and folders, the address of the git remote
        "settings": wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_machine_info=True,
            host="",
        ),
    }
    try:
        if config.wandb == "online":
            return wandb.init(mode="online", resume="allow", **settings)
        return wandb.init(mode="offline", **settings)
    except wandb.errors.UsageError as error:
        reason = (str(error).splitlines() or ["refused"])[0]
        raise UserError(
            f"trainer.wandb=online needs a login ({reason}): set WANDB_API_KEY, or "
            "trainer.wandb=offline"
        ) from error
    except wandb.errors.CommError as error:
        print(f"W&B cannot be reached ({error}); this run is recorded offline in {folder}/wandb")
        return wandb.init(mode="offline", **settings)


def _flatten(row: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


@dataclass
class StepRecord:
    """What one step left on the device. `losses`: one per batch, times the number of processes."""

    step: int
    batches: list[Any]
    losses: list[Tensor] = field(default_factory=list)
    denominators: list[tuple[Any, float]] = field(default_factory=list)  # (returned, announced)
    metrics: list[tuple[str, Any, Any]] = field(default_factory=list)  # (name, sum, count)
    grad_norm: Tensor | float = math.nan

    def add(self, output: LossOutput, announced: list[float]) -> None:
        if len(output.terms) != len(announced):
            raise RunFault(
                f"loss() returned {len(output.terms)} terms at step {self.step + 1}, but "
                f"denominators() had announced {len(announced)}"
            )
        returned = [_detached(denominator) for _, denominator, _ in output.terms]
        self.denominators += zip(returned, announced, strict=True)
        for name, (total, count) in output.metrics.items():
            self.metrics.append((name, _detached(total), _detached(count)))


class Window:
    """Losses and metrics since the last row. They stay on the device until `settle`, which is the
    one place where the host waits for it, and refuses what is not finite."""

    def __init__(self, accelerator: Accelerator, folder: Path, trained_by: type) -> None:
        self.accelerator, self.folder = accelerator, folder
        self.name = f"{trained_by.__module__}.{trained_by.__qualname__}"
        self.sums: dict[str, list[float]] = {}  # of this rank: name -> [sum, count]
        self._pending: list[StepRecord] = []
        self.start(0)

    def save(self, batches: list[Any], step: int) -> Path:
        """Keep the batches of a step that failed, for a look; one file per rank."""
        main, rank = self.accelerator.is_main_process, self.accelerator.process_index
        path = self.folder / ("nan_batch.safetensors" if main else f"nan_batch-{rank}.safetensors")
        save_batches(path, batches, step + 1)
        return path

    def add(self, record: StepRecord, grad_norm: Tensor | float) -> None:
        record.grad_norm = grad_norm
        self._pending.append(record)

    def settle(self) -> None:
        """Take the pending steps in; a fault on one rank is raised on all."""
        fault = None
        for record in self._pending:
            losses, grad_norm = [float(loss) for loss in record.losses], float(record.grad_norm)
            fault = fault or self._fault(record, losses, grad_norm)
            _accumulate(self.sums, [("loss", sum(losses), 1.0), ("grad_norm", grad_norm, 1.0)])
            _accumulate(self.sums, record.metrics)
        self._pending.clear()
        for message in filter(None, gather_object([fault])):
            raise RunFault(message)

    @contextmanager
    def paused(self) -> Iterator[dict[str, list[float]]]:
        """Settle, and keep what is done inside (evaluation, saving) out of tokens per second."""
        self.settle()
        began = time.perf_counter()
        yield self.sums
        self._clock += time.perf_counter() - began

    def row(self, step: int, num_tokens: int, lr: float) -> dict[str, Any]:
        """The row of metrics.jsonl after `step` steps, equal on all ranks; begins a new window."""
        self.settle()
        merged: dict[str, list[float]] = {}
        for sums in gather_object([self.sums]):
            _accumulate(merged, [(name, total, count) for name, (total, count) in sums.items()])
        means = {name: total / count if count else None for name, (total, count) in merged.items()}
        seconds = time.perf_counter() - self._clock
        row = {
            "step": step,
            "loss": means.pop("loss", None),  # null where no step of the window had a batch
            "lr": lr,
            "grad_norm": means.pop("grad_norm", None),
            "num_tokens": num_tokens,
            "tokens_per_s": (num_tokens - self._tokens) / seconds,
            **means,
        }
        self.sums = {}
        self.start(num_tokens)
        return row

    def start(self, num_tokens: int) -> None:
        """Begin to measure tokens per second from here."""
        self._clock, self._tokens = time.perf_counter(), num_tokens

    def _fault(self, record: StepRecord, losses: list[float], grad_norm: float) -> str | None:
        for returned, announced in record.denominators:
            if not math.isclose(float(returned), announced, rel_tol=1e-6):
                return (
                    f"{self.name}: loss() returned the denominator {float(returned)} at "
                    f"step {record.step + 1}, but denominators() had announced {announced}"
                )
        if all(map(math.isfinite, [*losses, grad_norm])):
            return None
        pairs = zip(record.batches, losses, strict=True)
        broken = [batch for batch, loss in pairs if not math.isfinite(loss)]
        path = self.save(broken or record.batches, record.step)
        return (
            f"loss {sum(losses)}, gradient norm {grad_norm} at step {record.step + 1}: the batch "
            f"is in {path}; lower trainer.lr, or look for what is not finite in the model's outputs"
        )


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _accumulate(sums: dict[str, list[float]], entries: list[tuple[str, Any, Any]]) -> None:
    """One by one from the left: a window cut by a checkpoint adds up to the same bits."""
    for name, total, count in entries:
        entry = sums.setdefault(name, [0.0, 0.0])
        entry[0] += float(total)
        entry[1] += float(count)
