"""Write docs/config.md, the page of all keys, and docs/rows.md, that of a report's rows.

    python -m scripts.maintain.pages

Both come from the code that defines the keys: the meaning of one is the comment at its field; see
`phases/help.py`.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

from eval.report.render import escape_markdown
from eval.row import Acceptance, Row, Timing
from phases.help import TYPES, KeyHelp, comments, composed, first_line, keys_of, sections, shown
from recipes import base
from recipes.common.config import Config
from trainer.config import asks_for_help
from trainer.files import write_atomic
from trainer.terminal import guard_terminal

DOCS = Path(__file__).parents[2] / "docs"
RULE = "| --- | --- | --- |"
ROW_PARTS = {Row: "The measurement and its cost", Acceptance: "Acceptance", Timing: "Timing"}
ROWS_PREFACE = """\
# Rows of a report

<!-- written by `python -m scripts.maintain.pages`: edit the comments at the fields instead -->

`results` of `report.json` is a list of rows, each a mapping of the keys below: a drafter on a set
of prompts at one temperature, with one shape of draft. A value is null where it was not measured or
has no meaning. `tokens_per_round`, `accepted_per_round`, `draft_acceptance_rate`, `alpha`,
`alpha_hat`, `greedy_match` and `speedup` each have an interval beside them, `<key>_ci95`: [lower,
upper], 95 %, bootstrapped over prompts, null below two of them. [metrics.md](metrics.md) defines
the numbers. A reader should pass over keys that it does not know: later versions may add some."""
PREFACE = """\
# Configuration

<!-- written by `python -m scripts.maintain.pages`: edit the comments at the fields instead -->

Every command takes `section.key=value` words. A value comes from the first of these places that has
one: the command line, the preset, `recipes/<name>.yaml`, the defaults below. An unknown key is
refused with the closest known one, and so is a key that the command does not read. `python train.py
recipe=eagle3 help=true` prints the keys of one recipe with the values that the recipe gives them.

A value is written as in YAML: `trainer.lr=5e-5`, `eval.temperatures=[0,1]`, `model.drafter=null`,
`'method.data_mix={target: 0.5, draft: 0.5}'`. Numbers must fit into float32. Five keys stand
outside of the sections: `recipe` names the method, `preset=published` takes the setting of its
paper, for targets of several billion parameters (name your own target and prompts beside it),
`config=runs/x/config.yaml` takes both from a run ([reports.md](reports.md)), `dry_run=true` prints
the resolved configuration with the size of the text that the run would write and stops, `help=true`
prints the keys of the recipe. The keys of a script, `script.*`, are explained by the script itself:
run it without arguments or see the top of its file.

A batch is `trainer.batch_size` rows times `trainer.gradient_accumulation_steps` times the number of
processes. Most published settings are for 4 or 8 GPUs, which `recipes/<name>.published.yaml` says
beside its batch size: on fewer, raise the accumulation by as much. `preset=laptop` is for
SmolLM2-135M-Instruct on two cores: run `python -m scripts.get_smollm2` first, and name chat
prompts, since its own are the toy's (`data.prompts=questions` needs no download). The states that
heads are trained on take more disk than the text; the run prints how much before it writes them."""


def main(arguments: list[str]) -> int:
    guard_terminal()
    if arguments and asks_for_help(arguments):
        print(__doc__)
        return 0
    if arguments:
        print(f"error: expected no arguments, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    for path, text in PAGES.items():
        write_atomic(path, text())
        print(f"written: {path}")
    return 0


def config_page() -> str:
    """Write the text of docs/config.md."""
    parts = [PREFACE]
    names = base.names()
    for section, settings in sections(composed(names[0])):
        if section != "method":
            parts += [f"## {section}", _table(keys_of(section, type(settings)()))]
    for name in names:
        module, _ = base.load(name)
        config = composed(name)
        parts += [
            f"## recipe={name}",
            f"{escape_markdown(first_line(module))} See [recipes/{name}.md](recipes/{name}.md).",
        ]
        if changed := _changed(config):
            parts.append(f"`recipes/{name}.yaml` sets {', '.join(changed)}.")
        for preset in base.presets(name):
            changed = _changed(composed(name, preset), config)
            parts.append(f"`preset={preset}` sets {', '.join(changed)}.")
        parts.append(_table(keys_of("method", type(config.method)())))
    return "\n\n".join(parts) + "\n"


def rows_page() -> str:
    """Write the text of docs/rows.md."""
    parts, meanings = [ROWS_PREFACE], comments(Row)
    for kind, words in ROW_PARTS.items():
        own = [f for f in dataclasses.fields(kind) if f.name in kind.__annotations__]
        lines = [
            f"| `{field.name}` | {_type_words(str(field.type))} | "
            f"{escape_markdown(meanings.get(field.name, ''))} |"
            for field in own
            if not field.name.endswith("_ci95")
        ]
        parts += [f"## {words}", "\n".join(["| key | type | meaning |", RULE, *lines])]
    return "\n\n".join(parts) + "\n"


def _type_words(declared: str) -> str:
    """`list[float | None] | None` in words: what JSON holds."""
    kind, null = declared.removesuffix(" | None"), "; or null" * declared.endswith(" | None")
    if kind.startswith("Literal"):
        return " or ".join(re.findall(r"\w+", kind)[1:]) + null
    if kind == "int | float":
        kind = "float"
    outer, _, inner = kind.partition("[")
    words = TYPES.get(outer, "mapping")
    if outer in ("list", "Sequence"):
        numbers = "int" in inner or "float" in inner
        words = f"list of {'numbers' if numbers else 'mappings'}"
    return words + null


def _changed(config: Config, base: Config | None = None) -> list[str]:
    """List `key=value` of the keys that differ from `base`, else from the schema's defaults."""
    words = []
    for section, settings in sections(config):
        plain = getattr(base, section) if base else type(settings)()
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            if value != getattr(plain, field.name):
                words.append(f"`{section}.{field.name}={shown(value)}`")
    return words


def _table(keys: list[KeyHelp]) -> str:
    rows = [
        f"| `{key.name}` | `{key.default}` | {escape_markdown(key.allowed)} | "
        f"{escape_markdown(key.meaning)} |"
        for key in keys
    ]
    return "\n".join(["| key | default | allowed | meaning |", "| --- | --- | --- | --- |", *rows])


PAGES = {DOCS / "config.md": config_page, DOCS / "rows.md": rows_page}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
