"""OSD: which positions are trained and with what weight, that serving stays exact while the drafter
learns, the stream, the buffer, the log, and the pitfalls of the method, each with its test."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch

import train
from data.batches import collate
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import Prompt
from data.request_log import RequestLog
from data.traces import Trace
from drafters.bank import DrafterBank
from drafters.causal_lm import CausalLMDrafter
from drafters.load import load_drafter
from eval.engine import Speculated, SpeculativeDecoder
from eval.policies.table import make_budget
from eval.rounds import Round
from eval.walk import rejections, replay
from recipes import osd
from recipes.base import Context
from recipes.common import stream
from recipes.common.online import (
    Replay,
    Served,
    draft_logits,
    expected_rounds,
    marks,
    online_batch,
    publish,
    target_logits,
)
from recipes.osd import Config, Recipe
from target.decode import Request
from target.sampling import Sampling, row_key
from tests.helpers.commands import (
    TWO,
    command,
    finish,
    read_jsonl,
    report_stores,
    start,
    stored_traces,
    training_stores,
    write_jsonl,
)
from tests.helpers.losses import listed, ordered
from tests.helpers.objectives import trained
from tests.helpers.tiny import EOS, assert_same_greedy, generated, perturbed, prompts_of
from trainer.errors import RunFault, UserError
from trainer.shift import supervised

GREEDY, SAMPLED = Sampling(0.0), Sampling(1.0)
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    """Of two domains with different words."""
    words = {"sums": "Add 3 and 4", "names": "Who is Bob"}
    prompts = [
        Prompt(f"{words[d]} {i * 'x'}: ", None, None, d, "", f"c{i}")
        for i, d in enumerate(["sums", "names"] * 6)
    ]
    plan = GenerationPlan("test", tuple(prompts), (0.0, 1.0), max_new_tokens=NEW_TOKENS)
    folder = tmp_path_factory.mktemp("traces")
    return generate_traces(target, plan, folder, batch_size=8, rows_per_shard=8)


def drafter_of(target, noise=0.1, seed=1):
    """It often agrees with the target."""
    return CausalLMDrafter._of(perturbed(target.model, noise, seed), target, "near").requires_grad_(
        True
    )


def make(target, traces, temperature=None, drafter=None, stage="online", max_steps=10, **options):
    recipe = Recipe(Config(**options), target)
    drafter = drafter or drafter_of(target)
    if temperature is not None:
        traces = [Trace(**{**vars(t), "temperature": temperature}) for t in traces]
    number = [one.name for one in recipe.stages()].index(stage)
    before = {"before": copy.deepcopy(drafter).eval()}
    made = trained(
        recipe, drafter, stage=number, traces=traces, drafters=before, max_steps=max_steps,
        new=NEW_TOKENS,
    )  # fmt: skip
    made.drafter.train()
    return made


def interval(recipe, step, size=4, seed=0, folder=None):
    """The batch of a step, as the loop asks for it."""
    stored = collate([[5, 6]] * size, [[7]] * size, ["target"] * size, step)
    return recipe.refresh(step, Context(stored, recipe.drafter, None, None, seed, folder))


def loss_of(recipe, batch):
    terms = listed(recipe.loss(batch, None, 0).terms)
    assert [float(n) for _, n, _ in terms] == pytest.approx(ordered(recipe.denominators(batch, 0)))
    return sum(total / (n or 1) for total, n, _ in terms)


def update(recipe, batch, optimizer):
    loss = loss_of(recipe, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def kl(p, q):
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


# --- which positions --------------------------------------------------------------------------


def round_at(ctx_len, accepted, emitted, rejected=True):
    return Round("", 5, 5, accepted, emitted, accepted + 1 if rejected else None, 1, 1, 0, 0, 0,
                 ctx_len, [], False, accepted)  # fmt: skip


def answer_of(rounds, size=10, prompt=3):
    request = Request([9] * prompt, 0, GREEDY)
    return Speculated(request, [7] * (size - 1) + [EOS], "eos", rounds)


def test_the_corrected_token_is_marked_and_no_bonus_token():
    """The prefill's token, 2 accepted and a correction, 5 accepted and a bonus, and the EOS."""
    rounds = [round_at(4, 2, 3), round_at(7, 5, 5, rejected=False), round_at(12, 0, 1)]
    answer = answer_of(rounds)
    assert marks(answer, "rejected") == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert marks(answer, "all") == [1] * 10
    assert marks(answer_of([]), "rejected") == [0] * 10


def test_the_published_code_trains_what_follows_every_block():
    rounds = [round_at(4, 2, 3), round_at(7, 4, 5, rejected=False), round_at(12, 0, 1)]
    assert marks(answer_of(rounds), "published_code") == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_a_rejection_that_was_cut_away_is_not_trained():
    assert marks(answer_of([round_at(4, 6, 6, rejected=False)], size=7), "rejected") == [0] * 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exactly_the_logits_that_drafted_a_rejected_token_are_trained(target, traces, temperature):
    """At T=0 a token is a correction exactly where the drafter's choice one index before is another
    one and a round tested it; the loss there is of raw logits, at temperature 1."""
    recipe = make(target, traces, temperature)
    batch = interval(recipe, 0)
    rows, index = supervised(batch.loss_mask).nonzero(as_tuple=True)
    assert len(rows) == batch.num_supervised > 4
    p = target.outputs(batch.input_ids).logits
    with torch.no_grad():
        q = recipe.drafter.eval().draft_logits(batch.input_ids)
    torch.testing.assert_close(batch.target_logits, p[rows, index], rtol=1e-4, atol=1e-4)
    if temperature == 0:
        corrected = batch.input_ids[rows, index + 1]
        assert torch.equal(p[rows, index].argmax(-1), corrected)
        assert not bool((q[rows, index].argmax(-1) == corrected).any())
    expected = kl(p[rows, index], q[rows, index]).mean().item()
    assert loss_of(recipe, batch).item() == pytest.approx(expected, rel=1e-4)


