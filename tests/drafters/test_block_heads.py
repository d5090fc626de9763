"""Corrections and confidence of block drafters: what is drafted along a path is what is trained."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafters.block import BlockDrafter, drafter_type
from drafters.block_settings import BlockSettings
from drafters.export import gguf, speculators
from drafters.export.vllm import check_dflash, check_dspark
from drafters.kinds import first_writer
from drafters.layers import layer_config
from drafters.round import Budget
from drafters.text import Text
from drafters.trees.dynamic import DynamicTree
from drafters.trees.tree import WITHOUT_REPLACEMENT
from drafters.widen import widen
from eval.config import EvalConfig
from eval.costs import read_per_round
from eval.policies.base import Recorder
from eval.policies.table import budget_for
from phases.check import check_drafter, check_engine
from target.outputs import TargetOutputs
from target.sampling import Sampling, warp
from tests.eval.test_offline import NOT_UNDER_A_STOP_RULE, decoded, numbers, offline, traces_of
from tests.helpers.heads import (
    BUSHY,
    GREEDY,
    assert_branches_follow_the_unroll,
    assert_causal,
    assert_gradients_reach_everything,
    assert_greedy_text_is_the_targets,
    assert_rounds_follow_the_unroll,
    assert_starts_before_the_text_are_zero,
    assert_stored_whole,
    assert_target_is_not_part_of,
    close,
    fitted,
    outputs_of,
    prefilled,
    randomised,
    state_of,
)
from tests.helpers.tiny import PAD, VOCAB_SIZE, prompts_of
from trainer.errors import UserError
from trainer.hidden import hidden_layers

K, RANK, WIDTH = 4, 6, 7


def settings(size=K + 1, **options):
    return BlockSettings([0, 1], PAD, size, correction_rank=RANK, correction_width=WIDTH, **options)


KINDS = {
    "markov": settings(K, correction="markov", from_anchor=True, confidence=True),
    "gated": settings(correction="gated", causal=True),
    "gru": settings(correction="gru", confidence=True),
    "gru, causal, from anchor": settings(K, correction="gru", causal=True, from_anchor=True),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def made(target, kind, layers=1, **changed) -> BlockDrafter:
    torch.manual_seed(0)
    config = layer_config(target.model.config)
    config.num_hidden_layers = layers
    settings = dataclasses.replace(KINDS[kind], **changed)
    return drafter_type(settings.correction)(settings, config, target)


@pytest.fixture
def target(tiny_target):
    return tiny_target("llama")


# --- what is drafted is what is trained ----------------------------------------------------------


@EACH
def test_rounds_and_branches_follow_the_unroll(kind, target):
    drafter = randomised(made(target, kind))
    assert_rounds_follow_the_unroll(drafter, target, K)
    assert_branches_follow_the_unroll(drafter, target)


@EACH
def test_no_slot_knows_its_own_token_or_a_later_state(kind, target):
    drafter = randomised(made(target, kind))
    assert_causal(drafter, target, K)
    assert_starts_before_the_text_are_zero(drafter, target, K)


@torch.no_grad()
@EACH
def test_logits_are_the_blocks_and_the_correction_by_the_tokens_before(kind, target):
    """Slot by slot, the GRU as its definition has it, in float64."""
    drafter = randomised(made(target, kind), 0.5)
    plain = made(target, kind, correction="none", confidence=False)
    plain.load_state_dict(drafter.state_dict(), strict=False)
    ids = torch.tensor(prompts_of([12]))
    outputs, column = outputs_of(drafter, target, ids), 5
    weights = {n: t.double() for n, t in drafter.correction.state_dict().items()}
    table = target.embedding.weight.double()
    state = torch.zeros(WIDTH, dtype=torch.float64)
    slots = list(plain.eval().states(Text(ids), outputs, K))
    for depth in range(1, K + 1):
        before = int(ids[0, column + depth])  # of the slot, which predicts the next one
        h = slots[depth - 1][0, column + depth].double()
        if "lookup.weight" in weights:
            z = weights["lookup.weight"][before]
            if kind == "gated":
                gate = weights["gate.weight"] @ torch.cat([h, z]) + weights["gate.bias"]
                z = gate.sigmoid() * z
        else:
            x = weights["gru.weight_ih_l0"] @ table[before] + weights["gru.bias_ih_l0"]
            y = weights["gru.weight_hh_l0"] @ state + weights["gru.bias_hh_l0"]
            (r, u, new), (r_h, u_h, new_h) = x.chunk(3), y.chunk(3)
            r, u = (r + r_h).sigmoid(), (u + u_h).sigmoid()
            state = (1 - u) * (new + r * new_h).tanh() + u * state
            z = weights["mix.weight"] @ torch.cat([h, state]) + weights["mix.bias"]
            z = torch.nn.functional.silu(z) * (depth > 1)
        expected = target.head.weight.double()[:VOCAB_SIZE] @ h + weights["out.weight"] @ z
        found = drafter.draft_logits(ids, outputs, depth)[0, column + depth]
        close(found.double(), expected, 1e-5)


@torch.no_grad()
@EACH
def test_a_fresh_correction_changes_nothing_and_a_fresh_confidence_is_a_half(kind, target):
    drafter = made(target, kind)
    plain = made(target, kind, correction="none", confidence=False)
    plain.load_state_dict(drafter.state_dict(), strict=False)
    ids = torch.tensor(prompts_of([12]))
    outputs = outputs_of(drafter, target, ids)
    for depth in range(1, K + 1):
        assert torch.equal(
            drafter.draft_logits(ids, outputs, depth), plain.draft_logits(ids, outputs, depth)
        )
    if drafter.confidence is not None:
        *_, last = drafter.states(Text(ids), outputs, K)
        assert drafter.confidence(last, K).eq(0.5).all()


@torch.inference_mode()
@EACH
@pytest.mark.parametrize("shape", [None, dataclasses.replace(BUSHY, siblings=WITHOUT_REPLACEMENT)])
def test_tokens_are_drawn_from_the_distribution_of_their_own_path(kind, shape, target):
    """And a verifier is given that one."""
    drafter, sampling = randomised(made(target, kind)), Sampling(0.8)
    (text,) = prompts_of([13])
    ids = torch.tensor([text])
    outputs = outputs_of(drafter, target, ids)
    prefilled(drafter, target, [text], [12])
    budget = Budget(K) if shape is None else Budget.of(shape)
    tree = drafter.propose(state_of(ids, [13], outputs, sampling=sampling), budget)
    assert tree.draft_forwards == 1
    for node in range(tree.tokens.shape[1]):
        path, parent = [], int(tree.parents[0, node])
        while parent >= 0:
            path.insert(0, int(tree.tokens[0, parent]))
            parent = int(tree.parents[0, parent])
        law = drafter.draft_logits(torch.tensor([text + path]), outputs_for(outputs, path),
                                   len(path) + 1)  # fmt: skip
        close(tree.probs[0, node], warp(law[0, -1], sampling))


def outputs_for(outputs, path):
    """Without states of the path, which the target has not read."""
    pad = (0, 0, 0, len(path))
    return TargetOutputs({k: torch.nn.functional.pad(v, pad) for k, v in outputs.hidden.items()})


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=pytest.mark.slow) if one != "gru" else one for one in KINDS],
)
def test_greedy_decoding_gives_the_targets_text(kind, target):
    drafter = fitted(made(target, kind), target, K, steps=60, learning_rate=0.01)
    accepted = assert_greedy_text_is_the_targets(drafter, target, Budget(3), batch_sizes=(3,))
    assert {0, 1} < set(accepted), "the slots must be right and wrong"
    for shape in (BUSHY, DynamicTree(12, 3, 4)):
        budget = Budget(3, tree=shape)
        with_tree = assert_greedy_text_is_the_targets(drafter, target, budget, batch_sizes=(3,))
        assert sum(with_tree) / len(with_tree) > sum(accepted) / len(accepted)


# --- confidence ----------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["markov", "gru"])
def test_a_round_sees_the_confidence_of_the_slot_that_drafted_each_token(kind, target):
    """Along the drafted path, at the temperature of the slot's position."""
    drafter = randomised(made(target, kind))
    drafter.confidence.temperatures.copy_(torch.tensor([0.5, 1.0, 2.0, 3.0]))
    (text,) = prompts_of([13])
    outputs = outputs_of(drafter, target, torch.tensor([text]))
    prefilled(drafter, target, [text], [12])
    recorder = Recorder(uses_head=True)
    state = state_of(torch.tensor([text]), [13], outputs)
    tree = drafter.propose(state, Budget(K, recorder))
    whole = torch.tensor([text + tree.tokens[0].tolist()])
    drafts = list(drafter.states(Text(whole), outputs_for(outputs, range(K)), K))
    for depth, signals in enumerate(recorder.seen[1:], start=1):
        states = drafts[depth - 1][0, 11 + depth]
        logit = drafter.confidence.out.weight[0] @ states + drafter.confidence.out.bias[0]
        expected = (logit / [0.5, 1.0, 2.0, 3.0][depth - 1]).sigmoid()
        close(signals.score[0], expected)
        at = torch.tensor([[11 + depth]])
        close(drafter.judged(drafts, depth, torch.tensor([[0]]), at)[0, 0], expected)
    assert recorder.seen[0].score is None


