"""A run of train.py from its words to its report: the phases in their order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType

import yaml

from data.budget import in_bytes
from phases import exits, export, generate, received, report, run, train
from phases.check import check_address, check_depth, check_parts, check_slots, spares_layers
from phases.commands import command_of
from phases.costs import bytes_of_layers, costs
from phases.help import recipe_help
from phases.source import RunText
from phases.states import hold_states
from recipes import base
from recipes.common.config import Config, compose
from target.gguf import target_gguf
from trainer.errors import UserError, require


def run_words(words: list[str]) -> int:
    """Do what the words of a command line ask for, and return the exit code."""
    if "help=true" in words:
        print(recipe_help(resolve([word for word in words if word != "help=true"])[0]))
        return 0
    config, module = resolve(words)
    rule = "be left to scripts.evaluate: this report is of the drafter that is trained"
    require(config.eval.drafter is None, "eval.drafter", rule, config.eval.drafter)
    require(config.eval.traces is None, "eval.traces", rule, config.eval.traces)
    module.Recipe.check_launch(config, int(os.environ.get("WORLD_SIZE", "1")))
    check_depth(config.eval, module.Recipe.max_depth(config.method))
    check_slots(config.eval, module.Recipe.has_slots(config.method))
    check_parts(config, module.Recipe)
    command = command_of(["train.py"], words)
    run.check_folder(config, command)
    if config.dry_run:
        describe(config, module)
        return 0
    exits.stop_softly()
    again = config.trainer.resume == "never"
    old = not again and report.written(config.run_dir) is not None
    if not old:
        run_phases(config, module, command)
    if os.environ.get("RANK", "0") != "0" or not (finished := report.written(config.run_dir)):
        return 0
    report.show(finished, config.run_dir, target_gguf(config.model))
    if old:
        print("This run was finished before; trainer.resume=never trains it anew.")
    return export.failed_export(finished, config.run_dir, config.model)


def resolve(words: Sequence[str]) -> tuple[Config, ModuleType]:
    """Compose the configuration; return it with the recipe's module."""
    if any(word.startswith("config=") for word in words):
        return received.resolve(words)
    names = [word.partition("=")[2] for word in words if word.startswith("recipe=")]
    if len(names) != 1:
        raise UserError(f"name one recipe as recipe=<name>; available: {', '.join(base.names())}")
    presets = [word for word in words if word.startswith("preset=")]
    if len(presets) > 1:
        raise UserError(f"name one preset, got {' '.join(presets)}")
    module, files = base.load(names[0], presets[0].partition("=")[2] if presets else None)
    others = [word for word in words if word not in presets]
    return compose(names[0], module.Config, files, others), module


def describe(config: Config, module: ModuleType) -> None:
    """Print what a run would do (`dry_run=true`)."""
    print(yaml.safe_dump(config.to_dict(), sort_keys=False))
    prompts = generate.describe(config)
    print("\n".join(costs(config, module, prompts)))
    print(f"run folder: {config.run_dir}")
    if more := module.Recipe.describe(config):
        print(more)


def run_phases(config: Config, module: ModuleType, command: list[str]) -> None:
    """Generate the target's text, train the stages of the recipe, measure and export the drafter.
    What is finished is skipped."""
    check_address(config.data)
    unread: dict[str, object] = {}  # rows of prompts that could not be read
    train_prompts, eval_prompts = generate.choose_prompts(config, unread)
    this = run.Run.open(config)
    recipe, start = train.prepare(this, module.Recipe, train_prompts)
    if spares_layers(config, recipe) and this.accelerator.is_main_process:
        print(
            f"model.parts=head would do for this run, but for decoded rows of its report: each "
            f"process would hold {in_bytes(bytes_of_layers(this.target))} less"
        )
    raw = train.raw_texts(this, recipe)
    if start is not None:
        report.check_start(this, start, recipe.trains_acceptance)
    text = RunText.split(this, generate.all_traces(this, train_prompts, eval_prompts), raw)
    if start is None:
        start = train.build(this, recipe, text)
        report.check_start(this, start, recipe.trains_acceptance)
    generate.check_texts(this, start, eval_prompts)
    run.claim(this, command, generate.contents(this, start, text.traces, raw))
    recipe.widen(start, text.traces)  # after the claim: new rows are rounded as the threads add
    if not this.target.has_layers:
        hold_states(this, start, generate.held_out_texts(this, text.dev, eval_prompts))
    held_out = generate.held_out_in(this, eval_prompts)
    trained, results = train.train_stages(this, recipe, start, text, held_out)
    if config.run.stage is None and this.accelerator.is_main_process:
        recipe.calibrate(trained["after"], text.dev)
        about = recipe.about()
        report.finish(this, start, trained, results, eval_prompts, text.dev, about, unread)
    this.target.sync()