def test_one_wrong_position_is_the_only_one_that_is_pulled_to_the_target(target, traces):
    """The drafter is the target but for one token's row of the head: only where that token is
    corrected is there anything to learn, and a step on the head raises q of it there."""
    drafter = CausalLMDrafter._of(copy.deepcopy(target.model), target, "same").requires_grad_(True)
    texts = [generated(target.model, t.prompt_ids, NEW_TOKENS) for t in traces]
    wrong = max({i for t in texts for i in t}, key=lambda i: sum(i in t for t in texts))
    with torch.no_grad():
        drafter.output_head().weight[wrong] *= -1
    recipe = make(target, traces, 0.0, drafter=drafter)
    batch = interval(recipe, 0, size=12)
    rows, index = supervised(batch.loss_mask).nonzero(as_tuple=True)
    corrected = batch.input_ids[rows, index + 1]
    # raw logits of the two differ in one column: no other token's row of the head is pulled far
    assert len(rows)
    here = corrected == wrong
    assert bool(here.any())
    before = drafter.draft_logits(batch.input_ids).log_softmax(-1)[rows, index]
    head = drafter.output_head().weight
    optimizer = torch.optim.SGD([head], 0.5)
    was = head.detach().clone()
    update(recipe, batch, optimizer)
    moved = (head - was).detach().norm(dim=1)
    assert int(moved.argmax()) == wrong
    after = drafter.draft_logits(batch.input_ids).log_softmax(-1)[rows, index]
    gained = (after - before).detach()
    assert float(gained[here, wrong].min()) > 0
    assert bool((gained[here].argmax(-1) == wrong).all())


def test_padding_and_prompts_are_never_trained(target, traces):
    batch = interval(make(target, traces, 1.0), 0)
    assert bool((batch.document_ids < 0).any())
    assert not bool((batch.loss_mask & (batch.document_ids < 0)).any())
    for row, prompt in enumerate(batch.prompts):
        assert not bool(batch.loss_mask[row, : len(prompt)].any())
    short = Served(0, [5], [6, 7], GREEDY, "", 0, 0, [1.0, 1.0, 1.0])
    long = Served(1, [5], [6, 7, 8, 9], GREEDY, "", 0, 0, [0.0] * 4)
    with pytest.raises(AssertionError, match="padding or a prompt would be trained"):
        online_batch([short, long], [torch.zeros(3, 9), torch.zeros(4, 9)], 0)


def test_where_nothing_is_rejected_there_is_no_step(target, traces):
    same = CausalLMDrafter._of(copy.deepcopy(target.model), target, "same").requires_grad_(True)
    recipe = make(target, traces, 0.0, drafter=same)
    assert interval(recipe, 0) is None
    assert (recipe.requests, recipe.served_version) == (4, 0)


# --- serving ----------------------------------------------------------------------------------


def test_greedy_text_is_the_targets_through_all_updates(target, traces):
    recipe = make(target, traces, 0.0)
    optimizer = torch.optim.AdamW(recipe.drafter.parameters(), 1e-2)
    served, weights = [], [p.detach().clone() for p in recipe.drafter.parameters()]
    for step in range(6):
        batch = interval(recipe, step)
        served += recipe.last
        if batch is not None:
            update(recipe, batch, optimizer)
    moved = [not torch.equal(a, b) for a, b in
             zip(weights, recipe.drafter.parameters(), strict=True)]  # fmt: skip
    assert any(moved)
    assert recipe.served_version >= 4
    for row in served:
        plain = generated(target.model, row.prompt_ids, NEW_TOKENS, target.eos_ids)
        assert_same_greedy(target.model, row.prompt_ids, row.response_ids, plain)


@pytest.mark.parametrize("size", [1, 4])
def test_without_updates_it_is_plain_speculative_sampling(target, traces, size):
    """For the same seed, whatever the interval."""
    recipe = make(target, traces, 1.0)
    served = []
    for step in range(8 // size):
        interval(recipe, step, size, seed=3)
        served += recipe.last
    requests = [
        Request(r.prompt_ids, row_key(3, r.prompt_ids, r.number), SAMPLED, r.number) for r in served
    ]
    decoder = SpeculativeDecoder(
        recipe.stream.server.cached, recipe.drafter.eval(), sampling=SAMPLED,
        budget=make_budget("fixed", 5), eos_ids=target.eos_ids, max_new_tokens=NEW_TOKENS,
        batch_size=3, vocab_size=target.vocab_size,
    )  # fmt: skip
    plain = {one.request.tag: one.response_ids for one in decoder.run(requests)}
    assert [plain[n] for n in range(8)] == [row.response_ids for row in served]


def test_weights_that_change_while_they_serve_are_noticed(target, traces):
    drafter = drafter_of(target)
    recipe = make(target, traces, 1.0, drafter=drafter)
    propose = drafter.propose

    def training_at_the_same_time(state, budget):
        with torch.no_grad():
            next(drafter.parameters()).add_(1e-3)
        return propose(state, budget)

    drafter.propose = training_at_the_same_time
    with pytest.raises(RunFault, match="StateError: the drafter's weights changed"):
        interval(recipe, 0)


def test_acceptance_is_recorded_before_the_request_is_trained_on(target, traces):
    recipe = make(target, traces, 1.0)
    served = copy.deepcopy(recipe.drafter).eval()
    batch = interval(recipe, 0)
    rows = recipe.last
    matches = sum(
        float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum())
        for p, q in zip(target_logits(target, rows), draft_logits(served, rows), strict=True)
    )
    update(recipe, batch, torch.optim.SGD(recipe.drafter.parameters(), 1.0))
    row = recipe.evaluated(None)(None, 1)
    total = sum(len(r.response_ids) for r in rows)
    assert row["alpha_prequential"] == pytest.approx(matches / total)
    assert row["alpha_static"] == row["alpha_prequential"]  # served by the start so far
    interval(recipe, 1)
    row = recipe.evaluated(None)(None, 2)
    assert row["alpha_static"] != row["alpha_prequential"]
    assert row["request"] == 8
    assert row["select"] is None
    assert 0 < row["alpha_hat_prequential"] < 1
    assert row["serve_s_per_request"] > 0


