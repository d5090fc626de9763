"""GTO: which positions it takes, what its loss is, what it trains, and what it refuses."""

from __future__ import annotations

import copy
import errno
import functools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import train
from data.batches import collate
from drafters.layers import Shared
from drafters.load import load_drafter
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.trees.tree import TokenTree
from eval.tree_reward import AGGREGATIONS
from phases import shared
from phases.pipeline import resolve
from recipes import eagle, eagle3, gto
from recipes.common.reference_rewards import (
    ReferenceRewards,
    check_same_network,
)
from recipes.common.tree_loss import Paths, advantages, tree_loss
from recipes.gto import OF_BASE, Config, Recipe, TreeObjective, settings_of_base
from target.model import Target
from tests.helpers.commands import TWO, command, finish, read_jsonl, start
from tests.helpers.eagle import build_eagle, eagle_settings
from tests.helpers.heads import PROMPTS, eagle3_word, fitted, plain_texts, randomised
from tests.helpers.losses import listed, ordered
from tests.helpers.objectives import trained as prepared
from tests.recipes.test_heads import outputs_of
from trainer.errors import UserError

SMALL = {"num_groups": 3, "group_size": 3, "tree": "dynamic:8:3:3"}
BASE = {"max_steps": 3, "batch_size": 4, "lr": 1e-3}
KEPT_SIZE = 70


@pytest.fixture(scope="module", autouse=True)
def short_base():
    """Stage base in a few steps, and a token loss of EAGLE-1 without noise."""
    of_preset = gto.of_preset

    def plain(name, preset):
        module, config = of_preset(name, preset)
        config.method.feature_noise = 0.0
        return module, config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gto, "settings_of_base", lambda config: dict(BASE))
        patch.setattr(gto, "of_preset", plain)
        yield


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def batch(target):
    """The target's own greedy texts."""
    found = plain_texts(target)
    return collate(PROMPTS, found, ["target"] * len(found))


def head(target, base="eagle3", kept=None, **flags):
    captures = [0, 1] if base == "eagle3" else ["final_norm"]
    version = 3 if base == "eagle3" else 1
    settings = eagle_settings(version, captures, target.hidden_size, **flags)
    torch.manual_seed(0)
    return build_eagle(target, settings, kept=kept)


@functools.cache
def trained(target_name, base, size):
    """A head that is right in many places and wrong in some."""
    target = Target.load(target_name)
    kept = None if size is None else torch.arange(4, 4 + size)
    return fitted(randomised(head(target, base, kept), 0.05), target, 3, steps=30)


def tuned(target, *, moved=0.03, size=None, base="eagle3", **options):
    """In stage gto; `moved`: how far the drafter has gone from the reference; `size`: of its
    vocabulary."""
    drafter = copy.deepcopy(trained(target.name, base, size))
    drafter.shared = Shared(target)
    recipe = Recipe(Config(**SMALL | options), target, drafter)
    found = prepared(recipe, drafter)
    if moved:
        found.drafter = randomised(drafter, moved, 5)
    return found


def terms_of(recipe, batch):
    output = recipe.loss(batch, outputs_of(recipe, batch), 0)
    terms = listed(output.terms)
    assert [float(n) for _, n, _ in terms] == ordered(recipe.denominators(batch, 0))
    return terms


def tree_term(recipe, batch):
    total, groups, weight = terms_of(recipe, batch)[-1]
    return weight * total / groups


def metrics_of(recipe, batch):
    found = recipe.loss(batch, outputs_of(recipe, batch), 0).metrics
    return {name: float(total) / float(count) for name, (total, count) in found.items()}


# --- positions --------------------------------------------------------------------------------


