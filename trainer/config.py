"""The one schema of every command, its defaults, and the errors a user can make.

Order: the defaults below, then `recipes/<name>.yaml`, then `section.key=value` from the command
line. OmegaConf is used only here; everybody else receives plain dataclasses. `method.*` is typed
by the recipe's own `Config`, handed in by the caller, so that this room knows no method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.checks import (
    SEEDS,
    SIDE_BY_SIDE,
    UserError,
    check_values,
    excerpt,
    require,
    require_address,
    require_counts,
)
from trainer.checks import RunFault as RunFault  # errors are imported from here everywhere
from trainer.checks import is_address as is_address


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    require(value in allowed, key, f"be one of {', '.join(allowed)}", value)


# trainer.* that may change between the parts of a run: they change no number it computes
FREE_SETTINGS = ("resume", "save_every", "log_every", "keep_checkpoints", "wandb", "wandb_project")


@dataclass
class RunConfig:
    dir: str | None = None  # default: runs/<recipe>-<hash of the resolved configuration>
    seed: int = 0
    stage: str | None = None  # only this stage of the recipe

    def __post_init__(self) -> None:
        require(0 <= self.seed < SEEDS, "run.seed", f"lie in 0..{SEEDS - 1}", self.seed)


DEVICE_MAPS = ("auto", "balanced", "sequential")  # of one process


@dataclass
class ModelConfig:
    target: str = "assets/toy/target"
    target_revision: str | None = None
    drafter: str | None = None  # where the drafter starts; null: the recipe builds a fresh one
    drafter_revision: str | None = None
    dtype: str = "auto"  # of the target; auto: float32 on CPU, the checkpoint's own elsewhere
    # of the target over the devices of this process, as transformers takes it: auto, balanced,
    # sequential or {module: device}; over all processes: fsdp2; null: whole on one
    device_map: Any = None
    max_memory: dict[Any, str] = field(default_factory=dict)  # by device: {0: 20GiB, cpu: 64GiB}
    # of the target, made while it is loaded: what a checkpoint's own quantization_config would say
    quantization: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if not isinstance(self.device_map, dict | None):
            _one_of("model.device_map", self.device_map, (*DEVICE_MAPS, "fsdp2"))
        if self.max_memory and self.device_map not in DEVICE_MAPS:
            raise UserError(
                f"model.max_memory={self.max_memory} is for model.device_map=auto, got "
                f"{self.device_map}"
            )
        if self.quantization and "quant_method" not in self.quantization:
            raise UserError(
                f"model.quantization must name its quant_method, got {self.quantization}: for "
                "example {quant_method: bitsandbytes, load_in_8bit: true}"
            )
        if self.quantization and self.device_map == "fsdp2":
            raise UserError(
                "model.device_map=fsdp2 shares out weights that are not quantised: leave out "
                "model.quantization"
            )


@dataclass
class DataConfig:
    prompts: str = "toy"  # toy, toy:<domain>+<domain>, a file, or a Hub data set id
    prompts_config: str | None = None
    prompts_split: str = "train"
    prompts_column: str | None = None  # default: the first of the usual names that is there
    response_column: str | None = None  # fixed responses, for the data source `fixed`
    num_prompts: int = 768
    eval_share: float = 0.1  # held out by hash when eval.prompts is null
    system_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # hf: transformers, in this process; vllm: a vLLM server started for it (scripts/engine_env.sh);
    # openai: the servers named. Of the training traces; those of the report are always hf's
    engine: str = "hf"
    engine_options: dict[str, Any] = field(default_factory=dict)  # of vllm: its own arguments
    # of openai: http://host:8000, ..; one that is named twice gets twice the requests
    servers: list[str] = field(default_factory=list)
    features: str = "live"  # or cached: the target's states are stored once, for heads
    features_dtype: str = "bf16"  # of the store: bf16, fp8 with a scale per token, fp32
    traces: str | None = None  # use this trace store; default: one below data.cache_dir
    cache_dir: str = "runs/cache"
    max_prompt_tokens: int | None = None  # default: the target's context less max_new_tokens
    long_prompts: str = "refuse"  # or `drop`, counted
    max_new_tokens: int = 96
    # cycled over prompts and samples: one that is named twice gets twice the share
    temperature: list[float] = field(default_factory=lambda: [1.0])
    top_k: int = 0
    top_p: float = 1.0
    samples_per_prompt: int = 1
    stop_strings: list[str] = field(default_factory=list)
    batch_size: int = 32  # rows decoded side by side; requests under way at each server
    rows_per_shard: int = 256
    teacher_top_k: int = 0  # compressed teacher in the traces: exact head, 0 for none
    teacher_samples: int = 0  # and samples of the tail

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, list):
            self.temperature = [self.temperature]
        self.temperature = [float(t) for t in self.temperature]
        require(
            bool(self.temperature),
            "data.temperature",
            "name at least one temperature",
            self.temperature,
        )
        require(min(self.temperature) >= 0, "data.temperature", "be >= 0", self.temperature)
        require(self.top_k >= 0, "data.top_k", "be >= 0 (0: off)", self.top_k)
        require(0 < self.top_p <= 1, "data.top_p", "lie in (0, 1]", self.top_p)
        if self.max_prompt_tokens is not None:
            limit = self.max_prompt_tokens
            require(limit >= 1, "data.max_prompt_tokens", "be null or >= 1", limit)
        require(0 <= self.eval_share < 1, "data.eval_share", "lie in [0, 1)", self.eval_share)
        require_counts("data", self, "num_prompts", "max_new_tokens")
        held = ("samples_per_prompt", "batch_size", "rows_per_shard")
        require_counts("data", self, *held, most=SIDE_BY_SIDE)
        for key in ("teacher_top_k", "teacher_samples"):
            require(getattr(self, key) >= 0, f"data.{key}", "be >= 0", getattr(self, key))
        _one_of("data.engine", self.engine, ("hf", "vllm", "openai"))
        if self.engine_options and self.engine != "vllm":
            raise UserError(f"data.engine_options are of data.engine=vllm, got {self.engine}")
        if bool(self.servers) != (self.engine == "openai"):
            raise UserError(
                "data.servers=[http://host:8000] names the servers of data.engine=openai, got "
                f"data.engine={self.engine} and data.servers={self.servers}"
            )
        for server in self.servers:
            require_address("data.servers", server)
        if "" in self.stop_strings:
            raise UserError(
                "data.stop_strings must hold text, got '', which ends every answer at once: "
                "remove it"
            )
        _one_of("data.features", self.features, ("live", "cached"))
        _one_of("data.features_dtype", self.features_dtype, ("bf16", "fp8", "fp32"))
        _one_of("data.long_prompts", self.long_prompts, ("refuse", "drop"))


@dataclass
class TrainerConfig:
    max_steps: int = 300
    batch_size: int = 32  # sequences per process per micro-step
    pack_tokens: int = 0  # rows of so many tokens, each of several whole texts; 0: a text a row
    gradient_accumulation_steps: int = 1
    lr: float = 1e-3
    lr_schedule: str = "hold_cosine"
    lr_warmup_steps: int = 0
    lr_hold_share: float = 0.5  # of max_steps, for hold_cosine
    lr_min_ratio: float = 0.1
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    lora_rank: int = 0  # train adapters on model.drafter, merged at the end; 0: its weights
    lora_alpha: float = 32.0
    precision: str = "fp32"
    gradient_checkpointing: bool = False
    compile: str | None = None  # backend of torch.compile, such as inductor; null: none
    resume: str = "auto"
    eval_every: int = 100
    save_every: int = 100
    log_every: int = 10
    keep_checkpoints: int = 2  # besides the best; serves where the newest is damaged
    wandb: str = "off"
    wandb_project: str = "draftsmith"

    def __post_init__(self) -> None:
        _one_of(
            "trainer.lr_schedule", self.lr_schedule, ("constant", "linear", "cosine", "hold_cosine")
        )
        _one_of("trainer.precision", self.precision, ("fp32", "bf16"))
        if self.compile is not None:
            from torch.compiler import list_backends  # takes a second

            _one_of("trainer.compile", self.compile, tuple(list_backends(exclude_tags=())))
        _one_of("trainer.resume", self.resume, ("auto", "never"))
        _one_of("trainer.wandb", self.wandb, ("off", "offline", "online"))
        counts = ("max_steps", "gradient_accumulation_steps", "eval_every", "save_every",
                  "log_every", "keep_checkpoints")  # fmt: skip
        require_counts("trainer", self, *counts)
        require_counts("trainer", self, "batch_size", most=SIDE_BY_SIDE)
        require(0 < self.lr < math.inf, "trainer.lr", "be > 0 and finite", self.lr)
        require(self.weight_decay >= 0, "trainer.weight_decay", "be >= 0", self.weight_decay)
        for key in ("adam_beta1", "adam_beta2"):
            require(
                0 <= getattr(self, key) < 1, f"trainer.{key}", "lie in [0, 1)", getattr(self, key)
            )
        rule = f"lie in 0..{self.max_steps} (trainer.max_steps)"
        require(0 <= self.lr_warmup_steps <= self.max_steps, "trainer.lr_warmup_steps", rule,
                self.lr_warmup_steps)  # fmt: skip
        for key in ("lr_hold_share", "lr_min_ratio"):
            require(
                0 <= getattr(self, key) <= 1, f"trainer.{key}", "lie in [0, 1]", getattr(self, key)
            )
        rule = f"lie in 0..{SIDE_BY_SIDE} (0: off)"
        for key in ("pack_tokens", "lora_rank"):
            value = getattr(self, key)
            require(0 <= value <= SIDE_BY_SIDE, f"trainer.{key}", rule, value)
        require(self.lora_alpha > 0, "trainer.lora_alpha", "be > 0", self.lora_alpha)
        require(self.max_grad_norm > 0, "trainer.max_grad_norm", "be > 0", self.max_grad_norm)


@dataclass
class EvalConfig:
    drafter: str | None = None  # what scripts.evaluate measures
    prompts: str | None = None  # default: held out from data.prompts by hash (toy: other modules)
    prompts_config: str | None = None
    prompts_split: str = "test"
    prompts_column: str | None = None
    num_prompts: int = 96
    max_new_tokens: int = 96
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    top_k: int = 0
    top_p: float = 1.0
    K: int = 4
    # eagle | dynamic:<nodes>:<depth>[:<top_k>] | calibrated:<nodes> | a JSON file of rank paths;
    # rows with it stand beside those of the chain
    tree: str | None = None
    tree_children: str = "top"  # or sampled: drawn from the drafter's law, where T > 0
    verifier: str = "token"  # or typical: Medusa's, lossy, for trees at T > 0
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    # fixed | confidence:<t> | product:<t> | heuristic | head:<h> | head_last:<h>: when a chain of
    # at most K ends early, see eval/policies.py; the last two are of an acceptance head
    policy: str = "fixed"
    engine: str = "own"  # vllm: also in vLLM; http://...: also on that running vLLM server
    batch_size: int = 8
    timing_prompts: int = 12  # decoded one by one for tokens/s, after a warm-up
    bootstrap_draws: int = 1000
    seed: int = 1234

    def __post_init__(self) -> None:
        self.temperatures = [float(t) for t in self.temperatures]
        require(
            bool(self.temperatures),
            "eval.temperatures",
            "name at least one temperature",
            self.temperatures,
        )
        require(min(self.temperatures) >= 0, "eval.temperatures", "be >= 0", self.temperatures)
        distinct = len(set(self.temperatures)) == len(self.temperatures)
        require(distinct, "eval.temperatures", "name each temperature once", self.temperatures)
        require(self.top_k >= 0, "eval.top_k", "be >= 0 (0: off)", self.top_k)
        require(0 < self.top_p <= 1, "eval.top_p", "lie in (0, 1]", self.top_p)
        require_counts("eval", self, "num_prompts", "max_new_tokens", "K")
        require_counts("eval", self, "batch_size", "bootstrap_draws", most=SIDE_BY_SIDE)
        require(0 <= self.seed < SEEDS, "eval.seed", f"lie in 0..{SEEDS - 1}", self.seed)
        require(self.timing_prompts >= 0, "eval.timing_prompts", "be >= 0", self.timing_prompts)
        _one_of("eval.verifier", self.verifier, ("token", "typical"))
        if is_address(self.engine):
            require_address("eval.engine", self.engine)
        else:
            rule = "be own, vllm, or the address of a running vLLM server (http://...)"
            require(self.engine in ("own", "vllm"), "eval.engine", rule, self.engine)
        _one_of("eval.tree_children", self.tree_children, ("top", "sampled"))
        for key in ("typical_epsilon", "typical_delta"):
            require(getattr(self, key) > 0, f"eval.{key}", "be > 0", getattr(self, key))
        if self.verifier == "typical" and self.tree is None:
            raise UserError(
                "eval.verifier=typical accepts paths of a tree: name one with eval.tree=..."
            )
        _check_policy(self.policy)


# policy -> what its threshold must be; None: it takes none
_POLICIES = {
    "fixed": None,
    "confidence": "[0, 1]",
    "product": "(0, 1)",
    "heuristic": None,
    "head": "(0, 1)",
    "head_last": "(0, 1)",
}


def _check_policy(policy: str) -> None:
    name, colon, threshold = policy.partition(":")
    _one_of("eval.policy", name, tuple(_POLICIES))
    allowed = _POLICIES[name]
    if allowed is None:
        require(not colon, "eval.policy", f"be {name} without a threshold", policy)
        return
    try:
        value = float(threshold)
        good = 0 <= value <= 1 and (allowed[0] == "[" or 0 < value < 1)
    except ValueError:
        good = False
    require(good, "eval.policy", f"be {name}:<number in {allowed}>", policy)


@dataclass
class Config:
    """The resolved configuration of one command. `method` is the recipe's own dataclass."""

    recipe: str
    method: Any
    dry_run: bool = False
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    script: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for section, values in self.to_dict().items():
            check_values(section, values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def identity(self) -> dict[str, Any]:
        """All that can change a number: not where the run lies, nor how often it saves."""
        kept = json.loads(json.dumps(self.to_dict()))
        for key in ("dry_run", "script"):
            kept.pop(key)
        for key in ("dir", "stage"):
            kept["run"].pop(key)
        kept["data"].pop("servers")  # the same model may answer elsewhere tomorrow
        for key in FREE_SETTINGS:
            kept["trainer"].pop(key)
        return kept

    def hash(self) -> str:
        kept = self.identity()
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) if self.run.dir else Path("runs") / f"{self.recipe}-{self.hash()}"


