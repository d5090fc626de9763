"""The chunked loss against `losses.divergence` on all logits at once: values, gradients, memory."""

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.helpers.losses import chunked_divergence, divergence
from tests.helpers.watch import Watch
from trainer.chunked import JointGradients
from trainer.device import adds_products_in_float32, free_bytes, shows_numbers_at_once
from trainer.divergence import DIVERGENCES
from trainer.errors import RunFault, UserError
from trainer.logits import CHUNK_ELEMENTS, OutputHead, ReducedLogits, chunk_rows

N, D, V = 7, 4, 12
KEPT = [0, 2, 3, 5, 8, 9, 11]
ACCEPTANCE = ("tvd", "nla", "lk_hybrid")  # with the whole mass of p over a reduced vocabulary
WARM = {"draft_temperature": 1.7, "teacher_temperature": 0.6, "temperature_scale": True}
CASES = {
    "plain": {},
    "everything": {"bias": True, "cap": True, "weights": True, "options": WARM},
    "padded": {"bias": True, "padding": 3},
    "reduced": {"kept": KEPT},
    "reduced everything": {"kept": KEPT, "bias": True, "cap": True, "weights": True}
    | {"options": WARM},
    "extra": {"extra": 3, "bias": True, "padding": 3, "weights": True},
    "reduced extra": {"extra": 3, "kept": KEPT, "cap": True},
}


def _cap(logits):
    return 2 * torch.tanh(logits / 2)


