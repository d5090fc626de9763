"""The recipes of heads: which positions they train, what their options change, what they refuse."""

from __future__ import annotations

import dataclasses
import importlib
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from data.batches import Batches, collate
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.packing import PackedTraces
from data.prompts import Prompt
from drafters.eagle import EagleDrafter
from drafters.hydra import HydraDrafter
from drafters.medusa import MedusaDrafter
from recipes import eagle3
from recipes.common import draft_vocabulary, target_logits
from recipes.common.draft_vocabulary import frequent_tokens
from recipes.common.heads import HeadObjective
from tests.helpers.losses import divergence, listed, ordered
from tests.helpers.objectives import trained
from tests.helpers.tiny import VOCAB_SIZE
from trainer.config import load_yaml
from trainer.divergence import DIVERGENCES
from trainer.errors import UserError
from trainer.logits import LogitsSummary, OutputHead
from trainer.losses import Term, ce_hard
from trainer.shift import supervised

HEADS = ("medusa", "hydra", "hydrapp", "eagle", "eagle3", "dflash")
BY_DEFAULT = ("eagle3", "medusa", "hydra", "hydrapp")  # of a large vocabulary they draft some
REDUCED = (*BY_DEFAULT, "dflash")  # may draft some of the tokens only
SHARED = {"medusa": {"own_head": False}, "hydra": {"shared_lm_head": True}}
EXTRA = {"eagle3": {"layers": [0, 1], "steps": 3}, "eagle": {"steps": 2, "feature_noise": 0.0},
         "hydrapp": {"dropout": 0.0},
         "dflash": {"block_size": 4, "draft_layers": 1, "anchors": 0}}  # fmt: skip


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    prompts = [Prompt(f"Question {i}: ", None, "yes.", "test", "", f"c{i}") for i in range(16)]
    plan = GenerationPlan("test", tuple(prompts), (1.0,), max_new_tokens=12)
    folder = tmp_path_factory.mktemp("traces")
    made = [*generate_traces(target, plan, folder, batch_size=16, rows_per_shard=16)]
    for trace in made:
        trace.response_ids = trace.response_ids[: 3 + trace.index % 9]
    return made


def recipe_of(name, target, given=None, **options):
    """`given`: a trained head that it starts from."""
    module = importlib.import_module(f"recipes.{name}")
    return module.Recipe(module.Config(**(EXTRA.get(name, {}) | options)), target, given)


def make(name, target, traces, **options):
    recipe = recipe_of(name, target, **options)
    torch.manual_seed(0)
    drafter = recipe.build(traces)
    torch.manual_seed(1)
    with torch.no_grad():  # away from the zeros and copies that a fresh head begins with
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return trained(recipe, drafter, stage=0, traces=traces)


def batch_of(traces, size=6):
    return Batches(traces, {"target": 1.0}, size, seed=0).at(0)


def outputs_of(recipe, batch):
    request = recipe.target_request(batch, 0)
    return recipe.target.outputs(
        batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits
    )


def terms_of(recipe, batch):
    terms = listed(recipe.loss(batch, outputs_of(recipe, batch), 0).terms)
    assert [float(n) for _, n, _ in terms] == ordered(recipe.denominators(batch, 0))
    return terms


def loss_of(recipe, batch):
    torch.manual_seed(2)
    return sum(weight * total / max(float(n), 1) for total, n, weight in terms_of(recipe, batch))


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in HEADS), *SHARED.items(), ("eagle3", {"draft_vocab_size": 20}),
     ("dflash", {"draft_vocab_size": 20}), ("eagle3", {"top_weight": 0.3, "feature_weight": 0.2})],
)  # fmt: skip
def test_depths_share_the_gradient_of_their_output_head(name, options, target, traces):
    """Where the denominators of all terms are known, those of other processes included, which are
    not in proportion to this one's; a depth that nobody trains has 0."""
    recipe = make(name, target, traces, **options)
    recipe.drafter.requires_grad_(True)  # a frozen output matrix too
    batch = batch_of(traces)
    outputs = outputs_of(recipe, batch)
    own = recipe.denominators(batch, 0)
    depths = {name: int(name.split("_")[1]) for name in own}
    sums = {name: (n * depths[name] + 3) * (depths[name] < recipe.depth) for name, n in own.items()}

    def gradients(known):
        torch.manual_seed(2)
        terms = recipe.loss(batch, outputs, 0, known).terms
        loss = sum(one.weight * one.total / (sums[name] or 1) for name, one in terms.items())
        recipe.drafter.zero_grad()
        (2 * loss).backward()
        return {name: p.grad for name, p in recipe.drafter.named_parameters() if p.grad is not None}

    shared = gradients(sums)
    for part, expected in gradients(None).items():
        assert (shared[part] - expected).abs().max() <= 1e-5 * expected.abs().max(), part


