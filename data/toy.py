"""The embedded domains: text that every machine with Python has, or that is computed.

`code` is functions of the standard library, `prose` its documentation strings and the language
reference in `pydoc_data`, `math` generated word problems whose answers can be checked. A document
is a prompt and the text that continues it; the split between what is trained on and what is
evaluated on is by module (code, prose) or by a hash of the problem (math), so the two never share
a document. The module lists hold for Python 3.10 to 3.14; the text itself differs between Python
versions, which is why reports carry the hash of the prompts.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

DOMAINS = ("code", "prose", "math")
MAX_DOCUMENT_CHARS = 900
Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_EVAL_MODULES_TEXT = """
calendar cmd colorsys configparser contextlib csv filecmp fnmatch fractions getopt gettext glob
heapq html.parser http.cookies imaplib json.decoder json.encoder mailbox netrc plistlib poplib
queue random reprlib sched shelve shlex statistics string tarfile textwrap timeit uuid wave
xml.sax.saxutils zipapp zipimport
"""
EVAL_MODULES = _EVAL_MODULES_TEXT.split()

_TRAIN_MODULES_TEXT = """
_collections_abc _pydecimal _pyio _strptime abc argparse ast asyncio.base_events asyncio.events
asyncio.futures asyncio.locks asyncio.proactor_events asyncio.queues asyncio.selector_events
asyncio.sslproto asyncio.streams asyncio.subprocess asyncio.tasks asyncio.transports
asyncio.unix_events base64 bdb bz2 code codecs codeop collections compileall
concurrent.futures._base concurrent.futures.process concurrent.futures.thread copy ctypes.util
curses.textpad dataclasses dbm.dumb difflib dis doctest email._header_value_parser email.charset
email.contentmanager email.feedparser email.generator email.header email.headerregistry
email.message email.utils enum fileinput ftplib functools genericpath getpass graphlib gzip
hashlib hmac http.client http.cookiejar http.server importlib._bootstrap
importlib._bootstrap_external importlib.abc importlib.metadata importlib.util inspect io
ipaddress linecache locale logging logging.config logging.handlers lzma mimetypes modulefinder
multiprocessing.connection multiprocessing.context multiprocessing.heap multiprocessing.managers
multiprocessing.pool multiprocessing.queues multiprocessing.shared_memory
multiprocessing.synchronize multiprocessing.util ntpath numbers operator optparse os pdb pickle
pickletools pkgutil platform posixpath pprint profile pstats pyclbr pydoc quopri rlcompleter
runpy selectors shutil smtplib socket socketserver ssl stat subprocess symtable tabnanny
tempfile threading token tokenize trace traceback tracemalloc turtle types typing unittest.case
unittest.loader unittest.main unittest.mock unittest.result unittest.runner unittest.suite
unittest.util urllib.parse urllib.request urllib.robotparser warnings weakref webbrowser
wsgiref.handlers wsgiref.headers wsgiref.validate xml.dom.expatbuilder xml.dom.minidom
xml.dom.pulldom xml.dom.xmlbuilder xml.etree.ElementPath xml.etree.ElementTree
xml.sax.expatreader xml.sax.handler xml.sax.xmlreader xmlrpc.client xmlrpc.server
zoneinfo._zoneinfo
"""
TRAIN_MODULES = _TRAIN_MODULES_TEXT.split()


@dataclass(frozen=True)
class Document:
    """`text` starts with `prompt`; what follows is the supervised continuation ("human" text)."""

    domain: str
    prompt: str
    text: str

    @property
    def response(self) -> str:
        return self.text[len(self.prompt) :]


def module_source(name: str) -> str | None:
    """Source of a standard library module, or None where this Python lacks it. Read by path: the
    import system would import parent packages and hides the source of frozen modules."""
    path = Path(sysconfig.get_paths()["stdlib"]).joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def stdlib_modules() -> list[str]:
    """Every module of this standard library except the evaluation modules (pre-training text)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    held_out = set(EVAL_MODULES) | {f"test.test_{name.split('.')[0]}" for name in EVAL_MODULES}
    skipped = (
        "site-packages",
        "pydoc_data",
        "encodings",
        "turtledemo",
        "ensurepip",
        "lib2to3.tests",
    )
    names = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name and name not in held_out and not name.startswith(skipped) and "-" not in name:
            names.append(name)
    return names


