"""Measure any drafter, in this project's format or exported, against its target.

    python -m scripts.evaluate eval.drafter=runs/distillspec-0123456789/drafter eval.K=3
    python -m scripts.evaluate eval.drafter=Qwen/Qwen3-0.6B model.target=Qwen/Qwen3-8B \\
        eval.prompts=mt_bench.jsonl script.out=reports/qwen
    python -m scripts.evaluate eval.drafter=lookup:3 model.target=Qwen/Qwen3-8B

A drafter inside a run folder, exported or not, brings the configuration of that run, except the
permission to run code that comes with a model and the address of a server: give these again. The
report holds the drafter, the same shape untrained, the drafters of eval.baselines and the target as
its own drafter.
"""

from __future__ import annotations

import os
from pathlib import Path

from data.config import DataConfig
from data.prompts import Prompt
from drafters.base import DrafterJson, TrainedDrafter
from drafters.formats.files import read_json
from drafters.load import drafter_folder, load_acceptance_head, load_drafter
from drafters.served_dtype import in_served_dtype
from drafters.training_free.base import TrainingFree
from drafters.training_free.table import TRAINING_FREE, is_training_free, parse_training_free
from eval.config import EvalConfig
from eval.report.rows import ORDER
from eval.report.schema import build_report, write_report
from phases import exits, generate, report, run
from phases.check import check_drafter, check_words, deeper_than_trained
from phases.commands import command_of, without_places
from phases.measure import ReportText, baselines, measure, texts_of_log
from recipes import base
from recipes.common.config import Config, compose
from target.layout import laid_out
from target.model import Target
from trainer.checks import is_address, require_folder
from trainer.config import asks_for_help, load_yaml
from trainer.errors import UserError, require
from trainer.progress import working
from trainer.redaction import shown
from trainer.specs import form
from trainer.terminal import guard_terminal

# of data.* the keys that decide the held-out prompts, and where and how the target's text is
# generated
READS = ("dry_run", "script.out", "run.seed", "eval", *run.OF_TARGET,
         "data.prompts", "data.prompts_config", "data.prompts_split", "data.prompts_column",
         "data.bad_rows", "data.response_column", "data.num_prompts", "data.eval_share",
         "data.system_prompt", "data.chat_template_kwargs", "data.max_prompt_tokens",
         "data.long_prompts", "data.cache_dir", "data.batch_size", "data.rows_per_shard",
         "data.traces")  # fmt: skip
# of these only what this command line says: a folder may come from somebody else
ENGINE = ("data.engine", "data.engine_options", "data.servers")
NAMED = {"vllm": {"data.engine"}, "openai": {"data.engine", "data.servers"}}  # for data.engine


def resolve(arguments: list[str]) -> Config:
    """Compose the configuration, from that of the drafter's run where there is one."""
    given = [word.partition("=")[2] for word in arguments if word.startswith("eval.drafter=")]
    if not given or given[0] in ("", "null"):
        raise UserError(
            "eval.drafter must name a drafter: a folder, a Hub id or "
            f"{' or '.join(map(form, TRAINING_FREE.values()))}, got nothing"
        )
    drafter, beside = in_run(given[0])
    stored = drafter.parent / "config.yaml"
    if not (os.path.exists(drafter / "drafter.json") and stored.exists()):
        return compose("evaluate", base.NoMethod, (), arguments, script_keys=("out",))
    recipe = load_yaml(stored).get("recipe")
    if not isinstance(recipe, str):
        raise UserError(f"{stored} names no recipe: it is damaged, or no configuration of a run")
    method = base.load(recipe)[0].Config
    config = compose(recipe, method, (stored,), arguments, script_keys=("out",), reads=READS)
    asked = {word.partition("=")[0] for word in arguments}
    # the folder may come from somebody else
    if "model.trust_remote_code" not in asked:
        config.model.trust_remote_code = False
    if "model.parts" not in asked:
        config.model.parts = "all"
    if "eval.engine" not in asked and is_address(config.eval.engine):
        print(f"eval.engine={config.eval.engine} of {stored} is not used: name it again to use it")
        config.eval.engine, config.eval.plain_engine = EvalConfig.engine, None
        config.eval.concurrency = []
    data = config.data
    if not NAMED.get(data.engine, set()) <= asked:
        print(
            f"data.engine={data.engine} of {stored} is not used: name it again to use it, with "
            "its data.engine_options or data.servers"
        )
        data.engine, data.servers = DataConfig.engine, []
    if "data.engine_options" not in asked:
        data.engine_options = {}
    if "model.target" not in asked:
        if beside is not None:
            config.model.target, config.model.target_revision = str(beside), None
        print(f"model.target={config.model.target}, from {beside or stored}")
    return config


