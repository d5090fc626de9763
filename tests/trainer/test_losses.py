"""Divergences against float64 one-liners, their gradient table and finite differences."""

import math

import pytest
import torch

from tests.helpers.losses import divergence, named
from trainer.divergence import DIVERGENCES, parse_divergence
from trainer.errors import RunFault, UserError
from trainer.losses import (
    CompressedTeacher,
    compress,
    overlap,
    reduce,
)
from trainer.specs import spelled

SOFT = [name for name in DIVERGENCES if name != "ce_hard"]
PROPER = [n for n in SOFT if n not in ("ce_soft", "ce_top", "tvd_pp")]  # zero at p = q
NON_LINEAR = [name for name in SOFT if name not in ("fkl", "ce_soft")]


def _logits(num=5, vocab=6, seed=0, scale=1.5, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draft, teacher = scale * torch.randn(2, num, vocab, generator=g, dtype=torch.float64)
    return draft.to(dtype), teacher.to(dtype)


def _kl(a, b):
    return (a * (a / b).log()).sum(-1)


def _reference(name, q, p):
    """Value by definition, and the s of the gradient q (s - E_q s)."""
    share = torch.minimum(p, q).sum(-1)
    variation = 0.5 * (p - q).abs().sum(-1)
    sign = 0.5 * (q - p).sign()
    m = 0.3 * p + 0.7 * q
    w = torch.exp(-3 * share)
    r = (p > q).double()
    mean = (q * r).sum(-1).mean()
    std = (q * (r - mean) ** 2).sum(-1).mean().sqrt() + 1e-6
    return {
        "fkl": (_kl(p, q), -p / q),
        "ce_soft": (-(p * q.log()).sum(-1), -p / q),
        "ce_top": (-(p * q.log()).sum(-1), -p / q),  # of six tokens all are among the ten best
        "rkl": (_kl(q, p), (q / p).log()),
        "jsd": (0.3 * _kl(p, m) + 0.7 * _kl(q, m), 0.7 * (q / m).log()),
        "tvd": (variation, sign),
        "nla": (-share.log(), sign / share[:, None]),
        "lk_hybrid": (
            w * _kl(p, q) + (1 - w) * variation,
            w[:, None] * -p / q + (1 - w[:, None]) * sign,
        ),
        "tvd_pp": (-(q * (r - mean) / std).sum(-1), sign / std),
        "kl_mix": (0.9 * _kl(p, q) + 0.1 * _kl(q, p), 0.9 * -p / q + 0.1 * (q / p).log()),
    }[name]


@pytest.mark.parametrize("name", SOFT)
def test_value_and_gradient_follow_the_definition(name):
    draft, teacher = _logits()
    draft.requires_grad_()
    values = divergence(name, draft, teacher, beta=0.3)
    values.sum().backward()
    q, p = draft.detach().softmax(-1), teacher.softmax(-1)
    expected, s = _reference(name, q, p)
    torch.testing.assert_close(values.detach(), expected, rtol=1e-9, atol=1e-9)
    gradient = q * (s - (q * s).sum(-1, keepdim=True))
    torch.testing.assert_close(draft.grad, gradient, rtol=1e-8, atol=1e-10)


# lk_hybrid and tvd_pp hold a stop-gradient, so finite differences do not apply to them.
@pytest.mark.parametrize("name", [n for n in DIVERGENCES if n not in ("lk_hybrid", "tvd_pp")])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_gradient_matches_finite_differences(name, temperature):
    draft, teacher = _logits(num=3)
    labels = torch.tensor([0, 3, 5])

    def loss(z):
        return divergence(name, z, teacher, labels, beta=0.3, draft_temperature=temperature)

    assert torch.autograd.gradcheck(loss, draft.requires_grad_())


@pytest.mark.parametrize("name", PROPER)
def test_zero_with_zero_gradient_where_the_models_agree(name):
    draft, _ = _logits(dtype=torch.float32)
    assert divergence(name, draft, draft + 3.0).abs().max() < 1e-6  # a constant moves no softmax
    same = draft.clone().requires_grad_()
    divergence(name, same, draft).sum().backward()
    assert same.grad.abs().max() < 1e-6


def test_hard_labels_give_cross_entropy():
    draft, _ = _logits(num=2)
    draft.requires_grad_()
    labels = torch.tensor([1, 4])
    values = divergence("ce_hard", draft, None, labels)
    values.sum().backward()
    q = draft.detach().softmax(-1)
    torch.testing.assert_close(values.detach(), -q[[0, 1], labels].log())
    torch.testing.assert_close(draft.grad, q - torch.eye(6, dtype=q.dtype)[labels])


def test_jsd_ends_are_the_two_kls_and_its_limits():
    draft, teacher = _logits()
    assert torch.equal(divergence("jsd", draft, teacher, beta=0), divergence("fkl", draft, teacher))
    assert torch.equal(divergence("jsd", draft, teacher, beta=1), divergence("rkl", draft, teacher))
    for near, end, name in ((1e-6, 1e-6, "fkl"), (1 - 1e-6, 1e-6, "rkl")):
        small = divergence("jsd", draft, teacher, beta=near)
        assert small.max() < 1e-4  # the value itself vanishes at both ends
        torch.testing.assert_close(small / end, divergence(name, draft, teacher), rtol=1e-3, atol=0)


def test_tvd_is_one_minus_the_overlap_and_flat_at_ties():
    draft, teacher = _logits()
    torch.testing.assert_close(divergence("tvd", draft, teacher), 1 - overlap(draft, teacher))
    tied = torch.zeros(1, 4, requires_grad=True)
    divergence("tvd", tied, torch.zeros(1, 4)).sum().backward()
    assert torch.equal(tied.grad, torch.zeros(1, 4))


def test_nla_keeps_its_gradient_where_the_overlap_underflows():
    draft = torch.tensor([[120.0, 0.0, -99.0]], requires_grad=True)
    value = divergence("nla", draft, torch.tensor([[0.0, 120.0, -99.0]]))
    value.sum().backward()
    assert value.item() == pytest.approx(120 - math.log(2), rel=1e-5)
    # d/dz of -log(p(0) + q(1)), both e^-120
    torch.testing.assert_close(draft.grad, torch.tensor([[0.5, -0.5, 0.0]]))


@pytest.mark.parametrize("name", [n for n in SOFT if n not in ("rkl", "kl_mix")])
def test_rows_with_barred_target_tokens_stay_finite(name):
    draft, teacher = _logits(dtype=torch.float32)
    teacher[:, 2:4] = -math.inf  # as after top-k
    teacher[0, 1:] = -math.inf  # one-hot
    draft.requires_grad_()
    values = divergence(name, draft, teacher, beta=0.3)
    values.sum().backward()
    assert values.isfinite().all()
    assert draft.grad.isfinite().all()
    expected, _ = _reference(
        name, draft.detach().double().softmax(-1), teacher.double().softmax(-1)
    )
    known = expected.isfinite()  # the one-liners stumble over 0 log 0
    torch.testing.assert_close(values[known].double(), expected[known], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SOFT)
def test_tokens_barred_in_both_models_change_nothing(name):
    draft, teacher = _logits(dtype=torch.float32)
    results = []
    for z, w in (
        (draft, teacher),
        [torch.cat([x, torch.full((5, 2), -math.inf)], -1) for x in (draft, teacher)],
    ):
        z = z.clone().requires_grad_()
        values = divergence(name, z, w)
        values.sum().backward()
        results.append((values.detach(), z.grad))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1][:, :6])
    assert not results[1][1][:, 6:].any()


