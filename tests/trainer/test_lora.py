"""trainer.lora_rank: a correction of low rank is trained, an ordinary drafter comes out."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import train
from tests.helpers.commands import command
from trainer.config import TrainerConfig
from trainer.lora import attach

RECIPES = {
    "distillspec": ["method.control=false", "method.divergence=fkl", "method.draft_hidden_size=16"],
    "eagle": [],
    "eagle3": ["method.layers=[0,1]", "method.steps=2"],
    "medusa": [],
    "hydrapp": [],
}
LEFT_ALONE = ("lm_head", "embed", "wte", "wpe")
RANK = 2


def words(folder, target, recipe, *given):
    given = (f"recipe={recipe}", "trainer.batch_size=8", "trainer.lr=1e-2", "eval.num_prompts=1",
             "eval.timing_prompts=0", "eval.temperatures=0", *given)  # fmt: skip
    found = [w for w in command(folder, target, *given) if not w.startswith("method.")]
    return found + RECIPES[recipe]


def tensors(run):
    folder = run / "drafter"
    return load_file(folder / "model.safetensors")


# the layers of heads are their own, those of a causal LM the target's
@pytest.mark.usefixtures("unreported")
@pytest.mark.parametrize(
    ("recipe", "family"), [*((name, "llama") for name in RECIPES), ("distillspec", "gpt2")]
)
def test_it_adds_a_matrix_of_low_rank_to_every_layer_and_no_more(
    tmp_path, tiny_folder, monkeypatch, recipe, family
):
    monkeypatch.setattr("phases.stage.dev_evaluation", lambda *given, **options: None)
    target = tiny_folder(family)
    assert train.main(words(tmp_path, target, recipe)) == 0
    before = tensors(tmp_path / "run")
    tuned = tmp_path / "tuned"
    given = (f"model.drafter={tmp_path / 'run' / 'drafter'}", f"trainer.lora_rank={RANK}",
             "trainer.max_steps=3", f"run.dir={tuned}")  # fmt: skip
    assert train.main(words(tmp_path, target, recipe, *given)) == 0
    after = tensors(tuned)
    assert after.keys() == before.keys()
    adapted = 0
    for name, tensor in before.items():
        change = after[name].double() - tensor.double()
        matrix = tensor.ndim == 2 and name.endswith("weight")
        if not matrix or any(part in name for part in LEFT_ALONE):
            assert not change.any(), name
        else:
            adapted += 1
            assert change.any(), name  # an adapter that no pass reads would learn nothing
            values = torch.linalg.svdvals(change)
            assert values[RANK:].max() < 1e-4 * values[0] + 1e-7, name
    assert adapted >= 2


def test_an_adapter_adds_alpha_over_rank_times_its_product():
    torch.manual_seed(0)
    drafter = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False))
    before = drafter[0].weight.detach().clone()
    merge = attach(drafter, TrainerConfig(lora_rank=2, lora_alpha=6.0))
    a, b = (dict(drafter.named_parameters())[f"0.lora_{x}.default.weight"] for x in "AB")
    torch.nn.init.normal_(b)  # it starts at zero
    expected = before + 6.0 / 2 * b.detach() @ a.detach()
    merge()
    torch.testing.assert_close(drafter[0].weight.detach(), expected)


def test_merged_it_drafts_what_it_drafted(tiny_target):
    from drafters.causal_lm import CausalLMDrafter

    target = tiny_target("llama")
    torch.manual_seed(0)
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    names = set(drafter.state_dict())
    merge = attach(drafter, TrainerConfig(lora_rank=3, lora_alpha=6.0))
    trained = [name for name, p in drafter.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    ids = torch.arange(12).view(2, 6)
    plain = drafter.draft_logits(ids)
    for name, p in drafter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    with torch.no_grad():
        adapted = drafter.draft_logits(ids)
        merge()
        assert not torch.allclose(adapted, plain, atol=1e-3)
        assert torch.allclose(drafter.draft_logits(ids), adapted, atol=1e-5)
    assert set(drafter.state_dict()) == names
    assert all(p.requires_grad for p in drafter.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("unreported")
def test_a_run_that_was_stopped_goes_on(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setattr("phases.stage.dev_evaluation", lambda *given, **options: None)
    target = tiny_folder("llama")
    assert train.main(words(tmp_path, target, "medusa")) == 0
    given = (f"model.drafter={tmp_path / 'run' / 'drafter'}", f"trainer.lora_rank={RANK}",
             "trainer.save_every=1", f"run.dir={tmp_path / 'tuned'}")  # fmt: skip
    assert train.main(words(tmp_path, target, "medusa", *given)) == 0
    whole, before = tensors(tmp_path / "tuned"), tensors(tmp_path / "run")
    assert any(not torch.equal(whole[name], tensor) for name, tensor in before.items())
    stage = tmp_path / "tuned" / "stages" / "0-train"
    (stage / "finished.json").unlink()
    for path in stage.glob("checkpoints/**/step-000002"):
        for file in path.iterdir():
            file.write_bytes(b"")
    assert train.main(words(tmp_path, target, "medusa", *given)) == 0
    for name, tensor in tensors(tmp_path / "tuned").items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["recipe=medusa2", "trainer.lora_rank=2"], "method.lora_rank"),
        (["recipe=specdecpp", "trainer.lora_rank=2"], "acceptance head"),
        (["recipe=medusa", "trainer.lora_rank=2"], "model.drafter"),
        (["recipe=medusa", "trainer.lora_rank=-1"], "trainer.lora_rank must lie in 0.."),
        (["recipe=medusa", "trainer.lora_alpha=0"], "trainer.lora_alpha must be > 0"),
    ],
)
def test_what_it_means_nothing_to_says_so(tmp_path, tiny_folder, capsys, given, said):
    found = [w for w in command(tmp_path, tiny_folder("llama"), *given) if "method." not in w]
    assert train.main(found) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
