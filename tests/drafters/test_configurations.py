"""The configurations that trainers of heads ship are read right, or refused in one line."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from drafters.formats.reader import read
from tests.drafters.configurations import CONFIGURATIONS, LLAMA, MEDUSA, OTHERS
from trainer.errors import UserError

LAYERS = 100  # of the target
VOCAB, DRAFTED = 60, 24

LISTS = ("short_factor", "long_factor")
# name -> the key that is refused
REFUSED = {
    "specforge gpt-oss-20b": "architectures",
    "specforge qwen2.5-7b": "num_attention_heads",  # 5120 is no multiple of 28
    "specforge qwen3-30b moe draft": "architectures",
    "specforge qwen3.5 of transformers 5": "partial_rotary_factor",
    "specforge qwen3.5-122b moe": "architectures",
    "specforge qwen3-8b p-eagle": "architectures",
    "specforge qwen3-8b dflash": "dflash_config",  # which its trainer adds
    "specforge qwen3.5-4b mtp": "architectures",
    "specforge deepseek-r1": "architectures",
    "specforge qwq-32b": "architectures",
    "angelslim qwen2.5-7b": "num_hidden_layers",
    "speculators gpt-oss-20b": "norm_before_fc",
    "modelopt parallel draft": "parallel_draft_step",
    "llama4-maverick": "attention_bias",
    "nemo automodel p-eagle": "parallel_drafting",
}
# name -> base, type and further parameters, where it is not rope_theta alone
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = {
    "specforge deepseek-v3-671b": (1e4, "default", {}),
    "specforge gpt-oss-20b dense": (1e4, "default", {}),
    "specforge ling-flash-2.0": (1e4, "default", {}),
    "specforge llama4-scout": (1e4, "default", {}),
    "specforge llava": (1e4, "default", {}),
    "specforge qwen3-omni": (1e4, "default", {}),
    "eagle vicuna-13b": (1e4, "default", {}),
    "eagle llama2-70b": (1e4, "default", {}),
    "eagle3 llama3-8b": (1e4, "default", {}),
    "specforge llama3-70b": (5e5, "llama3", LLAMA3 | {"original_max_position_embeddings": 4096}),
    "specforge minicpm-v4": (
        1e4, "longrope", {"factor": 1.0, "original_max_position_embeddings": 32768},
    ),
    "nebius gpt-oss-20b": (
        1.5e5, "yarn",
        {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": 4096},
    ),
    **{
        name: (base, "llama3", LLAMA3 | {"original_max_position_embeddings": 8192})
        for name, base in (
            ("speculators hass llama3.1", 5e5), ("speculators hass mistral", 1e6),
            ("speculators eagle3 qwen3", 5e5), ("speculators online llama3.3-70b", 5e5),
            ("modelopt llama", 5e5), ("modelopt llama of transformers 5", 5e5),
        )
    },
}  # fmt: skip


def written(name, folder):
    """Write a head with these keys, of small sizes. Returns its further keys, positions, head_dim,
    rows of its output matrix, and whether it is EAGLE-1."""
    arch, dims, more = CONFIGURATIONS[name]
    width, _, heads, groups, head_dim, positions, vocab, drafted = dims
    config = {
        **OTHERS, "architectures": [arch], "intermediate_size": 40,
        "max_position_embeddings": positions, "vocab_size": VOCAB, **more,
    }  # fmt: skip
    if width % heads:
        config |= {"hidden_size": width, "num_attention_heads": heads}
    else:
        config |= {"hidden_size": 32, "num_attention_heads": 4}
    config["num_key_value_heads"] = None if groups is None else 4 if groups == heads else 2
    wide = 16 if head_dim not in (None, width // heads) else 8
    if head_dim is not None:
        config["head_dim"] = wide
    if config.get("target_hidden_size"):
        config["target_hidden_size"] = 32
    if isinstance(scaling := config.get("rope_scaling"), dict):
        lists = {k: (v * wide)[: wide // 2] for k, v in scaling.items() if k in LISTS}
        config["rope_scaling"] = scaling | lists
    rows = VOCAB if drafted in (None, vocab) else DRAFTED
    if drafted is not None:
        config["draft_vocab_size"] = rows
    one = arch == LLAMA and drafted is None
    grouped = (config["num_key_value_heads"] or 4) * wide
    reads = 32 if one else 64
    prefix = "layers.0" if arch.startswith("Eagle3S") or "modelopt" in name else "midlayer"
    shapes = {
        "fc.weight": (32, 64 if one else 96),
        f"{prefix}.self_attn.q_proj.weight": (4 * wide, reads),
        f"{prefix}.self_attn.k_proj.weight": (grouped, reads),
        f"{prefix}.self_attn.v_proj.weight": (grouped, reads),
        f"{prefix}.self_attn.o_proj.weight": (32, 4 * wide),
        f"{prefix}.mlp.gate_proj.weight": (40, 32),
        f"{prefix}.mlp.up_proj.weight": (40, 32),
        f"{prefix}.mlp.down_proj.weight": (32, 40),
        f"{prefix}.post_attention_layernorm.weight": (32,),
    }
    if not one:
        shapes |= {
            f"{prefix}.input_layernorm.weight": (32,), f"{prefix}.hidden_norm.weight": (32,),
            "norm.weight": (32,), "lm_head.weight": (rows, 32),
        }  # fmt: skip
        shapes |= {f"fc_norm.{i}.weight": (32,) for i in range(3) if config.get("fc_norm")}
    tensors = {key: torch.zeros(shape) for key, shape in shapes.items()}
    if rows < VOCAB:
        tensors["d2t"] = torch.arange(DRAFTED)
    if arch.startswith(("Eagle3S", "Eagle3D")):
        own = ("architectures", "draft_vocab_size", "target_hidden_size", "norm_before_residual",
               "norm_before_fc", "norm_output", "eagle_aux_hidden_state_layer_ids")  # fmt: skip
        nested = {k: v for k, v in config.items() if k not in own}
        config = {k: v for k, v in config.items() if k in own} | {
            "speculators_model_type": "eagle3", "transformer_layer_config": nested,
        }  # fmt: skip
    if "nemo" in name:  # whose names begin with that of the module around them
        inside = ("fc", "midlayer", "norm")
        tensors = {f"model.{k}" if k.startswith(inside) else k: t for k, t in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return more, positions, wide, rows, one


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_published_configuration_is_read_or_refused_by_key(name, tmp_path, capsys):
    more, positions, wide, rows, one = written(name, tmp_path)
    if name in REFUSED:
        with pytest.raises(UserError) as caught:
            read(tmp_path, num_target_layers=LAYERS)
        assert REFUSED[name] in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    head = read(tmp_path, num_target_layers=LAYERS)
    layer, said = head.layer, capsys.readouterr().out
    base, kind, rest = ROPE.get(name) or (more["rope_theta"], "default", {})
    rope = {k: v for k, v in layer.rope_parameters.items() if k not in LISTS}
    assert rope == {"rope_theta": base, "rope_type": kind, **rest}
    assert ("of images" in said) == ("mrope_section" in str(more))
    assert (layer.head_dim, layer.max_position_embeddings) == (wide, positions)
    assert head.vocab_size == VOCAB
    assert ("model_type is" in said) == (more["model_type"] != "llama")
    if one:
        assert (head.kind, head.captures) == ("eagle", ["final_norm"])
        return
    assert (head.kind, len(head.tensors["lm_head.weight"])) == ("eagle3", rows)
    assert head.flags["fc_norm"] == bool(more.get("fc_norm"))
    inner = more.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    passed = more.get("eagle_aux_hidden_state_layer_ids")
    named = inner or [k - 1 for k in passed or ()]
    assert head.captures == (named or [1, 49, 96])
    assert ("names no layers" in said) == (not named)


@pytest.mark.parametrize("name", MEDUSA)
def test_published_medusa_configurations_are_read(name, tmp_path):
    config, (heads, layers) = MEDUSA[name]
    sizes = {"hidden_size": 16, "vocab_size": VOCAB}
    config = config | {key: sizes[key] for key in sizes if key in config}
    tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = torch.zeros(16, 16)
            tensors[f"{i}.{j}.linear.bias"] = torch.zeros(16)
        tensors[f"{i}.{layers}.weight"] = torch.zeros(VOCAB, 16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    head = read(tmp_path)
    assert (head.num_heads, head.num_layers, head.vocab_size) == (heads, layers, VOCAB)


# --- the spellings of the rotary embedding -------------------------------------------------------

NEW, OLD = "rope_parameters", "rope_scaling"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("keys", "base", "kind"),
    [
        ({NEW: {"rope_type": "default"}, "rope_theta": 5e5}, 5e5, "default"),
        ({NEW: {"rope_theta": 5e5}}, 5e5, "default"),
        ({NEW: {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 500000}, 5e5, "default"),
        ({NEW: {"rope_theta": 5e5}, OLD: YARN}, 5e5, "yarn"),
        ({OLD: {**YARN, "rope_theta": 5e5}}, 5e5, "yarn"),
        ({OLD: {**YARN, "type": "yarn"}, "rope_theta": 7.0}, 7.0, "yarn"),
        ({NEW: YARN, OLD: YARN, "rope_theta": 7.0}, 7.0, "yarn"),
        ({NEW: {"full_attention": {"rope_type": "default", "rope_theta": 7.0}}}, 7.0, "default"),
        (
            {NEW: {"full_attention": {**YARN}, "sliding_attention": {"rope_theta": 3.0}},
             "rope_theta": 7.0},
            7.0, "yarn",
        ),
        ({OLD: {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 7.0}, 7.0, "default"),
        ({OLD: {"type": "linear", "factor": 2}}, 1e4, "linear"),
        ({}, 1e4, "default"),
    ],
)  # fmt: skip
def test_every_spelling_of_the_rotary_embedding_is_read(keys, base, kind, tmp_path):
    written("eagle3 llama3-8b", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    rope = read(tmp_path, num_target_layers=LAYERS).layer.rope_parameters
    assert (rope["rope_theta"], rope["rope_type"]) == (base, kind)


@pytest.mark.parametrize(
    ("keys", "key", "value"),
    [
        ({NEW: {"rope_theta": 5e5}, "rope_theta": 1e4}, f"{NEW}.rope_theta", 5e5),
        ({OLD: {**YARN, "rope_theta": 5e5}, "rope_theta": 1e4}, f"{OLD}.rope_theta", 5e5),
        ({NEW: {"rope_type": "default"}, OLD: YARN}, f"{OLD}.rope_type", "yarn"),
        ({NEW: YARN, OLD: {**YARN, "factor": 2.0}}, f"{OLD}.factor", 2.0),
        ({OLD: {**YARN, "type": "linear"}}, f"{OLD}.type", "linear"),
        ({OLD: {"type": "proportional"}}, f"{OLD}.type", "proportional"),
        ({OLD: {"type": ["yarn"]}}, f"{OLD}.type", ["yarn"]),
        ({OLD: {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}}, f"{OLD}.alpha", 1000.0),
        ({OLD: {"factor": 2.0}}, f"{OLD}.factor", 2.0),
        ({OLD: {"type": "linear", "factor": "2"}}, f"{OLD}.factor", "2"),
        ({"rope_theta": 0}, "rope_theta", 0),
        ({NEW: {"sliding_attention": {"rope_theta": 3.0}}}, NEW, ["sliding_attention"]),
        ({OLD: {"type": "linear"}}, "factor", ...),
        (
            {OLD: {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4,
                   "original_max_position_embeddings": 32}},
            "short_factor", "1 numbers",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5),
        ({"sliding_window": 64}, "sliding_window", 64),
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding_window", 64),
        (
            {"layer_types": ["sliding_attention"], "use_sliding_window": False},
            "layer_types", ["sliding_attention"],
        ),
    ],
)  # fmt: skip
def test_a_layer_that_is_described_twice_or_not_here_is_refused_by_key(keys, key, value, tmp_path):
    written("eagle3 llama3-8b", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(UserError) as caught:
        read(tmp_path, num_target_layers=LAYERS)
    assert caught.value.key == f"{tmp_path}: {key}"
    assert caught.value.value == value
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 28},
        {"sliding_window": 64, "layer_types": ["full_attention"], "use_sliding_window": True},
        {"sliding_window": None, "use_sliding_window": True},
    ],
)
def test_a_window_that_is_not_used_is_no_window(keys, tmp_path):
    written("eagle3 llama3-8b", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    assert read(tmp_path, num_target_layers=LAYERS).kind == "eagle3"
