"""Published heads become drafters: folders written here by hand, under the published names."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import train
from drafters.export.card import Export
from drafters.kinds import kind_of
from drafters.load import load_drafter
from drafters.round import Budget
from eval.engine import SpeculativeDecoder
from target.cache import CachedModel
from target.decode import Request
from target.model import Target, TargetOutputs
from target.sampling import Sampling, row_key
from tests.commands import command
from tests.tiny import VOCAB_SIZE, generated, prompts_of
from trainer.config import UserError

WIDTH, INNER, HEADS, GROUPS, HEAD_DIM, LAYERS = 32, 48, 4, 2, 8, 8
IDS = "eagle_aux_hidden_state_layer_ids"

LLAMA = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "vocab_size": VOCAB_SIZE, "bos_token_id": 1, "use_cache": True,
}  # fmt: skip


def drawn(shapes):
    generator = torch.Generator().manual_seed(7)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def layer_shapes(prefix, reads):
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, reads),
        f"{prefix}.self_attn.k_proj.weight": (GROUPS * HEAD_DIM, reads),
        f"{prefix}.self_attn.v_proj.weight": (GROUPS * HEAD_DIM, reads),
        f"{prefix}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": (INNER, WIDTH),
        f"{prefix}.mlp.up_proj.weight": (INNER, WIDTH),
        f"{prefix}.mlp.down_proj.weight": (WIDTH, INNER),
        f"{prefix}.post_attention_layernorm.weight": (WIDTH,),
    }


def eagle1_by_hand(target, prefix="layers.0", bias=False):
    """As the original repository and HASS save them; `bias` of `fc`, which they have by default."""
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH), **({"fc.bias": (WIDTH,)} if bias else {})}
    tensors = drawn({**shapes, **layer_shapes(prefix, WIDTH)})
    tensors["embed_tokens.weight"] = target.embedding.weight.detach().clone()
    said = {} if bias else {"bias": False}
    return {"architectures": ["LlamaForCausalLM"], **LLAMA, **said}, tensors


def eagle3_by_hand(prefix="midlayer", drafted=24):
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        f"{prefix}.input_layernorm.weight": (WIDTH,),
        f"{prefix}.hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (drafted, WIDTH),
        **layer_shapes(prefix, 2 * WIDTH),
    }
    tensors = drawn(shapes)
    chosen = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))[:drafted]
    tensors["d2t"] = chosen - torch.arange(drafted)  # in no order
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    tensors["t2d"][chosen] = True
    config = {"architectures": ["LlamaForCausalLMEagle3"], **LLAMA, "draft_vocab_size": drafted}
    return config, tensors


def speculators_by_hand():
    config, tensors = eagle3_by_hand("layers.0")
    del config["architectures"], config["draft_vocab_size"]
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    return {
        "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "architectures": ["Eagle3Speculator"], "draft_vocab_size": 24,
        "norm_before_residual": True, IDS: [2, 4, 5], "transformer_layer_config": config,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [proposal]},
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "tie_word_embeddings": False,
    }, tensors  # fmt: skip


def medusa_by_hand(naming):
    """Two heads of one layer."""
    names = {
        "prefixed": ("medusa_heads.{}.0.linear.{}", "medusa_heads.{}.1.weight"),
        "original": ("{}.0.linear.{}", "{}.1.weight"),
        "blocks": ("blocks.{}.layers.0.{}", "lm_heads.{}.weight"),
    }[naming]
    shapes = {}
    for i in range(2):
        shapes[names[0].format(i, "weight")] = (WIDTH, WIDTH)
        shapes[names[0].format(i, "bias")] = (WIDTH,)
        shapes[names[1].format(i)] = (VOCAB_SIZE, WIDTH)
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1,
              "hidden_size": WIDTH, "vocab_size": VOCAB_SIZE}  # fmt: skip
    if naming == "original":  # whose uploads say too few heads
        config = {"medusa_num_heads": 1, "medusa_num_layers": 1, "version": "2",
                  "base_model_name_or_path": "org/target"}  # fmt: skip
    return config, drawn(shapes)


def save(folder, config, tensors, file="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)


def norm(x, weight):
    return x * (x.square().mean() + 1e-5).rsqrt() * weight


def first_column(prefix, tensors, token, feature, norm_before_residual=False):
    """What a head drafts first after two tokens: with one column, attention gives its value."""
    layer = {name.removeprefix(prefix + "."): tensor for name, tensor in tensors.items()}
    if "norm.weight" in layer:
        feature = tensors["fc.weight"] @ feature
        normed = norm(feature, layer["hidden_norm.weight"])
        x = torch.cat([norm(token, layer["input_layernorm.weight"]), normed])
        residual = normed if norm_before_residual else feature
    else:
        x = residual = tensors["fc.weight"] @ torch.cat([token, feature])
        if "fc.bias" in tensors:
            x = residual = x + tensors["fc.bias"]
    value = (layer["self_attn.v_proj.weight"] @ x).view(GROUPS, HEAD_DIM)
    value = value.repeat_interleave(HEADS // GROUPS, 0).flatten()
    hidden = residual + layer["self_attn.o_proj.weight"] @ value
    x = norm(hidden, layer["post_attention_layernorm.weight"])
    gated = F.silu(layer["mlp.gate_proj.weight"] @ x) * (layer["mlp.up_proj.weight"] @ x)
    hidden = hidden + layer["mlp.down_proj.weight"] @ gated
    return norm(hidden, layer["norm.weight"]) if "norm.weight" in layer else hidden


def first_law(drafter, target, ids, hidden):
    outputs = TargetOutputs({layer: state[None] for layer, state in hidden.items()})
    with torch.no_grad():
        return drafter.draft_logits(ids[None], outputs, 1)[0, 1]


def assert_drafts(drafter, target: Target):
    """Decoding with it gives the target's own text."""
    prompts = prompts_of([5, 9])
    decoder = SpeculativeDecoder(
        CachedModel(target.model), drafter, sampling=Sampling(0.0), budget=Budget(2), eos_ids=(),
        max_new_tokens=8, batch_size=2,
    )  # fmt: skip
    requests = [Request(prompt, row_key(0, prompt, 0), Sampling(0.0)) for prompt in prompts]
    for answer in decoder.run(requests):
        prompt = answer.request.prompt_ids
        assert answer.response_ids == generated(target.model, prompt, 8)