@pytest.mark.parametrize("measure", ["jsd", "ce_hard"])
@pytest.mark.parametrize("name", HEADS)
def test_the_loss_is_the_divergence_of_what_decoding_drafts(name, measure, target, traces):
    """Term by term against the plain divergence of `draft_logits` at the positions that a round can
    draft at that depth: its anchor and everything since are the target's own."""
    recipe = make(name, target, traces, divergence=measure, feature_weight=0.0)
    batch = batch_of(traces)
    outputs = outputs_of(recipe, batch)
    teacher = target.outputs(batch.input_ids).logits
    terms = terms_of(recipe, batch)
    assert len(terms) == recipe.depth
    for depth, (total, count, weight) in enumerate(terms, start=1):
        logits = recipe.drafter.draft_logits(batch.input_ids, outputs, depth)
        expected, number = torch.zeros(()), 0
        for row, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
            for r in range(depth, len(response)):  # index of the drafted token in its response
                i = len(prompt) + r - 1
                draft = logits[row, i : i + 1]
                if measure == "ce_hard":
                    expected = expected + ce_hard(draft, torch.tensor([response[r]])).sum()
                else:
                    theirs = teacher[row, i : i + 1, :VOCAB_SIZE]
                    expected = expected + divergence(measure, draft, theirs).sum()
                number += 1
        if recipe.config.reduction == "token":
            assert float(count) == number
            torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
        assert weight == pytest.approx(
            recipe.config.depth_decay ** (depth - 1) * recipe.config.divergence_weight
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("medusa", {}),
        ("medusa", {"draft_vocab_size": 30}),
        ("eagle3", {}),
        ("eagle3", {"draft_vocab_size": 30}),
    ],
)
def test_where_the_targets_logits_do_not_fit_they_are_made_anew_at_each_depth(
    name, options, target, traces, monkeypatch
):
    recipe, batch, made = make(name, target, traces, **options), batch_of(traces), []

    def counted(head, states, _logits=OutputHead.logits):
        made.append(head is target.head)
        return _logits(head, states)

    monkeypatch.setattr(OutputHead, "logits", counted)
    found = []
    usual = target_logits.HOLD_BYTES
    for limit, free, times in (
        (usual, None, 1), (10, None, recipe.depth), (10, 4 * usual, 1), (usual, 40, recipe.depth)
    ):  # fmt: skip
        monkeypatch.setattr(target_logits, "HOLD_BYTES", limit)
        monkeypatch.setattr(target_logits, "free_bytes", lambda device, free=free: free)
        made.clear()
        found.append([total for total, _, _ in terms_of(recipe, batch)])
        assert sum(made) == times
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("name", REDUCED)
def test_with_a_summary_only_the_drafted_rows_of_the_targets_head_are_read(
    name, fits, target, traces, monkeypatch
):
    """Losses, gradients and metrics are those of all logits."""
    monkeypatch.setattr(target_logits, "HOLD_BYTES", 1 << 28 if fits else 10)
    recipe, batch = make(name, target, traces, draft_vocab_size=30), batch_of(traces)
    assert recipe.target_request(batch, 0).summary
    assert not make(name, target, traces, draft_vocab_size=0).target_request(batch, 0).summary
    outputs = outputs_of(recipe, batch)
    known = LogitsSummary.of(target.head, outputs.hidden["final_norm"])
    known.log_z[:, :-1].masked_fill_(~batch.supervised(), torch.nan)
    found, read = [], []

    def counted(head, states, _logits=OutputHead.logits):
        read.append(len(head.weight))
        return _logits(head, states)

    monkeypatch.setattr(OutputHead, "logits", counted)
    for given in (outputs, dataclasses.replace(outputs, summary=known)):
        recipe.drafter.zero_grad()
        read.clear()
        made = recipe.loss(batch, given, 0)
        terms = listed(made.terms)
        sum(weight * total for total, _, weight in terms).backward()
        found.append(
            [*[total for total, _, _ in terms], *[value for value, _ in made.metrics.values()],
             *[p.grad.clone() for p in recipe.drafter.parameters() if p.grad is not None]]
        )  # fmt: skip
        assert set(read) == {30 if given.summary else len(target.head.weight)}
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 30}])
@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_the_teacher_keeps_the_targets_dtype_under_autocast(
    name, options, target, traces, monkeypatch
):
    """Training in bfloat16 does not round the logits of a target that is served in another."""
    recipe, batch, dtypes = make(name, target, traces, **options), batch_of(traces), set()
    outputs = outputs_of(recipe, batch)
    summary = LogitsSummary.of(target.head, outputs.hidden["final_norm"])

    def noted(head, states, _logits=OutputHead.logits):
        found = _logits(head, states)
        if any(head is one for one in (target.head, recipe._kept_head)):
            dtypes.add(found.dtype)
        return found

    monkeypatch.setattr(OutputHead, "logits", noted)
    for limit, given in ((1 << 28, None), (10, None), (10, summary)):
        monkeypatch.setattr(target_logits, "HOLD_BYTES", limit)
        dtypes.clear()
        with torch.autocast("cpu", torch.bfloat16):
            recipe.loss(batch, dataclasses.replace(outputs, summary=given), 0)
        assert dtypes == {torch.float32}