def _problem(
    dtype=torch.float64, kept=None, bias=False, cap=False, padding=0, weights=False, extra=0, **_
):
    """States and head that need a gradient, the target's logits, labels and weights. `extra`: rank
    of the head's correction."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype)

    width = len(kept) if kept else V + padding
    states, teacher = draw(N, D + extra).requires_grad_(), draw(N, V, scale=2.0)
    head = OutputHead(
        draw(width, D).requires_grad_(),
        draw(width).requires_grad_() if bias else None,
        torch.tensor(kept) if kept else None,
        _cap if cap else None,
        V if padding else None,
        extra=draw(width - padding, extra).requires_grad_() if extra else None,
    )
    labels = torch.tensor([0, 1, 11, 3, 4, 5, 8])
    return states, head, teacher, labels, draw(N).abs() if weights else None


def _by_acceptance(name, logits, teacher, ids, draft_temperature=1.0, temperature_scale=False):
    """The divergences that measure acceptance, over the whole vocabulary: q is 0 outside of `ids`,
    p is not renormalised but in the KL of lk_hybrid."""
    own = (logits / draft_temperature).softmax(-1)
    q, p = torch.zeros_like(teacher).index_copy(1, ids, own), teacher.softmax(-1)
    accepted = torch.minimum(p, q).sum(-1)
    values = -accepted.log() if name == "nla" else (p - q).abs().sum(-1) / 2
    if name == "lk_hybrid":
        share = (-3 * accepted.detach()).exp()
        kept = p[:, ids] / p[:, ids].sum(-1, keepdim=True)
        values = share * (kept * (kept / own).log()).sum(-1) + (1 - share) * values
    return values * draft_temperature**2 if temperature_scale else values


def _expected(name, states, head, teacher, labels, weights, options):
    """Total with its graph, values, overlap, match, counted, of all logits at once."""
    logits = head.logits(states)
    kept = range(V) if head.kept is None else head.kept.tolist()
    ids = torch.tensor(list(kept))
    best = teacher.argmax(-1)
    if head.kept is not None and name in ACCEPTANCE:
        counted = torch.ones(N, dtype=torch.bool)
        values = _by_acceptance(name, logits, teacher, ids, **options)
    else:
        counted = torch.isin(labels if name == "ce_hard" else best, ids)
        places = torch.tensor([list(kept).index(y) if y in kept else 0 for y in labels.tolist()])
        some = divergence(
            name, logits[counted], teacher[counted][:, ids], places[counted], beta=0.3, **options
        )
        values = torch.zeros_like(logits[:, 0])
        values[counted] = some
    q = torch.zeros_like(teacher).index_copy(1, ids, logits.detach().softmax(-1))
    overlap = torch.minimum(teacher.softmax(-1), q).sum(-1)
    total = (values * (1 if weights is None else weights)).sum()
    return total, values.detach(), overlap, q.argmax(-1) == best, counted


def _gradients(total, states, head):
    own = [x for x in (head.weight, head.bias, head.extra) if x is not None]
    return torch.autograd.grad(total, [states, *own])


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equals_the_divergence_of_all_logits_at_once(name, case, dtype, tolerance):
    spec = CASES[case]
    states, head, teacher, labels, weights = _problem(dtype, **spec)
    options = dict(spec.get("options", {}))
    if head.kept is not None and name in ACCEPTANCE:  # refused there
        options.pop("teacher_temperature", None)
    problem = states, head, teacher, labels, weights
    total, *others = _expected(name, *problem, options)
    gradients = _gradients(total, states, head)
    close = {"rtol": tolerance, "atol": tolerance}
    some = 0 < others[-1].sum() < N
    assert head.kept is None or some != (name in ACCEPTANCE)  # some positions count, some do not
    for chunk in (1, 3, N, None):
        got = chunked_divergence(
            name, states, head, teacher.__getitem__, labels, weights,
            beta=0.3, chunk_positions=chunk, **options,
        )  # fmt: skip
        torch.testing.assert_close(got.total, total, **close)
        found = (got.values, got.overlap, got.match, got.counted)
        torch.testing.assert_close(found, tuple(others), **close)
        assert not any(x.requires_grad for x in found)
        torch.testing.assert_close(_gradients(got.total, states, head), gradients, **close)


def test_acceptance_over_a_reduced_vocabulary_counts_what_it_lacks():
    """Also where the target's first choice is not among the ids kept."""
    states, head, teacher, labels, _ = _problem(kept=KEPT)
    out = chunked_divergence("tvd", states, head, teacher.__getitem__, labels)
    torch.testing.assert_close(out.values, 1 - out.overlap)
    teacher[2, 4] = teacher[2].max() + 0.1  # not kept
    later = chunked_divergence("tvd", states, head, teacher.__getitem__, labels)
    assert later.counted.all()
    assert later.values[2] > out.values[2]
    assert _gradients(later.total, states, head)[0][2].any()
    whole = chunked_divergence(
        "tvd", states, head, teacher.__getitem__, labels, draft_temperature=2
    )
    assert not torch.equal(whole.values, later.values)
    warm = {"teacher_temperature": 2.0}
    for name in ACCEPTANCE:
        with pytest.raises(UserError, match=f"{name},teacher_temperature=2"):
            chunked_divergence(name, states, head, teacher.__getitem__, labels, **warm)
    chunked_divergence("fkl", states, head, teacher.__getitem__, labels, **warm)


def test_hard_labels_need_no_teacher():
    states, head, teacher, labels, _ = _problem(kept=KEPT)
    given = chunked_divergence("ce_hard", states, head, teacher.__getitem__, labels)
    alone = chunked_divergence("ce_hard", states, head, None, labels, chunk_positions=2)
    torch.testing.assert_close(alone.values, given.values)
    assert alone.counted.tolist() == [y in KEPT for y in labels.tolist()]
    # all of p lies on the label
    torch.testing.assert_close(alone.overlap, torch.where(alone.counted, (-alone.values).exp(), 0))
    first = torch.tensor(KEPT)[head.logits(states).argmax(-1)]
    assert torch.equal(alone.match, first == labels)