@pytest.fixture
def target(tiny_target):
    return tiny_target("llama", layers=LAYERS)


@pytest.fixture
def column(target):
    """ids [2], the states of every layer [2, H], the second token's embedding"""
    generator = torch.Generator().manual_seed(5)
    ids = torch.tensor([17, 42])
    layers = [*range(LAYERS), "final_norm"]
    hidden = {layer: torch.randn(2, WIDTH, generator=generator) for layer in layers}
    return ids, hidden, target.embedding.weight[42].detach()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["layers.0", "midlayer"])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_a_published_eagle1_head_loads(target, tmp_path, column, prefix, file, bias):
    config, tensors = eagle1_by_hand(target, prefix, bias)
    drafter = load_drafter(save(tmp_path, config, tensors, file), target)
    assert (drafter.fc.bias is not None) == bias
    ids, hidden, token = column
    state = first_column(prefix, tensors, token, hidden["final_norm"][0])
    expected = target.head.weight @ state
    torch.testing.assert_close(first_law(drafter, target, ids, hidden), expected)
    assert_drafts(drafter, target)


def test_a_bias_of_fc_is_stored_trained_and_given_to_engines_that_add_it(target, tmp_path, column):
    config, tensors = eagle1_by_hand(target, bias=True)
    drafter = load_drafter(save(tmp_path / "published", config, tensors), target)
    ids, hidden, _ = column
    drafter.save_pretrained(tmp_path / "own")
    writers, asked = kind_of(drafter).writers, Export("x", "org/target", 3)
    writers["sglang"](drafter, tmp_path / "sglang", asked)
    for folder in ("own", "sglang"):
        again = load_drafter(str(tmp_path / folder), target)
        assert torch.equal(again.fc.bias, tensors["fc.bias"])
        wanted = first_law(drafter, target, ids, hidden)
        assert torch.equal(first_law(again, target, ids, hidden), wanted)
    with pytest.raises(UserError, match=r"engine=vllm: .* 'fc\.bias'.*engine=sglang") as caught:
        writers["vllm"](drafter, tmp_path / "vllm", asked)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "vllm").exists()


def test_a_head_with_a_bias_is_measured_and_trained_further(target, tmp_path):
    config, tensors = eagle1_by_hand(target, bias=True)
    given = save(tmp_path / "published", config, tensors)
    words = ("recipe=eagle", f"model.drafter={given}", "trainer.max_steps=2", "trainer.lr=0.01")
    words = [w for w in command(tmp_path, target.name, *words) if not w.startswith("method.")]
    assert train.main(words) == 0
    trained = load_drafter(str(tmp_path / "run" / "drafter"), target)
    assert float((trained.fc.bias - tensors["fc.bias"]).abs().min()) > 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert {"before", "after"} <= {row["drafter"] for row in report["results"]}
    assert report["drafter"]["export"]["engine"] == "sglang"
    assert (tmp_path / "run" / "export" / "sglang" / "model.safetensors").exists()


