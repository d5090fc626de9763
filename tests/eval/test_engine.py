"""The real speculative decoder: greedy identity, the target's law, counters, keyed randomness."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from drafters.causal_lm import CausalLMDrafter
from drafters.round import Budget
from drafters.training_free.lookup import PromptLookup
from drafters.trees.dynamic import DynamicTree
from eval.counters import check_invariants
from eval.engine import SpeculativeDecoder
from eval.policies.table import make_budget
from eval.verifiers.base import Verdict
from target.cache import CachedModel
from target.decode import Request, decode
from target.model import Target
from target.sampling import Sampling, row_key, warp
from tests.helpers.tiny import (
    ARCHITECTURES,
    EOS,
    VOCAB_SIZE,
    assert_same_greedy,
    generated,
    perturbed,
    prompts_of,
    tiny_model,
    tiny_tokenizer,
)

GREEDY, SAMPLED = Sampling(0.0), Sampling(1.0)
LENGTHS = [1, 21, 4, 9, 33, 2, 14, 5, 40, 7]
K = 3


def target_of(model) -> Target:
    return Target(model, tiny_tokenizer(), "tiny", {}, (EOS,))


def drafter_of(model, target_model) -> CausalLMDrafter:
    return CausalLMDrafter._of(model, target_of(target_model), "draft")


def negated(model):
    """Its logits are the target's with the sign turned: the worst of drafters."""
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.get_output_embeddings().weight.neg_()
    return wrong


def requests_for(prompts, sampling=GREEDY, seed=0):
    return [Request(p, row_key(seed, p, i), sampling, i) for i, p in enumerate(prompts)]


def speculated(model, drafter, prompts, sampling=GREEDY, *, requests=None, seed=0, **options):
    options = {
        "budget": Budget(K),
        "eos_ids": (),
        "max_new_tokens": 24,
        "batch_size": 4,
        "sampling": sampling,
    } | options
    requests = requests or requests_for(prompts, sampling, seed)
    found = {
        s.request.tag: s
        for s in SpeculativeDecoder(CachedModel(model), drafter, **options).run(requests)
    }
    assert len(found) == len(requests)
    for one in found.values():
        check_invariants(one.rounds, len(one.response_ids))
        assert sum(r.emitted for r in one.rounds) + 1 == len(one.response_ids)
        assert len(one.response_ids) <= options["max_new_tokens"]
        assert not any(token in options["eos_ids"] for token in one.response_ids[:-1])
        ended = one.response_ids[-1] in options["eos_ids"]
        assert one.finish_reason == ("eos" if ended else "length")
        assert ended or len(one.response_ids) == options["max_new_tokens"]
        assert not any(r.truncated for r in one.rounds[:-1])
        for r in one.rounds:  # nothing behind the cut is told
            assert r.truncated == (r.emitted < r.engine_accepted + 1)
            assert (r.first_reject_pos or 1) <= r.emitted
            assert len(r.overlap) <= r.emitted
    return found


# --- greedy identity ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_equals_generate_for_every_batch_size(name):
    model = tiny_model(name)
    prompts = prompts_of(LENGTHS)
    reference = [generated(model, p, 20) for p in prompts]
    drafter = drafter_of(perturbed(model, 0.1), model)
    for batch_size in (1, 4, 8):  # 10 prompts: rows are refilled
        found = speculated(model, drafter, prompts, max_new_tokens=20, batch_size=batch_size)
        for i, prompt in enumerate(prompts):
            assert_same_greedy(model, prompt, found[i].response_ids, reference[i])
        counts = [r.engine_accepted for one in found.values() for r in one.rounds]
        assert {0, 1, 2, 3} == set(counts), "the drafter must be right and wrong at every depth"


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_prompt_lookup_gives_the_same_text(name):
    model = tiny_model(name)
    pieces = prompts_of([6] * 9)
    prompts = [p * (1 + i % 3) for i, p in enumerate(pieces)]
    for batch_size in (1, 4):
        found = speculated(model, PromptLookup(), prompts, batch_size=batch_size)
        for i, prompt in enumerate(prompts):
            reference = generated(model, prompt, 24)
            assert_same_greedy(model, prompt, found[i].response_ids, reference)
        assert any(r.accepted for one in found.values() for r in one.rounds)
        assert any(r.submitted == 0 for one in found.values() for r in one.rounds)


@pytest.mark.parametrize("policy", ["confidence:0.5", "confidence:0.99"])
def test_stop_policies_give_the_same_text(policy):
    model = tiny_model("llama")
    prompts = prompts_of(LENGTHS)
    drafter = drafter_of(perturbed(model, 0.1), model)
    found = speculated(model, drafter, prompts, budget=make_budget(policy, 4))
    for i, prompt in enumerate(prompts):
        assert found[i].response_ids == generated(model, prompt, 24)
    assert any(r.submitted < 4 for one in found.values() for r in one.rounds)


