"""A causal-LM drafter as an ordinary Hugging Face folder, the one layout that transformers
(`assistant_model`) and vLLM (`method: draft_model`) both load.

vLLM demands the target's configured `vocab_size`, transformers takes an equal one as the sign of an
equal tokenizer; both may be wider than the tokenizer, so embeddings and head are padded. An id
outside the tokenizer must never be drafted, whatever the hidden state. A zero row does not give
that: its logit 0 wins wherever all real logits are negative, and no constant row can be low for
every hidden state. **Each padded head row is the mean of the real rows** (so is a padded bias): its
logit is the mean of the real logits, thus never above the largest, and equal to it only where all
real logits are equal. The argmax is then a real token for every hidden state, and a padded id drawn
under sampling has probability below 1 / (number of real ids). This holds in exact arithmetic; the
mean is rounded once to the weights' dtype.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoModelForCausalLM, GenerationConfig

from data.target import eos_ids as default_eos_ids
from drafters.acceptance_head import AcceptanceHead
from trainer.config import RunFault, UserError, require
from trainer.files import whole_folder
from trainer.redaction import shown

LOGITS_TOLERANCE = (
    1e-5  # relative; zero for equal widths, a wider matrix product may round otherwise
)


@torch.no_grad()
def export(
    model: Any,
    tokenizer: Any,
    target_config_vocab_size: int,
    folder: str | Path,
    *,
    num_assistant_tokens: int,
    card: str,
    eos_ids: Sequence[int] | None = None,
    confidence_threshold: float = 0.0,
    acceptance: AcceptanceHead | None = None,
    ours: bool = False,
) -> Path:
    """Write `model` to `folder`, in its own dtype, complete or not at all; an earlier export there
    is replaced. `card` becomes README.md. `eos_ids`: the target's (default: the model's own).
    `confidence_threshold`: transformers ends a chain after a token less likely than that, 0: never.
    `acceptance`: a head for this model, laid beside it; transformers does not read it. `ours`: of
    `whole_folder`."""
    require(num_assistant_tokens >= 1, "num_assistant_tokens", "be >= 1", num_assistant_tokens)
    padded = pad_vocabulary(model, tokenizer, target_config_vocab_size)
    padded.config.use_cache = True
    padded.generation_config = _generation_config(
        model, tokenizer, num_assistant_tokens, eos_ids, confidence_threshold
    )
    with whole_folder(folder, ours) as partial:
        padded.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
        if acceptance is not None:
            acceptance.save(partial)
        reread(partial, model, real_ids(tokenizer))
    return Path(folder)


def real_ids(tokenizer: Any) -> torch.Tensor:
    """[n] int64, ascending: the ids that name a token; the tokenizer's own gaps are left out."""
    return torch.tensor(sorted(set(tokenizer.get_vocab().values())))


@torch.no_grad()
def pad_vocabulary(model: Any, tokenizer: Any, vocab_size: int) -> Any:
    """A copy of `model` on the CPU, `vocab_size` wide, that cannot draft an id without a token
    (see the module's docstring). Padded embedding rows are zero, unless tied to the head."""
    real = real_ids(tokenizer)
    width = model.get_output_embeddings().weight.shape[0]
    if int(real[-1]) >= min(width, vocab_size):
        raise UserError(
            f"the tokenizer names ids up to {int(real[-1])}, but the drafter has {width} and the "
            f"target {vocab_size}: use the target's tokenizer"
        )
    padded = copy.deepcopy(model).to("cpu").eval()
    if width != vocab_size:
        with torch.random.fork_rng(devices=[]):  # resizing draws rows, which are overwritten below
            padded.resize_token_embeddings(vocab_size, mean_resizing=False)
    padding = torch.ones(vocab_size, dtype=torch.bool)
    padding[real] = False
    embedding, head = padded.get_input_embeddings(), padded.get_output_embeddings()
    embedding.weight[padding] = 0  # before the head: tied, they are one matrix
    head.weight[padding] = head.weight[real].double().mean(0).to(head.weight.dtype)
    if getattr(head, "bias", None) is not None:
        head.bias[padding] = head.bias[real].double().mean().to(head.bias.dtype)
    return padded


def _generation_config(
    model: Any,
    tokenizer: Any,
    num_assistant_tokens: int,
    eos_ids: Sequence[int] | None,
    confidence_threshold: float,
) -> GenerationConfig:
    """Drafts `num_assistant_tokens` a round, fewer by the confidence threshold alone: no
    schedule."""
    ends = list(default_eos_ids(model, tokenizer) if eos_ids is None else eos_ids)
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = ends[0] if ends else None
    return GenerationConfig(
        num_assistant_tokens=num_assistant_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=confidence_threshold,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=pad,
    )


