"""EAGLE's layer: the unroll of training is what drafting does, on chains, branches and trees."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafters.attention import attend
from drafters.eagle import EagleDrafter
from drafters.eagle1 import Eagle1Drafter, Eagle1Settings
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings, default_captures
from drafters.layers import (
    DecoderLayer,
    RMSNorm,
    copy_gain,
    layer_config,
    start_from,
)
from drafters.round import Budget, Drafter
from drafters.text import Text
from drafters.trees.dynamic import DynamicTree
from drafters.trees.table import parse_shape
from drafters.trees.tree import WITHOUT_REPLACEMENT
from target.model import Target, decoder_layers
from target.outputs import TargetOutputs
from target.sampling import Sampling, warp
from tests.helpers.eagle import build_eagle
from tests.helpers.heads import (
    BUSHY,
    assert_branches_follow_the_unroll,
    assert_causal,
    assert_gradients_reach_everything,
    assert_greedy_text_is_the_targets,
    assert_one_token_prompts_begin,
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
from tests.helpers.tiny import EOS, VOCAB_SIZE, prompts_of, save_tiny, tiny_tokenizer
from trainer.errors import UserError

K = 4
WIDTH = 32
LOW_TO_HIGH = [0, 2, 3]
KEPT = torch.tensor([token for token in range(VOCAB_SIZE) if token % 3])


def three(captures=LOW_TO_HIGH, **changed) -> Eagle3Settings:
    return Eagle3Settings(list(captures), WIDTH, **changed)


KINDS = {
    "eagle": Eagle1Settings(["final_norm"], WIDTH),
    "eagle with a bias": Eagle1Settings(["final_norm"], WIDTH, fc_bias=True),
    "eagle3": three(),
    "eagle3 final": three([1, "final_norm"]),
    "eagle3 kept": three(),
    "norm_before_residual": three(norm_before_residual=True),
    "fc_norm": three(fc_norm=True),
    "norm_output": three(norm_output=True),
    "everything": three(norm_before_residual=True, fc_norm=True, norm_output=True),
}


def made(target, kind="eagle3") -> EagleDrafter:
    torch.manual_seed(0)
    kept = KEPT if kind == "eagle3 kept" else None
    return build_eagle(target, copy.deepcopy(KINDS[kind]), kept=kept).eval()


@pytest.fixture
def target(tiny_target):
    return tiny_target("llama", layers=4)


# --- the layer ------------------------------------------------------------------------------------


def test_a_target_that_turns_a_part_of_each_head_gives_the_base_frequency():
    """Phi-4-mini's factors are of the turned part: Llama's layer turns the whole head."""
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "rope_type": "longrope",
               "original_max_position_embeddings": 64, "rope_theta": 5e4}  # fmt: skip
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    given = Phi3Config(**shape, rope_parameters={**factors, "partial_rotary_factor": 0.75})
    config = layer_config(given)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e4}
    DecoderLayer(config, 64)


def test_heads_that_the_width_is_no_multiple_of_are_as_many_as_fill_it():
    """GLM-4.5's: a width of 4,096 with 96 heads of 128."""
    shape = {"hidden_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = layer_config(Qwen3Config(**shape, head_dim=8))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    DecoderLayer(config, 64)
    with pytest.raises(UserError, match="32, must be a multiple of its heads' width, 12"):
        layer_config(Qwen3Config(**shape, head_dim=12))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt2"])
def test_the_layer_is_transformers_own(name, tiny_target):
    """Given what LlamaDecoderLayer norms for itself."""
    config = layer_config(tiny_target(name).model.config)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    theirs, ours = LlamaDecoderLayer(config, 0), DecoderLayer(config, WIDTH)
    for parameter in theirs.parameters():
        parameter.normal_(0.0, 0.3)
    weights = {k.removeprefix("self_attn."): v for k, v in theirs.state_dict().items()}
    norm = theirs.input_layernorm
    del weights["input_layernorm.weight"]
    ours.load_state_dict(weights)
    x, positions = torch.randn(2, 7, WIDTH), torch.arange(3, 10).expand(2, -1)
    rotary = LlamaRotaryEmbedding(config)(x, positions)
    wanted = theirs(x, position_embeddings=rotary)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    keys, values = ours.keys_values(norm(x), positions)
    mixed = attend(ours.queries(norm(x), positions), keys, values, None)
    close(ours.finish(x, mixed), wanted)


# --- the network against its formulas -------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_column_is_the_formula(kind, target):
    """A column that sees itself alone: attention gives its own value back."""
    drafter = randomised(made(target, kind))
    settings = drafter.settings
    ids = torch.tensor(prompts_of([8]))
    outputs = outputs_of(drafter, target, ids)
    token = target.model.get_input_embeddings().weight[ids[0, 1]]
    states = [outputs.hidden[layer][0, 0] for layer in settings.captures]

    def norm(weight, x):
        eps = target.model.config.rms_norm_eps
        return weight * x / (x.square().mean() + eps).sqrt()

    def layer(residual, x):
        value = drafter.layer.v_proj.weight @ x
        s = (
            residual
            + drafter.layer.o_proj.weight @ value.view(2, 8).repeat_interleave(2, 0).flatten()
        )
        return s + drafter.layer.mlp(norm(drafter.layer.post_attention_layernorm.weight, s))

    if drafter.version == 1:
        z = drafter.fc.weight @ torch.cat([token, states[0]])
        if settings.fc_bias:
            z = z + drafter.fc.bias
        scored = layer(z, z)
        head = target.model.get_output_embeddings().weight
    else:
        if settings.fc_norm:
            weights = [one.weight for one in drafter.fc_norms]
            states = [norm(w, one) for w, one in zip(weights, states, strict=True)]
        g = drafter.fc.weight @ torch.cat(states)
        normed = norm(drafter.hidden_norm.weight, g)
        x = torch.cat([norm(drafter.input_layernorm.weight, token), normed])
        scored = norm(drafter.norm.weight, layer(normed if settings.norm_before_residual else g, x))
        head = drafter.lm_head.weight
    close(next(drafter.states(Text(ids), outputs, 1))[0, 1], scored)
    logits = drafter.draft_logits(ids, outputs)[0, 1]
    if kind == "eagle3 kept":
        outside = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        outside[KEPT] = False
        assert bool((logits[outside] == -torch.inf).all())
        logits = logits[KEPT]
    close(logits, head @ scored)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "norm_output"])
