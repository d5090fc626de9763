"""Metrics on disk: `metrics.jsonl`, and Weights & Biases if requested.

`metrics.jsonl` is the record: one JSON object a line, each with `step` (optimiser steps done) and,
where a recipe has several stages, `stage`. After a resume it is truncated to the checkpoint, so the
file is the same as that of a run that never stopped. Weights & Biases cannot be truncated: a
resumed run shows the repeated steps twice there.
"""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor

from trainer.checkpoint import Sums, unshared
from trainer.config import TrainerConfig
from trainer.errors import RunFault, UserError
from trainer.files import write_atomic
from trainer.losses import LossOutput
from trainer.objective import TrainingBatch
from trainer.progress import MetricsRow
from trainer.redaction import hide, shown

if TYPE_CHECKING:
    from wandb import Run


class Tracker:
    """Writes rows to `folder/metrics.jsonl` and W&B; on all but the main process it does nothing.

    With `stage`, rows name it and `truncate` keeps the rows of other stages, so that all stages of
    a run share one file.
    """

    def __init__(
        self,
        config: TrainerConfig,
        folder: Path,
        run_name: str,
        resolved_config: Mapping[str, object],
        is_main: bool = True,
        stage: str | None = None,
    ) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self.stage = stage
        self.is_main = is_main
        self._wandb: Run | None = None
        if is_main:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if config.wandb != "off":
                self._wandb = _start_wandb(config, self.path.parent, run_name, resolved_config)
                prefix = stage or "train"
                self._wandb.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def log(self, row: Mapping[str, object]) -> None:
        """Append one row; it is in the file when this returns (a kill loses at most this line).
        RunFault where the file cannot be written."""
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
        """Remove the rows after `step` (-1: all) and a line that a kill cut short."""
        if not self.is_main or not self.path.exists():
            return
        lines = []
        for line in self.path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # only the last line can be cut short: rows are appended one by one
            if row.get("stage") != self.stage or row["step"] <= step:
                lines.append(line + "\n")
        write_atomic(self.path, "".join(lines))

    def finish(self) -> None:
        """Close the W&B run, if there is one."""
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


def check_login(config: TrainerConfig) -> None:
    """UserError where W&B is asked for and the package or a login is missing. Nothing is sent, and
    only the process that logs is checked."""
    if config.wandb == "off" or os.environ.get("RANK", "0") != "0":
        return
    wandb = _wandb(config)
    if config.wandb == "offline":
        return
    wandb.setup(wandb.Settings(silent=True, mode="online"))  # whatever the environment says
    try:
        found = wandb.login(prompt=False, verify=False)
    except wandb.errors.Error as error:  # what is configured cannot be a key
        raise _no_login(_first_line(error)) from error
    if not found:
        raise _no_login("no API key is configured")


def track_report(
    config: TrainerConfig,
    folder: Path,
    run_name: str,
    resolved_config: Mapping[str, object],
    numbers: Mapping[str, object],
    files: Sequence[Path],
) -> None:
    """Send the finished report to W&B, if requested: `numbers` as the run's summary, `files` as an
    artifact. A report that cannot be sent is no error: it is on the disk."""
    if config.wandb == "off":
        return
    wandb, wandb_run = _wandb(config), None
    try:
        wandb_run = _start_wandb(config, folder, run_name, resolved_config)
        wandb_run.summary.update({k: v for k, v in numbers.items() if v is not None})
        artifact = wandb.Artifact(f"report-{wandb_run.id}", type="report")
        for file in files:
            artifact.add_file(str(file))
        wandb_run.log_artifact(artifact)
        wandb_run.finish()
    except (wandb.errors.Error, UserError, RunFault, OSError) as error:
        remedy = f"it is in {folder / 'report.json'}"
        if wandb_run is not None:
            place = Path(wandb_run.dir).parent
            remedy += f", and `wandb sync {place}` sends what W&B has recorded of it"
        print(f"the report was not sent to W&B ({hide(_first_line(error))}): {remedy}")


