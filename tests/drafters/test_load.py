"""Any drafter by name: own folders, published heads (written here by hand), ordinary models."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.base import check_fingerprint
from drafters.causal_lm import CausalLMDrafter
from drafters.eagle1 import Eagle1Settings
from drafters.eagle3 import Eagle3Settings
from drafters.export.card import Export
from drafters.hydra import HydraDrafter, HydraSettings
from drafters.kinds import kind_of
from drafters.load import drafter_folder, load_drafter
from drafters.medusa import MedusaDrafter, MedusaSettings
from tests.helpers.commands import pipe
from tests.helpers.eagle import build_eagle
from tests.helpers.tiny import VOCAB_SIZE
from trainer.errors import UserError

WIDTH, INNER, HEADS, GROUPS, HEAD_DIM, LAYERS = 32, 48, 4, 2, 8, 8
KEPT = torch.arange(3, 90, 4)
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def target(tiny_target):
    return tiny_target("llama", layers=LAYERS)


def test_a_head_from_before_the_eos_set_grew_is_refused_with_that_reason(target):
    stored = target.fingerprint | {"eos_ids": [7]}
    check_fingerprint(stored, target.fingerprint, "head")  # another set is none that grew
    now = stored | {"eos_ids": [0, 7]}
    with pytest.raises(UserError) as caught:
        check_fingerprint(stored, now, "head")
    assert (caught.value.key, caught.value.value) == ("drafter", "head")
    assert "ended at the token ids [7] alone; they end at [0, 7]" in caught.value.rule
    assert caught.value.remedy == "train it again"


def noisy(drafter, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=generator)
            else:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return drafter.eval()


def eagle(target, kept=None, **settings):
    if settings.get("version", 3) == 1:
        return noisy(build_eagle(target, Eagle1Settings(["final_norm"], WIDTH)))
    chosen = Eagle3Settings([2, 0, 5], WIDTH, **settings)
    return noisy(build_eagle(target, chosen, kept=kept))


def written(engine, drafter, folder):
    """The folder, as that engine's writer leaves it."""
    return kind_of(drafter).writers[engine](drafter, folder, Export("x", "org/target", 3))


def medusa(target, **settings):
    return noisy(MedusaDrafter.build(target, MedusaSettings(**settings)))


def test_the_folder_of_a_run_stands_for_its_drafter(target, tmp_path):
    """Until the run has trained one, the name of its folder is refused."""
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        load_drafter(str(tmp_path), target, key="eval.drafter")
    assert (caught.value.key, caught.value.value) == ("eval.drafter", str(tmp_path))
    assert caught.value.rule == "the run in this folder has no trained drafter yet"
    trained = medusa(target)
    trained.save_pretrained(tmp_path / "drafter")
    loaded = load_drafter(str(tmp_path), target)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert drafter_folder("model.drafter", str(tmp_path / "drafter")) == str(tmp_path / "drafter")


@pytest.mark.parametrize("name", ["./gone", "no/such/folder", "/gone"])
def test_a_missing_folder_is_not_asked_of_the_hub(name, target, monkeypatch):
    monkeypatch.setattr("drafters.load.snapshot_download", None)
    with pytest.raises(UserError) as caught:
        load_drafter(name, target)
    assert caught.value.rule == "there is no such file or folder"


def inputs(target, layers, length=9):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, VOCAB_SIZE, (2, length), generator=generator)
    return ids, target.outputs(ids, layers=layers, logits=False)


@torch.no_grad()
def law(drafter, target, depth):
    ids, outputs = inputs(target, drafter.target_layers)
    return drafter.draft_logits(ids, outputs, depth)


def assert_same_laws(ours, theirs, target, depths=2):
    for depth in range(1, depths + 1):
        torch.testing.assert_close(
            law(ours, target, depth), law(theirs, target, depth), rtol=1e-5, atol=1e-5
        )


