"""Import what a server has answered as training text: a request log becomes a trace store.

    python -m scripts.import_traces script.log=requests.jsonl.gz data.traces=runs/imported \\
        model.target=Qwen/Qwen3-8B

The log has a form of scripts.request_log, one JSON object a line, gzipped or not: `prompt_ids`,
`response_ids` and `temperature`, or an exchange with an OpenAI-compatible server. The target reads
a sample of the rows again: where they are not its own text, none is kept.
`script.domains=math+code` imports these domains alone.

Train on them with data.traces=runs/imported, and without data.prompts: the prompts come with the
rows. A share of them is held out for the report (data.eval_share), or eval.prompts names others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from data.imported import import_log
from data.trace_rows import column, lengths
from data.traces import Trace
from phases import exits, run
from phases.check import check_words
from recipes.base import NoMethod
from recipes.common.config import Config, compose
from trainer.config import asks_for_help
from trainer.errors import one_line, require
from trainer.terminal import guard_terminal

KEYS = ("log", "domains")
READS = (*run.OF_TARGET, "data.traces", *(f"script.{key}" for key in KEYS))


def main(arguments: list[str]) -> int:
    guard_terminal()
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        config = resolve(arguments)
        exits.stop_softly()
        target = run.Run.open(config).target
        log, folder = Path(config.script["log"]), Path(str(config.data.traces))
        domains = [name for name in (config.script["domains"] or "").split("+") if name]
        print(f"{folder}: {counts(import_log(target, log, folder, domains))}")
    except Exception as error:
        return exits.fail(error, arguments)
    return 0


def resolve(arguments: list[str]) -> Config:
    """Compose the configuration; UserError where it names no log, no folder, or other keys."""
    config = compose("import_traces", NoMethod, (), arguments, script_keys=KEYS)
    check_words(
        arguments,
        READS,
        "scripts.import_traces",
        data_temperature="the rows say how they were drawn",
        data_prompts="the rows bring their prompts",
    )
    require(config.script["log"] is not None, "script.log", "name the file to import", None)
    require(config.data.traces is not None, "data.traces", "name the folder to write", None)
    return config


def counts(traces: Sequence[Trace]) -> str:
    """Rows and response tokens, in total and by domain and temperature."""
    rows: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    sampled = zip(column(traces, "domain"), column(traces, "temperature"), strict=True)
    sizes = lengths(traces, "response_ids").tolist()
    for (domain, temperature), size in zip(sampled, sizes, strict=True):
        name = one_line(f"{domain} T={temperature:g}")
        rows[name] += 1
        tokens[name] += size
    parts = [f"{name} {rows[name]} rows, {tokens[name]} tokens" for name in sorted(rows)]
    return f"{len(traces)} rows, {sum(tokens.values())} tokens ({'; '.join(parts)})"


if __name__ == "__main__":
    exits.end(main)
