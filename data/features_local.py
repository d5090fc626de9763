"""A features store in a folder: its shards are memory-mapped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from data.features_layout import (
    HEADER,
    MANIFEST,
    Bytes,
    Identity,
    Row,
    Shard,
    ShardEntry,
    header_of,
    row_sha256,
)
from data.traces import REMEDY
from trainer.errors import UserError
from trainer.files import damaged, read_json, sync, write_json


class LocalFolder:
    """The files of one store; `work`: the folder for half-written shards and the lock."""

    def __init__(self, path: str | Path):
        self.path = self.work = Path(path)
        self._mapped: dict[str, Bytes] = {}  # by shard
        self._checked: dict[str, np.ndarray] = {}  # [rows] bool, those that have been read

    def __str__(self) -> str:
        return str(self.path)

    def beside(self) -> list[LocalFolder]:
        """The stores in the same folder as this one."""
        return [LocalFolder(p.parent) for p in sorted(self.path.parent.glob(f"*/{MANIFEST}"))]

    def manifest(self) -> dict[str, Any] | None:
        """Its content, None where there is none. UserError where it is damaged."""
        path = self.path / MANIFEST
        return read_json(path, REMEDY) if path.exists() else None

    def write_manifest(self, content: object) -> None:
        write_json(self.path / MANIFEST, content)

    def free(self) -> int | None:
        """Bytes that can be written, None where that is not known."""
        there = next(p for p in (self.path, *self.path.parents) if p.exists())
        return shutil.disk_usage(there).free

    def entries(self, shards: Sequence[Shard], identity: Identity) -> list[ShardEntry | None]:
        """What the header of each shard says; None where it is missing. UserError where one is
        damaged, or belongs to another store."""
        return [self._entry(shard, identity) for shard in shards]

    def _entry(self, shard: Shard, identity: Identity) -> ShardEntry | None:
        """Only "sha256" is read. `safe_open` refuses a file whose length is not what its header
        says."""
        path = self.path / shard.file
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            raise damaged(path, f"not readable: {str(error).splitlines()[0]}", REMEDY) from error
        if header.get("identity") != identity:
            raise UserError(f"data.features: {path} belongs to another store; move or delete it")
        layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        same = layout == shard.layout(identity)
        if not same or header != header_of(shard, identity, tensors["sha256"].numpy()):
            raise damaged(path, "its header or checksums are not what was written", REMEDY)
        mapped = {name: tensors[name].view(torch.uint8).numpy() for name in tensors}
        self._mapped[shard.file] = mapped
        self._checked[shard.file] = np.zeros(len(shard.keys), bool)
        return header["shard"]

    def rows(self, rows: Sequence[Row], identity: Identity) -> list[Bytes]:
        """Views of the mapped files, whose bytes are checked the first time."""
        return [self._row(*row) for row in rows]

    def _row(self, shard: Shard, number: int, tokens: slice) -> Bytes:
        mapped = self._mapped[shard.file]
        row = {name: values[tokens] for name, values in mapped.items() if name != "sha256"}
        if not self._checked[shard.file][number]:
            if row_sha256(row) != mapped["sha256"][number].tobytes():
                what = f"the states of its row {number} are not those that were written"
                raise damaged(self.path / shard.file, what, REMEDY)
            self._checked[shard.file][number] = True
        return row

    def publish(self, temporary: Path, shard: Shard) -> None:
        """Give a shard in `work` its name; its bytes are on the disk when this returns."""
        shutil.copymode(self.path / MANIFEST, temporary)  # `save_file`: for its owner only
        sync(temporary)
        os.replace(temporary, self.path / shard.file)
        sync(self.path)
