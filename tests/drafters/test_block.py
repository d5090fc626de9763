"""Block drafters: what is drafted is what is trained, whatever sees what inside of a block."""

from __future__ import annotations

import json

import pytest
import torch

from drafters.attention import Blocks, attend, attend_blocks
from drafters.block import BlockDrafter
from drafters.block_settings import BlockSettings, default_captures
from drafters.layers import layer_config
from drafters.mask_token import check_mask_token, default_mask_token
from drafters.round import Budget
from drafters.text import Text
from drafters.trees.dynamic import DynamicTree
from target.model import Target
from target.outputs import TargetOutputs
from target.sampling import Sampling
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
from tests.helpers.kernels import chosen_as_on_a_gpu
from tests.helpers.tiny import (
    EOS,
    PAD,
    VOCAB_SIZE,
    prompts_of,
    save_tiny,
    tiny_model,
    tiny_tokenizer,
)
from trainer.errors import UserError
from trainer.shift import at_index

K = 4
KINDS = {
    "dflash": BlockSettings([0, 1], PAD, K + 1),
    "causal": BlockSettings([1], PAD, K + 1, causal=True),
    "from anchor": BlockSettings([1, 0], PAD, K, from_anchor=True),
    "both": BlockSettings(["final_norm"], PAD, K, causal=True, from_anchor=True),
    "reduced": BlockSettings([0, 1], PAD, K + 1, own_head=True),
}
KEPT = torch.tensor([i for i in range(VOCAB_SIZE) if i % 3])


def made(target, kind="dflash", layers=2) -> BlockDrafter:
    torch.manual_seed(0)
    config = layer_config(target.model.config)
    config.num_hidden_layers = layers
    kept = KEPT if kind == "reduced" else None
    return BlockDrafter.build(target, KINDS[kind], config, kept)


@pytest.fixture
def target(tiny_target):
    return tiny_target("llama")


