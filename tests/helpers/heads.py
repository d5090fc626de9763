"""Checks that every head on the target must pass, whatever its network: what it drafts round by
round is the law it is trained on, and decoding with it gives the target's own text.

from tests.helpers.heads import assert_rounds_follow_the_unroll
"""

from __future__ import annotations

import copy
from itertools import count
from pathlib import Path

import torch

from drafters.round import Budget, DraftState
from drafters.text import Text
from drafters.trees.static import StaticTree
from eval.counters import check_invariants
from eval.engine import SpeculativeDecoder
from recipes import eagle3
from target.cache import CachedModel
from target.decode import Request, decode
from target.model import Target
from target.outputs import TargetOutputs
from target.sampling import KeyedRandom, Sampling, row_key
from tests.helpers.tiny import VOCAB_SIZE, assert_same_greedy, prompts_of

GREEDY = Sampling(0.0)
CAPACITY = 64
JUNK = 77  # a token that would matter if it were looked at
BUSHY = StaticTree(
    ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0))
)


def randomised(drafter, std=0.3, seed=0):
    """Every parameter away from its start, so that no path through the network is dead."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += std * torch.randn(parameter.shape, generator=generator)
    return drafter.eval()


def eagle3_word(folder: Path, target: Path) -> str:
    """model.drafter=..., an EAGLE-3 head for a target of two layers, on which the default captures
    collide; made anew below `folder`."""
    loaded = Target.load(str(target))
    torch.manual_seed(0)
    drafter = eagle3.Recipe(eagle3.Config(layers=[0, 1]), loaded).build([])
    drafter.save_pretrained(folder / "eagle3-head")
    return f"model.drafter={folder / 'eagle3-head'}"


def outputs_of(drafter, target, ids):
    return target.outputs(ids, layers=drafter.target_layers, logits=False)


def padded(texts):
    ids = torch.full((len(texts), CAPACITY), JUNK)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    return ids


def state_of(ids, lengths, outputs, junk=float("nan"), sampling=GREEDY):
    """As the engine shows it: nothing but junk past the last committed token, and where the target
    has not been yet."""
    shown = ids.clone()
    hidden = {layer: states.clone() for layer, states in outputs.hidden.items()}
    for row, length in enumerate(lengths):
        shown[row, length:] = JUNK
        for states in hidden.values():
            states[row, length - 1 :] = junk
    keys = torch.tensor([row_key(0, [row], 0) for row in range(len(ids))])
    return DraftState(
        shown, torch.tensor(lengths), max(lengths), sampling, KeyedRandom(keys),
        TargetOutputs(hidden),
    )  # fmt: skip


def prefilled(drafter, target, texts, lengths, rows=None):
    """With the prompts of these lengths, right-padded."""
    width = max(lengths)
    ids = padded(texts)[:, :width]
    for row, length in enumerate(lengths):
        ids[row, length:] = JUNK
    if rows is None:
        drafter.begin(len(texts), CAPACITY)
        rows = torch.arange(len(texts))
    drafter.prefill(rows, ids, torch.tensor(lengths), outputs_of(drafter, target, ids))


# A round and the unroll feed one another's float32 outputs over several steps: 2e-5 apart on a
# processor with AVX-512, 1e-16 in float64.
STEPS_APART = 3e-5


def close(got, wanted, tolerance=1e-5):
    """Relative to the largest: sums of float32 in another order err by the size of their terms."""
    largest = wanted[wanted.isfinite()].abs().amax().clamp(min=1).item()
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * largest)


@torch.inference_mode()
def assert_rounds_follow_the_unroll(drafter, target, K):
    """Rounds that accept 0..K tokens, each after one that drafted other tokens into the slots, then
    with fewer rows, then with a refilled one."""
    texts = prompts_of([40, 28, 34])
    lengths = [12, 1, 5]

    def laws(ids):
        outputs = outputs_of(drafter, target, ids)
        return outputs, [drafter.draft_logits(ids, outputs, d) for d in range(1, K + 1)]

    ids = padded(texts)
    outputs, expected = laws(ids)
    prefilled(drafter, target, texts, lengths)
    lengths = [length + 1 for length in lengths]

    def check_round():
        state = state_of(ids, lengths, outputs)
        for wrong in (True, False):
            logits = drafter.start(state, Budget(K)).unsqueeze(1)
            parents = torch.full((len(ids), 1), -1)
            for depth in range(1, K + 1):
                for row, length in enumerate(lengths):
                    at = length - 2 + depth
                    if not wrong and at < len(texts[row]):
                        close(logits[row, 0], expected[depth - 1][row, at], STEPS_APART)
                if depth == K:
                    break
                tokens = torch.stack([ids[r, n + depth - 1] for r, n in enumerate(lengths)])
                tokens = (tokens + 31 * wrong) % VOCAB_SIZE
                logits = drafter.extend(tokens.unsqueeze(1), parents, depth)
                parents = parents + 1

    check_round()
    for accepted in ([0, K, 1], [K, K, 0], [1, 0, K], [0, 1, 0], [K, 2, K], [0, 0, 0]):
        lengths = [n + min(count, K) + 1 for n, count in zip(lengths, accepted, strict=True)]
        check_round()
    # the third row goes on as the first, the first as the second
    kept = torch.tensor([2, 0])
    drafter.keep(kept)
    lengths, texts = [lengths[2], lengths[0]], [texts[2], texts[0]]
    ids, outputs, expected = padded(texts), *laws(padded(texts))
    check_round()
    lengths = [length + 2 for length in lengths]
    check_round()
    texts[1] = prompts_of([25], seed=9)[0]
    lengths[1] = 8
    prefilled(drafter, target, texts[1:], [7], torch.tensor([1]))
    ids, outputs, expected = padded(texts), *laws(padded(texts))
    check_round()


@torch.inference_mode()
def assert_one_token_prompts_begin(drafter, target):
    """Nothing to prefill but a single position."""
    texts = prompts_of([9, 9])
    ids = padded(texts)
    outputs = outputs_of(drafter, target, ids)
    prefilled(drafter, target, texts, [1, 1])
    got = drafter.start(state_of(ids, [2, 2], outputs), Budget(2))
    close(got, drafter.draft_logits(ids, outputs, 1)[:, 1])


@torch.inference_mode()
def assert_branches_follow_the_unroll(drafter, target, depth=3):
    """The children of every node have the law of a text in which its path is the true one, and the
    root's states are the last known. All branches lie in the slots at once."""
    texts = prompts_of([17, 9, 13], seed=3)
    ids = padded(texts)
    outputs = outputs_of(drafter, target, ids)
    lengths = [len(text) for text in texts]
    prefilled(drafter, target, texts, [n - 1 for n in lengths])
    drafter.start(state_of(ids, lengths, outputs), Budget(depth))
    generator = torch.Generator().manual_seed(1)
    paths: list[list[list[int]]] = [[[]] for _ in texts]  # of the nodes fed, the root first
    before, fed = [-1], 0
    for level in range(1, depth):
        parents = [one for one in before for _ in range(3 - level)] + before[-1:]
        tokens = torch.randint(0, VOCAB_SIZE, (len(texts), len(parents)), generator=generator)
        above = torch.tensor([parents] * len(texts))
        above[1] = above[1].flip(0)  # rows may have different trees
        logits = drafter.extend(tokens, above, level)
        before = list(range(fed, fed + len(parents)))
        fed += len(parents)
        for row, text in enumerate(texts):
            for node, token in enumerate(tokens[row].tolist()):
                path = [*paths[row][int(above[row, node]) + 1], token]
                paths[row].append(path)
                whole = torch.tensor([text + path])
                states = {k: v[row : row + 1, : whole.shape[1]] for k, v in outputs.hidden.items()}
                law = drafter.draft_logits(whole, TargetOutputs(states), level + 1)
                close(logits[row, node], law[0, -1], STEPS_APART)


