"""Target traces of prompts: generated in batches, split over ranks, resumable.

What is drawn for a trace depends on (seed, prompt, sample index, position) only. A killed run
continues: finished rows are known by their prompts or by their keys, whichever process wrote them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from data.answers import AnswerFormat
from data.budget import check_budget, estimate_bytes
from data.generation_plan import GenerationPlan
from data.imported import reread
from data.prompts import Message, Prompt, Turn, user_turns
from data.render import fixed_response_ids, num_answers, reads_tools, render, with_answers
from data.rendered import describe_rendered
from data.trace_rows import Traces, trace_key
from data.traces import Trace, TraceStore
from engines.completions import complete
from engines.distribution_check import judged
from engines.witnesses import Witnesses, distinct
from target.cache import CachedModel
from target.decode import Continuation, Request, decode
from target.model import Target
from target.outputs import Logits
from target.padding import by_length, right_padded
from target.sampling import Sampling, row_key
from trainer.errors import UserError, require
from trainer.logits import chunk_rows
from trainer.losses import CompressedTeacher, compress
from trainer.progress import TokenProgress

TEACHER_GROUP = 16
# why later turns of a conversation are left out
BEHIND_CUT = "behind an answer that was cut"
REFUSED = "of a form that the chat template has no place for"
UNCHECKED = (
    "the answers of a single server are not checked here: the first run that loads the target "
    "reads some of them again, or name a second server of the same model in data.servers"
)
NOT_PUT_BACK = "behind an answer with special tokens that the chat template cannot write back"


@dataclass
class _Item:
    """One prompt and sample index on its way through the turns of its conversation."""

    prompt: Prompt
    index: int
    sample_index: int
    turns: list[Turn]
    turn: int = 0  # the current one
    answers: list[Message] = field(default_factory=list)  # to the turns before it
    fixed_ids: list[int] = field(default_factory=list)  # the data set's own answer, if it is kept

    @property
    def turn_hash(self) -> str:
        """`prompt_hash` of the row of the current turn."""
        return f"{self.prompt.hash}-{self.turn}" if self.turn else self.prompt.hash


class _Work:
    """The turns that are still to be generated: those that the store has are passed over."""

    def __init__(self, plan: GenerationPlan, target: Target, done: Traces, limit: int):
        self.plan, self.target, self.done, self.limit = plan, target, done, limit
        self.places = {key: i for i, key in enumerate(done.column("key"))}
        # a template that writes the date renders a finished prompt anew on another day
        names = (done.column(name) for name in ("prompt_hash", "sample_index", "temperature"))
        self.rows = {row: i for i, row in enumerate(zip(*names, strict=True))}
        self.num_dropped = self.num_doubled = 0  # too long; rendered like another prompt
        self.left_out: Counter[str] = Counter()  # later turns, by reason
        self.format = AnswerFormat(target.tokenizer, target.eos_ids, plan.chat_template_kwargs)

    def next_request(self, item: _Item) -> Request | None:
        """The request of the first unfinished turn, None where no turn is left.

        Raises UserError for a prompt without a token, or too long where such prompts are refused.
        """
        plan, tokenizer = self.plan, self.target.tokenizer
        while item.turn < len(item.turns):
            sampling = self.sampling(item)
            place = self.rows.get((item.turn_hash, item.sample_index, sampling.temperature))
            if place is not None:
                self.advance(item, self.done[place])
                continue
            turn = with_answers(item.turns[item.turn], item.answers)
            try:
                ids = render(turn, tokenizer, plan.system_prompt, plan.chat_template_kwargs)
            except UserError:
                if not item.turn:
                    raise
                self.leave_out(item, REFUSED)
                return None
            if not ids:
                raise UserError(f"{item.prompt.source}: the prompt has no token; remove it")
            item.fixed_ids = fixed_response_ids(item.prompt, self.format) or []
            self.target.check_ids([*ids, *item.fixed_ids], item.prompt.source)
            if len(ids) > self.limit:
                if plan.long_prompts == "refuse" and not item.turn:
                    raise UserError(
                        f"{item.prompt.source}: the prompt has {len(ids)} tokens, the limit is "
                        f"{self.limit} (context {self.target.context} less the new ones, "
                        f"data.max_prompt_tokens {plan.max_prompt_tokens}): set "
                        "data.long_prompts=drop or fewer new tokens"
                    )
                self.num_dropped += 1
                return None
            drawn = (sampling.temperature, sampling.top_k, sampling.top_p, plan.seed)
            key = trace_key(ids, *drawn, item.sample_index)
            if key not in self.places:
                return Request(ids, row_key(plan.seed, ids, item.sample_index), sampling, item)
            self.num_doubled += 1
            self.advance(item, self.done[self.places[key]])
        return None

    def advance(self, item: _Item, trace: Trace) -> None:
        """Go on to the next turn, or end the conversation where the answer cannot stand in it."""
        item.turn += 1
        # from a conversation's first tool call on, the data set's own turns are the context
        if item.turn == len(item.turns) or num_answers(item.turns[item.turn]) == len(item.answers):
            return
        message, reason = None, BEHIND_CUT
        if not self.format.is_cut(trace.response_ids, trace.finish_reason):
            message, reason = self.format.message(trace.response_ids), NOT_PUT_BACK
        if message is not None:
            item.answers.append(message)
            return
        self.leave_out(item, reason)

    def leave_out(self, item: _Item, reason: str) -> None:
        """End a conversation before its current turn."""
        self.left_out[reason] += len(item.turns) - item.turn
        del item.turns[item.turn :]

    def sampling(self, item: _Item) -> Sampling:
        """Sampling settings of an item: temperatures are cycled."""
        cycle = self.plan.temperatures
        return Sampling(
            cycle[(item.index + item.sample_index) % len(cycle)], self.plan.top_k, self.plan.top_p
        )


def generate_traces(
    target: Target,
    plan: GenerationPlan,
    folder: Path,
    *,
    batch_size: int,
    rows_per_shard: int,
    rank: int = 0,
    world: int = 1,
    barrier: Callable[[], None] = lambda: None,
    label: str = "traces",
    servers: Callable[[], AbstractContextManager[Sequence[str]]] | None = None,
) -> Traces:
    """Fill the trace store `folder`, if it is not complete, and return all its rows.

    `servers`: a context that starts servers and yields their addresses, entered only where there is
    something to generate; each gets `batch_size` rows at a time. Raises UserError where a prompt or
    the store does not fit the plan, RunFault where the disk cannot be written.
    """
    assert bool(plan.served) == (servers is not None)
    line = describe_rendered([prompt.text for prompt in plan.prompts], target.tokenizer)
    if rank == 0 and line:
        print(f"{label}: {line}")
    with_tools = sum(bool(prompt.tools) for prompt in plan.prompts)
    if rank == 0 and with_tools and not reads_tools(target.tokenizer):
        print(f"{label}: {with_tools} prompts have tools, which the chat template does not read")
    _check_plan(target, plan)
    store = TraceStore.open(folder, plan.identity(target))
    with contextlib.ExitStack() as held:
        if rank == 0 and not store.is_complete(()):
            held.enter_context(store.exclusive())
        barrier()  # from here on no other command can complete it: all ranks see the same
        if not store.is_complete(()):
            if not (servers or target.has_layers):
                raise UserError(
                    "is left to a target without layers, which writes no text",
                    key="data.engine", value="hf", remedy="name openai or vllm, or set "
                    "model.parts=all",
                )  # fmt: skip
            with servers() if servers else contextlib.nullcontext(()) as urls:
                if rank == 0 and not target.has_layers and distinct(urls) == 1:
                    if target.parts == "none":  # else they are compared with states before training
                        print(f"{label}: {UNCHECKED}", flush=True)
                    store.unchecked = True
                _fill(target, plan, store, batch_size, rows_per_shard, rank, world, label, urls)
            barrier()
            if rank == 0:
                store.finish(num_writers=world)
            barrier()
    found = store.load()
    if store.unchecked and target.has_layers:
        evidence = reread(target, found)
        if said := judged(evidence):
            raise UserError(
                f"{label}: the answers in {folder} are not those of {target.name} ({said}), and "
                "their server was not checked: delete that folder, and serve this model"
            )
        barrier()  # all have read the mark
        if rank == 0:
            store.unchecked = False
            print(f"{label}: {len(evidence)} answers of an unchecked server are the target's own")
    if rank == 0 and store.num_dropped:
        limit = longest_prompt(target, plan)
        print(f"{label}: {store.num_dropped} prompts or later turns over {limit} tokens left out")
    if rank == 0:
        for reason, count in store.left_out.items():
            print(f"{label}: {count} later turns left out, {reason}")
        _warn_of_foreign_end(target, plan, label, found)
    return found


def _warn_of_foreign_end(target: Target, plan: GenerationPlan, label: str, traces: Traces) -> None:
    """Name the token with which the chat template ends a turn where answers go on behind it."""
    answers = AnswerFormat(target.tokenizer, target.eos_ids, plan.chat_template_kwargs)
    if (end := answers.foreign_end) is None:
        return
    if count := sum(end in trace.response_ids for trace in traces):
        name = f"{target.tokenizer.decode([end])!r} ({end})"
        print(
            f"warning: {label}: {count} of {len(traces)} answers hold {name}, with which the chat "
            "template ends a turn, but which is neither the tokenizer's eos_token nor an "
            "eos_token_id of the generation config: they go on behind it, as on a server; name it "
            "in one of the two if it ends an answer",
            flush=True,
        )


def longest_prompt(target: Target, plan: GenerationPlan) -> int:
    """Tokens that a prompt may have."""
    room = target.context - plan.max_new_tokens - plan.lookahead
    return min(room, plan.max_prompt_tokens or room)


def _check_plan(target: Target, plan: GenerationPlan) -> None:
    """UserError where no prompt fits, the target has fewer tokens than are kept of it, or its chat
    template fails on a word in the form of the first prompt: before there is a store. The prompts
    themselves are tokenised once, by one process each."""
    if longest_prompt(target, plan) < 1:
        raise UserError(
            f"max_new_tokens={plan.max_new_tokens} leaves no room for a prompt in the target's "
            f"context of {target.context}: use fewer new tokens"
        )
    rule = f"be at most {target.vocab_size}, the tokens of the target"
    require(plan.teacher_top_k <= target.vocab_size, "data.teacher_top_k", rule, plan.teacher_top_k)
    first = plan.prompts[0]
    word: Turn = "a" if first.messages is None else [{"role": "user", "content": "a"}]
    if first.ids is None:
        render(word, target.tokenizer, plan.system_prompt, plan.chat_template_kwargs)


def _fill(
    target: Target,
    plan: GenerationPlan,
    store: TraceStore,
    batch_size: int,
    rows_per_shard: int,
    rank: int,
    world: int,
    label: str,
    servers: Sequence[str],
) -> None:
    work = _Work(plan, target, store.load(), longest_prompt(target, plan))
    items = [
        _Item(prompt, index, sample, list(user_turns(prompt)))
        for index, prompt in enumerate(plan.prompts)
        for sample in range(plan.samples_per_prompt)
    ]
    # by place, not by what remains: other ranks may be writing already
    items = items[rank::world]
    pending = [request for item in items if (request := work.next_request(item)) is not None]
    turns = world * sum(len(item.turns) - item.turn for item in items)
    if rank == 0:
        mean = sum(len(r.prompt_ids) for r in pending) / max(1, len(pending))
        teacher_size = plan.teacher_top_k, plan.teacher_samples
        check_budget(store.folder, estimate_bytes(turns, mean, plan.stored_tokens, *teacher_size))
    teacher = _Teacher(target, plan) if plan.teacher_top_k or plan.teacher_samples else None
    progress = TokenProgress(label, enabled=rank == 0)
    progress.part(
        "", rows=sum(len(r.tag.turns) - r.tag.turn for r in pending),
        longest=plan.max_new_tokens + plan.lookahead,
    )  # fmt: skip
    with store.writer(rank, rows_per_shard) as writer:
        for done_row in _continuations(target, plan, pending, batch_size, servers, progress):
            item = done_row.request.tag
            trace = _trace(plan, work, item, done_row)
            for finished in [trace] if teacher is None else teacher.add(trace):
                writer.add(finished)
            expected = len(item.turns)
            work.advance(item, trace)
            following = work.next_request(item)
            progress.rows -= expected - len(item.turns)
            if following is not None:
                pending.append(following)  # they are taken from the end of this very list
            progress.finish_row()
        for finished in teacher.rest() if teacher else ():
            writer.add(finished)
        writer.drop(work.num_dropped, work.left_out)
    progress.close()
    if num_doubled := work.num_doubled + writer.num_doubled:
        print(f"{label}: {num_doubled} rows left out, their prompts are others' once rendered")


def _continuations(
    target: Target,
    plan: GenerationPlan,
    pending: list[Request],
    batch_size: int,
    servers: Sequence[str],
    progress: TokenProgress,
) -> Iterator[Continuation]:
    if plan.served:
        witness = None if target.has_layers else Witnesses(target, distinct(servers)).measure
        for row in complete(
            target, servers, pending, max_new_tokens=plan.max_new_tokens, concurrency=batch_size,
            stop_strings=plan.stop_strings, lookahead=plan.lookahead, witness=witness,
        ):  # fmt: skip
            # a server returns whole answers
            progress.advance(len(row.response_ids) + len(row.lookahead_ids))
            yield row
        return
    yield from decode(
        CachedModel(target.model), pending, max_new_tokens=plan.max_new_tokens,
        eos_ids=target.eos_ids, batch_size=batch_size, lookahead=plan.lookahead,
        tokenizer=target.tokenizer, stop_strings=plan.stop_strings, vocab_size=target.vocab_size,
        on_tokens=progress.advance,
    )  # fmt: skip


def _trace(plan: GenerationPlan, work: _Work, item: _Item, row: Continuation) -> Trace:
    target, sampling = work.target, row.request.sampling
    return Trace(
        prompt_ids=row.request.prompt_ids,
        response_ids=row.response_ids,
        source="target",
        domain=item.prompt.domain,
        conversation_id=item.prompt.conversation_id,
        turn=item.turn,
        sample_index=item.sample_index,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=plan.seed,
        finish_reason=row.finish_reason,
        model_hash=target.fingerprint["weights"],
        tokenizer_hash=target.fingerprint["tokenizer"],
        lookahead_ids=row.lookahead_ids,
        # cut like the target's own answers, so that both sources cost the same tokens
        fixed_ids=item.fixed_ids[: plan.max_new_tokens],
        prompt_hash=item.turn_hash,
        index=item.index,
    )


class _Teacher:
    """Adds the compressed teacher block, by one parallel pass over a group of finished traces.

    Compressing in the decoding loop would cost a softmax over the vocabulary at each token.
    """

    def __init__(self, target: Target, plan: GenerationPlan):
        self.target, self.plan, self.waiting = target, plan, list[Trace]()

    def add(self, trace: Trace) -> list[Trace]:
        self.waiting.append(trace)
        return self.rest() if len(self.waiting) == TEACHER_GROUP else []

    def rest(self) -> list[Trace]:
        finished, self.waiting = self.waiting, []
        for group in by_length(finished, lambda t: t.num_tokens, TEACHER_GROUP):
            ids, _ = right_padded([t.prompt_ids + t.response_ids for t in group])
            logits = self.target.outputs(ids.to(self.target.device), project_later=True).logits
            assert logits is not None
            for row, trace in enumerate(group):
                blocks = list(self._blocks(trace, logits, row))
                trace.teacher_ids = _rows(block.ids for block in blocks)
                trace.teacher_logp = _rows(block.logp for block in blocks)
                trace.teacher_log_tail = _rows(block.log_tail for block in blocks)
                if self.plan.teacher_samples:
                    trace.tail_ids = _rows(block.tail_ids for block in blocks)
                    trace.tail_logp = _rows(block.tail_logp for block in blocks)
        return finished

    def _blocks(self, trace: Trace, logits: Logits, row: int) -> Iterator[CompressedTeacher]:
        """Compress the distributions of a response, whose logits are in this row, in chunks."""
        top_k, samples = self.plan.teacher_top_k, self.plan.teacher_samples
        # drawn on the CPU and seeded by the row, so that neither device nor grouping matters
        generator = torch.Generator().manual_seed(
            row_key(self.plan.seed, trace.prompt_ids, trace.sample_index) & (2**63 - 1)
        )
        uniforms = torch.empty(len(trace.response_ids), samples, dtype=torch.float64)
        uniforms.uniform_(generator=generator)
        at = len(trace.prompt_ids) - 1
        for drawn in uniforms.split(chunk_rows(self.target.device, self.target.vocab_size)):
            own = logits[row, slice(at, at + len(drawn))].float()
            yield compress(own, top_k, samples, uniforms=drawn.to(own))
            at += len(drawn)


def _rows(parts: Iterable[torch.Tensor | None]) -> list[Any]:
    return [row for part in parts if part is not None for row in part.tolist()]
