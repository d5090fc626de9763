"""Write docs/config.md, the page of all keys, from the code that defines them.

    python -m scripts.config_page

The meaning of a key is the comment at its field in a section's dataclass; see `phases/help.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from phases.help import config_page
from trainer.config import asks_for_help
from trainer.files import write_atomic

PAGE = Path(__file__).parents[1] / "docs" / "config.md"


def main(arguments: list[str]) -> int:
    if arguments and asks_for_help(arguments):
        print(__doc__)
        return 0
    if arguments:
        print(f"error: expected no arguments, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    write_atomic(PAGE, config_page())
    print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
