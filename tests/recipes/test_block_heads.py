"""The recipes of block drafters with corrections: terms, schedules, calibration, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from drafters.text import Text
from eval.calibration import best_temperature, calibration_error
from recipes import domino, dspark
from tests.helpers.objectives import trained
from tests.helpers.tiny import VOCAB_SIZE
from tests.recipes.test_block import texts_of
from tests.recipes.test_heads import batch_of, loss_of, outputs_of
from tests.recipes.test_heads import make as make_head
from tests.recipes.test_heads import recipe_of as head_recipe
from trainer.errors import UserError

SMALL = {"draft_layers": 1, "anchors": 0, "correction_rank": 8, "correction_width": 8}
SIZES = {"dspark": 4, "domino": 5, "dflash": 5}
DEPTH = 4


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    return texts_of(target, tmp_path_factory.mktemp("traces"))


def options_of(name, options):
    return {"block_size": SIZES[name]} | SMALL | options


def make(name, target, traces, **options):
    return make_head(name, target, traces, **options_of(name, options))


def recipe_of(name, target, given=None, **options):
    return head_recipe(name, target, given, **options_of(name, options))


def by_depth(own, batch, outputs):
    """Of each depth: draft logits with and without the correction [N, V], the target's, the tokens
    [N], and the states [N, d + r] that the output head reads."""
    theirs = own.target.outputs(batch.input_ids).logits
    unrolled = own.drafter.states(Text(batch.input_ids), outputs, DEPTH)
    for depth, states in enumerate(unrolled, start=1):
        at = batch.supervised(depth).nonzero(as_tuple=True)
        head = own.drafter.output_head(depth)
        plain = own.target.head.logits(states[at][:, : head.weight.shape[1]])
        labels = batch.input_ids[:, 1:][at]
        yield head.logits(states[at]), plain, theirs[at][:, :VOCAB_SIZE], labels, states[at]


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


# --- DSpark ---------------------------------------------------------------------------------------


def test_dspark_learns_acceptance_tokens_and_its_own_confidence(target, traces):
    own, batch = make("dspark", target, traces), batch_of(traces)
    outputs = outputs_of(own, batch)
    terms = own.loss(batch, outputs, 0).terms
    assert terms.keys() == own.denominators(batch, 0).keys()
    assert len(terms) == 3 * DEPTH
    for depth, (draft, _, theirs, labels, states) in enumerate(
        by_depth(own, batch, outputs), start=1
    ):
        p, q = theirs.softmax(-1), draft.softmax(-1)
        l1 = (p - q).abs().sum(-1)
        logit = states @ own.drafter.confidence.out.weight[0] + own.drafter.confidence.out.bias
        accept = (1 - l1 / 2).detach()
        bce = -(accept * F.logsigmoid(logit) + (1 - accept) * F.logsigmoid(-logit))
        expected = {
            "divergence": 0.9 * l1,
            "label": 0.1 * F.cross_entropy(draft, labels, reduction="none"),
            "confidence": bce,
        }
        for name, values in expected.items():
            term = terms[f"depth_{depth}_{name}"]
            close(term.weight * term.total, own.config.depth_decay ** (depth - 1) * values.sum())
            assert float(term.count) == len(labels)
    assert own.config.depth_decay == pytest.approx(math.exp(-1 / 4), abs=2e-3)


def test_the_label_of_the_confidence_has_no_gradient(target, traces):
    """Else a drafter would learn to be rejected where it is not sure."""
    own, batch = make("dspark", target, traces, label_weight=0.0), batch_of(traces)
    outputs = outputs_of(own, batch)
    terms = own.loss(batch, outputs, 0).terms
    terms["depth_2_confidence"].total.backward()
    assert own.drafter.correction.out.weight.grad is None
    assert own.drafter.confidence.out.weight.grad.any()
    assert own.drafter.fc.weight.grad.any()  # of the state that it reads


@pytest.mark.parametrize("name", ["dspark", "domino"])
def test_logits_live_for_a_few_positions_at_a_time(name, target, traces, monkeypatch):
    """Corrected ones too, in both passes."""
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", 3 * VOCAB_SIZE)
    monkeypatch.setattr("recipes.common.target_logits.HOLD_BYTES", 10)
    own, batch = make(name, target, traces), batch_of(traces)
    outputs, rows = outputs_of(own, batch), []

    class Rows(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = [out] if isinstance(out, torch.Tensor) else []
            rows.extend(len(x) for x in made if x.ndim > 1 and x.shape[-1] == VOCAB_SIZE
                        and func is not torch.ops.aten.t.default)  # fmt: skip
            return out

    with Rows():
        terms = own.loss(batch, outputs, 0).terms.values()
        sum(term.weight * term.total for term in terms).backward()
    assert max(rows) == 3 < min(own.denominators(batch, 0).values())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dspark", {"label_weight": 0.5}),
        ("dspark", {"label_weight": 0.0}),
        ("dspark", {"confidence_weight": 0.0}),
        ("dspark", {"confidence_weight": 0.5}),
        ("dspark", {"correction": "gated"}),
        ("dspark", {"correction_rank": 4}),
        ("domino", {"correction_width": 4}),
        ("domino", {"base_share": 0.5}),
        ("domino", {"correction": "markov"}),
        ("dflash", {"correction": "gru"}),
        ("dflash", {"correction": "markov", "feature_weight": 1.0}),
    ],
)
def test_every_option_changes_the_loss(name, change, target, traces):
    batch = batch_of(traces)
    losses = [loss_of(make(name, target, traces, **o), batch).item() for o in ({}, change)]
    assert abs(losses[0] - losses[1]) > 1e-4


def test_without_a_weight_there_is_no_confidence(target, traces):
    own = make("dspark", target, traces, confidence_weight=0.0)
    assert own.drafter.confidence is None
    assert not any("confidence" in name for name in own.denominators(batch_of(traces), 0))


def test_the_confidence_gets_a_temperature_for_each_position(target, traces):
    own = make("dspark", target, traces)
    confidence = own.drafter.confidence
    with torch.no_grad():  # far too sure
        confidence.out.weight.normal_(std=3.0, generator=torch.Generator().manual_seed(0))
    recipe = own.recipe
    pairs = recipe._judged(own.drafter.eval(), traces)
    assert recipe.about() == {}
    recipe.calibrate(own.drafter, traces)
    errors = recipe.about()["confidence"]
    assert bool((confidence.temperatures > 1).all())
    for depth, (logits, accept) in enumerate(pairs):
        assert len(logits) == sum(max(0, len(t.response_ids) - 1 - depth) for t in traces)
        after = calibration_error((logits / confidence.temperatures[depth]).sigmoid(), accept)
        before = calibration_error(logits.sigmoid(), accept)
        assert after < before
        assert errors["calibration_error"][depth] == pytest.approx(after, abs=1e-4)
        assert errors["calibration_error_uncalibrated"][depth] == pytest.approx(before, abs=1e-4)
    batch = batch_of(traces)
    for depth, (draft, _, theirs, _, _) in enumerate(by_depth(own, batch, outputs_of(own, batch))):
        shared = torch.minimum(draft.softmax(-1), theirs.softmax(-1)).sum(-1)
        accept = pairs[depth][1]
        assert all((accept - one).abs().min() < 1e-5 for one in shared)


def test_text_without_a_drafted_token_calibrates_nothing(target, traces):
    own = make("dspark", target, traces)
    own.recipe.calibrate(own.drafter, [])
    assert own.drafter.confidence.temperatures.eq(1).all()
    assert own.recipe.about() == {}


def test_the_temperature_that_made_a_probability_too_sure_is_found():
    torch.manual_seed(0)
    logits = torch.randn(20_000)
    accept = logits.sigmoid().bernoulli()
    assert calibration_error(logits.sigmoid(), accept) < 0.02
    for wrong in (0.25, 4.0):
        assert calibration_error((wrong * logits).sigmoid(), accept) > 0.05
        found = best_temperature(wrong * logits, accept)
        assert found == pytest.approx(wrong, rel=0.2)
        assert calibration_error((wrong * logits / found).sigmoid(), accept) < 0.02


# --- Domino ---------------------------------------------------------------------------------------


def test_the_loss_without_correction_fades_over_its_share_of_the_steps(target, traces):
    recipe = recipe_of("domino", target, base_share=0.5)
    torch.manual_seed(0)
    drafter = recipe.build(traces)
    with torch.no_grad():
        drafter.correction.out.weight.normal_()
    own, batch = trained(recipe, drafter, traces=traces, max_steps=8), batch_of(traces)
    outputs = outputs_of(own, batch)
    for step, share in ((0, 0.75), (2, 0.25), (3, 0.0), (7, 0.0)):
        names = own.denominators(batch, step)
        terms = own.loss(batch, outputs, step, names).terms
        assert terms.keys() == names.keys()  # the same in every step
        for depth, (draft, plain, theirs, _, _) in enumerate(
            by_depth(own, batch, outputs), start=1
        ):
            scale = own.config.depth_decay ** (depth - 1)
            for name, logits, part in (
                ("divergence", draft, 1 - share), ("base", plain, share)
            ):  # fmt: skip
                term = terms[f"depth_{depth}_{name}"]
                p = theirs.softmax(-1)
                kl = (p * (theirs.log_softmax(-1) - logits.log_softmax(-1))).sum()
                assert term.weight == pytest.approx(scale * part)
                close(term.weight * term.total, scale * part * kl)
            assert torch.equal(draft, plain) == (depth == 1)
        sum(one.weight * one.total for one in terms.values()).backward()
        assert drafter.correction.out.weight.grad.any()
        drafter.zero_grad()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base_share": 1.5}, r"method\.base_share must lie in \(0, 1\], got 1\.5"),
        ({"base_share": 0}, r"method\.base_share must lie in \(0, 1\]"),
        ({"correction": "none"}, r"method\.correction must be markov, gated or gru"),
        ({"correction": "rnn"}, r"method\.correction must be one of none, markov, gated, gru"),
        ({"correction_rank": 0}, r"method\.correction_rank must be >= 1"),
        ({"correction_width": 0}, r"method\.correction_width must be >= 1"),
    ],
)
def test_bad_settings_of_domino_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        domino.Config(**options)


@pytest.mark.parametrize("key", ["label_weight", "confidence_weight"])
def test_weights_of_dspark_are_not_negative(key):
    with pytest.raises(UserError, match=rf"method\.{key} must be >= 0"):
        dspark.Config(**{key: -1.0})


def test_a_trained_drafter_has_what_the_recipe_trains(target, traces):
    plain = recipe_of("dflash", target).build(traces)
    with pytest.raises(UserError, match=r"no confidence to train: set method\.confidence_weight"):
        dspark.Recipe(dspark.Config(), target, plain)
    with pytest.raises(UserError, match="no correction to train"):
        domino.Recipe(domino.Config(), target, plain)
    whole = recipe_of("dspark", target).build(traces)
    assert dspark.Recipe(dspark.Config(), target, whole).depth == whole.max_depth
    with pytest.raises(UserError, match=r"has correction=markov, got method\.correction=gated"):
        dspark.Recipe(dspark.Config(correction="gated"), target, whole)