def test_the_stream_keeps_its_order_and_begins_again(target, traces):
    recipe = make(target, list(reversed(traces)))
    seen, numbers = [], []
    for step in range(4):
        interval(recipe, step)
        seen += [row.prompt_ids for row in recipe.last]
        numbers += [row.number for row in recipe.last]
        assert {row.sampling.temperature for row in recipe.last} == {0.0, 1.0}
    order = [t.prompt_ids for t in sorted(traces, key=lambda t: t.index)]
    assert seen == order + order[:4]
    assert numbers == list(range(16))


@pytest.mark.slow
def test_a_drafter_learns_from_its_stream(target, traces):
    recipe = make(target, traces, 1.0, offline=False)
    optimizer = torch.optim.AdamW(recipe.drafter.parameters(), 3e-3)
    for step in range(24):
        update(recipe, interval(recipe, step, 6), optimizer)
        if step == 11:
            recipe.evaluated(None)(None, 0)
    row = recipe.evaluated(None)(None, 0)
    assert row["alpha_prequential"] > row["alpha_static"] + 0.02


def test_batches_of_one_step_are_served_with_one_version(target, traces):
    """Accumulation makes the interval longer, it does not move the weights."""
    recipe = make(target, traces, 1.0)
    seen = []
    for index in range(6):
        stored = collate([[5, 6]] * 2, [[7]] * 2, ["target"] * 2, index)
        recipe.refresh(index // 2, Context(stored, recipe.drafter, None, None))
        seen += [row.version for row in recipe.last]
    assert seen == [0] * 4 + [1] * 4 + [2] * 4
    assert recipe.served_version == 3


# --- options ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_losses(target, traces):
    """Of the first two intervals under these options, computed once for each."""
    known = {}

    def get(options):
        key = repr(sorted(options.items()))
        if key not in known:
            recipe = make(target, traces, **options)
            batches = interval(recipe, 0), interval(recipe, 1)
            known[key] = np.array([loss_of(recipe, batch).item() for batch in batches])
        return known[key]

    return get


@pytest.mark.parametrize(
    ("common", "change"),
    [
        ({}, {"divergence": "rkl"}),
        ({"divergence": "jsd"}, {"divergence": "jsd:0.2"}),
        ({"divergence": "lk_hybrid"}, {"divergence": "lk_hybrid:1"}),
        ({"divergence": "kl_mix"}, {"divergence": "kl_mix:0.5"}),
        ({}, {"K": 1}),
        ({}, {"positions": "all"}),
        ({}, {"positions": "published_code"}),
        ({}, {"reduction": "sequence"}),
        ({}, {"replay_share": 0.5}),
        ({}, {"bank": True}),
    ],
)
def test_every_option_changes_what_is_trained(common, change, first_losses):
    assert np.abs(first_losses(common) - first_losses(common | change)).max() > 1e-5


def test_a_long_answer_counts_no_more_than_a_short_one(target, traces):
    recipe = make(target, traces, 1.0, reduction="sequence", positions="all")
    batch = interval(recipe, 0)
    rows, index = supervised(batch.loss_mask).nonzero(as_tuple=True)
    with torch.no_grad():
        q = recipe.drafter.draft_logits(batch.input_ids)[rows, index]
    values = kl(batch.target_logits, q)
    means = [values[rows == row].mean() for row in range(4)]
    assert loss_of(recipe, batch).item() == pytest.approx(float(sum(means) / 4), rel=1e-4)


def test_the_offline_stage_distils_on_the_same_text(target, traces):
    recipe = make(target, traces, 1.0, stage="offline")
    batch = collate([t.prompt_ids for t in traces], [t.response_ids for t in traces],
                    ["target"] * len(traces))  # fmt: skip
    assert interval(recipe, 0) is not None
    outputs = target.outputs(batch.input_ids)
    rows, index = supervised(batch.loss_mask).nonzero(as_tuple=True)
    q = recipe.drafter.draft_logits(batch.input_ids)[rows, index]
    ((total, count, _),) = listed(recipe.loss(batch, outputs, 0).terms)
    expected = float(kl(outputs.logits[rows, index], q.detach()).mean())
    assert total.item() / count == pytest.approx(expected, rel=1e-4)
    assert ordered(recipe.denominators(batch, 0)) == [float(count)]
    assert recipe.state_dict() == {}
    assert recipe.evaluated(len, []) is len
    assert [s.name for s in Recipe(Config(offline=False), target).stages()] == ["online"]
    offline, online = Recipe(Config(offline_lr=2e-3), target).stages()
    assert offline.overrides == {"lr_schedule": "cosine", "lr": 2e-3}
    assert online.overrides == {}


def test_options_of_a_fresh_drafter(target):
    built = Recipe(Config(draft_layers=2, draft_hidden_size=8), target).build([])
    config = built.model.config
    assert (config.num_hidden_layers, config.hidden_size) == (2, 8)


# --- the buffer -------------------------------------------------------------------------------


def served_row(number, member=0, version=0):
    return Served(number, [5, number % 90], [6, 7], GREEDY, "", member, version, [0.0, 1.0])


def test_replay_is_a_uniform_sample_of_the_past():
    counts = np.zeros(40)
    for seed in range(400):
        kept = Replay(10, seed)
        for number in range(40):
            kept.add(served_row(number))
        assert len({row.number for row in kept.rows}) == 10
        counts[[row.number for row in kept.rows]] += 1
    assert abs(counts / 400 - 0.25).max() < 0.09  # 4 standard errors
    kept.add(Served(99, [5], [6], GREEDY, "", 0, 0, [0.0]))  # nothing to learn
    assert 99 not in {row.number for row in kept.rows}


def test_replay_keeps_its_size_for_each_drafter_and_comes_back_from_a_checkpoint(tmp_path):
    kept = Replay(3, 0)
    for number in range(30):
        kept.add(served_row(number, member=number % 2, version=number))
    assert sorted(row.member for row in kept.rows) == [0, 0, 0, 1, 1, 1]
    torch.save(kept.state_dict(), tmp_path / "state")
    again = Replay(3, 0)
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True), version=30)
    assert again.rows == kept.rows
    for one in (kept, again):
        one.add(served_row(99))
    assert again.draw(4, 7, 0) == kept.draw(4, 7, 0) != kept.draw(4, 8, 0)
    with pytest.raises(RunFault, match="StateError: the buffer holds request"):
        again.load_state_dict(kept.state_dict(), version=2)