@torch.inference_mode()
def assert_drafts_kept_tokens_only(drafter, target, kept, K):
    """As a chain and as a tree, greedy and sampled; the rest has no probability at any depth."""
    ids = torch.tensor(prompts_of([12, 12]))
    outputs = outputs_of(drafter, target, ids)
    outside = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    outside[kept] = False
    assert drafter.draft_vocab_size == len(kept) < VOCAB_SIZE
    for depth in range(1, K + 1):
        q = drafter.draft_logits(ids, outputs, depth)[:, depth:].softmax(-1)
        assert not bool(q[..., outside].any())
        assert bool((q[..., kept] > 0).all())
        close(q.sum(-1), torch.ones(q.shape[:-1]))
    for sampling in (GREEDY, Sampling(1.0)):
        for tree in (None, BUSHY):
            prefilled(drafter, target, ids.tolist(), [8, 8])
            state = state_of(ids, [9, 9], outputs, sampling=sampling)
            drafted = drafter.propose(state, Budget(3, tree=tree)).tokens
            assert torch.isin(drafted, kept).all()


def differ(got, wanted):
    """The laws of every row, beyond rounding; [B, V] logits, of which some may be -inf."""
    known = wanted.isfinite()
    return bool(torch.where(known, got - wanted, 0.0).abs().amax(-1).min() > 1e-3)


