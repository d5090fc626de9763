"""Questions for a chat model, made of the embedded domains."""

from __future__ import annotations

import pytest

from data import toy
from data.prompts import load_prompts
from data.questions import question
from data.split import held_out_turns
from data.toy import Document


def test_training_and_evaluation_share_no_question():
    train = load_prompts("questions", count=300)
    held_out = load_prompts("questions", count=60, toy_split="eval")
    assert not any(map(any, held_out_turns(train, held_out)))
    for prompts, count in ((train, 100), (held_out, 20)):
        domains = [prompt.domain for prompt in prompts]
        assert {name: domains.count(name) for name in domains} == dict.fromkeys(toy.DOMAINS, count)
        assert all(prompt.response is None for prompt in prompts)
    assert train == load_prompts("questions", count=300)


def test_one_domain():
    prompts = load_prompts("questions:math", count=5)
    assert {prompt.domain for prompt in prompts} == {"math"}
    assert all(prompt.text and prompt.text.endswith("?") for prompt in prompts)


@pytest.mark.parametrize(
    ("domain", "text", "asked"),
    [
        (
            "code",
            '# m.C.add\ndef add(self, a, b):\n    """Add a\n    to b.\n\n    More."""\n    pass',
            "Write a Python function `add(a, b)`. Add a to b.",
        ),
        (
            "code",
            "# m.add\ndef add(a, b):\n    return a + b",
            "Explain what this Python function does.\n\n```python\ndef add(a, b):\n"
            "    return a + b\n```",
        ),
        (
            "code",  # text at the margin of its documentation
            '# m.add\n    def add(a):\n        """Add\nit."""\n        return a',
            "Explain what this Python function does.\n\n```python\n    def add(a):\n"
            '        """Add\nit."""\n        return a\n```',
        ),
        (
            "code",  # a part of a function
            "# m.add\nself.total += a\nreturn_it(a)",
            "Explain what this Python function does.\n\n```python\nself.total += a\n"
            "return_it(a)\n```",
        ),
        (
            "prose",
            "Help on m.add:\n\nAdd two numbers.",
            "Explain this part of Python's documentation in your own words.\n\nAdd two numbers.",
        ),
    ],
)
def test_what_is_asked_about_a_document(domain, text, asked):
    assert question(Document(domain, text[:10], text)) == asked


def test_a_word_problem_is_asked_without_its_frame():
    prompt = "Question: Ada has 3 eggs. How many eggs are there now?\nAnswer:"
    asked = question(Document("math", prompt, prompt + " 3"))
    assert asked == "Ada has 3 eggs. How many eggs are there now?"