def in_run(name: str) -> tuple[Path, Path | None]:
    """The drafter's folder in the project's own format, where `name` is an export of a run, and the
    target that was trained with the drafter, if any; else `name` itself."""
    drafter = Path(drafter_folder("eval.drafter", name)).resolve()
    if drafter.parent.name == "export":  # <run>/export/<engine>
        return drafter.parents[1] / "drafter", None
    if drafter.parent.parent.name == "export" and drafter.name == "drafter":
        return drafter.parents[2] / "drafter", drafter.parent / "target"
    return drafter, None


@working("loading the drafter")
def drafter_of(
    config: EvalConfig, target: Target, trusted: bool = False
) -> TrainedDrafter | TrainingFree:
    """Load eval.drafter, and check that eval.* suits it. `trusted`: code of its own may run."""
    name = str(config.drafter)
    if is_training_free(name):
        return parse_training_free(name, "eval.drafter")
    drafter = load_drafter(name, target, trust_remote_code=trusted, key="eval.drafter")
    if config.acceptance_head is not None:
        load_acceptance_head(config.acceptance_head, drafter, "eval.acceptance_head")
    check_drafter(drafter, target, config)
    steps, own = drafter.trained_depth, in_run(name)[0] / "drafter.json"
    if steps is None and own.exists():  # an export does not say
        steps = read_json(own, DrafterJson).get("trained_depth")
    if steps is not None and (deeper := deeper_than_trained(config, steps)):
        print(f"warning: {deeper[1]}; draft at most {steps} deep, or train with method.steps="
              f"{deeper[0]}")  # fmt: skip
    return drafter


@working("report")
def report_on(
    this: run.Run,
    drafter: TrainedDrafter | TrainingFree,
    prompts: list[Prompt],
    folder: Path,
    arguments: list[str],
    unread: dict[str, object],
    logged: list[ReportText] | None = None,
) -> None:
    """Measure the drafter and write the report to `folder`. `unread`: the rows of prompts that
    could not be read, by key; `logged`: the text of a log, in place of the prompts' answers."""
    name = shown(str(this.config.eval.drafter))
    others = baselines(this, drafter)
    if name in ORDER or name in others:  # a folder called like another row
        name = f"./{name}"
    drafters = {name: drafter, **others}
    with in_served_dtype(drafters.values(), this.target), laid_out(*drafters.values()):
        measured = measure(this, drafters, prompts, name, logged)
    words = command_of(["-m", "scripts.evaluate"], arguments)
    content = build_report(
        run={
            "recipe": this.config.recipe,
            **without_places(run.provenance(words)),
            **({"unread_rows": unread} if unread else {}),
        },
        target=report.target_facts(this),
        drafter={"start": name, **report.facts(drafter, this.target)},
        results=measured.rows,
        comparisons=measured.comparisons,
        series=[],
        readings=measured.readings,
        load=measured.load,
    )
    folder.mkdir(parents=True, exist_ok=True)
    report.write_rounds(folder, measured.rounds)
    write_report(content, folder)
    report.show(content, folder)


def main(arguments: list[str]) -> int:
    guard_terminal()
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    exits.show_log()
    try:
        config = resolve(arguments)
        check_words(
            arguments,
            (*READS, *ENGINE),
            "scripts.evaluate",
            run_dir="script.out names the folder of its report",
            model_drafter="eval.drafter names what it measures",
            data_temperature="eval.temperatures are what it measures at",
            data_max_new_tokens="eval.max_new_tokens limits its answers",
        )
        parts = config.model.parts
        require(parts == "all", "model.parts", "be all: a drafter is measured by decoding", parts)
        folder = Path(config.script["out"] or f"runs/evaluate-{config.hash()}")
        require_folder("script.out", folder)
        if (folder / "run.json").exists():
            raise UserError(
                f"script.out={folder} holds a run, whose report would be lost: name another folder"
            )
        if config.dry_run:
            generate.describe(config)
            return 0
        exits.stop_softly()
        this = run.Run.open(config)
        drafter = drafter_of(config.eval, this.target, config.model.trust_remote_code)
        unread: dict[str, object] = {}
        prompts, logged = list[Prompt](), None
        if config.eval.traces is not None:
            logged = texts_of_log(this, config.eval.traces, drafter)
        else:
            _, prompts = generate.both_prompts(config, unread)
            with generate.shared_engine(this) as engine:  # by all processes
                generate.report_traces(this, prompts, engine)
        if this.accelerator.is_main_process:
            report_on(this, drafter, prompts, folder, arguments, unread, logged)
        this.target.sync()
    except Exception as error:
        return exits.fail(error, arguments)
    return 0


if __name__ == "__main__":
    exits.end(main)