@torch.inference_mode()
def assert_causal(drafter, target, K):
    """Logits at index i do not know token i + 1, nor target states later than their round had; and
    they know the token and the state just before that."""
    ids = torch.tensor(prompts_of([16, 16], seed=5))
    outputs = outputs_of(drafter, target, ids)
    for depth in range(1, K + 1):
        plain = drafter.draft_logits(ids, outputs, depth)
        changed = ids.clone()
        changed[:, 9] = (changed[:, 9] + 1) % VOCAB_SIZE
        same_states = drafter.draft_logits(changed, outputs, depth)
        own_states = drafter.draft_logits(changed, outputs_of(drafter, target, changed), depth)
        close(same_states[:, :9], plain[:, :9], 1e-6)
        close(own_states[:, :9], plain[:, :9], 1e-6)
        assert differ(own_states[:, 9 + depth], plain[:, 9 + depth])
        hidden = {k: v.clone() for k, v in outputs.hidden.items()}
        for states in hidden.values():
            states[:, 9] += 1.0
        moved = drafter.draft_logits(ids, TargetOutputs(hidden), depth)
        close(moved[:, : 9 + depth], plain[:, : 9 + depth], 1e-6)
        assert differ(moved[:, 9 + depth], plain[:, 9 + depth])
        rolled = {k: v.roll(1, 1) for k, v in outputs.hidden.items()}
        shifted = drafter.draft_logits(ids, TargetOutputs(rolled), depth)
        assert differ(shifted[:, depth:], plain[:, depth:])


@torch.no_grad()
def assert_starts_before_the_text_are_zero(drafter, target, K):
    """No round begins there; wrapped tokens would show as something else."""
    ids = torch.tensor(prompts_of([6]))
    outputs = outputs_of(drafter, target, ids)
    unrolled = list(drafter.states(Text(ids), outputs, K))
    assert len(unrolled) == K
    for depth, states in enumerate(unrolled, start=1):
        extra = drafter.output_head(depth).extra
        corrected = 0 if extra is None else extra.shape[1]
        assert states.shape == (1, 6, target.hidden_size + corrected)
        assert not bool(states[:, :depth].any())
        assert bool(states[:, depth:].any(-1).all())
    short = torch.tensor(prompts_of([2]))
    states = list(drafter.states(Text(short), outputs_of(drafter, target, short), K))
    assert [bool(one.any()) for one in states] == [True] + [False] * (K - 1)


def assert_target_is_not_part_of(drafter, target):
    theirs = {p.data_ptr() for p in target.model.parameters()}
    assert not any(p.data_ptr() in theirs for p in drafter.parameters())
    assert not any(t.data_ptr() in theirs for t in drafter.state_dict().values())
    assert all(p.requires_grad for p in drafter.parameters())
    copied = copy.deepcopy(drafter)
    assert copied.shared.target is target
    ours = {p.data_ptr() for p in drafter.parameters()}
    assert not any(p.data_ptr() in ours for p in copied.parameters())


def assert_gradients_reach_everything(drafter, target, K, but=()):
    """And nothing of the target. `but`: names of parameters that get none."""
    drafter.train()
    ids = torch.tensor(prompts_of([12, 12]))
    outputs = outputs_of(drafter, target, ids)

    def score(unrolled):
        logits = (drafter.project(states, depth) for depth, states in enumerate(unrolled, 1))
        return sum(one[:, K:].logsumexp(-1).sum() for one in logits)

    drafter(Text(ids), outputs, K, score).backward()
    for name, parameter in drafter.named_parameters():
        got = parameter.grad is not None and bool(parameter.grad.any())
        assert got == (name not in but), name
    assert all(p.grad is None for p in target.model.parameters())
    drafter.zero_grad(set_to_none=True)
    drafter.eval()


