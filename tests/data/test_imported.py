"""Imported traces: what is written, what is refused, and how a run trains on them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import phases.train
import train
from data.imported import import_log, open_imported, prompts_of
from data.prompts import Rendered, user_turns
from data.render import render, with_answers
from data.traces import TraceStore
from scripts import evaluate, import_traces
from target.sampling import Sampling, warp
from tests.helpers.commands import ROOT, command, write_jsonl
from tests.helpers.tiny import EOS, generated, save_tiny
from tests.helpers.tiny import prompts_of as random_prompts
from trainer.errors import UserError

NUM = 12


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@torch.no_grad()
def drawn(target, prompt, count, generator):
    """`count` tokens at temperature 1, or fewer where an EOS ends them."""
    found = []
    while len(found) < count and EOS not in found:
        logits = target.outputs(torch.tensor([[*prompt, *found]])).logits[0, -1, :100]
        found.append(int(torch.multinomial(warp(logits, Sampling(1.0)), 1, generator=generator)))
    return found


@pytest.fixture(scope="module")
def rows(target):
    """Answers of the target: half of them greedy, half drawn, of two domains."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i, prompt in enumerate(random_prompts(range(5, 5 + NUM))):
        temperature = float(i % 2)
        if temperature:
            response = drawn(target, prompt, 8, generator)
        else:
            response = generated(target.model, prompt, 8, [EOS])
        found.append({
            "domain": "code" if i < 4 else "math", "temperature": temperature, "top_k": 0,
            "top_p": 1.0, "seed": 3, "prompt_ids": prompt, "response_ids": response,
            "finish_reason": "eos" if response[-1] == EOS else "length",
        })  # fmt: skip
    return found


@pytest.fixture
def log(tmp_path, rows):
    return write_jsonl(tmp_path / "log.jsonl", rows)


def test_rows_are_stored_as_they_were_logged(tmp_path, target, rows, log, capsys):
    folder = tmp_path / "store"
    traces = import_log(target, log, folder, ())
    assert traces == TraceStore.open(folder, None, create=False).load()
    for row, trace in zip(rows, traces, strict=True):
        for name, value in row.items():
            assert getattr(trace, name) == value, name
        assert trace.model_hash == target.fingerprint["weights"]
    assert len({trace.conversation_id for trace in traces}) == NUM
    said = capsys.readouterr().out
    assert "6 rows, 48 tokens: greedy tokens are the target's own: 100.00%" in said
    assert "nats beyond the target's entropy" in said
    # the second time nothing is read again
    assert import_log(target, log, folder, ()) == traces
    assert capsys.readouterr().out == f"{folder} holds these rows already\n"


def test_a_gzipped_log_and_one_domain(tmp_path, target, rows):
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    traces = import_log(target, path, tmp_path / "store", ["code"])
    assert [trace.prompt_ids for trace in traces] == [row["prompt_ids"] for row in rows[:4]]
    with pytest.raises(UserError, match="no row of the domain 'prose'; it has code, math"):
        import_log(target, path, tmp_path / "other", ["prose"])
    assert not (tmp_path / "other").exists()


def test_nothing_is_imported_into_a_folder_of_other_files(tmp_path, target, log):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"holds 'log\.jsonl' and is no trace store"):
        import_log(target, log, tmp_path, ())
    assert sorted(tmp_path.iterdir()) == before


def test_a_greedy_answer_counts_once_and_a_drawn_one_each_time(tmp_path, target, rows, capsys):
    log = write_jsonl(tmp_path / "log.jsonl", [*rows, rows[0], rows[1]])
    traces = import_log(target, log, tmp_path / "store", ())
    assert len(traces) == NUM + 1
    assert [t.sample_index for t in traces if t.prompt_ids == rows[1]["prompt_ids"]] == [0, 1]
    assert "1 greedy answers to a prompt that has one already" in capsys.readouterr().out


def changed(rows, **values):
    return [{**row, **values} for row in rows]


def test_rows_of_another_target_are_refused_and_nothing_is_written(tmp_path, tiny_target, log):
    folder = tmp_path / "store"
    with pytest.raises(UserError, match=r"these are not answers of .* of the greedy tokens"):
        import_log(tiny_target("llama", seed=5), log, folder, ())
    assert not folder.exists()


def test_greedy_rows_that_are_nearly_right_are_refused(tmp_path, target, rows):
    greedy = [row for row in rows if row["temperature"] == 0]
    last = greedy[-1]["response_ids"]
    wrong = {**greedy[-1], "response_ids": [*last[:-1], 5 + (last[-1] == 5)]}
    log = write_jsonl(tmp_path / "log.jsonl", [*greedy[:-1], wrong])
    with pytest.raises(UserError, match=r"97\.92% of the greedy tokens are its own, not 99%"):
        import_log(target, log, tmp_path / "store", ())


