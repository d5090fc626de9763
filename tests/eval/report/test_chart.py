"""Where the points of a plot lie, and the axes that say what they mean."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from eval.report import plots
from eval.report.chart import Axis, Line, Plot, linear, named, whole
from eval.report.render import Figure, Figures
from eval.report.tiles import tile_blocks
from eval.report.web import to_html
from eval.speed_model import modelled_speedup
from tests.helpers.report_rows import report_with_tree


def ticks(axis: Axis) -> list[str]:
    return [text for _, text in axis.ticks]


def test_ticks_are_round_numbers_inside_the_axis():
    assert ticks(linear("", [], 0, 1.02)) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert ticks(linear("", [1.93, 3.41])) == ["2", "2.5", "3"]
    assert ticks(linear("", [0, 30_000])) == ["0", "10,000", "20,000", "30,000"]
    assert ticks(linear("", [0.0007, 0.0021], low=0)) == ["0", "0.0005", "0.001", "0.0015", "0.002"]
    assert ticks(whole("", 1, 5)) == ["1", "2", "3", "4", "5"]
    assert ticks(whole("", 0, 30)) == [str(n) for n in range(0, 31, 3)]
    for axis in (linear("", [-3.0, 7e5]), linear("", [5.0, 5.0]), linear("", []), whole("", 1, 1)):
        assert axis.low < axis.high
        assert axis.ticks
        assert all(axis.low <= value <= axis.high for value, _ in axis.ticks)


def test_an_axis_that_doubles_gives_each_factor_of_two_the_same_length():
    axis = Axis("batch size", 1, 64, [], doubling=True)
    assert [axis.place(2.0**n) for n in (0, 3, 6)] == [0, 0.5, 1]


def test_the_first_name_stands_highest():
    axis = named("", ["code", "math"], high_first=True)
    assert axis.place(0) > axis.place(1)


def test_points_lie_where_their_axes_say(tmp_path):
    line = Line("a <b>", "--after", [(0, 0), (2, 1), (4, 0.5)], mark="square")
    plot = Plot(Axis("x", 0, 4, [(4, "4")]), Axis("y", 0, 1, [(1, "1")]), [line], level=0.5)
    page = to_html("t", [Figures([Figure("f", plot, "c")])])
    points = re.findall(r'points="([^"]*)"', page)[0].split()
    found = [tuple(map(float, point.split(","))) for point in points]
    assert found == [
        (plot.left, plot.bottom),
        (pytest.approx((plot.left + plot.right) / 2, abs=0.1), plot.top),
        (plot.right, pytest.approx((plot.top + plot.bottom) / 2, abs=0.1)),
    ]
    assert page.count("<rect") == 3
    assert "</i>a &lt;b&gt;</li>" in page
    assert f'class="level" d="M{plot.left} {found[2][1]}H' in page


def test_axes_are_named_in_words():
    rows = report_with_tree()["results"][1:3]
    assert plots.acceptance_by_depth(rows).y.label == "accepted, given all before it"
    assert plots.acceptance_by_depth(rows, "reach_pos").y.label == "share of rounds"


def test_the_plot_of_K_passes_through_the_speed_up_that_is_modelled_here():
    row = report_with_tree()["results"][3]
    row = replace(row, cost_ratio=0.3, verify_cost=1.4)
    (own,) = [one for one in plots.speedup_over_K(row).named if one.label.endswith("here")]
    assert own.label == "c = 0.3, verification 1.4: here"
    expected = modelled_speedup(row.tokens_per_round, 4, 0.3, 1.4)
    assert dict(own.points)[4] == pytest.approx(expected, rel=1e-3)
    assert dict(own.points)[0] == 1  # plain decoding verifies nothing


def tiles_of(**changes):
    report = report_with_tree()
    report["results"] = [
        replace(row, **changes) if row.drafter == "after" else row for row in report["results"]
    ]
    return tile_blocks(report)[1].tiles


def test_prompt_lookup_stands_in_the_figures_at_the_top():
    tokens, _, acceptance = tiles_of()
    for tile in (tokens, acceptance):
        assert "prompt_lookup" in [one.name for one in tile.estimates]


@pytest.mark.parametrize(
    ("speedup", "modelled", "said"),
    [
        (0.8, 0.5, "a round takes the time of 6.67 target forwards here and gives 3.34 tokens"),
        (0.8, 1.2, "though the two networks alone would give 1.20×"),
        (1.2, 1.2, ""),
        (0.8, None, ""),
    ],
)
def test_a_speed_up_below_one_says_why(speedup, modelled, said):
    _, tile, _ = tiles_of(speedup=speedup, modelled_speedup=modelled)
    below = [note for note in tile.notes if note.startswith("Below 1")]
    assert len(below) == bool(said)
    assert said in "".join(below)
