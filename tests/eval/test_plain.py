"""Where two greedy answers part, and whether rounding explains it."""

from __future__ import annotations

import pytest
import torch

from eval.engine import Speculated
from eval.plain import difference, plain_generate
from target.decode import Request
from target.model import Target
from target.sampling import Sampling
from tests.helpers.watch import Watch

PROMPT = [3, 5, 7, 9]


@pytest.fixture(scope="module")
def half(tiny_folder):
    """A target in bfloat16, whose logits are as large as those of a real one."""
    target = Target.load(str(tiny_folder("llama")), dtype="bfloat16")
    with torch.no_grad():
        target.model.get_output_embeddings().weight.mul_(200)
    return target


def parting(target, token):
    """Between the target's likeliest token after the prompt and another one."""
    first = ranked(target)[0]
    ours = Speculated(Request(PROMPT, 0, Sampling(0.0), "a"), [1, token], "length", [])
    return difference(target, PROMPT, [1, first], ours)


def ranked(target):
    """Token ids after the prompt and token 1, the likeliest first, by the logits in float32."""
    states = target.outputs(torch.tensor([[*PROMPT, 1]]), layers=("final_norm",)).hidden
    weight = target.head.weight.float()
    return (weight @ states["final_norm"][0, -1].float()).argsort(descending=True).tolist()


def test_equal_answers_do_not_part(half):
    assert parting(half, ranked(half)[0]) is None


def test_the_gap_is_of_the_tokens_that_were_chosen_in_float32(half):
    """Not of the two best: a wrong token beside two best that are close would pass as a tie."""
    states = half.outputs(torch.tensor([[*PROMPT, 1]]), layers=("final_norm",)).hidden
    logits = half.head.weight.float() @ states["final_norm"][0, -1].float()
    order = ranked(half)
    for rank in (1, 5, -1):
        found = parting(half, order[rank])
        assert found["position"] == 1
        assert found["logit_gap"] == pytest.approx(float(logits[order[0]] - logits[order[rank]]))
    assert not found["near_tie"]


def test_what_is_a_near_tie_is_known_by_dtype_and_size(half, tiny_target):
    """A tenth of a logit is rounding in bfloat16 and a fault in float32."""
    weight = half.model.get_output_embeddings().weight
    first, second = ranked(half)[:2]
    with torch.no_grad():
        kept = weight[second].clone()
        weight[second] = weight[first]
        weight[second] *= 1.01
    found = parting(half, first if ranked(half)[0] == second else second)
    with torch.no_grad():
        weight[second] = kept
    assert found["logit_gap"] > 1e-2
    assert found["near_tie"]
    single = tiny_target("llama")
    gap = parting(single, ranked(single)[1])
    assert gap["logit_gap"] > 1e-4
    assert not gap["near_tie"]


def test_what_wrote_the_answers_may_round_more_coarsely(tiny_folder):
    """As llama.cpp does with a quantised file: the tie is that of its rounding."""
    single = Target.load(str(tiny_folder("llama")), dtype="float32")
    first, second = ranked(single)[:2]
    weight = single.model.get_output_embeddings().weight
    with torch.no_grad():
        weight[second] = weight[first] * 0.999
    ours = Speculated(Request(PROMPT, 0, Sampling(0.0), "a"), [1, second], "length", [])
    found = difference(single, PROMPT, [1, first], ours)
    assert found["logit_gap"] > 1e-4
    assert not found["near_tie"]
    assert difference(single, PROMPT, [1, first], ours, torch.bfloat16)["near_tie"]


def test_an_answer_that_ends_early_parts_there(half):
    ours = Speculated(Request(PROMPT, 0, Sampling(0.0), "a"), [1], "length", [])
    found = difference(half, PROMPT, [1, 2], ours)
    assert found["position"] == 1
    assert found["logit_gap"] >= 0


def test_the_gap_where_one_answer_ends_is_that_of_the_two_best_of_the_vocabulary(tiny_target):
    target = tiny_target("llama_padded")
    ours = Speculated(Request(PROMPT, 0, Sampling(0.0), "a"), [1], "length", [])
    found = difference(target, PROMPT, [1, 2], ours)
    logits = target.outputs(torch.tensor([[*PROMPT, 1]])).logits[0, -1, : target.vocab_size]
    first, second = logits.topk(2).values.tolist()
    assert found["logit_gap"] == pytest.approx(first - second, abs=1e-4)


def test_one_position_of_a_long_text_is_projected(tiny_target):
    """All of 32,000 tokens over a vocabulary of 152,000 would take 20 GB."""
    target = tiny_target("llama")
    prompt = PROMPT * 20
    ours = Speculated(Request(prompt, 0, Sampling(0.0), "a"), [1, 3], "length", [])
    with Watch() as watch:
        assert difference(target, prompt, [1, 2], ours) is not None
    assert (1, len(prompt) + 1) in watch.shapes
    assert not [s for s in watch.shapes if s[-1:] == (target.vocab_size,) and len(prompt) + 1 in s]


def test_plain_decoding_ends_at_every_eos_of_the_target_and_keeps_no_default(
    tiny_target, monkeypatch
):
    """The union of tokenizer and generation config, at which servers stop; a default of the model's
    configuration, such as a penalty, is not plain decoding."""
    target = tiny_target("llama")
    monkeypatch.setattr(target, "eos_ids", ())
    whole = plain_generate(target, PROMPT, Sampling(0.0), 12)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", whole[0])
    monkeypatch.setattr(target.model.generation_config, "repetition_penalty", 9.0)
    assert plain_generate(target, PROMPT, Sampling(0.0), 12) == whole
    for one in set(whole):
        other = next(i for i in range(target.vocab_size) if i not in whole)
        monkeypatch.setattr(target, "eos_ids", (other, one))
        expected = whole[: whole.index(one) + 1]
        assert plain_generate(target, PROMPT, Sampling(0.0), 12) == expected
    assert target.model.generation_config.repetition_penalty == 9.0
