"""What a run will cost, as far as it is known before: `dry_run=true`, without a model's weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType

import torch

from data.batches import Batch
from data.budget import in_bytes
from data.features_layout import bytes_per_token
from data.imported import open_imported
from data.prompts import Prompt, user_turns
from data.render import render
from data.trace_rows import num_tokens
from phases.run import require_downloaded
from phases.stage import settings
from recipes.base import Recipe, Stage
from recipes.common.config import Config
from target.model import Target, decoder_layers
from target.outline import outline
from target.outputs import LayerId

SAMPLE = 64  # prompts that are rendered
STORED = ("bf16", "fp8")


def costs(config: Config, module: ModuleType, prompts: Sequence[Prompt]) -> list[str]:
    """A line each on the target, the text, the stages and the states. UserError where the recipe
    refuses this target."""
    model = config.model
    require_downloaded(model)
    target = outline(
        model.target, revision=model.target_revision, dtype=model.dtype,
        trust_remote_code=model.trust_remote_code, device=device(),
    )  # fmt: skip
    recipe: Recipe = module.Recipe(config.method, target)
    size, dtype = sum(p.numel() for p in target.model.parameters()), target.model.dtype
    held = size * dtype.itemsize
    weights = f"{in_bytes(held)} as {str(dtype).removeprefix('torch.')}"
    if model.parts == "head":
        weights += f", {in_bytes(held - bytes_of_layers(target))} of them without its layers"
    elif model.quantization or getattr(target.model.config, "quantization_config", None):
        weights = "quantised"
    weights += " on each process" if model.device_map is None else " in all"
    rows, tokens, said = text(config, target, prompts)
    lines = [f"target: {size:,} parameters, {weights}", f"text: {said}"]
    lines += [passes(config, stage, rows, tokens) for stage in recipe.stages()]
    if model.drafter is None and (layers := states_of(recipe)):
        lines.append(states(config, target, layers, tokens))
    return lines


def bytes_of_layers(target: Target) -> int:
    """Bytes of the target's decoder layers."""
    return sum(p.numel() * p.element_size() for p in decoder_layers(target.model).parameters())


def device() -> str:
    """The kind of device that a run here would use."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


def text(config: Config, target: Target, prompts: Sequence[Prompt]) -> tuple[int, int, str]:
    """How many answers there will be, at most how many tokens with their prompts, and in words."""
    data = config.data
    if (imported := open_imported(data.traces)) is not None:
        traces = imported.load()
        count = int(num_tokens(traces).sum())
        return len(traces), count, f"{len(traces):,} answers, {count:,} tokens with their prompts"
    turns = [turn for prompt in prompts for turn in user_turns(prompt)]
    some = turns[:: max(1, len(turns) // SAMPLE)]
    options = target.tokenizer, data.system_prompt, data.chat_template_kwargs
    mean = sum(len(render(turn, *options)) for turn in some) / max(1, len(some))
    rows = len(turns) * data.samples_per_prompt
    count = round(rows * (mean + data.max_new_tokens))
    said = (
        f"{rows:,} answers, at most {count:,} tokens: {mean:.0f} of a prompt, by {len(some)} of "
        f"them, and at most {data.max_new_tokens} of its answer"
    )
    return rows, count, said


def passes(config: Config, stage: Stage, rows: int, tokens: int) -> str:
    """How often a stage goes through the text."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    own = settings(config, stage, world)
    batch = own.batch_size * own.gradient_accumulation_steps * world // own.context_parallel_size
    said = f"stage {stage.name}: {own.max_steps:,} steps of {batch}"
    if stage.data.text is not None:
        return f"{said} rows of {stage.data.text.context} tokens of raw text"
    read = own.max_steps * batch
    if own.pack_tokens and stage.packs:
        times = read * own.pack_tokens / max(1, tokens)
        said += f" rows of {own.pack_tokens} tokens: about"
    else:
        times = read / max(1, rows)
        said += " texts: about"
    return f"{said} {times:.2g} times through the text"


def states_of(recipe: Recipe) -> tuple[LayerId, ...]:
    """The layers whose states the first stage reads that reads any."""
    blank = torch.zeros(1, 2, dtype=torch.long)
    batch = Batch(blank, blank.bool(), blank, blank, [[0]], [[0]], ["target"], 1)
    for stage in recipe.stages():
        request = stage.objective.target_request(batch, 0)
        if request is not None:
            return request.states
    return ()


def states(config: Config, target: Target, layers: Sequence[LayerId], tokens: int) -> str:
    """What the states of these layers take, stored and passed on."""
    data = config.data
    sizes = {name: bytes_per_token(layers, target.hidden_size, name) for name in STORED}
    each = ", ".join(f"{size:,} bytes a token as {name}" for name, size in sizes.items())
    stored = in_bytes(tokens * bytes_per_token(layers, target.hidden_size, data.features_dtype))
    named = ", ".join(map(str, layers))
    place = data.features_url or data.cache_dir
    return (
        f"states: of the layers {named}: {each}; data.features=cached stores at most {stored} as "
        f"{data.features_dtype} in {place}, live stores none"
    )