def test_a_bias_of_zeros_is_no_bias(target, tmp_path):
    """SGLang's loader needs the tensor, so this project writes zeros for heads without one."""
    config, tensors = eagle1_by_hand(target)
    tensors["fc.bias"] = torch.zeros(WIDTH)
    assert load_drafter(save(tmp_path, config, tensors), target).fc.bias is None


@pytest.mark.parametrize("prefix", ["layers.0", "midlayer"])
@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (1, 3, 4)),  # the states behind 2, half and all but 3 of 8 layers
        ({IDS: [2, 3, 7]}, (1, 2, 6)),
        ({"eagle_config": {"use_aux_hidden_state": True, IDS: [2, 3, 7]}}, (2, 3, 7)),
    ],
)
def test_a_published_eagle3_head_loads(target, tmp_path, column, prefix, keys, layers):
    config, tensors = eagle3_by_hand(prefix)
    drafter = load_drafter(save(tmp_path, config | keys, tensors, "pytorch_model.bin"), target)
    assert drafter.target_layers == layers
    ids, hidden, token = column
    feature = torch.cat([hidden[layer][0] for layer in layers])
    rows = tensors["lm_head.weight"] @ first_column(prefix, tensors, token, feature)
    expected = torch.full((VOCAB_SIZE,), -torch.inf)
    expected[tensors["d2t"] + torch.arange(24)] = rows
    torch.testing.assert_close(first_law(drafter, target, ids, hidden), expected)
    assert drafter.kept.tolist() == sorted(drafter.kept.tolist())
    assert_drafts(drafter, target)


def test_a_published_speculators_head_loads(target, tmp_path, column):
    config, tensors = speculators_by_hand()
    drafter = load_drafter(save(tmp_path, config, tensors), target)
    assert drafter.target_layers == (1, 3, 4)
    ids, hidden, token = column
    feature = torch.cat([hidden[layer][0] for layer in (1, 3, 4)])
    state = first_column("layers.0", tensors, token, feature, norm_before_residual=True)
    found = first_law(drafter, target, ids, hidden)[tensors["d2t"] + torch.arange(24)]
    torch.testing.assert_close(found, tensors["lm_head.weight"] @ state)
    assert_drafts(drafter, target)


@pytest.mark.parametrize(
    ("naming", "file"),
    [
        ("prefixed", "model.safetensors"),
        ("original", "medusa_lm_head.pt"),
        ("original", "medusa_lm_head.safetensors"),
        ("blocks", "model.safetensors"),
    ],
)
def test_published_medusa_heads_load(target, tmp_path, column, naming, file):
    config, tensors = medusa_by_hand(naming)
    drafter = load_drafter(save(tmp_path, config, tensors, file), target)
    assert drafter.max_depth == 2
    ids, hidden, _ = column
    weight, bias, rows = list(tensors.values())[:3]
    state = hidden["final_norm"][0]
    state = state + F.silu(weight @ state + bias)
    torch.testing.assert_close(first_law(drafter, target, ids, hidden), rows @ state)
    assert_drafts(drafter, target)


def test_medusa_heads_that_share_the_targets_matrix_stay_shared(target, tmp_path):
    config, tensors = medusa_by_hand("blocks")
    tensors["lm_head.weight"] = target.head.weight.detach().clone()
    del tensors["lm_heads.0.weight"], tensors["lm_heads.1.weight"]
    config["original_lm_head"] = True
    drafter = load_drafter(save(tmp_path, config, tensors), target)
    assert not drafter.settings.own_head
    tensors["lm_head.weight"][3] += 1  # of its own, and one for all
    drafter = load_drafter(save(tmp_path, config, tensors), target)
    assert drafter.settings.own_head
    assert torch.equal(drafter.lm_heads[1].weight, tensors["lm_head.weight"])


class Intruder:
    def __reduce__(self):
        return (print, ("code in a weight file was run",))