def test_drawn_rows_of_another_distribution_are_refused(tmp_path, target, rows):
    generator = torch.Generator().manual_seed(1)
    uniform = [
        {**row, "response_ids": torch.randint(4, 100, (8,), generator=generator).tolist(),
         "finish_reason": "length", "temperature": 1.0}
        for row in rows
    ]  # fmt: skip
    log = write_jsonl(tmp_path / "log.jsonl", uniform)
    with pytest.raises(UserError, match="nats beyond the entropy is what drawn tokens cost"):
        import_log(target, log, tmp_path / "store", ())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"response_ids": [7, 100]}, "first line 1: response_ids: 100 is outside the vocabulary"),
        ({"response_ids": [7, EOS, 8]}, "first line 1: the answer goes on after its EOS, id 0"),
        ({"response_ids": [7, EOS], "finish_reason": "length"}, "but the last token is an EOS"),
        ({"response_ids": [7, 8], "finish_reason": "eos"}, "eos, but the last token is 8"),
        ({"prompt_ids": [5] * 255, "response_ids": [6, 7]}, "257 tokens, the context is 256"),
    ],
)
def test_rows_that_contradict_the_target_are_refused(tmp_path, target, rows, values, says):
    log = write_jsonl(tmp_path / "log.jsonl", changed(rows, **values))
    with pytest.raises(UserError, match=f"12 of 12 lines cannot be used.*{says}"):
        import_log(target, log, tmp_path / "store", ())
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("end", "count"), [(-40, NUM - 1), (-1, NUM)])
def test_a_last_line_that_is_cut_is_left_out_and_counted(
    tmp_path, target, rows, capsys, end, count
):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows)[:end])
    assert len(import_log(target, path, tmp_path / "store", ())) == count
    said = f"1 of {NUM} lines skipped (not JSON 1, first line {NUM}: not JSON)"
    assert (said in capsys.readouterr().out) == (count < NUM)


def test_an_archive_that_is_cut_is_refused(tmp_path, target, rows):
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(content)[:-40])
    with pytest.raises(UserError) as caught:
        import_log(target, path, tmp_path / "store", ())
    assert (caught.value.key, caught.value.remedy) == ("script.log", "copy it again")
    assert not (tmp_path / "store").exists()


def test_a_store_of_another_log_is_not_overwritten(tmp_path, target, rows, log):
    import_log(target, log, tmp_path / "store", ())
    other = write_jsonl(tmp_path / "other.jsonl", rows[:6])
    with pytest.raises(UserError, match=r"was made with log 'log\.jsonl'"):
        import_log(target, other, tmp_path / "store", ())


def test_an_import_that_was_cut_off_is_not_trained_on_and_goes_on(tmp_path, target, log):
    traces = import_log(target, log, tmp_path / "store", ())
    manifest = tmp_path / "store" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "complete": False}))
    with pytest.raises(UserError, match="its import was cut off"):
        open_imported(str(tmp_path / "store"))
    assert import_log(target, log, tmp_path / "store", ()) == traces
    assert open_imported(str(tmp_path / "store")) is not None


# --- prompts that are token ids ------------------------------------------------------------------


def test_a_prompt_of_token_ids_is_shown_as_it_is(tmp_path, target, rows, log):
    import_log(target, log, tmp_path / "store", ())
    store = open_imported(str(tmp_path / "store"))
    prompts = prompts_of(store)
    assert [list(*user_turns(prompt)) for prompt in prompts] == [r["prompt_ids"] for r in rows]
    assert [prompt.hash for prompt in prompts] == [trace.prompt_hash for trace in store.load()]
    (turn,) = user_turns(prompts[0])
    assert render(with_answers(turn, ()), target.tokenizer) == rows[0]["prompt_ids"]
    with pytest.raises(UserError, match=r"data\.system_prompt must be empty for prompts that are"):
        render(turn, target.tokenizer, system_prompt="Be brief.")
    assert Rendered((1, 2)) == (1, 2)


# --- the commands --------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path, target, log):
    """Words of a run that trains on the imported rows."""
    name, store = target.name, tmp_path / "store"
    given = [f"script.log={log}", f"data.traces={store}", f"model.target={name}"]
    assert import_traces.main(given) == 0
    return [w for w in command(tmp_path, name) if not w.startswith("data.prompts=")] + [
        f"data.traces={store}"
    ]