def test_a_trained_head_decides_whether_its_vocabulary_is_reduced(target, traces):
    """Not the setting, which may be left out then."""
    batch = batch_of(traces)
    for drafted, size in ((20, None), (0, None)):
        given = make("eagle3", target, traces, draft_vocab_size=drafted).drafter
        recipe = recipe_of("eagle3", target, given, draft_vocab_size=size)
        assert recipe.objective.target_request(batch, 0).summary == bool(drafted)


@pytest.mark.parametrize("packed", [False, True])
def test_noise_on_the_states_is_as_wide_as_each_texts_own_length_allows(packed, target, traces):
    """Uniform, with a half width of `feature_noise` at 512 tokens, whatever else is in the batch or
    in the row."""

    class Wrapped(torch.nn.Module):
        def __init__(self, drafter):
            super().__init__()
            self.module, self.seen = drafter, None

        def forward(self, ids, outputs, *given, **options):
            self.seen = outputs.hidden["final_norm"]
            return self.module(ids, outputs, *given, **options)

    recipe = make("eagle", target, traces, feature_noise=0.1)
    batch = PackedTraces(traces, "target", 64, 3, seed=0).at(0) if packed else batch_of(traces)
    sizes = [len(p) + len(r) for p, r in zip(batch.prompts, batch.responses, strict=True)]
    assert len(set(sizes)) > 1
    assert (len(batch.starts()) > len(batch.input_ids)) == packed
    drafter, outputs = Wrapped(recipe.drafter), outputs_of(recipe, batch)
    recipe.objective.loss(drafter, batch, outputs, 0)
    noise = (drafter.seen - outputs.hidden["final_norm"]).abs()
    for (row, begin), size in zip(batch.starts(), sizes, strict=True):
        width, own = 0.1 * 512 / size, noise[row, begin : begin + size]
        assert 0.99 * width < float(own.max()) <= 1.001 * width
        assert float(own.mean()) == pytest.approx(width / 2, rel=0.1)


def test_the_last_supervised_token_is_reached_at_every_depth_it_can_be():
    mask = torch.zeros(1, 8, dtype=torch.bool)
    mask[0, 3:7] = True  # response at 3..6
    found = {d: supervised(mask, d)[0].nonzero()[:, 0].tolist() for d in (0, 1, 2, 3, 4)}
    # logit index i scores token i + 1; the anchor, `depth` before it, is in the response as well
    assert found == {0: [2, 3, 4, 5], 1: [3, 4, 5], 2: [4, 5], 3: [5], 4: []}


@pytest.mark.parametrize("draft_vocab_size", [30, 0])
def test_acceptance_at_another_temperature_of_the_target_needs_the_whole_vocabulary(
    draft_vocab_size, target
):
    def made(divergence):
        options = {"divergence": divergence, "draft_vocab_size": draft_vocab_size}
        return recipe_of("medusa", target, **options).objective

    made("fkl,teacher_temperature=2")
    if not draft_vocab_size:
        made("lk_hybrid,teacher_temperature=2")
        return
    with pytest.raises(UserError, match=r"method\.divergence must have teacher_temperature=1"):
        made("lk_hybrid,teacher_temperature=2")