def _start_wandb(
    config: TrainerConfig, folder: Path, name: str, resolved: Mapping[str, object]
) -> Run:
    """The W&B run of a run folder. UserError where wandb or a login is missing."""
    wandb = _wandb(config)
    id_file = folder / "wandb_id"  # the same command continues the same W&B run
    if not id_file.exists() or not id_file.read_text().strip():
        write_atomic(id_file, secrets.token_hex(4))
    init = functools.partial(
        wandb.init,
        project=os.environ.get("WANDB_PROJECT", "draftsmith"),
        name=name,
        config=shown(dict(resolved), folder),
        dir=str(folder),
        id=id_file.read_text().strip(),
        # W&B collects nothing by itself: not the terminal (prompts are previewed there), the words
        # of the command, names of host, user and folders, or the address of the git remote
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_machine_info=True,
            host="",
        ),
    )
    try:
        if config.wandb == "online":
            return init(mode="online", resume="allow")
        return init(mode="offline")
    except wandb.errors.UsageError as error:
        raise _no_login(_first_line(error)) from error
    except wandb.errors.CommError as error:
        print(f"W&B cannot be reached ({error}); this run is recorded offline in {folder}/wandb")
        return init(mode="offline")


def _wandb(config: TrainerConfig) -> ModuleType:
    """The package wandb. UserError where it is missing."""
    try:
        import wandb
        import wandb.errors
    except ImportError as error:
        raise UserError(
            f"trainer.wandb={config.wandb} needs the wandb package: pip install wandb, or "
            "set trainer.wandb=off"
        ) from error
    return wandb


def _no_login(reason: str) -> UserError:
    return UserError(
        f"trainer.wandb=online needs a login ({reason}): set WANDB_API_KEY, or "
        "trainer.wandb=offline"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["refused"])[0]


def _flatten(row: Mapping[str, object], prefix: str) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


class Tokens(NamedTuple):
    """Of a batch, what is kept until its step is known to be sound: not the target's logits."""

    input_ids: Tensor
    loss_mask: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch) -> Tokens:
        return cls(batch.input_ids, batch.loss_mask)


def save_batches(path: Path, batches: Sequence[Tokens], step: int) -> None:
    """Write the micro-batches of a failed step for inspection: `input_ids`, `input_ids_1`, ..."""
    tensors: dict[str, Tensor] = {}
    for i, batch in enumerate(batches):
        for name, values in batch._asdict().items():
            tensors[name if i == 0 else f"{name}_{i}"] = values
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(unshared(tensors), path, metadata={"step": str(step)})


@dataclass
class StepRecord:
    """The results of a step, on the device. `losses`: one per batch, times the number of ranks."""

    step: int
    batches: Sequence[Tokens]
    losses: list[Tensor] = field(default_factory=list)
    # (name of the term, returned, announced)
    denominators: list[tuple[str, Tensor | float, float]] = field(default_factory=list)
    # (name, sum, count)
    metrics: list[tuple[str, Tensor | float, Tensor | float]] = field(default_factory=list)
    grad_norm: Tensor | float = math.nan

    def add(self, output: LossOutput, announced: Mapping[str, float]) -> None:
        """Add the result of a batch. RunFault unless it has the terms that were announced."""
        if output.terms.keys() != announced.keys():
            raise RunFault(
                f"loss() returned the terms {', '.join(sorted(output.terms))} at step "
                f"{self.step + 1}, but denominators() had announced {', '.join(sorted(announced))}"
            )
        for name, term in output.terms.items():
            self.denominators.append((name, _detached(term.count), announced[name]))
        for name, (total, count) in output.metrics.items():
            self.metrics.append((name, _detached(total), _detached(count)))