# --- of this project ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal_lm", "medusa", "hydra", "eagle"])
def test_own_folders_load_as_what_they_are(target, tmp_path, kind):
    made = {
        "causal_lm": lambda: CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16),
        "medusa": lambda: medusa(target, num_heads=2),
        "hydra": lambda: noisy(HydraDrafter.build(target, HydraSettings(num_heads=2))),
        "eagle": lambda: eagle(target, kept=KEPT),
    }[kind]()
    made.save_pretrained(tmp_path)
    loaded = load_drafter(str(tmp_path), target)
    assert type(loaded) is type(made)
    assert_same_laws(made, loaded, target)


def test_an_ordinary_model_loads_as_causal_lm(target, tiny_folder):
    """One layer of Llama, too: an EAGLE-1 head calls itself the same."""
    for layers in (1, 2):
        folder = tiny_folder("llama", layers=layers)
        assert isinstance(load_drafter(str(folder), target), CausalLMDrafter)


def about(change):
    def damage(folder):
        content = json.loads((folder / "drafter.json").read_text())
        change(content)
        (folder / "drafter.json").write_text(json.dumps(content))

    return damage


def below(folder):
    folder.mkdir()
    return folder


def test_weights_far_below_the_folder_are_none_of_its_own(target, tmp_path):
    """A pipe there would not be seen before it is opened."""
    medusa(target, num_heads=2).save_pretrained(tmp_path)
    pipe(below(below(tmp_path / "a") / "b") / "c.safetensors")
    load_drafter(str(tmp_path), target)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda a: a["layer"].update(intermediate_size=10**9),
            "intermediate_size must fit the",
        ),
        (lambda a: a["layer"].update(num_hidden_layers=10**9), "num_hidden_layers must be at most"),
        (lambda a: a["layer"].update(num_attention_heads=0), "num_attention_heads must be a whole"),
        (lambda a: a["settings"].update(target_width=10**9), "target_width must fit the weights"),
    ],
)
def test_a_head_is_not_built_far_larger_than_its_weights(target, tmp_path, change, complaint):
    eagle(target).save_pretrained(tmp_path)
    about(change)(tmp_path)
    with pytest.raises(UserError, match=complaint) as caught:
        load_drafter(str(tmp_path), target)
    assert str(caught.value).startswith(f"model.drafter: {tmp_path / 'drafter.json'}: ")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (about(lambda a: a["target"].update(weights="other")), "made for another target"),
        (about(lambda a: a.update(kind="megalodon")), "of kind 'megalodon'; known: causal_lm,"),
        (about(lambda a: a.update(format=2)), "is stored in format 2, this version reads format 1"),
        (about(lambda a: a.pop("format")), "is stored in format None"),
        (about(lambda a: a.pop("kind")), "drafter.json is damaged .'kind'"),
        (about(lambda a: a.pop("settings")), "of kind 'medusa', is damaged .no settings"),
        (about(lambda a: a.pop("target")), "of kind 'medusa', is damaged .KeyError: 'target'"),
        (about(lambda a: a["settings"].update(depth=3)), "of kind 'medusa', is damaged .TypeErr"),
        (lambda f: (f / "drafter.json").write_text('{"kind": '), "cannot be read"),
        (lambda f: (f / "drafter.json").write_text("[]"), "must hold a table"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 40), "is damaged .Safetensor"),
        (lambda f: (f / "model.safetensors").unlink(), "is damaged .FileNotFound"),
        (about(lambda a: a.update(target=[1])), "of kind 'medusa', is damaged .AttributeError"),
        (about(lambda a: a.update(kind=["medusa"])), r"of kind \['medusa'\]; known: causal_lm,"),
        (about(lambda a: a.update(settings=[1])), "of kind 'medusa', is damaged .no settings"),
        (about(lambda a: a["settings"].update(num_heads="2")), "is damaged .TypeError"),
        (about(lambda a: a["settings"].update(num_heads=10**6)), "num_heads must fit the weights"),
        (about(lambda a: a.update(layer=[1])), "is damaged .AttributeError"),
        (about(lambda a: a.update(layer={"hidden_size": 0})), "layer: hidden_size must be a whole"),
        (lambda f: (f / "drafter.json").write_text("[" * 10**5), "it is nested too deep"),
        (lambda f: os.truncate(f / "drafter.json", 1 << 40), "drafter.json must have at most"),
        (lambda f: pipe(f / "a.safetensors"), "a.safetensors is a pipe: name a regular file"),
        (lambda f: pipe(below(f / "a") / "b.json"), "a/b.json is a pipe: name a regular file"),
    ],
)
def test_damaged_folders_are_refused_with_one_line(target, tmp_path, damage, complaint):
    medusa(target, num_heads=2).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=complaint) as caught:
        load_drafter(str(tmp_path), target)
    assert "\n" not in str(caught.value)