@pytest.mark.parametrize("name", HEADS)
def test_prompts_and_padding_do_not_change_the_loss_of_a_row(name, target, traces):
    recipe = make(name, target, traces)
    short = batch_of(traces, 2)
    wide = collate([*short.prompts, [5] * 40], [*short.responses, []], [*short.sources, "target"])
    for (a, n, _), (b, m, _) in zip(terms_of(recipe, short), terms_of(recipe, wide), strict=True):
        assert float(n) == float(m)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_every_divergence_gives_another_loss(name, target, traces):
    batch = batch_of(traces)
    values = [loss_of(make(name, target, traces, divergence=d), batch).item() for d in DIVERGENCES]
    assert len({round(value, 5) for value in values}) == len(DIVERGENCES)


@pytest.mark.parametrize(
    ("name", "common", "change"),
    [
        ("medusa", {}, {"depth_decay": 0.5}),
        ("medusa", {}, {"num_heads": 2}),
        ("medusa", {}, {"num_layers": 2}),
        ("medusa", {}, {"own_head": False}),
        ("medusa", {"num_layers": 2}, {"tie_layers": True}),
        ("medusa", {}, {"draft_vocab_size": 30}),
        ("medusa", {"divergence": "jsd"}, {"divergence": "jsd:0.2"}),
        ("medusa", {"divergence": "lk_hybrid"}, {"divergence": "lk_hybrid:1"}),
        ("medusa", {"divergence": "kl_mix"}, {"divergence": "kl_mix:0.5"}),
        ("medusa", {}, {"reduction": "sequence"}),
        ("medusa", {}, {"top_weight": 1.0}),
        ("hydra", {}, {"num_layers": 2}),
        ("hydra", {}, {"prefix_layer": True}),
        ("hydra", {}, {"dropout": 0.5}),
        ("hydra", {}, {"shared_lm_head": True}),
        ("hydra", {}, {"identity_residual": False}),
        ("hydra", {}, {"draft_vocab_size": 30}),
        ("hydra", {"num_layers": 3}, {"tie_layers": True}),
        ("hydra", {}, {"feature_weight": 1.0}),
        ("eagle", {}, {"feature_weight": 0.5}),
        ("eagle", {}, {"divergence_weight": 0.5}),
        ("eagle", {}, {"feature_noise": 0.1}),
        ("eagle", {}, {"steps": 3}),
        ("eagle3", {}, {"layers": [1, 0]}),
        ("eagle3", {}, {"steps": 2}),
        ("eagle3", {}, {"draft_vocab_size": 30}),
        ("eagle3", {}, {"head_from_target": False}),
        ("eagle3", {}, {"layer_from_target": False}),
        ("eagle3", {}, {"norm_before_residual": True}),
        ("eagle3", {}, {"fc_norm": True}),
        ("eagle3", {}, {"norm_output": True}),
        ("dflash", {}, {"block_size": 5}),
        ("dflash", {}, {"draft_layers": 2}),
        ("dflash", {}, {"layers": [1]}),
        ("dflash", {}, {"anchors": 2}),
        ("dflash", {}, {"causal": True}),
        ("dflash", {}, {"from_anchor": True}),
        ("dflash", {}, {"mask_token": 2}),
        ("dflash", {}, {"draft_vocab_size": 30}),
        ("dflash", {}, {"depth_decay": 0.9}),
        ("dflash", {}, {"feature_weight": 1.0}),
        ("dflash", {}, {"feature_noise": 0.1}),
    ],
)
def test_every_option_changes_the_loss(name, common, change, target, traces):
    batch = batch_of(traces)
    before = make(name, target, traces, **common)
    after = make(name, target, traces, **common | change)
    for recipe in (before, after):
        recipe.drafter.train()
    assert abs(loss_of(before, batch).item() - loss_of(after, batch).item()) > 1e-6


def test_recycled_states_are_detached_in_hass_only(target, traces):
    batch = batch_of(traces)
    gradients = []
    for detached in (True, False):
        recipe = make("eagle", target, traces, steps=3)
        recipe.drafter.settings.detach_recycled = detached
        loss_of(recipe, batch).backward()
        gradients.append(recipe.drafter.fc.weight.grad.clone())
    assert not torch.allclose(*gradients)