def assert_stored_whole(drafter, target, folder):
    drafter.rank_accuracy = {"0": [[0.5, 0.25], [0.5, 0.0]]}
    drafter.save_pretrained(folder)
    again = type(drafter).from_pretrained(folder, target)
    assert not again.training
    assert again.rank_accuracy == drafter.rank_accuracy
    theirs = again.state_dict()
    assert list(theirs) == list(drafter.state_dict())
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    ids = torch.tensor(prompts_of([11]))
    outputs = outputs_of(drafter, target, ids)
    with torch.no_grad():
        for depth in (1, 2):
            wanted = drafter.draft_logits(ids, outputs, depth)
            assert torch.equal(again.draft_logits(ids, outputs, depth), wanted)
    fresh = drafter.fresh()
    assert not fresh.training
    shapes = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
    assert {name: tensor.shape for name, tensor in fresh.state_dict().items()} == shapes
    assert fresh.about() == again.about() == drafter.about()


# --- decoding ------------------------------------------------------------------------------------

PROMPTS = prompts_of([4, 15, 1, 8, 22], seed=7)
NEW_TOKENS = 16
_PLAIN: dict[int, list[list[int]]] = {}


def plain_texts(target):
    """The target's own greedy text, computed once a model."""
    if id(target) not in _PLAIN:
        requests = [Request(p, 0, GREEDY, i) for i, p in enumerate(PROMPTS)]
        found = decode(
            CachedModel(target.model), requests, max_new_tokens=NEW_TOKENS, eos_ids=(),
            batch_size=1, vocab_size=target.vocab_size,
        )  # fmt: skip
        texts = {one.request.tag: one.response_ids for one in found}
        _PLAIN[id(target)] = [texts[i] for i in range(len(PROMPTS))]
    return _PLAIN[id(target)]


def fitted(drafter, target, K, steps=40, learning_rate=0.02):
    """Trained on the very text it is asked to draft, but at a third of the tokens to find another
    one more likely: right in most places, wrong in some, where a tree still holds the right one."""
    torch.manual_seed(0)
    texts = [p + t for p, t in zip(PROMPTS, plain_texts(target), strict=True)]
    length = max(map(len, texts))
    ids = padded(texts)[:, :length]
    outputs = outputs_of(drafter, target, ids)
    valid = torch.arange(length - 1) < torch.tensor([len(t) - 1 for t in texts]).unsqueeze(1)
    share = torch.where(torch.rand(valid.shape) < 0.67, 1.0, 0.4)  # of the right token
    optimizer = torch.optim.Adam(drafter.parameters(), learning_rate)
    kept = getattr(drafter, "kept", None)

    def score(depth, states):
        logits = drafter.project(states, depth)[:, :-1]
        known = valid.clone()
        known[:, :depth] = False
        right, wrong = ids[:, 1:], (ids[:, 1:] + 33) % VOCAB_SIZE
        if kept is not None:
            known &= torch.isin(right, kept) & torch.isin(wrong, kept)
        log_q = logits[known].log_softmax(-1)
        losses = [-log_q.gather(1, t[known].unsqueeze(1)).squeeze(1) for t in (right, wrong)]
        return (share[known] * losses[0] + (1 - share[known]) * losses[1]).mean()

    def scores(unrolled):
        return sum(map(score, count(1), unrolled))

    drafter.train()
    for _ in range(steps):
        optimizer.zero_grad()
        drafter(Text(ids), outputs, K, scores).backward()
        optimizer.step()
    return drafter.eval()


def assert_greedy_text_is_the_targets(drafter, target, budget, batch_sizes=(1, 3)):
    """Five prompts: rows are refilled and dropped. Returns how many drafts each round accepted."""
    reference = plain_texts(target)
    accepted = []
    for batch_size in batch_sizes:
        decoder = SpeculativeDecoder(
            CachedModel(target.model), drafter, sampling=GREEDY, budget=budget, eos_ids=(),
            max_new_tokens=NEW_TOKENS, batch_size=batch_size, vocab_size=target.vocab_size,
        )  # fmt: skip
        requests = [Request(p, 0, GREEDY, i) for i, p in enumerate(PROMPTS)]
        found = {one.request.tag: one for one in decoder.run(requests)}
        assert sorted(found) == list(range(len(PROMPTS)))
        counts = []
        for i, prompt in enumerate(PROMPTS):
            check_invariants(found[i].rounds, len(found[i].response_ids))
            assert_same_greedy(target.model, prompt, found[i].response_ids, reference[i])
            counts.append([r.engine_accepted for r in found[i].rounds])
        accepted.append(counts)
    # which drafts are right does not depend on who else is in the batch
    assert all(counts == accepted[0] for counts in accepted)
    return [count for row in accepted[0] for count in row]
