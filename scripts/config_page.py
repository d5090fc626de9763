"""Write docs/config.md, the page of all keys, and docs/rows.md, that of a report's rows.

    python -m scripts.config_page

Both come from the code that defines the keys: the meaning of one is the comment at its field; see
`phases/help.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from phases.help import config_page, rows_page
from trainer.config import asks_for_help
from trainer.files import write_atomic
from trainer.terminal import guard_terminal

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {DOCS / "config.md": config_page, DOCS / "rows.md": rows_page}


def main(arguments: list[str]) -> int:
    guard_terminal()
    if arguments and asks_for_help(arguments):
        print(__doc__)
        return 0
    if arguments:
        print(f"error: expected no arguments, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    for path, text in PAGES.items():
        write_atomic(path, text())
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