# --- what is drafted is what is trained ----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_and_branches_follow_the_unroll(kind, target):
    drafter = randomised(made(target, kind))
    assert_rounds_follow_the_unroll(drafter, target, K)
    assert_branches_follow_the_unroll(drafter, target)
    assert_one_token_prompts_begin(drafter, target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_knows_no_state_of_its_anchor_or_later_and_no_token_behind_it(kind, target):
    drafter = randomised(made(target, kind))
    assert_causal(drafter, target, K)
    assert_starts_before_the_text_are_zero(drafter, target, K)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_the_anchors_state_does_not_move_what_is_drafted_behind_it(kind, target):
    """In the pass that is trained and in a round."""
    drafter, (text,) = randomised(made(target, kind)), prompts_of([14])
    ids, anchor = torch.tensor([text]), 9
    outputs = outputs_of(drafter, target, ids)
    columns = torch.zeros(1, 14, dtype=torch.bool)
    columns[0, anchor - 1] = True

    def drafted(hidden):
        made = drafter.states(Text(ids, columns=columns), TargetOutputs(hidden), K)
        states = [one[0, anchor + j] for j, one in enumerate(made)]
        prefilled(drafter, target, [text], [anchor])
        state = state_of(ids, [anchor + 1], outputs)
        state.outputs = TargetOutputs(hidden)
        return (
            torch.stack(states),
            drafter.start(state, Budget(K)).clone(),
            drafter._round.base.clone(),
        )

    plain = drafted(outputs.hidden)
    moved = {layer: states.clone() for layer, states in outputs.hidden.items()}
    for states in moved.values():
        states[:, anchor:] += 5.0
    for one, other in zip(drafted(moved), plain, strict=True):
        assert torch.equal(one, other)
    for states in moved.values():
        states[:, anchor - 1] += 5.0
    for one, other in zip(drafted(moved), plain, strict=True):
        assert not torch.allclose(one, other)


def by_hand(drafter, target, ids, hidden, column, depth):
    """Logits [depth, V] behind a column of one text, slot by slot, in float64."""
    settings, weights = drafter.settings, {n: t.double() for n, t in drafter.state_dict().items()}
    config, layers = drafter.config, drafter.config.num_hidden_layers

    def norm(x, name):
        scale = (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return x * scale * weights[name]

    def heads(x, name):
        return (weights[f"{name}.weight"] @ x).view(-1, config.head_dim)

    def turned(x, position):
        cos, sin = drafter.layers[0].rotary(torch.zeros(1), torch.tensor([[position]]))
        first, second = x.chunk(2, -1)
        return x * cos[0].double() + torch.cat([-second, first], -1) * sin[0].double()

    anchor = column + 1
    context = [
        norm(weights["fc.weight"] @ torch.cat([hidden[k][s].double() for k in settings.captures]),
             "hidden_norm.weight")
        for s in range(anchor)
    ]  # fmt: skip
    table = target.embedding.weight.double()
    slots = [table[int(ids[anchor])]] + [table[settings.mask_token]] * (settings.block_size - 1)
    for i in range(layers):
        name = f"layers.{i}"
        normed = [norm(x, f"{name}.input_layernorm.weight") for x in slots]
        inputs = [*enumerate(context), *((anchor + k, x) for k, x in enumerate(normed))]
        keys = [turned(norm(heads(x, f"{name}.k_proj"), f"{name}.k_norm.weight"), p)
                for p, x in inputs]  # fmt: skip
        values = [heads(x, f"{name}.v_proj") for _, x in inputs]
        out = []
        for k, x in enumerate(normed):
            query = turned(norm(heads(x, f"{name}.q_proj"), f"{name}.q_norm.weight"), anchor + k)
            seen = anchor + (k + 1 if settings.causal else settings.block_size)
            mixed = []
            for h, one in enumerate(query):
                g = h // (len(query) // len(keys[0]))
                score = torch.stack([key[g] @ one for key in keys[:seen]]) / len(one) ** 0.5
                mixed.append(score.softmax(0) @ torch.stack([v[g] for v in values[:seen]]))
            x = slots[k] + weights[f"{name}.o_proj.weight"] @ torch.cat(mixed)
            z = norm(x, f"{name}.post_attention_layernorm.weight")
            gate, up, down = (
                weights[f"{name}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
            )
            out.append(x + down @ (torch.nn.functional.silu(gate @ z) * (up @ z)))
        slots = out
    first = 1 - settings.from_anchor
    states = torch.stack([norm(x, "norm.weight") for x in slots[first : first + depth]])
    if not settings.own_head:
        return (states @ target.head.weight.double().T)[:, :VOCAB_SIZE]
    logits = torch.full((len(states), VOCAB_SIZE), -torch.inf, dtype=torch.float64)
    logits[:, KEPT] = states @ weights["lm_head.weight"].T
    return logits


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_the_networks_definition_slot_by_slot(kind, target):
    drafter = randomised(made(target, kind), 0.2)
    ids = torch.tensor(prompts_of([10]))
    outputs = outputs_of(drafter, target, ids)
    hidden = {layer: states[0] for layer, states in outputs.hidden.items()}
    for column in (0, 4):
        expected = by_hand(drafter, target, ids[0], hidden, column, K)
        found = [drafter.draft_logits(ids, outputs, d)[0, column + d] for d in range(1, K + 1)]
        close(torch.stack(found).double(), expected, 1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_fewer_tokens_are_the_first_of_the_block(kind, target):
    drafter, ids = randomised(made(target, kind)), torch.tensor(prompts_of([12]))
    outputs = outputs_of(drafter, target, ids)

    def drafted(count):
        prefilled(drafter, target, ids.tolist(), [7])
        tree = drafter.propose(state_of(ids, [8], outputs, sampling=Sampling(1.0)), Budget(count))
        assert tree.draft_forwards == 1
        return tree

    full, short = drafted(K), drafted(2)
    assert torch.equal(short.tokens, full.tokens[:, :2])
    close(short.probs, full.probs[:, :2])
    law = torch.stack([drafter.draft_logits(ids, outputs, d)[0, 6 + d] for d in range(1, K + 1)])
    close(full.probs[0], law.softmax(-1))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_blocks_is_that_of_each_block_alone(causal, monkeypatch):
    """In chunks or not, by the kernel of a GPU too, and its gradients; texts of a row, blocks and
    slots behind do not see each other."""
    torch.manual_seed(0)
    batch, heads, groups, width, length, count, size = 2, 4, 2, 8, 9, 5, 3
    queries = torch.randn(batch, heads, count * size, width, requires_grad=True)
    text, own = (
        tuple(torch.randn(2, batch, groups, n, width, requires_grad=True))
        for n in (length, count * size)
    )
    inputs = (queries, *text, *own)
    columns = torch.tensor([[0, 3, 4, 7, 8], [1, 2, 2, 5, 6]])
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [2] * 3 + [3] * 6])
    found, blocks = [], Blocks(columns, size, length, documents, causal)
    for slots in (1, 7, 128):
        monkeypatch.setattr("drafters.attention.SLOTS", slots)
        found.append(attend_blocks(queries, text, own, blocks))
    monkeypatch.setattr("drafters.attention.SLOTS", 1)
    with chosen_as_on_a_gpu():
        found.append(attend_blocks(queries, text, own, blocks))
    weights = torch.randn_like(queries)
    by_masks, by_kernel = (
        torch.autograd.grad((one * weights).sum(), inputs, retain_graph=True) for one in found[-2:]
    )
    for one, other in zip(by_masks, by_kernel, strict=True):
        close(one, other)
    for row in range(batch):
        for block, column in enumerate(columns[row].tolist()):
            mine = slice(block * size, (block + 1) * size)
            seen = [s for s in range(column + 1) if documents[row, s] == documents[row, column]]
            keys, values = (
                torch.cat([t[row : row + 1, :, seen], o[row : row + 1, :, mine]], 2)
                for t, o in zip(text, own, strict=True)
            )
            inside = torch.ones(size, size, dtype=torch.bool)
            inside = inside.tril() if causal else inside
            mask = torch.nn.functional.pad(inside, (len(seen), 0), value=True)[None]
            expected = attend(queries[row : row + 1, :, mine], keys, values, mask)
            for one in found:
                close(one[row : row + 1, :, mine], expected)


@torch.inference_mode()
def test_a_block_is_computed_at_the_columns_alone(target, monkeypatch):
    drafter, sizes = randomised(made(target)), []
    ids = torch.tensor(prompts_of([10, 10]))
    outputs = outputs_of(drafter, target, ids)
    columns = torch.zeros(2, 10, dtype=torch.bool)
    columns[0, [2, 5, 9]], columns[1, 4] = True, True  # nothing follows the last one
    every = list(drafter.states(Text(ids), outputs, K))
    drafter.norm.register_forward_hook(lambda own, given, made: sizes.append(made.shape[1]))
    some = list(drafter.states(Text(ids, columns=columns), outputs, K))
    assert sizes == [2 * (K + 1)]
    for depth, (found, whole) in enumerate(zip(some, every, strict=True), start=1):
        known = at_index(columns[:, : 10 - depth].unsqueeze(-1).float(), depth, 10)
        close(found, whole * known)
        assert int(found.any(-1).sum()) == int(known.sum()) - (depth > 9)


# --- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["dflash", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS][1:])]
)
def test_greedy_decoding_gives_the_targets_text(kind, target):
    drafter = fitted(made(target, kind, layers=1), target, K, steps=60, learning_rate=0.01)
    accepted = assert_greedy_text_is_the_targets(drafter, target, Budget(3))
    assert {0, 1} < set(accepted), "the slots must be right and wrong"
    for shape in (BUSHY, DynamicTree(12, 3, 4)):
        budget = Budget(3, tree=shape)
        with_tree = assert_greedy_text_is_the_targets(drafter, target, budget)
        assert sum(with_tree) / len(with_tree) > sum(accepted) / len(accepted)


def test_a_reduced_vocabulary_is_all_that_is_drafted(target):
    """Its matrix starts as rows of the target's and is trained; the target's is not touched."""
    drafter, ids = made(target, "reduced"), torch.tensor(prompts_of([12]))
    assert torch.equal(drafter.lm_head.weight, target.head.weight[KEPT])
    assert made(target).lm_head is None
    logits = drafter.draft_logits(ids, outputs_of(drafter, target, ids), 2)
    assert torch.equal(logits.isfinite().any(1)[0].nonzero()[:, 0], KEPT)
    assert drafter.draft_vocab_size == len(KEPT)
    assert fitted(drafter, target, K, steps=3).lm_head.weight.ne(target.head.weight[KEPT]).any()


# --- parameters, storage, errors ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_its_own_weights_are_trained_with_checkpointing_too(kind, target):
    drafter = randomised(made(target, kind), 0.1)
    assert_target_is_not_part_of(drafter, target)
    assert_gradients_reach_everything(drafter, target, K)
    drafter.gradient_checkpointing_enable()
    assert_gradients_reach_everything(drafter, target, K)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_drafter_loads_as_it_was(kind, target, tmp_path):
    assert_stored_whole(randomised(made(target, kind)), target, tmp_path)


def test_one_of_another_target_or_another_shape_is_refused(target, tmp_path):
    made(target).save_pretrained(tmp_path / "draft")
    other = Target.load(str(save_tiny(tmp_path / "other", "llama", seed=5)))
    with pytest.raises(UserError, match=r"another target \(weights differ\)"):
        BlockDrafter.from_pretrained(tmp_path / "draft", other)
    about = json.loads((tmp_path / "draft" / "drafter.json").read_text())
    about["layer"]["num_hidden_layers"] = 3
    (tmp_path / "draft" / "drafter.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"disagree \(.*layers\.2"):
        BlockDrafter.from_pretrained(tmp_path / "draft", target)


def test_captures_are_distinct_for_a_target_of_any_depth():
    assert default_captures(36) == [1, 9, 17, 25, 33]
    assert default_captures(8) == [1, 2, 3, 4, 5]
    for count in range(1, 81):
        found = default_captures(count)
        assert sorted(set(found)) == found
        assert 0 <= found[0] <= found[-1] < max(2, count) - 1 + (count == 1)


def test_a_block_of_one_slot_is_refused():
    with pytest.raises(UserError, match=r"method\.block_size must be >= 2, got 1"):
        BlockSettings([0], PAD, 1)


def named(tokens, **given) -> Target:
    """A target whose tokenizer has these special tokens."""
    tokenizer = tiny_tokenizer()
    for name in ("pad_token", "mask_token", "unk_token"):
        setattr(tokenizer, name, given.get(name))
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return Target(tiny_model("llama_padded"), tokenizer, "tiny", {}, (0,))


def test_the_mask_token_is_one_that_no_text_holds():
    assert default_mask_token(named([], pad_token="<|pad|>")) == PAD
    assert default_mask_token(named(["<mask>"], mask_token="<mask>")) == VOCAB_SIZE
    assert default_mask_token(named([], pad_token="<|endoftext|>")) == VOCAB_SIZE  # without a token
    assert check_mask_token(VOCAB_SIZE + 3, named([])) == VOCAB_SIZE + 3
    full = named([f"<{n}>" for n in range(28)])
    assert full.tokenizer.get_added_vocab()["<27>"] == 127
    assert default_mask_token(full) in full.tokenizer.get_added_vocab().values()
    for token, rule in ((40, "be a special token"), (128, r"in 0\.\.127")):
        with pytest.raises(UserError, match=rule):
            check_mask_token(token, named([]))


def test_a_row_of_zeros_is_no_mask_token():
    """As padding's often is: all slots would look the same to the first layer."""
    target = named([], pad_token="<|pad|>")
    with torch.no_grad():
        target.embedding.weight[PAD] = 0
        assert default_mask_token(target) == VOCAB_SIZE
        target.embedding.weight[VOCAB_SIZE:] = 0
        target.embedding.weight[2:4] = 0  # the other special tokens
        assert default_mask_token(target) == EOS  # behind which no text goes on
        with pytest.raises(UserError, match=r"have a row of the embedding that is not 0, got 1"):
            check_mask_token(PAD, target)
        target.embedding.weight.zero_()
        with pytest.raises(UserError, match="no special token whose row"):
            default_mask_token(target)
