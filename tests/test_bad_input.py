"""What users get wrong: one line on standard error with key, value and remedy, exit code 2, and
nothing half-written where it can be known before. Faults while running: exit code 3."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import train
from phases import report
from recipes import base
from recipes.common.config import Config
from scripts import evaluate, export, generate, request_log
from target.model import Target
from tests.helpers.commands import command, only, pipe, training_stores, write_jsonl
from tests.helpers.tiny import save_tiny
from tests.helpers.wrong_words import HEADS, MALFORMED, WORDS, WORDS_OF_TARGET
from trainer.checks import require_folder
from trainer.config import known_keys, sections
from trainer.errors import UserError


@pytest.fixture
def refused(tmp_path, tiny_folder, capsys):
    """refused(*words, target=..., says=[...]): the command line, given on top of a tiny one, ends
    with the exit code and one line that says all of this. `script`: of that module, not train;
    `begun`: the words of a run that they are given on top of."""

    def call(*words, says, target=None, code=2, written=False, script=None, begun=None):
        if begun is None:
            arguments = command(tmp_path, target or tiny_folder("llama"), *words)
        else:
            keys = {word.partition("=")[0] for word in words}
            arguments = [w for w in begun if w.partition("=")[0] not in keys] + [*words]
        if script is not None:
            kept = only(arguments, *getattr(script, "READS", ()))
            arguments = [word for word in arguments if word in words or word in kept]
        capsys.readouterr()
        assert (script or train).main(arguments) == code
        err = capsys.readouterr().err.splitlines()
        assert [line for line in err if line.startswith("error:")] == err[-1:], err
        for text in [says] if isinstance(says, str) else says:
            assert text in err[-1]
        assert (tmp_path / "run").exists() == written
        return err[-1]

    return call


@pytest.fixture
def unloaded(monkeypatch):
    """No model may be loaded."""
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("the target was loaded"))


# the command line


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(("word", "says"), WORDS)
def test_a_wrong_word_is_named(refused, tmp_path, word, says):
    refused(word, says=says)
    assert not list(tmp_path.glob("cache/traces/*/*.parquet"))


@pytest.mark.parametrize(("word", "says"), WORDS_OF_TARGET)
def test_a_wrong_word_for_this_target_is_named(refused, tmp_path, word, says):
    refused("method.control=true", word, says=says)
    assert not list(tmp_path.glob("cache/traces/*/*.parquet"))


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("key", ["run.dir", "data.cache_dir", "data.traces", "script.out"])
@pytest.mark.parametrize("folder", ["file", "file/below", "a" * 256, "a/" * 2000])
def test_a_folder_that_cannot_be_made_is_named_before_anything_is_loaded(
    refused, tmp_path, key, folder
):
    (tmp_path / "file").touch()
    says = "is a file: choose another path" if folder.startswith("file") else "must be a path of at"
    words = [f"{key}={tmp_path / folder}", "model.target=none/such"]
    extra = ["eval.drafter=none/such"] if key == "script.out" else []
    script = evaluate if key == "script.out" else None
    refused(*words, *extra, script=script, says=[key, says])
    assert {p.name for p in tmp_path.iterdir()} <= {"file", "train.jsonl", "eval.jsonl"}


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("key", ["run.dir", "data.cache_dir", "data.traces"])
def test_a_place_that_cannot_be_written_to_is_named_before_anything_is_loaded(
    refused, tmp_path, monkeypatch, key
):
    closed = tmp_path / "closed"
    closed.mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and real(path, mode))
    words = [f"{key}={closed}/new", "model.target=none/such"]
    refused(*words, says=f"{key}={closed}/new cannot be created, {closed} is not writable")
    require_folder(key, closed)  # what is there already may be only read


@pytest.mark.usefixtures("unloaded")
def test_a_folder_of_something_else_is_no_place_for_traces(refused, tmp_path):
    """Least of all one whose files have names of ours, which a failed import would remove."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("rows.json", "answers.jsonl"):
        (mine / name).write_text("{}")
    says = f"data.traces={mine} holds 'answers.jsonl' and is no trace store: name a new folder"
    refused(f"data.traces={mine}", "model.target=none/such", says=says)
    (mine / "manifest.json").write_text('{"name": "a web application"}')
    refused(f"data.traces={mine}", says=f"data.traces={mine} holds 'manifest.json' and is no")
    assert {path.name for path in mine.iterdir()} == {"rows.json", "answers.jsonl", "manifest.json"}


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("word", ["split=validation", "column=text", "config=de"])
def test_an_option_of_evaluation_prompts_that_are_not_named_is_refused(refused, word):
    key = f"eval.prompts_{word.partition('=')[0]}"
    refused("eval.prompts=null", f"eval.prompts_{word}", says=f"{key} must be left at")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["data.prompts=toy", "data.prompts_column=x"],
            "data.prompts_column must be left at null for",
        ),
        (
            ["data.prompts=toy", "data.response_column=x"],
            "data.response_column must be left at null",
        ),
        (
            ["data.prompts_split=test"],
            "data.prompts_split must be left at train for a file, got 'test'",
        ),
        (["eval.prompts_config=x"], "eval.prompts_config must be left at null for a file, got 'x'"),
        (["model.target_revision=v1"], "model.target_revision=v1 is of the Hub"),
        (["model.drafter=assets/toy/draft", "model.drafter_revision=v1"], "model.drafter_revision"),
    ],
)
def test_an_option_that_its_source_does_not_read_is_refused(refused, words, says):
    refused(*words, says=says)


