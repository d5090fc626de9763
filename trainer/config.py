"""The one schema of every command, its defaults, and the errors a user can make.

Order: the defaults below, then the recipe's YAML and a preset's, then `section.key=value` from the
command line. OmegaConf is used only here; everybody else receives plain dataclasses. `method.*` is
typed by the recipe's own `Config`, `data.*` and `eval.*` by dataclasses of those rooms. The caller
hands them in, so that this room knows no method and no key of another room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

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
    require_counts,
    require_one_of,
)
from trainer.checks import RunFault as RunFault  # errors are imported from here everywhere
from trainer.checks import is_address as is_address
from trainer.redaction import MARK, redacted

SCHEMA = 2  # of the configuration; raised when a key or a default gets another meaning
# of trainer.*, see `Section.FREE`
FREE_SETTINGS = ("resume", "save_every", "log_every", "keep_checkpoints", "wandb", "wandb_project")


class Section:
    """A section of the configuration. `FREE`: keys that change no number a run computes, so that
    they may change between its parts; `MOVED`: keys of earlier versions, which the command line
    refuses, and what to write in their place."""

    FREE: ClassVar[tuple[str, ...]] = ()
    MOVED: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def translated(cls, stored: dict[str, Any]) -> dict[str, Any]:
        """What a file of an earlier version says, in the keys and values of this one."""
        return stored


@dataclass
class RunConfig(Section):
    FREE: ClassVar[tuple[str, ...]] = ("dir", "stage")
    # folder of the run; null: runs/<recipe>-<hash of what the configuration says>
    dir: str | None = None
    # of the training: which prompts, what is drawn as their responses, fresh weights, the order of
    # the text, dropout
    seed: int = 0
    stage: str | None = None  # train up to this stage of the recipe and stop, without a report

    def __post_init__(self) -> None:
        require(0 <= self.seed < SEEDS, "run.seed", f"lie in 0..{SEEDS - 1}", self.seed)


DEVICE_MAPS = ("auto", "balanced", "sequential")  # of one process


@dataclass
class ModelConfig(Section):
    target: str = "assets/toy/target"  # folder or Hub id of the model that is to be served faster
    target_revision: str | None = None  # commit, branch or tag of the target on the Hub
    # folder or Hub id of the drafter that training starts from; null: the recipe builds a fresh one
    drafter: str | None = None
    drafter_revision: str | None = None  # commit, branch or tag of the drafter on the Hub
    # of the target; auto: float32 on a CPU, the checkpoint's own dtype elsewhere
    dtype: str = "auto"
    # where the target's layers lie; null: all on the device of the process; auto, balanced,
    # sequential or {module: device}: over the devices of one process, as transformers does it;
    # fsdp2: shared out over all processes
    device_map: Any = None
    # most memory by device, for model.device_map=auto, such as {0: 20GiB, cpu: 64GiB}
    max_memory: dict[Any, str] = field(default_factory=dict)
    # quantises the target while it is loaded; takes what a checkpoint's quantization_config holds,
    # such as {quant_method: bitsandbytes, load_in_8bit: true}
    quantization: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False  # run Python code that comes with a model

    def __post_init__(self) -> None:
        require_one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if not isinstance(self.device_map, dict | None):
            require_one_of("model.device_map", self.device_map, (*DEVICE_MAPS, "fsdp2"))
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
class TrainerConfig(Section):
    FREE: ClassVar[tuple[str, ...]] = FREE_SETTINGS
    max_steps: int = 300  # optimiser steps of a stage
    batch_size: int = 32  # sequences per process per micro-step
    # length of a row that holds several whole texts, which do not see each other; 0: one text a row
    pack_tokens: int = 0
    gradient_accumulation_steps: int = 1  # micro-steps per optimiser step
    lr: float = 1e-3  # highest learning rate of AdamW
    # shape of the learning rate over the steps; hold_cosine holds it first, then lets it fall
    lr_schedule: str = "hold_cosine"
    lr_warmup_steps: int = 0  # steps over which the learning rate rises from 0
    lr_hold_share: float = 0.5  # share of trainer.max_steps that hold_cosine holds the rate for
    lr_min_ratio: float = 0.1  # last learning rate over the highest one
    weight_decay: float = 0.0  # of AdamW
    adam_beta1: float = 0.9  # of AdamW
    adam_beta2: float = 0.999  # of AdamW
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm
    # rank of adapters that are trained on model.drafter and merged at the end; 0: train its weights
    lora_rank: int = 0
    lora_alpha: float = 32.0  # scale of the adapters, divided by their rank
    precision: str = "fp32"  # in which the drafter computes; its weights stay in float32
    gradient_checkpointing: bool = False  # compute layers again in the backward pass: less memory
    compile: str | None = None  # backend of torch.compile, such as inductor; null: do not compile
    resume: str = "auto"  # continue from the newest checkpoint of the run folder, or never do so
    eval_every: int = 100  # steps between evaluations on held-out training text
    save_every: int = 100  # steps between checkpoints
    log_every: int = 10  # steps between rows of metrics.jsonl
    # newest checkpoints that stay on disk beside the best one; if the newest is damaged, the run
    # resumes from the one before it
    keep_checkpoints: int = 2
    wandb: str = "off"  # log to Weights & Biases
    wandb_project: str = "draftsmith"  # project there

    def __post_init__(self) -> None:
        require_one_of(
            "trainer.lr_schedule", self.lr_schedule, ("constant", "linear", "cosine", "hold_cosine")
        )
        require_one_of("trainer.precision", self.precision, ("fp32", "bf16"))
        if self.compile is not None:
            from torch.compiler import list_backends  # takes a second

            names = list_backends(exclude_tags=())
            if self.compile not in names:  # which there are depends on the installation
                raise UserError(
                    f"trainer.compile must be a backend of torch.compile, got {self.compile!r}; "
                    f"available: {', '.join(names)}"
                )
        require_one_of("trainer.resume", self.resume, ("auto", "never"))
        require_one_of("trainer.wandb", self.wandb, ("off", "offline", "online"))
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
class Config:
    """The resolved configuration of one command. `method` is the recipe's own dataclass; sections
    of other rooms are fields of a subclass."""

    recipe: str
    method: Any
    dry_run: bool = False
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    script: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for section, values in dataclasses.asdict(self).items():
            check_values(section, values)

    def to_dict(self) -> dict[str, Any]:
        """To be stored, shown and compared: without its secrets."""
        return redacted(dataclasses.asdict(self))

    def settings(self) -> dict[str, Any]:
        """All that can change a number: not where the run lies, how often it saves, or what a
        secret is."""
        kept = json_value(self.to_dict())
        for key in ("dry_run", "script"):
            kept.pop(key)
        for name, section in sections(type(self)).items():
            for key in section.FREE:
                kept[name].pop(key)
        return kept

    def identity(self) -> dict[str, Any]:
        """The settings that differ from the schema's defaults, and the schema's number: a key that
        is added with a default changes no identity."""
        found: dict[str, Any] = {"schema": SCHEMA}
        for section, values in self.settings().items():
            if isinstance(values, dict):
                defaults = json_value(dataclasses.asdict(type(getattr(self, section))()))
                values = {k: v for k, v in values.items() if v != defaults[k]}
            found[section] = values
        return found

    def hash(self) -> str:
        kept = self.identity()
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) if self.run.dir else Path("runs") / f"{self.recipe}-{self.hash()}"


def json_value(value: Any) -> Any:
    """As JSON has it: tuples as lists, keys as text."""
    return json.loads(json.dumps(value))


def suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


C = TypeVar("C", bound=Config)


def sections(kind: type[Config]) -> dict[str, type[Section]]:
    """The sections of a configuration by name, without `method`."""
    made = {f.name: f.default_factory for f in dataclasses.fields(kind)}
    return {
        name: section for name, section in made.items()
        if isinstance(section, type) and issubclass(section, Section)
    }  # fmt: skip


def known_keys(schema: Mapping[str, type], script_keys: tuple[str, ...] = ()) -> list[str]:
    """`schema`: the dataclass of each section."""
    keys = [f"{name}.{f.name}" for name, kind in schema.items() for f in dataclasses.fields(kind)]
    return ["recipe", "dry_run", *keys, *(f"script.{key}" for key in script_keys)]


def keys_of(schema: Mapping[str, type], declared: str) -> set[str]:
    """Keys whose type is declared as this, or begins like it."""
    return {
        f"{name}.{f.name}"
        for name, kind in schema.items()
        for f in dataclasses.fields(kind)
        if str(f.type).startswith(declared)
    }


def parse_overrides(
    arguments: list[str],
    known: list[str],
    texts: Collection[str] = (),
    moved: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """`key=value` words to a flat dict of YAML-typed values; unknown keys are refused. `texts`:
    keys whose value is taken literally; `moved`: those of earlier versions."""
    flat: dict[str, Any] = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(
                f"arguments have the form key=value, got {word!r}{suggest(word, known)}"
            )
        if moved and key in moved:
            raise UserError(f"{key} is no key any more: write {moved[key]}")
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
    kind: type[C],
    recipe: str,
    method: type,
    files: Sequence[Path],
    arguments: list[str],
    script_keys: tuple[str, ...] = (),
    reads: Collection[str] | None = None,
) -> C:
    """Defaults, then the YAML `files` in turn, then `arguments`; every check that needs no model is
    done. A secret that a stored configuration leaves out is asked for; `reads`: only in these keys
    and sections."""
    schema: dict[str, type] = {**sections(kind), "method": method}
    known = known_keys(schema, script_keys)
    empty = {name: OmegaConf.structured(section) for name, section in schema.items()}
    tree = OmegaConf.create(
        {"recipe": recipe, "dry_run": False, "script": dict.fromkeys(script_keys), **empty}
    )
    OmegaConf.set_struct(tree, True)
    layers = [(str(path), _flatten(translated(load_yaml(path), schema), known)) for path in files]
    layers.append(
        (
            "command line",
            parse_overrides(
                [a for a in arguments if not a.startswith("recipe=")],
                known,
                keys_of(schema, "str") | {f"script.{key}" for key in script_keys},
                moved_keys(schema),
            ),
        )
    )
    texts, numbers = keys_of(schema, "list[str]"), keys_of(schema, "list[float]")
    tables = keys_of(schema, "dict[")
    mappings: dict[str, dict[str, Any]] = {}
    for source, flat in layers:
        for key, value in flat.items():
            if key not in known:
                raise UserError(f"{source}: unknown key {key!r}{suggest(key, known)}")
            if key in tables:  # replaced as a whole: shares of another mix must not linger
                if not isinstance(value, dict):
                    raise UserError(f"{key} must be a mapping like {{a: 1}}, got {excerpt(value)}")
                mappings[key] = value
                continue
            if key in numbers and not isinstance(value, list):
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
    for section in schema:
        for name, value in plain[section].items():
            key = f"{section}.{name}"
            if MARK in str(value) and (reads is None or section in reads or key in reads):
                raise UserError(
                    f"{key} holds a secret, which a stored configuration leaves out: pass it again "
                    f"on the command line as {key}=..."
                )
    filled = {name: section(**plain[name]) for name, section in schema.items()}
    require(isinstance(plain["dry_run"], bool), "dry_run", "be true or false", plain["dry_run"])
    return kind(recipe=recipe, dry_run=plain["dry_run"], script=plain["script"], **filled)


def make_settings(kind: type, options: Mapping[str, Any]) -> Any:
    """`kind`, a dataclass of settings, with these values, of the types it declares. Raises
    UserError by the name of the setting."""
    tree = OmegaConf.structured(kind)
    OmegaConf.set_struct(tree, True)
    known = [field.name for field in dataclasses.fields(kind)]
    for name, value in options.items():
        if name not in known:
            raise UserError(f"unknown key 'method.{name}'{suggest(name, known)}")
        try:
            OmegaConf.update(tree, name, _literal(value, "${", _DOLLAR))
        except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
            reason = str(error).splitlines()[0].replace(_DOLLAR, "${")[:200]
            raise UserError(f"method.{name}: cannot take {excerpt(value)} ({reason})") from error
    plain: Any = _literal(OmegaConf.to_container(tree), _DOLLAR, "${")
    return kind(**plain)


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


def translated(stored: dict[str, Any], schema: Mapping[str, type]) -> dict[str, Any]:
    """The content of a YAML file, in the keys and values of this version."""
    new = dict(stored)
    for name, kind in schema.items():
        if issubclass(kind, Section) and isinstance(stored.get(name), dict):
            new[name] = kind.translated(stored[name])
    return new


def moved_keys(schema: Mapping[str, type]) -> dict[str, str]:
    """Keys of earlier versions, and what to write in their place."""
    return {
        f"{name}.{key}": new
        for name, kind in schema.items() if issubclass(kind, Section)
        for key, new in kind.MOVED.items()
    }  # fmt: skip


def _flatten(nested: dict[str, Any], known: list[str], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in known:
            flat |= _flatten(value, known, f"{name}.")
        else:
            flat[name] = value
    return flat


def to_yaml(config: Config) -> str:
    """The resolved configuration; `compose` reads it back to the same one, once the command line
    gives the secrets again."""
    tree = config.to_dict()
    for key in ("dry_run", "script"):
        tree.pop(key)
    return yaml.safe_dump(tree, sort_keys=False)