@pytest.mark.parametrize("name", ["rkl", "kl_mix"])
def test_infinite_divergence_is_a_fault_that_names_the_remedy(name):
    draft, teacher = _logits()
    teacher[1, 0] = -math.inf
    with pytest.raises(RunFault, match=f"{name} is infinite.*use tvd or jsd"):
        divergence(name, draft, teacher)


@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("who", ["draft", "target"])
def test_broken_logits_name_their_model(name, bad, who):
    draft, teacher = _logits()
    (draft if who == "draft" else teacher)[2, 1] = bad
    with pytest.raises(RunFault, match=f"logits of the {who} contain NaN or Inf"):
        divergence(name, draft, teacher)


def test_negative_kl_is_a_fault(monkeypatch):
    draft, teacher = _logits()
    formula = staticmethod(lambda q, p: torch.full((5,), -2e-5))
    monkeypatch.setattr(DIVERGENCES["fkl"], "formula", formula)
    with pytest.raises(RunFault, match=r"fkl is negative \(-2e-05\)"):
        divergence("fkl", draft, teacher)


def test_rounding_of_a_large_vocabulary_is_no_negative_kl():
    teacher = 8 * torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0))
    draft = teacher + 1e-4 * torch.randn(16, 50_000, generator=torch.Generator().manual_seed(1))
    for name in PROPER:
        assert divergence(name, draft, teacher).abs().max() < 1e-3


