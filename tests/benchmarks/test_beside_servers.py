"""The printed commands of a target beside servers, from text to an engine's counters."""

from __future__ import annotations

import pytest

from benchmarks.beside_servers import run

WORDS = [
    "recipe=eagle3", "model.target=assets/toy/target", "model.dtype=float32", "data.prompts=toy",
    "data.num_prompts=32", "data.max_new_tokens=24", "trainer.max_steps=4", "trainer.batch_size=4",
    "trainer.eval_every=2", "trainer.lr_warmup_steps=0", "eval.num_prompts=6",
    "eval.max_new_tokens=24", "eval.K=2", "eval.temperatures=0",
]  # fmt: skip


@pytest.mark.engine
def test_from_text_to_the_engines_counters_as_printed(tmp_path):
    folders = [f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    found = run([*WORDS, *folders], tmp_path / "out")
    ((replayed,), (decoded,), (served,)) = (found[by] for by in ("offline", "decoding", "vllm"))
    assert replayed == decoded == served, "replay, our decoding and vLLM's own counters"
    assert served["engine_drafts"] > 0
    (load,) = found["load"]
    assert [one["concurrency"] for one in load["levels"]] == [1, 4]
    assert load["schedules"]["vllm"][0][0] == 1