def test_hass_starts_from_a_trained_head_of_eagle(target, traces):
    """That of model.drafter, or that of a first stage whose loss is EAGLE-1's; one step gives
    another head than HASS's."""
    options = {"steps": 3, "top_weight": 1.0, "base_max_steps": 4, "base_lr": 0.5}
    own, batch = make("eagle", target, traces, **options), batch_of(traces)
    first, second = own.recipe.stages()
    assert (first.start, first.row, second.start, second.row) == (
        "base", "before", "previous", "after"
    )  # fmt: skip
    assert first.overrides == {"max_steps": 4, "lr": 0.5}
    assert own.recipe.stages()[0].objective is first.objective is own.objective
    plain = make("eagle", target, traces, steps=1)
    assert loss_of(own, batch) == loss_of(plain, batch)
    later = trained(own.recipe, own.drafter, stage=1, traces=traces)
    assert later.depth == 3
    assert loss_of(later, batch) - loss_of(own, batch) > 1e-3
    (only,) = recipe_of("eagle", target, plain.drafter, **options).stages()
    assert (only.name, only.start) == (second.name, "base")
    assert only.objective.depth == 3
    assert plain.drafter.settings.detach_recycled


@pytest.mark.parametrize("name", HEADS)
def test_training_lowers_the_loss_and_leaves_the_target_alone(name, target, traces):
    recipe, batch = make(name, target, traces), batch_of(traces)
    before = {n: p.clone() for n, p in target.model.named_parameters()}
    trained = [p for p in recipe.drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    recipe.drafter.train()
    losses = []
    for _ in range(12):
        loss = loss_of(recipe, batch)
        optimizer.zero_grad()
        loss.backward()
        missing = [n for n, p in recipe.drafter.named_parameters() if p.grad is None]
        assert not missing
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for n, p in target.model.named_parameters():
        assert torch.equal(p, before[n])
        assert p.grad is None


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_gradient_checkpointing_changes_nothing(name, target, traces):
    batch, found = batch_of(traces), []
    for checkpointed in (False, True):
        recipe = make(name, target, traces)
        recipe.drafter.train()
        if checkpointed:
            recipe.drafter.gradient_checkpointing_enable()
        loss_of(recipe, batch).backward()
        found.append([p.grad for p in recipe.drafter.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_response_of_one_token_trains_nothing_but_does_not_break(name, target, traces):
    recipe = make(name, target, traces)
    batch = collate([[5, 6, 7]], [[8]], ["target"])
    for total, count, _ in terms_of(recipe, batch):
        assert float(count) == 0
        assert float(total.detach()) == 0
        assert total.requires_grad


# --- draft vocabulary -----------------------------------------------------------------------------


def test_the_draft_vocabulary_counts_responses_not_prompts(target, traces, capsys):
    kept = frequent_tokens(traces, 10, target)
    counts = torch.bincount(
        torch.tensor([t for trace in traces for t in trace.response_ids]), minlength=VOCAB_SIZE
    )
    covered = float(counts[kept].sum() / counts.sum())
    assert f"draft vocabulary: 10 tokens, {covered:.2%} of" in capsys.readouterr().out
    assert float(counts[kept].min()) >= float(counts.sort(descending=True).values[9])
    assert kept.tolist() == sorted(kept.tolist())


def test_of_equally_frequent_tokens_the_lower_id_is_kept(target, traces, capsys):
    row = dataclasses.replace(traces[0], response_ids=[9, 9, 7, 7, 3, 5, 8, VOCAB_SIZE + 4])
    assert frequent_tokens([row], 4, target).tolist() == [3, 5, 7, 9]
    assert "75.00% of the training text" in capsys.readouterr().out  # not of the vocabulary's text


def test_a_small_vocabulary_is_drafted_whole(target, traces):
    assert frequent_tokens(traces, None, target) is None
    assert frequent_tokens(traces, 0, target) is None


def held_out(traces, size):
    """The share of the response tokens that the `size` most frequent ones of other folds cover."""
    folds = defaultdict(Counter)
    for trace in traces:
        folds[zlib.crc32(trace.conversation_id.encode()) % 8].update(trace.response_ids)
    covered = 0
    for fold, own in folds.items():
        others = sum((folds[other] for other in folds if other != fold), Counter())
        ranked = sorted(range(VOCAB_SIZE), key=lambda i: (-others[i], i))
        covered += sum(own[i] for i in ranked[:size])
    return covered / sum(sum(own.values()) for own in folds.values())


def test_text_is_covered_by_the_tokens_of_other_conversations(target, traces, capsys):
    # the second answer to a prompt says nothing of other prompts
    twice = [dataclasses.replace(t, sample_index=i) for t in traces for i in range(2)]
    frequent_tokens(twice, 30, target)
    said = capsys.readouterr().out
    seen = {t for trace in traces for t in trace.response_ids}
    assert len(seen) > 30
    assert f"about {held_out(traces, 30):.2%} of other text of its kind" in said
    alone = [dataclasses.replace(t, response_ids=[i], conversation_id=f"{i}")
             for i, t in enumerate(traces, VOCAB_SIZE - len(traces))]  # fmt: skip
    frequent_tokens(alone, len(alone), target)
    said = capsys.readouterr().out
    assert "100.00% of the training text and about 0.00% of other text" in said


def test_of_a_large_vocabulary_as_much_is_drafted_as_covers_the_text(
    target, traces, monkeypatch, capsys
):
    for name, value in (("WHOLE", 50), ("LEAST", 3), ("STEP", 4), ("ENOUGH", 0.6)):
        monkeypatch.setattr(draft_vocabulary, name, value)
    kept = frequent_tokens(traces, None, target)
    assert len(kept) % 4 == 0
    counts = Counter(t for trace in traces for t in trace.response_ids)
    ranked = sorted(counts.values(), reverse=True)
    shares = [sum(ranked[:n]) / sum(ranked) for n in (len(kept) - 4, len(kept))]
    assert shares[0] < 0.6 <= shares[1]
    assert f"method.draft_vocab_size=0 keeps all {VOCAB_SIZE}" in capsys.readouterr().out
    for name in BY_DEFAULT:
        by_default = make(name, target, traces)
        assert torch.equal(by_default.drafter.kept, kept)
        assert by_default.drafter.output_head(2).weight.shape[0] == len(kept)
        assert by_default.recipe.builds_from_traces
        assert make(name, target, traces, draft_vocab_size=0).drafter.kept is None
    for name, options in (*SHARED.items(), ("dflash", {})):
        whole = make(name, target, traces, **options)
        assert whole.drafter.kept is None
        assert not whole.recipe.builds_from_traces


@pytest.mark.parametrize(("size", "warned"), [(2, True), (VOCAB_SIZE, False)])
def test_a_draft_vocabulary_that_misses_much_of_the_text_is_warned_of(
    size, warned, target, traces, capsys
):
    make("eagle3", target, traces, draft_vocab_size=size)
    said = capsys.readouterr().out
    assert f"draft vocabulary: {size} tokens" in said
    assert (
        "warning: below 98% of the training text or 95% of other text; train on more" in said
    ) == warned


@pytest.mark.parametrize("name", REDUCED)
def test_a_draft_vocabulary_larger_than_the_targets_is_refused(name, target, traces):
    with pytest.raises(UserError, match=r"method\.draft_vocab_size must lie in 1\.\.100"):
        make(name, target, traces, draft_vocab_size=VOCAB_SIZE + 1)


@pytest.mark.parametrize("name", REDUCED)
def test_a_trained_head_keeps_the_tokens_that_it_drafts(name, target, traces):
    trained = make(name, target, traces, draft_vocab_size=20).drafter
    before = {key: value.clone() for key, value in trained.state_dict().items()}
    for size in (None, 20):
        recipe = recipe_of(name, target, trained, draft_vocab_size=size)
        recipe.widen(trained, traces)
        assert recipe.objective.is_reduced
        torch.testing.assert_close(trained.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(UserError, match="be null, or one of 20 to 100"):
        recipe_of(name, target, trained, draft_vocab_size=19)


@pytest.mark.parametrize("size", [30, VOCAB_SIZE, 0])
@pytest.mark.parametrize("name", REDUCED)
def test_a_trained_head_can_draft_further_tokens(name, size, target, traces):
    """Those of its own that the text lacks stay; logits of the known ones do not change."""
    trained = make(name, target, traces, draft_vocab_size=20).drafter.eval()
    rare = max(set(range(VOCAB_SIZE)) - {t for trace in traces for t in trace.response_ids})
    trained.kept[-1] = rare
    trained.kept.copy_(trained.kept.sort().values)
    known, batch = trained.kept.clone(), batch_of(traces)
    outputs = outputs_of(make(name, target, traces), batch)
    before = trained.draft_logits(batch.input_ids, outputs, 2)
    recipe = recipe_of(name, target, trained, draft_vocab_size=size)
    assert recipe.objective.is_reduced == (size == 30)
    recipe.widen(trained, traces)
    assert trained.draft_vocab_size == (size or VOCAB_SIZE)
    after = trained.draft_logits(batch.input_ids, outputs, 2)
    torch.testing.assert_close(after[..., known], before[..., known])
    assert torch.isfinite(after).sum(-1).unique().tolist() == [size or VOCAB_SIZE]
    if size == 30:
        counts = Counter(t for trace in traces for t in trace.response_ids)
        others = set(trained.kept.tolist()) - set(known.tolist())
        left_out = set(range(VOCAB_SIZE)) - set(trained.kept.tolist())
        assert min(counts[t] for t in others) >= max(counts[t] for t in left_out)
        assert rare in trained.kept
    loaded = trained.fresh()
    loaded.load_state_dict(trained.state_dict())
    torch.testing.assert_close(loaded.draft_logits(batch.input_ids, outputs, 2), after)


@pytest.mark.parametrize("name", REDUCED)
def test_a_new_row_has_moved_as_the_known_ones_have(name, target, traces):
    """From the target's row by one affine map, which few rows give nearly and many exactly."""
    torch.manual_seed(2)
    trained = make(name, target, traces, draft_vocab_size=80).drafter
    width = target.hidden_size
    moved, shift = 0.2 * torch.randn(width, width), torch.randn(width)
    whole = target.head.weight[:VOCAB_SIZE].detach()
    expected = whole + whole @ moved + shift
    with torch.no_grad():
        for layer in trained.output_layers():
            layer.weight.copy_(expected[trained.kept])
            if layer.bias is not None:
                layer.bias.fill_(0.5)
    recipe = recipe_of(name, target, trained, draft_vocab_size=0)
    recipe.widen(trained, traces)
    for layer in trained.output_layers():
        error = (layer.weight - expected).norm() / (expected - whole).norm()
        assert error < 0.02
        if layer.bias is not None:
            torch.testing.assert_close(
                layer.bias, torch.full((VOCAB_SIZE,), 0.5), atol=0.01, rtol=0
            )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("medusa", {"own_head": False}), ("medusa", {"num_layers": 2}),
        ("hydra", {"shared_lm_head": True}), ("hydra", {"num_layers": 2}),
        ("hydrapp", {"num_layers": 2}), ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"norm_output": True}),
    ],
)  # fmt: skip
def test_a_trained_head_keeps_its_network(name, options, target, traces):
    """What it has may be left out or said; another network is refused, not ignored."""
    usual = make(name, target, traces)
    (key, value), *_ = options.items()
    with pytest.raises(UserError, match=rf"model\.drafter has {key}=.*, got method\.{key}={value}"):
        recipe_of(name, target, usual.drafter, **options)
    other = make(name, target, traces, **options).drafter
    recipe_of(name, target, other, **options)
    recipe_of(name, target, other)