def trees_of(target, **options) -> TreeObjective:
    """Without a token loss: for what does not depend on it."""
    return TreeObjective(Config(**SMALL | options), target, None)


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 12, 40])
def test_groups_are_runs_inside_of_the_answer_that_do_not_meet(length, target, capsys):
    trees = trees_of(target, num_groups=2)
    room = length - 2
    for seed in range(20):
        ids = torch.randint(4, 90, (6 + length,), generator=torch.Generator().manual_seed(seed))
        starts = trees.groups(ids.tolist(), 6)
        assert len(starts) == min(2, room // 3)
        lengths = trees.lengths(starts)
        assert len(set(lengths)) == 3 * len(starts)
        for first in starts:
            assert list(range(first, first + 3)) == [n for n in lengths if first <= n < first + 3]
        # the last token of a prefix and the two behind it are the answer's: no border is crossed
        assert all(n - 1 >= 6 and n + 1 < 6 + length for n in lengths)
        assert starts == trees.groups(ids.tolist(), 6)
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warned) == (room // 3 < 2)  # once
    if warned:
        assert f"of {length} tokens has room for {room // 3} of 2 groups of 3" in warned[0]


def test_different_texts_have_different_positions_and_all_of_them_come_up(target):
    trees = trees_of(target)
    found = set()
    for seed in range(60):
        ids = torch.randint(4, 90, (18,), generator=torch.Generator().manual_seed(seed)).tolist()
        found |= set(trees.lengths(trees.groups(ids, 6)))
    assert found == set(range(7, 17))


def test_no_tree_reaches_past_the_targets_context(target):
    trees = trees_of(target, num_groups=100)
    ids = [5] * target.context
    assert max(trees.lengths(trees.groups(ids, 6))) + trees.shape.depth <= target.context


def test_rows_without_room_and_without_an_answer_count_nothing(target, batch):
    recipe = tuned(target)
    prompts, responses = [*batch.prompts, [5] * 4, [6] * 30], [*batch.responses, [7, 8, 9], []]
    wide = collate(prompts, responses, ["target"] * len(prompts))
    value, alone = (terms_of(recipe, one)[-1] for one in (wide, batch))
    assert value[1] == alone[1] == 15
    torch.testing.assert_close(value[0], alone[0])
    none = collate([[5] * 4], [[7, 8, 9]], ["target"])
    terms = terms_of(recipe, none)
    assert (terms[-1][0].item(), terms[-1][1]) == (0, 0)
    sum(total for total, _, _ in terms).backward()


# --- the loss ---------------------------------------------------------------------------------


def law_along(drafter, target, ids, path):
    """Sum of log q over a path, from the very law that is drafted: `draft_logits` of the prefix and
    the path as a text. With a gradient."""
    whole = torch.tensor([ids + path])
    outputs = target.outputs(whole, layers=drafter.target_layers, logits=False)
    total = torch.zeros(())
    for depth, token in enumerate(path, start=1):
        logits = drafter.draft_logits(whole, outputs, depth)[0, len(ids) - 2 + depth]
        total = total + logits.log_softmax(-1)[token]
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": KEPT_SIZE},
        {"base": "eagle"},
        {"epsilon": 1e-3},
    ],
)
def test_the_tree_loss_is_the_clipped_ratio_along_the_paths(options, target, batch):
    """Prefix by prefix, from the drafted law, with its gradient; lengths of paths differ."""
    recipe = tuned(target, **options)
    drafter, reference = recipe.drafter, recipe.reference
    epsilon = recipe.config.epsilon
    total = terms_of(recipe, batch)[-1][0]
    drafter.zero_grad()
    total.backward()
    got = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()

    paths, rewards, _ = recipe.paths(recipe.drafter, recipe.texts(batch), batch.input_ids.device)
    advantage = advantages(rewards.view(-1, 3), 1e-6)[0].flatten()
    assert len(set(paths.lengths.tolist())) > 1
    wanted = torch.zeros(())
    for i, length in enumerate(paths.lengths.tolist()):
        ids = batch.input_ids[paths.rows[i], : paths.starts[i]].tolist()
        path = paths.tokens[i, :length].tolist()
        with torch.no_grad():
            former = law_along(reference, target, ids, path)
        ratio = ((law_along(drafter, target, ids, path) - former) / max(length, 1)).exp()
        bounded = ratio.clamp(1 - epsilon, 1 + epsilon)
        wanted = wanted - torch.minimum(ratio * advantage[i], bounded * advantage[i]) / 3
    wanted.backward()
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)
    largest = max(float(p.grad.abs().max()) for p in drafter.parameters())
    assert largest > 1e-3
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-4 * largest)
    clipped = metrics_of(recipe, batch)["clipped"]
    assert clipped > 0.3 if epsilon < 0.01 else 0 <= clipped < 0.3
    assert all(p.grad is None for p in reference.parameters())


