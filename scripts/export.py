"""Write a trained drafter for a serving engine.

    python -m scripts.export script.drafter=runs/x/drafter script.engine=vllm script.out=out/vllm

`script.engine` is transformers, vllm, speculators, sglang or llamacpp, as far as it serves the
drafter's kind; a causal-LM drafter has the same layout for the first two. llamacpp needs the
target's own GGUF file: as model.target, or as `model.target_gguf` beside the target's folder. The
model card takes its table from the run's report.json where there is one. `eval.K` sets the drafted
tokens a round, `model.target` names the target where the drafter's folder does not lie in a run;
for heads it is loaded, and code that comes with it or with the drafter runs only with
`model.trust_remote_code=true` here, whatever the run says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from drafters.acceptance import attach
from drafters.acceptance_head import adaptive_note
from drafters.base import DrafterJson, TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.export.card import Export, Serving, model_card
from drafters.formats.files import read_json
from drafters.kinds import Kind, served_by, stored_kind
from drafters.load import drafter_folder, load_drafter, stored
from eval.config import EvalConfig
from eval.report.schema import markdown_table, read_report
from phases import exits
from target.causal_lm import load_causal_lm
from target.fingerprint import eos_ids, eos_ids_of
from target.folder import check_folder, check_model, reading
from target.gguf import is_gguf
from target.model import Target
from target.vocabulary import check_same_vocabulary
from trainer.checks import require_folder
from trainer.config import ModelConfig, asks_for_help, load_yaml, parse_overrides
from trainer.errors import UserError, require
from trainer.terminal import guard_terminal

TEXTS = ["script.drafter", "script.engine", "script.out", "model.target", "model.target_gguf"]
TEMPLATE = "chat_template_kwargs"
KEYS = [*TEXTS, "model.trust_remote_code", "eval.K"]


def export_drafter(
    drafter: Path,
    engine: str,
    out: Path,
    target: str | None = None,
    K: int | None = None,
    trust_remote_code: bool = False,
    gguf: Path | None = None,
) -> Path:
    """Export the drafter folder `drafter` to `out`, and return the folder that was written.
    Arguments that are None come from the drafter's run. UserError where the engine does not serve
    its kind."""
    if not os.path.exists(drafter / "drafter.json"):
        raise UserError(f"script.drafter: no drafter in {str(drafter)!r} (drafter.json is missing)")
    check_folder("script.drafter", drafter)
    require_folder("script.out", out)
    about = stored(drafter, "script.drafter")
    kind = stored_kind(about)
    _check_engine(kind, engine)
    rule = f"be left out for script.engine={engine}: llamacpp reads it"
    require(gguf is None or engine == "llamacpp", "model.target_gguf", rule, gguf)
    folder = drafter.resolve().parent
    stored_config, stored_report = folder / "config.yaml", folder / "report.json"
    config = load_yaml(stored_config) if stored_config.exists() else {}
    report = read_report(stored_report) if stored_report.exists() else None
    model, measured = (_section(config, name, stored_config) for name in ("model", "eval"))
    own = model.get("target")
    if target is None:
        target = own
        if not isinstance(target, str):
            raise UserError(
                f"{drafter} lies in no run folder (no {stored_config} with a target): "
                "name its target with model.target=..."
            )
        print(f"model.target={target}, from {stored_config}")
    _check_out(out, {"model.target": target, "script.drafter": str(drafter)})
    num_tokens = measured.get("K", EvalConfig.K) if K is None else K
    counts = type(num_tokens) is int and num_tokens >= 1  # and no true
    require(counts, "eval.K", "be a whole number >= 1", num_tokens)
    revision = model.get("target_revision") if target == own else None
    rule = "be the name of a revision"
    require(
        isinstance(revision, str | None), f"{stored_config}: model.target_revision", rule, revision
    )
    if target != own:  # the run's numbers are of another target
        report = None
    table = markdown_table(report["results"]) if report and report["results"] else None
    license = "apache-2.0" if target == ModelConfig.target else None
    if kind.load is None:  # a causal LM is written without its target
        language_model = _causal_lm(drafter, about, trust_remote_code)
        if target != own:
            theirs, vocab_size, eos = _vocabulary(target, trust_remote_code)
            check_same_vocabulary(theirs, language_model.tokenizer, str(drafter))
            language_model.fingerprint |= {"vocab_size": vocab_size, "eos_ids": list(eos)}
        whole: TrainedDrafter = language_model
    else:  # in float32, so that the comparison after writing is exact
        loaded = Target.load(
            target,
            revision=revision,
            dtype="float32",
            trust_remote_code=trust_remote_code,
        )
        whole = load_drafter(
            str(drafter), loaded, trust_remote_code=trust_remote_code, key="script.drafter"
        )
    num_tokens = whole.served_tokens(num_tokens)
    served, trained = whole.servable(out / "target")
    if trained is not None:  # it serves on the target that was trained with it
        out, target, revision = out / "drafter", trained.name, None
    assert kind.method is not None, "a kind with writers has a name that engines know"
    template = _section(_section(config, "data", stored_config), TEMPLATE, stored_config)
    text = model_card(
        report, Serving(target, kind.method, num_tokens, revision, template),
        recipe=config.get("recipe"), table=table, license=license, engine=engine, words=kind.words,
        note=adaptive_note(whole.acceptance) if "transformers" in kind.writers else "",
    )  # fmt: skip
    if is_gguf(target):
        rule = f"be left out for model.target={target}, which is one"
        require(gguf is None, "model.target_gguf", rule, gguf)
        gguf = Path(target)
    return kind.writers[engine](served, out, Export(text, target, num_tokens, gguf=gguf))


def _section(config: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    """A section of the configuration in `path`, which may come from somebody else."""
    found = config.get(name) or {}
    require(isinstance(found, dict), f"{path}: {name}", "be a table of settings", found)
    return found


def _check_out(out: Path, read: dict[str, str]) -> None:
    """Refuse an `out` that holds one of the folders `read`, by key."""
    place = out.resolve()
    for key, name in read.items():
        source = Path(name).resolve()
        if source.exists() and (place == source or place in source.parents):
            raise UserError(
                f"script.out={out} would replace {key}={name}: name a new folder beside it"
            )


def _check_engine(kind: Kind, engine: str) -> None:
    if not kind.writers:
        raise UserError(
            f"script.engine={engine}: no engine loads a drafter of kind {kind.name!r}, its own "
            f"format is all there is; engines serve {served_by()}"
        )
    if engine not in kind.writers:
        what = "" if kind.load is None else f" for a drafter of kind {kind.name!r}"
        names = ", ".join(kind.writers)
        raise UserError(f"script.engine must be one of {names}{what}, got {engine!r}")


def _vocabulary(target: str, trusted: bool) -> tuple[PreTrainedTokenizerBase, int, tuple[int, ...]]:
    """Tokenizer, configured vocabulary and EOS ids of `target`; of weights only a GGUF file's are
    read."""
    check_folder("model.target", target)
    if is_gguf(target):
        model, tokenizer = load_causal_lm(target, "model.target")
        return tokenizer, model.config.get_text_config().vocab_size, eos_ids(model, tokenizer)
    with reading(f"model.target={target}: its tokenizer and configuration cannot be read"):
        if Path(target).is_dir():
            check_model("model.target", Path(target))
        tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trusted)
        config = AutoConfig.from_pretrained(target, trust_remote_code=trusted)
        try:
            generation = GenerationConfig.from_pretrained(target)
        except OSError:  # it has none: as transformers makes it when it loads the model
            generation = GenerationConfig.from_model_config(config)
    return tokenizer, config.get_text_config().vocab_size, eos_ids_of(generation, tokenizer)


def _causal_lm(folder: Path, about: DrafterJson, trusted: bool) -> CausalLMDrafter:
    """Load a causal LM in the dtype of its weights. `about`: the content of drafter.json."""
    try:
        dtype = read_json(folder / "config.json", dict).get("dtype") or "float32"
        made_for = about["target"]
        vocab_size, _ = made_for["vocab_size"], made_for["eos_ids"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"script.drafter: {folder} is damaged ({error!r})") from error
    model, tokenizer = load_causal_lm(
        str(folder), "script.drafter", dtype=dtype, trust_remote_code=trusted
    )
    drafter = CausalLMDrafter(model, tokenizer, vocab_size, made_for)
    attach(drafter, folder, "script.drafter")
    return drafter


def main(arguments: list[str]) -> int:
    guard_terminal()
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        given = parse_overrides(arguments, KEYS, TEXTS)
        for key in ("script.drafter", "script.engine", "script.out"):
            if not given.get(key):
                raise UserError(f"{key} must be given: {key}=...")
        trust = given.get("model.trust_remote_code", False)
        require(isinstance(trust, bool), "model.trust_remote_code", "be true or false", trust)
        out = export_drafter(
            Path(drafter_folder("script.drafter", str(given["script.drafter"]))),
            str(given["script.engine"]),
            Path(str(given["script.out"])),
            given.get("model.target"),
            given.get("eval.K"),
            trust,
            Path(given["model.target_gguf"]) if given.get("model.target_gguf") else None,
        )
    except Exception as error:
        return exits.fail(error, arguments)
    print(f"exported: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