def without(words, *keys):
    return [word for word in words if word.partition("=")[0] not in keys]


@pytest.mark.slow
def test_a_run_trains_on_imported_rows_and_holds_some_out(tmp_path, words, rows, capsys):
    capsys.readouterr()
    held_out = [*without(words, "eval.prompts", "data.num_prompts"), "data.eval_share=0.3"]
    assert train.main(held_out) == 0
    said = capsys.readouterr().out
    count = int(said.split("training traces: ")[1].split()[0])
    assert 0 < count < NUM
    assert f"data.eval_share=0.3 holds out {NUM - count}, leaves {count}" in said
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert {row["prompts"]["name"] for row in report["results"]} == {"held out from store"}
    out = tmp_path / "again"
    drafter = tmp_path / "run" / "drafter"
    assert evaluate.main([f"eval.drafter={drafter}", f"script.out={out}"]) == 0
    again = json.loads((out / "report.json").read_text())
    assert again["results"][0]["prompts"] == report["results"][0]["prompts"]


def test_the_text_that_is_trained_on_is_the_log(words, rows, monkeypatch):
    seen = []
    train_stages = phases.train.train_stages

    def watch(run, recipe, start, text, *further):
        seen.extend((trace.prompt_ids, trace.response_ids) for trace in text.traces)
        return train_stages(run, recipe, start, text, *further)

    monkeypatch.setattr("phases.train.train_stages", watch)
    assert train.main(words) == 0
    logged = [(row["prompt_ids"], row["response_ids"]) for row in rows]
    assert len(seen) == 8  # data.num_prompts
    assert all(pair in logged for pair in seen)


