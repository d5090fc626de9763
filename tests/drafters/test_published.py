"""Published heads become drafters: folders written here by hand, under the published names."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import train
from drafters.block_settings import BlockSettings
from drafters.export.card import Export
from drafters.kinds import kind_of
from drafters.load import load_drafter
from drafters.round import Budget
from eval.engine import SpeculativeDecoder
from target.cache import CachedModel
from target.decode import Request
from target.model import Target
from target.outputs import TargetOutputs
from target.sampling import Sampling, row_key
from tests.helpers.commands import command
from tests.helpers.tiny import PAD, VOCAB_SIZE, generated, prompts_of
from trainer.errors import UserError

WIDTH, INNER, HEADS, GROUPS, HEAD_DIM, LAYERS = 32, 48, 4, 2, 8, 8
EMBEDDING, FP8 = "input_embed_fn.weight", torch.float8_e4m3fn
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


def layer_shapes(prefix, reads, inner=INNER):
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, reads),
        f"{prefix}.self_attn.k_proj.weight": (GROUPS * HEAD_DIM, reads),
        f"{prefix}.self_attn.v_proj.weight": (GROUPS * HEAD_DIM, reads),
        f"{prefix}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": (inner, WIDTH),
        f"{prefix}.mlp.up_proj.weight": (inner, WIDTH),
        f"{prefix}.mlp.down_proj.weight": (WIDTH, inner),
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


def dflash_by_hand(layout):
    """Two layers on two captures, as its authors, transformers and the speculators library save
    them; the last with a reduced vocabulary."""
    shapes = {"norm.weight": (WIDTH,)}
    named = ("encoder.fc", "encoder.output_norm_enc") if layout == "hf" else ("fc", "hidden_norm")
    shapes |= {f"{named[0]}.weight": (WIDTH, 2 * WIDTH), f"{named[1]}.weight": (WIDTH,)}
    for i in range(2):
        shapes |= layer_shapes(f"layers.{i}", WIDTH)
        shapes[f"layers.{i}.input_layernorm.weight"] = (WIDTH,)
        shapes |= {f"layers.{i}.self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    layers = {
        **LLAMA, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": HEAD_DIM,
        "layer_types": ["full_attention"] * 2, "attention_bias": False, "sliding_window": None,
    }  # fmt: skip
    block = {"block_size": 4, "mask_token_id": PAD}
    if layout == "flat":
        inner = {"mask_token_id": PAD, "target_layer_ids": [1, 4]}
        return {
            "architectures": ["DFlashDraftModel"], **layers, "block_size": 4,
            "num_target_layers": LAYERS, "dflash_config": inner, "auto_map": {"": "dflash.Model"},
        }, drawn(shapes)  # fmt: skip
    if layout == "hf":
        del layers["vocab_size"], layers["rope_theta"]
        return {
            **layers, **block, "architectures": ["MuseGlimmerAssistantModel"], "dtype": "bfloat16",
            "model_type": "muse_glimmer_assistant", "target_layer_ids": [1, 4],
            "rope_parameters": rope, "sliding_window": 2048, "attention_dropout": 0,
        }, drawn(shapes)  # fmt: skip
    shapes |= {"lm_head.weight": (24, WIDTH), "verifier_norm.weight": (WIDTH,)}
    _, maps = eagle3_by_hand()
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    return {
        **block, "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash",
        "speculators_version": "0.9.0", "draft_vocab_size": 24, "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [2, 5], "transformer_layer_config": layers,
        "sliding_window_non_causal": False, "sample_from_anchor": False,
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [proposal]},
    }, drawn(shapes) | {name: maps[name] for name in ("d2t", "t2d")}  # fmt: skip


RANK = 6


def dspark_by_hand(layout, target):
    """As its authors save it, with a copy of the target's tables; with the keys in `dflash_config`
    and a gate; and as the speculators library does, without the row before in the confidence."""
    nested = layout == "speculators"
    config, tensors = dflash_by_hand("speculators" if nested else "flat")
    rows = 24 if nested else VOCAB_SIZE
    names = {"markov_head.markov_w1": (VOCAB_SIZE, RANK), "markov_head.markov_w2": (rows, RANK)}
    names["confidence_head.proj"] = (1, WIDTH + RANK * (not nested))
    shapes = {f"{name}.weight": shape for name, shape in names.items()}
    shapes["confidence_head.proj.bias"] = (1,)
    keys = {
        "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": not nested,
    }  # fmt: skip
    if nested:
        del config["sliding_window_non_causal"]
        names = {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"}
        proposal = {"algorithm": "dspark", "proposal_methods": [{"proposal_type": "greedy"}]}
        config |= {**names, **keys, "sample_from_anchor": True, "speculators_config": proposal}
        return config, tensors | drawn(shapes)
    inner = config.pop("dflash_config")
    if layout == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, WIDTH + RANK)}
        shapes |= {"markov_head.gate_proj.bias": (RANK,)}
        keys |= {"markov_head_type": "gated", "projector_type": "dspark"}
        config |= {"architectures": ["DSparkDraftModel"], "dflash_config": inner | keys}
        return config, tensors | drawn(shapes)
    config |= {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, **inner, **keys}
    config |= {"sample_from_anchor": None}  # stands for the default
    own = target.embedding(torch.arange(VOCAB_SIZE)), target.head.weight
    tables = zip(("embed_tokens.weight", "lm_head.weight"), own, strict=True)
    return config, tensors | drawn(shapes) | {n: table.detach().clone() for n, table in tables}


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


def hydra_by_hand(target, arch, layers=2, heads=3):
    """As torch saves the published modules: dropout takes numbers of its own in a prefix-mlp, the
    repeated layer is named at each place, and the embedding is part of the heads."""
    shapes = {}
    for i in range(heads):
        reads = (i + 2) * WIDTH
        places = [0, *range(1, layers)] if arch == "mlp" else range(1, 2 * layers, 2)
        for j, place in enumerate(places):
            block = f"hydra_mlp.{i}.{place}"
            shapes[f"{block}.linear.weight"] = (WIDTH, WIDTH if j else reads)
            shapes[f"{block}.linear.bias"] = (WIDTH,)
            if j == 0:
                shapes[f"{block}.res_connection.weight"] = (WIDTH, reads)
                shapes[f"{block}.res_connection.bias"] = (WIDTH,)
        rows = f"hydra_lm_head.{i}" if arch == "mlp" else f"hydra_lm_head.{i}.1"
        shapes[f"{rows}.weight"], shapes[f"{rows}.bias"] = (VOCAB_SIZE, WIDTH), (VOCAB_SIZE,)
    if arch == "prefix-mlp":
        layer = "prefix_embeding_layer.layers.0"
        shapes |= {**layer_shapes(layer, WIDTH, inner=2 * WIDTH),
                   f"{layer}.input_layernorm.weight": (WIDTH,),
                   "prefix_embeding_layer.norm.weight": (WIDTH,),
                   "prefix_embeding_layer.embed_tokens.weight": (VOCAB_SIZE, WIDTH),
                   f"{layer}.self_attn.rotary_emb.inv_freq": (HEAD_DIM // 2,)}  # fmt: skip
    tensors = drawn(shapes)
    tensors["input_embed_fn.weight"] = target.embedding.weight.detach().clone()
    return {
        "hydra_num_heads": heads, "hydra_num_layers": layers, "hydra_head_arch": arch,
        "grounded_heads": True, "hidden_state_offset": 0, "transformers_version": "4.35.0",
        "base_model_name_or_path": "org/target",
    }, tensors  # fmt: skip


def repeat_layers(tensors, layers):
    """What `[block] * n` does: every later place holds the first one's weights."""
    for name in list(tensors):
        for place in range(3, layers + 1):
            at = f".{2 * place - 1}.linear."
            if name.startswith("hydra_mlp.") and at in name:
                tensors[name] = tensors[name.replace(at, ".3.linear.")]


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
    with pytest.raises(UserError, match=r"vLLM.* 'fc\.bias'.*engine=sglang") as caught:
        writers["vllm"](drafter, tmp_path / "vllm", asked)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "vllm").exists()


