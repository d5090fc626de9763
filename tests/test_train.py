"""The main command, end to end on tiny random models: what a run leaves behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from eval.report.readings import NUM_PROMPTS
from eval.report.schema import read_report
from eval.report.terminal import summary
from phases import pipeline
from phases.generate import choose_prompts
from recipes import base
from scripts import generate
from tests.helpers.commands import (
    TWO,
    command,
    finish,
    only,
    own_words,
    read_jsonl,
    start,
    stored_traces,
    training_stores,
    write_jsonl,
)
from tests.helpers.heads import eagle3_word
from tests.helpers.tiny import ARCHITECTURES, EOS, save_tiny
from trainer.errors import UserError

CAUSAL_LM = ("distillspec", "fastdraft", "osd", "specdecpp")  # what these train drafts as one
BLOCKS = ("block_head", "dflash", "domino", "dspark")  # their own K is another one
NO_ENGINE = ("hydra", "hydrapp", "domino")
ROWS = {"plain", "untrained", "before", "control", "after", "prompt_lookup", "target"}
K = 4
CASES = [(name, {}) for name in ARCHITECTURES] + [("llama", {"sharded": True})]


def run(*words):
    assert train.main(list(words)) == 0


def check_run_folder(folder, recipe="distillspec", temperatures=(0.0,), control=False):
    """All that is promised of a run folder; returns the report."""
    head = recipe not in CAUSAL_LM
    stages = {"pretrained", "continued"} if recipe == "fastdraft" else set()
    names = (
        "config.yaml run.json metrics.jsonl drafter/drafter.json rounds.jsonl report.json report.md"
    )
    places = {**dict.fromkeys(CAUSAL_LM, "transformers"), "medusa2": "vllm/drafter"}
    exported = f"export/{places.get(recipe, 'vllm')}/model.safetensors"
    own = () if recipe in NO_ENGINE else (exported,)
    for name in (*names.split(), "report.html", *own):
        assert (folder / name).stat().st_size, name
    assert not [p for p in folder.rglob("*") if p.name.endswith((".part", ".tmp"))]
    for row in read_jsonl(folder / "metrics.jsonl"):
        assert {"stage", "step"} < row.keys()
        assert "eval" in row or {"loss", "num_tokens", "lr", "grad_norm"} < row.keys()
    report = json.loads((folder / "report.json").read_text())
    check_readings(report, read_jsonl(folder / "rounds.jsonl"))
    assert {r["temperature"] for r in report["results"]} == {*temperatures}
    for temperature in temperatures:
        rows = [r for r in report["results"] if r["temperature"] == temperature]
        reference = {"control"} if control else {"offline"} if recipe == "osd" else set()
        assert {r["drafter"] for r in rows} == ROWS - {"control"} | reference | stages
        (target,) = [r for r in rows if r["drafter"] == "target"]
        assert target["alpha"] == pytest.approx(1, abs=1e-6)
        assert target["alpha_pos"] == pytest.approx([1] * K, abs=1e-6)
        if not target["truncated_rounds"]:
            assert target["tokens_per_round"] == pytest.approx(K + 1)
        decoded = [r for r in rows if r["measured_by"] == "decoding"]
        if recipe == "specdecpp":  # its report decodes other policies too
            decoded = [r for r in decoded if (r["policy"], r["K"]) == ("fixed", K)]
        assert [r["drafter"] for r in decoded] == ["after"] * (1 + head)  # the chain, the tree
        if temperature == 0:
            assert all(one["identical_to_plain"] == 1 for one in decoded)
            after = [r for r in rows if r["drafter"] == "after" and r["measured_by"] == "offline"]
            assert [one["replay_differs_from_decoding"] for one in after] == [0] * (1 + head)
            assert (after[-1]["tree"] is not None) == head
    return report


def check_readings(report, rounds):
    """The answers that are shown are those that were decoded, round by round."""
    shown = {one["prompt_hash"]: one for one in report["readings"]}
    assert len(shown) == min(NUM_PROMPTS, report["results"][0]["num_prompts"])
    assert {r["prompt_hash"] for r in rounds if "ids" in r} <= shown.keys()
    assert not [r for r in rounds if "ids" not in r and r["prompt_hash"] in shown
                and r.get("policy") is None]  # fmt: skip
    for tag, one in shown.items():
        for answer in one["answers"]:
            tree = None if answer["draft"].startswith("K ") else answer["draft"]
            own = [
                r for r in rounds
                if (r["prompt_hash"], r["temperature"], r.get("tree")) ==
                (tag, answer["temperature"], tree) and r.get("policy") is None
            ]  # fmt: skip
            assert answer["num_rounds"] == len(own) == len(answer["rounds"])
            assert answer["num_tokens"] == 1 + sum(r["emitted"] for r in own)
            for told, r in zip(answer["rounds"], own, strict=True):
                ids = r["ids"]
                assert told["accepted"] == r["accepted"]
                assert len(told["tokens"]) == len(ids["emitted"]) == r["emitted"]
                assert told["drafted"] == len(ids["drafted"]) == r["submitted"]
                path = range(r["accepted"]) if tree is None else ids["path"][: r["accepted"]]
                assert [ids["drafted"][i] for i in path] == ids["emitted"][: r["accepted"]]
                rejected = [t for branch in told["rejected"] for t in branch["tokens"]]
                assert bool(rejected) or r["first_reject_pos"] is None


def check_export(folder, target_folder):
    """The exported drafter works in transformers' own assisted generation and changes nothing."""
    target = AutoModelForCausalLM.from_pretrained(target_folder).eval()
    drafter = AutoModelForCausalLM.from_pretrained(folder / "export" / "transformers").eval()
    ids = AutoTokenizer.from_pretrained(folder / "export" / "transformers")(
        "What is 2 times 3? ", return_tensors="pt"
    ).input_ids
    options = {"do_sample": False, "max_new_tokens": 12, "attention_mask": torch.ones_like(ids)}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[n + "-sharded" * bool(o) for n, o in CASES]
)
def test_every_architecture_trains_reports_and_exports(
    tmp_path, tiny_folder, name, options, capsys
):
    target = tiny_folder(name, **options)
    if options:
        assert len(list(target.glob("*.safetensors"))) > 1
    run(*command(tmp_path, target))
    lines = capsys.readouterr().err.splitlines()
    for phase in ("training traces", "evaluation traces T=0", "report"):  # not on a terminal here
        (line,) = [line for line in lines if line.startswith(f"{phase}: ") and " in 0:" in line]
        assert re.fullmatch(rf"{phase}: [\d,]+ tokens in 0:0\d:\d\d, [\d,]+ tokens/s", line)
    check_export(tmp_path / "run", target)
    check_run_folder(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", base.names())
def test_every_recipe_trains_two_steps_on_eight_layers(tmp_path, tiny_folder, recipe):
    given = [f"recipe={recipe}", "eval.temperatures=[0, 1]", "method.control=true"]
    target = tiny_folder("llama", layers=8)
    given += [eagle3_word(tmp_path, target)] if recipe == "gto" else []
    words = command(tmp_path, target, *given)
    if recipe != "distillspec":
        words = [word for word in words if not word.startswith("method.")]
    words += own_words(recipe, tmp_path)
    if recipe in (*BLOCKS, "fastdraft"):
        words += [f"eval.K={K}"]
    if recipe == "gto":
        words += ["trainer.lr_warmup_steps=0"]
    run(*words)
    check_run_folder(tmp_path / "run", recipe, (0.0, 1.0), control=recipe == "distillspec")


@pytest.mark.slow
def test_the_same_command_again_reports_and_changes_nothing(
    tmp_path, tiny_folder, capsys, monkeypatch
):
    words = command(tmp_path, tiny_folder("llama"))
    run(*words)
    first = capsys.readouterr().out
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    for name in ("__init__", "__call__"):  # no network is built, none computes
        monkeypatch.delattr(torch.nn.Module, name)
    run(*words)
    shown = summary(read_report(tmp_path / "run" / "report.json"))
    assert capsys.readouterr().out.lstrip().startswith(shown)
    assert shown in first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == files


@pytest.mark.slow
def test_a_report_cut_short_by_a_kill_is_written_again(begun):
    folder, words = begun
    (folder / "report.json").unlink()  # the last file of a run
    before = (folder / "metrics.jsonl").read_text()
    run(*words)
    check_run_folder(folder)
    assert (folder / "metrics.jsonl").read_text() == before


def test_the_default_run_folder_is_named_by_the_configuration(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [w for w in command(tmp_path, tiny_folder("llama")) if not w.startswith("run.dir=")]
    config, _ = pipeline.resolve(words)
    run(*words)
    assert (tmp_path / "runs" / f"distillspec-{config.hash()}" / "report.json").exists()


@pytest.mark.slow
def test_config_yaml_runs_the_same_thing_again(tmp_path, tiny_folder):
    words = command(tmp_path, tiny_folder("llama"))
    run(*words)
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    again = [f"recipe={stored.pop('recipe')}"]
    stored["run"]["dir"] = str(tmp_path / "again")
    for section, values in stored.items():
        again += [f"{section}.{key}={json.dumps(value)}" for key, value in values.items()]
    run(*again)
    losses = [
        [row.get("loss") for row in read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "again")
    ]
    assert losses[0] == losses[1]


def test_one_stage_alone_is_trained_and_not_reported(tmp_path, tiny_folder):
    run(*command(tmp_path, tiny_folder("llama"), "method.control=true", "run.stage=control"))
    assert {r["stage"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")} == {"control"}
    assert not (tmp_path / "run" / "report.json").exists()


def test_without_control_the_table_has_no_such_row(finished_run):
    report = json.loads((finished_run[0] / "run" / "report.json").read_text())
    assert {r["drafter"] for r in report["results"]} == ROWS - {"control"}
    assert {(c["a"], c["b"]) for c in report["comparisons"]} == {("after", "before")}


@pytest.mark.slow
def test_a_drafter_starts_where_model_drafter_says(tmp_path, tiny_folder):
    target, drafter = tiny_folder("llama"), tiny_folder("llama", seed=1, layers=1, width=16)
    words = (f"model.drafter={drafter}", "trainer.lr=1e-12", "eval.temperatures=0")
    run(*command(tmp_path, target, *words))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "drafter")
    for name, weight in AutoModelForCausalLM.from_pretrained(drafter).named_parameters():
        torch.testing.assert_close(trained.get_parameter(name).detach(), weight.detach())


@pytest.mark.slow
def test_evaluation_prompts_are_held_out_by_hash_where_none_are_named(tmp_path, tiny_folder):
    rows = [{"prompt": f"Number {i}: "} for i in range(40)]
    prompts = write_jsonl(tmp_path / "many.jsonl", rows)
    words = (f"data.prompts={prompts}", "eval.prompts=null", "data.num_prompts=30")
    run(*command(tmp_path, tiny_folder("llama"), *words, "data.eval_share=0.3"))
    (store,) = training_stores(tmp_path / "cache")
    report = check_run_folder(tmp_path / "run")
    trained = {t.prompt_hash for t in stored_traces(store)}
    measured = {r["prompt_hash"] for r in read_jsonl(tmp_path / "run" / "rounds.jsonl")}
    assert trained
    assert measured
    assert not trained & measured
    assert report["results"][0]["prompts"]["name"] == "held out from many.jsonl"


def test_a_turn_that_is_held_out_is_context_and_not_trained_on(
    tmp_path, tiny_folder, monkeypatch, capsys
):
    def chat(*users):
        return {"messages": [{"role": "user", "content": text} for text in users]}

    rows = [chat("hi", f"Number {i}") for i in range(4)]
    rows += [chat("hi"), *(chat(f"{i}?") for i in range(6))]
    held_out = write_jsonl(tmp_path / "own.jsonl", [chat("hi", "other"), chat("new")])
    prompts = write_jsonl(tmp_path / "chats.jsonl", rows)
    seen = []

    def stop(run, recipe, start, text, *further):
        seen.extend(text.traces)
        raise UserError("enough")

    monkeypatch.setattr("phases.train.train_stages", stop)
    given = [f"data.prompts={prompts}", f"eval.prompts={held_out}", "data.num_prompts=99"]
    words = command(tmp_path, tiny_folder("llama", chat_template=True), *given)
    assert train.main(words) == 2
    said = "5 of 15 training turns have a context that is held out as well: 'hi' (5), first in"
    assert said in capsys.readouterr().out
    (store,) = training_stores(tmp_path / "cache")
    assert Counter(trace.turn for trace in stored_traces(store)) == {0: 7, 1: 4}
    assert Counter(trace.turn for trace in seen) == {0: 6, 1: 4}
    # the turns that are left out are in none of the others' contexts alone
    assert len({tuple(trace.prompt_ids) for trace in seen}) == 10
    assert generate.main(only(words, "data", "model.target", "eval.prompts")) == 0
    assert training_stores(tmp_path / "cache") == [store]


def test_as_many_prompts_are_taken_as_are_asked_for(tmp_path, capsys):
    prompts = write_jsonl(tmp_path / "x.jsonl", [{"prompt": f"Number {i}: "} for i in range(400)])

    def chosen(*words):
        given = command(tmp_path, "x", f"data.prompts={prompts}", "eval.prompts=null", *words)
        return choose_prompts(pipeline.resolve(given)[0])

    for share in (0.1, 0.5):
        counts = (f"data.eval_share={share}", "data.num_prompts=100", "eval.num_prompts=30")
        trained, held_out = chosen(*counts)
        assert (len(trained), len(held_out)) == (100, 30)
        assert not {p.hash for p in trained} & {p.hash for p in held_out}
        places = [int(p.text.split()[1][:-1]) for p in trained]
        assert min(places) < 50  # not the file's first ones, or last
        assert max(places) > 350
    assert "data.eval_share=0.5 holds out" in capsys.readouterr().out


def test_each_side_reads_the_columns_that_are_named_for_it(tmp_path, capsys):
    rows = [{"context": f"c{i}", "question": f"q{i}", "answer": f"a{i}"} for i in range(4)]
    prompts = write_jsonl(tmp_path / "x.jsonl", rows)
    held_out = write_jsonl(tmp_path / "y.jsonl", [*rows, {"question": 7}])
    names = ["data.prompts_column=[context,question]", "eval.prompts_column=answer"]
    words = [f"data.prompts={prompts}", f"eval.prompts={held_out}", *names]
    with pytest.raises(UserError) as caught:
        choose_prompts(pipeline.resolve(command(tmp_path, "x", *words))[0])
    assert caught.value.key == "eval.prompts"  # of which no row is left out
    config = pipeline.resolve(command(tmp_path, "x", *words, "data.bad_rows=drop"))[0]
    unread = {}
    trained, measured = choose_prompts(config, unread)
    assert trained[0].text == "c0\n\nq0"
    assert measured[0].text == "a0"
    assert unread["eval.prompts"]["left_out"] == 1


@pytest.mark.slow
def test_a_run_that_is_being_worked_on_is_left_alone(begun, capsys):
    folder, words = begun
    (folder / "report.json").unlink()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; file = open(sys.argv[1], 'a'); "
         "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()",
         folder / ".lock"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout.readline() == b"held\n"
    before = sorted(folder.rglob("*"))
    assert train.main(words) == 2
    assert "is being worked on by another process" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before
    holder.communicate()
    run(*words)


def test_conversations_train_a_chat_target(tmp_path):
    ask = [{"role": "user", "content": f"Hello {i}"} for i in range(4)]
    more = {"role": "user", "content": "And now?"}
    between = {"role": "assistant", "content": "not the target's own"}
    prompts = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [a, between, more]} for a in ask])
    held_out = write_jsonl(tmp_path / "held.jsonl", [{"prompt": "Plain text is one user turn"}])
    words = (f"data.prompts={prompts}", f"eval.prompts={held_out}", "data.system_prompt=Be brief.",
             "data.max_new_tokens=64")  # fmt: skip
    ends = [EOS, *range(90, 100)]  # nothing stands behind an answer that is cut
    target = save_tiny(tmp_path / "target", "llama", chat_template=True, eos_token_id=ends)
    run(*command(tmp_path, target, *words))
    check_run_folder(tmp_path / "run")
    (store,) = training_stores(tmp_path / "cache")
    traces = stored_traces(store)
    turns = {i: [t.conversation_id for t in traces if t.turn == i] for i in (0, 1)}
    special = {1, 2, 3}  # which no template can write back
    whole = [t for t in traces if t.finish_reason == "eos" and not special & {*t.response_ids}]
    ended = [t.conversation_id for t in whole if t.turn == 0]
    assert len(turns[0]) == 4
    assert sorted(turns[1]) == sorted(ended) != []


