"""Train a drafter and report what it gains.

    accelerate launch train.py recipe=distillspec
    accelerate launch train.py recipe=distillspec model.target=Qwen/Qwen3-8B \\
        model.drafter=Qwen/Qwen3-0.6B data.prompts=HuggingFaceH4/ultrachat_200k \\
        data.prompts_split=train_sft
    python train.py config=runs/x/config.yaml trainer.max_steps=600

`python train.py` alone lists the recipes. Phases: generate, train, export, report; what is finished
is skipped. If a run is killed, rerun the same command to resume it. `help=true` prints the keys of
a recipe, `dry_run=true` what a run would do; both stop there. `config=` takes the recipe and its
settings from the config.yaml of a run, and prints what it does not take: paths, addresses, and
permission to run code.
"""

from __future__ import annotations

import os
from types import ModuleType

import yaml

from recipes.common.config import Config, compose
from trainer.config import asks_for_help
from trainer.errors import UserError, require


def resolve(arguments: list[str]) -> tuple[Config, ModuleType]:
    """Compose the configuration; return it with the recipe's module."""
    from recipes import base

    if any(word.startswith("config=") for word in arguments):
        from phases import received

        return received.resolve(arguments)
    names = [word.partition("=")[2] for word in arguments if word.startswith("recipe=")]
    if len(names) != 1:
        raise UserError(f"name one recipe as recipe=<name>; available: {', '.join(base.names())}")
    presets = [word for word in arguments if word.startswith("preset=")]
    if len(presets) > 1:
        raise UserError(f"name one preset, got {' '.join(presets)}")
    module, files = base.load(names[0], presets[0].partition("=")[2] if presets else None)
    words = [word for word in arguments if word not in presets]
    return compose(names[0], module.Config, files, words), module


def main(arguments: list[str]) -> int:
    from recipes import base

    if asks_for_help(arguments):
        print(__doc__)
        print(base.listing())
        return 0
    from phases import exits, export, generate, report, run, states, train
    from phases.commands import command_of
    from phases.dev import split_dev
    from phases.help import recipe_help

    exits.show_log()
    try:
        if "help=true" in arguments:
            print(recipe_help(resolve([word for word in arguments if word != "help=true"])[0]))
            return 0
        config, module = resolve(arguments)
        rule = "be left to scripts.evaluate: this report is of the drafter that is trained"
        require(config.eval.drafter is None, "eval.drafter", rule, config.eval.drafter)
        module.Recipe.check_launch(config, int(os.environ.get("WORLD_SIZE", "1")))
        command = command_of(["train.py"], arguments)
        run.check_folder(config, command)
        if config.dry_run:
            print(yaml.safe_dump(config.to_dict(), sort_keys=False))
            generate.describe(config)
            print(f"run folder: {config.run_dir}")
            if more := module.Recipe.describe(config):
                print(more)
            return 0
        exits.stop_softly()
        again = config.trainer.resume == "never"
        old = not again and report.written(config.run_dir) is not None
        if not old:
            states.check_address(config.data)
            unread: dict[str, object] = {}
            train_prompts, eval_prompts = generate.choose_prompts(config, unread)
            this = run.Run.open(config)
            recipe = module.Recipe(config.method, this.target)
            start = train.prepare(this, recipe, train_prompts)
            texts = train.raw_texts(this, recipe)
            if start is not None:
                report.check_start(this, start, recipe.trains_acceptance)
            traces = generate.all_traces(this, train_prompts, eval_prompts)
            if start is None:
                start = train.build(this, recipe, traces, texts)
                report.check_start(this, start, recipe.trains_acceptance)
            generate.check_texts(this, start, eval_prompts)
            made_of = generate.contents(this, start, traces, texts)
            run.claim(this, command, made_of)
            recipe.widen(start, traces)  # after the claim: new rows are rounded as the threads add
            held_out = generate.held_out_in(this, eval_prompts)
            trained, results = train.train_stages(this, recipe, start, traces, texts, held_out)
            if config.run.stage is None and this.accelerator.is_main_process:
                dev = split_dev(traces, config.run.seed)[1]
                about = recipe.about()
                report.finish(this, start, trained, results, eval_prompts, dev, about, unread)
            this.target.sync()
        if os.environ.get("RANK", "0") == "0" and (finished := report.written(config.run_dir)):
            report.show(finished, config.run_dir)
            if old:
                print("This run was finished before; trainer.resume=never trains it anew.")
            return export.failed_export(finished, config.run_dir, config.model.trust_remote_code)
    except Exception as error:
        return exits.fail(error, arguments)
    return 0


if __name__ == "__main__":
    from phases.exits import end

    end(main)
