"""The leaderboard through its command line."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eval.report.render import to_markdown
from eval.report.rows import role_of
from eval.report.schema import as_json
from eval.row import COUNTING, Row, row_with
from scripts.compare import leaderboard, main, parse, run_names
from trainer.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def a_report(tokens_per_round, *, fingerprint="f1", **changes):
    row = row_with(
        drafter=changes.get("drafter", "after"),
        prompts={"name": "toy", "hash": "h1"},
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        verifier="token",
        policy="fixed",
        K=4,
        counting=COUNTING,
        bonus_counted=True,
        lossless=True,
        measured_by="decoding",
        num_prompts=96,
        num_rounds=1000,
        tokens_per_round=tokens_per_round,
        tokens_per_round_ci95=[tokens_per_round - 0.1, tokens_per_round + 0.1],
        alpha_pos=[],
    )
    row = replace(row, role=role_of(row.drafter), **changes)
    return {
        "schema": 1,
        "run": {},
        "target": {"name": "toy", "fingerprint": fingerprint},
        "drafter": {},
        "results": [row],
        "comparisons": [],
        "series": [],
    }


def write(folder, name, report):
    (folder / name).mkdir()
    path = folder / name / "report.json"
    path.write_text(report if isinstance(report, str) else json.dumps(as_json(report)))
    return str(path)


def run(folder, *arguments):
    paths = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scripts.compare", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def tables(markdown):
    """First cells of each table's rows."""
    found = []
    for line in markdown.splitlines():
        if line.startswith("| ---"):
            found.append([])
        elif line.startswith("| ") and "tokens per round" not in line:
            found[-1].append(line.split(" | ")[0].strip("| "))
    return found


def test_comparable_reports_share_one_sorted_table(tmp_path):
    paths = [write(tmp_path, n, a_report(t)) for n, t in (("a", 2.1), ("b", 2.9), ("<c>", 2.5))]
    done = run(tmp_path, *paths)
    assert done.returncode == 0, done.stderr
    assert tables(done.stdout) == [["b: after", "&lt;c&gt;: after", "a: after"]]
    assert "Warning" not in done.stdout
    out = tmp_path / "runs" / "leaderboard"
    assert (out / "leaderboard.md").read_text().strip() == done.stdout.strip()
    page = (out / "leaderboard.html").read_text()
    assert "2.90 <small>[2.80, 3.00]</small>" in page
    assert "&lt;c&gt;: after" in page


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"verifier": "typical"}, "verifier"),
        ({"prompts": {"name": "toy", "hash": "h2"}}, "prompts hash"),
        ({"measured_by": "vllm"}, "measured by"),
        ({"num_prompts": 12}, "number of prompts"),
        ({"fingerprint": "f2"}, "target"),
        ({"fingerprint": None}, "target"),
    ],
)
def test_rows_measured_otherwise_stand_apart_with_a_warning(tmp_path, changes, named):
    paths = [write(tmp_path, "a", a_report(2.1)), write(tmp_path, "b", a_report(2.9, **changes))]
    done = run(tmp_path, *paths, "script.out=board")
    assert done.returncode == 0, done.stderr
    assert sorted(tables(done.stdout)) == [["a: after"], ["b: after"]]
    warning = next(line for line in done.stdout.splitlines() if line.startswith("Warning"))
    assert f"differ in {named}." in warning
    assert (tmp_path / "board" / "leaderboard.html").exists()


def test_a_target_that_was_trained_with_its_drafter_is_another_target():
    changed = a_report(2.9, target_changed=True)
    changed["results"] += a_report(4.5, drafter="target")["results"]
    reports = [("a", a_report(2.1)), ("b", changed), ("c", a_report(2.8, target_changed=True))]
    text = to_markdown(leaderboard(reports))
    assert sorted(tables(text)) == [["b: after"], ["c: after"], ["target", "a: after"]]
    assert "because the rows differ in target." in text
    for name in ("toy", "toy, trained with after of b", "toy, trained with after of c"):
        assert f"## {name}, prompts toy\n" in text


