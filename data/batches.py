"""Batches as a function of their index, so that a checkpoint need not save their order.

A permutation of the traces per epoch decides their order; the source of each response (the
data set's own, the target's, or the drafter's, to be generated) is drawn from the shares of the
mix with randomness keyed by (seed, index).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from data.trace_rows import lengths, num_tokens
from data.traces import Trace
from drafters.text import Text
from target.padding import right_padded
from target.sampling import keyed_uniform, row_key
from target.shared_text import TextGroup
from trainer.device import sent
from trainer.errors import UserError
from trainer.losses import CompressedTeacher
from trainer.shift import response_mask, supervised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SOURCES = ("fixed", "target", "draft")
RESPONSES = {"fixed": "fixed_ids", "target": "response_ids"}  # fields of a trace
LENGTHS = 8  # of padded rows; each one more is another shape to compile and to choose kernels for


@dataclass
class Batch:
    """Right-padded or packed rows of token ids.

    `input_ids`, `position_ids`, `document_ids`: [B, L] int64 (document -1: padding); `loss_mask`:
    [B, L] bool over tokens. `prompts`, `responses` and `sources` have one entry per text; a text of
    source "draft" has no response until a recipe generates one. A text is a row, unless
    `text_starts` names the row and the column where each begins, and `document_ids` the text of
    each token. `teacher` holds the N supervised positions, in the order of `trainer.shift`;
    `lengths` are those that rows were padded to, see `collate`. `group`: the processes that share
    the rows, of which this one trains its own columns, see `shared`; None: it trains all. `seed`:
    that of the run; with the `index`, which no other batch of the run has in any epoch, it decides
    what is drawn by `uniform`.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    prompts: list[list[int]]
    responses: list[list[int]]
    sources: list[str]
    num_supervised: int
    index: int = 0
    teacher: CompressedTeacher | None = None
    text_starts: list[tuple[int, int]] | None = None
    lengths: Sequence[int] = ()
    group: TextGroup | None = None
    seed: int = 0

    @property
    def documents(self) -> torch.Tensor | None:
        """[B, L] int64, where texts share a row: tokens of different ones do not see each other."""
        return None if self.text_starts is None else self.document_ids

    def text(self, columns: torch.Tensor | None = None) -> Text:
        """What a drafter reads of it; `columns` [B, L] bool: where rounds may begin, None: all."""
        return Text(self.input_ids, self.position_ids, columns, self.documents, self.group)

    def starts(self) -> list[tuple[int, int]]:
        """Row and column of the first token of each text."""
        return self.text_starts or [(row, 0) for row in range(len(self.prompts))]

    def supervised(self, depth: int = 0, anchors: torch.Tensor | None = None) -> torch.Tensor:
        """`trainer.shift.supervised` of these texts, [B, L-1] bool: of this process's columns."""
        return supervised(self.loss_mask, depth, self.documents, self.own, anchors)

    def uniform(self, stream: str) -> torch.Tensor:
        """Random numbers of the tokens, [B, L] float64 in [0, 1), those of padding included.

        A function of `seed` and `index`, of the text, of the place in it and of `stream`: the same
        on every device and in a resumed run, in whatever row a text stands and on whatever process.
        A text has other numbers in the next epoch, where it comes with another index.
        """
        texts, device = zip(self.prompts, self.responses, strict=True), self.input_ids.device
        keys = [row_key(self.seed, [*prompt, *response], self.index) for prompt, response in texts]
        if self.text_starts is None:
            rows, columns = (torch.arange(n, device=device) for n in self.input_ids.shape)
            owner, places = rows.unsqueeze(1), columns.expand_as(self.input_ids)
        else:  # padding, of no text, takes numbers of the first one
            owner, places = self.document_ids.clamp(min=0), self.position_ids
        owner = owner.expand_as(places)
        return keyed_uniform(torch.tensor(keys, device=device)[owner], places, stream)

    @property
    def own(self) -> torch.Tensor | None:
        """The columns [L] bool that this process trains; None: all."""
        if self.group is None:
            return None
        return self.group.owns(self.loss_mask.shape[1], self.loss_mask.device)

    def shared(self, group: TextGroup | None) -> Batch:
        """These texts as one process of `group` trains them: rounds that begin in its own columns,
        or the tokens that logits there score. They see the keys of the whole text, while queries,
        later steps, heads and losses, which take most of the memory, are those of its own."""
        if group is None:
            return self
        made = dataclasses.replace(self, group=group)
        own = made.supervised()
        made.num_supervised = int(own.sum())
        if self.teacher is not None:
            stored = own[self.supervised()]
            made.teacher = self.teacher.each(lambda part: part[stored])
        return made

    def texts_of(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Number of the text, from 0, whose token each of these logits scores, [N] int64."""
        return rows if self.text_starts is None else self.document_ids[rows, index + 1]

    def count(self, trained: torch.Tensor, reduction: str) -> float:
        """Denominator of a mean by "token" or "sequence"; `trained` [B, L-1] bool: its logits."""
        if reduction == "token":
            return float(trained.sum())
        return float(self.texts_of(*trained.nonzero(as_tuple=True)).unique().numel())

    def to(self, device: torch.device | str) -> Batch:
        """A copy with all tensors on `device`."""
        moved: dict[str, object] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, torch.Tensor):
                moved[item.name] = sent(value, device)
            elif isinstance(value, CompressedTeacher):
                moved[item.name] = value.each(lambda part: sent(part, device))
        return dataclasses.replace(self, **moved)


def collate(
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    sources: Sequence[str],
    index: int = 0,
    lengths: Sequence[int] = (),
    seed: int = 0,
) -> Batch:
    """A batch of one text per row, right-padded to the longest, or to the first of the ascending
    `lengths` that holds it.

    The mask comes from the boundary of prompt and response ids, never from text or the pad id.
    """
    starts = [len(p) for p in prompts]
    ends = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    texts = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    ids, positions = right_padded(texts, lengths)
    documents = torch.where(positions < torch.tensor(ends).unsqueeze(1), 0, -1)
    mask = response_mask(starts, ends, ids.shape[1])
    mask[:, 0] = False  # nothing precedes the first token: there are no logits for it
    return Batch(
        ids,
        mask,
        positions,
        documents,
        list(prompts),
        list(responses),
        list(sources),
        int(mask.sum()),
        index,
        lengths=lengths,
        seed=seed,
    )


@dataclass
class Batches:
    """`batches.at(index)`: one text per row.

    `mix`: shares of SOURCES, which sum to one; `per`: one source per "batch" or per "example";
    `ramp`: batches over which the share of draft text rises to its value, while the other sources
    fill in; `teacher`: attach the compressed teacher stored with the traces (target rows only);
    `lengths`: of rows, see `collate`. Raises UserError where the traces lack fixed responses,
    response tokens or a teacher.
    """

    traces: Sequence[Trace]
    mix: Mapping[str, float]
    batch_size: int
    seed: int
    per: str = "batch"
    ramp: int = 0
    teacher: bool = False
    rank: int = 0
    world: int = 1
    lengths: Sequence[int] = ()
    _order: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mix = {source: share for source, share in self.mix.items() if share > 0}
        if self.mix.get("fixed"):
            missing = int((lengths(self.traces, "fixed_ids") == 0).sum())
            if missing:
                raise UserError(
                    f"method.data_mix needs fixed responses, {missing} of {len(self.traces)} "
                    "prompts have none: "
                    "name data.response_column or set fixed to 0"
                )
        responses = lengths(self.traces, "response_ids")
        if not responses.any():
            raise UserError(
                "no trace has a response token: nothing is supervised; check the target and its "
                "EOS ids"
            )
        if self.teacher and (lengths(self.traces, "teacher_ids") != responses).any():
            raise UserError(
                "traces carry no compressed teacher: set data.teacher_top_k and "
                "data.teacher_samples"
            )

    def at(self, index: int) -> Batch:
        """The batch of global micro-step `index` for this rank."""
        rng = np.random.default_rng([self.seed, index])
        names, shares = list(self.mix), np.array(self._shares(index), dtype=float)
        shares /= shares.sum()  # numpy refuses sums that a user's rounding makes
        everyone = self.batch_size * self.world
        drawn = [
            str(s) for s in rng.choice(names, size=1 if self.per == "batch" else everyone, p=shares)
        ]
        sources = drawn * everyone if self.per == "batch" else drawn
        first = self.rank * self.batch_size
        rows = [self._trace(index * everyone + first + i) for i in range(self.batch_size)]
        sources = sources[first : first + self.batch_size]
        responses = [response_of(row, source) for row, source in zip(rows, sources, strict=True)]
        prompts = [row.prompt_ids for row in rows]
        batch = collate(prompts, responses, sources, index, self.lengths, self.seed)
        if self.teacher:
            batch.teacher = join_teachers(rows)
        return batch

    def _shares(self, index: int) -> list[float]:
        draft = self.mix.get("draft", 0.0)
        if draft in (0.0, 1.0) or index >= self.ramp:
            return list(self.mix.values())
        now = draft * (index + 1) / self.ramp
        return [
            now if name == "draft" else share * (1 - now) / (1 - draft)
            for name, share in self.mix.items()
        ]

    def _trace(self, position: int) -> Trace:
        epoch, place = divmod(position, len(self.traces))
        if epoch not in self._order:
            if len(self._order) > 2:
                self._order.clear()
            self._order[epoch] = epoch_order(self.seed, epoch, len(self.traces))
        return self.traces[int(self._order[epoch][place])]


def longest_text(traces: Sequence[Trace], mix: Mapping[str, float], max_new_tokens: int) -> int:
    """Tokens of the longest text of a mix; 0 for an empty one. `max_new_tokens`: of a response that
    the drafter is to write."""
    longest = (
        lengths(traces, "prompt_ids").max() + max_new_tokens
        if source == "draft"
        else num_tokens(traces, RESPONSES[source]).max()
        for source, share in mix.items()
        if share > 0
    )
    return int(max(longest, default=0))


def few_lengths(
    traces: Sequence[Trace], mix: Mapping[str, float], max_new_tokens: int
) -> list[int]:
    """At most `LENGTHS` lengths of rows, ascending, for all texts of a mix: multiples of 64, whole
    tiles of a kernel, but for the last one, so that no row is longer than the longest text may
    be. `max_new_tokens`: of a response that the drafter is to write."""
    longest = longest_text(traces, mix, max_new_tokens)
    step = -(-longest // (64 * LENGTHS)) * 64
    return [min(length, longest) for length in range(step, longest + step, step)]


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of an epoch: a permutation of 0..count-1, [count] int64."""
    return np.random.default_rng([seed, epoch, 1]).permutation(count)


def response_of(trace: Trace, source: str) -> list[int]:
    """Response ids of a source: "fixed", "target", or "draft", which has none yet."""
    return [] if source == "draft" else getattr(trace, RESPONSES[source])


def join_teachers(rows: Sequence[Trace]) -> CompressedTeacher:
    """The stored teachers of all rows, positions in the order of `trainer.shift`.

    That is row by row, left to right. The tail is left out where a row has none.
    """

    def cat(name: str, dtype: type[np.number]) -> torch.Tensor:
        # numpy reads nested lists five times as fast as torch
        return torch.cat([torch.from_numpy(np.array(getattr(row, name), dtype)) for row in rows])

    tail = all(row.tail_ids is not None for row in rows)
    return CompressedTeacher(
        cat("teacher_ids", np.int64),
        cat("teacher_logp", np.float32),
        cat("teacher_log_tail", np.float32),
        cat("tail_ids", np.int64) if tail else None,
        cat("tail_logp", np.float32) if tail else None,
    )


PREVIEW_CHARACTERS, PREVIEW_TOKENS = 240, 48  # of the prompt's end, of the response's beginning


def preview(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> str:
    """The first supervised text with its trained tokens in brackets, printed before step 1.

    It shows the end of the prompt and the beginning of the response.
    """
    for text, (row, first) in enumerate(batch.starts()):
        prompt_ids, response_ids = batch.prompts[text], batch.responses[text]
        begin = first + len(prompt_ids)
        trained = batch.loss_mask[row, begin : begin + len(response_ids)].tolist()
        if any(trained):
            break
    else:
        return "first batch: no response yet (the drafter generates it)"
    shown = [str(tokenizer.decode([token])) for token in response_ids[:PREVIEW_TOKENS]]
    response = "".join(f"[{t}]" if on else t for t, on in zip(shown, trained, strict=False))
    prompt = str(tokenizer.decode(prompt_ids))
    return (
        f"first batch, row {row} ({batch.sources[text]}): {len(prompt_ids)} prompt tokens, "
        f"{sum(trained)} trained, in brackets\n"
        f"{'...' * (len(prompt) > PREVIEW_CHARACTERS)}{prompt[-PREVIEW_CHARACTERS:]}"
        f"{response}{'...' * (len(response_ids) > PREVIEW_TOKENS)}"
    )
