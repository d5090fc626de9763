"""What a command prints of its report."""

from __future__ import annotations

from eval.report.terminal import summary
from tests.helpers.report_rows import TREE, report_with_tree


def lines_of(report, name):
    return [line for line in summary(report).splitlines() if line.startswith(name)]


def test_every_trained_drafter_has_a_line_and_the_trivial_ones_have_none():
    report = report_with_tree()
    text = summary(report)
    for row in report["results"]:
        if row.drafter in ("plain", "untrained", "target"):
            assert not lines_of(report, f"  {row.drafter}")
        else:
            assert f"{row.tokens_per_round:.2f}" in text
    (tree,) = lines_of(report, f"  after ({TREE})")
    (row,) = (
        r for r in report["results"]
        if r.drafter == "after" and r.tree and r.measured_by == "offline"
    )  # fmt: skip
    low, high = row.tokens_per_round_ci95
    assert f"{row.tokens_per_round:.2f} [{low:.2f}, {high:.2f}]" in tree


def test_gains_stand_below_with_their_intervals():
    report = report_with_tree()
    (gain,) = lines_of(report, "after - before, tokens per round: ")
    (one,) = (
        c for c in report["comparisons"]
        if (c["a"], c["b"], c["metric"]) == ("after", "before", "tokens_per_round")
    )  # fmt: skip
    assert f"{one['diff']:+.2f} [{one['ci95'][0]:+.2f}, {one['ci95'][1]:+.2f}]" in gain


def test_a_lossy_row_says_so():
    report = report_with_tree(1.0, lossless=False, verifier="typical")
    (tree,) = lines_of(report, f"  after ({TREE}, typical)")
    assert "not lossless" in tree


def test_a_report_without_rows_is_its_title():
    report = report_with_tree() | {"results": [], "comparisons": []}
    assert len(summary(report).splitlines()) == 1
