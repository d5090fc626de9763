"""The three files of a report: same rows, checked content, safe to open."""

import copy
import json
import re
from dataclasses import fields, replace

import numpy as np
import pytest

from eval.counters import PromptCounters
from eval.metrics import paired_difference, summarise
from eval.report.page import headline
from eval.report.rows import DRAFTERS
from eval.report.schema import (
    as_json,
    build_report,
    markdown_table,
    parsed,
    plain_row,
    read_report,
    write_report,
)
from eval.row import Row
from tests.helpers.commands import pipe
from tests.helpers.report_rows import measured, result_row
from trainer.errors import UserError

NASTY = "<script>alert('x')</script> | $x$ & `y`"


def example_report():
    alphas = {"target": 0.98, "after": 0.72, "untrained": 0.04, "before": 0.60,
              "prompt_lookup": 0.25, "offline": 0.66, "control": 0.63}  # fmt: skip
    results, comparisons = [], []
    for temperature in (1.0, 0.0):
        counters = {name: measured(a - 0.05 * temperature) for name, a in alphas.items()}
        results += [result_row(name, c, temperature) for name, c in counters.items()]
        results.append(plain_row(results[-1]))
        for other in ("control", "before"):
            difference = paired_difference(counters["after"], counters[other], "tokens_per_round")
            comparisons.append({"a": "after", "b": other, "temperature": temperature} | difference)
    bins = [{"confidence": 0.05 + i / 10, "acceptance": 0.1 + i / 12, "count": 10 * i + 1}
            for i in range(10)]  # fmt: skip
    for row in results:
        if row.drafter in ("before", "after"):
            row.calibration = {"bins": bins}
    series = [
        {"step": step, "alpha": 0.6 + 0.1 * (1 - 0.99**step), "greedy_match": 0.6 + step / 4000}
        for step in range(0, 301, 50)
    ]
    return build_report(
        run={"recipe": "distillspec", "commit": "0123abc", "versions": {"torch": "2.11"}},
        target={"name": "toy", "fingerprint": "f1", "num_parameters": 4_600_000},
        drafter={"name": "two layers", "num_parameters": 700_000},
        results=results,
        comparisons=comparisons,
        series=series,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The example and its folder."""
    report, folder = example_report(), tmp_path_factory.mktemp("report")
    write_report(report, folder)
    return report, folder


def cells(markdown):
    return [line.split(" | ")[0].strip("| *") for line in markdown.splitlines() if "|" in line]


def test_rows_stand_in_the_fixed_order_in_all_three_files(written):
    report, folder = written
    assert sorted(path.name for path in folder.iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
    ]
    assert read_report(folder / "report.json") == report
    expected = [(t, name) for t in (0.0, 1.0) for name in DRAFTERS]
    assert [(row.temperature, row.drafter) for row in report["results"]] == expected
    markdown, page = ((folder / f"report.{kind}").read_text() for kind in ("md", "html"))
    names = [name for name in cells(markdown) if name in DRAFTERS]
    assert names == [name for _, name in expected]
    assert [n for n in re.findall(r"<tr[^>]*><td>(\w+)</td>", page) if n in DRAFTERS] == names
    for row in report["results"]:
        shown = f"{row.tokens_per_round:.2f}"
        assert shown in markdown
        assert shown in page


def test_html_is_one_file_with_its_plots(written):
    page = (written[1] / "report.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 13  # six per temperature and the series
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(h|<script|<link""", page)
    used, known = re.findall(r"var\((--[\w-]+)\)", page), re.findall(r"(--[\w-]+):", page)
    assert set(used) <= set(known)  # which follow light and dark, as do the lines
    assert page.count('style="color:var(--after)"') > 12
    assert "nan" not in page.lower().replace("financ", "")


def test_everything_a_user_names_is_escaped(tmp_path):
    report = example_report()
    report["run"]["recipe"] = report["target"]["name"] = report["run"][NASTY] = NASTY
    report["results"][4].note = NASTY
    for row in report["results"]:
        row.prompts["name"] = NASTY
        if row.drafter == "prompt_lookup":
            row.drafter = NASTY
        if row.by_domain:
            row.by_domain["domains"][NASTY] = row.by_domain["domains"].pop("code")
    report["comparisons"][0]["b"] = NASTY
    for point in report["series"]:
        point["name"] = NASTY
    write_report(report, tmp_path)
    for kind in ("md", "html"):
        text = (tmp_path / f"report.{kind}").read_text()
        assert "<script" not in text
        assert "&lt;script&gt;" in text
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if "alert" in line]
    assert all("\\|" in line for line in rows if line.startswith("|"))


def test_same_report_gives_the_same_bytes(written, tmp_path):
    write_report(example_report(), tmp_path)
    for kind in ("json", "md", "html"):
        a, b = ((folder / f"report.{kind}").read_bytes() for folder in (written[1], tmp_path))
        assert a == b


def test_a_stream_of_requests_is_told_from_held_out_text(tmp_path):
    report = example_report()
    write_report(report, tmp_path)
    served = "each was trained on"
    assert served not in (tmp_path / "report.html").read_text()
    report["series"][2]["alpha_prequential"] = 0.5
    write_report(report, tmp_path)
    assert served in (tmp_path / "report.html").read_text()


