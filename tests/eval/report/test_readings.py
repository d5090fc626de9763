"""The text of answers, token by token, and what each round drafted of it."""

from __future__ import annotations

import copy
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.report.readings import (
    MOST_CHARACTERS,
    MOST_TOKENS,
    answer,
    check_readings,
    reading,
    token_texts,
)
from eval.report.schema import as_json, read_report, without_readings, write_report
from eval.report.web import to_html
from eval.rounds import Round, RoundIds
from tests.helpers.report_rows import report_with_tree
from trainer.errors import UserError

ABOUT = {"drafter": "after", "temperature": 0.0, "draft": "K 4", "finish_reason": "eos"}


@pytest.fixture(scope="module")
def byte_level():
    """A tokenizer whose every token is one byte, as the rare characters of a real one are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


@pytest.fixture(scope="module")
def spaced():
    """A tokenizer like those of SentencePiece: the first space of a text is not shown."""
    words = ["▁Hello", "▁world", ",", "▁", "wor", "ld"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=","))
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("text", ["naïve café", "日本語", "a👩‍🚀b", "Ünïcödé\n\t  <b>", ""])
def test_a_character_stands_at_the_last_of_its_tokens(byte_level, text):
    found = token_texts(byte_level, ids(byte_level, text))
    assert "".join(found) == text
    expected = [part for c in text for part in [*[""] * (len(c.encode()) - 1), c]]
    assert found == expected


@pytest.mark.parametrize("cut", range(5))
def test_text_goes_on_where_the_text_before_was_cut(byte_level, cut):
    text = ids(byte_level, "naïve 語")
    assert token_texts(byte_level, text[cut:], text[:cut]) == token_texts(byte_level, text)[cut:]


def test_bytes_that_are_no_character_are_shown_and_hold_nothing_back(byte_level):
    broken = [*ids(byte_level, "語")[:2], *ids(byte_level, "ab")]
    assert token_texts(byte_level, broken) == ["", "", "\ufffda", "b"]
    assert token_texts(byte_level, broken[:2]) == ["", "\ufffd"]  # the answer ends there
    lone = [ids(byte_level, "語")[1]] * 9
    assert "".join(token_texts(byte_level, lone)) == "\ufffd" * 9


def test_spaces_between_words_are_kept(spaced):
    assert token_texts(spaced, [0, 2, 1, 3, 4, 5]) == ["Hello", ",", " world", " ", "wor", "ld"]
    assert token_texts(spaced, [1], before=[0]) == [" world"]


def chain(tokenizer, drafted, emitted, accepted, **changes):
    drafted, emitted = ids(tokenizer, drafted), ids(tokenizer, emitted)
    rejected = accepted < len(emitted) and accepted < len(drafted)
    fields = {
        "prompt_hash": "h", "submitted": len(drafted), "depth": len(drafted), "accepted": accepted,
        "emitted": len(emitted), "first_reject_pos": accepted + 1 if rejected else None,
        "draft_forwards": 1, "draft_tokens": 1, "t_draft": 0.0, "t_verify": 0.0, "t_other": 0.0,
        "ctx_len": 3, "overlap": [], "truncated": len(emitted) < accepted + 1,
        "engine_accepted": accepted, "ids": RoundIds(drafted, emitted),
    }  # fmt: skip
    return Round(**(fields | changes))


def test_an_answer_tells_drafts_corrections_and_bonus_tokens_apart(byte_level):
    rounds = [
        chain(byte_level, "bcXY", "bcd", 2),
        chain(byte_level, "ef", "efg", 2),
        chain(byte_level, "hijk", "hi", 2),
    ]
    found = answer(byte_level, [1, 2], ids(byte_level, "abcdefghi"), rounds, ABOUT)
    assert (found["first"], found["num_tokens"], found["num_rounds"]) == ("a", 9, 3)
    assert [one["last"] for one in found["rounds"]] == ["correction", "bonus", None]
    assert [one["tokens"] for one in found["rounds"]] == [list("bcd"), list("efg"), list("hi")]
    assert [one["rejected"] for one in found["rounds"]] == [
        [{"depth": 3, "tokens": ["X", "Y"]}], [], [],
    ]  # fmt: skip
    check_readings([reading("p", "h", "d", [found])], "x")


def test_a_tree_shows_the_siblings_of_its_path(byte_level):
    #       a   b   c   d   e   f   g       c below a is taken, e and f below c are not
    letters, parents = "abcdefg", [-1, -1, 0, 0, 2, 2, 1]
    tree = RoundIds(ids(byte_level, letters), ids(byte_level, "acZ"), parents, [0, 2])
    one = chain(byte_level, letters, "acZ", 2, ids=tree)
    found = answer(byte_level, [], ids(byte_level, "_acZ"), [one], ABOUT)["rounds"][0]
    assert found["rejected"] == [
        {"depth": 1, "tokens": ["b"]},
        {"depth": 2, "tokens": ["d"]},
        {"depth": 3, "tokens": ["e"]},
        {"depth": 3, "tokens": ["f"]},
    ]
    assert (found["last"], found["drafted"]) == ("correction", 7)
    leaf = RoundIds(tree.drafted, ids(byte_level, "ade"), parents, [0, 3])
    one = chain(byte_level, letters, "ade", 2, ids=leaf, first_reject_pos=None)
    found = answer(byte_level, [], ids(byte_level, "_ade"), [one], ABOUT)["rounds"][0]
    assert [b["depth"] for b in found["rejected"]] == [1, 2]
    assert found["last"] == "bonus"


def test_a_rejected_draft_is_read_after_the_text_before_it(byte_level):
    """The bytes of a character may be split between accepted and rejected drafts."""
    first, *rest = ids(byte_level, "語")
    other = ids(byte_level, "課")  # the same first byte
    tokens = RoundIds([first, *other[1:]], [first, *rest])
    one = chain(byte_level, "xyz", "xyz", 1, ids=tokens)
    found = answer(byte_level, [], [65, first, *rest], [one], ABOUT)["rounds"][0]
    assert found["tokens"] == ["", "", "語"]
    assert found["rejected"] == [{"depth": 2, "tokens": ["", "課"]}]


def test_a_long_answer_is_shown_up_to_a_whole_round(byte_level):
    rounds = [chain(byte_level, "bbb", "bbb", 3, truncated=True) for _ in range(100)]
    found = answer(byte_level, [], ids(byte_level, "a" + "b" * 300), rounds, ABOUT)
    shown = 1 + sum(len(one["tokens"]) for one in found["rounds"])
    assert (found["num_tokens"], found["num_rounds"]) == (301, 100)
    assert MOST_TOKENS - 3 < shown <= MOST_TOKENS
    page = to_html("x", blocks([reading("p", "h", "d", [found])]))
    assert f"… {301 - shown} more tokens" in page


def blocks(readings):
    from eval.report.render import ReadingBlock

    return [ReadingBlock(readings)]


def an_answer(*tokens, rejected=()):
    branch = [{"depth": 1, "tokens": list(rejected)}] if rejected else []
    one = {"tokens": list(tokens), "accepted": 0, "last": "correction", "drafted": len(rejected),
           "rejected": branch}  # fmt: skip
    return ABOUT | {"num_tokens": 2, "num_rounds": 1, "first": "a", "rounds": [one]}


def test_text_with_a_secret_is_not_shown(monkeypatch):
    """A token at a time it would pass every later check."""
    secret = "hf_" + "abcdefghijklmnopqrstuv"
    assert reading("a prompt", "h", "d", [an_answer("b")]) is not None
    assert reading(f"my key is {secret}", "h", "d", [an_answer("b")]) is None
    whole = an_answer("b") | {"first": "hf_"}
    whole["rounds"] = [
        an_answer(part)["rounds"][0] for part in ("abcdefghij", "klmnopqrst", "uvwxyz")
    ]
    assert reading("a prompt", "h", "d", [whole]) is None
    assert (
        reading("a prompt", "h", "d", [an_answer("b", rejected=(secret[:9], secret[9:]))]) is None
    )


def test_a_prompt_is_cut_and_can_always_be_written():
    found = reading("x" * 9999 + "\ud800", "h", "d", [])
    assert found is not None
    assert len(found["prompt"]) <= MOST_CHARACTERS + 2
    found = reading("a\ud800b", "h", "d", [])
    assert found is not None
    assert found["prompt"].encode().decode() == "a?b"


def with_readings(*texts):
    report = report_with_tree()
    report["readings"] = [reading(text, "h", text, [an_answer(text)]) for text in texts]
    return report


def test_a_report_keeps_its_answers_and_its_page_is_made_of_it_alone(tmp_path):
    write_report(with_readings("What is 2 times 3?"), tmp_path)
    page = (tmp_path / "report.html").read_text()
    again = read_report(tmp_path / "report.json")
    write_report(again, tmp_path / "again")
    assert (tmp_path / "again" / "report.html").read_text() == page
    assert "A reading of answers" in page
    assert "A reading" not in (tmp_path / "report.md").read_text()
    write_report(without_readings(again), tmp_path / "public")
    for name in ("report.html", "report.json"):
        assert "2 times 3" not in (tmp_path / "public" / name).read_text()


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "</span></details><img src=x onerror=alert(1)>", "&lt;"]
)
def test_prompts_answers_and_drafts_are_escaped(tmp_path, text):
    report = with_readings(text)
    report["readings"][0]["answers"] = [an_answer(text, rejected=(text, "x")) | {"first": text}]
    write_report(report, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    for character, name in (("&", "amp"), ("<", "lt"), (">", "gt")):
        text = text.replace(character, f"&{name};")
    assert page.count(text) >= 5  # summary, prompt, first token, token, draft


def test_what_hides_or_turns_text_around_is_shown_by_its_number(tmp_path):
    write_report(with_readings("safe\u202etxet\x00\ud7ff\x1b[1m"), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert not set(page) & set("\u202e\x00\x1b")
    assert "\\u202etxet\\u0000" in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[0].pop("prompt"), r"readings\[0\]\.prompt is missing"),
        (lambda r: r[0].update(answers={}), r"readings\[0\]\.answers is missing or wrong"),
        (lambda r: r[0]["answers"][0].update(num_tokens="2"), r"answers\[0\]\.num_tokens"),
        (lambda r: r[0]["answers"][0]["rounds"][0].update(accepted=True), r"rounds\[0\]\.accepted"),
        (lambda r: r[0]["answers"][0]["rounds"][0].update(accepted=2), "2 accepted of 1 tokens"),
        (lambda r: r[0]["answers"][0]["rounds"][0].update(last="gift"), "correction, bonus or nul"),
        (lambda r: r[0]["answers"][0]["rounds"][0].update(tokens=[3]), "must be texts"),
        (lambda r: r[0]["answers"][0]["rounds"][0].update(rejected=["x"]), "must be a dict"),
    ],
)
def test_damaged_readings_are_refused(tmp_path, change, message):
    report = with_readings("p")
    change(report["readings"])
    with pytest.raises(UserError, match=message):
        write_report(report, tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(as_json(report)))
    with pytest.raises(UserError, match=message):
        read_report(tmp_path / "report.json")


def test_the_form_of_readings_is_checked_as_a_whole():
    good = with_readings("p")["readings"]
    check_readings(good, "x")
    with pytest.raises(UserError, match="readings must be a list"):
        check_readings(copy.deepcopy(good[0]), "x")
