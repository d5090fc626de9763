"""The whole configuration of a command: the sections of all rooms."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.config import DataConfig
from eval.config import EvalConfig
from trainer import config


@dataclass
class Config(config.Config):
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


def compose(
    recipe: str,
    method: type,
    files: Sequence[Path],
    arguments: list[str],
    script_keys: tuple[str, ...] = (),
    reads: Collection[str] | None = None,
    stored: Mapping[str, object] | None = None,
) -> Config:
    """See `trainer.config.compose`."""
    return config.compose(Config, recipe, method, files, arguments, script_keys, reads, stored)
