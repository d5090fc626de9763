"""The collection of answers that a report shows as text."""

from __future__ import annotations

from collections.abc import Sequence

from data.prompts import Prompt, Rendered, user_turns
from data.traces import Trace
from eval.measure import Measurement, spread
from eval.report.readings import NUM_PROMPTS, Json, Tokenizer, answer, reading
from eval.report.rows import draft_shape


class ReadingCollector:
    """Collects the answers to the same few prompts, at every temperature and with every shape of
    the draft."""

    def __init__(self, prompts: Sequence[Prompt], tokenizer: Tokenizer):
        self.prompts, self.tokenizer = prompts, tokenizer
        self._traces: dict[str, Trace] = {}
        self._answers: dict[str, list[Json]] = {}

    def choose(self, traces: Sequence[Trace]) -> list[str]:
        """Choose the prompts to show, from as many domains as there are. Returns their hashes."""
        first = [trace for trace in traces if trace.turn == 0]  # later ones build on answers
        for place in spread([trace.domain for trace in first], NUM_PROMPTS):
            self._traces.setdefault(first[place].prompt_hash, first[place])
        return list(self._traces)

    def add(self, real: Measurement) -> None:
        """Add the answers that decoding gave."""
        row = real.row
        for one in real.shown:
            about = {
                "drafter": row.drafter,
                "temperature": row.temperature,
                "draft": draft_shape(row),
                "finish_reason": one.finish_reason,
            }
            found = answer(
                self.tokenizer, one.request.prompt_ids, one.response_ids, one.rounds, about
            )
            self._answers.setdefault(one.request.tag, []).append(found)

    def all(self) -> list[Json]:
        """Return the part `readings` of the report: of the prompts that were decoded."""
        found = [
            reading(self._asked(trace), tag, trace.domain, self._answers[tag])
            for tag, trace in self._traces.items()
            if tag in self._answers
        ]
        return [one for one in found if one is not None]

    def _asked(self, trace: Trace) -> str:
        """The text that the target answers: the prompt, or its user message of this turn."""
        turn = list(user_turns(self.prompts[trace.index]))[trace.turn]
        if isinstance(turn, Rendered):
            return self.tokenizer.decode(
                list(turn), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return turn if isinstance(turn, str) else turn[-1]["content"]