def lowered(tensors):
    return {n: t.to(torch.float8_e4m3fn) if t.dim() > 1 else t for n, t in tensors.items()}


def spoilt(tensors):
    return tensors | {min(tensors): torch.full_like(tensors[min(tensors)], torch.nan)}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (spoilt, "NaN or Inf in tensor 'blocks.0.layers.0.bias'"),
        (lowered, "it stores F8_E4M3 numbers without their scales: 2 tensors, such as 'blocks"),
    ],
)
def test_a_head_whose_numbers_are_none_is_refused(target, tmp_path, change, rule):
    medusa(target, num_heads=2, own_head=False).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(UserError) as caught:
        load_drafter(str(tmp_path), target)
    assert (caught.value.key, caught.value.value) == ("model.drafter", str(tmp_path))
    assert caught.value.rule.startswith(rule)


@pytest.mark.parametrize("own", [False, True])
def test_a_language_model_that_is_not_whole_is_no_drafter(target, tmp_path, own):
    made = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16, tie_embeddings=False)
    made.save_pretrained(tmp_path)
    if not own:  # as anyone's
        (tmp_path / "drafter.json").unlink()
    file = tmp_path / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if name != "lm_head.weight"}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError) as caught:
        load_drafter(str(tmp_path), target, key="eval.drafter")
    assert (caught.value.key, caught.value.value) == ("eval.drafter", str(tmp_path))
    assert caught.value.rule == "the checkpoint lacks tensor 'lm_head.weight'"


def test_what_is_nowhere_is_refused_with_one_line(target):
    for name in ("org/absent", "nowhere"):
        with pytest.raises(UserError, match=f"eval.drafter: cannot load '{name}'") as caught:
            load_drafter(name, target, key="eval.drafter")
        assert "\n" not in str(caught.value)


# --- exports come back --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_padded"])
@pytest.mark.parametrize(
    ("engine", "make"),
    [
        ("vllm", lambda t: medusa(t, num_heads=2, num_layers=2)),
        ("vllm", lambda t: medusa(t, num_heads=2, own_head=False)),
        ("vllm", lambda t: eagle(t, version=1)),
        ("vllm", lambda t: eagle(t)),
        ("vllm", lambda t: eagle(t, kept=KEPT, fc_norm=True, norm_output=True)),
        ("sglang", lambda t: eagle(t, version=1)),
        ("sglang", lambda t: eagle(t, kept=KEPT)),
        ("speculators", lambda t: eagle(t, norm_before_residual=True)),
        ("speculators", lambda t: eagle(t, kept=KEPT)),
    ],
)
def test_an_export_loads_with_the_same_law(tiny_target, tmp_path, name, engine, make):
    target = tiny_target(name, layers=LAYERS)
    drafter = make(target)
    loaded = load_drafter(str(written(engine, drafter, tmp_path / "out")), target)
    assert type(loaded) is type(drafter)
    assert_same_laws(drafter, loaded, target)
    assert loaded.num_parameters == drafter.num_parameters
    loaded.save_pretrained(tmp_path / "own")
    assert_same_laws(drafter, load_drafter(str(tmp_path / "own"), target), target)


def test_a_target_with_scaled_embeddings_takes_its_own_table_back(tiny_target, tmp_path):
    target = tiny_target("gemma3", layers=LAYERS)
    drafter = eagle(target)
    assert_same_laws(
        drafter, load_drafter(str(written("vllm", drafter, tmp_path / "x")), target), target
    )
