"""What the configurations of published heads hold: keys and values, as their trainers ship them.

`CONFIGURATIONS`: name -> (arch, dims, further keys). `dims`: hidden_size, intermediate_size, heads,
key-value heads, head_dim (None: no such key), max_position_embeddings, vocab_size and
draft_vocab_size (None: no such key). `OTHERS` are keys that all of them have and no reader needs.
Of longrope two factors stand for as many as half of head_dim.
"""

from __future__ import annotations

from typing import Any

OTHERS = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "num_hidden_layers": 1, "pad_token_id": 0, "pretraining_tp": 1,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
}  # fmt: skip
FORGE, VLLM, LLAMA = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"
QWEN = {
    "model_type": "llama", "rms_norm_eps": 1e-6, "attention_bias": False, "rope_scaling": None,
    "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
PLAIN = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MINICPM = {
    "rope_type": "longrope", "factor": 1.0, "original_max_position_embeddings": 32768,
    "long_factor": [0.9977997200264581, 31.02392307921529],
    "short_factor": [0.9977997200264581, 31.02392307921529],
}  # fmt: skip
GPT_OSS = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
INTERLEAVED = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}
MODELOPT = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
    "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
}  # fmt: skip


def reads(*ids: int, **more: object) -> dict[str, object]:
    """`eagle_config` with the layers that are read."""
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids), **more}}