def test_a_step_recycles_what_came_before_the_final_norm_unless_told(kind, target):
    drafter = randomised(made(target, kind))
    ids = torch.tensor(prompts_of([8]))
    outputs = outputs_of(drafter, target, ids)
    seen = []
    inputs = drafter.layer_inputs
    drafter.layer_inputs = lambda feature, token: (seen.append(feature), inputs(feature, token))[1]
    projected = [
        one[:, depth:] for depth, one in enumerate(drafter.states(Text(ids), outputs, 2), 1)
    ]
    recycled = seen[1][:, :7]
    if kind == "eagle3":
        assert not torch.allclose(recycled, projected[0], atol=1e-3)
        recycled = drafter.norm(recycled)
    close(recycled, projected[0])


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_columns_asked_for_are_those_of_the_whole_unroll(kind, target):
    """Values and gradients; the other columns are keys of the first step all the same."""
    drafter = randomised(made(target, kind), 0.15)
    ids = torch.tensor(prompts_of([12, 12, 12]))
    outputs = outputs_of(drafter, target, ids)
    columns = torch.zeros(3, 12, dtype=torch.bool)
    columns[0, 4:9], columns[1, 10:] = True, True  # the third row has none
    found = []
    for asked in (None, columns):
        drafter.zero_grad()
        unrolled = list(drafter.states(Text(ids, columns=asked), outputs, K))
        picked = []
        for depth, states in enumerate(unrolled, start=1):
            wanted = torch.zeros(3, 12, dtype=torch.bool)
            wanted[:, depth:] = columns[:, :-depth]
            if asked is not None:
                assert not bool(states[~wanted].any())
            picked.append(states[wanted])
        torch.cat(picked).square().sum().backward()
        gradients = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
        found.append((torch.cat(picked).detach(), gradients))
    close(found[1][0], found[0][0])
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        close(found[1][1][name], gradient)
    nothing = torch.zeros_like(columns)
    assert not any(
        bool(one.any()) for one in drafter.states(Text(ids, columns=nothing), outputs, K)
    )
    most = torch.ones_like(columns)  # then it is less work to compute all of them
    most[:, :2] = False
    whole = drafter.states(Text(ids), outputs, K)
    for one, other in zip(drafter.states(Text(ids, columns=most), outputs, K), whole, strict=True):
        assert torch.equal(one, other)


