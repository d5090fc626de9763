"""The acceptance head: its network, where it reads, and whose head it is."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from drafters.acceptance import fresh_head
from drafters.acceptance_head import (
    SETTINGS,
    WEIGHTS,
    AcceptanceHead,
    AcceptanceSettings,
    DraftLength,
    adaptive_note,
    calibrate,
    draft_length,
)
from drafters.causal_lm import CausalLMDrafter
from drafters.load import load_acceptance_head, load_drafter
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.round import Budget
from drafters.text import Text
from eval.policies.base import Recorder
from eval.policies.table import budget_for
from recipes.specdecpp import weighted_loss
from tests.helpers.eagle import build_eagle, eagle_settings
from tests.helpers.heads import outputs_of, padded, prefilled, randomised, state_of
from tests.helpers.tiny import perturbed, prompts_of
from trainer.errors import UserError

WIDTH = 8


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


def drafter_of(kind, target):
    if kind == "causal_lm":
        return CausalLMDrafter._of(perturbed(target.model, 0.1), target, "draft")
    captures = [0, 1] if kind == "eagle3" else ["final_norm"]
    settings = eagle_settings(3 if kind == "eagle3" else 1, captures, target.hidden_size)
    return randomised(build_eagle(target, settings), 0.1)


def judged(drafter, seed=0, **settings):
    """With a head of random weights."""
    drafter.acceptance = fresh_head(drafter, **settings)
    randomised(drafter.acceptance, 0.3, seed)
    return drafter


def test_blocks_are_independent_unless_told_otherwise():
    e = torch.randn(5, WIDTH)
    for shared, blocks in ((False, 3), (True, 1)):
        head = AcceptanceHead(AcceptanceSettings(WIDTH, 3, shared_blocks=shared))
        assert sum(p.numel() for p in head.parameters()) == blocks * (64 + 8) + 2 * 8 + 2
        randomised(head)
        z = e
        for layer in head.blocks.layers:
            z = z + torch.nn.functional.silu(z @ layer.weight.T + layer.bias)
        logits = z @ head.out.weight.T + head.out.bias
        torch.testing.assert_close(head(e), logits)
        torch.testing.assert_close(head.probability(e), logits.softmax(-1)[:, 1])
    plain = AcceptanceHead(AcceptanceSettings(WIDTH, 0))
    torch.testing.assert_close(plain(e), e @ plain.out.weight.T + plain.out.bias)


@pytest.mark.parametrize("weight", [1.0, 6.0, 0.5])
def test_calibration_inverts_what_the_weighted_loss_learns(weight):
    """One state with labels of mean a: the minimum of the loss, found by descent, is not a."""
    accept = torch.tensor([0.9, 0.5, 1.0, 0.4])
    logits = torch.zeros(1, 2, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=50)

    def closure():
        optimizer.zero_grad()
        loss = weighted_loss(logits.expand(4, 2), accept, weight)
        loss.backward()
        return loss

    optimizer.step(closure)
    a, f = float(accept.mean()), float(logits.detach().softmax(-1)[0, 1])
    assert f == pytest.approx(a / (a + weight * (1 - a)), abs=1e-4)
    assert float(calibrate(torch.tensor(f), weight)) == pytest.approx(a, abs=1e-4)
    head = AcceptanceHead(AcceptanceSettings(WIDTH, 0, reject_weight=weight))
    e = torch.randn(3, WIDTH)
    expected = calibrate(head.probability(e), weight)
    torch.testing.assert_close(head.probability(e, calibrated=True), expected)
    assert (weight == 1) == torch.allclose(expected, head.probability(e))


@pytest.mark.parametrize("kind", ["causal_lm", "eagle", "eagle3"])
@torch.inference_mode()
def test_a_token_is_judged_by_the_state_at_itself(kind, target):
    """What decoding reads at the token of depth d is what `states` holds there for depth d + 1, on
    a text that goes on with the drafted tokens: rows of several lengths."""
    drafter, K = judged(drafter_of(kind, target)), 4
    texts = prompts_of([9, 14, 6])
    lengths = [len(text) for text in texts]
    outputs = outputs_of(drafter, target, padded(texts))
    prefilled(drafter, target, texts, [n - 1 for n in lengths])
    recorder = Recorder(uses_head=True)
    state = state_of(padded(texts), lengths, outputs, junk=0.0)
    tree = drafter.propose(state, Budget(K, recorder))
    assert recorder.seen[0].score is None
    scores = torch.stack([one.score for one in recorder.seen[1:]], 1)
    assert scores.shape == (3, K - 1)
    whole = [t + drafted for t, drafted in zip(texts, tree.tokens.tolist(), strict=True)]
    ids = padded(whole)
    for row, n in enumerate(lengths):
        seen = {k: v[row : row + 1] for k, v in outputs_of(drafter, target, ids).hidden.items()}
        unrolled = list(
            drafter.states(Text(ids[row : row + 1]), type(outputs)(seen) if seen else None, K)
        )
        for depth in range(1, K):
            at = n - 1 + depth
            expected = drafter.acceptance.probability(unrolled[depth][0, at])
            torch.testing.assert_close(scores[row, depth - 1], expected, rtol=1e-4, atol=1e-5)
            logits = drafter.acceptance(unrolled[depth][0, at - 1 : at + 1])
            assert not torch.allclose(logits[0], logits[1], atol=1e-2)  # one off is seen


def test_under_a_head_the_drafter_neither_trains_nor_drops_out(target):
    drafter = drafter_of("causal_lm", target)
    drafter.train()
    assert drafter.model.training
    judged(drafter).train()
    assert not drafter.model.training
    assert drafter.acceptance.training
    drafter.eval()
    assert not drafter.acceptance.training
    names = {name.partition(".")[0] for name in drafter.draft_weights()}
    assert names == {"model"}
    theirs = {id(p) for p in drafter.acceptance.parameters()}
    assert not any(id(p) in theirs for p in drafter.drafting_parameters())
    assert drafter.fresh().acceptance is None


# --- whose head it is -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal_lm", "eagle3"])
def test_saved_beside_the_drafter_it_comes_with_it(kind, target, tmp_path):
    drafter = judged(drafter_of(kind, target), num_layers=2, shared_blocks=True, K_min=3)
    drafter.acceptance.settings.tuned = {"0": {"head": ["head:0.5", 9]}}
    drafter.save_pretrained(tmp_path)
    again = load_drafter(str(tmp_path), target)
    assert again.acceptance.settings == drafter.acceptance.settings
    e = torch.randn(4, target.hidden_size)
    assert torch.equal(again.acceptance.probability(e), drafter.acceptance.probability(e))
    assert again.draft_weights().keys() == drafter.draft_weights().keys()


def changed_weights(folder, drafter, other):
    other.save_pretrained(folder / "other")
    (folder / "model.safetensors").write_bytes((folder / "other/model.safetensors").read_bytes())


def narrower(folder, drafter, other):
    AcceptanceHead(AcceptanceSettings(WIDTH, 0)).save(folder)


def damaged(folder, drafter, other):
    (folder / WEIGHTS).write_bytes(b"nothing")


def unknown_setting(folder, drafter, other):
    stored = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps(stored | {"depth": 3}))


def not_finite(folder, drafter, other):
    stored = load_file(folder / WEIGHTS)
    stored["out.bias"][0] = torch.nan
    save_file(stored, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (changed_weights, r"CompatibilityError: model\.drafter: .* trained for another drafter"),
        (narrower, r"CompatibilityError: model\.drafter: .* states 8 wide, the drafter's are 32"),
        (damaged, r"model\.drafter: the acceptance head in .* is damaged"),
        (not_finite, "NaN or Inf in tensor 'out.bias'"),
        (unknown_setting, r"model\.drafter: the acceptance head in .* is damaged"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(harm, says, target, tmp_path):
    drafter = judged(drafter_of("causal_lm", target))
    drafter.save_pretrained(tmp_path)
    other = CausalLMDrafter._of(perturbed(target.model, 0.2), target, "another")
    harm(tmp_path, drafter, other)
    with pytest.raises(UserError, match=says):
        load_drafter(str(tmp_path), target)


def test_a_drafter_that_shows_no_states_gets_no_head(target):
    medusa = MedusaDrafter.build(target, MedusaSettings(num_heads=2))
    with pytest.raises(UserError, match="CapabilityError: a drafter of kind 'medusa'"):
        fresh_head(medusa)


def test_an_engine_without_a_head_gets_the_matching_threshold(target):
    drafter = judged(drafter_of("causal_lm", target))
    head = drafter.acceptance
    assert draft_length(None, 4) == draft_length(head, 4) == DraftLength(4)
    assert adaptive_note(head) == adaptive_note(None) == ""
    head.settings.tuned = {
        "1": {"head": ["head:0.5", 9], "matching_confidence": 0.3},
        "0": {"head": ["head:0.7", 12], "matching_confidence": 0.42},
    }
    assert draft_length(head, 4) == DraftLength(12, 0.42)
    assert "up to 12 tokens, fewer after one less likely than 0.42" in adaptive_note(head)


# --- published heads ----------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))


def published(width, layers, repeated=True):
    """The published network: the blocks are one module, `model.<j>` of the saved names."""
    torch.manual_seed(3)
    one = Block(width)
    blocks = [one if repeated else Block(width) for _ in range(layers)]
    return torch.nn.ModuleDict(
        {"model": torch.nn.Sequential(*blocks, torch.nn.Linear(width, 2))}
    ).requires_grad_(False)


def save_published(folder, network, file="model.safetensors", **config):
    """As PyTorchModelHubMixin writes it; safetensors keeps one name of a shared tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    width, layers = network["model"][-1].in_features, len(network["model"]) - 1
    said = {"hidden_size": width, "num_layers": layers} | config
    (folder / "config.json").write_text(json.dumps(said))
    if file.endswith(".safetensors"):
        save_model(network, str(folder / file))
    else:
        torch.save(network.state_dict(), folder / file)
    return str(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(("layers", "repeated"), [(0, True), (1, True), (3, True), (3, False)])
def test_a_published_head_judges_as_its_own_network(target, tmp_path, file, layers, repeated):
    drafter = drafter_of("causal_lm", target)
    network = published(target.hidden_size, layers, repeated)
    load_acceptance_head(save_published(tmp_path, network, file), drafter, "eval.acceptance_head")
    head = drafter.acceptance
    assert (head.settings.num_layers, head.settings.shared_blocks) == (
        layers,
        repeated and layers > 1,
    )
    states = torch.randn(5, target.hidden_size)
    accept = network["model"](states).softmax(-1)[:, 1]
    torch.testing.assert_close(head.probability(states), accept)
    # saved with its drafter, it is a head of this project
    drafter.save_pretrained(tmp_path / "own")
    again = load_drafter(str(tmp_path / "own"), target).acceptance
    assert torch.equal(again.probability(states), head.probability(states))


@pytest.mark.parametrize(("label", "most"), [(0.0, 2), (1.0, 6)])
def test_the_second_published_logit_is_acceptance(target, tmp_path, label, most):
    """Trained as published, cross-entropy with the classes 0 = reject, weighted, and 1 = accept: a
    head that saw only rejections ends a draft at once, one that saw none lets it go on."""
    drafter = drafter_of("causal_lm", target)
    network = published(target.hidden_size, 0)
    with torch.enable_grad():
        network.requires_grad_(True)
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
        labels = torch.full((64,), int(label))
        for _ in range(60):
            states = torch.randn(64, target.hidden_size)
            logits, weight = network["model"](states), torch.tensor([6.0, 1.0])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, labels, weight).backward()
            optimizer.step()
    network.requires_grad_(False)
    load_acceptance_head(save_published(tmp_path, network), drafter, "eval.acceptance_head")
    states = torch.randn(200, target.hidden_size)
    assert (drafter.acceptance.probability(states) - label).abs().max() < 0.5
    texts, budget = prompts_of([9]), budget_for(drafter, "head:0.6", 6)
    outputs = outputs_of(drafter, target, padded(texts))
    prefilled(drafter, target, texts, [8])
    with torch.inference_mode():
        tree = drafter.propose(state_of(padded(texts), [9], outputs, junk=0.0), budget)
    assert tree.tokens.shape[1] == most


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_size": 16}, "must have shape .16., got .32."),
        ({"num_layers": 4}, "'num_layers' is 4, and tensor 'model.4.weight' is missing"),
        ({"num_layers": 1}, "'num_layers' is 1, and tensor 'model.1.weight' is missing"),
        ({"num_layers": 10**12}, "'model.1000000000000.weight' is missing"),
        ({"num_layers": -1}, "key 'num_layers' must be >= 0, got -1"),
        ({"hidden_size": "wide"}, "'hidden_size' must be of type int, got 'wide'"),
    ],
)
def test_a_published_head_that_contradicts_itself_is_refused(target, tmp_path, change, complaint):
    folder = save_published(tmp_path, published(target.hidden_size, 2), **change)
    with pytest.raises(UserError, match=complaint) as caught:
        load_acceptance_head(folder, drafter_of("causal_lm", target), "eval.acceptance_head")
    assert str(caught.value).startswith("eval.acceptance_head: ")
    assert "\n" not in str(caught.value)


def test_a_published_head_of_another_drafter_is_refused(target, tmp_path):
    folder = save_published(tmp_path, published(16, 2))
    with pytest.raises(UserError, match="reads states 16 wide, the drafter's are 32"):
        load_acceptance_head(folder, drafter_of("causal_lm", target), "eval.acceptance_head")
    heads = MedusaDrafter.build(target, MedusaSettings(2))
    with pytest.raises(UserError, match="CapabilityError: a drafter of kind 'medusa'"):
        load_acceptance_head(folder, heads, "eval.acceptance_head")
    with pytest.raises(UserError, match="cannot load 'org/none'"):
        load_acceptance_head("org/none", drafter_of("causal_lm", target), "eval.acceptance_head")