def simple_loss(target, batch, tokens, lengths, advantage, epsilon=0.2):
    recipe = tuned(target)
    outputs = outputs_of(recipe, batch)
    paths = Paths(
        torch.ones(len(lengths), dtype=torch.long), torch.full((len(lengths),), 18),
        torch.tensor(tokens), torch.tensor(lengths),
    )  # fmt: skip
    recipe.drafter.zero_grad()
    total, clipped = tree_loss(
        recipe.drafter, recipe.reference, batch.input_ids, outputs, paths,
        torch.tensor(advantage), epsilon,
    )  # fmt: skip
    total.backward()
    grads = [p.grad for p in recipe.drafter.parameters() if p.grad is not None]
    return total.item(), sum(float(g.abs().sum()) for g in grads), clipped


def test_an_empty_path_has_ratio_one_and_no_gradient(target, batch):
    value, gradient, clipped = simple_loss(target, batch, [[0, 0, 0]], [0], [1.5])
    assert (value, gradient, clipped.tolist()) == (-1.5, 0.0, [False])


def test_the_ratio_is_the_mean_over_the_path_and_not_its_product(target, batch):
    path = [7, 8, 9]
    value, gradient, _ = simple_loss(target, batch, [path], [3], [-1.0], epsilon=0.99)
    recipe, ids = tuned(target), batch.input_ids[1, :18].tolist()
    with torch.no_grad():
        now, then = (
            law_along(one, target, ids, path) for one in (recipe.drafter, recipe.reference)
        )
    assert abs(now - then) > 0.05
    assert value == pytest.approx(((now - then) / 3).exp().item(), rel=1e-4)
    assert gradient > 0


def test_advantages_are_standardised_by_the_groups_population_and_flat_ones_are_zero():
    rewards = torch.tensor([[1.0, 2.0, 3.0], [0.1, 0.1, 0.1], [5.0, 5.0, 8.0]])
    got, flat = advantages(rewards, 1e-6)
    assert flat.tolist() == [False, True, False]
    assert got[1].tolist() == [0.0, 0.0, 0.0]
    for row in (0, 2):
        wanted = (rewards[row] - rewards[row].mean()) / rewards[row].std(unbiased=False)
        torch.testing.assert_close(got[row], wanted, rtol=1e-5, atol=1e-5)
    plain, _ = advantages(rewards, None)
    assert torch.equal(plain, rewards)


@pytest.mark.parametrize("base", ["eagle3", "eagle"])
def test_at_the_first_step_only_the_token_loss_is_left(base, target, batch):
    recipe = tuned(target, moved=0, base=base)
    module = {"eagle3": eagle3, "eagle": eagle}[base]
    options = {"layers": [0, 1]} if base == "eagle3" else {"feature_noise": 0.0}
    head = module.Recipe(module.Config(**options), target)
    head = prepared(head, recipe.drafter)
    *terms, (total, _, weight) = terms_of(recipe, batch)
    alone = listed(head.loss(batch, outputs_of(head, batch), 0).terms)
    for (a, n, w), (b, m, v) in zip(terms, alone, strict=True):
        assert torch.equal(a, b)
        assert (float(n), w) == (float(m), v)
    assert (total.item(), weight) == (0.0, 0.5)
    total.backward()
    assert not any(p.grad is not None and p.grad.any() for p in recipe.drafter.parameters())
    found = metrics_of(recipe, batch)
    assert (found["reward"], found["flat_groups"], found["clipped"]) == (0.0, 1.0, 0.0)


def test_in_stage_base_there_is_nothing_but_the_token_loss(tiny_target):
    target = tiny_target("llama", layers=8)
    texts = plain_texts(target)
    batch = collate(PROMPTS, texts, ["target"] * len(texts))
    recipe = Recipe(Config(**SMALL), target)
    drafter = recipe.build([])
    first = prepared(recipe, drafter, stage=0)
    assert first.drafter is drafter
    assert len(terms_of(first, batch)) == 5  # one for each unrolled step
    usual = object()
    assert first.evaluated(usual, []) is usual  # trees do not choose there


@pytest.fixture(scope="module")
def known_terms():
    return {}