def test_a_dry_run_says_that_nothing_is_generated_for_training(tmp_path, words, capsys):
    capsys.readouterr()
    assert train.main([*words, "data.samples_per_prompt=4", "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert f"traces: those of 8 prompts in {tmp_path / 'store'}; none is generated" in said


def refused(capsys, words):
    assert train.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_prompts_beside_an_imported_store_are_refused(tmp_path, words, capsys):
    capsys.readouterr()
    said = refused(capsys, [*words, f"data.prompts={tmp_path / 'train.jsonl'}"])
    assert "was imported with its prompts: leave out data.prompts=" in said


def test_an_imported_store_of_another_target_is_refused(words, tiny_folder, capsys):
    capsys.readouterr()
    other = tiny_folder("llama", seed=5)
    said = refused(capsys, [*without(words, "model.target"), f"model.target={other}"])
    assert "was imported for another target (weights" in said


def test_a_held_out_text_that_was_imported_is_not_trained_on(
    tmp_path, words, target, rows, capsys, monkeypatch
):
    seen = []

    def stop(run, recipe, start, text, *further):
        seen.extend(text.traces)
        raise UserError("enough")

    monkeypatch.setattr("phases.train.train_stages", stop)
    texts = [target.tokenizer.decode(row["prompt_ids"]) for row in rows]

    def run(count):
        path = write_jsonl(tmp_path / "same.jsonl", [{"prompt": text} for text in texts[:count]])
        given = without(words, "eval.prompts", "data.num_prompts", "eval.num_prompts")
        capsys.readouterr()
        code = train.main([*given, f"eval.prompts={path}"])
        return code, capsys.readouterr()

    said = run(2)[1].out
    assert f"2 of {NUM} training turns have a context that is held out as well: " in said
    assert [trace.prompt_ids for trace in seen] == [row["prompt_ids"] for row in rows[2:]]
    code, (_, line) = run(NUM // 2 + 1)
    assert code == 2
    assert f"data.traces={tmp_path / 'store'}: {NUM // 2 + 1} of {NUM} training turns" in line


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["data.traces=x"], "script.log must name the file to import"),
        (["script.log=x"], "data.traces must name the folder to write"),
        (["script.log=x", "data.traces=y", "data.temperature=1"], "the rows say how they were"),
        (["script.log=x", "data.traces=y", "data.prompts=z"], "the rows bring their prompts"),
        (["script.log=none.jsonl", "data.traces=y"], "script.log=none.jsonl does not exist"),
    ],
)
def test_a_wrong_word_is_one_line(tmp_path, monkeypatch, target, given, says, capsys):
    monkeypatch.chdir(tmp_path)
    assert import_traces.main([*given, f"model.target={target.name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert list(tmp_path.iterdir()) == []


# memory

CHILD = """
import json, re, sys, threading
from pathlib import Path
import numpy as np
from data import imported, trace_rows
from data.prompts import take
from data.split import drop_held_out
from target.model import Target

imported.check_text = lambda *_: None  # random rows are nobody's answers
trace_rows.BATCH_BYTES = 1 << 18  # what is needed whatever the number of rows

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * int(re.search(r"^Anonymous:\\s+(\\d+)", file.read(), re.M)[1])

def written(name):
    target = Target.load(sys.argv[2])
    target.vocab_size = 150_000  # ids beyond 256 are objects of their own in Python
    imported.import_log(target, folder / f"{name}.jsonl", folder / name, ())

def held(name):
    prompts = take(imported.prompts_of(imported.open_imported(folder / name)), 10**6, 0)
    return drop_held_out(prompts, prompts[:0], None, '', None)

work, folder = {"import": written, "prompts": held}[sys.argv[1]], Path(sys.argv[3])
def most(name):
    found, ended = [anonymous()], threading.Event()

    def watch():
        while not ended.wait(0.01):
            found.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work(name)
    ended.set()
    watcher.join()
    return max(found)

few = most("small")
print(most("large") - few)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_importing_and_the_prompts_of_a_store_take_less_than_ten_bytes_a_token(
    tmp_path, tiny_folder
):
    """Most that they hold at any moment, of a log and of one of eight times as many rows."""
    draw = np.random.default_rng(0).integers
    for name, count in (("small", 1000), ("large", 8000)):
        tokens = draw(1000, 150_000, (count, 250)).tolist()
        write_jsonl(tmp_path / f"{name}.jsonl", [
            {"prompt_ids": ids[:200], "response_ids": ids[200:], "temperature": 1.0}
            for ids in tokens
        ])  # fmt: skip
    for what in ("import", "prompts"):
        command = [sys.executable, "-c", CHILD, what, str(tiny_folder("llama")), str(tmp_path)]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        assert int(found.stdout) < 10 * 7000 * 250, what


def test_a_drafter_is_replayed_on_a_log(tmp_path, words, rows, target, capsys):
    """On the answers of each sampling but their last K tokens, and nothing is decoded."""
    store, K = tmp_path / "store", 2
    drafter = tiny_drafter(tmp_path)
    given = [f"eval.drafter={drafter}", f"model.target={target.name}", f"eval.traces={store}",
             f"eval.K={K}", f"script.out={tmp_path / 'out'}", "eval.tree=dynamic:3:2"]  # fmt: skip
    assert evaluate.main(given) == 0, capsys.readouterr()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {row["measured_by"] for row in report["results"]} == {"offline"}
    assert {row["temperature"] for row in report["results"]} == {0.0, 1.0}
    assert not (tmp_path / "out" / "cache").exists()
    logged = [row["response_ids"] for row in rows if len(row["response_ids"]) > K + 1]
    for temperature in (0.0, 1.0):
        own = [r for r in rows if r["temperature"] == temperature and r["response_ids"] in logged]
        (chain,) = [
            row for row in report["results"]
            if row["temperature"] == temperature and row["role"] == "measured" and not row["tree"]
        ]  # fmt: skip
        assert chain["num_prompts"] == len(own) == chain["prompts"]["answers"]
        emitted = chain["tokens_per_round"] * chain["num_rounds"]  # but the prefill's token
        assert emitted == pytest.approx(sum(len(r["response_ids"]) - K - 1 for r in own))
        # K tokens behind the end are known, so the engine's counters are whole
        assert chain["engine_drafts"] == pytest.approx(chain["num_rounds"])
    (itself,) = [r for r in report["results"] if r["role"] == "target" and not r["temperature"]]
    assert itself["alpha"] == 1.0
    assert "imported from" in (tmp_path / "out" / "report.md").read_text()


def tiny_drafter(folder):
    return save_tiny(folder / "small", "llama", layers=1, width=16)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["eval.drafter=lookup:3", "eval.traces=no/such"], "eval.traces must be the store of an"),
        (["eval.drafter=lookup:3", "eval.engine=vllm"], "eval.engine must be own with eval.traces"),
        (["eval.drafter=lookup:3", "eval.prompts=x.jsonl"], "eval.prompts must be null with"),
        (["eval.drafter=lookup:3", "eval.K=9"], "hold an answer of more than 10 tokens"),
    ],
)
def test_a_log_that_cannot_be_replayed_is_refused(tmp_path, words, target, given, says, capsys):
    usual = [f"model.target={target.name}", f"eval.traces={tmp_path / 'store'}",
             f"script.out={tmp_path / 'out'}"]  # fmt: skip
    names = {word.partition("=")[0] for word in given}
    assert evaluate.main([*given, *without(usual, *names)]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert train.main([*words, f"eval.traces={tmp_path / 'store'}"]) == 2
