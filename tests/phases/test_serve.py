"""What a report asks of vLLM, without vLLM."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from engines.vllm_server import model_options
from eval.config import EvalConfig
from eval.costs import Cost
from phases import serve
from target.sampling import Sampling
from tests.drafters.test_export_heads import made


class Asked(Exception):
    """In place of vLLM's answers."""


@pytest.mark.parametrize(
    ("kind", "temperature", "names"),
    [
        ("eagle", 0.0, ["plain", "after"]),
        ("eagle", 1.0, ["plain", "after", "after, greedy drafts"]),
        ("medusa", 0.0, ["plain", "after"]),
        ("medusa", 1.0, ["plain", "after, greedy drafts"]),
    ],
)
def test_no_row_says_that_vllm_draws_drafts_from_medusas_heads(
    kind, temperature, names, tiny_target, monkeypatch
):
    """It takes the likeliest token of each, whatever it is told."""

    def asked(target, jobs, prompts, **settings):
        raise Asked(list(jobs))

    monkeypatch.setattr(serve, "serve", asked)
    target, config = tiny_target("llama"), EvalConfig(engine="vllm", K=3)
    bench: Any = SimpleNamespace(
        target=target, config=config, sampling=Sampling(temperature), traces=[],
        timed_prompts=list,
    )  # fmt: skip
    with pytest.raises(Asked) as found:
        serve.served_rows(bench, "after", made(kind, target), Cost(0.1, 1.0, 0.1, 0.1), None)
    assert found.value.args[0] == names


def test_vllm_loads_the_commit_that_was_loaded_here(tiny_target, tmp_path, monkeypatch):
    target = tiny_target("llama")
    assert "revision" not in model_options(target)
    monkeypatch.setattr(target.model.config, "_commit_hash", "a" * 40, raising=False)
    assert "revision" not in model_options(target)  # a folder has no commits
    named = dataclasses.replace(target, name="org/model")
    assert model_options(named)["revision"] == "a" * 40