@pytest.mark.parametrize(
    ("common", "change"),
    [
        *(({}, {"aggregation": name}) for name in AGGREGATIONS if name != "node_sum"),
        ({"aggregation": "lse"}, {"eta": 3.0}),
        ({"aggregation": "lse_mean"}, {"eta": 3.0}),
        ({}, {"debias": False}),
        ({}, {"standardize": False}),
        ({"standardize": False}, {"debias": False}),
        ({"debias": False}, {"standardize": False}),
        ({}, {"epsilon": 0.01}),
        ({}, {"omega": 0.25}),
        ({}, {"num_groups": 1}),
        ({}, {"group_size": 2}),
        ({}, {"tree": "dynamic:6:3:3"}),
        ({}, {"tree": "eagle"}),
    ],
)
def test_every_option_changes_the_tree_loss(common, change, target, batch, known_terms):
    values = []
    for given in (common, common | change):
        key = json.dumps(given)
        if key not in known_terms:
            recipe = tuned(target, **given)
            known_terms[key] = tree_term(recipe, batch).item()
        values.append(known_terms[key])
    assert abs(values[0] - values[1]) > 1e-5


def test_the_token_loss_can_be_weighed_or_switched_off(target, batch):
    """Off, the gradient is that of the tree term alone."""
    weights, gradients = [], []
    for weight in (1.0, 0.25, 0.0):
        recipe = tuned(target, token_weight=weight)
        *tokens, tree = terms_of(recipe, batch)
        weights.append([w for _, _, w in tokens])
        assert tree[2] == 0.5
        sum(w * total / float(n) for total, n, w in (*tokens, tree)).backward()
        gradients.append([p.grad.clone() for p in recipe.drafter.parameters()])
    assert weights[1] == [0.25 * w for w in weights[0]]
    assert not any(weights[2])
    recipe = tuned(target)
    tree_term(recipe, batch).backward()
    for got, whole, p in zip(gradients[2], gradients[0], recipe.drafter.parameters(), strict=True):
        torch.testing.assert_close(got, torch.zeros_like(p) if p.grad is None else p.grad)
        assert not torch.allclose(got, whole)


@pytest.mark.parametrize("change", [{"base": "eagle"}, {"base_preset": "published"}])
def test_the_token_loss_is_the_bases(change, target, batch):
    losses = [
        sum(total.item() for total, _, _ in terms_of(tuned(target, **given), batch)[:-1])
        for given in ({}, change)
    ]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_another_reference_is_another_loss(target, batch, tmp_path):
    randomised(copy.deepcopy(tuned(target).drafter), 0.1, 9).save_pretrained(tmp_path / "earlier")
    values = [
        tree_term(tuned(target, reference=reference), batch).item()
        for reference in (None, str(tmp_path / "earlier"))
    ]
    assert abs(values[0] - values[1]) > 1e-4


@pytest.mark.slow
def test_trees_come_to_be_worth_more_than_the_references(target, batch):
    """Rewards rise from 0, and with them what the target accepts, where there is much to learn."""
    recipe = tuned(target, aggregation="node_sum")
    recipe = prepared(recipe.recipe, head(target))
    optimizer = torch.optim.Adam(recipe.drafter.parameters(), 5e-3)
    found = [metrics_of(recipe, batch)]
    for _ in range(12):
        optimizer.zero_grad()
        sum(w * total / max(float(n), 1) for total, n, w in terms_of(recipe, batch)).backward()
        optimizer.step()
    found.append(metrics_of(recipe, batch))
    assert found[0]["reward"] == 0
    assert found[1]["reward"] > 0.02
    assert found[1]["node_sum"] == pytest.approx(found[0]["node_sum"] + found[1]["reward"])


def test_the_best_checkpoint_is_chosen_by_trees(target, batch):
    recipe = tuned(target)
    trace = SimpleNamespace(prompt_ids=batch.prompts[0], response_ids=batch.responses[0])
    first = recipe.dev_metrics(recipe.drafter, [trace])
    assert first["select"] == first["tree_tokens_per_round"] > 1
    assert recipe.dev_metrics(recipe.reference, [trace]) != first
    short = SimpleNamespace(prompt_ids=batch.prompts[0], response_ids=[5, 6])
    assert recipe.dev_metrics(recipe.drafter, [short]) == {}


