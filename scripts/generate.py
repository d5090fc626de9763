"""Generate the target's traces of the prompts of a configuration, and nothing else.

    python -m scripts.generate data.prompts=gsm8k.jsonl model.target=Qwen/Qwen3-8B

Several processes share the work under `accelerate launch -m scripts.generate ...`.
"""

from __future__ import annotations

from dataclasses import fields

from data.config import DataConfig
from phases import exits, generate, run
from phases.check import check_words
from recipes.base import NoMethod
from recipes.common.config import compose
from trainer.config import asks_for_help
from trainer.terminal import guard_terminal

# keys of the target, of the prompts, and of which prompts are held out
READS = ("dry_run", "run.seed", *run.OF_TARGET,
         *(f"data.{f.name}" for f in fields(DataConfig) if not f.name.startswith("features")),
         *(f"eval.prompts{part}" for part in ("", "_config", "_split", "_column")),
         "eval.num_prompts", "eval.seed")  # fmt: skip


def main(arguments: list[str]) -> int:
    guard_terminal()
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    exits.show_log()
    try:
        config = compose("generate", NoMethod, (), arguments)
        check_words(
            arguments,
            READS,
            "scripts.generate",
            run_dir="data.traces, else data.cache_dir, says where its traces go",
            eval_temperatures="data.temperature is what its traces are drawn at",
            eval_max_new_tokens="data.max_new_tokens limits its traces",
        )
        if config.dry_run:
            generate.describe(config)
            return 0
        exits.stop_softly()
        this = run.Run.open(config, generate.writer_of_text)
        prompts, _ = generate.choose_prompts(config)
        traces = generate.training_traces(this, prompts)
        if this.accelerator.is_main_process:
            tokens = traces.lengths("response_ids").sum()
            ended = sum(reason != "length" for reason in traces.column("finish_reason"))
            ended /= max(1, len(traces))
            print(
                f"{len(traces)} traces, {tokens} tokens, {ended:.0%} ended by themselves: "
                f"{generate.training_folder(this, prompts)}"
            )
    except Exception as error:
        return exits.fail(error, arguments)
    return 0


if __name__ == "__main__":
    exits.end(main)