@pytest.mark.parametrize("policy", ["fixed", "head:0.7"])
def test_replay_is_decoding_under_a_stop_rule_too(policy, target):
    drafter = fitted(made(target, "markov"), target, K, steps=30, learning_rate=0.01)
    with torch.no_grad():
        drafter.confidence.out.weight.normal_(generator=torch.Generator().manual_seed(0))
    traces = traces_of(target, prompts_of([3, 9, 14]), GREEDY, max_new_tokens=16, lookahead=K)
    budget = budget_for(drafter, policy, K)
    expected = offline(target, traces, drafter, GREEDY, budget)
    real, texts = decoded(target, traces, drafter, GREEDY, budget, max_new_tokens=16)
    assert {t.prompt_hash: t.response_ids for t in traces} == texts
    drafted = [float(one.submitted / one.rounds) for one in real.values()]
    assert all(n <= K for n in drafted)
    assert policy == "fixed" or min(drafted) < K - 1  # the rule did stop
    for tag, counters in real.items():
        ours, theirs = (numbers(one, NOT_UNDER_A_STOP_RULE) for one in (expected[tag], counters))
        assert ours == theirs


def test_the_confidence_ends_chains_and_drafters_without_one_are_refused(target):
    drafter, other = made(target, "markov"), made(target, "gated")
    assert budget_for(drafter, "head:0.3", K).stop.threshold == 0.3
    assert budget_for(other, "head:0.3", K) == Budget(K)
    config = EvalConfig(policy="head:0.3", K=K, tree=[])
    check_drafter(drafter, target, config)
    with pytest.raises(UserError, match="needs a drafter with an acceptance head"):
        check_drafter(other, target, config)