_SECTIONS = {
    "run": RunConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "trainer": TrainerConfig,
    "eval": EvalConfig,
}


# keys whose value is a mapping
MAPPINGS = ("model.max_memory", "model.quantization", "data.chat_template_kwargs",
            "data.engine_options", "method.data_mix", "method.corpus",
            "method.continue_corpus", "method.base_options")  # fmt: skip


def suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def known_keys(method: type, script_keys: tuple[str, ...] = ()) -> list[str]:
    keys = ["recipe", "dry_run"]
    for name, section in {**_SECTIONS, "method": method}.items():
        keys += [f"{name}.{f.name}" for f in dataclasses.fields(section)]
    return keys + [f"script.{key}" for key in script_keys]


def text_keys(method: type, types: tuple[str, ...] = ("str", "str | None")) -> set[str]:
    """Keys whose value is text, to be taken literally; of other `types` as they are written."""
    sections = {**_SECTIONS, "method": method}
    return {
        f"{name}.{f.name}"
        for name, section in sections.items()
        for f in dataclasses.fields(section)
        if f.type in types
    }


def parse_overrides(
    arguments: list[str], known: list[str], texts: Collection[str] = ()
) -> dict[str, Any]:
    """`key=value` words to a flat dict of YAML-typed values; unknown keys are refused. `texts`:
    keys whose value is taken literally."""
    flat: dict[str, Any] = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(
                f"arguments have the form key=value, got {word!r}{suggest(word, known)}"
            )
        if key not in known:
            raise UserError(f"unknown key {key!r}{suggest(key, known)}")
        if key in flat:
            raise UserError(f"key {key!r} is given twice")
        if key in texts:  # as it stands: YAML would make `off` a boolean and `a: b` a mapping
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            flat[key] = None if value in ("", "null") else value[1:-1] if quoted else value
            continue
        flat[key] = _yaml_value(f"{key}: {excerpt(value)} is not a YAML value", value)
        if isinstance(flat[key], str):
            with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-4 as text
                flat[key] = float(flat[key])
    return flat


