"""Several texts in a row: the same losses as a text a row, whatever the recipe and the store."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from accelerate import Accelerator

import train
from data.batches import Batches, collate, preview
from data.cached_logits import CachedLogits
from data.features import write_features
from data.features_layout import FeaturesPlan
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.packing import PackedTraces
from data.prompts import Prompt
from data.shares import TextShares
from target.shared_text import TextGroup
from tests.helpers.commands import command, read_jsonl
from tests.helpers.heads import eagle3_word
from tests.helpers.losses import listed, ordered
from tests.helpers.objectives import trained
from tests.helpers.tiny import ARCHITECTURES
from trainer.errors import UserError

ROW = 64
HEADS = ("medusa", "hydra", "hydrapp", "eagle", "eagle3", "dflash", "dspark", "domino")
OPTIONS = {"eagle3": {"layers": [0, 1], "steps": 4}, "hydrapp": {"dropout": 0.0},
           "eagle": {"steps": 3, "feature_noise": 0.0},
           "dflash": {"block_size": 5, "draft_layers": 1, "anchors": 4},
           "dspark": {"block_size": 4, "draft_layers": 1, "anchors": 4, "correction_rank": 8},
           "domino": {"block_size": 5, "draft_layers": 1, "anchors": 4, "correction_rank": 8,
                      "correction_width": 8}}  # fmt: skip


def texts_of(target, folder, count=16, **options):
    """Prompts of one token among them: the texts before lie within reach of every depth."""
    prompts = [
        Prompt(f"Question {i}: " if i % 3 else "Q", None, "yes.", "test", "", f"c{i}")
        for i in range(count)
    ]
    plan = GenerationPlan("test", tuple(prompts), (1.0,), max_new_tokens=14, **options)
    made = generate_traces(target, plan, folder, batch_size=16, rows_per_shard=16)
    return [
        t if options else dataclasses.replace(t, response_ids=t.response_ids[: 4 + t.index % 9])
        for t in made
    ]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    return texts_of(target, tmp_path_factory.mktemp("traces"))


def packed(traces, rows=3, tokens=ROW, **options):
    return PackedTraces(traces, "target", tokens, rows, seed=0, **options)


def one_a_row(batch):
    """The same texts."""
    return collate(batch.prompts, batch.responses, batch.sources, batch.index)


def make(name, target, traces, **options):
    module = importlib.import_module(f"recipes.{name}")
    recipe = module.Recipe(module.Config(**(OPTIONS.get(name, {}) | options)), target)
    torch.manual_seed(0)
    drafter = recipe.build(traces).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return trained(recipe, drafter, traces=traces, new=16)


def assert_same_terms(recipe, packed, plain, outputs=None):
    found = []
    for batch in (packed, plain):
        request = recipe.target_request(batch, 0)
        given = outputs(batch) if outputs else None
        if request is not None and given is None:
            given = recipe.target.outputs(
                batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits,
                project_later=True,
            )  # fmt: skip
        terms = listed(recipe.loss(batch, given, 0).terms)
        assert [float(n) for _, n, _ in terms] == ordered(recipe.denominators(batch, 0))
        found.append(terms)
    assert len(packed.prompts) > len(packed.input_ids)
    for (a, n, w), (b, m, v) in zip(*found, strict=True):
        assert (float(n), w) == (float(m), v)
        assert float(n) > 0
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_lose_what_they_lose_with_a_text_a_row(name, reduction, target, traces):
    recipe = make(name, target, traces, reduction=reduction)
    batch = packed(traces).at(0)
    assert_same_terms(recipe, batch, one_a_row(batch))


@pytest.mark.parametrize("compact", [0.0, 2.0])
def test_so_does_eagle_over_all_columns_or_the_trained_ones(compact, target, traces, monkeypatch):
    monkeypatch.setattr("drafters.eagle.COMPACT_BELOW", compact)
    recipe = make("eagle3", target, traces)
    batch = packed(traces).at(0)
    assert_same_terms(recipe, batch, one_a_row(batch))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_so_does_a_causal_lm_of_every_architecture(name, tiny_target, tmp_path):
    target = tiny_target(name)
    recipe = make("distillspec", target, [])
    batch = packed(texts_of(target, tmp_path)).at(0)
    assert_same_terms(recipe, batch, one_a_row(batch))


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("divergence", ["fkl", "tvd_pp", "ce_hard"])
def test_so_does_distillation_by_every_kind_of_divergence(divergence, reduction, target, traces):
    recipe = make("distillspec", target, [], divergence=divergence, reduction=reduction)
    batch = packed(traces).at(0)
    assert_same_terms(recipe, batch, one_a_row(batch))


def test_stored_states_and_kept_logits_lie_where_the_texts_do(target, traces, tmp_path):
    recipe = make("eagle3", target, traces)
    batch = packed(traces).at(0)
    layers = recipe.target_request(batch, 0).layers
    store = write_features(target, traces, FeaturesPlan(layers, "fp32"), tmp_path, batch_size=4)
    assert_same_terms(recipe, batch, one_a_row(batch), store.outputs)
    plan = FeaturesPlan(layers, "fp32", summary=True)
    store = write_features(target, traces, plan, tmp_path / "more", batch_size=4)
    recipe = make("eagle3", target, traces, draft_vocab_size=30)
    assert_same_terms(recipe, batch, one_a_row(batch), store.outputs)
    kept = CachedLogits(target, traces, ["target"])
    assert_same_terms(make("distillspec", target, []), batch, one_a_row(batch), kept.outputs)


def test_so_do_the_laws_of_a_compressed_teacher(target, tmp_path):
    traces = texts_of(target, tmp_path, teacher_top_k=4, teacher_samples=3)
    recipe = make("distillspec", target, [], divergence="fkl")
    batch = packed(traces, teacher=True).at(0)
    plain = dataclasses.replace(one_a_row(batch), teacher=batch.teacher)
    assert_same_terms(recipe, batch, plain)


# --- rows ----------------------------------------------------------------------------------------


def test_every_text_once_an_epoch_whole_and_without_overlap(traces):
    batches = packed(traces, rows=1)
    seen, row = [], 0
    while len(seen) < 3 * len(traces):
        batch = batches.at(row)
        for text, (_, first) in enumerate(batch.starts()):
            whole = batch.prompts[text] + batch.responses[text]
            span = slice(first, first + len(whole))
            assert batch.input_ids[0, span].tolist() == whole
            assert batch.position_ids[0, span].tolist() == list(range(len(whole)))
            assert (batch.document_ids[0, span] == text).all()
            begin = first + len(batch.prompts[text])
            assert batch.loss_mask[0, begin : span.stop].all()
            seen.append(tuple(whole))
        used = sum(len(p) + len(r) for p, r in zip(batch.prompts, batch.responses, strict=True))
        assert (batch.document_ids >= 0).sum() == used
        assert batch.num_supervised == sum(map(len, batch.responses))
        row += 1
    each = sorted(tuple(t.prompt_ids + t.response_ids) for t in traces)
    epochs = [seen[i : i + len(traces)] for i in range(0, len(seen), len(traces))]
    assert all(sorted(epoch) == each for epoch in epochs[:3])
    assert epochs[0] != epochs[1]


def test_a_row_is_a_function_of_its_number(traces):
    whole = [packed(traces, rows=4).at(i) for i in range(12)]
    again = packed(traces, rows=4)
    for i in (11, 0, 5):
        assert torch.equal(again.at(i).input_ids, whole[i].input_ids)
    for rank in (0, 1):
        half = packed(traces, rows=2, rank=rank, world=2)
        for i in (7, 2):
            part = whole[i].input_ids[2 * rank : 2 * rank + 2]
            assert torch.equal(half.at(i).input_ids, part)


def test_the_look_before_step_one_shows_the_first_text(traces, target):
    batch = packed(traces).at(0)
    shown = preview(batch, target.tokenizer)
    assert f"{len(batch.responses[0])} trained" in shown


def test_a_row_too_short_for_the_longest_text_is_refused(traces):
    longest = max(len(t.prompt_ids) + len(t.response_ids) for t in traces)
    packed(traces, tokens=longest)
    with pytest.raises(UserError, match=f"set it to {longest} or more"):
        packed(traces, tokens=longest - 1)


# --- texts that processes share ------------------------------------------------------------------


@pytest.mark.parametrize("in_rows", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_processes_that_share_texts_lose_together_what_one_loses(
    name, in_rows, target, traces, monkeypatch
):
    """Terms, gradients and numbers of tokens add up to those of the whole texts."""
    monkeypatch.setattr("target.shared_text.BLOCK", 5)
    recipe = make(name, target, traces)
    source = packed(traces) if in_rows else Batches(traces, {"target": 1.0}, 4, seed=0)
    whole, *parts = (source, *(TextShares(source, TextGroup(part, 3)) for part in range(3)))
    found = []
    for batch in (whole.at(0), *(share.at(0) for share in parts)):
        outputs = target.outputs(
            batch.input_ids, batch.position_ids,
            layers=recipe.target_request(batch, 0).layers, logits=False,
        )  # fmt: skip
        terms = listed(recipe.loss(batch, outputs, 0).terms)
        assert [float(n) for _, n, _ in terms] == ordered(recipe.denominators(batch, 0))
        recipe.drafter.zero_grad()
        sum(weight * total for total, _, weight in terms).backward()
        gradients = [p.grad.clone() for p in recipe.drafter.parameters() if p.grad is not None]
        values = [torch.stack([x.detach(), torch.as_tensor(float(n))]) for x, n, _ in terms]
        found.append((batch.num_supervised, [*values, *gradients]))
    (tokens, expected), *shares = found
    assert tokens == sum(n for n, _ in shares)
    assert all(n < tokens for n, _ in shares)
    for one, *of_shares in zip(expected, *(numbers for _, numbers in shares), strict=True):
        torch.testing.assert_close(sum(of_shares), one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("teacher", ["live", "compressed"])
@pytest.mark.parametrize("in_rows", [True, False])
def test_so_do_processes_that_train_a_draft_model(
    teacher, in_rows, target, traces, tmp_path, monkeypatch
):
    """Each reads the rows alone here; `tests/target/test_shared_text.py` reads them together."""
    monkeypatch.setattr("target.shared_text.BLOCK", 5)
    monkeypatch.setattr(TextGroup, "reading", lambda group, *rows: Alone(*rows))
    compressed = teacher == "compressed"
    if compressed:
        traces = texts_of(target, tmp_path, teacher_top_k=4, teacher_samples=3)
    options = {"divergence": "ce_soft" if compressed else "tvd", "teacher": teacher}
    recipe = make("distillspec", target, traces, draft_hidden_size=16, control=False, **options)
    source = (
        packed(traces, teacher=compressed) if in_rows
        else Batches(traces, {"target": 1.0}, 4, seed=0, teacher=compressed)
    )  # fmt: skip
    found = []
    for group in (None, *(TextGroup(part, 3) for part in range(3))):
        batch = TextShares(source, group).at(0)
        if group is not None:  # it computes the states of its own columns alone
            assert not bool((batch.supervised() & ~batch.own[:-1]).any())
        outputs = None
        if not compressed:
            outputs = target.outputs(batch.input_ids, batch.position_ids, project_later=True)
        [(total, count, _)] = listed(recipe.loss(batch, outputs, 0).terms)
        assert [float(count)] == ordered(recipe.denominators(batch, 0)) == [batch.num_supervised]
        recipe.drafter.zero_grad()
        total.backward()
        gradients = [p.grad.clone() for p in recipe.drafter.parameters() if p.grad is not None]
        found.append([total.detach(), torch.tensor(float(count)), *gradients])
    for one, *shares in zip(*found, strict=True):
        torch.testing.assert_close(sum(shares), one, rtol=1e-4, atol=1e-5)


@dataclasses.dataclass
class Alone:
    """Rows that a process reads without the others of its group."""

    ids: torch.Tensor
    position_ids: torch.Tensor

    def states(self, model):
        given = {"input_ids": self.ids, "position_ids": self.position_ids, "use_cache": False}
        return model.model(**given).last_hidden_state


# --- a run ---------------------------------------------------------------------------------------


def words(folder, target, recipe, *given):
    few = ("trainer.max_steps=4", "trainer.log_every=1", "eval.num_prompts=2",
           "eval.timing_prompts=0", f"recipe={recipe}", *given)  # fmt: skip
    found = [w for w in command(folder, target, *few) if not w.startswith("method.")]
    return [*found, *(["method.draft_hidden_size=16"] if recipe == "distillspec" else [])]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["distillspec", "medusa"])
def test_a_run_trains_on_several_texts_a_row(recipe, tmp_path, tiny_folder):
    tokens_seen = {}
    for name, tokens in (("plain", 0), ("packed", 200)):
        given = (f"run.dir={tmp_path / name}", f"trainer.pack_tokens={tokens}",
                 "trainer.batch_size=1")  # fmt: skip
        assert train.main(words(tmp_path, tiny_folder("llama"), recipe, *given)) == 0
        rows = read_jsonl(tmp_path / name / "metrics.jsonl")
        tokens_seen[name] = [row["num_tokens"] for row in rows if "loss" in row][-1]
    assert tokens_seen["packed"] > 2 * tokens_seen["plain"]


@pytest.mark.parametrize(
    ("recipe", "tokens", "words_of_it"),
    [
        ("distillspec", 64, "stored texts of one source"),
        ("gto", 64, "recipe=gto reads a text a row"),
        ("osd", 64, "recipe=osd reads a text a row"),
        ("medusa", -1, "trainer.pack_tokens must lie in 0.."),
        ("medusa", 3, "trainer.pack_tokens=3 holds no text of"),
    ],
)
def test_what_cannot_be_packed_is_said_in_one_line(
    recipe, tokens, words_of_it, tmp_path, tiny_folder, capsys
):
    target = tiny_folder("llama")
    head = [eagle3_word(tmp_path, target)] if recipe == "gto" else []
    given = words(tmp_path, target, recipe, f"trainer.pack_tokens={tokens}", *head)
    given += ["trainer.lr_warmup_steps=0"]
    given += ["method.algorithm=on_policy_gkd"] if recipe == "distillspec" else []
    assert train.main(given) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error:")]
    assert words_of_it in line


@pytest.mark.parametrize(
    ("size", "recipe", "given", "words_of_it"),
    [
        (2, "medusa", [], "divide the number of processes, 1, got 2"),
        (0, "medusa", [], "be >= 1, got 0"),
        (2, "osd", [], "be 1 for a stage that does not share texts"),
        (
            2,
            "distillspec",
            ["method.algorithm=on_policy_gkd"],
            "be 1 for a stage that does not share texts",
        ),
        (2, "medusa", ["method.reduction=sequence"], "be 1 for a stage that does not share texts"),
    ],
)
def test_texts_that_cannot_be_shared_are_named(
    size, recipe, given, words_of_it, tmp_path, tiny_folder, capsys, monkeypatch
):
    if "divide" not in words_of_it:
        monkeypatch.setattr(Accelerator, "num_processes", 2)
    given = [*words(tmp_path, tiny_folder("llama"), recipe), *given]
    assert train.main([*given, f"trainer.context_parallel_size={size}"]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error:")]
    assert f"trainer.context_parallel_size must {words_of_it}" in line