def test_sampled_drafts_under_a_greedy_target_give_the_same_text():
    model = tiny_model("llama")
    prompts = prompts_of(LENGTHS)
    drafter = drafter_of(perturbed(model, 0.1), model)
    found = speculated(model, drafter, prompts, draft_sampling=SAMPLED)
    assert [found[i].response_ids for i in range(10)] == [generated(model, p, 24) for p in prompts]


def test_every_eos_id_ends_an_answer_wherever_it_falls_in_a_round():
    model = tiny_model("llama")
    prompts = prompts_of(LENGTHS * 2)
    long = [generated(model, p, 24) for p in prompts]
    eos = (long[0][3], long[1][7], long[2][0], long[4][12])
    for drafter in (drafter_of(model, model), drafter_of(perturbed(model, 0.1), model)):
        found = speculated(model, drafter, prompts, eos_ids=eos, budget=Budget(5))
        for i in range(len(prompts)):
            first = next((n for n, token in enumerate(long[i]) if token in eos), 23)
            assert found[i].response_ids == long[i][: first + 1]
        assert found[2].rounds == []  # EOS came out of the prefill
        cut = [one.rounds[-1] for one in found.values() if one.rounds and one.rounds[-1].truncated]
        assert any(r.engine_accepted > r.accepted for r in cut)  # drafts behind EOS were accepted


@pytest.mark.parametrize("max_new_tokens", [1, 2, 4, 5])
def test_length_limits_cut_the_last_round(max_new_tokens):
    model = tiny_model("llama")
    prompts = prompts_of(LENGTHS)
    for drafter in (drafter_of(model, model), PromptLookup()):
        found = speculated(model, drafter, prompts, max_new_tokens=max_new_tokens, batch_size=3)
        for i, prompt in enumerate(prompts):
            assert found[i].response_ids == generated(model, prompt, max_new_tokens)


def test_no_requests_give_no_answers():
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(
        CachedModel(model), PromptLookup(), sampling=GREEDY, budget=Budget(K), eos_ids=(),
        max_new_tokens=4, batch_size=2,
    )  # fmt: skip
    assert list(decoder.run([])) == []
    again = requests_for(prompts_of([3]))
    assert len(list(decoder.run(again))) == len(list(decoder.run(again))) == 1  # used twice


# --- bounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_the_target_as_its_own_drafter_has_every_draft_accepted(name, temperature):
    model = tiny_model(name)
    prompts = prompts_of(LENGTHS)
    sampling = Sampling(temperature)
    found = speculated(
        model, drafter_of(model, model), prompts, sampling, max_new_tokens=25, eos_ids=(EOS, 7)
    )
    for one in found.values():
        for r in one.rounds:
            assert r.engine_accepted == K
            assert r.emitted == K + 1 or r.truncated
            assert r.first_reject_pos is None
            # p and q come from forwards of other shapes: rounding only
            assert r.overlap == pytest.approx([1.0] * len(r.overlap), abs=1e-4)
    full = [one for one in found.values() if one.finish_reason == "length"]
    assert full
    assert all(len(one.rounds) == 6 for one in full)  # 24 tokens after the first


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, top_k=8)], ids=["greedy", "sampled"])
def test_a_drafter_that_is_always_wrong_costs_one_round_a_token(sampling):
    model = tiny_model("llama")
    prompts = prompts_of(LENGTHS)
    found = speculated(model, drafter_of(negated(model), model), prompts, sampling)
    for one in found.values():
        assert len(one.rounds) == 23
        assert all(
            (r.emitted, r.engine_accepted, r.first_reject_pos) == (1, 0, 1) for r in one.rounds
        )
        assert all(r.overlap == [0.0] for r in one.rounds)


# --- the law -----------------------------------------------------------------------------------


