"""The embedded domains: disjoint splits, modules that exist, answers that are right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from data import toy

NUM_DOCUMENTS = 3000  # a limit, for the stream of problems has no end
OPERATIONS = [
    (r"(?:finds|buys|is given) (\d+) more", lambda total, n: total + n),
    (r"collects another (\d+)", lambda total, n: total + n),
    (r"(?:gives away|loses|sells) (\d+)", lambda total, n: total - n),
    (r"breaks (\d+) of them", lambda total, n: total - n),
    (r"then has (\d+) times as many", lambda total, n: total * n),
    (r"multiplies the pile by (\d+)", lambda total, n: total * n),
    (r"equally among (\d+) friends, keeping one friend's share", lambda total, n: total / n),
]


def some(domain, split):
    limit = NUM_DOCUMENTS if domain == "math" or split == "pretrain" else None
    return list(islice(toy.documents(domain, split), limit))


@pytest.mark.parametrize("domain", toy.DOMAINS)
def test_training_and_evaluation_share_no_document(domain):
    train, held_out = some(domain, "train"), some(domain, "eval")
    assert min(len(train), len(held_out)) > 100
    assert not {d.prompt for d in train} & {d.prompt for d in held_out}
    assert not {d.text for d in train} & {d.text for d in held_out}


@pytest.mark.parametrize("domain", ["code", "prose"])
def test_no_evaluation_text_stands_under_another_heading_in_training(domain):
    def body(document):
        return document.text.partition("\n")[2].strip()

    assert not {*map(body, some(domain, "train"))} & {*map(body, some(domain, "eval"))}


@pytest.mark.slow  # reads the whole standard library
@pytest.mark.parametrize("domain", toy.DOMAINS)
def test_pretraining_text_holds_no_evaluation_document(domain):
    limit = NUM_DOCUMENTS if domain == "math" else None
    seen = {d.prompt for d in islice(toy.documents(domain, "pretrain"), limit)}
    assert not seen & {d.prompt for d in some(domain, "eval")}


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("domain", toy.DOMAINS)
def test_prompt_is_a_proper_prefix_with_something_to_continue(domain, split):
    for document in some(domain, split):
        assert document.domain == domain
        assert document.prompt.strip()
        assert document.text == document.prompt + document.response
        assert document.response.strip()


def test_the_module_lists_do_not_overlap():
    both = [*toy.EVAL_MODULES, *toy.TRAIN_MODULES]
    assert len(set(both)) == len(both)
    assert not set(toy.EVAL_MODULES) & set(toy.stdlib_modules())


@pytest.mark.parametrize("modules", [toy.TRAIN_MODULES, toy.EVAL_MODULES], ids=["train", "eval"])
def test_the_listed_modules_exist_on_this_python(modules):
    missing = [name for name in modules if toy.module_source(name) is None]
    assert len(missing) <= 0.1 * len(modules), missing


@pytest.mark.slow
def test_reading_imports_nothing_but_the_standard_library():
    """And of that only parent packages: no module that acts when it is imported."""
    script = """
import json, sys
from itertools import islice
from data import toy
before = set(sys.modules)
for domain in toy.DOMAINS:
    for split in ("pretrain", "train", "eval"):
        list(islice(toy.documents(domain, split), 3000))
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    root = Path(toy.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    imported = json.loads(done.stdout)  # nothing else was printed, as `import this` would do
    # multiprocessing adds a second name of the main module, sysconfig this build's settings
    own = [name for name in imported if not name.startswith(("__mp_main__", "_sysconfigdata"))]
    assert {name.split(".")[0] for name in own} <= set(sys.stdlib_module_names)
    assert not {"antigravity", "this", "turtle", "idlelib", "tkinter"} & set(imported)


def evaluate(question):
    """The answer and each intermediate total, worked out from the sentences of the question."""
    first, *steps = re.findall(r"[^.]+\.", question.partition(" How many ")[0])
    totals = [int(re.search(r" has (\d+) ", first)[1])]
    for step in steps:
        found = [(op, m) for pattern, op in OPERATIONS if (m := re.search(pattern, step))]
        assert len(found) == 1, step
        operation, match = found[0]
        totals.append(operation(totals[-1], int(match[1])))
    return totals


@pytest.mark.parametrize("split", ["pretrain", "train", "eval"])
def test_word_problems_have_the_right_answer_and_right_steps(split):
    for document in some("math", split):
        totals = evaluate(document.prompt)
        assert all(total == int(total) and total > 0 for total in totals), document.prompt
        assert toy.answer_value(document.text) == totals[-1], document.text
        worked = [int(n) for n in re.findall(r"\d+", document.response)]
        for total in totals[1:]:
            assert total in worked, document.text


def test_answer_value_is_the_last_number():
    assert toy.answer_value("3 + 4 = 7. So the answer is 7.") == 7
    assert toy.answer_value("5 - 9 = -4") == -4
    assert toy.answer_value("none") is None


def test_sample_is_fixed_by_the_seed_and_without_repeats():
    drawn = toy.sample(toy.DOMAINS, "eval", 90, seed=3)
    assert drawn == toy.sample(toy.DOMAINS, "eval", 90, seed=3)
    assert drawn != toy.sample(toy.DOMAINS, "eval", 90, seed=4)
    assert len({document.prompt for document in drawn}) == 90
    assert [document.domain for document in drawn] == list(toy.DOMAINS) * 30
