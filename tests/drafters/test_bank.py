"""Several drafters as one: who drafts what, that text stays the target's, the stored form."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.bank import DrafterBank, NaiveBayes
from drafters.causal_lm import CausalLMDrafter
from drafters.load import load_drafter
from drafters.round import Budget
from drafters.text import Text
from drafters.trees.table import parse_shape
from eval.engine import SpeculativeDecoder
from eval.policies.table import make_budget
from scripts import export
from target.cache import CachedModel
from target.decode import Request
from target.sampling import Sampling
from tests.helpers.tiny import assert_same_greedy, generated, perturbed, tiny_model
from trainer.errors import RunFault, UserError

A, B = [10, 11, 12], [50, 51, 52]  # the tokens of two domains


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


def router():
    return NaiveBayes.fit([A * 3, A, A, B * 3, B], list("aaabb"), 100)


@pytest.fixture(scope="module")
def bank(target):
    """One member near the target, one far from it."""
    members = [
        CausalLMDrafter._of(perturbed(target.model, 0.05), target, "near"),
        CausalLMDrafter._of(tiny_model("llama", seed=9), target, "far"),
    ]
    return DrafterBank(members, router()).eval()


def test_prompts_are_routed_by_their_tokens():
    found = router()
    assert found.names == ["a", "b"]  # the most frequent first
    assert [found.route(p) for p in (A, B, A + B[:1], [99])] == [0, 1, 0, 0]


def test_one_domain_is_no_bank():
    with pytest.raises(UserError, match="prompts of several domains, all 2 are of 'a'"):
        NaiveBayes.fit([A, B], ["a", "a"], 100)


def test_rows_read_at_once_are_those_of_their_member(bank):
    ids = torch.tensor([A * 4, B * 4, A * 4])
    bank.routed([A, B, A])
    with torch.no_grad():
        found = bank.draft_logits(ids)
        for row, member in enumerate((0, 1, 0)):
            own = bank.members[member].draft_logits(ids[row : row + 1])[0]
            torch.testing.assert_close(found[row], own, rtol=1e-4, atol=1e-4)
    with pytest.raises(RunFault, match="RoutingError: 3 prompts were routed for 2"):
        next(bank.states(Text(ids[:2]), None, 1))


@pytest.mark.parametrize("tree", [None, "dynamic:6:2:3"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_is_the_targets_and_each_row_is_drafted_by_its_member(target, bank, batch_size, tree):
    """With refills and compaction; the near member is accepted far more often."""
    prompts = [A * 3, B * 4, A * 5, B * 2, A * 2, B * 3]
    requests = [Request(p, i, Sampling(0.0), i) for i, p in enumerate(prompts)]
    budget = make_budget("fixed", 3) if tree is None else Budget.of(parse_shape(tree))

    def run(drafter):
        decoder = SpeculativeDecoder(
            CachedModel(target.model), drafter, sampling=Sampling(0.0), budget=budget,
            eos_ids=(), max_new_tokens=14, batch_size=batch_size, vocab_size=100,
        )  # fmt: skip
        return {one.request.tag: one for one in decoder.run(requests)}

    found, alone = run(bank), [run(member) for member in bank.members]
    for i, prompt in enumerate(prompts):
        ours = found[i].response_ids
        assert_same_greedy(target.model, prompt, ours, generated(target.model, prompt, 14))
        accepted = [round_.accepted for round_ in found[i].rounds]
        assert accepted == [round_.accepted for round_ in alone[i % 2][i].rounds]


def test_stored_whole_and_each_member_by_itself(target, bank, tmp_path):
    bank.save_pretrained(tmp_path)
    again = load_drafter(str(tmp_path), target)
    assert isinstance(again, DrafterBank)
    assert again.router.names == bank.router.names
    pairs = zip(again.state_dict().items(), bank.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    far = load_drafter(str(tmp_path / "member-1"), target)
    assert torch.equal(far.output_head().weight, bank.members[1].output_head().weight)
    file = tmp_path / "router.safetensors"
    stored = load_file(file)
    save_file(stored | {"log_token": stored["log_token"][:, 1:].contiguous()}, file)
    with pytest.raises(UserError) as caught:
        load_drafter(str(tmp_path), target)
    assert caught.value.key == str(file)
    file.unlink()
    with pytest.raises(UserError, match="is damaged"):
        load_drafter(str(tmp_path), target)


def test_no_engine_is_promised_for_it(bank, tmp_path, capsys):
    bank.save_pretrained(tmp_path)
    words = (f"script.drafter={tmp_path}", "script.engine=vllm", f"script.out={tmp_path / 'out'}")
    assert export.main(list(words)) == 2
    error = capsys.readouterr().err
    assert "no engine loads a drafter of kind 'bank', its own format is all" in error


def test_members_and_router_must_agree(bank):
    with pytest.raises(UserError, match="RoutingError: the router knows 2 drafters"):
        DrafterBank([bank.members[0]], router())


def test_a_step_reads_one_member(bank):
    one = sum(p.numel() for p in bank.members[0].parameters())
    looked_up = bank.members[0].model.get_input_embeddings().weight.numel()
    assert sum(p.numel() for p in bank.drafting_parameters()) == one - looked_up
    assert bank.num_parameters == 2 * one
    assert bank.fresh().kind == "bank"