def documents(domain: str, split: str) -> Iterator[Document]:
    """All documents of one domain; `split` is "pretrain", "train" or "eval".

    "pretrain" holds whatever this Python has besides the evaluation modules (and an unbounded
    stream of problems); "train" and "eval" are the fixed lists that prompts are drawn from.
    """
    if domain == "math":
        yield from _problems(split)
        return
    modules = {
        "pretrain": stdlib_modules,
        "train": lambda: TRAIN_MODULES,
        "eval": lambda: EVAL_MODULES,
    }
    for module in modules[split]():
        yield from _of_module(module)[domain]
    if domain == "prose":
        yield from _language_reference(split)


# Parsing is most of what a short run on the toy costs beside imports, and it reads a module for
# both domains; all modules of the two fixed lists are kept.
@functools.lru_cache(maxsize=len(TRAIN_MODULES) + len(EVAL_MODULES))
def _of_module(name: str) -> dict[str, list[Document]]:
    """The documents of a standard library module by domain, none where it cannot be parsed."""
    source = module_source(name) or ""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # lib2to3 and test data hold broken files
        return {"code": [], "prose": []}
    definitions = list(_definitions(tree, name))
    return {
        "code": list(_code(definitions, source)),
        "prose": list(_prose([(name, tree), *definitions])),
    }


def _definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, name)