def test_headline_names_gain_interval_and_speed():
    text = headline(example_report())
    assert text.startswith("At temperature 0, the trained drafter gives 2.91 [2.")
    assert re.search(r"; \+0\.\d\d \[\+0\.\d\d, \+0\.\d\d\] over control \(2\.\d\d\)", text)
    assert "times as fast as plain decoding here" in text
    assert "At temperature 1" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["results"][0].pop("alpha_ci95"), "results\\[0\\] lacks alpha_ci95"),
        (lambda r: r["results"][1].update(alpha=float("nan")), r"results\[1\].alpha must be finit"),
        (lambda r: r["results"][1].update(alpha="0.7"), r"alpha must be a valid number, got '0.7'"),
        (lambda r: r["results"][1].update(alpha=True), r"alpha must be a valid number, got True"),
        (lambda r: r["results"][0].pop("K"), "lacks K or tree"),
        (lambda r: r["results"][0].update(prompts="toy"), r"\.prompts must be .*, got 'toy'"),
        (lambda r: r["results"][0].update(prompts={"name": "toy"}), "name and hash"),
        (lambda r: r["results"][0].update(role="winner"), "role must be one of plain, "),
        (lambda r: r["results"][0].update(bonus_counted=False), "bonus token"),
        (lambda r: r["results"][0].update(counting="accepted"), "emitted_per_target_forward"),
        (lambda r: r["results"][0].update(lossless=None), "lossless must be a valid boolean"),
        (lambda r: r["results"][1].update(tree=["0"]), r"results\[1\].tree must be a valid string"),
        (lambda r: r["results"][1].update(nodes="25"), r"results\[1\].nodes must be a valid integ"),
        (lambda r: r["comparisons"][0].pop("b"), r"comparisons\[0\] lacks b"),
        (lambda r: r["run"].update(seed=np.int64(3)), "run.seed is not JSON, got int64"),
        (lambda r: r.update(series=None), "series must be a list"),
        (lambda r: r.update(schema=2), "schema must be 1, got 2"),
    ],
)
def test_incomplete_and_unreadable_content_is_refused(change, message):
    content = copy.deepcopy(as_json(example_report()))
    change(content)
    with pytest.raises(UserError, match=message):
        parsed(content, "it")


def test_what_could_not_be_read_is_not_written(tmp_path):
    report = example_report()
    report["results"][1].alpha = float("nan")
    with pytest.raises(UserError, match=r"results\[1\].alpha must be finite"):
        write_report(report, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_row_comes_back_as_it_was_and_keys_of_later_versions_are_left_out(tmp_path):
    report = example_report()
    report["results"][0].nodes = 4
    content = as_json(report)
    assert set(content["results"][0]) == {field.name for field in fields(Row)}
    content["results"] = [row | {"of_a_later_version": 1} for row in content["results"]]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    assert read_report(path) == report


def test_rows_without_a_number_are_shown_with_a_dash(tmp_path):
    empty = summarise([PromptCounters("a", "d", 2), PromptCounters("b", "d", 2)], draws=10)
    row = replace(result_row("after", measured(0.5, K=2)), **vars(empty))
    row = replace(row, cost_ratio=None, modelled_speedup=None, mbsu=None, by_domain=None)
    report = build_report({}, {}, {}, [row], [], [])
    write_report(report, tmp_path)
    assert (
        "| **after** | – | – | – | K 2 | – | – | – | 2 | – |"
        in (tmp_path / "report.md").read_text()
    )
    write_report(build_report({}, {}, {}, [], [], []), tmp_path)
    assert "No drafter was measured." in (tmp_path / "report.html").read_text()


def test_notes_tell_lossy_rows_overheads_and_differing_prompts():
    row = result_row("after", measured(0.7), lossless=False, note="warm caches")
    row = replace(row, speedup=1.0, modelled_speedup=1.5, identical_to_plain=0.75)
    row.num_compared = 4
    row.differing_prompts = [
        {"prompt_hash": "abcdef0123456789", "position": 7, "logit_gap": 2e-5, "near_tie": True}
    ]
    text = markdown_table([row])
    for words in (
        "4 prompts, 1 differ: abcdef012345 at token 7 (gap 2e-05)",
        "lossy",
        "more than 15 % below",
        "warm caches",
    ):
        assert words in text


def test_model_card_table_holds_the_main_rows_only():
    report = example_report()
    text = markdown_table(report["results"])
    assert [name for name in cells(text) if name in DRAFTERS] == list(DRAFTERS) * 2
    assert "What the numbers mean" not in text


def test_plain_row_is_complete_and_counts_one_token_per_forward():
    row = result_row("after", measured(0.7))
    plain = plain_row(row)
    assert plain.tokens_per_round == 1.0
    assert plain.num_rounds == round(sum(c.emitted for c in measured(0.7)))
    build_report({}, {}, {}, [copy.deepcopy(row), plain], [], [])


def test_damaged_and_missing_reports_are_user_errors(tmp_path):
    path = tmp_path / "report.json"
    with pytest.raises(UserError, match="does not exist"):
        read_report(path)
    path.write_text(json.dumps(as_json(example_report()))[:-10])
    with pytest.raises(UserError, match="is damaged"):
        read_report(path)
    path.write_text("[]")
    with pytest.raises(UserError, match="not a report"):
        read_report(path)
    path.write_text('{"a": ' + "[" * 900 + "]" * 900 + "}")
    with pytest.raises(UserError, match=r"is damaged, not JSON \(it is nested too deep"):
        read_report(path)
    path.write_text("[" * 9999)
    with pytest.raises(UserError, match="is damaged"):
        read_report(path)
    with pytest.raises(UserError, match=r"report .* is a pipe: name a regular file"):
        read_report(pipe(tmp_path / "pipe"))
    path.write_text(
        json.dumps(as_json(example_report())).replace('"top_p": 1.0', '"top_p": NaN', 1)
    )
    with pytest.raises(UserError, match="top_p must be finite"):
        read_report(path)


def test_unwritable_folder_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        write_report(build_report({}, {}, {}, [], [], []), tmp_path / "file")
