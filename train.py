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

from trainer.config import asks_for_help
from trainer.terminal import guard_terminal


def main(arguments: list[str]) -> int:
    """Run the command with these words; returns the exit code."""
    guard_terminal()
    if asks_for_help(arguments):
        from recipes import base

        print(__doc__)
        print(base.listing())
        return 0
    from phases import exits, pipeline  # these load the libraries, which takes seconds

    exits.show_log()
    try:
        return pipeline.run_words(arguments)
    except Exception as error:
        return exits.fail(error, arguments)


if __name__ == "__main__":
    from phases.exits import end

    end(main)
