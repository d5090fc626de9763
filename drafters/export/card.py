"""README.md of an export: a description, the measurements, and the commands to serve it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from trainer.redaction import shown

# llama.cpp's --spec-type, by method
SPEC_TYPES = {
    "draft_model": "draft-simple", "eagle3": "draft-eagle3", "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}  # fmt: skip


class MeasuredRow(Protocol):
    """What a card shows of a report's row."""

    drafter: str
    measured_by: str
    tree: str | None
    K: int | None
    temperature: float
    num_prompts: int
    prompts: dict[str, Any]
    tokens_per_round: float | None
    alpha: float | None


@dataclass(frozen=True)
class Export:
    """Arguments of a writer beside the drafter.

    `card`: becomes README.md; `target`: the name by which engines load the target; `num_tokens`:
    tokens to draft per round unless the server sets another number; `ours`: see
    `trainer.files.whole_folder`; `gguf`: the target's own GGUF file, whose tokenizer a drafter in
    that format gets.
    """

    card: str
    target: str
    num_tokens: int
    ours: bool = False
    gguf: Path | None = None


@dataclass(frozen=True)
class Serving:
    """What the command of a server says.

    `method`: the engines' name for this kind of drafter; `num_tokens`: tokens to draft a round;
    `revision`: of the target on the Hub, where the run named one; `template`: arguments of the chat
    template that it was trained with.
    """

    target: str
    method: str
    num_tokens: int
    revision: str | None = None
    template: Mapping[str, object] = field(default_factory=dict)

    def vllm(self, drafter: str) -> str:
        """vLLM's, which by itself drafts the likeliest tokens at any temperature."""
        speculative: dict[str, object] = {
            "method": self.method, "model": drafter, "num_speculative_tokens": self.num_tokens,
        }  # fmt: skip
        if self.method != "medusa":
            speculative["draft_sample_method"] = "probabilistic"
        words = f"vllm serve {_word(self.target)}{self._options('--default-chat-template-kwargs')}"
        return f"{words} --speculative-config {shlex.quote(json.dumps(speculative))}"

    def sglang(self, drafter: str) -> str:
        """SGLang's: a chain, like the measured one; a wider top-k makes it a tree, but for block
        drafters."""
        chain = f"--speculative-num-steps {self.num_tokens} --speculative-eagle-topk 1 \\\n    "
        chain = "" if self.method in ("dflash", "dspark") else chain
        options = self._options("--default-chat-template-kwargs")
        return (
            f"python -m sglang.launch_server --model-path {_word(self.target)}{options} \\\n"
            f"    --speculative-algorithm {self.method.upper()} "
            f"--speculative-draft-model-path {_word(drafter)} \\\n"
            f"    {chain}--speculative-num-draft-tokens {self.num_tokens + 1}"
        )

    def llamacpp(self, drafter: str) -> str:
        """llama.cpp's, of the files of target and drafter; it drafts the likeliest tokens at any
        temperature."""
        options = self._options("--chat-template-kwargs", revision=False)
        return (
            f"llama-server -m {_word(self.target)} -md {_word(drafter)}{options} "
            f"--spec-type {SPEC_TYPES[self.method]} \\\n"
            f"    --spec-draft-n-max {self.num_tokens} --spec-draft-n-min 0 --spec-draft-p-min 0"
        )

    def _options(self, of_template: str, revision: bool = True) -> str:
        """What loads the target at its revision, and renders chats as they were rendered."""
        words = ["--revision", self.revision] if self.revision and revision else []
        if self.template:
            words += [of_template, json.dumps(self.template)]
        return f" {shlex.join(words)}" if words else ""