def test_the_longest_name_is_no_mistake(tmp_path):
    require_folder("run.dir", tmp_path / ("a" * 255) / "b")
    require_folder("run.dir", tmp_path)
    (tmp_path / "broken").symlink_to("nowhere")
    with pytest.raises(UserError, match="is a file"):
        require_folder("run.dir", tmp_path / "broken" / "below")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(("arguments", "says"), MALFORMED)
def test_a_malformed_command_is_one_line(capsys, arguments, says):
    assert train.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("unloaded")
def test_a_divergence_that_is_not_linear_needs_full_logits(refused):
    words = ("method.teacher=compressed", "method.data_mix={target: 1}", "data.teacher_top_k=4")
    refused(*words, says=["CompressedTeacherError", "jsd", "method.approx=bucket"])


@pytest.mark.usefixtures("unloaded")
def test_draft_text_needs_a_live_teacher(refused):
    words = ("method.teacher=compressed", "method.divergence=fkl", "data.teacher_samples=4")
    draft = "method.data_mix={draft: 1}"
    refused(*words, draft, says=["on-policy data needs a live teacher", "method.teacher=live"])
    mix = "method.data_mix={fixed: 0.5, target: 0.5}"
    refused(*words, mix, says=["stored for target text only", "method.teacher=live"])


def test_a_compressed_teacher_that_is_not_stored_is_asked_for(refused):
    words = ("method.teacher=compressed", "method.data_mix={target: 1}", "method.divergence=fkl")
    refused(*words, says=["data.teacher_top_k", "data.teacher_samples"])


def test_a_top_k_alone_that_leaves_out_too_much_is_refused(refused):
    words = ("method.teacher=compressed", "method.data_mix={target: 1}", "method.divergence=fkl")
    says = ["CompressedTeacherError: the stored top-k leaves", "teacher_samples", "teacher_top_k"]
    refused(*words, "data.teacher_top_k=4", "method.control=false", says=says, written=True)


# heads


@pytest.mark.parametrize(
    ("recipe", "words", "says"),
    HEADS,
)
def test_what_a_head_cannot_do_is_said_before_it_is_trained(
    tmp_path, tiny_folder, capsys, recipe, words, says
):
    given = command(tmp_path, tiny_folder("llama"), f"recipe={recipe}", *words)
    kept = [w for w in given if not w.startswith("method.") or w in words]
    kept = [w for w in kept if w != "model.drafter=null" or "model.drafter" not in str(words)]
    assert train.main(kept) == 2
    err = capsys.readouterr().err
    assert says in err.splitlines()[-1], err
    assert not (tmp_path / "run").exists()


