"""The slot cache against plain forwards, and batched decoding against transformers' generate."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from target.cache import CachedModel
from target.decode import Request, decode
from target.sampling import Sampling, row_key, warp
from tests.helpers.tiny import (
    ARCHITECTURES,
    EOS,
    PAD,
    VOCAB_SIZE,
    assert_same_greedy,
    generated,
    prompts_of,
    tiny_model,
    tiny_tokenizer,
)
from trainer.errors import UserError

GREEDY, SAMPLED = Sampling(0.0), Sampling(1.0)
LENGTHS = [1, 21, 4, 9, 33, 2, 14, 5, 40, 7]
WINDOWED = ["gemma3", "mistral"]


def requests_for(prompts, sampling=GREEDY, seed=0):
    return [Request(p, row_key(seed, p, i), sampling, i) for i, p in enumerate(prompts)]


def responses(model, requests, **options):
    options = {"max_new_tokens": 24, "eos_ids": (), "batch_size": 4} | options
    return {c.request.tag: c for c in decode(CachedModel(model), [*requests], **options)}


# --- the cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_cached_batch_equals_separate_plain_forwards(name, implementation):
    """Ragged prompts, then ragged chunks beyond the sliding window, against whole forwards."""
    model = tiny_model(name, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    texts = prompts_of([40, 27, 33])
    prefix = [20, 3, 9]
    cached = CachedModel(model)
    cached.begin(3, 48)
    ids = torch.tensor([t[: max(prefix)] for t in texts])
    cached.forward(ids, torch.arange(20).expand_as(ids), used=20, first=0)
    at = list(prefix)
    reference = [model(input_ids=torch.tensor([t])).logits[0] for t in texts]
    while any(start < len(text) for start, text in zip(at, texts, strict=True)):
        steps = 4
        begins = [min(start, len(text) - steps) for start, text in zip(at, texts, strict=True)]
        feed = torch.tensor([t[b : b + steps] for t, b in zip(texts, begins, strict=True)])
        positions = torch.tensor(begins).unsqueeze(1) + torch.arange(steps)
        logits = cached.forward(feed, positions, used=max(begins) + steps)
        for row, begin in enumerate(begins):
            # float32 kernels of other shapes differ by rounding
            torch.testing.assert_close(
                logits[row], reference[row][begin : begin + steps], rtol=1e-4, atol=1e-4
            )
        at = [begin + steps for begin in begins]


@pytest.mark.parametrize("name", ["llama", *WINDOWED, "gpt2", "qwen3_moe"])
@torch.inference_mode()
def test_rejected_tokens_leave_no_trace(name):
    """Draft five tokens, take back three, go on with others: as if the three had never been."""
    model = tiny_model(name)
    cached = CachedModel(model)
    cached.begin(2, 40)
    texts = torch.tensor(prompts_of([30, 30]))
    wrong = torch.tensor(prompts_of([30, 30], seed=1))
    cached.forward(texts[:, :12], torch.arange(12).expand(2, -1), used=12, first=0)
    for start in range(12, 24, 2):
        feed = torch.cat([texts[:, start : start + 2], wrong[:, start : start + 3]], 1)
        positions = (start + torch.arange(5)).expand(2, -1)
        cached.forward(feed, positions, used=start + 5, first=start if start % 4 else None)
    logits = cached.forward(
        texts[:, 24:26], torch.tensor([[24, 25]]).expand(2, -1), used=26, logits_to_keep=1
    )
    plain = model(input_ids=texts[:, :26]).logits[:, -1:]
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.inference_mode()
def test_rows_are_refilled_and_dropped_without_touching_others(name):
    model = tiny_model(name)
    cached = CachedModel(model)
    cached.begin(4, 40)
    texts = prompts_of([24] * 6)
    rows = torch.tensor(texts)
    cached.forward(rows[:4, :20], torch.arange(20).expand(4, -1), used=20, first=0)
    # rows 3 and 1 get shorter texts, in this order
    cached.forward(
        rows[4:, :7], torch.arange(7).expand(2, -1), used=7, first=0, rows=torch.tensor([3, 1])
    )
    cached.keep(torch.tensor([3, 0, 1]))
    feed = torch.stack([rows[4, 7:9], rows[0, 20:22], rows[5, 7:9]])
    positions = torch.tensor([[7, 8], [20, 21], [7, 8]])
    logits = cached.forward(feed, positions, used=22)
    for row, (text, length) in enumerate([(4, 9), (0, 22), (5, 9)]):
        plain = model(input_ids=rows[text : text + 1, :length]).logits[0, -2:]
        torch.testing.assert_close(logits[row], plain, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_windows_do_cut():
    """The two windowed models must depend on it, or the tests above show nothing."""
    for name in WINDOWED:
        model = tiny_model(name)
        text = torch.tensor(prompts_of([40]))
        wide = tiny_model(name, sliding_window=200)
        assert not torch.allclose(model(text).logits[0, -1], wide(text).logits[0, -1], atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("mamba", {"state_size": 8}, "linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("llama4_text", {"attention_chunk_size": 8, "num_local_experts": 2}, "chunked_attention"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "bloom"),
        (
            "gpt_neo",
            {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
            "gpt_neo",
        ),
    ],
)
def test_models_without_a_rollable_cache_are_refused_by_name(kind, options, word):
    config = AutoConfig.for_model(
        kind, vocab_size=32, hidden_size=32, num_hidden_layers=2, intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, pad_token_id=0, **options,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=word):
        CachedModel(model)


# --- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_equals_generate_for_every_batch_size(name):
    model = tiny_model(name)
    prompts = prompts_of(LENGTHS)
    reference = [generated(model, p, 20) for p in prompts]
    assert len({token for text in reference for token in text}) > 20, "degenerate text"
    for batch_size in (1, 4, 8, 32):
        found = responses(model, requests_for(prompts), max_new_tokens=20, batch_size=batch_size)
        for i, prompt in enumerate(prompts):
            assert_same_greedy(model, prompt, found[i].response_ids, reference[i])
            assert found[i].finish_reason == "length"


def test_every_eos_id_ends_an_answer_and_lookahead_goes_on_behind_it():
    model = tiny_model("llama")
    prompts = prompts_of(LENGTHS)
    long = [generated(model, p, 30) for p in prompts]
    eos = (long[0][3], long[1][7], long[2][0])
    found = responses(model, requests_for(prompts), eos_ids=eos, lookahead=5)
    reasons = set()
    for i, one in found.items():
        first = next((n for n, token in enumerate(long[i][:24]) if token in eos), None)
        length = 24 if first is None else first + 1
        assert one.response_ids == long[i][:length]
        assert one.lookahead_ids == long[i][length : length + 5]
        assert one.finish_reason == ("length" if first is None else "eos")
        reasons.add(one.finish_reason)
    assert len(found[2].response_ids) == 1  # EOS is the first token
    assert reasons == {"eos", "length"}


def test_one_new_token_for_more_prompts_than_rows():
    model = tiny_model("llama")
    prompts = prompts_of(LENGTHS)
    found = responses(model, requests_for(prompts), max_new_tokens=1, batch_size=3)
    assert [found[i].response_ids for i in range(10)] == [generated(model, p, 1) for p in prompts]
    assert list(decode(CachedModel(model), [], max_new_tokens=4, eos_ids=(), batch_size=2)) == []


@pytest.mark.slow
def test_sampled_text_does_not_depend_on_batch_size_or_order():
    # float64: in float32, top-p may cut between two near-tied tokens that kernels order otherwise
    model = tiny_model("llama").double()
    prompts = prompts_of(LENGTHS * 2)
    requests = requests_for(prompts, Sampling(1.0, top_k=30, top_p=0.9))
    alone = responses(model, requests, batch_size=1, eos_ids=(EOS, 7))
    for batch_size, order in ((4, requests), (32, requests[::-1])):
        found = responses(model, order, batch_size=batch_size, eos_ids=(EOS, 7))
        for tag, one in alone.items():
            assert found[tag].response_ids == one.response_ids
    again = responses(model, requests_for(prompts, Sampling(1.0), seed=1), batch_size=32)
    other = responses(model, requests_for(prompts, Sampling(1.0), seed=2), batch_size=32)
    assert all(again[i].response_ids != other[i].response_ids for i in again)


def test_temperatures_mix_in_one_batch():
    model = tiny_model("llama")
    prompts = prompts_of([6] * 8)
    requests = [
        Request(p, row_key(0, p, 0), Sampling(t), i)
        for i, (p, t) in enumerate(zip(prompts, [0.0, 0.7, 1.5, 0.0] * 2, strict=True))
    ]
    together = responses(model, requests, batch_size=8)
    for i, request in enumerate(requests):
        alone = responses(model, [request], batch_size=1)
        assert together[i].response_ids == alone[i].response_ids
        if request.sampling.temperature == 0:
            assert together[i].response_ids == generated(model, request.prompt_ids, 24)


@torch.no_grad()
def test_sampled_first_tokens_follow_the_models_law():
    model = tiny_model("llama", vocab_size=8, eos_token_id=None)
    count, sampling = 20_000, Sampling(0.8, top_k=6)
    requests = [Request([1, 2, 3], row_key(0, [1, 2, 3], i), sampling, i) for i in range(count)]
    found = responses(model, requests, max_new_tokens=2, batch_size=5000)
    texts = torch.tensor([found[i].response_ids for i in range(count)])
    first = warp(model(torch.tensor([[1, 2, 3]])).logits[0, -1], sampling)
    contexts = torch.tensor([[1, 2, 3, v] for v in range(8)])
    second = warp(model(contexts).logits[:, -1], sampling)
    expected = (first.unsqueeze(1) * second).flatten() * count
    observed = torch.bincount(texts[:, 0] * 8 + texts[:, 1], minlength=64)
    kept = expected >= 5
    assert int(observed[expected == 0].sum()) == 0
    statistic = float(((observed - expected) ** 2 / expected)[kept].sum())
    degrees = int(kept.sum())
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5  # about 4 standard deviations


def test_requests_may_be_appended_while_iterating():
    """Later turns: each answer's follow-up is longer than anything the cache had room for, and a
    short one hides it at the end of the queue."""
    model = tiny_model("llama")
    prompts = prompts_of([3, 4, 5, 6])
    queue = requests_for(prompts)
    found = {}
    for one in decode(CachedModel(model), queue, max_new_tokens=6, eos_ids=(), batch_size=4):
        found[one.request.tag] = one
        if isinstance(one.request.tag, int):
            longer = one.request.prompt_ids + one.response_ids + prompts_of([40])[0]
            queue.append(Request(longer, 0, GREEDY, ("long", one.request.tag)))
            queue.append(Request([9], 0, GREEDY, ("short", one.request.tag)))
    assert len(found) == 12
    for one in found.values():
        assert one.response_ids == generated(model, one.request.prompt_ids, 6)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.inference_mode()
def test_free_rows_always_see_a_slot(name):
    """A long prompt that ended must not compute beyond what the short ones use: attention over no
    slot at all may give NaN, which would stay in the row's cache."""
    model = tiny_model(name)
    prompts = prompts_of([60, 60, 3, 3])
    eos = tuple({generated(model, p, 1)[0] for p in prompts[:2]})
    cached = CachedModel(model)
    lowest = []
    mask = cached._mask

    def spy(positions, used, tree=None):
        window = cached.layer_masks.window or 10**9
        lowest.append(bool((positions - window < used - 1).all()))
        return mask(positions, used, tree)

    cached._mask = spy
    options = {"max_new_tokens": 30, "eos_ids": eos, "batch_size": 4}
    found = {c.request.tag: c for c in decode(cached, requests_for(prompts), **options)}
    assert all(lowest)
    for i in (2, 3):
        assert_same_greedy(
            model, prompts[i], found[i].response_ids, generated(model, prompts[i], 30, eos)
        )


