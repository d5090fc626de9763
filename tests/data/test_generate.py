"""Prompts to target traces: what is drawn, conversations, resuming, the stored teacher."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil

import pytest
import torch

from data.config import DataConfig
from data.generate import NOT_PUT_BACK, _Item, _Work, generate_traces
from data.generation_plan import GenerationPlan, traces_folder
from data.prompts import Prompt, load_prompts, user_turns
from data.traces import TraceStore
from scripts import generate
from target.model import Target
from target.sampling import row_key
from tests.data.test_traces import make
from tests.helpers.commands import TWO, command, finish, only, start, training_stores, write_jsonl
from tests.helpers.tiny import EOS, save_tiny, tiny_tokenizer
from trainer import progress
from trainer.errors import UserError
from trainer.losses import compress

NEW = 12


def texts(number: int = 8) -> list[Prompt]:
    """Of different lengths, so that batches are ragged."""
    words = [f"{'more ' * (i % 3)}words {i}: " for i in range(number)]
    return [Prompt(text, None, None, "test", f"row {i}", f"c{i}") for i, text in enumerate(words)]


def conversation(*turns: str, system: str | None = None) -> Prompt:
    messages = [{"role": "user", "content": text} for text in turns]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Prompt(None, tuple(messages), None, "chat", "row 1", "c1")


def plan(prompts=None, **changes) -> GenerationPlan:
    prompts = texts() if prompts is None else prompts
    settings = {"temperatures": (1.0,), "max_new_tokens": NEW}
    return GenerationPlan("test", tuple(prompts), **(settings | changes))


def fill(target, folder, wanted, **options):
    return generate_traces(
        target, wanted, folder, **({"batch_size": 4, "rows_per_shard": 3} | options)
    )


# what is drawn


@pytest.fixture(scope="module")
def usual(tiny_target, tmp_path_factory):
    return fill(tiny_target("llama"), tmp_path_factory.mktemp("usual"), plan(samples_per_prompt=2))


def test_a_trace_says_where_it_comes_from(tiny_target, usual):
    target = tiny_target("llama")
    assert [(t.index, t.sample_index) for t in usual] == [(i, s) for i in range(8) for s in (0, 1)]
    prompts = texts()
    for trace in usual:
        prompt = prompts[trace.index]
        assert target.tokenizer.decode(trace.prompt_ids) == prompt.text
        assert (trace.prompt_hash, trace.conversation_id) == (prompt.hash, prompt.conversation_id)
        assert (trace.source, trace.domain, trace.turn) == ("target", "test", 0)
        assert trace.model_hash == target.fingerprint["weights"]
        ended = trace.response_ids[-1] == EOS
        assert trace.finish_reason == ("eos" if ended else "length")
        assert ended or len(trace.response_ids) == NEW
        assert EOS not in trace.response_ids[:-1]


def test_two_samples_of_a_prompt_differ(usual):
    assert all(
        a.response_ids != b.response_ids for a, b in zip(usual[::2], usual[1::2], strict=True)
    )


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 7}, {"rows_per_shard": 100}])
def test_batch_size_changes_no_trace(tiny_target, tmp_path, usual, options):
    assert fill(tiny_target("llama"), tmp_path, plan(samples_per_prompt=2), **options) == usual


def test_the_order_of_prompts_changes_no_response(tiny_target, tmp_path, usual):
    found = fill(tiny_target("llama"), tmp_path, plan(texts()[::-1], samples_per_prompt=2))
    assert {t.key: t.response_ids for t in found} == {t.key: t.response_ids for t in usual}


@pytest.mark.parametrize("world", [2, 3])
def test_the_number_of_processes_changes_no_trace(tiny_target, tmp_path, usual, world):
    """Ranks one after the other: none waits, and rank 0, which finishes the store, comes last."""
    wanted, target = plan(samples_per_prompt=2), tiny_target("llama")
    for rank in reversed(range(world)):
        found = fill(target, tmp_path, wanted, rank=rank, world=world)
    assert found == usual
    assert len({p.name[:8] for p in tmp_path.glob("*.parquet")}) == world


def test_seed_and_sampling_change_what_is_drawn(tiny_target, tmp_path, usual):
    first = [t.response_ids for t in usual[::2]]
    changes = [{"seed": 1}, {"temperatures": (0.5,)}, {"top_k": 3}, {"top_p": 0.4}]
    found = [first]
    for number, change in enumerate(changes):
        traces = fill(tiny_target("llama"), tmp_path / str(number), plan(**change))
        found.append([t.response_ids for t in traces])
    assert all(a != b for i, a in enumerate(found) for b in found[:i])


def test_temperatures_cycle_over_prompts_and_samples(tiny_target, tmp_path):
    wanted = plan(texts(4), temperatures=(0.0, 0.7, 1.0), samples_per_prompt=2)
    found = fill(tiny_target("llama"), tmp_path, wanted)
    cycle = {(t.index, t.sample_index): t.temperature for t in found}
    assert cycle == {(i, s): (0.0, 0.7, 1.0)[(i + s) % 3] for i in range(4) for s in (0, 1)}


def test_greedy_traces_are_transformers_own_generate(tiny_target, tmp_path):
    target = tiny_target("gemma3")
    for trace in fill(target, tmp_path, plan(temperatures=(0.0,))):
        ids = torch.tensor([trace.prompt_ids])
        plain = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW
        )
        assert plain[0, len(trace.prompt_ids) :].tolist() == trace.response_ids


def test_look_ahead_goes_on_past_the_end(tiny_target, tmp_path, usual):
    found = fill(tiny_target("llama"), tmp_path, plan(samples_per_prompt=2, lookahead=4))
    assert [t.response_ids for t in found] == [t.response_ids for t in usual]
    assert all(len(t.lookahead_ids) == 4 for t in found)


def test_padding_of_the_head_is_never_produced(tiny_target, tmp_path):
    target = tiny_target("llama_padded")
    assert target.logits_width > target.vocab_size == 100
    found = fill(target, tmp_path, plan(samples_per_prompt=8, temperatures=(1.5,)))
    assert max(token for t in found for token in t.response_ids) < 100


# where an answer ends


def test_every_id_of_the_eos_set_ends(tiny_target, tmp_path, usual):
    """Ids that the model really produces in the middle of its text are made EOS."""
    middle = tuple({t.response_ids[2] for t in usual if len(t.response_ids) > 4})
    assert len(middle) > 1
    target = dataclasses.replace(tiny_target("llama"), eos_ids=(EOS, *middle))
    found = fill(target, tmp_path, plan(samples_per_prompt=2))
    ends = {t.response_ids[-1] for t in found if t.finish_reason == "eos"}
    assert len(ends & set(middle)) > 1
    for short, long in zip(found, usual, strict=True):
        assert short.response_ids == long.response_ids[: len(short.response_ids)]
        assert not set(short.response_ids[:-1]) & {EOS, *middle}


def test_a_stop_string_ends_even_where_it_spans_tokens(tiny_target, tmp_path, usual):
    decode = tiny_target("llama").tokenizer.decode
    long = [t for t in usual if len(t.response_ids) > 6 and t.finish_reason == "length"]
    stop = decode(long[0].response_ids[3:5])  # one character per token
    found = fill(tiny_target("llama"), tmp_path, plan(samples_per_prompt=2, stop_strings=(stop,)))
    stopped = [t for t in found if t.finish_reason == "stop"]
    assert stopped
    for trace in found:
        text = decode(trace.response_ids)
        assert text.endswith(stop) == (trace.finish_reason == "stop")
        assert stop not in text[: -len(stop)]


# conversations


def chat(tiny_target, ends=range(30, 100)):
    """`ends`: further ids at which an answer ends, besides those of special tokens, so that few
    are cut."""
    ids = (EOS, 1, 2, 3, *ends)
    return dataclasses.replace(tiny_target("llama", chat_template=True), eos_ids=ids)


def test_each_turn_is_a_row_after_the_targets_own_answers(tiny_target, tmp_path):
    target = chat(tiny_target)
    prompts = [
        conversation("one?", "two?"),
        dataclasses.replace(conversation("x"), conversation_id="c2"),
    ]
    first, second, other = fill(target, tmp_path, plan(prompts, temperatures=(0.7,)))
    assert [(t.conversation_id, t.turn) for t in (first, second, other)] == [
        ("c1", 0), ("c1", 1), ("c2", 0)
    ]  # fmt: skip
    answer = target.tokenizer.decode(first.response_ids[:-1], skip_special_tokens=True)
    rendered = f"<|turn|>user\none?\n<|turn|>assistant\n{answer}<|endoftext|>\n<|turn|>user\ntwo?\n"
    assert target.tokenizer.decode(second.prompt_ids) == f"{rendered}<|turn|>assistant\n"
    assert target.tokenizer.decode(first.prompt_ids) == "<|turn|>user\none?\n<|turn|>assistant\n"
    assert len({first.prompt_hash, second.prompt_hash, other.prompt_hash}) == 3


def test_conversations_resume_in_the_middle(tiny_target, tmp_path):
    target = chat(tiny_target)
    prompts = [dataclasses.replace(conversation(f"{i}?", "two?", "3?"), conversation_id=f"c{i}")
               for i in range(4)]  # fmt: skip
    wanted = plan(prompts)
    whole = fill(target, tmp_path / "whole", wanted, rows_per_shard=1)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    store = TraceStore.open(tmp_path / "part", wanted.identity(target))
    kept = [s.file for s in store.shards() if int(s.file[-13:-8]) < 5]
    for path in (tmp_path / "part").glob("*.parquet"):
        if path.name not in kept:
            path.unlink()
    assert fill(target, tmp_path / "part", wanted, batch_size=2) == whole
    assert len(whole) == 12


LINE = "traces: {} later turns left out, behind an answer that was cut"


def test_nothing_stands_behind_an_answer_that_was_cut(tiny_target, tmp_path, capsys):
    """Also in a run that was killed: what is left out has no row, and is counted as in one run."""
    target = chat(tiny_target, ends=range(60, 100))
    prompts = [dataclasses.replace(conversation(f"{i}?", "two?", "3?"), conversation_id=f"c{i}")
               for i in range(8)]  # fmt: skip
    wanted = plan(prompts, max_new_tokens=2)
    whole = fill(target, tmp_path / "whole", wanted, rows_per_shard=1)
    turns = {i: [t for t in whole if t.index == i] for i in range(8)}
    for rows in turns.values():
        assert all(trace.finish_reason == "eos" for trace in rows[:-1])
        assert len(rows) == 3 or rows[-1].finish_reason == "length"
    count = 24 - len(whole)
    assert 0 < count < 16  # some end a conversation, and some do not
    assert {len(rows) for rows in turns.values()} == {1, 2, 3}
    assert LINE.format(count) in capsys.readouterr().out
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for path in sorted((tmp_path / "part").glob("*.parquet"))[3:]:
        path.unlink()
    assert fill(target, tmp_path / "part", wanted, batch_size=2) == whole
    assert LINE.format(count) in capsys.readouterr().out
    store = TraceStore.open(tmp_path / "part", wanted.identity(target))
    assert store.is_complete({trace.key for trace in whole})
    assert fill(target, tmp_path / "part", wanted) == whole
    assert LINE.format(count) in capsys.readouterr().out
    for rank in (1, 0):
        assert fill(target, tmp_path / "two", wanted, rank=rank, world=2)
    assert TraceStore.open(tmp_path / "two", None).load() == whole
    assert LINE.format(count) in capsys.readouterr().out


def test_nothing_stands_behind_an_answer_that_cannot_be_put_back(tiny_target, tmp_path, capsys):
    """Here one that holds the token with which the template begins a turn."""
    target = tiny_target("llama", chat_template=True)
    response = [40, 41, EOS]
    fill(target, tmp_path / "a", plan())
    work = _Work(plan(), target, TraceStore.open(tmp_path / "a", None).load(), 99)
    for found, count in ((response, 0), ([3, *response], 2)):
        prompt = conversation("1", "2", "3")
        item = _Item(prompt, 0, 0, list(user_turns(prompt)))
        work.advance(item, make(0, response_ids=found, finish_reason="eos"))
        assert (len(item.turns), work.left_out[NOT_PUT_BACK]) == (3 - count, count)


def test_turns_behind_a_tool_call_need_no_answer_of_the_target(tiny_target, tmp_path, capsys):
    """Their context is the data set's; a template that cannot write it ends the conversation."""
    plain = tiny_target("llama", chat_template=True)
    tokenizer = copy.deepcopy(plain.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content }}", "message.content }}{{ 'look_up' if message.tool_calls }}"
    )
    target = dataclasses.replace(plain, tokenizer=tokenizer)
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
    messages = (
        {"role": "user", "content": "Find."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "Here."},
        {"role": "user", "content": "Thanks."},
    )
    wanted = plan([dataclasses.replace(conversation("x"), messages=messages)], max_new_tokens=1)
    found = fill(target, tmp_path / "whole", wanted)
    asked = [target.tokenizer.decode(trace.prompt_ids).split("<|turn|>") for trace in found]
    assert [turns[1:-1] for turns in asked] == [
        ["user\nFind.\n"],
        ["user\nFind.\n", "assistant\nlook_up<|endoftext|>\n", "tool\nfound\n"],
        ["user\nFind.\n", "assistant\nlook_up<|endoftext|>\n", "tool\nfound\n",
         "assistant\nHere.<|endoftext|>\n", "user\nThanks.\n"],
    ]  # fmt: skip
    assert len(fill(plain, tmp_path / "plain", wanted)) == 1  # its template knows no calls
    assert "traces: 2 later turns left out, of a form that the chat" in capsys.readouterr().out