def test_a_share_of_the_rows_is_replayed_with_the_law_they_had(target, traces):
    recipe = make(target, traces, 1.0, replay_share=0.5)
    first = interval(recipe, 0)
    second = interval(recipe, 1)
    fresh = sum(any(row.weights) for row in recipe.last)
    assert len(second.prompts) == 2 * fresh
    old = second.prompts.index(first.prompts[0])
    mask = supervised(second.loss_mask)
    before = int(mask[:old].sum())
    count = int(mask[old].sum())
    rows = supervised(first.loss_mask).nonzero(as_tuple=True)[0]
    torch.testing.assert_close(
        second.target_logits[before : before + count], first.target_logits[rows == 0]
    )


def test_a_share_that_is_no_whole_number_of_rows_is_kept_on_average():
    kept = Replay(50, 0)
    for number in range(50):
        kept.add(served_row(number))
    counts = [len(kept.draw(1 / 3, index, 0)) for index in range(600)]
    assert set(counts) == {0, 1}
    assert sum(counts) / 600 == pytest.approx(1 / 3, abs=0.06)
    assert {len(kept.draw(2.0, index, 0)) for index in range(50)} == {2}


# --- publication ------------------------------------------------------------------------------


def full_disk(folder):
    raise OSError(28, "No space left on device")


def test_versions_are_published_whole_and_the_newest_is_named(
    target, traces, tmp_path, monkeypatch
):
    recipe = make(target, traces, 1.0, publish_every=2)
    optimizer = torch.optim.AdamW(recipe.drafter.parameters(), 1e-2)
    for step in range(7):
        batch = interval(recipe, step, folder=tmp_path)
        if step == 6:
            published = copy.deepcopy(recipe.drafter.state_dict())
        update(recipe, batch, optimizer)
    folder = tmp_path / "published"
    about = json.loads((folder / "latest.json").read_text())
    weights = about.pop("weights")
    assert about == {"version": 6, "requests": 24, "folder": "version-000006"}
    assert sorted(p.name for p in folder.iterdir()) == [
        "latest.json", "version-000004", "version-000006",
    ]  # fmt: skip
    loaded = load_drafter(str(folder / about["folder"]), target).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in published.items())
    names = sorted(p.stat().st_ino for p in (folder / about["folder"]).iterdir())
    again = copy.deepcopy(recipe.drafter)
    again.load_state_dict(published)
    publish(again, folder, 6, 24)  # a server may be loading it
    assert sorted(p.stat().st_ino for p in (folder / about["folder"]).iterdir()) == names
    other = publish(recipe.drafter, folder, 6, 25)  # of another trajectory
    told = json.loads((folder / "latest.json").read_text())
    assert (told["folder"], told["requests"]) == (other.name, 25)
    assert told["weights"] != weights
    assert (folder / about["folder"]).is_dir()
    (folder / "latest.json").write_text("{")
    publish(again, folder, 6, 24)
    about = json.loads((folder / "latest.json").read_text())
    monkeypatch.setattr(recipe.drafter, "save_pretrained", full_disk)
    with pytest.raises(RunFault, match=r"version 7 .* cannot be published .*No space left"):
        publish(recipe.drafter, folder, 7, 28)
    monkeypatch.undo()
    with torch.no_grad():
        next(recipe.drafter.parameters())[0] = float("nan")
    with pytest.raises(RunFault, match="not published, the version before it stays"):
        publish(recipe.drafter, folder, 7, 28)
    assert json.loads((folder / "latest.json").read_text()) == about


# --- the log ----------------------------------------------------------------------------------