def test_ids_beyond_the_vocabulary_are_never_produced_when_it_is_given():
    model = tiny_model("llama_padded")
    with torch.no_grad():  # padding that would win
        model.get_output_embeddings().weight[VOCAB_SIZE:] *= 50
    prompts = prompts_of(LENGTHS)
    for sampling in (GREEDY, SAMPLED):
        free = responses(model, requests_for(prompts, sampling))
        assert any(token >= VOCAB_SIZE for c in free.values() for token in c.response_ids)
        cut = responses(model, requests_for(prompts, sampling), vocab_size=VOCAB_SIZE)
        assert all(token < VOCAB_SIZE for c in cut.values() for token in c.response_ids)


def test_stop_strings_end_an_answer_with_the_token_that_completes_them():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    prompts = prompts_of(LENGTHS)
    long = [generated(model, p, 24) for p in prompts]
    stops = tuple(tokenizer.decode(long[i][n : n + 3]) for i, n in ((0, 5), (4, 9)))
    found = responses(
        model, requests_for(prompts), tokenizer=tokenizer, stop_strings=stops, lookahead=2
    )
    ended = 0
    for i, one in found.items():
        text = [tokenizer.decode(long[i][: n + 1]) for n in range(24)]
        first = next((n for n in range(24) if any(stop in text[n] for stop in stops)), None)
        assert one.response_ids == long[i][: 24 if first is None else first + 1]
        assert one.finish_reason == ("length" if first is None else "stop")
        ended += first is not None
    assert ended >= 2


def test_a_stop_string_may_have_more_tokens_than_characters():
    """Byte-level tokenizers cut one character into up to four tokens."""
    model, stop = tiny_model("llama"), "🛑"
    (answer,) = (generated(model, p, 24) for p in prompts_of([4]))
    start = next(i for i in range(20) if len({*answer[: i + 4]}) == i + 4)
    named = dict(zip(answer[start : start + 4], stop.encode(), strict=True))

    class Bytes:
        def decode(self, tokens, skip_special_tokens):
            return bytes(named.get(token, 97) for token in tokens).decode(errors="replace")

    options = {"tokenizer": Bytes(), "stop_strings": (stop,)}
    found = responses(model, requests_for(prompts_of([4])), **options)
    assert found[0].response_ids == answer[: start + 4]
    assert found[0].finish_reason == "stop"


def test_padding_and_eos_in_a_prompt_are_ordinary_tokens():
    model = tiny_model("llama")
    prompts = [[PAD, PAD, 8], [EOS, 8], [8, EOS, PAD, 0]]
    found = responses(model, requests_for(prompts))
    assert [found[i].response_ids for i in range(3)] == [generated(model, p, 24) for p in prompts]