@pytest.mark.parametrize("name", SOFT)
def test_teacher_gets_no_gradient_and_bfloat16_is_computed_in_float32(name):
    draft, teacher = (x.bfloat16().requires_grad_() for x in _logits())
    values = divergence(name, draft, teacher)
    assert values.dtype == torch.float32
    values.sum().backward()
    assert teacher.grad is None
    assert draft.grad.dtype == torch.bfloat16
    torch.testing.assert_close(values, divergence(name, draft.float(), teacher.float()))


def test_temperatures_change_the_loss_and_the_scale_is_optional():
    draft, teacher = _logits()
    plain = divergence("fkl", draft, teacher)
    both = {"draft_temperature": 2.0, "teacher_temperature": 2.0}
    warm = divergence("fkl", draft, teacher, **both)
    torch.testing.assert_close(warm, divergence("fkl", draft / 2, teacher / 2))
    assert not torch.allclose(warm, plain)
    scaled = divergence("fkl", draft, teacher, **both, temperature_scale=True)
    torch.testing.assert_close(scaled, 4 * warm)
    torch.testing.assert_close(
        divergence("fkl", draft, teacher, teacher_temperature=0.5),
        divergence("fkl", draft, 2 * teacher),
    )


def test_options_reach_their_divergence():
    draft, teacher = _logits()
    for name, key, a, b in (
        ("jsd", "beta", 0.2, 0.8),
        ("lk_hybrid", "eta", 1, 5),
        ("kl_mix", "mix", 0.1, 0.9),
    ):
        one, two = (divergence(name, draft, teacher, **{key: x}) for x in (a, b))
        assert not torch.allclose(one, two), name
    assert torch.equal(
        divergence("kl_mix", draft, teacher, mix=1), divergence("fkl", draft, teacher)
    )
    torch.testing.assert_close(
        divergence("lk_hybrid", draft, teacher, eta=0), divergence("fkl", draft, teacher)
    )


def test_another_divergence_in_its_place_has_the_same_temperatures():
    given = parse_divergence("jsd:0.3,draft_temperature=2,teacher_temperature=0.5")
    assert given.instead("jsd") is given
    expected = parse_divergence("fkl,draft_temperature=2,teacher_temperature=0.5")
    assert given.instead("fkl") == expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("jsd", {"beta": 1.3}, r"beta must lie in \[0, 1\], got 1.3"),
        ("jsd", {"beta": math.nan}, r"beta must lie in \[0, 1\]"),
        ("kl_mix", {"mix": -0.1}, r"mix must lie in \[0, 1\], got -0.1"),
        ("lk_hybrid", {"eta": -1}, r"eta must be >= 0, got -1"),
        ("fkl", {"draft_temperature": 0.0}, r"draft_temperature must be >= 1e-05, got 0.0"),
        ("fkl", {"approx": "buckets"}, r"approx must be null or bucket"),
    ],
)
def test_options_outside_their_range_are_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        divergence(name, *_logits(), **options)


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("fkl", "fkl"), ("jsd", "jsd"), ("jsd:0.5", "jsd"), ("jsd:0.3", "jsd:0.3"),
        ("lk_hybrid,eta=2", "lk_hybrid:2"), ("kl_mix:0.5,draft_temperature=2",
        "kl_mix:0.5,draft_temperature=2"), ("tvd,temperature_scale=true",
        "tvd,temperature_scale=true"), ("tvd,temperature_scale=false", "tvd"),
    ],
)  # fmt: skip
def test_a_divergence_is_spelled_as_a_named_spec(text, spelling):
    parsed = parse_divergence(text)
    assert spelled(parsed) == spelling
    assert parse_divergence(spelling) == parsed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fkll", r"divergence must be one of fkl.*got 'fkll'; did you mean 'fkl'"),
        ("fkl:0.5", r"divergence must be fkl"),
        ("jsd:1.3", r"divergence='jsd:1.3': beta must lie in \[0, 1\], got 1.3"),
        ("jsd:0.3:0.4", r"divergence must be jsd\[:<beta>\]"),
        ("jsd,eta=1", r"divergence must be jsd\[:<beta>\]"),
        ("tvd,temperature_scale=yes", r"temperature_scale must be true or false, got 'yes'"),
    ],
)
def test_a_spec_that_is_none_ends_in_one_line(text, message):
    with pytest.raises(UserError, match=message):
        parse_divergence(text)