@pytest.mark.slow
def test_a_head_with_a_bias_is_measured_and_trained_further(target, tmp_path):
    config, tensors = eagle1_by_hand(target, bias=True)
    given = save(tmp_path / "published", config, tensors)
    words = ("recipe=eagle", f"model.drafter={given}", "trainer.max_steps=2", "trainer.lr=0.01")
    words = [w for w in command(tmp_path, target.name, *words) if not w.startswith("method.")]
    assert train.main(words) == 0
    trained = load_drafter(str(tmp_path / "run" / "drafter"), target)
    assert float((trained.fc.bias.detach() - tensors["fc.bias"]).abs().min()) > 0
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


@pytest.mark.parametrize("layout", ["flat", "hf", "speculators"])
def test_published_block_drafters_load(target, tmp_path, layout):
    """Of speculators the blocks are not causal, whatever its key for windows says."""
    config, tensors = dflash_by_hand(layout)
    drafter = load_drafter(save(tmp_path, config, tensors), target)
    assert drafter.target_layers == (1, 4)
    own_head = layout == "speculators"
    assert drafter.settings == BlockSettings([1, 4], PAD, 4, own_head=own_head)
    fc, norm_of = ("encoder.fc", "encoder.output_norm_enc") if layout == "hf" else (
        "fc", "hidden_norm"
    )  # fmt: skip
    assert torch.equal(drafter.fc.weight, tensors[f"{fc}.weight"])
    assert torch.equal(drafter.hidden_norm.weight, tensors[f"{norm_of}.weight"])
    last = drafter.layers[1]
    assert torch.equal(last.q_norm.weight, tensors["layers.1.self_attn.q_norm.weight"])
    assert torch.equal(last.mlp.down_proj.weight, tensors["layers.1.mlp.down_proj.weight"])
    if own_head:
        ids, order = (tensors["d2t"] + torch.arange(24)).sort()
        assert torch.equal(drafter.kept, ids)
        assert torch.equal(drafter.lm_head.weight, tensors["lm_head.weight"][order])
    assert_drafts(drafter, target)