def _code(definitions: list[tuple[str, Definition]], source: str) -> Iterator[Document]:
    lines = source.splitlines()
    for name, node in definitions:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = inspect.cleandoc("\n" + "\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if not 120 <= len(body) <= MAX_DOCUMENT_CHARS or body.count("\n") < 3:
            continue
        kept = body.split("\n")
        shown = 1
        while shown < len(kept) - 2 and len("\n".join(kept[:shown])) < len(body) / 4:
            shown += 1
        head = f"# {name}\n"
        yield Document("code", head + "\n".join(kept[:shown]) + "\n", head + body)


def _prose(documented: list[tuple[str, ast.Module | Definition]]) -> Iterator[Document]:
    for name, node in documented:
        docstring = ast.get_docstring(node)
        if docstring and "\n" in docstring:
            yield from _prose_document(f"Help on {name}:\n\n", docstring)


@functools.cache
def _language_reference(split: str) -> list[Document]:
    # named in full: this module is where Python keeps its language reference
    topics = importlib.import_module("pydoc_data.topics").topics
    paragraphs = {
        name: [p.strip() for p in topics[name].split("\n\n") if len(p.strip()) > 30]
        for name in sorted(topics)
    }
    held_out = {name for name in paragraphs if hashlib.sha256(name.encode()).digest()[0] % 8 == 0}
    # sections stand under several topics: what is trained on anywhere is evaluated nowhere
    trained = {p for name in paragraphs.keys() - held_out for p in paragraphs[name]}
    made: list[Document] = []
    for name, found in paragraphs.items():
        if (name in held_out) != (split == "eval"):
            continue
        for index in range(len(found) - 1):
            pair = found[index : index + 2]
            if split == "eval" and trained.intersection(pair):
                continue
            head = f"Topic {name}, part {index + 1}:\n\n"
            made += _prose_document(head, "\n\n".join(pair))
    return made


def _prose_document(head: str, text: str) -> Iterator[Document]:
    text = text.strip()
    while len(text) > MAX_DOCUMENT_CHARS and "\n\n" in text:
        text = text[: text.rindex("\n\n")].rstrip()
    words = [m.end() for m in re.finditer(r"\S+", text)]
    if not 60 <= len(text) <= MAX_DOCUMENT_CHARS or len(words) < 10:
        return
    yield Document("prose", head + text[: words[max(3, len(words) // 5)]], head + text)


# --- word problems -------------------------------------------------------------------------------

_NAMES_TEXT = """
Ada Ben Chloe Dan Emma Finn Grace Hugo Iris Jack Kara Liam Mona Nils Olga Paul Quinn Rosa Sam
Tara Uma Vera Will Yara Zoe
"""
_NAMES = _NAMES_TEXT.split()
_ITEMS_TEXT = """
apples books candles coins cookies eggs flowers marbles pencils photos plates seeds shells
stamps stickers tickets tokens toys
"""
_ITEMS = _ITEMS_TEXT.split()
_MORE = ("finds {n} more", "buys {n} more", "is given {n} more", "collects another {n}")
_LESS = ("gives away {n}", "loses {n}", "sells {n}", "breaks {n} of them")
_TIMES = ("then has {n} times as many", "multiplies the pile by {n}")
_SPLIT = ("shares them equally among {n} friends, keeping one friend's share",)
_STEP_WORDS = {
    "+": ("Adding {n} to {a} gives {b}.", "{a} + {n} = {b}.", "With {n} more there are {b}."),
    "-": ("Taking {n} from {a} leaves {b}.", "{a} - {n} = {b}.", "Without {n} there are {b}."),
    "*": ("{a} times {n} is {b}.", "{a} * {n} = {b}."),
    "/": ("{a} split {n} ways is {b} each.", "{a} / {n} = {b}."),
}
_LEAD = (
    "Let us see.",
    "{name} starts with {a}.",
    "First there are {a} {item}.",
    "We count step by step.",
)
_END = ("So the answer is {b}.", "Answer: {b}", "{name} has {b} {item}.", "That makes {b} {item}.")


def _problem(rng: random.Random) -> Document:
    name, item = rng.choice(_NAMES), rng.choice(_ITEMS)
    total = rng.randint(3, 60)
    first = total
    sentences, steps = [f"{name} has {total} {item}."], []
    for _ in range(rng.randint(1, 4)):
        kinds = (
            ["+", "-"] + ["*"] * (total <= 30) + ["/"] * any(total % n == 0 for n in (2, 3, 4, 5))
        )
        kind, before = rng.choice(kinds), total
        if kind == "+":
            n = rng.randint(2, 40)
            total, how = total + n, rng.choice(_MORE)
        elif kind == "-" and total > 2:
            n = rng.randint(1, total - 1)
            total, how = total - n, rng.choice(_LESS)
        elif kind == "/":
            n = rng.choice([n for n in (2, 3, 4, 5) if total % n == 0])
            total, how = total // n, rng.choice(_SPLIT)
        else:
            kind, n = "*", rng.randint(2, 4)
            total, how = total * n, rng.choice(_TIMES)
        sentences.append(
            f"{rng.choice(('Then', 'Later', 'Next', 'After that'))} {name} {how.format(n=n)}."
        )
        steps.append(rng.choice(_STEP_WORDS[kind]).format(a=before, n=n, b=total))
    prompt = f"Question: {' '.join(sentences)} How many {item} are there now?\nAnswer:"
    lead = rng.choice(_LEAD).format(name=name, a=first, item=item)
    end = rng.choice(_END).format(name=name, b=total, item=item)
    return Document("math", prompt, f"{prompt} {' '.join([lead, *steps, end])}")


def answer_value(text: str) -> int | None:
    """The last number of a worked answer: what a checker compares."""
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None


def _problems(split: str) -> Iterator[Document]:
    rng = random.Random({"pretrain": 1, "train": 2, "eval": 3}[split])
    while True:
        document = _problem(rng)
        held_out = hashlib.sha256(document.prompt.encode()).digest()[0] < 16
        if held_out == (split == "eval"):
            yield document


def sample(domains: tuple[str, ...], split: str, count: int, seed: int) -> list[Document]:
    """`count` distinct documents, domains in turn, drawn without replacement with `seed`."""
    per_domain = []
    for domain in domains:
        if domain == "math":
            stream = documents(domain, split)
            pool = [next(stream) for _ in range(max(4 * count, 64))]
        else:
            pool = list(documents(domain, split))
        pool = list({document.prompt: document for document in pool}.values())
        random.Random(f"{seed}-{domain}").shuffle(pool)
        per_domain.append(pool)
    chosen: list[Document] = []
    for rank in range(max(map(len, per_domain))):
        chosen += [pool[rank] for pool in per_domain if rank < len(pool)]
        if len(chosen) >= count:
            break
    return chosen[:count]