def test_missing_inputs_are_refused():
    draft, teacher = _logits()
    with pytest.raises(UserError, match="ce_hard needs labels"):
        divergence("ce_hard", draft, teacher)
    with pytest.raises(UserError, match="fkl needs the logits of the target"):
        divergence("fkl", draft, None)


@pytest.mark.parametrize("name", SOFT)
def test_no_positions_give_an_empty_value(name):
    assert divergence(name, torch.zeros(0, 6), torch.zeros(0, 6)).shape == (0,)


# --- compressed teachers ------------------------------------------------------------------------


def test_compression_keeps_true_log_probs():
    _, teacher = _logits(num=4, vocab=10)
    log_p = teacher.log_softmax(-1)
    c = compress(teacher, 3, 5, torch.Generator().manual_seed(0))
    torch.testing.assert_close(c.logp, log_p.gather(-1, c.ids))
    torch.testing.assert_close(c.logp.exp().sum(-1) + c.log_tail.exp(), torch.ones(4).double())
    torch.testing.assert_close(c.tail_logp, log_p.gather(-1, c.tail_ids))
    assert not (c.tail_ids[:, :, None] == c.ids[:, None, :]).any()
    draws = compress(teacher, 0, 5, torch.Generator().manual_seed(0))
    assert draws.ids.shape == (4, 0)
    assert draws.log_tail.abs().max() < 1e-12


def test_tail_samples_follow_the_tail_law_and_the_given_uniforms():
    teacher = torch.tensor([[4.0, -math.inf, 1.0, 0.0, -1.0, 3.0, -math.inf]])
    num = 4000
    uniforms = ((torch.arange(num, dtype=torch.float64) + 0.5) / num)[None]
    c = compress(teacher, 2, num, uniforms=uniforms)
    shares = torch.bincount(c.tail_ids[0], minlength=7) / num
    tail = torch.tensor([0.0, 0, math.e, 1, 1 / math.e, 0, 0])
    torch.testing.assert_close(shares, tail / tail.sum(), rtol=0, atol=1 / num)
    edge = compress(teacher, 2, 2, uniforms=torch.tensor([[0.0, 1.0]]))
    assert edge.tail_ids.tolist() == [[2, 4]]  # never a token without mass


@pytest.mark.parametrize(("k", "m"), [(3, 4), (0, 12)])
def test_compressed_fkl_is_unbiased(k, m):
    num_draws, vocab = 2000, 12
    draft, teacher = _logits(num=1, vocab=vocab, seed=3, scale=1.0)
    full = draft.clone().requires_grad_()
    full_value = divergence("ce_soft", full, teacher)
    full_value.sum().backward()
    many = draft.repeat(num_draws, 1).requires_grad_()
    c = compress(teacher.repeat(num_draws, 1), k, m, torch.Generator().manual_seed(7))
    values = divergence("fkl", many, c)
    values.sum().backward()  # each row's gradient is its own resampled one

    def z_score(samples, expected):
        return (
            (samples.mean(0) - expected) / (samples.std(0) / math.sqrt(num_draws) + 1e-12)
        ).abs()

    # |z| < 4 has probability 6e-5 a logit under unbiasedness, 8e-4 over the 12 logits (Bonferroni).
    assert z_score(many.grad, full.grad[0]).max() < 4
    assert z_score(values.detach(), full_value.detach()[0]) < 4
    assert many.grad.std(0).max() > 1e-3  # the test can see a bias at all


def test_dropping_or_renormalising_the_tail_would_fail_that_test():
    draft, teacher = _logits(num=1, vocab=12, seed=3, scale=1.0)
    log_q, log_p = draft.log_softmax(-1), teacher.log_softmax(-1)
    head = compress(teacher, 3, 0)
    dropped = -(head.logp.exp() * log_q.gather(-1, head.ids)).sum()
    exact = -(log_p.exp() * log_q).sum()
    assert (dropped - exact).abs() > 0.1
    assert (dropped / head.logp.exp().sum() - exact).abs() > 0.1


def test_top_k_alone_needs_nearly_all_the_mass():
    draft, teacher = _logits()
    with pytest.raises(UserError, match=r"^CompressedTeacherError: the stored top-k leaves out"):
        divergence("fkl", draft, compress(teacher, 3, 0))
    teacher[:, 0] += 20  # now one token has it
    nearly = divergence("fkl", draft, compress(teacher, 3, 0))
    torch.testing.assert_close(nearly, divergence("ce_soft", draft, teacher), rtol=1e-3, atol=1e-3)


