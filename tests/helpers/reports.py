"""Reports that are written without what a test does not look at: it takes most of a tiny run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from eval.report import plots

SVG = "<svg></svg>"


@contextmanager
def figures_left_empty() -> Iterator[None]:
    """What is plotted goes into a figure as ever, with its keys; the figure is not drawn."""
    made = plots._svg

    def undrawn(*given: Any, **options: Any) -> Any:
        from matplotlib.figure import Figure  # takes a second to import

        def write(figure: Any, file: Any, **_: Any) -> None:
            file.write(SVG)

        with mock.patch.object(Figure, "savefig", write):
            return made(*given, **options)

    with mock.patch.object(plots, "_svg", undrawn):
        yield


@contextmanager
def no_report() -> Iterator[None]:
    """A run ends when its drafter is saved: nothing is measured or exported."""
    from phases import report  # with all else it takes two seconds to import

    def finish(run: Any, base: Any, trained: Mapping[str, Any], *_: Any) -> None:
        report.save_drafter(run, trained["after"])

    with mock.patch.object(report, "finish", finish):
        yield
