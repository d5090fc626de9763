"""Write docs/config.md, the page of all keys, from the code that defines them.

    python -m scripts.config_page

The meaning of a key is the comment at its field in a section's dataclass; see `phases/help.py`.
"""

from __future__ import annotations

from pathlib import Path

from phases.help import config_page
from trainer.files import write_atomic

PAGE = Path(__file__).parents[1] / "docs" / "config.md"


def main() -> None:
    write_atomic(PAGE, config_page())
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
