"""The rules across sections, in the order in which `phases.pipeline.run_phases` comes to them.

A rule of one key stands at its field (`trainer/keys.py`), one of several keys of a section in that
section's `__post_init__`. What is here needs several sections, or the target, the drafter, the
prompts, and is asked as soon as it can be answered. Only the lengths of texts are known as late as
after text was generated, and a head whose vocabulary is chosen from it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from data.answers import AnswerFormat
from data.batches import longest_text
from data.config import DataConfig
from data.features_layout import MANIFEST
from data.features_local import LocalFolder
from data.features_remote import check_storage
from data.packing import check_separation
from data.prompts import Prompt, is_made_here
from data.render import fixed_response_ids
from data.traces import Trace, check_store
from drafters.base import TrainedDrafter, acceptance_of
from drafters.causal_lm import CausalLMDrafter
from drafters.kinds import kind_of, served_by
from drafters.round import Shape
from engines.llamacpp_run import check_wheel
from engines.states import check_server as check_states_server
from engines.vllm_server import engine_python
from eval.config import EvalConfig, tree_depth, trees_of
from eval.policies.table import parse_policy
from eval.server import check_server
from phases.help import composed
from recipes.base import Recipe, Stage, presets
from recipes.common.config import Config
from target.gguf import is_gguf, target_gguf
from target.model import Target
from trainer.checks import addresses_of, is_address, require_folder
from trainer.errors import UserError, require
from trainer.tracking import check_login

# --- before anything is loaded -------------------------------------------------------------------


def check_words(arguments: list[str], reads: Collection[str], command: str, **instead: str) -> None:
    """Refuse keys that the schema knows and `command` does not read. `reads`: the keys and sections
    that it reads; `instead`: by key, with _ for the dot, the sentence that names its substitute."""
    owners = {
        "data": "train.py and scripts.generate",
        "eval": "train.py and scripts.evaluate",
        "script": "other scripts",
    }
    for key in (word.partition("=")[0] for word in arguments):
        section = key.partition(".")[0]
        if key in reads or section in reads:
            continue
        remedy = f"it is a setting of {owners.get(section, 'train.py')}, leave it out"
        remedy = instead.get(key.replace(".", "_"), remedy)
        raise UserError(f"{key} does nothing in {command}: {remedy}")


def check_depth(config: EvalConfig, most: int | None) -> None:
    """Refuse chains and trees deeper than the `most` tokens that a drafter drafts in a round, one
    by each of its heads."""
    if most is not None and max(config.K, tree_depth(config)) > most:
        trees = ", ".join(config.tree) or "null"
        raise UserError(
            f"eval.K={config.K}, eval.tree={trees}: this drafter has {most} heads, so it drafts at "
            f"most {most} tokens deep; lower them or train more heads"
        )


def check_slots(config: EvalConfig, has_slots: bool) -> None:
    """Refuse trees that are grown from the distributions of all depths at once, where the drafter
    has them (`has_slots`) only given the tokens before."""
    for text, tree in trees_of(config):
        if tree.needs_slots and not has_slots:
            raise UserError(
                "is grown from the distributions of all depths at once, and this drafter drafts "
                "each token from those before it",
                key="eval.tree",
                value=text,
                remedy="name dynamic:<num_nodes>:<depth> or another tree",
            )


def check_address(data: DataConfig) -> None:
    """UserError where states are to come from a server that does not answer, before the target is
    loaded. Where states of a server are stored already, none may be needed: it is not asked yet."""
    if not (addresses := addresses_of(data.features_engine)):
        return
    stored = data.features == "cached" and (
        data.features_url is not None
        or any(
            found["complete"] and found["identity"].get("engine") == "vllm"
            for path in (Path(data.cache_dir) / "features").glob(f"*/{MANIFEST}")
            if (found := LocalFolder(path.parent).manifest())
        )
    )
    for address in () if stored else addresses:
        check_states_server(address)


def check_parts(config: Config, recipe: type[Recipe]) -> None:
    """Refuse a target without layers where something of the run needs them."""
    if config.model.parts == "all":
        return
    data, why = config.data, recipe.needs_layers
    rule = f"be all for recipe={config.recipe}: {why}"
    require(why is None, "model.parts", rule, config.model.parts)
    rule = f"be all for model.target={config.model.target}, of which no part can be read alone"
    require(not is_gguf(config.model.target), "model.parts", rule, config.model.parts)
    if data.features_engine == "hf" and data.features == "live":
        raise UserError(
            "is left to a target without layers", key="data.features_engine", value="hf",
            remedy="name vllm or the addresses of servers of its states, or set model.parts=all",
        )  # fmt: skip
    for name in ("teacher_top_k", "teacher_samples"):
        rule = "be 0 with model.parts=head: the target's distributions are computed from its states"
        require(getattr(data, name) == 0, f"data.{name}", rule, getattr(data, name))


def spares_layers(config: Config, recipe: Recipe) -> bool:
    """Whether the run could do without the target's layers but for the decoded rows of its
    report."""
    model, data = config.model, config.data
    given = model.device_map or model.quantization or is_gguf(model.target)
    needed = recipe.needs_layers or recipe.size_search is not None or data.teacher_top_k
    here = data.features_engine == "hf" or data.engine == "hf"
    return model.parts == "all" and not (given or needed or here)


def check_prompts(section: str, config: DataConfig | EvalConfig, source: str | None) -> None:
    """Refuse the options of prompts that `source` does not read."""
    of_hub, columns = ["prompts_config", "prompts_split"], ["prompts_column", "response_column"]
    if source is None:
        unread, why = of_hub + columns, "where eval.prompts names no data set"
    elif is_made_here(source):
        unread, why = of_hub + columns, f"for {source}, which is made here"
    elif os.path.isfile(source):
        unread, why = of_hub, "for a file"
    else:
        return
    for name in unread:
        default = getattr(type(config), name, None)
        given = getattr(config, name, None) or None
        rule = f"be left at {'null' if default is None else default} {why}"
        require(given == default, f"{section}.{name}", rule, given)


def check_model_pair(config: Config) -> None:
    """Refuse settings of the models that exclude each other, and an engine that is not there,
    before anything is loaded."""
    if "vllm" in (config.data.engine, config.data.features_engine):
        engine_python()
    engine = config.eval.engine
    if engine != "own" and config.model.quantization:
        raise UserError(
            f"eval.engine={engine} loads model.target by itself, without model.quantization: name "
            "a checkpoint that is quantised, or leave it at own"
        )
    served = "vllm" in (config.data.engine, config.data.features_engine)
    gguf = target_gguf(config.model)
    if engine == "llamacpp":
        check_wheel()
        if gguf is None:
            raise UserError(
                "eval.engine=llamacpp runs the target's GGUF file: name it with "
                "model.target_gguf=<file.gguf>, or as model.target"
            )
    if named := config.model.target_gguf:
        there = is_gguf(named) and os.path.isfile(named)
        require(there, "model.target_gguf", "be a GGUF file", named)
        rule = f"be null for model.target={config.model.target}, which is one"
        require(not is_gguf(config.model.target), "model.target_gguf", rule, named)
    if is_gguf(config.model.target) and (engine not in ("own", "llamacpp") or served):
        raise UserError(
            f"model.target={config.model.target} is dequantised by transformers, and vLLM would "
            "verify with other numbers: save it as a folder first (target.save_pretrained), or "
            "leave eval.engine at own or llamacpp, data.engine and data.features_engine at hf"
        )
    # the toy's drafter serves the toy's target only
    toy = type(config.model)()
    if config.model.target != toy.target and str(config.model.drafter or "").startswith(
        "assets/toy/"
    ):
        raise UserError(
            f"model.drafter={config.model.drafter} belongs to {toy.target}, got "
            f"model.target={config.model.target}: "
            "name a small model with the target's tokenizer, or model.drafter=null to build one"
        )


def check_places(config: Config) -> None:
    """Refuse folders that cannot be written to, storage that cannot be reached and W&B without a
    login, before anything is loaded."""
    check_login(config.trainer)
    require_folder("data.cache_dir", config.data.cache_dir)
    if config.data.traces:
        require_folder("data.traces", config.data.traces)
        check_store(Path(config.data.traces))
    if config.data.features_cache_dir:
        require_folder("data.features_cache_dir", config.data.features_cache_dir)
    if config.data.features_url:
        check_storage(config.data.features_url)


# --- with the target and the recipe --------------------------------------------------------------


TOY_KEYS = ("data.num_prompts", "data.max_new_tokens", "trainer.max_steps", "trainer.lr")
TOY_ENDINGS = ("_steps", "_lr", "_preset", "context")  # and keys of the method that end so
LARGE = 10**9  # parameters of a target for which these keys, as the recipe has them, are too small


def settings_of_the_toy(config: Config, num_parameters: int) -> list[str]:
    """`key=value` of the settings that a recipe chose for the toy, of a run with a large target."""
    if num_parameters <= LARGE or "published" not in presets(config.recipe):
        return []
    own, published = composed(config.recipe), composed(config.recipe, "published")
    names = [f.name for f in dataclasses.fields(config.method) if f.name.endswith(TOY_ENDINGS)]
    if config.model.drafter is not None:  # a stage that would make it is left out
        names = [name for name in names if not name.startswith("base_")]
    found = []
    for key in (*TOY_KEYS, *(f"method.{name}" for name in names)):
        section, _, name = key.partition(".")
        value, toys, papers = (
            getattr(getattr(one, section), name) for one in (config, own, published)
        )
        # null: as another key that is named, or no preset
        if value == toys != papers and (value is not None or name.endswith("_preset")):
            value = "null" if value is None else value
            found.append(f"{key}={value}")
    return found


def deeper_than_trained(config: EvalConfig, steps: int) -> tuple[int, str] | None:
    """The depth of drafts of the report that reach deeper than the `steps` over which training
    unrolls the drafter, and a sentence on them; None where there are none."""
    K = config.K
    drafted = [(K, f"eval.K={K}")]
    drafted += [(tree.deepest(K), f"eval.tree={text}") for text, tree in trees_of(config)]
    depth, name = max(drafted)
    if depth <= steps:
        return None
    return depth, (
        f"{name} drafts {depth} tokens deep, training unrolls {steps}: the depths beyond are never "
        "trained"
    )


def check_recipe(config: Config, recipe: Recipe) -> None:
    """Refuse settings that do not go with the recipe."""
    engine, trainer = config.eval.engine, config.trainer
    if engine != "own" and recipe.unserved is not None:
        raise UserError(f"eval.engine={engine}: {recipe.unserved}")
    if trainer.lora_rank and recipe.no_lora is not None:
        raise UserError(f"trainer.lora_rank must be 0: {recipe.no_lora}")
    if config.model.parts == "head":
        rule = "be all with method.search_parameters, whose trials are evaluated before states are"
        require(recipe.size_search is None, "model.parts", f"{rule} stored", "head")
    drafts = [stage.name for stage in recipe.stages() if stage.data.mix.get("draft")]
    if config.model.parts == "head" and config.data.features == "cached" and drafts:
        rule = "be live with model.parts=head, for the text that the drafter writes itself in stage"
        require(False, "data.features", f"{rule} {drafts[0]}", config.data.features)
    if trainer.lora_rank and config.model.drafter is None:
        raise UserError(
            "trainer.lora_rank adapts trained weights, of which a fresh drafter has none: name "
            "one with model.drafter, or set it to 0"
        )


def check_text(config: Config, target: Target, stage: Stage, prompts: list[Prompt]) -> None:
    """Refuse a stage that needs text which the prompts and the traces do not hold."""
    data = config.data
    if stage.data.mix.get("fixed") and stage.row != "control":
        answers = AnswerFormat(target.tokenizer, target.eos_ids, data.chat_template_kwargs)
        missing = sum(fixed_response_ids(p, answers) is None for p in prompts)
        if missing:
            raise UserError(
                f"method.data_mix asks for fixed responses, {missing} of {len(prompts)} prompts"
                " have none: name data.response_column or set fixed to 0"
            )
    if stage.data.teacher and not (data.teacher_top_k or data.teacher_samples):
        raise UserError(
            "the compressed teacher is stored with the traces: set data.teacher_top_k and "
            "data.teacher_samples, got 0 and 0"
        )


def check_packing(config: Config, target: Target, stages: Sequence[Stage]) -> None:
    """Refuse stages that cannot pack texts: text that a drafter is still to write has no length."""
    for stage in stages:
        if not stage.packs:
            raise UserError(
                f"trainer.pack_tokens must be 0: recipe={config.recipe} reads a text a row"
            )
        sources = [name for name, share in stage.data.mix.items() if share]
        if sources not in (["target"], ["fixed"]):
            raise UserError(
                "trainer.pack_tokens packs stored texts of one source, got "
                f"{' and '.join(sources)} in stage {stage.name}: set it to 0"
            )
    if target.has_layers:  # else servers read its texts one by one
        check_separation(target.model, "set trainer.pack_tokens=0")


# --- with the drafter and the text ---------------------------------------------------------------


def check_drafter(
    drafter: TrainedDrafter, target: Target, config: EvalConfig, trains_acceptance: bool = False
) -> None:
    """Refuse settings of eval.* that do not suit the drafter, before any text is generated: a
    drafter with one head per depth drafts no deeper, an engine must be able to serve it, and a
    policy of the acceptance head needs one, or `trains_acceptance`, a training that makes one."""
    kind_of(drafter)  # a network without a row there could not be saved or exported in the end
    check_engine(drafter, config)
    if parse_policy(config.policy).uses_head and not (trains_acceptance or drafter.judges):
        acceptance_of(drafter)
    check_depth(config, drafter.max_depth)
    check_slots(config, drafter.has_slots)
    asked = max(config.K, tree_depth(config))
    if drafter.target_layers:
        context = target.context
        require(asked < context, "eval.K", f"be below the target's context {context}", asked)
    for text, tree in trees_of(config):
        if not tree.needs_accuracy:
            check_width(drafter, tree.shape(None, config.K))
        elif not drafter.target_layers and drafter.rank_accuracy is None:
            raise UserError(
                f"eval.tree={text}: the accuracies of ranks that it grows from are measured of "
                "heads that read the target's states, not of a language model: name another tree"
            )


def check_width(drafter: TrainedDrafter, shape: Shape) -> None:
    """Refuse a tree with more children under a node than the drafter has tokens."""
    most = drafter.draft_vocab_size
    rule = f"have at most {most} children under a node, the draft vocabulary"
    require(shape.width <= most, "eval.tree", rule, shape.width)


def check_engine(drafter: TrainedDrafter, config: EvalConfig) -> None:
    """Refuse an engine that is not there or cannot serve this kind of drafter, before any text is
    generated."""
    if config.engine == "own":
        return
    kind = kind_of(drafter)
    engine = "llamacpp" if config.engine == "llamacpp" else "vllm"
    if drafter.unserved is not None:
        raise UserError(f"eval.engine={config.engine}: {drafter.unserved}")
    if engine not in kind.writers:
        raise UserError(
            f"eval.engine={config.engine}: {'no' if not kind.writers else 'another'} engine loads "
            f"a drafter of kind {kind.name!r}; engines serve {served_by()}"
        )
    least = drafter.served_tokens(config.K)
    rule = f"be {least}, the whole block, with eval.engine={config.engine}"
    require(least <= config.K, "eval.K", rule, config.K)
    if is_address(config.engine):
        check_server(config.engine, config.K)
    else:
        kind.writers[engine].check(drafter)
        if engine == "vllm":
            engine_python()
            if kind.method == "dspark" and not torch.cuda.is_available():
                raise UserError(
                    "runs DSpark on a GPU only, and there is none here", key="eval.engine",
                    value=config.engine, remedy="measure with eval.engine=own, or llamacpp with a "
                    "target's GGUF file",
                )  # fmt: skip


def check_room(config: EvalConfig, context: int) -> None:
    """Refuse settings for which a prompt, the answer and the tokens drafted beyond it cannot fit
    into the target's context."""
    new, room = config.max_new_tokens, context - config.max_new_tokens
    require(room > 1, "eval.max_new_tokens", f"be below the target's context {context}", new)
    rule = f"draft fewer than {room} tokens: the target's context {context} less "
    rule += f"eval.max_new_tokens={new}"
    for key, drafted in (("eval.K", config.K), ("eval.tree", tree_depth(config))):
        require(drafted < room, key, rule, drafted)