# --- the reference's rewards ------------------------------------------------------------------


def drawn(recipe, batch, monkeypatch):
    """How many drafters have drafted for each text of a batch, and the loss."""
    counts, scorer = [], recipe.tree_scorer
    monkeypatch.setattr(
        recipe.objective, "tree_scorer",
        lambda ids, lengths, drafters: counts.append(len(drafters))
        or scorer(ids, lengths, drafters),
    )  # fmt: skip
    value = tree_term(recipe, batch).item()
    monkeypatch.setattr(recipe.objective, "tree_scorer", scorer)
    return counts, value


def test_reference_trees_are_drafted_once_for_each_text(target, batch, monkeypatch):
    recipe = tuned(target)
    first, value = drawn(recipe, batch, monkeypatch)
    again, same = drawn(recipe, batch, monkeypatch)
    assert (first, again, same) == ([2] * 5, [1] * 5, value)
    assert drawn(tuned(target, debias=False), batch, monkeypatch)[0] == [1] * 5


def test_rewards_are_known_by_text_and_positions():
    known, rewards, trees = ReferenceRewards(), torch.tensor([0.5]), torch.tensor([7])
    known.put([1, 2, 3], [2], rewards, trees)
    found = known.get([1, 2, 3], [2])
    assert found is not None
    assert (found[0].tolist(), found[1].tolist()) == ([0.5], [7])
    for text, lengths in (([1, 2, 3], [3]), ([1, 2], [3, 2]), ([1, 2, 3, 2], [])):
        assert known.get(text, lengths) is None


def test_the_same_tree_gains_nothing_however_it_was_rounded(target, batch, monkeypatch):
    """As when other trees were scored beside it; another tree gains what it gains."""
    recipe, put = tuned(target, moved=0), ReferenceRewards.put
    monkeypatch.setattr(
        ReferenceRewards, "put",
        lambda self, ids, lengths, rewards, trees: put(self, ids, lengths, rewards + 1e-6, trees),
    )  # fmt: skip
    for _ in range(2):  # of the reference's trees just scored, and of those stored
        found = metrics_of(recipe, batch)
        assert (found["reward"], found["flat_groups"]) == (0.0, 1.0)
    recipe.drafter = randomised(recipe.drafter, 0.03, 5)
    assert metrics_of(recipe, batch)["flat_groups"] < 1


def test_trees_have_names_of_their_own():
    chain, other = torch.tensor([[-1, 0, 1]]), torch.tensor([[-1, 0, 0]])
    tokens, swapped = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 7, 6]])
    names = [
        int(TokenTree(one, parents, None, torch.tensor([3])).names)
        for one in (tokens, swapped)
        for parents in (chain, other)
    ]
    assert len(set(names)) == 4


# --- which reference and which start ----------------------------------------------------------


def test_a_reference_of_another_network_or_vocabulary_is_refused(target, tmp_path):
    check_same_network(head(target), head(target))
    check_same_network(head(target, "eagle", detach_recycled=True), head(target, "eagle"))
    some, others = torch.arange(5, 45), torch.arange(6, 46)
    check_same_network(head(target, kept=some), head(target, kept=some))
    medusa = MedusaDrafter.build(target, MedusaSettings(num_heads=2))
    for reference, drafter, says in (
        (head(target, "eagle"), head(target), "of kind 'eagle', the trained one of 'eagle3'"),
        (head(target, norm_output=True), head(target), "norm_output is True there and False here"),
        (head(target, kept=some), head(target), "another vocabulary, 40 tokens against 100"),
        (head(target, kept=some), head(target, kept=others), "another vocabulary"),
        (medusa, head(target), "of kind 'medusa'"),
    ):
        with pytest.raises(UserError, match=says):
            check_same_network(reference, drafter)
    head(target, "eagle").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"method\.reference is a drafter of kind 'eagle'"):
        tuned(target, reference=str(tmp_path))