class Window:
    """Losses and metrics since the last row. They stay on the device until `settle`, the one place
    where the host waits for it. `settle` raises RunFault for a number that is not finite."""

    def __init__(self, accelerator: Accelerator, folder: Path, trained_by: type) -> None:
        self.accelerator, self.folder = accelerator, folder
        self.name = f"{trained_by.__module__}.{trained_by.__qualname__}"
        self.sums: Sums = {}  # of this rank
        self._pending: list[StepRecord] = []
        self.start(0)

    def save(self, batches: Sequence[Tokens], step: int) -> Path:
        """Write the batches of a failed step for inspection; one file per rank."""
        main, rank = self.accelerator.is_main_process, self.accelerator.process_index
        path = self.folder / ("nan_batch.safetensors" if main else f"nan_batch-{rank}.safetensors")
        save_batches(path, batches, step + 1)
        return path

    def add(self, record: StepRecord, grad_norm: Tensor | float) -> None:
        """Add a step; nothing is read from the device yet."""
        record.grad_norm = grad_norm
        self._pending.append(record)

    def settle(self) -> None:
        """Read and add up the pending steps; a fault on one rank is raised on all."""
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
    def paused(self) -> Iterator[Sums]:
        """Settle; the time inside the block (evaluation, saving) does not count for tokens/s."""
        self.settle()
        began = time.perf_counter()
        yield self.sums
        self._clock += time.perf_counter() - began

    def row(self, step: int, num_tokens: int, lr: float) -> MetricsRow:
        """The row of metrics.jsonl after `step` steps, equal on all ranks; starts a new window."""
        self.settle()
        merged: Sums = {}
        for sums in gather_object([self.sums]):
            _accumulate(merged, [(name, total, count) for name, (total, count) in sums.items()])
        means = {name: total / count if count else None for name, (total, count) in merged.items()}
        seconds = time.perf_counter() - self._clock
        row: MetricsRow = {
            "step": step,
            "loss": means.pop("loss", None),
            "lr": lr,
            "grad_norm": means.pop("grad_norm", None),
            "num_tokens": num_tokens,
            "tokens_per_s": (num_tokens - self._tokens) / seconds,
            **means,  # type: ignore[typeddict-item] - the objective names them
        }
        self.sums = {}
        self.start(num_tokens)
        return row

    def start(self, num_tokens: int) -> None:
        """Measure tokens per second from here on."""
        self._clock, self._tokens = time.perf_counter(), num_tokens

    def _fault(self, record: StepRecord, losses: list[float], grad_norm: float) -> str | None:
        for name, returned, announced in record.denominators:
            if not math.isclose(float(returned), announced, rel_tol=1e-6):
                return (
                    f"{self.name}: loss() returned the denominator {float(returned)} of {name} at "
                    f"step {record.step + 1}, but denominators() had announced {announced}"
                )
        if all(map(math.isfinite, [*losses, grad_norm])):
            return None
        return self._not_finite(record, losses, grad_norm)

    def _not_finite(self, record: StepRecord, losses: list[float], grad_norm: float) -> str:
        """Save the batches that gave such a loss, and say where."""
        pairs = zip(record.batches, losses, strict=True)
        broken = [batch for batch, loss in pairs if not math.isfinite(loss)]
        path = self.save(broken or record.batches, record.step)
        sums = {name: float(total) for name, total, _ in record.metrics}
        others = "".join(f", {n} {v}" for n, v in sums.items() if not math.isfinite(v))
        return (
            f"loss {sum(losses)}, gradient norm {grad_norm}{others} at step {record.step + 1}: the "
            f"batch is in {path}: lower trainer.lr, check the model's outputs for NaN and Inf, or "
            "choose a divergence that is finite where one model excludes a token (tvd, jsd)"
        )


def _detached(value: Tensor | float) -> Tensor | float:
    return value.detach() if isinstance(value, Tensor) else value


def _accumulate(sums: Sums, entries: Iterable[tuple[str, Tensor | float, Tensor | float]]) -> None:
    """Add the entries one by one, so that a window cut by a checkpoint has the same bits."""
    for name, total, count in entries:
        entry = sums.setdefault(name, [0.0, 0.0])
        entry[0] += float(total)
        entry[1] += float(count)


def metrics_text(metrics: Mapping[str, object]) -> str:
    """Each number of an evaluation behind its name; `select` repeats one of them."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
    if len(numbers) > 1:
        numbers.pop("select", None)
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in numbers.items())