def test_an_end_of_turn_that_ends_no_answer_is_named(tiny_target, tiny_folder, tmp_path, capsys):
    target = tiny_target("llama", chat_template=True)
    tokenizer = target.tokenizer.__class__.from_pretrained(tiny_folder("llama", chat_template=True))
    tokenizer.chat_template = tokenizer.chat_template.replace("<|endoftext|>", "<|turn|>")
    foreign = dataclasses.replace(target, tokenizer=tokenizer)
    found = fill(foreign, tmp_path, plan(samples_per_prompt=8))
    held = sum(3 in trace.response_ids for trace in found)
    assert held
    line = f"warning: traces: {held} of {len(found)} answers hold '<|turn|>' (3), with which"
    assert line in capsys.readouterr().out
    fill(target, tmp_path / "usual", plan())
    assert "warning" not in capsys.readouterr().out


def test_rows_of_an_earlier_day_are_not_generated_again(tiny_target, tiny_folder, tmp_path):
    """Where the template writes the date; the first answer of a conversation is from that day."""
    target = chat(tiny_target)

    def on(day: str) -> Target:
        tokenizer = target.tokenizer.__class__.from_pretrained(
            tiny_folder("llama", chat_template=True)
        )
        tokenizer.chat_template = f"{{{{ '{day}.' }}}}" + tokenizer.chat_template
        return dataclasses.replace(target, tokenizer=tokenizer)

    prompts = [dataclasses.replace(conversation(f"{i}?", "two?"), conversation_id=f"c{i}")
               for i in range(4)]  # fmt: skip
    wanted = plan(prompts, samples_per_prompt=2, temperatures=(0.0, 1.0))
    first = fill(on("Mon"), tmp_path, wanted, rows_per_shard=1)
    gone = sorted(tmp_path.glob("*.parquet"))[:6]  # of eight first turns and as many second ones
    for path in gone:
        path.unlink()
    found = fill(on("Tue"), tmp_path, wanted, rows_per_shard=1)
    decode = target.tokenizer.decode
    days = [decode(trace.prompt_ids)[:4] for trace in found]
    assert (days.count("Mon."), days.count("Tue.")) == (10, 6)
    rows = [(t.prompt_hash, t.turn, t.sample_index) for t in found]
    assert rows == [(t.prompt_hash, t.turn, t.sample_index) for t in first]
    for day, old, new in zip(days, first, found, strict=True):
        assert (old == new) == (day == "Mon.")