def tail(statistic: float, degrees: int) -> float:
    """P(chi-square > statistic), Wilson and Hilferty 1931."""
    cube = (statistic / degrees) ** (1 / 3)
    z = (cube - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@torch.no_grad()
def text_law(model, prompt, sampling, length, eos):
    """{text: probability} of the answers of at most `length` tokens."""
    done, open_ = {}, {(): 1.0}
    for _ in range(length):
        texts = list(open_)
        law = warp(model(torch.tensor([[*prompt, *t] for t in texts])).logits[:, -1], sampling)
        grown = {}
        for text, row in zip(texts, law.tolist(), strict=True):
            for token, weight in enumerate(row):
                place = done if token in eos else grown
                place[(*text, token)] = open_[text] * weight
        open_ = grown
    return done | open_


def p_value(observed: dict, law: dict, count: int) -> float:
    assert all(law.get(text, 0) > 0 for text in observed)
    cells = [(observed.get(text, 0), weight * count) for text, weight in law.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = [sum(column) for column in zip(*(c for c in cells if c[1] < 5), strict=True)] or [0, 0]
    if rest[1] >= 5:
        large.append(tuple(rest))
    return tail(sum((o - e) ** 2 / e for o, e in large), len(large) - 1)


def marginal(counts: dict, position: int) -> dict:
    found: dict = {}
    for text, weight in counts.items():
        key = text[position] if position < len(text) else None
        found[key] = found.get(key, 0) + weight
    return found


COUNT = 20_000
SIZE = 6
PROMPT = [1, 2, 3, 4, 5, 0, 2]


def sampled_texts(sampling, drafter_sampling=None, eos=(), policy="fixed"):
    model = tiny_model("llama", seed=2, vocab_size=SIZE, eos_token_id=None, std=0.3)
    drafter = drafter_of(tiny_model("llama", seed=7, vocab_size=SIZE, layers=1), model)
    requests = [Request(PROMPT, row_key(11, PROMPT, i), sampling, i) for i in range(COUNT)]
    found = speculated(
        model, drafter, [], sampling, requests=requests, draft_sampling=drafter_sampling,
        eos_ids=eos, max_new_tokens=3, batch_size=4000, budget=make_budget(policy, 2),
    )  # fmt: skip
    observed: dict = {}
    for one in found.values():
        text = tuple(one.response_ids)
        observed[text] = observed.get(text, 0) + 1
    return observed, text_law(model, PROMPT, sampling, 3, eos)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "drafter_sampling", "eos", "policy"),
    [
        (SAMPLED, None, (), "fixed"),
        (Sampling(0.8, top_k=4), Sampling(1.5), (2, 3), "fixed"),
        (Sampling(1.2, top_p=0.9), GREEDY, (4,), "confidence:0.4"),
    ],
    ids=["plain", "truncated-eos", "greedy-drafts"],
)
def test_decoded_texts_follow_the_targets_law(sampling, drafter_sampling, eos, policy):
    observed, law = sampled_texts(sampling, drafter_sampling, eos, policy)
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    # keys are fixed, so is the outcome; N = 20,000 sees a total variation of 0.03 surely
    assert p_value(observed, law, COUNT) > 1e-3
    for position in range(3):
        assert p_value(marginal(observed, position), marginal(law, position), COUNT) > 1e-3


@pytest.mark.slow
def test_control_a_biased_verifier_fails_the_chi_square(monkeypatch):
    def broken(self, round):
        tree, random, first = round.tree, round.random, round.first_position
        p = warp(round.logits, round.sampling)
        drafted = tree.tokens.unsqueeze(-1)
        ratio = (p[:, :-1].gather(-1, drafted) / tree.probs.gather(-1, drafted))[..., 0].clamp(
            max=1
        )
        flips = [random.flip(ratio[:, i], first + i, "accept") for i in range(ratio.shape[1])]
        accepted = torch.stack(flips, 1).long().cumprod(1).sum(1)
        law = p[torch.arange(len(p)), accepted]  # resampled from p
        return Verdict(accepted, random.choice(law, first + accepted, "target"), ratio)

    monkeypatch.setattr("eval.verifiers.token.Token.__call__", broken)
    observed, law = sampled_texts(SAMPLED)
    assert p_value(observed, law, COUNT) < 1e-6
    for position in (1, 2):
        assert p_value(marginal(observed, position), marginal(law, position), COUNT) < 1e-6


def test_a_free_row_keeps_drafting_in_the_room_that_it_has(monkeypatch):
    """Of sixteen rows one ends at its first token; while a prompt waits and fewer than two rows are
    free, it stays. The others go on, a token a round; all that is drafted in its row is accepted.
    """
    model = tiny_model("llama")
    *prompts, short = prompts_of([5, 6, 7, 8], seed=1)
    whole = [generated(model, p, 30) for p in prompts]
    ended = generated(model, short, 1)[0]
    assert all(ended not in text for text in whole)
    asked = 0

    def continuation(context, count):
        nonlocal asked
        if any(context[: len(p)].tolist() == p for p in prompts):
            return []
        asked += 1
        return generated(model, context.tolist(), count)

    drafter = PromptLookup()
    monkeypatch.setattr(drafter, "continuation", continuation)
    waits, *started = [0] + [1] * 7 + [2] * 8
    rows = [prompts[i] for i in (waits, *started)] + [short]
    found = speculated(model, drafter, rows, eos_ids=(ended,), max_new_tokens=30, batch_size=16)
    texts = [found[i].response_ids for i in range(len(rows))]
    assert texts == [*(whole[i] for i in (waits, *started)), [ended]]
    assert len(found[1].rounds) == 29 <= asked


# --- keyed randomness --------------------------------------------------------------------------


