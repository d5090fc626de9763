"""The bytes that a trace store needs on disk, printed and checked before anything is generated."""

from __future__ import annotations

import shutil
from pathlib import Path

from trainer.errors import UserError


def estimate_bytes(
    num_rows: int, prompt_tokens: float, new_tokens: float, teacher_top_k: int, teacher_samples: int
) -> int:
    """Bytes on disk for mean numbers of tokens per row: each lies in a shard and in the file that
    is mapped (data/traces.py).

    Look-ahead and fixed responses count as new tokens. The estimate is an upper bound where
    `new_tokens` is the limit of a response.
    """
    row = 265 + 430  # key, hashes, names and numbers, with the share of the shard's footer
    # 4 bytes an id or log-probability, about 4 a list, 4 for log_tail
    teacher = (
        8 * (teacher_top_k + teacher_samples) + 12 * (teacher_top_k > 0) + 8 * (teacher_samples > 0)
    )
    return round(num_rows * (row + 2 * (4 * (prompt_tokens + new_tokens) + teacher * new_tokens)))


def check_budget(folder: str | Path, bytes_needed: int, free: int | None = None) -> None:
    """Print the byte budget; UserError where it exceeds the free space of the folder's disk."""
    if free is None:
        path = Path(folder).absolute()
        free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
    print(f"traces: about {in_bytes(bytes_needed)} in {folder}; free {in_bytes(free)}")
    if bytes_needed > free:
        raise UserError(
            f"the traces need about {in_bytes(bytes_needed)} in {folder}, only {in_bytes(free)} "
            "are free: lower data.num_prompts or data.max_new_tokens, or use a larger disk "
            "(data.cache_dir)"
        )


def in_bytes(num_bytes: int) -> str:
    """A size in GB or MB, for a message."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