def test_prompts_that_are_one_after_rendering_are_counted(
    tiny_target, tiny_folder, tmp_path, capsys
):
    target = chat(tiny_target)
    tokenizer = target.tokenizer.__class__.from_pretrained(tiny_folder("llama", chat_template=True))
    tokenizer.chat_template = tokenizer.chat_template.replace(".content", ".content | lower")
    lower = dataclasses.replace(target, tokenizer=tokenizer)
    prompts = [Prompt(text, None, None, "test", "row", text) for text in ("a", "A", "b")]
    line = "traces: 1 rows left out, their prompts are others' once rendered"
    assert len(fill(lower, tmp_path, plan(prompts))) == 2
    assert capsys.readouterr().out.count(line) == 1
    for path in tmp_path.glob("manifest*"):  # as after a kill: what is left out has no row
        path.unlink()
    assert len(fill(lower, tmp_path, plan(prompts))) == 2
    assert capsys.readouterr().out.count(line) == 1


def test_system_prompt_and_template_options_reach_the_prompt(tiny_target, tmp_path, tiny_folder):
    target = chat(tiny_target)
    (own,) = fill(
        target, tmp_path / "a", plan([conversation("hi", system="own")], system_prompt="S")
    )
    (ours,) = fill(target, tmp_path / "b", plan([conversation("hi")], system_prompt="Be brief."))
    decode = target.tokenizer.decode
    assert decode(own.prompt_ids).startswith("<|turn|>system\nown\n<|turn|>user\nhi\n")
    assert decode(ours.prompt_ids).startswith("<|turn|>system\nBe brief.\n<|turn|>user\nhi\n")
    tokenizer = target.tokenizer.__class__.from_pretrained(tiny_folder("llama", chat_template=True))
    tokenizer.chat_template += "{% if thinking %}<think>{% endif %}"
    thinking = dataclasses.replace(target, tokenizer=tokenizer)
    wanted = plan([conversation("hi")], chat_template_kwargs={"thinking": True})
    (options,) = fill(thinking, tmp_path / "c", wanted)
    assert decode(options.prompt_ids).endswith("assistant\n<think>")