@pytest.mark.parametrize("name", ["medusa", "medusa2", "hydra", "hydrapp"])
def test_the_published_preset_takes_published_heads(name, target):
    """A head of one block has nothing to tie, and no file says how its weights began."""
    module = importlib.import_module(f"recipes.{name}")
    preset = load_yaml(Path(f"recipes/{name}.published.yaml"))["method"]
    config = module.Config(**preset)
    built = module.Recipe(config, target).build([]).settings
    tied = {"tie_layers": built.num_layers > 2}  # as their file shows by repeated layers
    untied = dataclasses.replace(built, tie_layers=False)
    if name.startswith("hydra"):
        tied |= {"identity_residual": True, "dropout": 0.0}  # which no file holds
    kind = HydraDrafter if name.startswith("hydra") else MedusaDrafter
    head = kind.build(target, dataclasses.replace(built, **tied))
    module.Recipe(config, target, head)
    if name == "hydrapp":
        assert head.settings.dropout == head.heads[0].dropout == config.dropout == 0.2
        with pytest.raises(UserError, match=r"set method\.tie_layers=False"):
            module.Recipe(config, target, HydraDrafter.build(target, untied))


@pytest.mark.parametrize("name", REDUCED)
def test_acceptance_is_measured_over_the_whole_vocabulary(name, target, traces):
    """A reduced head may fit its own tokens well; what it leaves out still counts."""
    recipe = make(name, target, traces, draft_vocab_size=20)
    batch = batch_of(traces)
    outputs = outputs_of(recipe, batch)
    metrics = recipe.loss(batch, outputs, 0).metrics
    p = target.outputs(batch.input_ids).logits[..., :VOCAB_SIZE].softmax(-1)
    q = recipe.drafter.draft_logits(batch.input_ids, outputs, 1).softmax(-1)
    where = supervised(batch.loss_mask, 1)
    expected = torch.minimum(p, q).sum(-1)[:, :-1][where]
    total, number = metrics["alpha_1"]
    assert number == int(where.sum())
    torch.testing.assert_close(total, expected.sum(), rtol=1e-4, atol=1e-5)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("eagle3", {"layers": [0, 2]}, r"layer id must lie in 0\.\.1"),
        ("eagle3", {"layers": [1, 1]}, "distinct"),
        ("eagle3", {"layers": []}, "collide on a target of 2 layers"),
        ("eagle3", {"steps": 0}, r"method\.steps must be >= 1"),
        ("eagle", {"base_max_steps": 0}, r"method\.base_max_steps must be >= 1"),
        ("eagle", {"base_lr": 0.0}, r"method\.base_lr must be > 0"),
        ("eagle", {"feature_weight": -1.0}, r"method\.feature_weight must be >= 0"),
        ("medusa", {"num_heads": 0}, r"method\.num_heads must be >= 1"),
        ("medusa", {"divergence": "nonsense"}, "method.divergence must be one of"),
        ("medusa", {"reduction": "row"}, r"method\.reduction must be"),
        ("medusa", {"depth_decay": 0.0}, r"method\.depth_decay must be > 0"),
        ("hydra", {"dropout": 1.0}, "dropout"),
        ("medusa", {"draft_vocab_size": -1}, r"method\.draft_vocab_size must be >= 0, got -1"),
        (
            "medusa",
            {"draft_vocab_size": 30, "own_head": False},
            r"method\.draft_vocab_size must be 0 or null where method\.own_head is false",
        ),
        (
            "hydra",
            {"draft_vocab_size": 30, "shared_lm_head": True},
            r"method\.draft_vocab_size must be 0 or null where method\.shared_lm_head is true",
        ),
    ],
)
def test_bad_settings_are_refused(name, options, says, target, traces):
    with pytest.raises(UserError, match=says):
        make(name, target, traces, **options)