# prompts


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        ("", [], "own.jsonl is empty"),
        ('{"prompt": \n', [], ["1 x not JSON, first line 1", "data.bad_rows=drop"]),
        ('"a"\n', [], ["no object with named columns, first row 1", "str"]),
        ('{"prom": "a"}\n', [], ["none of the usual columns", "columns: prom"]),
        ('{"ask": "a"}\n', ["data.prompts_column=as"], ["'as'", "did you mean 'ask'?"]),
        ('{"prompt": 3}\n', [], ["line 1", "no text in the column 'prompt'"]),
        ('{"prompt": "  "}\n', [], "holds no prompt that is not empty"),
        ('{"prompt": "a"}\n', ["data.response_column=b"], "no column 'b'"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ["method.data_mix={fixed: 1}"],
         ["2 of 2 prompts have none", "data.response_column"]),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', [],
         ["no chat template", "conversations", "data.prompts_column"]),
        ('{"messages": [{"role": "robot", "content": "a"}]}\n', [], ["line 1", "'robot'"]),
        ('{"prompt": "%s"}\n' % ("long " * 60), [],
         ["line 1", "the prompt has 300 tokens", "limit is 248", "data.long_prompts=drop"]),
        ('{"prompt": "What is 1 times 3? "}\n', [],
         ["1 of 1 training turns have a context that is held out", "eval.prompts"]),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_used(refused, tmp_path, content, words, says):
    (tmp_path / "own.jsonl").write_text(content)
    refused(f"data.prompts={tmp_path / 'own.jsonl'}", *words, says=says)
    assert not list(tmp_path.glob("cache/traces/*/*.parquet"))


@pytest.mark.slow
def test_long_prompts_are_dropped_where_asked(tmp_path, tiny_folder, capsys):
    rows = [{"prompt": text} for text in ("short one", "another", "long " * 60, 7)]
    prompts = write_jsonl(tmp_path / "own.jsonl", rows)
    others = write_jsonl(
        tmp_path / "others.jsonl", [{"prompt": t} for t in ("third", "wide " * 60)]
    )
    words = (f"data.prompts={prompts}", f"eval.prompts={others}", "data.long_prompts=drop")
    given = command(tmp_path, tiny_folder("llama"), *words, "trainer.max_steps=1")
    assert train.main(given) == 0
    out = capsys.readouterr().out
    assert "1 prompts or later turns over 248 tokens left out" in out
    left_out = "1 prompts, 1 left out as too long or equal to another"
    assert left_out in out
    assert left_out in (tmp_path / "run" / "report.md").read_text()
    unread = json.loads((tmp_path / "run" / "report.json").read_text())["run"]["unread_rows"]
    assert unread["data.prompts"]["left_out"] == 1


@pytest.mark.parametrize("side", ["data", "eval"])
def test_when_every_prompt_is_dropped_nothing_is_supervised(refused, tmp_path, side):
    prompts = write_jsonl(tmp_path / "own.jsonl", [{"prompt": f"{i} long " * 60} for i in range(3)])
    says = "no prompt is left: all 3 are too long"
    refused(f"{side}.prompts={prompts}", "data.long_prompts=drop", says=says)


def test_a_long_evaluation_prompt_is_known_before_training(refused, tmp_path):
    prompts = write_jsonl(tmp_path / "own.jsonl", [{"prompt": "long " * 60}])
    refused(f"eval.prompts={prompts}", says=["the prompt has 300 tokens", "long_prompts=drop"])


def test_a_share_that_holds_nothing_out_is_named(refused):
    refused("eval.prompts=null", "data.eval_share=0", says=["data.eval_share", "eval.prompts"])