# lk_hybrid and tvd_pp hold a stop-gradient, so finite differences do not apply to them.
@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize("name", [n for n in DIVERGENCES if n not in ("lk_hybrid", "tvd_pp")])
def test_gradient_matches_finite_differences(name, kept):
    states, head, teacher, labels, weights = _problem(kept=kept, bias=True, cap=True, weights=True)

    def loss(states, weight, bias):
        head = OutputHead(weight, bias, None if kept is None else torch.tensor(kept), _cap)
        get = teacher.__getitem__
        return chunked_divergence(name, states, head, get, labels, weights, chunk_positions=3).total

    def again(*inputs):  # gradcheck runs backward often, a loss runs it once: compute it anew
        return checkpoint(loss, *inputs, use_reentrant=False)

    assert torch.autograd.gradcheck(again, (states, head.weight, head.bias), fast_mode=True)


def test_tied_weight_collects_the_gradient_of_both_uses():
    _, head, teacher, labels, _ = _problem()

    def total(loss):
        states = torch.tanh(head.weight[labels])  # the embedding is the head
        return 3 * loss(states) + states.square().sum()

    def plain(states):
        return divergence("jsd", head.logits(states), teacher).sum() / N

    def chunked(states):
        get = teacher.__getitem__
        return chunked_divergence("jsd", states, head, get, labels, chunk_positions=2).total / N

    expected = torch.autograd.grad(total(plain), head.weight)
    torch.testing.assert_close(torch.autograd.grad(total(chunked), head.weight), expected)
    total(chunked).backward()
    total(chunked).backward()  # a second micro-batch adds to the first
    torch.testing.assert_close(head.weight.grad, 2 * expected[0])


def test_backward_runs_once():
    states, head, teacher, labels, _ = _problem()
    total = chunked_divergence("fkl", states, head, teacher.__getitem__, labels).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("kept", [None, KEPT])
def test_terms_through_one_head_may_share_its_gradient(name, kept):
    """Three terms, of which the loop multiplies each by its factor and all by one more number; in
    front of a second head, whose gradient is another."""
    states, head, teacher, labels, weights = _problem(kept=kept, bias=True, weights=True)
    _, other, *_ = _problem(kept=kept, bias=True)
    with torch.no_grad():
        other.weight.mul_(0.5)
    inputs = states, head.weight, head.bias, other.weight, other.bias

    def gradients(joint):
        loss = torch.zeros((), dtype=torch.float64)
        for i, (way, factor) in enumerate([(head, 0.02), (other, 5.0), (head, 3.0), (head, 1.0)]):
            moved = states * (1 + 0.1 * i)
            made = chunked_divergence(
                name, moved, way, teacher.__getitem__, labels, weights, beta=0.3,
                chunk_positions=3, joint=joint, factor=factor,
            )  # fmt: skip
            loss = loss + factor * made.total
        return torch.autograd.grad(7 * loss, inputs)

    torch.testing.assert_close(gradients(JointGradients()), gradients(None), rtol=1e-10, atol=0)


def test_a_shared_gradient_is_allocated_once():
    states, head, teacher, labels, _ = _problem()
    made = Counter()

    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.zeros_like.default:
                made[tuple(out.shape)] += 1
            return out

    for joint in (None, JointGradients()):
        made.clear()
        with Zeros():
            for _ in range(3):
                chunked_divergence("fkl", states, head, teacher.__getitem__, labels, joint=joint)
        assert made[V, D] == (3 if joint is None else 1)


@pytest.mark.parametrize("kept", [None, KEPT])
def test_no_positions_give_zero_with_a_graph(kept):
    """There is no chunk, and so nothing that depends on the divergence."""
    for name in DIVERGENCES:
        states, head, teacher, labels, _ = _problem(kept=kept, bias=True)
        none = states[:0]
        out = chunked_divergence(name, none, head, teacher.__getitem__, labels[:0])
        assert out.total == 0, name
        assert [len(x) for x in (out.values, out.overlap, out.match, out.counted)] == [0] * 4
        out.total.backward()
        assert not any(x.grad.any() for x in (states, head.weight, head.bias)), name


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("kept", [None, KEPT])
def test_broken_logits_name_their_model(name, kept):
    def refused(whose):
        with pytest.raises(RunFault, match=f"logits of the {whose} contain NaN or Inf"):
            chunked_divergence(name, states, head, teacher.__getitem__, labels, chunk_positions=2)

    for bad in (math.nan, math.inf):
        for token in (2, 4):  # the second is not kept
            states, head, teacher, labels, _ = _problem(kept=kept)
            teacher[5, token] = bad
            refused("target")
        states, head, teacher, labels, _ = _problem(kept=kept)
        with torch.no_grad():
            states[5, 0] = bad
        refused("draft")


