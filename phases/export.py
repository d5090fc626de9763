"""The phase between training and report: save the drafter, and write it for an engine."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from drafters.acceptance_head import adaptive_note
from drafters.base import TrainedDrafter
from drafters.export.card import Export, Serving, model_card
from drafters.kinds import first_writer, kind_of
from eval.report.rows import Report
from eval.report.schema import markdown_table
from phases.run import Run
from target.gguf import target_gguf
from trainer.config import ModelConfig
from trainer.errors import UserError
from trainer.files import MARKER, rewrite, whole_folder
from trainer.progress import working
from trainer.redaction import hide, shown

CARD = "README.md"


def save_drafter(run: Run, drafter: TrainedDrafter) -> None:
    """Write run/drafter, in the project's own format."""
    with whole_folder(run.folder / "drafter", ours=True) as partial:
        drafter.save_pretrained(partial)


def check_export(drafter: TrainedDrafter, says: bool, of_gguf: bool) -> None:
    """Ask, before anything is trained, whether the drafter can be exported. UserError where the
    engine that the run writes it for could not serve it; other engines that could not are printed
    where `says`."""
    kind = kind_of(drafter)
    if not kind.writers or drafter.unserved is not None:
        return
    engine, writer = first_writer(drafter, of_gguf)
    try:
        writer.check(drafter)
    except UserError as error:
        rule = f"this run's own export would fail: {error}"
        raise UserError(rule, key="export", value=engine) from error
    for other in kind.writers if says else ():
        if other == "llamacpp" and not of_gguf:
            continue
        try:
            kind.writers[other].check(drafter)
        except UserError as error:
            print(f"warning: the drafter of this run cannot be exported for {other}: {error}")


@working("export")
def export_run(run: Run, drafter: TrainedDrafter) -> dict[str, str]:
    """Write run/export/<engine>, for the first engine in the table of kinds that serves the
    drafter, with a card that holds no results yet; a target that was trained with the drafter lies
    beside it. Returns the part `export` of the report: `engine`, `folder` and `target`, or `engine`
    and `error`, or nothing where no engine serves the drafter. An export that fails does not raise:
    the drafter is saved, and its report follows."""
    kind = kind_of(drafter)
    if not kind.writers or drafter.unserved is not None:
        why = drafter.unserved or f"no engine serves a drafter of kind {kind.name!r}"
        print(f"export: {why}; its own format is in {run.folder / 'drafter'}")
        return {}
    gguf = target_gguf(run.config.model)
    engine, write = first_writer(drafter, gguf is not None)
    out = run.folder / "export" / engine
    try:
        served, target = drafter.servable(out / "target", ours=True)
        name = run.target.name
        if target is not None:
            print(f"export: the target that this drafter serves on is {target.name}")
            name, out = shown(target.name, run.folder), out / "drafter"
        card = run_card(run, drafter, engine, name, None)
        num_tokens = drafter.served_tokens(run.config.eval.K)
        write(served, out, Export(card, name, num_tokens, ours=True, gguf=gguf))
    except Exception as error:  # of any writer: the report is written all the same
        print(hide("".join(traceback.format_exception(error)), []), file=sys.stderr)
        return {"engine": engine, "error": f"{type(error).__name__}: {error}"}
    print(f"export: {out}")
    return {"engine": engine, "folder": str(out.relative_to(run.folder)), "target": name}


def failed_export(report: Report, folder: Path, model: ModelConfig) -> int:
    """Return the exit code of a run whose report is whole: 3, after a line that says so, where its
    export failed and has not been made since, else 0."""
    exported = report["drafter"].get("export") or {}
    if "error" not in exported:
        return 0
    out, reported = folder / "export" / exported["engine"], (folder / "report.json").stat()
    # the last file of an export; the other one where a target was trained with the drafter
    for marker in (out / MARKER, out / "drafter" / MARKER):
        if marker.exists() and marker.stat().st_mtime_ns > reported.st_mtime_ns:
            print(f"export: {marker.parent}")
            return 0
    command = ["python", "-m", "scripts.export", f"script.drafter={folder / 'drafter'}"]
    command += [f"script.engine={exported['engine']}", f"script.out={out}"]
    command += ["model.trust_remote_code=true"] if model.trust_remote_code else []
    if exported["engine"] == "llamacpp" and model.target_gguf:
        command.append(f"model.target_gguf={model.target_gguf}")
    print(
        f"error: the drafter was trained and saved, but not exported: {exported['error']}; fix "
        f"that and run {shlex.join(command)}",
        file=sys.stderr,
    )
    return 3


def run_card(
    run: Run, drafter: TrainedDrafter, engine: str, target: str, report: Report | None
) -> str:
    """Write the model card of an export; `report`: None before the drafter is measured."""
    kind = kind_of(drafter)
    assert kind.method is not None
    revision = run.config.model.target_revision if target == run.target.name else None
    served = drafter.served_tokens(run.config.eval.K)
    template = run.config.data.chat_template_kwargs
    return model_card(
        report,
        Serving(target, kind.method, served, revision, template),
        recipe=run.config.recipe,
        table=markdown_table(report["results"]) if report else None,
        license="apache-2.0" if run.target.name == ModelConfig.target else None,
        engine=engine,
        words=kind.words,
        note=adaptive_note(drafter.acceptance) if "transformers" in kind.writers else "",
    )


def complete_card(
    run: Run, drafter: TrainedDrafter, exported: Mapping[str, str], report: Report
) -> None:
    """Write the results into the card of an export."""
    if "folder" in exported:
        folder = run.folder / exported["folder"]
        card = run_card(run, drafter, exported["engine"], exported["target"], report)
        rewrite(folder, {CARD: card}, ours=True)