def test_chains_and_trees_share_a_table_with_what_they_cost():
    tree = {"tree": "eagle, 25 nodes, depth 5", "K": 5, "nodes": 25,
            "modelled_speedup_at": {"0.02": 2.91, "0.05": 2.56, "0.1": 2.13}}  # fmt: skip
    reports = [
        ("chain", a_report(2.1)),
        ("long", a_report(2.4, K=8)),
        ("tree", a_report(3.2, **tree)),
    ]
    reports[2][1]["drafter"] = {"parameters": 1_234_567}
    reports[2][1]["results"].append(a_report(4.8, drafter="target")["results"][0])
    text = to_markdown(leaderboard(reports))
    assert tables(text) == [["target", "tree: after", "long: after", "chain: after"]]
    assert (
        "| tree: after | 3.20 [3.10, 3.30] | – | 2.56 | – "
        "| eagle, 25 nodes, depth 5 | 25 | 1,234,567 | yes | trained |"
    ) in text
    assert "| long: after | 2.40 [2.30, 2.50] | – | – | – | K 8 | 8 | – | yes | trained |" in text
    assert "| target | 4.80 [4.70, 4.90] | – | – | – | K 4 | 4 | – | yes | target |" in text
    assert "verify different numbers of nodes a round (4, 8, 25)" in text
    assert "tables, because" not in text


def of_run(tokens_per_round, command, **changes):
    report = a_report(tokens_per_round, **changes)
    report["run"] = {"recipe": "eagle3", "command": f"python train.py recipe=eagle3 {command}"}
    return report


def test_temperatures_are_columns_and_a_drafter_that_was_decoded_too_is_one_row():
    report = a_report(2.1, measured_by="offline", speedup=1.4)
    for changes in ({"temperature": 1.0, "alpha": 0.512}, {"policy": "product:0.3"}):
        report["results"] += a_report(1.7, measured_by="offline", **changes)["results"]
    report["results"] += a_report(2.1)["results"]  # decoded
    report["results"] += a_report(1.6, temperature=1.0, verifier="multi_round")["results"]
    text = to_markdown(leaderboard([("a", report)]))
    assert tables(text) == [["a: after"] * 3]
    first, second, third = (line for line in text.splitlines() if line.startswith("| a: after"))
    assert first.startswith(
        "| a: after | 2.10 [2.00, 2.20] | 1.40 | – | – | 1.70 [1.60, 1.80] | – | – | 0.512 | K 4 |"
    )
    assert second.startswith("| a: after | 1.70 [1.60, 1.80] | – | – | – | – |")
    assert "| K 4, product:0.3 |" in second
    assert "| 1.60 [1.50, 1.70] |" in third


def test_the_seeds_of_a_recipe_are_one_row_with_their_range():
    reports = [
        (f"s{seed}", of_run(t, f"run.seed={seed} run.dir=x/{seed} trainer.lr=1e-3 method.steps=3"))
        for seed, t in ((0, 1.7), (1, 1.9), (2, 1.8))
    ]
    for _, report in reports:
        report["results"] += a_report(1.3, drafter="prompt_lookup")["results"]
    other = of_run(2.0, "trainer.lr=1e-3 trainer.optimizer=muon method.steps=3", alpha=0.6)
    text = to_markdown(leaderboard([*reports, ("muon", other)]))
    assert tables(text) == [
        ["eagle3 trainer.optimizer=muon: after", "eagle3: after", "prompt_lookup"]
    ]
    assert "| eagle3: after | 1.80 [1.70 to 1.90, n = 3] | – |" in text
    assert "| prompt_lookup | 1.30 [1.20, 1.40] | – |" in text
    assert "Of several seeds: their mean" in text
    alone = to_markdown(leaderboard([reports[0], ("muon", other)]))
    assert "| eagle3: after | 1.70 [1.60, 1.80] | – |" in alone
    assert "Of several seeds" not in alone


def test_runs_of_the_same_words_keep_the_names_of_their_folders():
    reports = [(name, of_run(2.0, f"run.dir={name} run.seed=4")) for name in ("a", "b")]
    text = to_markdown(leaderboard([*reports, ("c", of_run(2.2, "run.seed=5"))]))
    assert tables(text) == [["eagle3: after", "a: after", "b: after"]]


def test_what_belongs_to_no_run_has_one_row():
    reports = []
    for name, tokens in (("a", 2.1), ("b", 2.9)):
        report = a_report(tokens)
        for drafter in ("target", "prompt_lookup"):
            report["results"] += a_report(4.5, drafter=drafter)["results"]
        reports.append((name, report))
    deeper = a_report(5.5, drafter="target", K=5)
    shown = to_markdown(leaderboard([*reports, ("c", deeper)]))
    assert tables(shown) == [["target", "target", "prompt_lookup", "b: after", "a: after"]]
    shown = to_markdown(leaderboard(reports, ["after", "target"]))
    assert tables(shown) == [["target", "b: after", "a: after"]]
    with pytest.raises(UserError, match=r"script\.rows: no report has a row 'aftr'; did you mean"):
        leaderboard(reports, ["aftr"])