def test_infinite_divergence_is_a_fault_that_names_the_remedy():
    states, head, teacher, labels, _ = _problem()
    teacher[5, 0] = -math.inf
    with pytest.raises(RunFault, match=r"rkl is infinite.*use tvd or jsd"):
        chunked_divergence("rkl", states, head, teacher.__getitem__, labels, chunk_positions=2)
    out = chunked_divergence("tvd", states, head, teacher.__getitem__, labels)
    torch.testing.assert_close(out.overlap, 1 - out.values)


def test_a_position_that_does_not_count_has_no_gradient_even_where_its_value_is_infinite():
    states, head, teacher, labels, _ = _problem(kept=KEPT)
    teacher[5, 4], labels[5] = 50, 4  # the token to learn is not kept,
    teacher[5, 0] = -math.inf  # and the target excludes one that is
    out = chunked_divergence("rkl", states, head, teacher.__getitem__, labels)
    assert not out.counted[5]
    by_states, by_weight = _gradients(out.total, states, head)
    assert not by_states[5].any()
    assert by_weight.isfinite().all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_where_a_look_costs_a_wait_only_what_is_broken_becomes_nan(name, monkeypatch):
    """The loop finds it in the loss when a line is due."""
    states, head, teacher, labels, weights = _problem(weights=True)
    sound = chunked_divergence(name, states, head, teacher.__getitem__, labels, weights)
    for module in ("chunked", "divergence"):
        monkeypatch.setattr(f"trainer.{module}.shows_numbers_at_once", lambda device: False)
    same = chunked_divergence(name, states, head, teacher.__getitem__, labels, weights)
    assert same.values.equal(sound.values)
    assert same.total.equal(sound.total)
    teacher[5, 2] = math.nan
    weights[5] = 0
    out = chunked_divergence(name, states, head, teacher.__getitem__, labels, weights)
    assert out.total.isnan()
    for values in (out.values, out.overlap):
        assert values.isnan().tolist() == [i == 5 for i in range(N)]
    teacher[5, 2] = -math.inf
    values = divergence("rkl", head.logits(states), teacher)
    assert values.isnan().tolist() == [i == 5 for i in range(N)]


