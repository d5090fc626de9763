"""The chat model's clock: what it refuses before a minute is spent."""

import pytest

from benchmarks.real_speed import main


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["K=4"], "error: name a drafter: drafter="),
        (["drafter=x", "prompt=y"], "error: unknown key 'prompt'; did you mean 'prompts'?"),
        (["drafter=x", "count=0"], "error: count must be a whole number above 0, got '0'"),
        (["drafter=x", "batch=1,b"], "error: batch must be a whole number above 0, got 'b'"),
        (["drafter=x", "target=a/b/c"], "error: model.target: cannot load 'a/b/c'"),
    ],
)
def test_a_wrong_word_gets_one_line(words, complaint, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(complaint)