def test_a_confidence_trains_with_its_drafter(target):
    """Other than an acceptance head, under which a drafter is frozen."""
    drafter = made(target, "markov").train()
    assert all(module.training for module in drafter.modules())


# --- parameters, storage, errors ------------------------------------------------------------------


@EACH
def test_only_its_own_weights_are_trained(kind, target):
    drafter = randomised(made(target, kind), 0.1)
    assert_target_is_not_part_of(drafter, target)
    assert_gradients_reach_everything(
        drafter, target, K, but=("confidence.out.weight", "confidence.out.bias")
    )


@EACH
def test_a_stored_drafter_loads_as_it_was(kind, target, tmp_path):
    drafter = randomised(made(target, kind))
    if drafter.confidence is not None:
        drafter.confidence.temperatures.mul_(1.5)
    assert_stored_whole(drafter, target, tmp_path)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_round_reads_the_block_once_and_the_correction_for_every_token(depth, target):
    """The rows of the tokens before are looked up."""
    drafter = made(target, "markov")
    plain = read_per_round(made(target, "markov", correction="none"), depth)[1]
    assert read_per_round(drafter, depth)[1] == plain + depth * VOCAB_SIZE * RANK
    gate = RANK * (target.hidden_size + RANK + 1)
    gated = made(target, "markov", correction="gated")
    assert read_per_round(gated, depth)[1] == plain + depth * (VOCAB_SIZE * RANK + gate)
    assert drafter.judging_parameters()[0].numel() == target.hidden_size + RANK