def test_a_drafter_of_another_kind_or_size_is_refused(target, traces):
    medusa = make("medusa", target, traces, num_heads=2)
    eagle, eagle3 = make("eagle", target, traces), make("eagle3", target, traces)
    with pytest.raises(UserError, match="kind 'eagle'"):
        recipe_of("medusa", target, eagle.drafter, num_heads=2)
    with pytest.raises(UserError, match=r"method\.num_heads=2"):
        recipe_of("medusa", target, medusa.drafter)
    with pytest.raises(UserError, match="of kind 'eagle3', recipe=eagle trains 'eagle'"):
        recipe_of("eagle", target, eagle3.drafter)
    with pytest.raises(UserError, match="of kind 'eagle', recipe=eagle3 trains 'eagle3'"):
        recipe_of("eagle3", target, eagle.drafter)
    other = make("eagle3", target, traces, layers=[1])
    with pytest.raises(UserError, match=r"reads the layers \[1\]"):
        recipe_of("eagle3", target, other.drafter)
    assert isinstance(other.drafter, EagleDrafter)


def test_a_loss_may_see_the_states_of_all_depths_at_once(target, traces):
    """What an override of `of_depths` keeps is what the depths are scored from, and its own term
    reaches them."""
    kept = []

    class AllDepths(HeadObjective):
        def denominators(self, batch, step):
            return super().denominators(batch, step) | {"all": 1.0}

        def of_depths(self, *given):
            *given, unrolled = given
            states = list(unrolled)
            kept.append(torch.stack(states))  # [depth, B, L, d]
            output = super().of_depths(*given, iter(states))
            output.terms["all"] = Term(kept[-1].square().mean(), 1.0, 2.0)
            return output

    class Recipe(eagle3.Recipe):
        def make_objective(self):
            return AllDepths(self.config, self.target, self.depth, self.captures, self.is_reduced)

    plain, batch = make("eagle3", target, traces), batch_of(traces)
    own = trained(Recipe(plain.recipe.config, target), plain.drafter, stage=0, traces=traces)
    assert list(own.denominators(batch, 0)) == [*plain.denominators(batch, 0), "all"]
    found = own.loss(batch, outputs_of(own, batch), 0)
    assert len(kept[-1]) == own.depth > 1
    usual = plain.loss(batch, outputs_of(plain, batch), 0)
    for name, term in usual.terms.items():
        assert torch.equal(found.terms[name].total, term.total)
    found.terms["all"].total.backward()
    assert plain.drafter.fc.weight.grad.any()
