"""Questions for a chat model, made of the embedded domains: no download.

Each document of `data.toy` gives one question, so the split of training from evaluation is the
toy's: by module for code and prose, by the problem itself for math. The answers are the target's.
"""

from __future__ import annotations

import ast

from data import toy
from data.toy import Document


def sample(domains: tuple[str, ...], split: str, count: int, seed: int) -> list[Document]:
    """`count` distinct questions, domains in turn, as documents without an answer; fewer where the
    domains hold no more. A question of the training modules is not in the split "eval"."""
    found = {question(one): one for one in toy.sample(domains, split, 2 * count, seed)}
    if split == "eval":
        for domain in set(domains) - {"math"}:  # whose problems are split one by one
            for one in toy.documents(domain, "train"):
                found.pop(question(one), None)
    return [Document(one.domain, text, text) for text, one in list(found.items())[:count]]


def question(document: Document) -> str:
    """What a user would ask about this document; distinct documents may give the same question."""
    _, _, text = document.text.partition("\n")
    if document.domain == "code":
        return _code(text)
    if document.domain == "prose":
        text = text.strip()
        return f"Explain this part of Python's documentation in your own words.\n\n{text}"
    return document.prompt.removeprefix("Question: ").removesuffix("\nAnswer:")


def _code(source: str) -> str:
    """Ask for a function by its documentation, or for what it does where it has none."""
    function = _function(source)
    described = (function and ast.get_docstring(function)) or ""
    if function is None or not described:
        return f"Explain what this Python function does.\n\n```python\n{source}\n```"
    arguments = ", ".join(one.arg for one in function.args.args if one.arg not in ("self", "cls"))
    described = " ".join(described.partition("\n\n")[0].split())
    return f"Write a Python function `{function.name}({arguments})`. {described}"


def _function(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function that the text holds; None for a part of one, as some releases of Python give."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # text at the margin of a docstring hides the indentation
        return None
    match body:
        case [ast.FunctionDef() | ast.AsyncFunctionDef() as found, *_]:
            return found
    return None
