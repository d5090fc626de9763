"""Print the commands of the servers beside a run, and of the one that serves its drafter.

    python -m scripts.serve recipe=eagle3 model.target=Qwen/Qwen3-8B
    python -m scripts.serve recipe=dflash preset=published model.target=Qwen/Qwen3-8B \\
        script.engine=sglang

The other words are those of train.py. One command starts a server of the target's text, one a
server of the hidden states that the recipe reads, where `script.engine` (vllm, sglang or llamacpp)
can be either; the next one trains beside both, and the last ones export the drafter and serve it.
No weights are loaded, and nothing is started.

`script.folder`: where states lie from when they are written until they are read, by default in
/dev/shm, which is memory. Trainer and server must see the same folder.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from drafters.causal_lm import CausalLMDrafter
from drafters.export.card import Serving
from drafters.export.gguf import FILE
from drafters.kinds import KINDS, stored_kind
from drafters.load import stored
from drafters.medusa2 import Medusa2Drafter
from engines.states import PLUGIN, layer_numbers, states_options
from engines.vllm_server import PYTHON_VARIABLE, SERVER, command_line
from phases import exits, pipeline
from phases.check import spares_layers
from phases.costs import states_of
from recipes.base import Recipe
from recipes.common.chosen_layers import ChosenLayers
from recipes.common.config import Config
from recipes.common.heads import HeadRecipe
from target.gguf import target_gguf
from target.model import Target
from target.outline import outline
from target.outputs import LayerId
from trainer.checks import require_one_of
from trainer.config import asks_for_help, parse_overrides
from trainer.errors import require
from trainer.terminal import guard_terminal

ENGINES = ("vllm", "sglang", "llamacpp")
KEYS = ["script.engine", "script.folder"]
FOLDER = "/dev/shm/draftsmith-states"
TEXT_PORT, STATES_PORT = 8000, 8001


@dataclass
class Asked:
    """What the words of a command ask for. `words`: those of train.py."""

    engine: str
    folder: Path
    words: Sequence[str]
    config: Config
    module: ModuleType


def resolve(arguments: Sequence[str]) -> Asked:
    own = [word for word in arguments if word.startswith("script.")]
    given = parse_overrides(own, KEYS, KEYS)
    engine = str(given.get("script.engine") or "vllm")
    require_one_of("script.engine", engine, ENGINES)
    words = [word for word in arguments if word not in own]
    folder = Path(str(given.get("script.folder") or FOLDER)).absolute()
    return Asked(engine, folder, words, *pipeline.resolve(words))


def commands(asked: Asked) -> str:
    """All commands, each behind a line that says what it is for."""
    config, engine, model = asked.config, asked.engine, asked.config.model
    target = outline(
        model.target, revision=model.target_revision, trust_remote_code=model.trust_remote_code
    )
    recipe: Recipe = asked.module.Recipe(config.method, target)
    check_start(config, recipe)
    parts, words = [text_server(config, target, engine)], [*asked.words]
    if engine != "llamacpp":
        words += ["data.engine=openai", f"data.servers=[http://localhost:{TEXT_PORT}]"]
    layers = states_of(recipe)
    if engine == "vllm" and layers:
        parts.append(states_server(config, target, layers, asked.folder))
        words.append(f"data.features_engine=http://localhost:{STATES_PORT}")
    elif layers:
        parts.append(
            "# States come from vLLM alone (script.engine=vllm): here the target reads the text."
        )
    config, _ = pipeline.resolve(words)
    if spares_layers(config, recipe):
        words.append("model.parts=head")
    config, _ = pipeline.resolve(words)  # whose run folder has another name
    training = shlex.join(["accelerate", "launch", "train.py", *words])
    parts.append(f"# Training beside them:\n{training}")
    return "\n\n".join([*parts, serving(config, recipe, engine)])


def check_start(config: Config, recipe: Recipe) -> None:
    """UserError where model.drafter, which is not loaded, decides which layers are read."""
    if config.model.drafter is None:
        return
    if isinstance(recipe, ChosenLayers):
        rule = "name the layers that model.drafter reads, which is not loaded here"
        require(bool(recipe.named_layers), "method.layers", rule, recipe.named_layers)
    elif not isinstance(recipe, HeadRecipe) and Path(config.model.drafter, "drafter.json").exists():
        kind = stored_kind(stored(Path(config.model.drafter), "model.drafter"))
        rule = "be left out here, where it is not loaded, since it decides which layers are read"
        plain = kind.drafter is CausalLMDrafter
        require(plain, "model.drafter", rule, config.model.drafter)


def text_server(config: Config, target: Target, engine: str) -> str:
    """The server that answers prompts of token ids with token ids."""
    if engine == "llamacpp":
        return (
            "# llama.cpp's server does not answer with token ids: the target writes the text in\n"
            "# the run, or a log of answers is imported (python -m scripts.import_traces)."
        )
    said = (
        "# Text. Give each server GPUs of its own (CUDA_VISIBLE_DEVICES); data.servers may name "
        "several."
    )
    if engine == "vllm":
        plain = {"generation_config": "vllm"}  # no sampling defaults of the model's own
        return f"{said}\n{_vllm({**_loading(config, target), 'port': TEXT_PORT, **plain})}"
    words = ["python", "-m", "sglang.launch_server", "--model-path", target.name]
    revision = config.model.target_revision
    words += ["--revision", revision] if revision else []
    return f"{said}\n{shlex.join([*words, '--port', str(TEXT_PORT)])}"


def states_server(config: Config, target: Target, layers: Sequence[LayerId], folder: Path) -> str:
    """The server that writes the states of these layers into `folder`."""
    numbers = layer_numbers(layers, target.num_layers)
    named = ", ".join(f"{layer} as {number}" for layer, number in numbers.items())
    options = {**_loading(config, target), "port": STATES_PORT}
    return (
        f"# States of the layers {named} in vLLM's numbers. The trainer reads them in the folder,\n"
        "# on this machine or on a file system that both see, and deletes them.\n"
        f"mkdir -p {shlex.quote(str(folder))}\n"
        f"PYTHONPATH={shlex.quote(str(PLUGIN))} "
        f"{_vllm({**options, **states_options(target, layers, folder)})}"
    )


def serving(config: Config, recipe: Recipe, engine: str) -> str:
    """The export, and the server of target and drafter."""
    kind = KINDS[recipe.trains.kind]
    if engine not in kind.writers or kind.method is None:
        served = " and ".join(kind.writers) or "no engine"
        return f"# {engine} does not serve drafters of kind {kind.name}: {served} does."
    name, revision = config.model.target, config.model.target_revision
    folder = drafter = config.run_dir / "export" / engine
    words = ["python", "-m", "scripts.export", f"script.drafter={config.run_dir / 'drafter'}"]
    words += [f"script.engine={engine}", f"script.out={folder}"]
    if recipe.trains is Medusa2Drafter:  # on the target that was trained with it
        name, revision, drafter = str(folder / "target"), None, folder / "drafter"
    if engine == "llamacpp":
        file = target_gguf(config.model)
        name, drafter = str(file or "TARGET.gguf"), drafter / FILE
        words += [] if name == config.model.target else [f"model.target_gguf={name}"]
    tokens = min(config.eval.K, recipe.max_depth(config.method) or config.eval.K)
    template = config.data.chat_template_kwargs
    command = getattr(Serving(name, kind.method, tokens, revision, template), engine)
    dtype = config.model.dtype
    named = "" if dtype == "auto" or engine == "llamacpp" else f" --dtype {dtype}"
    return (
        "# The drafter, when the run has ended, which may have written this export by itself:\n"
        f"{shlex.join(words)}\n{command(str(drafter))}{named}"
    )


def _loading(config: Config, target: Target) -> dict[str, object]:
    """vLLM's options for the model, as the run loads it."""
    dtype, revision = config.model.dtype, config.model.target_revision
    options: dict[str, object] = {"model": target.name}
    options |= {} if dtype == "auto" else {"dtype": dtype}
    return options | ({"revision": revision} if revision else {})


def _vllm(options: dict[str, object]) -> str:
    return f'"${PYTHON_VARIABLE}" -m {SERVER} {shlex.join(command_line(options))}'


def main(arguments: list[str]) -> int:
    guard_terminal()
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        print(commands(resolve(arguments)))
    except Exception as error:
        return exits.fail(error, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