def test_no_argument_lists_the_recipes(capsys):
    assert train.main([]) == 0
    out = capsys.readouterr().out
    for name in base.names():
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {name} ")]
        assert len(line) > 40


def test_dry_run_prints_sizes_and_writes_nothing(tmp_path, tiny_folder, capsys):
    words = command(tmp_path, tiny_folder("llama"), "dry_run=true")
    files = sorted(tmp_path.rglob("*"))
    run(*words)
    out = capsys.readouterr().out
    assert "max_new_tokens: 8" in out
    assert f"run folder: {tmp_path / 'run'}" in out
    assert "8 for training, 4 for evaluation" in out
    assert "traces: 8 rows, about 0.0 MB" in out
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.slow
def test_accelerate_launch_runs_the_main_command(tmp_path, tiny_folder):
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "train.py")
    code, out, err = finish(start(*launch, *command(tmp_path, tiny_folder("qwen3")), fresh=True))
    assert code == 0, err
    assert out.strip().endswith(str(tmp_path / "run" / "report.html"))
    check_run_folder(tmp_path / "run")
    check_export(tmp_path / "run", tiny_folder("qwen3"))


@pytest.mark.slow
def test_two_processes_train_and_report(tmp_path, tiny_folder):
    words = command(tmp_path, tiny_folder("llama"), "trainer.batch_size=2", "method.control=true")
    code, _, err = finish(start(*TWO, "train.py", *words))
    assert code == 0, err
    check_run_folder(tmp_path / "run", control=True)
    # the same prompts in the same global batches: the hard labels of the control see no difference
    own = ("method.control=true", "run.stage=control", f"run.dir={tmp_path / 'alone'}")
    run(*command(tmp_path, tiny_folder("llama"), *own))
    losses = [
        [r["loss"] for r in read_jsonl(tmp_path / name / "metrics.jsonl")
         if r["stage"] == "control" and "loss" in r]
        for name in ("run", "alone")
    ]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
