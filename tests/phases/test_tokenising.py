"""Two processes of one command share the tokenising of its text."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.helpers.commands import TWO, command, finish, own_words, start, write_jsonl

CHILD = """
import atexit, json, os, sys
from transformers.tokenization_utils_tokenizers import TokenizersBackend
sys.path.insert(0, os.getcwd())
import train
from phases.exits import end

calls, encode = [], TokenizersBackend._encode_plus

def counted(self, text, *given, **options):
    calls.append([text] if isinstance(text, str) else list(text))
    return encode(self, text, *given, **options)

TokenizersBackend._encode_plus = counted
path = f"{sys.argv[1]}-{os.environ['RANK']}.json"
atexit.register(lambda: json.dump(calls, open(path, "w")))
end(lambda words: train.main(words[1:]))
"""


@pytest.mark.slow
def test_no_text_is_tokenised_by_two_processes(tmp_path, tiny_folder):
    rows = [{"prompt": f"Add {i} and {7 * i}: ", "response": f"{8 * i}."} for i in range(20)]
    words = command(
        tmp_path, tiny_folder("llama"), "recipe=fastdraft", "data.num_prompts=20",
        f"data.prompts={write_jsonl(tmp_path / 'prompts.jsonl', rows)}",
        *own_words("fastdraft", tmp_path),
    )  # fmt: skip
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    code, out, err = finish(start(*TWO, str(script), str(tmp_path / "calls"), *words))
    assert code == 0, out + err
    calls = [json.loads((tmp_path / f"calls-{rank}.json").read_text()) for rank in range(2)]
    texts = [Counter(text for call in one for text in call) for one in calls]
    assert texts[0].keys() & texts[1].keys() <= {"a"}  # what each tries its tokenizer on
    for row in rows:
        for text in row.values():
            assert texts[0][text] + texts[1][text] == 1, text
    # raw text goes to the tokenizer a block of documents at a time, in the first process
    assert sorted(len(call) for one in calls for call in one if len(call) > 1) == [40, 40]