# --- what is drafted is what is trained ----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_and_branches_follow_the_unroll(kind, target):
    # no wider: a saturated layer enlarges the rounding of every step before
    drafter = randomised(made(target, kind), 0.15)
    assert isinstance(drafter, Drafter)
    assert_rounds_follow_the_unroll(drafter, target, K)
    assert_branches_follow_the_unroll(drafter, target)
    assert_one_token_prompts_begin(drafter, target)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "phi3", "gpt2", "llama_padded"])
def test_heads_on_other_families_draft_what_they_train(name, tiny_target):
    target = tiny_target(name, layers=4)
    drafter = randomised(made(target, "eagle"), 0.2)
    assert_rounds_follow_the_unroll(drafter, target, 3)
    assert_branches_follow_the_unroll(drafter, target)
    drafter = randomised(made(target, "eagle3"), 0.2)
    assert_rounds_follow_the_unroll(drafter, target, 3)
    assert drafter.draft_logits(torch.tensor([[5, 6, 7]]), outputs_of(
        drafter, target, torch.tensor([[5, 6, 7]])
    )).shape == (1, 3, VOCAB_SIZE)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_heads_know_the_past_and_their_own_path_only(kind, target):
    drafter = randomised(made(target, kind), 0.15)
    assert_causal(drafter, target, K)
    assert_starts_before_the_text_are_zero(drafter, target, K)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_padding_behind_a_text_changes_nothing(kind, target):
    drafter = randomised(made(target, kind))
    ids = torch.tensor(prompts_of([16]))
    outputs = outputs_of(drafter, target, ids)
    cut = TargetOutputs({k: v[:, :10] for k, v in outputs.hidden.items()})
    for depth in range(1, K + 1):
        whole = drafter.draft_logits(ids, outputs, depth)
        close(drafter.draft_logits(ids[:, :10], cut, depth), whole[:, :10])


