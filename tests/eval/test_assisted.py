"""Our rounds against transformers' assisted generation on the same pair, prompts and K.

Its conventions: the first round drafts from the end of the prompt, without a token from the
prefill; the last one drafts at most one token less than the answer still takes. So
- our rounds on a prompt are its rounds on the prompt and the token of our prefill; it accepts what
  we emit less one, also in the last round, where ours counts a cut draft as accepted;
- its rounds on the prompt itself are ours on the prompt less its last token, were that token the
  one of the prefill: so the replay sees it as the first of the response.
"""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from data.traces import Trace
from drafters.causal_lm import CausalLMDrafter
from drafters.round import Budget
from eval.engine import SpeculativeDecoder
from eval.offline import OfflineEvaluator
from target.cache import CachedModel
from target.decode import Request
from target.model import Target
from target.sampling import Sampling
from tests.helpers.tiny import EOS, perturbed, prompts_of, tiny_model, tiny_tokenizer

GREEDY = Sampling(0.0)
NEW = 25


@pytest.fixture
def assisted(monkeypatch):
    """assisted(model, draft, prompt, K, max_new_tokens, eos) -> its answer and, per round, how many
    tokens it drafted and accepted."""
    rounds: list[tuple[int, int]] = []
    original = AssistedCandidateGenerator.update_candidate_strategy

    def recorded(self, input_ids, scores, num_matches):
        rounds.append((scores.shape[1] - 1, int(num_matches)))
        return original(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", recorded)

    @torch.no_grad()
    def run(model, draft, prompt, K, max_new_tokens, eos):
        rounds.clear()
        draft.generation_config = GenerationConfig(
            num_assistant_tokens=K, num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0, eos_token_id=list(eos) or None,
        )  # fmt: skip
        model.generation_config = GenerationConfig()
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=list(eos) or None,
        )  # fmt: skip
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft,
            generation_config=config,
        )  # fmt: skip
        return output[0, len(prompt) :].tolist(), list(rounds)

    return run


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def pair(request):
    """A target, a drafter that is often right, and two ids that end some of the answers."""
    # no padding id: transformers masks it out of the assistant's context wherever it occurs
    model = tiny_model(request.param, pad_token_id=None)
    return model, perturbed(model, 0.1)


def ours(model, draft, prompts, K, eos):
    target = Target(model, tiny_tokenizer(), "tiny", {}, eos)
    decoder = SpeculativeDecoder(
        CachedModel(model), CausalLMDrafter._of(draft, target, "draft"), sampling=GREEDY,
        budget=Budget(K), eos_ids=eos, max_new_tokens=NEW, batch_size=6,
    )  # fmt: skip
    found = {s.request.tag: s for s in decoder.run([Request(p, 0, GREEDY, i) for i, p in prompts])}
    return [found[i] for i, _ in prompts]


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("with_eos", [False, True])
def test_rounds_equal_assisted_generation_round_for_round(pair, assisted, K, with_eos):
    model, draft = pair
    prompts = list(enumerate(prompts_of([3, 12, 7, 20, 5] * (4 if with_eos else 2))))
    eos: tuple[int, ...] = ()
    if with_eos:
        free = ours(model, draft, prompts, K, ())
        eos = tuple(sorted({free[0].response_ids[5], free[1].response_ids[11], EOS}))
    answers = ours(model, draft, prompts, K, eos)
    accepted = 0
    for (_, prompt), one in zip(prompts, answers, strict=True):
        first, *rest = one.response_ids
        if not rest:
            continue  # EOS came out of the prefill: no round
        text, theirs = assisted(model, draft, [*prompt, first], K, NEW - 1, eos)
        assert text == rest
        assert [matches for _, matches in theirs] == [r.emitted - 1 for r in one.rounds]
        # only a last round that was cut inside its drafts counts one accepted draft more here
        extra = sum(r.accepted == r.emitted for r in one.rounds)
        assert extra <= 1
        assert sum(r.accepted for r in one.rounds) - extra == sum(m for _, m in theirs)
        accepted += sum(m for _, m in theirs)
        room = NEW - 1
        for (drafted, _), r in zip(theirs, one.rounds, strict=True):
            assert drafted == min(K, room - 1) or eos
            assert r.submitted == K
            room -= r.emitted
    assert accepted > 20
    if with_eos:
        assert {one.finish_reason for one in answers} == {"eos", "length"}


@pytest.mark.parametrize("K", [3])
def test_its_own_convention_can_be_replayed(pair, assisted, K):
    model, draft = pair
    target = Target(model, tiny_tokenizer(), "tiny", {}, ())
    drafter = CausalLMDrafter._of(draft, target, "draft")
    traces, theirs = [], []
    for index, prompt in enumerate(prompts_of([3, 12, 7, 20, 5] * 2)):
        text, rounds = assisted(model, draft, prompt, K, NEW, ())
        theirs.append(rounds)
        trace = Trace(
            prompt_ids=prompt[:-1], response_ids=[prompt[-1], *text], source="target", domain="",
            conversation_id="", turn=0, sample_index=0, temperature=0.0, top_k=0, top_p=1.0, seed=0,
            finish_reason="length", model_hash="", tokenizer_hash="", prompt_hash=str(index),
        )  # fmt: skip
        traces.append(trace)
    evaluator = OfflineEvaluator(target, traces, GREEDY, Budget(K), engine_counters=False)
    found = {one.prompt_hash: one for one in evaluator(drafter).counters}
    for index, rounds in enumerate(theirs):
        one = found[str(index)]
        assert one.rounds == len(rounds)
        assert one.emitted == NEW
        assert one.emitted - one.rounds == sum(matches for _, matches in rounds)
        # the replay keeps a last draft that theirs did not make: one deeper than theirs accepted
        reach = [sum(matches > i for _, matches in rounds) for i in range(K)]
        extra = [a - b for a, b in zip(one.reach, reach, strict=True)]
        last = [float(i == rounds[-1][1]) for i in range(K)]
        assert extra in ([0.0] * K, last)
        assert one.accepted == sum(reach) + sum(extra)
    assert sum(sum(m for _, m in rounds) for rounds in theirs) > 50