def logged(rows, **more):
    return [
        {"prompt_ids": r.prompt_ids, "response_ids": r.response_ids, "domain": r.domain,
         "temperature": r.sampling.temperature, **more}
        for r in rows
    ]  # fmt: skip


def test_expected_rejections_add_up_to_the_counters_of_the_replay():
    rng = np.random.default_rng(0)
    lengths = np.array([1, 2, 5, 9, 12])
    accept = rng.uniform(size=(5, 12))
    accept[3] = accept[3] > 0.5
    by_depth = np.stack([np.pad(accept[:, j:], ((0, 0), (0, j))) for j in range(4)], -1)
    whole = replay(by_depth, np.full((5, 12), 4), lengths, 4)
    for row, length in enumerate(lengths):
        tested, rejected, rounds = rejections(accept[row], int(length), 4)
        assert rounds == pytest.approx(whole["rounds"][row])
        assert rejected.sum() == pytest.approx(whole["rejections"][row])
        assert (tested - rejected).sum() == pytest.approx(whole["accepted"][row])


def test_a_greedy_log_trains_what_serving_it_would(target, traces, tmp_path):
    """The same text, the same drafter: masks, weights and laws are those of the engine's rounds."""
    served = make(target, traces, 0.0)
    batch = interval(served, 0)
    log = write_jsonl(tmp_path / "log.jsonl", logged(served.last))
    follower = make(target, traces, 0.0, log=str(log))
    found = interval(follower, 0)
    assert torch.equal(found.loss_mask, batch.loss_mask)
    assert torch.equal(found.weights, batch.weights)
    torch.testing.assert_close(found.target_logits, batch.target_logits)
    ours, theirs = (one.evaluated(None)(None, 1) for one in (follower, served))
    for key in ("alpha_prequential", "alpha_hat_prequential", "tokens_per_round_prequential"):
        assert ours[key] == pytest.approx(theirs[key])


def test_a_sampled_log_weighs_positions_as_serving_marks_them_on_average(target, traces, tmp_path):
    """Both are measured on the same answers, so their difference has mean zero."""
    recipe = make(target, traces, 1.0, K=3)
    for step in range(2):
        interval(recipe, step, 96)
        log = write_jsonl(tmp_path / f"{step}.jsonl", logged(recipe.last))
        follower = make(target, traces, 1.0, K=3, log=str(log))
        interval(follower, 0, 96)
        real, expected = (
            np.array([np.pad(r.weights, (0, NEW_TOKENS - len(r.weights))) for r in one.last])
            for one in (recipe, follower)
        )
        sums = (real - expected).sum(1)
        assert abs(sums.mean()) < 3 * sums.std() / len(sums) ** 0.5
        early = (real - expected)[:, 1:4].mean(0)
        assert np.abs(early).max() < 4 * 0.5 / len(sums) ** 0.5
        assert not np.array_equal(real, expected)


def test_all_positions_of_a_log_weigh_the_same(target, traces, tmp_path):
    recipe = make(target, traces, 1.0)
    interval(recipe, 0)
    log = write_jsonl(tmp_path / "log.jsonl", logged(recipe.last))
    batch = interval(make(target, traces, log=str(log), positions="all"), 0)
    assert batch.num_supervised == sum(map(len, batch.responses))
    assert set(batch.weights.tolist()) == {1.0}


def test_a_log_grows_and_an_exhausted_one_takes_no_step(target, traces, tmp_path, capsys):
    recipe = make(target, traces, 0.0)
    interval(recipe, 0)
    first = list(recipe.last)
    interval(recipe, 1)
    log = write_jsonl(tmp_path / "log.jsonl", logged(first, finish_reason="stop"))
    follower = make(target, traces, log=str(log), max_steps=4)
    assert interval(follower, 0) is not None
    assert interval(follower, 1) is None
    with log.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in logged(recipe.last))
    state = follower.state_dict()
    again = make(target, traces, log=str(log), max_steps=4)
    again.load_state_dict(state)
    for one in (follower, again):
        batch = interval(one, 2)
        assert batch.prompts == [row.prompt_ids for row in recipe.last if any(row.weights)]
        assert interval(one, 3) is None
        assert one.requests == 8
    assert "0 of 8 lines skipped" in capsys.readouterr().out


def test_text_that_another_model_wrote_is_left_out_and_counted(target, traces, tmp_path):
    recipe = make(target, traces, 0.0)
    interval(recipe, 0, 12)
    rows = logged(recipe.last)
    rows[4]["response_ids"] = prompts_of([10], seed=4)[0]
    log = write_jsonl(tmp_path / "log.jsonl", rows)
    follower = make(target, traces, log=str(log))
    interval(follower, 0, 12)
    assert len(follower.last) == 11
    assert follower.stream.log.summary().endswith(
        "1 of 12 lines skipped (not this target's 1, first line 5: not written by this target "
        "under its sampling)"
    )


@pytest.mark.slow
def test_sampled_text_of_another_model_is_told_by_what_it_costs():
    """The target's own text passes, of whatever length; random text does not."""
    generator = torch.Generator().manual_seed(0)
    p = 4 * torch.randn(4000, 50, generator=generator)
    drawn = torch.multinomial(p.softmax(-1), 1, generator=generator)[:, 0]
    other = torch.randint(50, (4000,), generator=generator)
    for size in (1, 3, 20, 200):
        found = []
        for text in (drawn, other):
            rows = [
                Served(0, [5], text[i : i + size].tolist(), SAMPLED, "", 0, 0)
                for i in range(0, 4000, size)
            ]
            foreign = [
                expected_rounds(r, p[i * size : (i + 1) * size], p[i * size : (i + 1) * size], 3)
                for i, r in enumerate(rows)
            ]
            found.append(sum(one.foreign for one in foreign) / len(rows))
        assert found[0] < 0.02
        assert found[1] > (0.95 if size >= 20 else 0.3)