def test_a_base_target_refuses_conversations(tiny_target, tmp_path):
    with pytest.raises(UserError, match="no chat template but the prompts are conversations"):
        fill(tiny_target("llama"), tmp_path / "store", plan([conversation("hi")]))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("where", ["text", "response"])
def test_a_token_without_a_row_is_refused_by_the_name_of_its_prompt(tiny_target, tmp_path, where):
    target = copy.copy(tiny_target("llama"))
    target.tokenizer = tiny_tokenizer()
    target.tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    prompt = Prompt("a", None, "b", "test", "row 3", "c3")
    with pytest.raises(UserError) as caught:
        fill(target, tmp_path, plan([dataclasses.replace(prompt, **{where: "see <|image|>"})]))
    assert caught.value.key == "row 3"
    assert caught.value.rule.startswith("the text has '<|image|>', token 100, but the target's")


# stores


def test_a_finished_store_is_found_again(tiny_target, tmp_path, usual, monkeypatch):
    wanted = plan(samples_per_prompt=2)
    fill(tiny_target("llama"), tmp_path, wanted)
    silent = tiny_target("llama")
    monkeypatch.setattr(silent.model, "forward", lambda *_, **__: pytest.fail("it generates"))
    assert fill(silent, tmp_path, wanted) == usual