@pytest.mark.slow
def test_sampled_text_does_not_depend_on_batch_size_order_or_refill():
    # float64, see tests/target/test_decode.py
    model = tiny_model("llama").double()
    drafter = drafter_of(perturbed(model, 0.2), model)
    prompts = prompts_of(LENGTHS * 2)
    sampling = Sampling(1.0, top_k=30, top_p=0.9)
    options = {"eos_ids": (EOS, 7, 8)}
    alone = speculated(model, drafter, prompts, sampling, batch_size=1, **options)
    requests = requests_for(prompts, sampling)
    for batch_size, order in (
        (4, requests),
        (20, requests[::-1]),
        (7, requests[5:] + requests[:5]),
    ):
        found = speculated(
            model, drafter, prompts, sampling, batch_size=batch_size, requests=order, **options
        )
        for tag, one in alone.items():
            assert found[tag].response_ids == one.response_ids
            ours = [(r.accepted, r.emitted, r.submitted) for r in found[tag].rounds]
            assert ours == [(r.accepted, r.emitted, r.submitted) for r in one.rounds]
    other = speculated(model, drafter, prompts, sampling, seed=1, **options)
    assert sum(other[i].response_ids != alone[i].response_ids for i in alone) > 15


def test_a_round_records_the_depth_of_its_own_tree():
    """The trees of a batch have as many nodes each, in other places."""
    model = tiny_model("llama").double()
    drafter, prompts = drafter_of(perturbed(model, 0.2), model), prompts_of(LENGTHS)
    options = {"budget": Budget.of(DynamicTree(4, 3, 2))}
    alone = speculated(model, drafter, prompts, batch_size=1, **options)
    together = speculated(model, drafter, prompts, batch_size=10, **options)
    depths = {tag: [r.depth for r in one.rounds] for tag, one in alone.items()}
    assert {tag: [r.depth for r in one.rounds] for tag, one in together.items()} == depths
    assert len(set().union(*depths.values())) > 1


def test_the_first_token_is_the_one_plain_decoding_draws():
    model = tiny_model("llama")
    requests = requests_for(prompts_of(LENGTHS), SAMPLED)
    plain = {
        c.request.tag: c.response_ids
        for c in decode(
            CachedModel(model), [*requests], max_new_tokens=24, eos_ids=(), batch_size=4
        )
    }
    # a drafter that submits nothing leaves plain decoding, draw for draw
    silent = PromptLookup()
    silent.continuation = lambda context, count: []  # type: ignore[method-assign]
    found = speculated(model, silent, [], SAMPLED, requests=requests)
    assert {tag: one.response_ids for tag, one in found.items()} == plain


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_padded_head_never_drafts_padding(sampling):
    model = tiny_model("llama_padded")
    with torch.no_grad():  # the target does produce padded ids, its drafter cannot
        model.get_output_embeddings().weight[VOCAB_SIZE:] *= 30
    prompts = prompts_of(LENGTHS)
    found = speculated(model, drafter_of(model, model), prompts, sampling)
    tokens = [token for one in found.values() for token in one.response_ids]
    assert max(tokens) >= VOCAB_SIZE
    if sampling is GREEDY:
        assert [found[i].response_ids for i in range(10)] == [
            generated(model, p, 24) for p in prompts
        ]
    for one in found.values():
        at = 1
        for r in one.rounds:
            assert all(token < VOCAB_SIZE for token in one.response_ids[at : at + r.accepted])
            at += r.emitted


# --- what the report shows ---------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["T=0", "T=1"])
def test_only_the_requests_that_are_shown_keep_their_token_ids(sampling):
    model = tiny_model("llama")
    drafter = drafter_of(perturbed(model, 0.1), model)
    counts = []
    options = {"shown": [2, 5], "on_tokens": counts.append}
    found = speculated(model, drafter, prompts_of(LENGTHS), sampling, **options)
    plain = speculated(model, drafter, prompts_of(LENGTHS), sampling)
    assert sum(counts) == sum(len(one.response_ids) for one in found.values())
    for tag, one in found.items():
        assert one.response_ids == plain[tag].response_ids
        lines = [r.line() for r in one.rounds]
        assert [set(line) for line in lines] == [
            {*plain[tag].rounds[0].line(), *(["ids"] if tag in (2, 5) else [])} for _ in lines
        ]
        if tag not in (2, 5):
            continue
        told = [token for line in lines for token in line["ids"]["emitted"]]
        assert told == one.response_ids[1:]
        for r in one.rounds:
            assert len(r.ids.drafted) == r.submitted == K
            assert r.ids.drafted[: r.accepted] == r.ids.emitted[: r.accepted]
            if r.rejected:
                assert r.ids.drafted[r.accepted] != r.ids.emitted[r.accepted]