def test_a_correction_that_engines_do_not_have_is_refused_by_name(tiny_target):
    """A GRU by all of them, a gate by all but SGLang, where a run writes it."""
    target = tiny_target("llama", layers=4)
    markov, gated, gru = (made(target, "markov", correction=c) for c in ("markov", "gated", "gru"))
    with pytest.raises(UserError, match=r"no engine has .* with method\.correction=gru"):
        check_dflash(gru)
    for check in (check_dspark, speculators.check_dspark, gguf.check_dspark):
        check(markov)
        with pytest.raises(UserError, match=r"this drafter has gated; use script\.engine=sglang"):
            check(gated)
    assert first_writer(gated, of_gguf=True)[0] == "sglang"
    assert [first_writer(markov, of_gguf)[0] for of_gguf in (False, True)] == ["vllm", "llamacpp"]


def test_vllm_serves_a_correction_on_a_gpu_alone(tiny_target, monkeypatch):
    """A server elsewhere may have one."""
    drafter = made(tiny_target("llama", layers=4), "markov")
    config = EvalConfig(K=K, engine="vllm")
    monkeypatch.setattr("phases.check.engine_python", lambda: None)
    monkeypatch.setattr("phases.check.check_server", lambda *given: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="runs DSpark on a GPU only, and there is none here"):
        check_engine(drafter, config)
    elsewhere = dataclasses.replace(config, engine="http://elsewhere:8000")
    check_engine(drafter, elsewhere)
    gru = made(tiny_target("llama", layers=4), "markov", correction="gru")
    with pytest.raises(UserError, match=r"8000: no engine has block drafters with .*=gru"):
        check_engine(gru, elsewhere)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_engine(drafter, config)


def test_a_drafter_with_a_correction_keeps_its_vocabulary(target):
    with pytest.raises(UserError, match=r"leave method\.draft_vocab_size out"):
        widen(made(target, "markov"), None, target)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"correction": "bigram"}, r"method\.correction must be one of none, markov, gated, gru"),
        ({"correction_rank": 0}, r"method\.correction_rank must be >= 1"),
        ({"correction_width": 0}, r"method\.correction_width must be >= 1"),
    ],
)
def test_bad_settings_are_refused(options, says, target):
    with pytest.raises(UserError, match=says):
        made(target, "gru", **options)


def test_the_matrix_that_makes_logits_is_no_hidden_layer(target):
    """Which LoRA adapts and Muon updates."""
    names = [name for name, _ in hidden_layers(made(target, "gated"))]
    assert "correction.gate" in names
    assert "correction.out" not in names


def test_settings_that_a_correction_does_not_have_are_no_part_of_its_network(target):
    def own(correction):
        names = made(target, "gru", correction=correction).network().keys()
        return [name for name in ("correction_rank", "correction_width") if name in names]

    assert own("gru") == ["correction_rank", "correction_width"]
    assert own("markov") == own("gated") == ["correction_rank"]
    assert own("none") == []
