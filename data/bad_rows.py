"""Rows of prompts that cannot be read: counted by reason, left out while they are few.

One rule for every source: up to 1 % of the rows, and at least 3, are left out. More stop the run,
unless data.bad_rows=drop leaves out all of them. Of eval.prompts, which a report measures whole, a
single one stops it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainer.errors import UserError

FEW, NONE, DROP = "few", "none", "drop"  # how many rows may be left out
LEAST, SHARE = 3, 0.01  # of FEW

_log = logging.getLogger(__name__)


class BadRow(ValueError):
    """A row that cannot be read. `reason`: what is wrong, in the same words for rows of one kind;
    `detail`: what this row holds."""

    def __init__(self, reason: str, detail: str = ""):
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason} ({detail})" if detail else reason)


@dataclass
class BadRows:
    """The rows of one source that cannot be read, by reason, in the order of the source.

    `places`: "x.jsonl line 3"; `details`: what the first row of each reason holds.
    """

    num_rows: int = 0  # read or not
    places: dict[str, list[str]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, error: BadRow) -> None:
        self.places.setdefault(error.reason, []).append(place)
        self.details.setdefault(error.reason, error.detail)

    @property
    def count(self) -> int:
        return sum(map(len, self.places.values()))

    def check(self, key: str, source: str, allowed: str) -> None:
        """Log what is left out, by reason. Raises UserError where more rows cannot be read than
        `allowed` says: FEW, NONE or DROP."""
        if not self.count:
            return
        most = {FEW: max(LEAST, int(SHARE * self.num_rows)), NONE: 0, DROP: self.num_rows}[allowed]
        if self.count > most:
            rule = f"{self.count} of {self.num_rows} rows cannot be read"
            if allowed == FEW:
                rule += f", more than {most}"
            raise UserError(
                f"{rule}: {self.table(source, all_places=True)}",
                key=key,
                value=source,
                remedy="repair them, or set data.bad_rows=drop to leave them out",
            )
        _log.info(
            "%s: %d of %d rows cannot be read and are left out: %s",
            source, self.count, self.num_rows, self.table(source),
        )  # fmt: skip

    def table(self, source: str, all_places: bool = False) -> str:
        """Each reason with how many rows of `source` it has and the first of them, or all."""
        found = []
        for reason, named in self.places.items():
            places = [place.removeprefix(f"{source} ") for place in named]
            detail = f" ({self.details[reason]})" if self.details[reason] else ""
            line = f"{len(places)} x {reason}, first {places[0]}{detail}"
            if all_places and len(places) > 1:
                line += f", all: {ranges(places)}"
            found.append(line)
        return "; ".join(found)

    def facts(self) -> dict[str, object]:
        """What a report says of them: no text of a row."""
        reasons = [
            {"reason": reason, "count": len(places), "first": places[0]}
            for reason, places in self.places.items()
        ]
        return {"rows": self.num_rows, "left_out": self.count, "reasons": reasons}


def ranges(places: Iterable[str]) -> str:
    """The numbers of these places, neighbours as a range, by file: "line 3-5 9"."""
    files: dict[str, list[list[int]]] = {}
    for place in places:
        file, _, number = place.rpartition(" ")
        found, here = files.setdefault(file, []), int(number)
        if found and found[-1][1] == here - 1:
            found[-1][1] = here
        else:
            found.append([here, here])
    return ", ".join(
        f"{file} " + " ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
        for file, found in files.items()
    )