def model_card(
    report: Mapping[str, Any] | None,
    serving: Serving,
    *,
    recipe: str | None,
    table: str | None = None,
    license: str | None = None,
    engine: str = "transformers",
    words: str = "A draft model",
    note: str = "",
) -> str:
    """README.md of an export: a description, the measurements, and the commands to serve it.

    It holds no secret and no path of this machine. `report`: content of report.json; `table`: the
    report's rows as an escaped Markdown table; `license`: only where it is known, the target's may
    apply; `words`: how to name such a drafter; `engine`: the engine it was written for; `note`: a
    further sentence.
    """
    method, target = serving.method, serving.target
    head = method != "draft_model"
    hub_id, target = is_hub_id(target), _line(shown(target))
    serving = replace(serving, target=target, template=shown(dict(serving.template)))
    measured = _measured((report or {}).get("results", []))
    front = ModelCardData(
        pipeline_tag="text-generation",
        tags=["speculative-decoding", method.replace("_", "-"), "draftsmith"],
        # the library with a loader for it
        library_name="transformers" if engine == "transformers" or not head else None,
        license=license or None,
        base_model=target if hub_id else None,
        eval_results=measured or None,  # shown by the Hub as the `model-index`
        model_name=f"Drafter for {Path(target).name}" if measured else None,
    )
    trained = (
        f", trained with draftsmith's {code(recipe)} recipe"
        if recipe
        else ", trained with draftsmith"
    )
    run = (report or {}).get("run", {})
    provenance = "".join(
        f"- {label}: {code(shown(str(run[key])))}\n"
        for key, label in (("command", "command"), ("commit", "commit"), ("date", "date"))
        if run.get(key)
    )
    in_engine = {"sglang": _in_sglang, "llamacpp": _in_llamacpp}.get(engine, _in_vllm)
    sections = [in_engine(serving)]
    in_transformers = engine == "transformers" if head else engine != "llamacpp"
    if in_transformers:
        sections.insert(0, _in_transformers(serving))
    commands = "\n".join(sections)
    no_loader = head and method != "dflash" and engine != "llamacpp"
    loaders = "\nTransformers has no loader for such heads.\n" if no_loader else ""
    return f"""---
{front.to_yaml()}
---

# Drafter for {code(target)}

{words} for speculative decoding with {code(target)}{trained}.
It proposes {serving.num_tokens} tokens a round and the target verifies them: the output is the
target's own. It is of no use alone.{note and " " + note}

## Measured

{table.strip() if table else "Not measured."}
{chr(10) + provenance if provenance else ""}
## Serve

`DRAFTER` is this folder or its name on the Hub; {code(target)} is the target it was trained for.
{loaders}
{commands}"""


def _line(text: str) -> str:
    return " ".join(text.split())


def code(text: str) -> str:
    """`text` as inline code of Markdown, on one line, whatever is in it."""
    text = _line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " * text.startswith("`") or " " * text.endswith("`")
    return f"{fence}{space}{text}{space}{fence}"


def _measured(rows: Sequence[MeasuredRow]) -> list[EvalResult]:
    """The two metrics by which drafters are compared, from the rows of the trained drafter."""
    found = []
    for row in rows:
        if row.drafter != "after" or row.measured_by != "offline":
            continue
        shape = f"tree {row.tree}" if row.tree else f"K={row.K}"
        config = f"T={row.temperature:g}, {shape}, {row.num_prompts} prompts"
        prompts = _line(shown(row.prompts["name"]))
        for kind, name in (("tokens_per_round", "tokens per round"), ("alpha", "alpha, depth 1")):
            value: float | None = getattr(row, kind)
            if value is not None:
                found.append(EvalResult(
                    task_type="text-generation", dataset_type=prompts, dataset_name=prompts,
                    metric_type=kind, metric_value=round(value, 4), metric_name=name,
                    metric_config=config,
                ))  # fmt: skip
    return found


def _in_transformers(serving: Serving) -> str:
    revision = serving.revision
    named = json.dumps(serving.target) + (f", revision={json.dumps(revision)}" if revision else "")
    loader, option = "AutoModelForCausalLM", ""
    if serving.method == "dflash":
        loader, option = "AutoModel", ', speculation_type="dflash"'
    loaders = ", ".join(sorted({loader, "AutoModelForCausalLM", "AutoTokenizer"}))
    return f"""transformers:

```python
from transformers import {loaders}

tokenizer = AutoTokenizer.from_pretrained({named})
target = AutoModelForCausalLM.from_pretrained({named})
drafter = {loader}.from_pretrained("DRAFTER")
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(target.generate(**inputs, assistant_model=drafter{option})[0]))
```
"""


def _in_vllm(serving: Serving) -> str:
    note = "Medusa's heads draft their likeliest tokens there, also above temperature 0."
    if serving.method != "medusa":
        note = (
            "`draft_sample_method` is of vLLM 0.32; without it fewer tokens are accepted above "
            "temperature 0."
        )
    return f"""vLLM:

```bash
{serving.vllm("DRAFTER")}
```

{note}
"""


def _in_sglang(serving: Serving) -> str:
    return f"""SGLang:

```bash
{serving.sglang("DRAFTER")}
```
"""


def _in_llamacpp(serving: Serving) -> str:
    of_files = replace(serving, target="TARGET")
    return f"""llama.cpp, with the target's own GGUF file as TARGET:

```bash
{of_files.llamacpp("DRAFTER/drafter.gguf")}
```
"""


def _word(name: str) -> str:
    """`name` quoted for the shell, which expands the home folder only outside of quotes."""
    home = "~/" if name.startswith("~/") else ""
    return home + shlex.quote(name.removeprefix(home))


def is_hub_id(name: str) -> bool:
    """Whether `name` can only be a repository on the Hub, and not a local folder."""
    if name.count("/") != 1 or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
