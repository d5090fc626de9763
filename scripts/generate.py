"""Only the traces: what the target says to the prompts of a configuration.

    python -m scripts.generate data.prompts=gsm8k.jsonl model.target=Qwen/Qwen3-8B

Several processes share the work under `accelerate launch -m scripts.generate ...`.
"""

from __future__ import annotations

from recipes.base import NoMethod
from recipes.phases import generate, run
from trainer.config import compose


def main(arguments: list[str]) -> int:
    try:
        config = compose("generate", NoMethod, None, arguments)
        if config.dry_run:
            generate.describe(config)
            return 0
        run.stop_softly()
        this = run.Run.open(config)
        prompts, _ = generate.choose_prompts(config)
        traces = generate.training_traces(this, prompts)
        if this.accelerator.is_main_process:
            tokens = sum(len(trace.response_ids) for trace in traces)
            ended = sum(trace.finish_reason != "length" for trace in traces) / max(1, len(traces))
            print(
                f"{len(traces)} traces, {tokens} tokens, {ended:.0%} ended by themselves: "
                f"{generate.training_folder(this, prompts)}"
            )
    except Exception as error:
        return run.fail(error, arguments)
    return 0


if __name__ == "__main__":
    run.end(main)
