"""The one table of the kinds of drafters: how each is loaded, exported, served and named.

Loading, the phases, `scripts.export` and the model card read it. A kind without writers is not
exported: no engine serves it, and the run says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafters.bank import DrafterBank
from drafters.base import DrafterJson, TrainedDrafter
from drafters.block import BlockDrafter, DSparkDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.eagle1 import Eagle1Drafter
from drafters.eagle3 import Eagle3Drafter
from drafters.export import gguf, hf, hf_dflash, sglang, speculators, vllm
from drafters.export.card import Export
from drafters.formats import heads
from drafters.formats.head import PublishedHead
from drafters.hydra import HydraDrafter
from drafters.medusa import MedusaDrafter
from drafters.medusa2 import Medusa2Drafter
from target.model import Target
from trainer.errors import UserError


@dataclass(frozen=True)
class Writer:
    """How a drafter of one kind is written for an engine.

    `write`: writes the folder; `check`: raises UserError for a drafter that the engine cannot
    serve, which its settings and its target decide before it is trained. The first argument of
    both is a drafter of the kind.
    """

    write: Callable[[Any, Path, Export], Path]
    check: Callable[[Any], None]

    def __call__(self, drafter: TrainedDrafter, folder: Path, asked: Export) -> Path:
        """Write the drafter; UserError where the engine cannot serve it."""
        self.check(drafter)
        return self.write(drafter, folder, asked)


@dataclass(frozen=True)
class Kind:
    """A row of the table.

    `words`: how the model card names such a drafter; `load`: reads a folder of this project, None
    for causal LMs, which load by any name; `method`: the engines' name for the method; `writers`:
    by engine, a run writes the first of them that serves its drafter; `adopt`: makes a drafter of a
    published head.
    """

    drafter: type[TrainedDrafter]
    words: str
    load: Callable[[Path, Target], TrainedDrafter] | None
    method: str | None = None
    writers: Mapping[str, Writer] = field(default_factory=dict)
    adopt: Callable[[PublishedHead, Target], TrainedDrafter] | None = None

    @property
    def name(self) -> str:
        """The kind, as drafter.json spells it."""
        return self.drafter.kind

    def adopted(self, head: PublishedHead, target: Target) -> TrainedDrafter:
        """A drafter of this target with the weights of a published head."""
        assert self.adopt is not None, f"the reader knows heads of kind {self.name!r}"
        return self.adopt(head, target)


_OF_LANGUAGE_MODELS = Writer(hf.write, hf.check)
_MEDUSA_WRITERS: Mapping[str, Writer] = {"vllm": Writer(vllm.write_medusa, vllm.check_medusa)}

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            CausalLMDrafter, "A draft model", None, "draft_model",
            {
                "transformers": _OF_LANGUAGE_MODELS, "vllm": _OF_LANGUAGE_MODELS,
                "llamacpp": Writer(gguf.write_causal_lm, gguf.check_causal_lm),
            },
        ),
        Kind(DrafterBank, "A bank of draft models", DrafterBank.from_pretrained),
        Kind(
            MedusaDrafter, "A set of Medusa heads", MedusaDrafter.from_pretrained, "medusa",
            _MEDUSA_WRITERS, heads.medusa,
        ),
        Kind(  # served as Medusa's, on the target that was trained with them
            Medusa2Drafter, "A set of Medusa heads", Medusa2Drafter.from_pretrained, "medusa",
            _MEDUSA_WRITERS,
        ),
        Kind(HydraDrafter, "A set of Hydra heads", HydraDrafter.from_pretrained, adopt=heads.hydra),
        Kind(
            Eagle1Drafter, "An EAGLE head", Eagle1Drafter.from_pretrained, "eagle",
            {
                "vllm": Writer(vllm.write_eagle1, vllm.check_eagle1),
                "sglang": Writer(sglang.write_eagle1, sglang.check_eagle1),
            },
            heads.eagle1,
        ),
        Kind(
            Eagle3Drafter, "An EAGLE-3 head", Eagle3Drafter.from_pretrained, "eagle3",
            {
                "vllm": Writer(vllm.write_eagle3, vllm.check_eagle3),
                "speculators": Writer(speculators.write_eagle3, vllm.check_eagle3),
                "sglang": Writer(sglang.write_eagle3, sglang.check_eagle3),
                "llamacpp": Writer(gguf.write_eagle3, gguf.check_eagle3),
            },
            heads.eagle3,
        ),
        Kind(
            BlockDrafter, "A DFlash block drafter", BlockDrafter.from_pretrained, "dflash",
            {
                "vllm": Writer(vllm.write_dflash, vllm.check_dflash),
                "transformers": Writer(hf_dflash.write_dflash, hf_dflash.check_dflash),
                "speculators": Writer(speculators.write_dflash, speculators.check_dflash),
                "sglang": Writer(sglang.write_dflash, sglang.check_dflash),
                "llamacpp": Writer(gguf.write_dflash, gguf.check_dflash),
            },
            heads.dflash,
        ),
        Kind(
            DSparkDrafter, "A DSpark block drafter", DSparkDrafter.from_pretrained, "dspark",
            {
                "vllm": Writer(vllm.write_dspark, vllm.check_dspark),
                "speculators": Writer(speculators.write_dspark, speculators.check_dspark),
                "sglang": Writer(sglang.write_dspark, sglang.check_dflash),
                "llamacpp": Writer(gguf.write_dspark, gguf.check_dspark),
            },
            heads.dflash,
        ),
    )
}  # fmt: skip


def kind_of(drafter: TrainedDrafter) -> Kind:
    """The row of a drafter; UserError where its kind has none."""
    try:
        return KINDS[drafter.kind]
    except KeyError as error:
        raise UserError(
            f"drafters of kind {drafter.kind!r} have no row in drafters/kinds.py: add one, without "
            "writers where no engine serves them"
        ) from error


def first_writer(drafter: TrainedDrafter, of_gguf: bool) -> tuple[str, Writer]:
    """The engine that a run writes this drafter for, and its writer.

    It is the first of the drafter's row that serves it, but llama.cpp, where that does, for a
    target that has a GGUF file (`of_gguf`). Where none serves it, the first, whose check says why.
    """
    writers = kind_of(drafter).writers
    engines = [engine for engine in writers if engine != "llamacpp"]
    if of_gguf and "llamacpp" in writers:
        engines.insert(0, "llamacpp")
    for engine in engines:
        with contextlib.suppress(UserError):
            writers[engine].check(drafter)
            return engine, writers[engine]
    return next(iter(writers.items()))


def stored_kind(about: DrafterJson) -> Kind:
    """The row of a stored drafter.

    All EAGLE heads are stored under one kind; their settings hold the version.
    """
    name = about["kind"]
    if name == Eagle1Drafter.kind and about["settings"].get("version") == Eagle3Drafter.version:
        name = Eagle3Drafter.kind
    return KINDS[name]


def served_by() -> str:
    """The engines that serve each kind, for messages."""
    served = {name: ", ".join(kind.writers) for name, kind in KINDS.items() if kind.writers}
    return "; ".join(f"{name}: {engines}" for name, engines in served.items())