def test_a_look_is_free_on_a_cpu_alone():
    assert shows_numbers_at_once(torch.device("cpu"))
    assert not shows_numbers_at_once(torch.device("cuda"))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_reduced_logits_stand_for_those_of_the_whole_vocabulary(name):
    states, head, teacher, labels, weights = _problem(kept=KEPT, weights=True)
    parts = ReducedLogits.of(teacher[:3], head.kept), ReducedLogits.of(teacher[3:], head.kept)
    reduced = ReducedLogits.joined(parts)
    found = []
    for get in (teacher.__getitem__, reduced.__getitem__):
        out = chunked_divergence(name, states, head, get, labels, weights, chunk_positions=2)
        gradients = torch.autograd.grad(out.total, (states, head.weight))
        found.append((out.values, out.overlap, out.match, out.counted, *gradients))
    for ours, theirs in zip(*found, strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_teacher_is_called_once_a_chunk_and_without_gradient(name):
    states, head, teacher, labels, _ = _problem()
    teacher.requires_grad_()
    spans = []

    def get(span):
        assert not torch.is_grad_enabled()
        spans.append((span.start, span.stop))
        return 1 * teacher[span]

    chunked_divergence(name, states, head, get, labels, chunk_positions=3).total.backward()
    assert spans == [(0, 3), (3, 6), (6, 7)] * (2 if name == "tvd_pp" else 1)
    assert teacher.grad is None


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("frozen", [False, True])
def test_logits_live_one_chunk_at_a_time(name, frozen):
    num, width, vocab, chunk = 40, 3, 50, 4
    states = torch.randn(num, width, requires_grad=True)
    head = OutputHead(torch.randn(vocab, width, requires_grad=not frozen), torch.randn(vocab))
    teacher_states, teacher_weight = torch.randn(num, width), torch.randn(width, vocab)
    with Watch() as watch:
        chunked_divergence(
            name, states, head, lambda span: teacher_states[span] @ teacher_weight,
            torch.zeros(num, dtype=torch.int64), chunk_positions=chunk,
        ).total.backward()  # fmt: skip
    assert max(map(math.prod, watch.shapes)) == chunk * vocab < num * width * vocab
    assert (chunk, vocab) in watch.shapes


@pytest.mark.parametrize(
    ("free", "rows"),
    [(None, 110), (2**30, 110), (20 * 10**9, 1766), (40 * 10**9, 3533), (10**12, 3533)],
)
def test_a_chunk_is_as_large_as_the_free_memory_allows(free, rows, monkeypatch):
    """At a vocabulary of 151,936; memory that nobody knows of gives 64 MiB a tensor."""
    monkeypatch.setattr("trainer.logits.free_bytes", lambda device: free)
    found = chunk_rows(torch.device("cuda"), 151_936)
    assert found == rows
    least = found == CHUNK_ELEMENTS // 151_936
    assert least or 12 * 4 * found * 151_936 <= 0.75 * free


def test_a_loss_reads_the_free_memory_once_for_all_chunks(monkeypatch):
    asked, spans = [], []

    def free_bytes(device):
        asked.append(device)
        return 2**10

    def get(span):
        spans.append(span)
        return teacher[span]

    states, head, teacher, labels, _ = _problem()
    monkeypatch.setattr("trainer.logits.free_bytes", free_bytes)
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", 2 * V)
    chunked_divergence("fkl", states, head, get, labels)
    assert asked == [states.device]
    assert len(spans) == 4


def test_a_chunk_has_a_row_however_large_the_vocabulary():
    assert chunk_rows(torch.device("cpu"), 2**30) == 1


def test_a_cpu_has_no_free_memory_to_divide():
    assert free_bytes(torch.device("cpu")) is None


def test_frozen_head_gets_no_gradient_and_no_room_for_one():
    states, head, teacher, labels, _ = _problem(bias=True)
    head = OutputHead(head.weight.detach(), head.bias)
    made = []

    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "zeros" in str(func) or "empty" in str(func):
                made.append(tuple(out.shape))
            return out

    with Zeros():
        chunked_divergence("fkl", states, head, teacher.__getitem__, labels).total.backward()
    assert (V, D) not in made
    assert (N, D) in made
    assert states.grad.any()
    assert head.bias.grad.any()


def test_gradient_is_skipped_where_nothing_needs_it():
    states, head, teacher, labels, _ = _problem()
    expected = chunked_divergence("fkl", states, head, teacher.__getitem__, labels)
    frozen = OutputHead(head.weight.detach())
    with torch.no_grad():
        evaluated = chunked_divergence("fkl", states, head, teacher.__getitem__, labels)
    detached = chunked_divergence("fkl", states.detach(), frozen, teacher.__getitem__, labels)
    for out in (evaluated, detached):
        assert not out.total.requires_grad
        torch.testing.assert_close(out.values, expected.values)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_projects_in_bfloat16_and_takes_the_softmax_in_float32(autocast, monkeypatch):
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", 5 * D)  # the head in several pieces
    states, head, teacher, labels, _ = _problem(torch.float32, bias=True, padding=2, extra=3)
    if not autocast:
        leaves = (head.weight, head.bias, head.extra)
        weight, bias, more = (x.detach().bfloat16().requires_grad_() for x in leaves)
        states, head = (
            states.detach().bfloat16().requires_grad_(),
            OutputHead(weight, bias, vocab_size=V, extra=more),
        )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = head.logits(states)
        assert logits.dtype == torch.bfloat16
        expected = divergence("jsd", logits, teacher)
        got = chunked_divergence(
            "jsd", states, head, teacher.__getitem__, labels, chunk_positions=2
        )
    assert got.values.dtype == torch.float32
    torch.testing.assert_close(got.values, expected.detach())
    pairs = zip(
        _gradients(got.total, states, head), _gradients(expected.sum(), states, head), strict=True
    )
    for mine, plain in pairs:
        assert mine.dtype == plain.dtype
        torch.testing.assert_close(mine, plain, rtol=2e-2, atol=3e-3)  # sums of bfloat16 products


class WideProducts(TorchDispatchMode):
    """A device that adds products of bfloat16 matrices to a float32 sum."""

    def __init__(self, rounded=False):
        super().__init__()
        self.rounded, self.shapes = rounded, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.dtype_out:
            total, left, right, _ = args
            assert total is kwargs["out"]
            self.shapes.append(tuple(total.shape))
            product = left @ right if self.rounded else left.float() @ right.float()
            return total.add_(product)
        return func(*args, **(kwargs or {}))


def test_the_heads_gradient_is_summed_in_float32_where_the_device_can(monkeypatch):
    states, head, teacher, labels, _ = _problem(torch.float32, padding=2)

    def by_weight():
        with torch.autocast("cpu", torch.bfloat16):
            out = chunked_divergence(
                "jsd", states, head, teacher.__getitem__, labels, chunk_positions=2
            )
        return torch.autograd.grad(out.total, head.weight)[0]

    plain = by_weight()
    monkeypatch.setattr("trainer.chunked.adds_products_in_float32", lambda device: True)
    with WideProducts() as products:
        exact = by_weight()
    assert products.shapes == [(V, D)] * 4  # a chunk each, without the padding
    torch.testing.assert_close(exact, plain, rtol=2e-2, atol=3e-3)
    with WideProducts(rounded=True):
        torch.testing.assert_close(by_weight(), plain, rtol=1e-6, atol=1e-7)
    assert not exact.equal(plain)


def test_whether_products_are_summed_in_float32_is_tried_on_the_device():
    tried = adds_products_in_float32.__wrapped__
    cpu = torch.device("cpu")
    assert not tried(cpu)
    with WideProducts():
        assert tried(cpu)
    with WideProducts(rounded=True):
        assert not tried(cpu)


def test_unusable_inputs_are_refused():
    states, head, teacher, labels, _ = _problem()
    weight = head.weight
    get = teacher.__getitem__
    for options, message in (
        ({"teacher": None}, "teacher must be given for fkl"),
        ({"chunk_positions": 0}, "chunk_positions must be >= 1, got 0"),
        ({"teacher": lambda span: get(span)[:, :-1]}, r"logits of the target must have the shape"),
    ):
        with pytest.raises(UserError, match=message):
            chunked_divergence(
                "fkl", states, head, options.get("teacher", get), labels,
                chunk_positions=options.get("chunk_positions"),
            )  # fmt: skip
    for options, message in (
        ({"vocab_size": V + 1}, f"vocab_size must lie in 1..{V}"),
        ({"vocab_size": 3, "kept": torch.arange(V)}, "stand without a reduced vocabulary, got 3"),
        ({"kept": torch.arange(V).flip(0)}, f"kept must be {V} ascending ids"),
        ({"kept": torch.arange(3)}, f"kept must be {V} ascending ids"),
    ):
        with pytest.raises(UserError, match=message):
            OutputHead(weight, **options)
