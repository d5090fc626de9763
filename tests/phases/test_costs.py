"""What `dry_run=true` says of the target, the text, the stages and the states."""

from __future__ import annotations

import json
import re

import pytest

import train
from target.model import Target
from target.outline import outline
from tests.helpers.commands import command, stored_traces, training_stores


def words_of(folder, target, *given):
    """Of a tiny run without `draft_hidden_size`, which few recipes have."""
    words = command(folder, target, *given)
    return [word for word in words if "draft_hidden_size" not in word]


def said(capsys, *words):
    assert train.main([*words, "dry_run=true"]) == 0
    return capsys.readouterr().out


def numbers(text, pattern):
    found = re.search(pattern, text)
    assert found, text
    return [int(one.replace(",", "")) for one in found.groups()]


@pytest.fixture
def no_weights(monkeypatch):
    def load(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", load)


def test_the_bytes_are_those_of_a_run(tmp_path, tiny_folder, capsys):
    words = words_of(
        tmp_path, tiny_folder("llama", layers=8), "recipe=eagle3", "data.features=cached",
        "data.features_dtype=fp32", "run.stage=train",
    )  # fmt: skip
    out = said(capsys, *words)
    assert train.main(words) == 0
    (store,) = training_stores(tmp_path / "cache")
    traces = stored_traces(store)
    (rows, most) = numbers(out, r"text: ([\d,]+) answers, at most ([\d,]+) tokens")
    tokens = sum(len(t.prompt_ids) + len(t.response_ids) for t in traces)
    limit = sum(len(t.prompt_ids) + 8 for t in traces)
    assert rows == len(traces)
    assert tokens <= most
    assert most == pytest.approx(limit, rel=0.1)  # prompts are a sample
    (manifest,) = (tmp_path / "cache" / "features").glob("*/manifest.json")
    stored = json.loads(manifest.read_text())
    files = sum(path.stat().st_size for path in manifest.parent.glob("*.safetensors"))
    (bf16, fp8) = numbers(out, r"layers [\w, ]+: ([\d,]+) bytes a token as bf16, ([\d,]+) bytes")
    layers = len(stored["identity"]["layers"])
    assert (bf16, fp8) == (layers * 32 * 2, layers * (32 + 4))
    assert files == pytest.approx(2 * bf16 * stored["identity"]["tokens"], rel=0.1)
    assert f"stores at most {2 * bf16 * most / 1e6:.3g} MB as fp32" in out


def test_the_target_is_not_loaded(tmp_path, tiny_folder, capsys, no_weights):
    folder = tiny_folder("llama")
    out = said(capsys, *words_of(tmp_path, folder, "recipe=medusa"))
    size = sum(p.numel() for p in outline(str(folder)).model.parameters())
    assert f"target: {size:,} parameters, {4 * size / 1e6:.3g} MB as float32 on each process" in out
    given = ["recipe=medusa", "model.quantization={quant_method: bitsandbytes, load_in_8bit: true}"]
    assert "parameters, quantised on each" in said(capsys, *words_of(tmp_path, folder, *given))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipe=medusa"], "stage train: 7 steps of 4 texts: about 3.5 times through the text"),
        (["recipe=medusa", "trainer.gradient_accumulation_steps=2"],
         "stage train: 7 steps of 8 texts: about 7 times through the text"),
        (["recipe=distillspec", "method.control=true"], "stage control: 7 steps of 4 texts: about"),
        (["recipe=medusa", "trainer.pack_tokens=128"],
         "stage train: 7 steps of 4 rows of 128 tokens: about"),
        (["recipe=fastdraft", "method.stages=[pretrain]", "method.pretrain_steps=5",
          "trainer.lr_warmup_steps=0"],
         "stage pretrain: 5 steps of 4 rows of 128 tokens of raw text"),
    ],
)  # fmt: skip
def test_the_passes_of_each_stage(tmp_path, tiny_folder, capsys, no_weights, words, says):
    given = ["trainer.max_steps=7", "trainer.eval_every=7", "trainer.batch_size=4"]
    assert says in said(capsys, *words_of(tmp_path, tiny_folder("llama"), *given, *words))


def test_processes_share_a_batch(tmp_path, tiny_folder, capsys, no_weights, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = ["recipe=medusa", "trainer.max_steps=7", "trainer.eval_every=7"]
    words = words_of(tmp_path, tiny_folder("llama"), *given, "trainer.batch_size=4")
    assert "7 steps of 16 texts: about 14 times" in said(capsys, *words)
    shared = said(capsys, *words, "trainer.context_parallel_size=2")
    assert "7 steps of 8 texts: about 7 times" in shared


def test_states_are_named_where_the_recipe_decides_which(tmp_path, capsys, no_weights):
    toy = "assets/toy/target"
    out = said(capsys, *words_of(tmp_path, toy, "recipe=eagle3"))
    assert "states: of the layers 1, 3, 4, final_norm: 1,536 bytes a token as bf16, 784" in out
    words = words_of(tmp_path, toy, "model.drafter=assets/toy/draft")
    assert "states:" not in said(capsys, *words)


def test_it_refuses_what_the_run_refuses(tmp_path, tiny_folder, capsys, no_weights):
    words = words_of(tmp_path, tiny_folder("llama"), "recipe=eagle3", "method.layers=[0,1,7]")
    assert train.main([*words, "dry_run=true"]) == 2
    assert "layer id must lie in 0..1" in capsys.readouterr().err