@torch.inference_mode()
def test_a_given_numbering_of_positions_is_followed(target):
    drafter = randomised(made(target))
    ids = torch.tensor(prompts_of([10]))
    outputs = outputs_of(drafter, target, ids)
    positions = torch.arange(10).unsqueeze(0)
    plain = list(drafter.states(Text(ids), outputs, 2))[1]
    close(list(drafter.states(Text(ids, positions + 7), outputs, 2))[1], plain, 1e-4)
    moved = list(drafter.states(Text(ids, positions + 5 * (positions > 3)), outputs, 2))[1]
    close(moved[:, :5], plain[:, :5])
    assert bool((moved[:, 7:] - plain[:, 7:]).abs().amax() > 1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_states_of_half_precision_are_taken(kind, target):
    drafter = randomised(made(target, kind), 0.1)
    ids = torch.tensor(prompts_of([9]))
    outputs = outputs_of(drafter, target, ids)
    plain = drafter.draft_logits(ids, outputs, 2)
    outputs.hidden = {k: v.bfloat16() for k, v in outputs.hidden.items()}
    half = drafter.draft_logits(ids, outputs, 2)
    assert half.dtype == torch.float32
    close(half, plain, 0.1)
    prefilled(drafter, target, ids.tolist(), [5])
    assert drafter.start(state_of(ids, [6], outputs), Budget(2)).dtype == torch.float32


def test_checkpointing_changes_no_gradient(target):
    drafter = randomised(made(target)).train()
    ids = torch.tensor(prompts_of([12, 12]))
    outputs = outputs_of(drafter, target, ids)

    def gradients():
        drafter.zero_grad()
        squares = drafter(
            Text(ids), outputs, 3, lambda unrolled: [x.square().sum() for x in unrolled]
        )
        sum(squares).backward()
        named = drafter.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    plain = gradients()
    drafter.gradient_checkpointing_enable()
    again = gradients()
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        close(again[name], gradient)


def test_detached_states_carry_no_gradient_to_the_step_before(target):
    ids = torch.tensor(prompts_of([12]))
    got = []
    for detach in (False, True):
        settings = Eagle1Settings(["final_norm"], WIDTH, detach_recycled=detach)
        torch.manual_seed(0)
        drafter = randomised(build_eagle(target, settings)).train()
        outputs = outputs_of(drafter, target, ids)
        outputs.hidden["final_norm"].requires_grad_()
        second = list(drafter.states(Text(ids), outputs, 2))[1]
        # column 5's second output, with the keys and values of columns 0..5 in between
        second[0, 7].sum().backward()
        got.append((second.detach(), outputs.hidden["final_norm"].grad))
    assert torch.equal(got[0][0], got[1][0])
    assert not torch.allclose(got[0][1], got[1][1])


# --- trees ----------------------------------------------------------------------------------------


def committed(drafter, target):
    """Two texts with all but the last token prefilled -> texts, their outputs and the state."""
    texts = prompts_of([13, 9], seed=2)
    ids = torch.full((2, 40), 77)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    outputs = outputs_of(drafter, target, ids)
    prefilled(drafter, target, texts, [len(text) - 1 for text in texts])
    return texts, outputs, state_of(ids, [len(text) for text in texts], outputs)


def law_after(drafter, texts, outputs, row, path):
    """Logits of the token that follows this path of drafted ones."""
    whole = torch.tensor([texts[row] + list(path)])
    hidden = {k: v[row : row + 1, : whole.shape[1]] for k, v in outputs.hidden.items()}
    return drafter.draft_logits(whole, TargetOutputs(hidden), len(path) + 1)[0, -1]


def paths_of(tree, row):
    found = {-1: ()}
    for node, token in enumerate(tree.tokens[row].tolist()):
        parent = int(tree.parents[row, node])
        assert parent < node
        found[node] = (*found[parent], token)
    return found


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle", "eagle3 kept"])
def test_nodes_of_a_static_tree_are_the_ranks_of_their_path(kind, target):
    drafter = randomised(made(target, kind))
    texts, outputs, state = committed(drafter, target)
    for shape in (BUSHY, parse_shape("eagle")):
        tree = drafter.propose(state, Budget(shape.depth, tree=shape))
        assert tree.probs is None
        assert not tree.is_chain
        assert tree.draft_forwards == shape.depth
        fed = {path[:-1] for path in shape.paths if len(path) > 1}
        assert tree.draft_tokens == shape.depth + 1 + len(fed)
        for row in range(2):
            paths = paths_of(tree, row)
            for node, ranks in enumerate(shape.paths):
                above = paths[int(tree.parents[row, node])]
                law = law_after(drafter, texts, outputs, row, above)
                assert int(tree.tokens[row, node]) == int(law.topk(ranks[-1] + 1).indices[-1])


@torch.inference_mode()
def test_sampled_children_are_drawn_from_the_law_of_their_path(target):
    drafter = randomised(made(target), 0.1)
    texts, outputs, state = committed(drafter, target)
    state.sampling = Sampling(0.7)
    shape = dataclasses.replace(BUSHY, siblings=WITHOUT_REPLACEMENT)
    tree = drafter.propose(state, Budget.of(shape))
    assert tree.probs.shape == (2, BUSHY.num_nodes, VOCAB_SIZE)
    for row in range(2):
        paths = paths_of(tree, row)
        assert len(set(paths.values())) == BUSHY.num_nodes + 1  # siblings differ
        for node in range(BUSHY.num_nodes):
            law = law_after(drafter, texts, outputs, row, paths[int(tree.parents[row, node])])
            close(tree.probs[row, node], warp(law, state.sampling), 1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("shape", [(12, 3, 4), (30, 4, 3), (7, 5, 2), (3, 1, 4)])
def test_a_dynamic_tree_holds_the_best_of_all_it_looked_at(kind, shape, target):
    """EAGLE-2 written out with whole forwards."""
    drafter = randomised(made(target, kind), 0.15)
    texts, outputs, state = committed(drafter, target)
    shape = DynamicTree(*shape)
    tree = drafter.propose(state, Budget(shape.depth, tree=shape))
    for row in range(2):
        frontier, candidates = {(): 0.0}, {}
        for _ in range(shape.depth):
            children = {}
            for path, score in frontier.items():
                law = law_after(drafter, texts, outputs, row, path).log_softmax(-1)
                values, tokens = law.topk(shape.top_k)
                for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
                    children[(*path, token)] = score + value
            candidates |= children
            best = sorted(children, key=children.get, reverse=True)[: shape.top_k]
            frontier = {path: children[path] for path in best}
        best = sorted(candidates, key=candidates.get, reverse=True)[: shape.num_nodes]
        paths = paths_of(tree, row)
        del paths[-1]
        assert set(paths.values()) == set(best)


# --- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3 kept", "everything"])
def test_greedy_decoding_gives_the_targets_text(kind, target):
    drafter = fitted(made(target, kind), target, 3)
    accepted = assert_greedy_text_is_the_targets(drafter, target, Budget(3))
    assert {0, 1} < set(accepted), "the head must be right and wrong"
    shapes = (DynamicTree(12, 3, 4), BUSHY, parse_shape("eagle"))
    for shape in shapes[: 3 if kind == "eagle" else 1]:
        budget = Budget(shape.depth, tree=shape)
        with_tree = assert_greedy_text_is_the_targets(drafter, target, budget)
        assert sum(with_tree) / len(with_tree) > sum(accepted) / len(accepted)


# --- parameters, storage, errors ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_heads_own_weights_are_trained(kind, target):
    drafter = randomised(made(target, kind), 0.1)
    assert_target_is_not_part_of(drafter, target)
    assert_gradients_reach_everything(drafter, target, K)


def test_the_output_head_follows_the_weights_it_was_made_of(target):
    drafter = made(target, "eagle3 kept")
    head = drafter.output_head(1)
    assert drafter.output_head(2) is head
    copied = copy.deepcopy(drafter)
    assert copied.output_head(1).weight is copied.lm_head.weight
    assert copied.output_head(1).weight is not head.weight
    doubled = drafter.double().output_head(1)
    assert doubled.weight.dtype == torch.float64
    assert doubled.weight is drafter.lm_head.weight
    assert doubled.kept is drafter.kept
    drafter.lm_head.weight = torch.nn.Parameter(drafter.lm_head.weight.detach().clone())
    assert drafter.output_head(1).weight is drafter.lm_head.weight
    drafter.kept = drafter.kept.clone()  # as a move to another device does
    assert drafter.output_head(1).kept is drafter.kept


def test_a_head_of_its_own_starts_as_the_targets_rows(target):
    rows = target.head.weight
    assert torch.equal(made(target).lm_head.weight, rows)
    assert torch.equal(made(target, "eagle3 kept").lm_head.weight, rows[KEPT])
    assert made(target, "eagle3").output_head(2).weight.data_ptr() != rows.data_ptr()
    plain = build_eagle(target, three(), head_from_target=False)
    assert not torch.equal(plain.lm_head.weight, rows)
    shared = made(target, "eagle").output_head(1).weight
    assert shared.data_ptr() == rows.data_ptr()
    assert not any("lm_head" in name for name in made(target, "eagle").state_dict())


@pytest.mark.parametrize("scaled", [{"logits_scaling": 4.0}, {"logit_scale": 0.25}])
def test_a_head_of_its_own_gives_the_targets_logits_of_a_state(scaled):
    """Granite divides the products of its output matrix, Cohere multiplies them."""
    name, shape = ("granite" if "logits_scaling" in scaled else "cohere"), {
        "vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(name, **shape, **scaled)
    model = AutoModelForCausalLM.from_config(config).eval()
    target = Target(model, tiny_tokenizer(), name, {}, (EOS,))
    states = torch.randn(5, WIDTH)
    expected = target.head.logits(states)
    assert not torch.allclose(states @ target.head.weight.T, expected, atol=1e-3)
    drafter = build_eagle(target, three([0, 1, 2]))
    torch.testing.assert_close(drafter.output_head(1).logits(states), expected)


def test_the_layer_starts_as_the_targets_last_one(tiny_target):
    """Fed with the state before that layer and without its own embeddings, it is that layer."""
    target = tiny_target("llama", layers=4)
    drafter = build_eagle(target, three([2])).eval()
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.eye(WIDTH))
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(drafter.layer, name).weight[:, :WIDTH] = 0
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    outputs = target.outputs(ids, layers=[2, "final_norm"])
    (states,) = drafter.states(Text(ids), outputs, 1)
    torch.testing.assert_close(states[:, 1:-1], outputs.hidden["final_norm"][:, :-2])
    plain = build_eagle(target, three([2]), layer_from_target=False)
    assert not torch.equal(plain.layer.o_proj.weight, drafter.layer.o_proj.weight)
    assert torch.equal(plain.norm.weight, torch.ones(WIDTH))


def test_what_is_fed_first_is_mostly_the_last_capture(target):
    fused = made(target).fc.weight
    first, last = fused[:, :-WIDTH], fused[:, -WIDTH:]
    assert 0 < first.abs().max() < 0.02
    assert (last - torch.eye(WIDTH)).abs().max() < 0.02


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("llama", ""),
        ("gemma3", ""),
        ("phi3", "q k v gate up"),  # fused
        ("gpt2", "q k v o gate up down post"),
    ],
)
def test_what_has_not_llamas_form_is_said(name, names, tiny_target, capsys):
    target = tiny_target(name, layers=4)
    layer = decoder_layers(target.model)[-1]
    drafter = made(target)
    assert ("a fresh start for" in capsys.readouterr().out) == bool(names)
    assert [word.split("_")[0] for word in start_from(drafter.layer, layer)] == names.split()
    norm = getattr(layer, "input_layernorm", None)
    if norm is not None:
        own, x = RMSNorm(WIDTH), torch.randn(3, WIDTH)
        norm.weight.data.add_(torch.rand(WIDTH))
        assert copy_gain(own, norm)
        torch.testing.assert_close(own(x), norm(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_stored_heads_load_as_they_were(kind, target, tmp_path):
    assert_stored_whole(randomised(made(target, kind)), target, tmp_path)


def test_a_head_trained_without_gradients_through_its_states_loads_as_such(target, tmp_path):
    settings = Eagle1Settings(["final_norm"], WIDTH, detach_recycled=True)
    assert_stored_whole(build_eagle(target, settings), target, tmp_path)
    assert Eagle1Drafter.from_pretrained(tmp_path, target).settings == settings


def test_heads_of_another_target_are_refused(target, tmp_path):
    made(target).save_pretrained(tmp_path / "draft")
    other = Target.load(str(save_tiny(tmp_path / "other", "llama", seed=5, layers=4)))
    with pytest.raises(UserError, match=r"another target \(weights differ\)"):
        Eagle3Drafter.from_pretrained(tmp_path / "draft", other)


def test_settings_that_make_no_head_are_refused(target, tiny_target):
    with pytest.raises(UserError, match="no reduced vocabulary"):
        Eagle1Drafter(KINDS["eagle"], layer_config(target.model.config), target, torch.arange(9))
    with pytest.raises(UserError, match=r"one layer, got \[1, 2\]"):
        Eagle1Settings([1, 2], WIDTH)
    with pytest.raises(UserError, match=r"layer id must lie in 0\.\.3"):
        build_eagle(target, three([0, 1, 4]))
    with pytest.raises(UserError, match="layer ids must be distinct"):
        build_eagle(target, three([1, 1, 2]))
    narrow = layer_config(tiny_target("llama", width=16).model.config)
    with pytest.raises(UserError, match="16 wide, the target 32"):
        Eagle3Drafter(three(), narrow, target)


def test_the_default_layers_are_low_middle_and_high():
    assert default_captures(8) == [1, 3, 4]
    assert default_captures(32) == [1, 15, 28]
    for few in (2, 4, 5, 6):
        with pytest.raises(UserError, match=r"method\.layers: the defaults"):
            default_captures(few)
