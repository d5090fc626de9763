"""The connector that a vLLM server imports, read without vLLM."""

from __future__ import annotations

import ast
import sys

from engines.states import PLUGIN


def test_the_connector_imports_what_every_server_has():
    """The server's environment has none of this project's modules or packages."""
    found = set()
    for file in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add("." * node.level or str(node.module).partition(".")[0])
    assert {"torch", "vllm"} <= found <= {"torch", "vllm", *sys.stdlib_module_names}