def test_rows_are_chosen_on_the_command_line(tmp_path):
    path = write(tmp_path, "a", a_report(2.1))
    assert parse([path, "script.rows=[after, target]"])[2] == ["after", "target"]
    assert run(tmp_path, path, "script.rows=after").returncode == 0
    assert "no report has a row" in run(tmp_path, path, "script.rows=before").stderr


def test_rows_of_equal_verification_need_no_warning():
    assert "Warning" not in to_markdown(leaderboard([("a", a_report(2.1)), ("b", a_report(2.2))]))


def test_another_counting_is_refused_with_the_schema(tmp_path):
    path = write(tmp_path, "a", a_report(2.1, counting="accepted_only"))
    assert_refused(tmp_path, path, "emitted_per_target_forward")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "damaged"),
        ('{"schema": 7}', "schema must be 1, got 7"),
        ("[]", "not a report"),
        ('{"schema": 1, "run": {}}', "target must be a dict"),
    ],
)
def test_unusable_reports_exit_2_with_one_line(tmp_path, content, message):
    path = write(tmp_path, "a", content) if content else "runs/*/report.json"
    assert_refused(tmp_path, path, message)


def assert_refused(folder, path, message):
    done = run(folder, path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()


def test_unknown_keys_are_refused_with_a_suggestion():
    with pytest.raises(UserError, match=r"unknown key 'script.ou'; did you mean 'script.out'"):
        parse(["a/report.json", "script.ou=x"])
    with pytest.raises(UserError, match="at least one report"):
        parse(["script.out=x"])
    paths, out, *_ = parse(["runs/lr=1/report.json", "runs/lr=1/report.json", "script.out=x"])
    assert (paths, out) == ([Path("runs/lr=1/report.json")], Path("x"))


def test_places_of_the_leaderboard_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    for words, says in (
        (["script.out=a", "script.out=b"], "script.out is given twice"),
        ([f"script.out={tmp_path}/file"], "is a file: choose another path"),
        (["script.out=~/lb"], "a shell has not replaced the ~"),
    ):
        with pytest.raises(UserError, match=says):
            parse(["a/report.json", *words])
    assert parse(["a" * 300])[0] == [Path("a" * 300)]  # which reading it names


def test_run_folders_of_the_same_name_keep_their_paths():
    assert run_names([Path("x/a/report.json"), Path("y/b/report.json")]) == ["a", "b"]
    assert run_names([Path("x/a/report.json"), Path("y/a/report.json")]) == ["x/a", "y/a"]


def test_reports_without_results_say_so():
    empty = a_report(1.0) | {"results": []}
    assert "no results" in leaderboard([("a", empty)])[-1].text


def test_no_arguments_explain_the_command(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0
    assert "python -m scripts.compare runs/*/report.json" in done.stdout


def test_all_rows_are_written_as_csv(tmp_path, capsys):
    one = a_report(2.5)
    other = a_report(1.5, drafter="before", alpha_pos=[0.5, 0.25])
    one["results"] += other["results"]
    folder = tmp_path / "runs"
    folder.mkdir()
    paths = [write(folder, "a, b", one), write(folder, "c", other)]
    words = [f"script.out={tmp_path / 'out'}", f"script.csv={tmp_path / 'rows.csv'}"]
    main([*paths, *words])
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["target"], row["drafter"]) for row in rows] == [
        ("a, b", "toy", "after"), ("a, b", "toy", "before"), ("c", "toy", "before"),
    ]  # fmt: skip
    assert {*rows[0]} == {"run", "target", *(field.name for field in dataclasses.fields(Row))}
    assert [float(row["tokens_per_round"]) for row in rows] == [2.5, 1.5, 1.5]
    assert json.loads(rows[1]["alpha_pos"]) == [0.5, 0.25]
    assert rows[0]["tree"] == ""
    main([*paths, *words, "script.rows=after"])
    assert (tmp_path / "rows.csv").read_text().count("\n") == 2
    for given, says in (("", "must name a file"), (f"{tmp_path}", "is a folder; name a file")):
        with pytest.raises(UserError, match=rf"script\.csv.*{says}"):
            parse([*paths, f"script.csv={given}"])