@pytest.mark.parametrize(
    ("make", "change", "complaint"),
    [
        ("eagle1", lambda t, c: t["embed_tokens.weight"].mul_(2), "'embed_tokens.weight' differs"),
        ("eagle1", lambda t, c: t.update({"fc.bias": torch.ones(9)}), "'fc.bias' must have shape"),
        ("eagle1", lambda t, c: c.update(bias=True), "'fc.bias' of shape .32. is missing"),
        (
            "eagle1",
            lambda t, c: t.update({"lm_head.weight": torch.zeros(VOCAB_SIZE, WIDTH)}),
            "'lm_head.weight' differs",
        ),
        ("eagle1", lambda t, c: c.update(vocab_size=99), "'embed_tokens.weight' must have shape"),
        ("eagle1", lambda t, c: c.update(hidden_act="relu"), "'hidden_act' must be 'silu' here"),
        (
            "eagle1",
            lambda t, c: c.update(architectures=["QwenForCausalLMEagle"]),
            "'architectures' must name one of",
        ),
        ("eagle1", lambda t, c: c.pop("rms_norm_eps"), "key 'rms_norm_eps' is missing"),
        (
            "eagle3",
            lambda t, c: t.update({"embed_tokens.weight": torch.zeros(VOCAB_SIZE, WIDTH)}),
            "'embed_tokens.weight' differs from the target's",
        ),
        ("eagle3", lambda t, c: t.pop("d2t"), "'d2t' of shape .24. is missing"),
        ("eagle3", lambda t, c: t.update(d2t=t["d2t"].float()), "'d2t' must be torch.int64"),
        ("eagle3", lambda t, c: t.pop("lm_head.weight"), "'lm_head.weight' of shape .24, 32."),
        (
            "eagle3",
            lambda t, c: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(4)}),
            "unknown tensor 'layers.1.mlp.up_proj.weight'",
        ),
        (
            "eagle3",
            lambda t, c: t.update({"layers.0.mlp.up_proj.weight": torch.zeros(INNER, WIDTH)}),
            "mean the same",
        ),
        ("eagle3", lambda t, c: c.update({IDS: [2, 3, 9]}), f"'{IDS}' must name distinct layers"),
        ("eagle3", lambda t, c: c.update({IDS: [3, 2, 7]}), f"'{IDS}' must name distinct layers"),
        ("eagle3", lambda t, c: c.update(norm_before_fc=True), "'norm_before_fc' must be False"),
        ("speculators", lambda t, c: c.update(speculators_model_type="dflash"), "be 'eagle3' here"),
        ("speculators", lambda t, c: c.pop("norm_before_residual"), "'norm_before_residual' is mi"),
        ("speculators", lambda t, c: t["norm.weight"].fill_(torch.inf), "'norm.weight' holds val"),
        ("medusa", lambda t, c: c.update(truncated_vocab_size=50), "'truncated_vocab_size' must"),
        ("medusa", lambda t, c: t.update(token_map=torch.arange(50)), "unknown tensor 'token_map'"),
        ("medusa", lambda t, c: t.pop("medusa_heads.1.1.weight"), "'medusa_heads.1.1.weight' of"),
        ("medusa", lambda t, c: c.update(num_heads=3), "'num_heads' must be 2"),
        (
            "medusa",
            lambda t, c: (
                [t.update({n: x[:90]}) for n, x in t.items() if x.shape[0] == VOCAB_SIZE]
                and c.update(vocab_size=90)
            ),
            "vocabulary of 90, the target has 100",
        ),
    ],
)
def test_heads_that_cannot_be_taken_over_are_refused_by_name(
    target, tmp_path, make, change, complaint
):
    config, tensors = {
        "eagle1": lambda: eagle1_by_hand(target),
        "eagle3": eagle3_by_hand,
        "speculators": speculators_by_hand,
        "medusa": lambda: medusa_by_hand("prefixed"),
    }[make]()
    change(tensors, config)
    with pytest.raises(UserError, match=complaint) as caught:
        load_drafter(save(tmp_path, config, tensors), target)
    assert str(caught.value).startswith("model.drafter: ")
    assert "\n" not in str(caught.value)


def test_weight_files_that_hold_more_than_tensors_are_not_run(target, tmp_path, capsys):
    config, tensors = eagle3_by_hand()
    folder = save(tmp_path, config, {**tensors, "more": Intruder()}, "pytorch_model.bin")
    with pytest.raises(UserError, match="holds more than tensors"):
        load_drafter(folder, target)
    assert "was run" not in capsys.readouterr().out


def test_heads_come_from_the_hub_by_their_id(target, tmp_path, monkeypatch, tiny_folder):
    """From the cache of an earlier download: there is no network here."""
    commit = "0" * 40
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, config, tensors in (
        ("medusa", *medusa_by_hand("original")),
        ("eagle", *eagle1_by_hand(target)),
    ):
        repo = tmp_path / f"models--org--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(commit)
        (repo / "snapshots").mkdir()
        save(repo / "snapshots" / commit, config, tensors)
        assert load_drafter(f"org/{name}", target).kind == name