AUX = {"use_aux_hidden_state": True}
Row = tuple[str, tuple[int | None, ...], dict[str, Any]]
CONFIGURATIONS: dict[str, Row] = {
    # SpecForge, configs/
    "specforge deepseek-v3-671b": (
        FORGE, (7168, 40960, 56, 8, None, 163840, 129280, 32000),
        {**PLAIN, **reads(1, 29, 57, **AUX)},
    ),
    "specforge gemma3-1b": (
        FORGE, (1152, 6912, 4, 1, 256, 32768, 262145, 32000),
        {**QWEN, "rope_theta": 1000000, "sliding_window": 512, "target_model_type": "gemma3_text"},
    ),
    "specforge gemma3-27b": (
        FORGE, (5376, 21504, 32, 16, 128, 4096, 262208, 262208),
        {
            **QWEN, "rope_theta": 1000000, "sliding_window": 512, "additional_fc": False,
            "reuse_target_lm_head": True, **reads(1, 29, 61),
        },
    ),
    "specforge gemma4-26b-a4b": (
        FORGE, (2816, 2112, 32, 8, 128, 4096, 262144, 262144),
        {**QWEN, "rope_theta": 1000000.0, **reads(5, 17, 29)},
    ),
    "specforge gpt-oss-20b": (
        "GptOssForCausalLMEagle3", (2880, 17280, 64, 8, 64, 4096, 201088, 32000),
        {**PLAIN, "model_type": "gpt_oss", "num_local_experts": 16, **reads(1, 11, 21)},
    ),
    "specforge gpt-oss-20b dense": (
        FORGE, (2880, 17280, 64, 8, 64, 4096, 201088, 32000),
        {**PLAIN, "model_type": "gpt_oss", "num_local_experts": 16, **reads(1, 11, 21)},
    ),
    "specforge kimi-k2": (
        FORGE, (7168, 18432, 64, 64, 128, 131072, 163840, 32000),
        {
            **QWEN, "model_type": "kimi_k2", "rope_theta": 1000000.0, "max_window_layers": 48,
            **reads(2, 30, 58, **AUX),
        },
    ),
    "specforge kimi-k25": (
        FORGE, (7168, 18432, 64, 64, 128, 131072, 163840, 32000),
        {**QWEN, "rope_theta": 1000000.0, "mlp_bias": False, **reads(2, 30, 58, **AUX)},
    ),
    "specforge ling-flash-2.0": (FORGE, (4096, 14336, 32, 8, None, 32768, 157184, 32000), PLAIN),
    "specforge llama3-70b": (
        FORGE, (8192, 28672, 64, 8, 128, 4096, 128256, 32000),
        {
            **PLAIN, "rope_theta": 500000.0,
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096},
        },
    ),
    "specforge llama4-scout": (FORGE, (5120, 32768, 40, 8, None, 4096, 202048, 32000), PLAIN),
    "specforge llava": (
        FORGE, (4096, 11008, 32, 32, None, 4096, 32064, 6024), {**PLAIN, "rope_scaling": None},
    ),
    "specforge longcat-flash": (
        FORGE, (6144, 12288, 64, 16, 128, 131072, 131072, 131072),
        {**QWEN, "rope_theta": 10000000.0, "max_window_layers": 48},
    ),
    "specforge minicpm-v4": (
        FORGE, (2560, 10240, 32, 2, 128, 32768, 73448, 32000),
        {
            **PLAIN, "rope_theta": 10000.0, "rope_scaling": MINICPM, "target_hidden_size": 2560,
            "target_model_type": "minicpm_v_4",
        },
    ),
    "specforge mistral-small-24b": (
        FORGE, (5120, 32768, 32, 8, 128, 32768, 131072, 32000),
        {**PLAIN, "rope_theta": 100000000.0, "sliding_window": None},
    ),
    "specforge phi4-mini": (
        FORGE, (3072, 8192, 24, 8, None, 131072, 200064, 32000),
        {**PLAIN, "model_type": "phi3", "rope_theta": 10000.0, "tie_word_embeddings": True},
    ),
    "specforge qwen2-5-vl": (
        FORGE, (3584, 18944, 28, 4, 128, 2048, 152064, 32000),
        {
            **QWEN, "rope_theta": 1000000, "rope_scaling": MROPE, "sliding_window": 32768,
            "max_window_layers": 28,
        },
    ),
    "specforge qwen2.5-7b": (
        FORGE, (5120, 18944, 28, 4, None, 32768, 152064, 16000),
        {**QWEN, "rope_theta": 1000000.0, "sliding_window": 131072, "max_window_layers": 28},
    ),
    "specforge qwen25-7b": (
        FORGE, (3584, 18944, 28, 4, None, 131072, 152064, 32000),
        {
            **QWEN, "model_type": "qwen2", "rope_theta": 1000000.0, "sliding_window": 131072,
            "max_window_layers": 28, "use_mrope": False,
        },
    ),
    "specforge qwen3-4b": (
        FORGE, (2560, 9728, 32, 8, 80, 40960, 151936, 32000),
        {**QWEN, "rope_theta": 1000000, "max_window_layers": 36, "tie_word_embeddings": True},
    ),
    "specforge qwen3-32b": (
        FORGE, (5120, 25600, 64, 8, 80, 40960, 151936, 32000),
        {**QWEN, "rope_theta": 1000000, "max_window_layers": 64},
    ),
    "specforge qwen3-30b": (
        FORGE, (2048, 6144, 32, 4, 128, 2048, 151936, 32000),
        {**QWEN, "rope_theta": 1000000.0, "max_window_layers": 48},
    ),
    "specforge qwen3-30b eagle3.1": (
        FORGE, (2048, 12288, 32, 4, 128, 2048, 151936, 32000),
        {**QWEN, "rope_theta": 1000000.0, "fc_norm": True, "norm_output": True},
    ),
    "specforge qwen3-30b moe draft": (
        "Qwen3MoEForCausalLMEagle3", (2048, 6144, 32, 4, 128, 262144, 151936, 32000),
        {**QWEN, "model_type": "qwen3_moe", "rope_theta": 1000000.0, **reads(1, 23, 44)},
    ),
    "specforge qwen3-235b": (
        FORGE, (4096, 24576, 64, 4, 128, 40960, 151936, 32000),
        {**PLAIN, "rope_theta": 1000000.0, "rope_scaling": None, **reads(1, 46, 90, **AUX)},
    ),
    "specforge qwen3-omni": (FORGE, (2048, 6144, 32, 4, None, 65536, 152064, 32000), PLAIN),
    "specforge qwen3-vl-30b": (
        FORGE, (2048, 6144, 32, 4, 128, 262144, 151936, 32000),
        {**QWEN, "rope_theta": 5000000, "rope_scaling": INTERLEAVED, "max_window_layers": None},
    ),
    "specforge qwen3-vl-235b": (
        FORGE, (4096, 12288, 64, 4, 128, 262144, 151936, 32000),
        {
            **QWEN, "rope_theta": 5000000, "rope_scaling": {**INTERLEAVED, "rope_type": "default"},
            **reads(3, 46, 90),
        },
    ),
    "specforge qwen3.5-4b": (
        FORGE, (2560, 9216, 16, 4, 256, 32768, 248320, 32000), {**QWEN, "rope_theta": 10000000},
    ),
    "specforge qwen3.5 of transformers 5": (
        FORGE, (4096, 12288, 16, 4, 256, 262144, 248320, 32000),
        {
            **PLAIN, "mlp_bias": False, "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
            },
            **reads(1, 15, 28, **AUX),
        },
    ),
    "specforge qwen3.5-122b moe": (
        "Qwen3MoeForCausalLMEagle3", (3072, 8192, 32, 2, 256, 262144, 248320, 64000),
        {**QWEN, "model_type": "qwen3_moe", "rope_theta": 10000000, "num_experts": 256},
    ),
    "specforge qwen3-8b p-eagle": (
        "PEagleDraftModel", (4096, 12288, 32, 8, 128, 40960, 151936, 151936),
        {**QWEN, "rope_theta": 1000000, "num_hidden_layers": 4},
    ),
    "specforge qwen3-8b dflash": (
        "DFlashDraftModel", (4096, 12288, 32, 8, 128, 40960, 151936, None),
        {**QWEN, "model_type": "qwen3", "rope_theta": 1000000, "num_hidden_layers": 5,
         "block_size": 16, "num_target_layers": 36, "layer_types": ["full_attention"] * 5},
    ),
    "specforge qwen3.5-4b mtp": (
        "Qwen3_5MTPDraftModel", (2560, 9728, 32, 8, 128, 262144, 151936, None),
        {
            **QWEN, "model_type": "qwen3", "rope_theta": 5000000,
            "mtp_config": {"share_lm_head": True},
        },
    ),
    "specforge deepseek-r1": (
        "DeepseekV3ForCausalLMEagle3", (7168, 18432, 128, 128, None, 2048, 129280, 32000),
        {**PLAIN, "model_type": "deepseek_v3", "rope_theta": 10000, "kv_lora_rank": 512},
    ),
    "specforge qwq-32b": (
        "Qwen2ForCausalLMEagle3", (5120, 27648, 40, 8, None, 40960, 152064, 32000),
        {**QWEN, "model_type": "qwen2", "rope_theta": 1000000.0, "sliding_window": 32768},
    ),
    # AngelSlim, angelslim/compressor/speculative/train/configs/
    "angelslim qwen3-8b": (
        VLLM, (4096, 12288, 32, 8, 128, 40960, 151936, 32000),
        {**QWEN, "rope_theta": 1000000, "max_window_layers": 36},
    ),
    "angelslim qwen3-30b-a3b": (
        VLLM, (2048, 6144, 32, 4, 128, 40960, 151936, 32000),
        {**QWEN, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1},
    ),
    "angelslim qwen2.5-7b": (
        VLLM, (3584, 18944, 28, 4, None, 131072, 152064, 32000),
        {**QWEN, "rope_theta": 1000000.0, "sliding_window": 131072, "num_hidden_layers": 28},
    ),
    "angelslim qwen3-vl-4b": (
        VLLM, (2560, 9728, 32, 8, 128, 262144, 151936, 32000),
        {
            **QWEN, "rope_theta": 5000000, "tie_word_embeddings": True, "modal_type": "VLM",
            "rope_scaling": {**INTERLEAVED, "type": "default", "rope_type": "default"},
        },
    ),
    # EAGLE's own repository, eagle/train/ and eagle/traineagle3/
    "eagle llama3-8b": (
        LLAMA, (4096, 14336, 32, 8, None, 2048, 128256, None),
        {**PLAIN, "rope_theta": 500000.0, "bias": False},
    ),
    "eagle vicuna-13b": (
        LLAMA, (5120, 13824, 40, None, None, 2048, 32000, None), {**PLAIN, "rms_norm_eps": 1e-6},
    ),
    "eagle llama2-70b": (
        LLAMA, (8192, 28672, 64, 8, None, 4096, 32000, None), {**PLAIN, "rope_scaling": None},
    ),
    "eagle3 llama3-8b": (LLAMA, (4096, 14336, 32, 8, None, 2048, 128256, 32000), PLAIN),
    # speculators, research/ and the layout of its releases
    "speculators hass llama3.1": (
        LLAMA, (4096, 14336, 32, 8, None, 131072, 128256, None),
        {**PLAIN, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "mlp_bias": False},
    ),
    "speculators hass mistral": (
        LLAMA, (5120, 32768, 32, 8, 128, 131072, 131072, None),
        {**PLAIN, "rope_theta": 1000000.0, "rope_scaling": LLAMA3, "mlp_bias": False},
    ),
    "speculators eagle3 qwen3": (
        LLAMA, (4096, 12288, 32, 8, None, 40960, 151936, 32000),
        {**PLAIN, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "mlp_bias": False},
    ),
    "speculators online llama3.3-70b": (
        LLAMA, (8192, 28672, 64, 8, None, 8192, 128256, 32000),
        {**PLAIN, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "eagle3": {"concat_factor": 3}},
    ),
    "speculators qwen3-8b": (
        "Eagle3Speculator", (4096, 12288, 32, 8, 128, 40960, 151936, 32000),
        {
            **PLAIN, "rope_theta": 1000000, "norm_before_residual": True, "norm_output": False,
            "eagle_aux_hidden_state_layer_ids": [2, 18, 33], "target_hidden_size": None,
        },
    ),
    "speculators gpt-oss-20b": (
        "Eagle3DraftModel", (2880, 2880, 64, 8, 64, 131072, 201088, 64000),
        {**PLAIN, "rope_theta": 10000.0, "norm_before_residual": True, "norm_before_fc": True},
    ),
    # others
    "nebius gpt-oss-20b": (
        LLAMA, (2880, 11520, 64, 8, 64, 131072, 201088, 64000),
        {**PLAIN, "rope_theta": 150000, "rope_scaling": GPT_OSS, "truncated_vocab_size": 64000},
    ),
    "modelopt llama": (
        FORGE, (4096, 14336, 32, 8, 128, 8192, 128256, 128256),
        {
            **PLAIN, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "attention_bias": False,
            "mlp_bias": False, **reads(1, 15, 28, **MODELOPT),
        },
    ),
    "modelopt llama of transformers 5": (
        FORGE, (4096, 14336, 32, 8, 128, 8192, 128256, 32000),
        {
            **PLAIN, "rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "rope_theta": 500000.0},
            **reads(**MODELOPT),
        },
    ),
    "modelopt parallel draft": (
        FORGE, (4096, 14336, 32, 8, 128, 8192, 128256, 32000),
        {
            **PLAIN, "rope_theta": 500000.0,
            **reads(1, 15, 28, **MODELOPT | {"parallel_draft_step": 4}),
        },
    ),
    "llama4-maverick": (
        LLAMA, (5120, 32768, 40, 8, None, 10485760, 202048, None),
        {**PLAIN, "rope_theta": 500000, "attention_bias": True, **reads(1, 23, 44, **MODELOPT)},
    ),
    "nemo automodel": (
        "LlamaEagle3DraftModel", (4096, 14336, 32, 8, 128, 4096, 128256, 32000),
        {**PLAIN, "rope_theta": 500000.0, "parallel_drafting": False},
    ),
    "nemo automodel p-eagle": (
        "LlamaEagle3DraftModel", (4096, 14336, 32, 8, 128, 4096, 128256, 32000),
        {**PLAIN, "rope_theta": 500000.0, "parallel_drafting": True, "mask_token_id": 5},
    ),
}  # fmt: skip
# of a layout of its own: config.json, and the numbers of heads and layers in the file
MEDUSA: dict[str, tuple[dict[str, object], tuple[int, int]]] = {
    "medusa vicuna-7b": (
        {
            "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2,
            "medusa_num_layers": 1, "transformers_version": "4.31.0",
        },
        (5, 1),
    ),
    "medusa of vllm": (
        {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 4096,
            "num_heads": 5, "num_hidden_layers": 1, "truncated_vocab_size": None,
            "vocab_size": 32000,
        },
        (5, 1),
    ),
}  # fmt: skip