def test_a_store_that_another_command_completes_meanwhile_is_complete_for_all_ranks(
    tiny_target, tmp_path, usual
):
    """A rank that saw it before must not write rows of its own, nor wait for ranks that do not."""
    target, wanted, met = tiny_target("llama"), plan(samples_per_prompt=2), []

    def meet() -> None:
        if not met:  # rank 1 has loaded its target first; rank 0 looks when this is done
            fill(target, tmp_path, wanted)
        met.append(True)

    assert fill(target, tmp_path, wanted, rank=1, world=2, barrier=meet) == usual
    assert len(met) == 1
    assert not [*tmp_path.glob("manifest-r*.json"), *tmp_path.glob(".writer-r1.lock")]


@pytest.mark.parametrize("world", [1, 2])
def test_prompts_that_are_too_long_are_counted_whenever_the_store_is_opened(
    tiny_target, tmp_path, capsys, world
):
    """Also where a killed command with more processes had counted them before."""
    target = tiny_target("llama")
    prompts = [Prompt("long " * size, None, None, "t", "row", str(size)) for size in range(1, 7)]
    wanted = plan(prompts, max_prompt_tokens=20, long_prompts="drop", samples_per_prompt=2)
    met = [None]
    with pytest.raises(IndexError):  # by rank 2 of 3, whose others have not written
        fill(target, tmp_path, wanted, rank=2, world=3, barrier=met.pop)
    part = json.loads((tmp_path / "manifest-r2.json").read_text())
    assert part["num_dropped"] == 2
    for rank in reversed(range(world)):
        found = fill(target, tmp_path, wanted, rank=rank, world=world)
    line = "traces: 4 prompts or later turns over 20 tokens left out\n"
    assert len(found) == 8
    assert capsys.readouterr().out.endswith(line)
    assert fill(target, tmp_path, wanted) == found
    assert capsys.readouterr().out == line
    assert TraceStore.open(tmp_path, None).num_dropped == 4