@pytest.mark.parametrize("layout", ["flat", "gated", "speculators"])
def test_published_dspark_drafters_load(target, tmp_path, layout):
    """A confidence that reads the state alone reads the correction with weight 0."""
    config, tensors = dspark_by_hand(layout, target)
    drafter = load_drafter(save(tmp_path, config, tensors), target)
    nested = layout == "speculators"
    assert drafter.kind == "dspark"
    assert drafter.settings == BlockSettings(
        [1, 4], PAD, 4, from_anchor=True, own_head=nested, confidence=True, correction_rank=RANK,
        correction="gated" if layout == "gated" else "markov",
    )  # fmt: skip
    assert drafter.max_depth == 4
    own, out = drafter.correction, tensors["markov_head.markov_w2.weight"]
    assert torch.equal(own.lookup.weight, tensors["markov_head.markov_w1.weight"])
    if nested:
        out = out[(tensors["d2t"] + torch.arange(24)).argsort()]
    assert torch.equal(own.out.weight, out)
    if layout == "gated":
        assert torch.equal(own.gate.bias, tensors["markov_head.gate_proj.bias"])
    read = tensors["confidence_head.proj.weight"]
    assert torch.equal(drafter.confidence.out.weight[:, : read.shape[1]], read)
    assert not drafter.confidence.out.weight[:, read.shape[1] :].any()
    assert torch.equal(drafter.confidence.out.bias, tensors["confidence_head.proj.bias"])
    assert bool((drafter.confidence.temperatures == 1).all())
    assert_drafts(drafter, target)


def test_a_block_drafter_whose_file_repeats_the_targets_matrix_borrows_it(target, tmp_path):
    config, tensors = dflash_by_hand("flat")
    tensors["lm_head.weight"] = target.head.weight.detach().clone()
    assert load_drafter(save(tmp_path, config, tensors), target).lm_head is None
    tensors["lm_head.weight"][3] += 1
    drafter = load_drafter(save(tmp_path, config, tensors), target)
    assert torch.equal(drafter.lm_head.weight, tensors["lm_head.weight"])


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


def drafted_by_hydra(tensors, arch, layers, depth, states, embedded):
    """Logits of head `depth`, from the formula: the state, then the embeddings drafted so far."""
    if arch == "prefix-mlp":
        layer, norm_of = prefix_layer(tensors), "prefix_embeding_layer.norm.weight"
        state, first, rows = (
            norm(layer(states), tensors[norm_of]),
            1,
            f"hydra_lm_head.{depth - 1}.1",
        )
    else:
        state, first, rows = states[-1], 0, f"hydra_lm_head.{depth - 1}"
    u = torch.cat([state, *embedded[:depth]])
    block = f"hydra_mlp.{depth - 1}."

    def times(name, x):
        return tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"]

    r = times(f"{block}{first}.res_connection", u) + F.silu(times(f"{block}{first}.linear", u))
    for j in range(1, layers):
        r = r + F.silu(times(f"{block}{j if first == 0 else 2 * j + 1}.linear", r))
    return times(rows, r)


def prefix_layer(tensors):
    """The layer's output at the last of some states [T, H], by transformers' own module."""
    config = LlamaConfig(**LLAMA | {"intermediate_size": 2 * WIDTH})
    layer = LlamaDecoderLayer(config, 0).eval()
    own = "prefix_embeding_layer.layers.0."
    named = {n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)}
    layer.load_state_dict({n: t for n, t in named.items() if "rotary" not in n})

    def last(states):
        positions = LlamaRotaryEmbedding(config)(states[None], torch.arange(len(states))[None])
        mask = torch.full((len(states), len(states)), -torch.inf).triu(1)
        made = layer(states[None], attention_mask=mask[None, None], position_embeddings=positions)
        return (made[0] if isinstance(made, tuple) else made)[-1].reshape(-1, WIDTH)[-1]

    return last