@pytest.mark.parametrize("key", ["data.prompts", "eval.prompts", "eval.tree", "method.log"])
@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_not_waited_for(refused, tmp_path, key, what):
    path = tmp_path / "x.jsonl"
    if what == "pipe":
        pipe(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    named = f"{'static:' * (key == 'eval.tree')}{path}"
    words = ["recipe=osd", f"{key}={named}", "trainer.max_steps=2"]
    refused(*words, says=[f"{path} is a {what}: name a regular file"])
    assert not list(tmp_path.glob("cache/traces/*/*.parquet"))


@pytest.mark.parametrize("key", ["data.prompts", "eval.prompts", "eval.tree", "method.log"])
def test_a_name_that_no_file_can_have_is_refused(refused, key):
    named = f"{'static:' * (key == 'eval.tree')}{'a' * 300}"
    refused("recipe=osd", f"{key}={named}", says=["'aaaa", "cannot be read (File name too"])


# models


@pytest.mark.parametrize("name", ["config.json", "drafter.json"])
def test_a_model_is_not_read_from_a_pipe(refused, tmp_path, capsys, name):
    broken = save_tiny(tmp_path / "broken", "llama")
    (broken / name).unlink(missing_ok=True)
    pipe(broken / name)
    says = [f"{broken / name} is a pipe: name a regular file"]
    refused(f"model.drafter={broken}", says=["model.drafter: the file", *says])
    refused(f"model.target={broken}", says=["model.target: the file", *says])
    words = [f"script.drafter={broken}", "script.engine=vllm", f"script.out={tmp_path / 'out'}"]
    if name == "drafter.json":
        assert export.main(words) == 2
        assert says[0] in capsys.readouterr().err


def test_a_model_of_an_endless_name_is_refused(refused, capsys):
    refused(f"model.drafter={'a' * 300}", says=["model.drafter", "cannot load"])
    refused(f"eval.drafter={'a' * 300}", script=evaluate, says=["eval.drafter", "cannot load"])
    assert export.main([f"script.drafter={'a' * 300}", "script.engine=vllm", "script.out=x"]) == 2
    assert "script.drafter: no drafter in" in capsys.readouterr().err


@pytest.mark.usefixtures("unloaded")
def test_the_toys_drafter_serves_no_other_target(refused):
    words = ("model.drafter=assets/toy/draft",)
    refused(*words, says=["belongs to assets/toy/target", "model.drafter=null"])
    refused(*words, "dry_run=true", says="belongs to assets/toy/target")


def test_a_drafter_with_another_id_to_token_map(refused, tmp_path, tiny_folder):
    other = tmp_path / "other"
    shutil.copytree(tiny_folder("llama"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    says = ["CompatibilityError", "2 ids", "'b'", "'a'", "drafter with the target's tokenizer"]
    refused(f"model.drafter={other}", says=says)
    assert not list(tmp_path.glob("cache/traces/*/*.parquet"))


def test_a_drafter_that_scores_too_few_ids(refused, tmp_path):
    narrow = save_tiny(tmp_path / "narrow", "llama", vocab_size=90)
    says = ["CompatibilityError", "scores 90 ids", "100", "target's tokenizer"]
    refused(f"model.drafter={narrow}", says=says)


@pytest.mark.parametrize("key", ["model.target", "model.drafter"])
@pytest.mark.parametrize(
    "damage", ["missing", "no weights", "cut weights", "bad config", "no tokenizer"]
)
def test_a_model_that_cannot_be_loaded_is_named(refused, tmp_path, key, damage):
    folder = save_tiny(tmp_path / "broken", "llama")
    if damage == "missing":
        shutil.rmtree(folder)
    elif damage == "no weights":
        (folder / "model.safetensors").unlink()
    elif damage == "cut weights":
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    elif damage == "bad config":
        (folder / "config.json").write_text("{")
    else:
        for path in folder.glob("tokenizer*"):
            path.unlink()
    refused(f"{key}={folder}", says=[key, str(folder)])


@pytest.mark.parametrize(
    ("layers", "says"),
    [((2,), "0..1"), ((-1,), "0..1"), (("norm",), "final_norm"), ((0, 0), "distinct")],
)
def test_layer_ids_out_of_range_or_twice(tiny_target, layers, says):
    with pytest.raises(UserError, match=says):
        tiny_target("llama").outputs(torch.zeros(1, 3, dtype=torch.long), layers=layers)


# what an earlier command left


def test_a_trace_store_of_another_target_or_sampling(refused, tmp_path, tiny_folder):
    words = (f"data.traces={tmp_path / 'own'}", "eval.prompts=toy")
    arguments = command(tmp_path, tiny_folder("llama"), *words)
    assert generate.main(only(arguments, *generate.READS)) == 0
    says = ["made with", "use another data.traces or delete it"]
    refused(*words, says=[*says, "target.weights"], target=tiny_folder("llama", seed=1))
    refused(*words, "data.temperature=0.7", says=[*says, "temperatures [1.0] (wanted: [0.7])"])
    refused(*words, "data.top_k=5", says=[*says, "top_k 0 (wanted: 5)"])
    refused(*words, "data.num_prompts=7", says=[*says, "prompts_hash", "set data.num_prompts"])
    refused(*words, "run.seed=1", says=[*says, "seed 0 (wanted: 1)"])


@pytest.mark.slow
def test_a_damaged_shard_is_named_and_its_removal_heals(refused, tmp_path, tiny_folder):
    arguments = command(tmp_path, tiny_folder("llama"))
    assert train.main(arguments) == 0
    shutil.rmtree(tmp_path / "run")
    (store,) = training_stores(tmp_path / "cache")
    (shard,) = store.glob("*.parquet")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    refused(says=[f"{shard} is damaged", "delete this file and start the same command again"])
    shard.unlink()
    assert train.main(arguments) == 0


@pytest.mark.slow
@pytest.mark.parametrize("finished", [True, False])
def test_a_run_folder_of_another_configuration(refused, begun, finished):
    run, words = begun
    if not finished:
        (run / "report.json").unlink()
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    says = ["holds a run of another configuration", "trainer.lr", "choose another run.dir"]
    refused("trainer.lr=0.5", begun=words, says=says, written=True)
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


@pytest.mark.slow
def test_a_run_begun_before_a_setting_was_there_goes_on_with_its_default(refused, begun):
    run, words = begun
    (run / "report.json").unlink()
    kept = yaml.safe_load((run / "config.yaml").read_text())
    del kept["trainer"]["pack_tokens"], kept["model"]["device_map"]
    (run / "config.yaml").write_text(yaml.safe_dump(kept))
    for path in run.glob("stages/*/finished.json"):
        finished = json.loads(path.read_text())
        del finished["setting"]["trainer.pack_tokens"]
        path.write_text(json.dumps(finished))
    before = {p: p.stat().st_mtime_ns for p in run.glob("stages/*/finished.json")}
    assert train.main(words) == 0
    assert before
    assert {p: p.stat().st_mtime_ns for p in before} == before
    says = ["trainer.pack_tokens"]
    refused("trainer.pack_tokens=200", begun=words, says=says, written=True)


# the other commands


@pytest.mark.parametrize("module", [generate, evaluate])
def test_the_scripts_complain_in_the_same_way(refused, module):
    extra = ("eval.drafter=nowhere",) if module is evaluate else ()
    refused(*extra, "data.num_prompt=3", script=module,
            says=["'data.num_prompt'", "did you mean 'data.num_prompts'?"])  # fmt: skip
    refused(*extra, "model.target=nowhere", script=module, says=["model.target", "'nowhere'"])


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("module", "word", "says"),
    [
        (evaluate, "run.dir=x", "run.dir does nothing in scripts.evaluate: script.out names the"),
        (evaluate, "run.stage=x", "it is a setting of train.py, leave it out"),
        (evaluate, "trainer.precision=bf16", "it is a setting of train.py, leave it out"),
        (evaluate, "data.temperature=1", "eval.temperatures are what it measures at"),
        (evaluate, "data.features=live", "a setting of train.py and scripts.generate, leave"),
        (evaluate, "model.drafter=x", "eval.drafter names what it measures"),
        (evaluate, "recipe=eagle", "recipe does nothing in scripts.evaluate: it is a setting of"),
        (generate, "run.dir=x", "data.traces, else data.cache_dir, says where its traces go"),
        (generate, "trainer.lr=1", "trainer.lr does nothing in scripts.generate"),
        (generate, "eval.K=3", "a setting of train.py and scripts.evaluate, leave it out"),
        (generate, "data.features=cached", "it is a setting of train.py"),
        (generate, "recipe=eagle", "recipe does nothing in scripts.generate"),
        (request_log, "data.prompts=x", "unknown key 'data.prompts'"),
    ],
)  # fmt: skip
def test_a_word_that_a_script_would_pass_over_is_refused(refused, module, word, says):
    extra = ("eval.drafter=nowhere",) if module is evaluate else ()
    refused(*extra, word, script=module, says=says)


def test_a_script_reads_keys_that_there_are():
    schema = {**sections(Config), "method": base.NoMethod}
    known = [*known_keys(schema, ("out",)), "eval"]
    assert set(generate.READS) <= set(known)
    assert set(evaluate.READS) <= set(known)


def test_evaluate_needs_a_drafter_that_loads(refused):
    refused(script=evaluate, says="eval.drafter must name a drafter")
    refused("eval.drafter=nowhere", script=evaluate, says=["eval.drafter", "'nowhere'"])


# faults while running


def spoilt(folder, value):
    """A drafter whose final norm holds nothing but this value."""
    save_tiny(folder, "llama", layers=1, width=16)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(value)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_weights_that_are_not_numbers_are_refused(refused, tmp_path):
    broken = spoilt(tmp_path / "broken", torch.nan)
    refused(f"model.drafter={broken}", says="NaN or Inf in tensor 'model.norm.weight'")


def test_weights_that_overflow_stop_the_run(refused, tmp_path):
    broken = spoilt(tmp_path / "broken", 3e38)
    refused(f"model.drafter={broken}", says="nan", code=3, written=True)
    assert not (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(
    ("at_once", "says"), [(True, "logits of the draft contain NaN"), (False, "nan at step 1: ")]
)
def test_a_step_that_gives_nan_saves_its_batch(refused, tmp_path, monkeypatch, at_once, says):
    """One prompt: nothing is held out, so that training sees the NaN before any evaluation. Where a
    look costs a wait, it is found when the second step is logged, and the first one named."""
    for module in ("chunked", "divergence", "loop"):
        monkeypatch.setattr(f"trainer.{module}.shows_numbers_at_once", lambda device: at_once)
    broken = spoilt(tmp_path / "broken", 3e38)
    words = (f"model.drafter={broken}", "data.num_prompts=1", "trainer.batch_size=1")
    refused(*words, "trainer.log_every=2", says=says, code=3, written=True)
    saved = load_file(next((tmp_path / "run").rglob("nan_batch.safetensors")))
    assert saved["input_ids"].shape == saved["loss_mask"].shape
    assert saved["loss_mask"].any()


# faults of the disk


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x"),
        OSError(errno.EACCES, os.strerror(errno.EACCES), "runs/x"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_is_full_or_closed_is_one_line(refused, monkeypatch, fault):
    def write(*_):
        raise fault

    monkeypatch.setattr(report, "write_report", write)
    refused("recipe=distillspec", says="fix that and rerun the same command", code=3,
            written=True)  # fmt: skip


def test_a_fault_of_ours_is_not_hidden(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setattr(report, "write_report", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.main(command(tmp_path, tiny_folder("llama")))