def test_progress_counts_tokens_from_the_first_step_on(tiny_target, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    wanted = plan(lookahead=3)
    traces = fill(tiny_target("llama"), tmp_path, wanted, batch_size=4, label="traces")
    lines = capsys.readouterr().err.splitlines()
    most = 8 * (NEW + 3)
    assert lines[1].startswith(f"traces: 4 of about {most} tokens, 0/8 answers, ")
    assert lines[1].endswith(" left")
    counts = [int(re.match(r"traces: (\d+) ", line)[1]) for line in lines]
    assert counts == sorted(counts)
    generated = sum(len(t.response_ids) + len(t.lookahead_ids) for t in traces)
    assert lines[-1].startswith(f"traces: {generated} tokens in 0:00:")


def test_what_was_finished_is_not_generated_again(tiny_target, tmp_path, usual):
    wanted, target = plan(samples_per_prompt=2), tiny_target("llama")
    fill(target, tmp_path, wanted)
    kept, gone, *_ = sorted(tmp_path.glob("*.parquet"))
    gone.unlink()
    before = kept.stat().st_mtime_ns
    assert fill(target, tmp_path, wanted) == usual
    assert kept.stat().st_mtime_ns == before
    rows = sum(shard.rows for shard in TraceStore.open(tmp_path, None).shards())
    assert rows == len(usual)


def test_a_store_is_named_by_all_that_decides_its_rows(tiny_target):
    target = tiny_target("llama")
    base = plan()
    answered = [dataclasses.replace(p, response="yes") for p in texts()]
    other = [dataclasses.replace(p, domain="other") for p in texts()]
    changes = [
        {"prompts": tuple(texts(7))}, {"prompts": tuple(answered)}, {"prompts": tuple(other)},
        {"temperatures": (0.9,)}, {"top_k": 3}, {"top_p": 0.5}, {"max_new_tokens": 5}, {"seed": 2},
        {"samples_per_prompt": 2}, {"stop_strings": ("a",)}, {"lookahead": 1},
        {"teacher_top_k": 2}, {"teacher_samples": 2}, {"system_prompt": "s"},
        {"chat_template_kwargs": {"a": 1}}, {"max_prompt_tokens": 9}, {"long_prompts": "drop"},
    ]  # fmt: skip
    plans = [base, *(dataclasses.replace(base, **change) for change in changes)]
    folders = {traces_folder(one, target, "cache") for one in plans}
    assert len(folders) == len(plans)
    assert traces_folder(plan(), target, "cache") in folders
    assert traces_folder(base, tiny_target("llama", seed=1), "cache") not in folders
    answers = dataclasses.replace(base, prompts=tuple(answered))
    assert answers.prompts_hash == base.prompts_hash  # the target is shown the same


def test_the_plan_takes_every_setting_of_the_configuration():
    config = DataConfig(
        prompts="toy", temperature=[0.0, 0.5], top_k=7, top_p=0.9, max_new_tokens=3,
        samples_per_prompt=2, stop_strings=["x"], teacher_top_k=4, teacher_samples=5,
        system_prompt="s", chat_template_kwargs={"a": 1}, max_prompt_tokens=6, long_prompts="drop",
    )  # fmt: skip
    made = GenerationPlan.from_config(config, texts(1), 9)
    assert (made.temperatures, made.stop_strings, made.seed) == ((0.0, 0.5), ("x",), 9)
    for name in ("top_k", "top_p", "max_new_tokens", "samples_per_prompt", "teacher_top_k",
                 "teacher_samples", "system_prompt", "chat_template_kwargs", "max_prompt_tokens",
                 "long_prompts"):  # fmt: skip
        assert getattr(made, name) == getattr(config, name)


def test_fixed_responses_are_kept_beside_the_targets_own(tiny_target, tmp_path):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "response": "answer " * 9}])
    target = tiny_target("llama")
    for limit, ends in ((NEW, False), (80, True)):
        loaded = load_prompts(str(prompts), count=1)
        (trace,) = fill(target, tmp_path / str(limit), plan(loaded, max_new_tokens=limit))
        text = target.tokenizer.decode(trace.fixed_ids)
        assert len(trace.fixed_ids) == min(limit, 64)
        assert (trace.fixed_ids[-1] == EOS) == ends
        assert text.startswith("answer answe")


# the compressed teacher


