"""vLLM's counters: what the benchmark refuses before any text is generated."""

from __future__ import annotations

import pytest

from benchmarks.vllm_counters import main
from drafters.hydra import HydraDrafter, HydraSettings
from target.model import Target

pytestmark = pytest.mark.tools


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["K=4"], "name a drafter: python -m benchmarks.vllm_counters <drafter>"),
        (["x", "cuont=60"], "unknown key 'cuont'; did you mean 'count'?"),
        (["x", "K=abc"], "K must be a whole number above 0, got 'abc'"),
        (["x", "batch=0"], "batch must be a whole number above 0, got '0'"),
        (["x", "out="], "out must have a value, got None"),
        (["x/y/z"], "drafter=x/y/z: there is no such file"),
    ],
)
def test_a_wrong_word_gets_one_line(words, complaint, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {complaint}")


def test_a_drafter_that_vllm_does_not_serve_is_refused_before_text_is_generated(
    tmp_path, tiny_folder, capsys
):
    target = Target.load(str(tiny_folder("llama")))
    HydraDrafter.build(target, HydraSettings()).save_pretrained(tmp_path / "hydra")
    assert main([str(tmp_path / "hydra"), f"target={target.name}"]) == 2
    assert capsys.readouterr().err == (
        f"error: drafter must be one that vLLM serves with target, got '{tmp_path / 'hydra'}' of "
        "kind 'hydra': leave it out\n"
    )