def check_context(drafter: object, traces: list[Trace], config: EvalConfig) -> None:
    """Refuse prompts that do not fit into the positions of a drafter that is a language model, with
    an answer and the tokens drafted beyond it."""
    longest = max(len(trace.prompt_ids) for trace in traces)
    needed = longest + config.max_new_tokens + max(config.K, tree_depth(config))
    if isinstance(drafter, CausalLMDrafter) and needed > drafter.context:
        raise UserError(
            f"ContextError: the drafter sees {drafter.context} tokens; an evaluation prompt of "
            f"{longest}, eval.max_new_tokens={config.max_new_tokens} and what is drafted beyond "
            f"them make {needed}: lower eval.max_new_tokens, or data.max_prompt_tokens with "
            "data.long_prompts=drop"
        )


def check_stage_context(
    drafter: CausalLMDrafter, stage: Stage, traces: Sequence[Trace], max_new_tokens: int
) -> None:
    """Refuse a stage whose texts, those that the drafter is to write included, may be longer than
    its context."""
    longest = longest_text(traces, stage.data.mix, max_new_tokens)
    if longest > drafter.context:
        raise UserError(
            f"ContextError: model.drafter sees {drafter.context} tokens, the longest text of stage "
            f"{stage.name} may have {longest}: lower data.max_prompt_tokens or "
            "data.max_new_tokens, or take another drafter"
        )