@pytest.mark.parametrize(("top_k", "samples"), [(6, 4), (6, 0), (0, 4)])
def test_the_stored_teacher_is_the_compressed_live_one(tiny_target, tmp_path, top_k, samples):
    target = tiny_target("llama_padded")
    wanted = plan(samples_per_prompt=3, teacher_top_k=top_k, teacher_samples=samples)
    for trace in fill(target, tmp_path, wanted):
        ids = torch.tensor([trace.prompt_ids + trace.response_ids])
        logits = target.outputs(ids).logits
        first = len(trace.prompt_ids) - 1
        own = logits[0, first : first + len(trace.response_ids), : target.vocab_size]
        seed = row_key(wanted.seed, trace.prompt_ids, trace.sample_index) & (2**63 - 1)
        expected = compress(own, top_k, samples, torch.Generator().manual_seed(seed))
        assert torch.tensor(trace.teacher_ids).tolist() == expected.ids.tolist()
        stored = torch.tensor(trace.teacher_logp)
        torch.testing.assert_close(stored, expected.logp, rtol=0, atol=1e-4)
        stored = torch.tensor(trace.teacher_log_tail)
        torch.testing.assert_close(stored, expected.log_tail, rtol=0, atol=1e-4)
        assert (trace.tail_ids is None) == (samples == 0)
        if samples:
            assert trace.tail_ids == expected.tail_ids.tolist()


def test_the_teacher_does_not_depend_on_grouping(tiny_target, tmp_path):
    wanted = plan(samples_per_prompt=3, teacher_top_k=3, teacher_samples=2)
    target = tiny_target("llama")
    one = fill(target, tmp_path / "a", wanted, batch_size=1)
    two = fill(target, tmp_path / "b", wanted, batch_size=8)
    for a, b in zip(one, two, strict=True):
        assert (a.teacher_ids, a.tail_ids) == (b.teacher_ids, b.tail_ids)


# the command


def test_the_command_says_where_the_traces_are(tmp_path, tiny_folder, capsys):
    words = only(command(tmp_path, tiny_folder("llama")), *generate.READS)
    assert generate.main(words) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    (store,) = training_stores(tmp_path / "cache")
    traces = TraceStore.open(store, None).load()
    tokens = sum(len(t.response_ids) for t in traces)
    ended = sum(t.finish_reason == "eos" for t in traces) / 8
    assert last == f"8 traces, {tokens} tokens, {ended:.0%} ended by themselves: {store}"


def test_the_command_fills_the_folder_it_is_given(tmp_path, tiny_folder, capsys):
    words = command(tmp_path, tiny_folder("llama"), f"data.traces={tmp_path / 'own'}")
    assert generate.main(only(words, *generate.READS)) == 0
    assert capsys.readouterr().out.strip().endswith(str(tmp_path / "own"))
    assert len(TraceStore.open(tmp_path / "own", None).load()) == 8
    assert not (tmp_path / "cache").exists()


def test_a_dry_run_of_the_command_writes_nothing(tmp_path, tiny_folder, capsys):
    words = only(command(tmp_path, tiny_folder("llama")), *generate.READS)
    files = sorted(tmp_path.rglob("*"))
    assert generate.main([*words, "dry_run=true"]) == 0
    assert "traces: 8 rows" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.slow
def test_two_processes_give_the_traces_of_one(tmp_path):
    ends = [EOS, 1, 2, 3, *range(30, 100)]  # nothing stands behind an answer that is cut
    target = save_tiny(tmp_path / "target", "llama", chat_template=True, eos_token_id=ends)
    turns = [{"messages": [{"role": "user", "content": f"{i}{j}"} for j in range(1 + i % 3)]}
             for i in range(8)]  # fmt: skip
    prompts = write_jsonl(tmp_path / "turns.jsonl", turns)
    found = []
    for name, launch in (("one", ()), ("two", TWO)):
        words = command(
            tmp_path, target, f"data.prompts={prompts}", f"data.traces={tmp_path / name}",
            "data.rows_per_shard=2",
        )  # fmt: skip
        script = ("-m", "scripts.generate", *only(words, *generate.READS))
        code, out, err = finish(start(*launch, *script))
        assert code == 0, err
        assert out.count(" ended by themselves: ") == 1
        found.append(TraceStore.open(tmp_path / name, None).load())
    assert len(found[0]) == 15
    assert found[0] == found[1]
    assert len({p.name[:8] for p in (tmp_path / "two").glob("*.parquet")}) == 2