def test_the_kind_of_a_given_head_is_read_from_it(target):
    for name, size in (("eagle3", 0), ("eagle3", 30), ("eagle", 0)):
        drafter = head(target, name, kept=torch.arange(size) if size else None)
        recipe = Recipe(Config(**SMALL, base_preset="published"), target, drafter)
        assert type(recipe.heads).__module__ == f"recipes.{name}"
        assert recipe.heads.captures == drafter.target_layers
        assert recipe.heads.is_reduced == bool(size)  # it keeps its vocabulary
        (stage,) = recipe.stages()
        assert (stage.name, stage.objective.tokens) == ("gto", recipe.heads.objective)
    medusa = MedusaDrafter.build(target, MedusaSettings(num_heads=2))
    with pytest.raises(UserError, match="of kind 'medusa', recipe=gto trains 'eagle3'"):
        Recipe(Config(**SMALL), target, medusa)


@pytest.mark.parametrize("preset", [None, "laptop", "published"])
def test_stage_base_is_recipe_eagle3_under_the_preset(preset, tiny_target):
    words = ["recipe=eagle3", *([] if preset is None else [f"preset={preset}"])]
    eagle3_run = resolve(words)[0]
    gto_run = resolve([word.replace("eagle3", "gto") for word in words])[0]
    assert gto_run.method.base_preset == preset
    found = settings_of_base(gto_run.method)
    assert found == {key: getattr(eagle3_run.trainer, key) for key in OF_BASE}
    # what is the same for both stages is what recipe eagle3 has
    free = {*OF_BASE, "resume", "save_every", "eval_every", "log_every"}
    for key, value in vars(eagle3_run.trainer).items():
        assert key in free or getattr(gto_run.trainer, key) == value, key
    if preset != "published":  # whose vocabulary is larger than the tiny one
        recipe = Recipe(gto_run.method, tiny_target("llama", layers=8))
        assert recipe.heads.config == eagle3_run.method
    said = Recipe.describe(gto_run)
    assert said.startswith(
        "stage base trains recipe=eagle3 with trainer.max_steps=3, trainer.batch"
    )
    assert ("method.steps=7" in said) == (preset == "published")
    gto_run.model.drafter = "head"
    assert not Recipe.describe(gto_run)


def test_bases_are_the_same_by_their_own_recipe_and_its_settings_alone(tiny_target):
    target = tiny_target("llama", layers=8)

    def shared(**options):
        base, tuned = Recipe(Config(**SMALL | options), target).stages()
        assert (base.row, tuned.row, tuned.overrides) == ("before", "after", {})
        assert base.overrides == BASE
        return base.shared

    assert shared() == shared(omega=0.7, num_groups=2) == shared(base_preset="laptop")
    assert shared(base_preset="published") != shared()


def test_a_tree_wider_than_the_draft_vocabulary_is_refused(target):
    with pytest.raises(UserError, match=r"method\.tree must have at most 2 children"):
        Recipe(Config(**SMALL), target, head(target, kept=torch.tensor([5, 9])))


# --- a whole run ------------------------------------------------------------------------------


def words_of(folder, target, *given):
    settings = (
        "recipe=gto", "method.num_groups=2", "method.group_size=2", "method.tree=dynamic:8:3:3",
        "trainer.lr_warmup_steps=0", "trainer.max_steps=6", "trainer.log_every=1",
        "trainer.save_every=2", "trainer.eval_every=3", "trainer.lr=1e-2",
        "eval.tree=dynamic:8:3:3", "data.num_prompts=8",
        "data.max_new_tokens=12", "eval.temperatures=0", "eval.timing_prompts=0",
    )  # fmt: skip
    words = command(folder, target, *settings, *given)
    return [word for word in words if not word.startswith("method.draft_")]


@pytest.fixture(scope="module")
def eight(tiny_folder):
    """A target on whose layers the default captures differ."""
    return tiny_folder("llama", layers=8)