@pytest.mark.parametrize(
    ("arch", "layers", "repeated"),
    [("mlp", 1, False), ("mlp", 2, False), ("prefix-mlp", 4, True), ("prefix-mlp", 3, False)],
)
def test_published_hydra_heads_load(target, tmp_path, arch, layers, repeated):
    config, tensors = hydra_by_hand(target, arch, layers)
    if repeated:
        repeat_layers(tensors, layers)
    drafter = load_drafter(save(tmp_path, config, tensors, "hydra_lm_head.pt"), target)
    assert (drafter.max_depth, drafter.settings.num_layers) == (3, layers)
    assert drafter.settings.prefix_layer == (arch == "prefix-mlp")
    assert drafter.settings.tie_layers == repeated
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, VOCAB_SIZE, (6,), generator=generator)
    states = torch.randn(6, WIDTH, generator=generator)
    embedded = target.embedding.weight[ids].detach()
    with torch.no_grad():
        for depth in (1, 2, 3):
            found = drafter.draft_logits(
                ids[None], TargetOutputs({"final_norm": states[None]}), depth
            )
            for t in range(6 - depth):
                wanted = drafted_by_hydra(
                    tensors, arch, layers, depth, states[: t + 1], embedded[t + 1 :]
                )
                torch.testing.assert_close(found[0, t + depth], wanted, rtol=1e-4, atol=1e-4)
    assert_drafts(drafter, target)
    drafter.save_pretrained(tmp_path / "own")
    again = load_drafter(str(tmp_path / "own"), target)
    assert again.num_parameters == drafter.num_parameters
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


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
        ("eagle1", lambda t, c: c.update(rms_norm_eps=0), "config.json describes no Llama layer"),
        ("eagle1", lambda t, c: c.update(num_attention_heads=0), "must divide hidden_size, 32"),
        ("eagle1", lambda t, c: c.update(rope_theta=-1.0), "'rope_theta' must be >= 0, got -1"),
        ("eagle1", lambda t, c: c.update(architectures=1), "'architectures' must be of type list"),
        ("eagle1", lambda t, c: c.update(num_hidden_layers=None), "cannot load .* causal language"),
        ("eagle1", lambda t, c: t.pop("fc.weight"), "tensor 'fc.weight' of shape .32, 64. is miss"),
        (
            "eagle1",
            lambda t, c: t.update({"fc.weight": t["fc.weight"].to(FP8)}),
            "got torch.float8",
        ),
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
        ("eagle3", lambda t, c: c.update({IDS: ["2", "3", "7"]}), f"'{IDS}' must be a list of num"),
        ("eagle3", lambda t, c: c.update({IDS: [3, 2, 7]}), f"'{IDS}' must name distinct layers"),
        ("eagle3", lambda t, c: c.update(norm_before_fc=True), "'norm_before_fc' must be False"),
        ("speculators", lambda t, c: c.update(speculators_model_type="mtp"), "'dflash' or 'dspa"),
        ("flat", lambda t, c: c["dflash_config"].pop("mask_token_id"), "'mask_token_id' is missi"),
        ("flat", lambda t, c: c.update(target_layer_ids=[1, 5]), "in dflash_config .1, 4.: leave"),
        ("flat", lambda t, c: t.update(d2t=torch.arange(24)), "'d2t' must have shape .100."),
        ("hf", lambda t, c: c.update(layer_types=["sliding_attention"] * 2), "full_attention alon"),
        ("hf", lambda t, c: c.update(model_type="qwen3"), "must be 'muse_glimmer_assistant'"),
        ("hf", lambda t, c: t.pop("encoder.fc.weight"), "'fc.weight' of shape .32, 64. is miss"),
        ("dspark", lambda t, c: c.update(markov_head_type="rnn"), "be vanilla or gated, got 'rnn'"),
        ("dspark", lambda t, c: c.update(markov_rank=0), "'markov_rank' must be >= 1, got 0"),
        ("dspark", lambda t, c: c.pop("markov_rank"), "key 'markov_rank' is missing"),
        ("dspark", lambda t, c: t.pop("confidence_head.proj.bias"), "bias' of shape .1. is missi"),
        ("dspark", lambda t, c: c.update(model_type="deepseek_v4"), "must be 'qwen3' here"),
        ("dspark", lambda t, c: c.update(dflash_config={"markov_rank": 7}), "is 6, in dflash_"),
        ("nested", lambda t, c: c.update(aux_hidden_state_layer_ids=[0, 5]), "got .-1, 4."),
        ("nested", lambda t, c: t["d2t"].fill_(0).add_(99), "'d2t' must lead .* below 100"),
        ("nested", lambda t, c: t["t2d"].fill_(True), "'t2d' and 'd2t' name different ids"),
        ("speculators", lambda t, c: c.pop("norm_before_residual"), "'norm_before_residual' is mi"),
        ("speculators", lambda t, c: t["norm.weight"].fill_(torch.inf), "'norm.weight' holds val"),
        ("medusa", lambda t, c: c.update(truncated_vocab_size=50), "'truncated_vocab_size' must"),
        ("medusa", lambda t, c: t.update(token_map=torch.arange(50)), "unknown tensor 'token_map'"),
        ("medusa", lambda t, c: t.pop("medusa_heads.1.1.weight"), "'medusa_heads.1.1.weight' of"),
        ("medusa", lambda t, c: c.update(num_heads=3), "'num_heads' must be 2"),
        ("medusa", lambda t, c: c.update(model_type=["medusa"]), "cannot load .* causal language"),
        ("medusa", lambda t, c: t.clear(), "the tensors are no Medusa heads, numbered from 0"),
        (
            "medusa",
            lambda t, c: t.update({"medusa_heads.0.99999999.linear.weight": torch.ones(2)}),
            "the tensors are no Medusa heads",
        ),
        ("hydra", lambda t, c: c.update(hydra_head_arch="cross-attn"), "'hydra_head_arch' must be"),
        ("hydra", lambda t, c: c.update(grounded_heads=False), "'grounded_heads' must be true"),
        ("hydra", lambda t, c: c.update(hidden_state_offset=2), "'hidden_state_offset' must be 0"),
        ("hydra", lambda t, c: c.update(hydra_num_heads=0), "'hydra_num_heads' is 0, and tensor"),
        (
            "hydra",
            lambda t, c: c.update(hydra_num_heads=4),
            "'hydra_lm_head.3.1.weight' is missing",
        ),
        ("hydra", lambda t, c: c.update(hydra_num_layers=10**12), "'hydra_num_layers' is 10000000"),
        (
            "hydra",
            lambda t, c: t.pop("hydra_mlp.1.1.res_connection.bias"),
            "bias' of shape .32. is",
        ),
        (
            "hydra",
            lambda t, c: t.update({EMBEDDING: torch.tensor(1.0)}),
            "'input_embed_fn.weight' d",
        ),
        ("hydra", lambda t, c: c.update(hydra_num_heads=2), "unknown tensor 'hydra_lm_head.2.1.b"),
        ("hydra", lambda t, c: c.pop("grounded_heads"), "key 'grounded_heads' is missing"),
        ("hydra", lambda t, c: t["input_embed_fn.weight"].add_(1), "'input_embed_fn.weight' diff"),
        (
            "hydra",
            lambda t, c: t.pop("hydra_lm_head.0.1.weight"),
            "'hydra_lm_head.0.1.weight' of shape",
        ),
        (
            "hydra",
            lambda t, c: t.update({"prefix_embeding_layer.norm.weight": torch.ones(16)}),
            "'prefix_embeding_layer.norm.weight' must have shape .32., got .16.",
        ),
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
        "hydra": lambda: hydra_by_hand(target, "prefix-mlp"),
        "flat": lambda: dflash_by_hand("flat"),
        "hf": lambda: dflash_by_hand("hf"),
        "nested": lambda: dflash_by_hand("speculators"),
        "dspark": lambda: dspark_by_hand("flat", target),
    }[make]()
    change(tensors, config)
    with pytest.raises(UserError, match=complaint) as caught:
        load_drafter(save(tmp_path, config, tensors), target)
    assert str(caught.value).startswith("model.drafter: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", ["eagle1", "hydra"])
def test_heads_in_half_precision_load_beside_a_target_in_float32(target, tmp_path, make, dtype):
    """The embedding among them is the target's, rounded."""
    config, tensors = {
        "eagle1": lambda: eagle1_by_hand(target, bias=True),
        "hydra": lambda: hydra_by_hand(target, "prefix-mlp"),
    }[make]()
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    drafter = load_drafter(save(tmp_path, config, tensors, "head.pt"), target)
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    name = "fc.weight" if make == "eagle1" else "hydra_mlp.0.1.linear.weight"
    own = drafter.fc.weight if make == "eagle1" else drafter.heads[0].first.weight
    assert torch.equal(own, tensors[name].float())


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