@torch.no_grad()
def reread(folder: str | Path, model: Any, real: torch.Tensor) -> float:
    """Load `folder` as a user would and compare it with `model` over the ids `real` [n].

    Every tensor must be known, present and bit-identical, and the float32 logits on random tokens
    must agree. Returns their largest absolute difference: 0 where the two are equally wide.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=model.dtype, attn_implementation="eager", output_loading_info=True
    )
    written, info = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            names = sorted(map(str, info[problem]))
            raise RunFault(f"{folder}: {problem.replace('_', ' ')} on reading it back: {names}")
    original = copy.deepcopy(model).to("cpu").eval()
    original.set_attn_implementation("eager")

    tables = {id(m.get_input_embeddings().weight) for m in (original, written)}
    tables |= {id(p) for m in (original, written) for p in m.get_output_embeddings().parameters()}
    theirs = dict(written.named_parameters())
    for name, ours in original.named_parameters():
        if name not in theirs:
            raise RunFault(f"{folder}: tensor {name!r} is missing on reading it back")
        read = theirs.pop(name)
        same = (
            torch.equal(ours[real], read[real]) if id(ours) in tables else torch.equal(ours, read)
        )
        if not same:
            raise RunFault(f"{folder}: tensor {name!r} differs on reading it back")
    if theirs:
        raise RunFault(f"{folder}: unknown tensors on reading it back: {sorted(theirs)}")

    draws = torch.Generator().manual_seed(0)
    ids = real[torch.randint(len(real), (2, 32), generator=draws)]
    expected, found = (
        m.float()(input_ids=ids, use_cache=False).logits[..., real] for m in (original, written)
    )
    difference = (expected - found).abs().max().item()
    if not difference <= LOGITS_TOLERANCE * max(1.0, expected.abs().max().item()):
        raise RunFault(
            f"{folder}: logits differ by {difference:.3g} on reading it back, though the weights "
            "are equal: the model was changed outside its weights (.to(bfloat16) rounds the "
            "rotary frequencies, loading with dtype= does not)"
        )
    return difference


def model_card(
    report: dict[str, Any] | None,
    *,
    target: str,
    recipe: str | None,
    num_assistant_tokens: int,
    table: str | None = None,
    license: str | None = None,
    engine: str = "transformers",
    method: str = "draft_model",
    note: str = "",
) -> str:
    """README.md of an export: what it is, with a `note`, what was measured, how to serve it.
    No secret and no place on this machine is in it. `table`: the report's rows as a Markdown table,
    escaped; `license`: only where it is known, the target's
    may bind; `method`: vLLM's name for this kind of drafter, a causal LM or a head; `engine`: what
    it was written for."""
    head = method != "draft_model"
    about: dict[str, Any] = {}
    hub_id, target = is_hub_id(target), _line(shown(target))
    if not head:  # the library with a loader for it
        about["library_name"] = "transformers"
    if license:
        about["license"] = license
    if hub_id:
        about["base_model"] = target
    measured = _measured((report or {}).get("results", []))
    if measured:  # shown by the Hub as the `model-index`
        about |= {"eval_results": measured, "model_name": f"Drafter for {Path(target).name}"}
    front = ModelCardData(
        pipeline_tag="text-generation",
        tags=["speculative-decoding", method.replace("_", "-"), "draftsmith"],
        **about,
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
    serving = [_serve_sglang] if engine == "sglang" else [_serve_vllm]
    if not head:
        serving.insert(0, _serve_transformers)
    commands = "\n".join(serve(target, method, num_assistant_tokens) for serve in serving)
    loaders = "\nTransformers has no loader for such heads.\n" if head else ""
    return f"""---
{front.to_yaml()}
---

# Drafter for {code(target)}

{KINDS[method]} for speculative decoding with {code(target)}{trained}.
It proposes {num_assistant_tokens} tokens a round and the target verifies them: the output is the
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


def _measured(rows: Sequence[dict[str, Any]]) -> list[EvalResult]:
    """Of the trained drafter's rows, the two metrics one compares drafters by."""
    found = []
    for row in rows:
        if row["drafter"] != "after" or row["measured_by"] != "offline":
            continue
        shape = f"tree {row['tree']}" if row.get("tree") else f"K={row['K']}"
        config = f"T={row['temperature']:g}, {shape}, {row['num_prompts']} prompts"
        prompts = _line(shown(row["prompts"]["name"]))
        for name in ("tokens_per_round", "alpha"):
            if row.get(name) is not None:
                found.append(EvalResult(
                    task_type="text-generation", dataset_type=prompts, dataset_name=prompts,
                    metric_type=name, metric_value=round(row[name], 4), metric_name=name,
                    metric_config=config,
                ))  # fmt: skip
    return found


KINDS = {
    "draft_model": "A draft model",
    "medusa": "A set of Medusa heads",
    "eagle": "An EAGLE head",
    "eagle3": "An EAGLE-3 head",
}


def _serve_transformers(target: str, method: str, num_tokens: int) -> str:
    return f"""transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({json.dumps(target)})
target = AutoModelForCausalLM.from_pretrained({json.dumps(target)})
drafter = AutoModelForCausalLM.from_pretrained("DRAFTER")
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(target.generate(**inputs, assistant_model=drafter)[0]))
```
"""


def _serve_vllm(target: str, method: str, num_tokens: int) -> str:
    speculative = {"method": method, "model": "DRAFTER", "num_speculative_tokens": num_tokens}
    return f"""vLLM:

```bash
vllm serve {_word(target)} --speculative-config '{json.dumps(speculative)}'
```
"""


def _serve_sglang(target: str, method: str, num_tokens: int) -> str:
    """A chain, like the measured one; a wider top-k makes it a tree."""
    return f"""SGLang:

```bash
python -m sglang.launch_server --model-path {_word(target)} \\
    --speculative-algorithm {method.upper()} --speculative-draft-model-path DRAFTER \\
    --speculative-num-steps {num_tokens} --speculative-eagle-topk 1 \\
    --speculative-num-draft-tokens {num_tokens + 1}
```
"""


def _word(name: str) -> str:
    """Of the shell, which finds the home folder only outside quotes."""
    home = "~/" if name.startswith("~/") else ""
    return home + shlex.quote(name.removeprefix(home))


def is_hub_id(name: str) -> bool:
    """Whether `name` can only be a repository on the Hub, not a folder here."""
    if name.count("/") != 1 or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
