"""Runs without what a test does not look at: it takes most of a tiny run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def no_report() -> Iterator[None]:
    """A run ends when its drafter is saved: nothing is measured or exported."""
    from phases import report  # with all else it takes two seconds to import

    def finish(run: Any, base: Any, trained: Mapping[str, Any], *_: Any) -> None:
        report.save_drafter(run, trained["after"])

    with mock.patch.object(report, "finish", finish):
        yield