def test_a_short_log_with_too_much_of_it_stops_when_it_is_over(target, traces, tmp_path):
    recipe = make(target, traces, 0.0)
    interval(recipe, 0)
    rows = logged(recipe.last)
    rows[0]["response_ids"] = prompts_of([10], seed=4)[0]
    log = write_jsonl(tmp_path / "log.jsonl", rows)
    follower = make(target, traces, log=str(log))
    with pytest.raises(UserError, match=r"1 of 4 lines cannot be used"):
        interval(follower, 0, 12)


def test_a_log_is_waited_for_once(target, traces, tmp_path, monkeypatch):
    recipe = make(target, traces, 0.0)
    interval(recipe, 0)
    log = write_jsonl(tmp_path / "log.jsonl", logged(recipe.last))
    follower, waits = make(target, traces, log=str(log), log_wait_s=50.0), []
    read = RequestLog.read
    monkeypatch.setattr(
        RequestLog, "read",
        lambda log, count, wait_s, stopped: waits.append(wait_s) or read(log, count),
    )  # fmt: skip
    assert interval(follower, 0) is not None
    assert interval(follower, 1) is None
    assert interval(follower, 2) is None
    assert waits == [20.0, 20.0, 20.0, 10.0, 0.0]  # processes meet every 20 s
    monkeypatch.undo()
    monkeypatch.setattr(stream, "stop_requested", lambda: True)
    stopped = make(target, traces, log=str(log), log_wait_s=50.0)
    interval(stopped, 0, 8)
    assert not stopped.stream.over


def test_text_rows_are_tokenised_again_and_counted(target, traces, tmp_path):
    recipe = make(target, traces, 0.0)
    interval(recipe, 0)
    rows = logged(recipe.last)
    text = target.tokenizer.decode
    rows[0] |= {"prompt": text(rows[0].pop("prompt_ids"))}
    rows[0] |= {"response": text(rows[0].pop("response_ids"), skip_special_tokens=True)}
    log = write_jsonl(tmp_path / "log.jsonl", rows)
    follower = make(target, traces, log=str(log))
    interval(follower, 0)
    assert follower.last[0].response_ids[:8] == recipe.last[0].response_ids[:8]
    assert follower.evaluated(None)(None, 1)["retokenised_share"] == 0.25


# --- the bank ---------------------------------------------------------------------------------


def test_each_prompt_is_drafted_and_learnt_by_the_drafter_of_its_domain(target, traces):
    recipe = make(target, traces, 1.0, bank=True)
    bank = recipe.drafter
    assert isinstance(bank, DrafterBank)
    assert bank.router.names == ["names", "sums"]
    batch = interval(recipe, 0)
    assert [bank.router.names[row.member] for row in recipe.last] == ["sums", "names"] * 2
    count = [int(supervised(batch.loss_mask)[batch.members == m].sum()) for m in (0, 1)]
    assert ordered(recipe.denominators(batch, 0)) == count


def test_a_drafter_without_requests_does_not_move(target, traces):
    """Nor does the momentum of its earlier steps move it."""
    recipe = make(target, traces, 1.0, bank=True)
    optimizer = torch.optim.AdamW(recipe.drafter.parameters(), 1e-2)
    update(recipe, interval(recipe, 0), optimizer)
    recipe.stream.traces = [t for t in recipe.stream.traces if t.domain == "sums"]
    before = copy.deepcopy(recipe.drafter.state_dict())
    update(recipe, interval(recipe, 1), optimizer)
    moved = {n for n, p in recipe.drafter.state_dict().items() if not torch.equal(p, before[n])}
    assert {name.split(".")[1] for name in moved} == {"1"}


def test_the_bank_takes_one_process(target, monkeypatch):
    class Two:
        num_processes, process_index, is_main_process = 2, 0, True

    monkeypatch.setattr(osd, "PartialState", Two)
    with pytest.raises(UserError, match=r"method\.bank=true trains in one process, got 2"):
        Recipe(Config(bank=True), target)
    Recipe(Config(), target)


# --- a whole run ------------------------------------------------------------------------------

SETTINGS = ("recipe=osd", "trainer.max_steps=6", "trainer.lr=3e-3", "trainer.log_every=1",
            "trainer.save_every=2", "trainer.eval_every=3", "trainer.keep_checkpoints=9",
            "eval.temperatures=1", "method.replay_share=0.3", "method.publish_every=2")  # fmt: skip
TIMINGS = ("tokens_per_s", "serve_s_per_request", "update_s_per_request")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("osd")
    assert train.main(command(folder, tiny_folder("llama"), *SETTINGS)) == 0
    return folder


def numbers(run):
    rows = read_jsonl(run / "metrics.jsonl")
    for row in rows:
        for name in TIMINGS:
            row.pop(name, None)
            row.get("eval", {}).pop(name, None)
    return rows