def test_a_thousandth_of_the_mass_may_be_left_out():
    draft, _ = _logits(num=2, vocab=5)
    for left, refused in ((0.0009, False), (0.0011, True)):
        teacher = torch.tensor([[1 - left, *[left / 4] * 4], [1 - 1e-6, *[1e-6 / 4] * 4]]).log()
        if refused:  # in one row of two
            with pytest.raises(UserError, match=rf"leaves out {left} of the mass, limit 0.001"):
                divergence("fkl", draft, compress(teacher, 1, 0))
        else:
            divergence("fkl", draft, compress(teacher, 1, 0))


@pytest.mark.parametrize("name", NON_LINEAR)
def test_non_linear_divergences_refuse_a_compressed_teacher(name):
    draft, teacher = _logits()
    with pytest.raises(UserError, match=f"^CompressedTeacherError: {name} is not linear in p"):
        divergence(name, draft, compress(teacher, 2, 3))
    with pytest.raises(UserError, match=r"^CompressedTeacherError"):
        named(name).check_compressed(None)


def test_compressed_teacher_has_one_temperature():
    draft, teacher = _logits()
    with pytest.raises(UserError, match=r"^CompressedTeacherError: p at another temperature"):
        divergence("fkl", draft, compress(teacher, 2, 3), teacher_temperature=0.7)
    divergence("fkl", draft, compress(teacher, 2, 3), draft_temperature=0.7)


@pytest.mark.parametrize("name", [n for n in PROPER if n != "lk_hybrid"])
def test_one_bucket_bounds_the_divergence_from_below(name):
    draft, teacher = _logits(num=200, vocab=9)
    draft.requires_grad_()
    bucketed = divergence(name, draft, compress(teacher, 3, 0), approx="bucket")
    bucketed.sum().backward()
    assert (bucketed <= divergence(name, draft, teacher) + 1e-9).all()
    assert bucketed.min() >= -1e-9
    assert draft.grad.isfinite().all()
    everything = divergence(name, draft, compress(teacher, 8, 0), approx="bucket")  # tail: 1 token
    torch.testing.assert_close(everything, divergence(name, draft, teacher))


@pytest.mark.parametrize("k", [2, 6])
def test_a_target_without_tail_mass_stays_finite(k):
    draft, teacher = _logits(dtype=torch.float32)
    teacher[:, 2:] = -math.inf
    draft.requires_grad_()
    c = compress(teacher, k, 3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(divergence("fkl", draft, c), divergence("ce_soft", draft, teacher))
    torch.testing.assert_close(
        divergence("fkl", draft, c, approx="bucket"), divergence("fkl", draft, teacher)
    )
    (divergence("fkl", draft, c) + divergence("tvd", draft, c, approx="bucket")).sum().backward()
    assert draft.grad.isfinite().all()


def test_half_precision_storage_is_accepted_and_damage_is_not():
    draft, teacher = _logits(dtype=torch.float32)
    c = compress(teacher, 2, 3, torch.Generator().manual_seed(0))
    half = CompressedTeacher(
        c.ids, c.logp.half(), c.log_tail.half(), c.tail_ids, c.tail_logp.half()
    )
    torch.testing.assert_close(
        divergence("fkl", draft, half), divergence("fkl", draft, c), rtol=2e-3, atol=2e-3
    )
    c.log_tail[1] += 1  # one row is enough
    with pytest.raises(RunFault, match="do not sum to one"):
        divergence("fkl", draft, c)


def test_compression_needs_something_to_keep():
    with pytest.raises(UserError, match=r"^m must be >= 0, and positive"):
        compress(torch.zeros(1, 4), 0, 0)
    with pytest.raises(UserError, match=r"^k must lie in \[0, V\], got 5"):
        compress(torch.zeros(1, 4), 5, 0)


# --- reductions ---------------------------------------------------------------------------------


def test_reductions_count_tokens_or_sequences():
    values = torch.tensor([1.0, 2.0, 3.0, 10.0])
    rows = torch.tensor([0, 0, 0, 2])  # sequence 1 has no trained position
    assert [x.item() for x in reduce(values, rows, 3)] == [16.0, 4.0]
    assert [x.item() for x in reduce(values, rows, 3, "sequence")] == [12.0, 2.0]
    empty = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    for kind in ("token", "sequence"):
        assert [x.item() for x in reduce(*empty, 3, kind)] == [0.0, 0.0]
    with pytest.raises(UserError, match=r"^reduction must be token or sequence, got 'mean'"):
        reduce(values, rows, 3, "mean")