def _yaml_value(said: str, text: str) -> Any:
    """`said`: how the complaint begins where `text` cannot be read."""
    try:
        value = yaml.safe_load(text)
        json.dumps(value, default=str)  # a value that holds itself would be walked for ever
        return value
    except yaml.YAMLError as error:
        reason: object = error
    except RecursionError:
        reason = "nested too deep"
    # a day of no calendar, a number of thousands of digits, a key that is a date
    except (ValueError, TypeError) as error:
        reason = error
    raise UserError(f"{said} ({str(reason).splitlines()[0]})")


def compose(
    recipe: str,
    method: type,
    recipe_yaml: Path | None,
    arguments: list[str],
    script_keys: tuple[str, ...] = (),
) -> Config:
    """Defaults, the recipe's YAML, then `arguments`; every check that needs no model is done."""
    known = known_keys(method, script_keys)
    schema = {
        name: OmegaConf.structured(section)
        for name, section in {**_SECTIONS, "method": method}.items()
    }
    tree = OmegaConf.create(
        {"recipe": recipe, "dry_run": False, "script": dict.fromkeys(script_keys), **schema}
    )
    OmegaConf.set_struct(tree, True)
    layers = []
    if recipe_yaml is not None:
        layers.append((str(recipe_yaml), _flatten(load_yaml(recipe_yaml))))
    layers.append(
        (
            "command line",
            parse_overrides(
                [a for a in arguments if not a.startswith("recipe=")],
                known,
                text_keys(method) | {"script.out", "script.log", "script.server"},
            ),
        )
    )
    texts = text_keys(method, ("list[str]",))
    mappings: dict[str, dict[str, Any]] = {}
    for source, flat in layers:
        for key, value in flat.items():
            if key not in known:
                raise UserError(f"{source}: unknown key {key!r}{suggest(key, known)}")
            if key in MAPPINGS:  # replaced as a whole: shares of another mix must not linger
                if not isinstance(value, dict):
                    raise UserError(f"{key} must be a mapping like {{a: 1}}, got {excerpt(value)}")
                mappings[key] = value
                continue
            if key in ("data.temperature", "eval.temperatures") and not isinstance(value, list):
                value = [value]
            if key in texts and isinstance(value, list):  # OmegaConf makes "False" of a `no`
                good = all(isinstance(item, str) for item in value)
                require(good, key, "hold text alone, a number in quotes", value)
            try:
                OmegaConf.update(tree, key, _literal(value, "${", _DOLLAR))
            except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
                reason = str(error).splitlines()[0].replace(_DOLLAR, "${")[:200]
                raise UserError(f"{key}: cannot take {excerpt(value)} ({reason})") from error
    plain: Any = _literal(OmegaConf.to_container(tree), _DOLLAR, "${")
    for key, mapping in mappings.items():
        section, _, name = key.partition(".")
        plain[section][name] = mapping
    sections = {
        name: section(**plain[name]) for name, section in {**_SECTIONS, "method": method}.items()
    }
    require(isinstance(plain["dry_run"], bool), "dry_run", "be true or false", plain["dry_run"])
    return Config(recipe=recipe, dry_run=plain["dry_run"], script=plain["script"], **sections)


# in place of "${" while OmegaConf holds a value: it would look the rest up, in the environment too
_DOLLAR = "\ue000{"


def _literal(value: Any, old: str, new: str) -> Any:
    """`value` with `old` replaced in all texts of it."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [_literal(one, old, new) for one in value]
    if isinstance(value, dict):
        return {key: _literal(one, old, new) for key, one in value.items()}
    return value


def load_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise UserError(f"configuration file {path} does not exist") from error
    except (OSError, ValueError) as error:  # no file, not UTF-8
        raise UserError(f"{path} is not YAML ({str(error).splitlines()[0]})") from error
    loaded = _yaml_value(f"{path} is not YAML", text)
    if not isinstance(loaded, dict):
        raise UserError(f"{path} is damaged: it must hold a table of settings, got {loaded!r}")
    return loaded


def _flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in MAPPINGS:
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def to_yaml(config: Config) -> str:
    """The resolved configuration; `compose` reads it back to the same one."""
    tree = config.to_dict()
    for key in ("dry_run", "script"):
        tree.pop(key)
    return yaml.safe_dump(tree, sort_keys=False)