def test_the_report_shows_acceptance_over_requests_beside_both_references(finished):
    report = json.loads((finished / "run" / "report.json").read_text())
    series = [row for row in report["series"] if row["name"] == "online"]
    assert [(row["step"], row["request"]) for row in series] == [(0, 0), (3, 12), (6, 24)]
    for row in series[1:]:
        for key in ("alpha_prequential", "alpha_static", "alpha_offline", "alpha"):
            assert 0 < row[key] < 1
    names = {row["drafter"] for row in report["results"]}
    assert names >= {"before", "offline", "after"}
    compared = {(row["a"], row["b"]) for row in report["comparisons"]}
    assert compared >= {("after", "before"), ("after", "offline")}
    assert report["drafter"]["stages"]["online"]["best_step"] is None
    about = json.loads((finished / "run/published/latest.json").read_text())
    assert (about["version"], about["requests"]) == (6, 24)  # what serves last is there too
    last = finished / "run/published" / about["folder"] / "model.safetensors"
    assert last.read_bytes() == (finished / "run/drafter/model.safetensors").read_bytes()


@pytest.mark.usefixtures("unreported")
@pytest.mark.parametrize(
    "step", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_killed_and_restarted_it_goes_on_from_where_it_was(step, finished, tiny_folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    stage = run / "stages" / "1-online"
    (stage / "finished.json").unlink()
    (run / "report.json").unlink()
    shutil.rmtree(run / "drafter")
    for found in (stage / "checkpoints").glob("step-*"):
        if int(found.name[5:]) > step:
            shutil.rmtree(found)
    words = command(finished, tiny_folder("llama"), *SETTINGS, f"run.dir={run}")
    assert train.main(words) == 0
    assert numbers(run) == numbers(finished / "run")
    for name in ("drafter", "published/version-000004"):
        written = (run / name / "model.safetensors").read_bytes()
        assert written == (finished / "run" / name / "model.safetensors").read_bytes()


def test_the_served_drafter_is_the_last_one(finished, tiny_target):
    from safetensors.torch import load_file

    run, target = finished / "run", tiny_target("llama")
    last = load_file(run / "stages/1-online/checkpoints/step-000006/drafter.safetensors")
    after = load_drafter(str(run / "drafter"), target).state_dict()
    assert all(torch.equal(after[name], value) for name, value in last.items())


@pytest.mark.slow
def test_a_bank_trains_reports_and_is_measured_again(tiny_folder, tmp_path):
    from scripts import evaluate

    rows = [{"prompt": f"{d} {i}: ", "domain": d} for i in range(6) for d in ("add", "who")]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", rows)
    words = command(
        tmp_path, tiny_folder("llama"), "recipe=osd", f"data.prompts={prompts}",
        "data.num_prompts=12", "method.bank=true", "method.offline=false", "eval.temperatures=0",
    )  # fmt: skip
    assert train.main(words) == 0
    run = tmp_path / "run"
    report = json.loads((run / "report.json").read_text())
    decoded, replayed = (
        next(r for r in report["results"] if r["drafter"] == "after" and r["measured_by"] == how)
        for how in ("decoding", "offline")
    )
    assert decoded["identical_to_plain"] == 1
    assert replayed["replay_differs_from_decoding"] == 0
    assert report["drafter"]["kind"] == "bank"
    out = tmp_path / "again"
    assert evaluate.main([f"eval.drafter={run / 'drafter'}", f"script.out={out}"]) == 0
    again = json.loads((out / "report.json").read_text())["results"]
    (row,) = [r for r in again if "drafter" in r["drafter"] and r["measured_by"] == "offline"]
    assert row["tokens_per_round"] == pytest.approx(replayed["tokens_per_round"])


@pytest.mark.slow
def test_two_processes_serve_one_stream(tiny_folder, tmp_path):
    """Each serves its own requests; buffer, counts and weights are the same on both."""
    words = command(tmp_path, tiny_folder("llama"), *SETTINGS, "trainer.batch_size=2")
    code, _, err = finish(start(*TWO, "train.py", *words))
    assert code == 0, err
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    series = [row for row in report["series"] if row["name"] == "online"]
    assert [row["request"] for row in series] == [0, 12, 24]
    single = command(tmp_path, tiny_folder("llama"), *SETTINGS, f"run.dir={tmp_path / 'one'}")
    assert train.main(single) == 0
    other = json.loads((tmp_path / "one" / "report.json").read_text())["series"]
    first = next(r for r in other if r["name"] == "online" and r["step"] == 3)
    assert series[1]["alpha_static"] == pytest.approx(first["alpha_static"], rel=0.05)


def logged_traffic(finished, folder):
    """The stored answers of the finished run as a log."""
    traces = [t for store in training_stores(finished / "cache") for t in stored_traces(store)]
    rows = [
        {"prompt_ids": t.prompt_ids, "response_ids": t.response_ids, "temperature": t.temperature}
        for t in traces
    ]
    return write_jsonl(folder / "log.jsonl", rows * 3)


@pytest.mark.slow
def test_a_run_follows_a_log_and_goes_on_in_it_after_a_kill(finished, tiny_folder, tmp_path):
    log, run = logged_traffic(finished, tmp_path), tmp_path / "run"
    (held_out, *_), *_ = map(stored_traces, report_stores(finished / "cache"))
    row = {"prompt_ids": held_out.prompt_ids, "response_ids": held_out.response_ids}
    write_jsonl(log, [row | {"temperature": held_out.temperature}, *read_jsonl(log)])
    words = command(finished, tiny_folder("llama"), *SETTINGS, f"run.dir={run}",
                    f"method.log={log}", "method.offline=false")  # fmt: skip
    assert train.main(words) == 0
    report = json.loads((run / "report.json").read_text())
    series = [row for row in report["series"] if row["name"] == "online"]
    assert [row["request"] for row in series] == [0, 12, 24]
    assert [row.get("log_lines_skipped") for row in series] == [0, 1, 1]
    whole = numbers(run)
    (run / "report.json").unlink()
    shutil.rmtree(run / "drafter")
    (run / "stages/0-online/finished.json").unlink()
    for found in (run / "stages/0-online/checkpoints").glob("step-*"):
        if int(found.name[5:]) > 2:
            shutil.rmtree(found)
    assert train.main(words) == 0
    assert numbers(run) == whole


@pytest.mark.slow
def test_two_processes_follow_one_log(finished, tiny_folder, tmp_path):
    """One reads for both; a response of another model is counted once."""
    log = logged_traffic(finished, tmp_path)
    rows = log.read_text().splitlines()
    rows[5] = json.dumps({**json.loads(rows[5]), "response_ids": prompts_of([10], seed=4)[0],
                          "temperature": 0.0})  # fmt: skip
    log.write_text("\n".join(rows) + "\n")
    given = (*SETTINGS, f"method.log={log}", "method.offline=false", "method.replay_share=0")
    for name, size in (("one", 4), ("two", 2)):
        words = command(finished, tiny_folder("llama"), *given, f"run.dir={tmp_path / name}",
                        f"trainer.batch_size={size}")  # fmt: skip
        code, out, err = finish(start(*(TWO if size == 2 else ()), "train.py", *words))
        assert code == 0, err
        assert "1 of 24 lines skipped (not this target's 1, first line 6: " in out
    one, two = (
        [row for row in read_jsonl(tmp_path / name / "metrics.jsonl") if "loss" in row]
        for name in ("one", "two")
    )
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


def test_a_log_without_a_request_is_refused(target, tmp_path):
    log = tmp_path / "log.jsonl"
    log.touch()
    with pytest.raises(UserError, match=r"method\.log=.* holds no request yet"):
        Recipe(Config(log=str(log)), target)
    Recipe(Config(log=str(log), log_wait_s=1.0), target)


def test_versions_are_not_published_from_shares(target, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_FSDP2", "true")
    with pytest.raises(UserError, match=r"method\.publish_every .* FSDP2"):
        Recipe(Config(publish_every=2), target)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("trainer.batch_size=0", "trainer.batch_size must lie in 1.."),
        ("trainer.lr=-1e-4", "trainer.lr must be > 0"),
        ("method.K=0", "method.K must be >= 1, got 0"),
        ("method.positions=errors", "method.positions must be one of rejected, published_code"),
        ("method.offline_lr=0", "method.offline_lr must be > 0"),
        ("method.reduction=mean", "method.reduction must be one of token, sequence"),
        ("method.replay_share=1", "method.replay_share must lie in [0, 1)"),
        ("method.publish_every=-1", "method.publish_every must be >= 0"),
        ("method.log_wait_s=-1", "method.log_wait_s must be >= 0"),
        ("method.log_wait_s=9", "method.log_wait_s=9.0 changes nothing here: leave it out, or set"),
        ("method.log=missing.jsonl", "method.log=missing.jsonl does not exist"),
        ("method.log=log.jsonl.gz", "method.log must be a file that is not compressed: unpack it"),
        ("method.divergence=kl", "method.divergence must be one of fkl["),
        ("run.stage=align", "run.stage must be one of offline, online"),
    ],
)
def test_bad_settings_end_in_one_line(word, says, tiny_folder, tmp_path, capsys):
    assert train.main(command(tmp_path, tiny_folder("llama"), "recipe=osd", word)) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error")]
    assert says in line
    assert not (tmp_path / "run").exists()


def test_a_log_of_rubbish_is_refused_before_anything_is_generated(tiny_folder, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    log.write_text("nothing\n" * 3)
    words = command(tmp_path, tiny_folder("llama"), "recipe=osd", f"method.log={log}")
    assert train.main(words) == 2
    err = capsys.readouterr().err
    assert "3 of 3 lines cannot be used" in err
    assert "not JSON 3, first line 1: not JSON" in err
    assert not (tmp_path / "cache").exists()


def test_settings_that_do_not_go_together(target, traces, tiny_folder, tmp_path, capsys):
    with pytest.raises(UserError, match="needs the rounds of serving"):
        Config(log="x.jsonl", positions="published_code")
    one_domain = [t for t in traces if t.domain == "sums"]
    with pytest.raises(UserError, match=r"method\.bank=true needs prompts of several domains"):
        make(target, one_domain, bank=True)
    words = command(tmp_path, tiny_folder("llama"), "recipe=osd", "method.bank=true",
                    "eval.engine=vllm")  # fmt: skip
    assert train.main(words) == 2
    assert "eval.engine=vllm" in capsys.readouterr().err


def test_a_prompt_too_long_for_the_drafter_is_refused(target, traces):
    drafter = drafter_of(target)
    drafter.model.config.max_position_embeddings = 30
    with pytest.raises(UserError, match=r"ContextError: a prompt of .* drafter's context of 30"):
        make(target, traces, drafter=drafter)


def test_what_is_not_finite_stops_the_run_and_the_last_checkpoint_stays(
    finished, tiny_folder, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    plain = osd.chunked_divergence

    def broken(*args, **options):
        value = plain(*args, **options)
        value.total = value.total * (float("nan") if len(calls) == 5 else 1.0)
        calls.append(1)
        return value

    calls: list[int] = []
    monkeypatch.setattr(osd, "chunked_divergence", broken)
    words = command(finished, tiny_folder("llama"), *SETTINGS, "method.offline=false",
                    f"run.dir={run}")  # fmt: skip
    assert train.main(words) == 3
    kept = sorted(p.name for p in (run / "stages/0-online/checkpoints").glob("step-*"))
    assert kept == ["step-000002", "step-000004"]
    assert json.loads((run / "published/latest.json").read_text())["version"] == 4