@pytest.fixture(scope="module")
def finished(eight, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gto")
    assert train.main(words_of(folder, eight)) == 0
    return folder


def rows_of(folder, **wanted):
    rows = json.loads((folder / "report.json").read_text())["results"]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def losses(folder, stage):
    rows = read_jsonl(folder / "metrics.jsonl")
    return [row["loss"] for row in rows if row["stage"] == stage and "loss" in row]


def test_a_run_trains_its_base_and_then_its_trees(finished):
    run = finished / "run"
    assert (len(losses(run, "base")), len(losses(run, "gto"))) == (3, 6)
    assert {row["drafter"] for row in rows_of(run, measured_by="offline")} >= {"before", "after"}
    for row in rows_of(run, drafter="after"):
        assert row["lossless"]
    assert [row["tree"] for row in rows_of(run, drafter="after") if row.get("tree")]
    first, *_, last = (row["eval"] for row in read_jsonl(run / "metrics.jsonl") if "eval" in row)
    assert "tree_tokens_per_round" not in first
    assert last["select"] == last["tree_tokens_per_round"]
    gto = [row for row in read_jsonl(run / "metrics.jsonl") if row["stage"] == "gto"]
    rewards = [row["reward"] for row in gto if "reward" in row]
    assert rewards[0] == 0
    assert any(rewards[1:])
    assert (run / "export" / "vllm").exists()
    about = json.loads((run / "drafter" / "drafter.json").read_text())["provenance"]
    assert (about["recipe"], about["tree"], about["group_size"]) == ("gto", "dynamic:8:3:3", 2)
    assert len(about["reference"]) == 16
    report = json.loads((run / "report.json").read_text())
    assert report["drafter"]["provenance"] == about


def test_a_base_trained_before_is_found(finished, eight, tmp_path, capsys, monkeypatch):
    """By all that decides its weights; settings of the other stage are none of that."""
    shutil.copytree(finished / "cache", tmp_path / "cache")
    for name in ("train.jsonl", "eval.jsonl"):
        shutil.copy(finished / name, tmp_path / name)
    paths = [f"data.prompts={finished / 'train.jsonl'}", f"eval.prompts={finished / 'eval.jsonl'}"]
    (kept,) = (tmp_path / "cache" / "stages").iterdir()
    words = (*paths, "method.omega=0.7", "trainer.max_steps=2", "trainer.lr=1e-3",
             "run.stage=gto")  # fmt: skip
    assert train.main(words_of(tmp_path, eight, *words)) == 0
    assert f"0-base: trained before, from {kept}" in capsys.readouterr().out
    assert (losses(tmp_path / "run", "base"), len(losses(tmp_path / "run", "gto"))) == ([], 2)
    place = "stages/0-base/checkpoints/best"
    for path in (tmp_path / "run" / place).rglob("*.safetensors"):
        theirs = finished / "run" / path.relative_to(tmp_path / "run")
        assert path.read_bytes() == theirs.read_bytes()
    anew = (*words, f"run.dir={tmp_path / 'anew'}", "run.stage=base")
    monkeypatch.setattr(gto, "settings_of_base", lambda config: BASE | {"lr": 2e-3})
    assert train.main(words_of(tmp_path, eight, *anew)) == 0
    assert len(losses(tmp_path / "anew", "base")) == 3
    assert len(list((tmp_path / "cache" / "stages").iterdir())) == 2


def test_a_stage_that_is_left_out_may_be_shorter_than_the_warm_up(
    finished, eight, tmp_path, capsys, monkeypatch
):
    given = f"model.drafter={finished / 'run' / 'drafter'}"
    monkeypatch.setattr(gto, "settings_of_base", lambda config: BASE | {"lr_warmup_steps": 4})
    words = (given, "data.max_new_tokens=256")
    assert train.main(words_of(tmp_path, eight, *words)) == 2
    assert "max_new_tokens=256 leaves no room" in capsys.readouterr().err


def test_a_base_of_another_placement_is_not_taken_and_a_full_disk_keeps_none(
    finished, eight, tmp_path, capsys, monkeypatch
):
    shutil.copytree(finished / "cache", tmp_path / "cache")
    for name in ("train.jsonl", "eval.jsonl"):
        shutil.copy(finished / name, tmp_path / name)
    words = (f"data.prompts={finished / 'train.jsonl'}", f"eval.prompts={finished / 'eval.jsonl'}")
    before = list((tmp_path / "cache" / "stages").iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared, "placement", lambda *_: SimpleNamespace(name="elsewhere"))
    monkeypatch.setattr(shared.shutil, "copytree", full)
    assert train.main(words_of(tmp_path, eight, *words, "run.stage=base")) == 0
    assert "base: not saved for other runs in" in capsys.readouterr().out
    assert len(losses(tmp_path / "run", "base")) == 3
    assert list((tmp_path / "cache" / "stages").iterdir()) == before


@pytest.mark.usefixtures("unreported")
def test_stopped_in_stage_gto_it_goes_on_with_the_same_losses(finished, eight, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    stage = run / "stages" / "1-gto"
    (stage / "finished.json").unlink()
    (run / "report.json").unlink()
    shutil.rmtree(run / "drafter")
    for found in (stage / "checkpoints").glob("step-*"):
        if int(found.name[5:]) > 2:
            shutil.rmtree(found)
    assert train.main(words_of(finished, eight, f"run.dir={run}")) == 0
    then, now = (read_jsonl(folder / "metrics.jsonl") for folder in (finished / "run", run))
    for row in (*then, *now):
        row.pop("tokens_per_s", None)
    assert now == then
    written = (run / "drafter" / "model.safetensors").read_bytes()
    assert written == (finished / "run" / "drafter" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("unreported")
def test_a_trained_head_is_gone_on_from_with_another_state_as_reference(finished, eight, tmp_path):
    given = (
        f"model.drafter={finished / 'run' / 'drafter'}", "trainer.max_steps=2",
        f"method.reference={finished / 'run' / 'drafter'}",
    )  # fmt: skip
    assert train.main(words_of(tmp_path, eight, *given)) == 0
    assert {r["stage"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")} == {"gto"}
    target = Target.load(str(eight))
    assert load_drafter(str(tmp_path / "run" / "drafter"), target).kind == "eagle3"


@pytest.mark.slow
@pytest.mark.usefixtures("unreported")
def test_two_processes_train_as_one_does(eight, tmp_path):
    head = eagle3_word(tmp_path, eight)
    alone, both = (
        words_of(tmp_path, eight, head, f"trainer.batch_size={size}", f"run.dir={tmp_path / name}")
        for name, size in (("alone", 4), ("both", 2))
    )
    assert train.main(alone) == 0
    code, _, err = finish(start(*TWO, "train.py", *both))
    assert code == 0, err
    expected = losses(tmp_path / "alone", "gto")
    assert losses(tmp_path / "both", "gto")[:2] == pytest.approx(expected[:2], rel=1e-4)


# --- what is refused --------------------------------------------------------------------------


def test_a_target_for_which_no_base_can_be_made_wants_a_trained_head(target):
    with pytest.raises(UserError, match=r"stage base: method\.layers.* name it as model\.drafter"):
        Recipe(Config(**SMALL), target)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "method.base_preset=hass",
            "method.base_preset must be one of null, laptop, published, got 'hass'",
        ),
        ("method.num_groups=0", "method.num_groups must be >= 1"),
        ("method.group_size=1", "method.group_size must be >= 2, got 1: standardised"),
        ("method.aggregation=sum", "method.aggregation must be one of lse, lse_mean, max, mean"),
        ("method.eta=0", "method.eta must be > 0"),
        ("method.eta=2", "method.eta=2.0 changes nothing here: leave it out, or set method.aggre"),
        ("method.omega=0", "method.omega must be > 0"),
        ("method.token_weight=-1", "method.token_weight must be >= 0"),
        ("method.epsilon=0", "method.epsilon must lie in (0, 1), got 0.0"),
        ("method.epsilon=1", "method.epsilon must lie in (0, 1), got 1.0"),
        ("method.tree=dynamic:2:3:3", "method.tree must hold at least as many nodes as its depth"),
        ("method.tree=dynamic:9", "method.tree must be dynamic:<num_nodes>:<depth>[:<top_k>]"),
        ("method.tree=calibrated:9", "method.tree must be one of eagle["),
        (
            "method.tree=static,file=assets",
            "static,file=assets': file assets is a folder: name a regular file",
        ),
        ("method.tree=dynamic:200:3:101", "method.tree must have at most 100 children"),
        ("method.reference=no/such", "method.reference"),
        ("model.drafter=no/such", "model.drafter"),
    ],
)
def test_bad_settings_end_in_one_line(word, says, eight, tmp_path, capsys):
    """Before any text is generated."""
    words = [word] if isinstance(word, str) else word
    assert train.main(words_of(tmp_path, eight, *words)) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error")]
    for text in [says] if isinstance(says, str) else says:
        assert text in line
    assert not (tmp_path / "run").exists()
