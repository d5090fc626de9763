"""The keys of config.json in each layout of heads that `reader` knows."""

from __future__ import annotations

from typing import Final, TypedDict

EAGLE1 = ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
# the second is vLLM's own name, the third that of NeMo Automodel
EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaEagle3DraftModel")
DFLASH, DFLASH_HF = "DFlashDraftModel", "MuseGlimmerAssistantModel"  # the second: transformers'
# the first is that of its authors, vLLM and SGLang, the second SGLang's alone
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")
ASSISTANT = "muse_glimmer_assistant"  # its model_type
# parts of the architectures of drafters, of which no other is read
OTHERS = ("DFlash", "DSpark", "MTP", "Domino", "MLPSpeculator", "ReDrafter")
LAYER_IDS: Final = "eagle_aux_hidden_state_layer_ids"


class EagleConfig(TypedDict, total=False):
    """The nested `eagle_config`, which SGLang reads."""

    use_aux_hidden_state: bool
    eagle_aux_hidden_state_layer_ids: list[int]


class DFlashConfig(TypedDict, total=False):
    """The nested `dflash_config`."""

    mask_token_id: int
    target_layer_ids: list[int]
    block_size: int
    causal: bool
    sample_from_anchor: bool
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool


class Proposal(TypedDict, total=False):
    """An entry of `proposal_methods`."""

    proposal_type: str
    speculative_tokens: int


class SpeculatorsConfig(TypedDict, total=False):
    """The nested `speculators_config`."""

    algorithm: str
    default_proposal_method: str
    proposal_methods: list[Proposal]
    verifier: dict[str, object]


class HeadConfig(TypedDict):
    """config.json of a head in any layout; `files.check_keys` says which keys are really there."""

    architectures: list[str]
    model_type: str
    speculators_model_type: str
    speculators_config: SpeculatorsConfig
    transformer_layer_config: HeadConfig  # the keys of the layer
    eagle_config: EagleConfig
    eagle_aux_hidden_state_layer_ids: list[int]
    num_aux_hidden_states: int
    draft_vocab_size: int
    target_hidden_size: int
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    tie_word_embeddings: bool
    bias: bool
    truncated_vocab_size: int
    medusa_fc_bias: bool
    original_lm_head: bool
    hydra_num_heads: int
    hydra_num_layers: int
    hydra_head_arch: str
    grounded_heads: bool
    hidden_state_offset: int
    dflash_config: DFlashConfig
    block_size: int
    is_causal: bool
    mask_token_id: int
    target_layer_ids: list[int]
    aux_hidden_state_layer_ids: list[int]
    sample_from_anchor: bool


# keys of config.json: the type, and whether published heads always have it; our exports have all
MARKOV_KEYS: dict[str, tuple[type, bool]] = {
    "markov_rank": (int, False),
    "markov_head_type": (str, False),
    "enable_confidence_head": (bool, False),
    "confidence_head_with_markov": (bool, False),
}
NESTED_BLOCKS: dict[str, tuple[type, bool]] = {
    "architectures": (list, False),
    "speculators_model_type": (str, True),
    "speculators_version": (str, False),
    "speculators_config": (dict, False),
    "transformer_layer_config": (dict, True),
    "draft_vocab_size": (int, True),
    "block_size": (int, True),
    "target_hidden_size": (int, False),
    "aux_hidden_state_layer_ids": (list, True),
    "mask_token_id": (int, True),
}
LAYER_KEYS: dict[str, tuple[type, bool]] = {
    "model_type": (str, False),
    "hidden_size": (int, True),
    "intermediate_size": (int, True),
    "num_hidden_layers": (int, True),
    "num_attention_heads": (int, True),
    "num_key_value_heads": (int, False),
    "head_dim": (int, False),
    "hidden_act": (str, False),
    "rms_norm_eps": (float, True),
    "max_position_embeddings": (int, False),
    "rope_parameters": (dict, False),
    "rope_theta": (float, False),
    "rope_scaling": (dict, False),
    "attention_bias": (bool, False),
    "mlp_bias": (bool, False),
    "tie_word_embeddings": (bool, False),
    "vocab_size": (int, True),
    "dtype": (str, False),
    "torch_dtype": (str, False),
}
HEAD_KEYS: dict[str, tuple[type, bool]] = {
    "architectures": (list, False),
    "draft_vocab_size": (int, False),
    "target_hidden_size": (int, False),
    LAYER_IDS: (list, False),
    "norm_before_residual": (bool, False),
    "norm_before_fc": (bool, False),
    "fc_norm": (bool, False),
    "norm_output": (bool, False),
}
KEYS: dict[str, dict[str, tuple[type, bool]]] = {
    "eagle": {"architectures": (list, True), **LAYER_KEYS},
    "eagle3": {
        **LAYER_KEYS,
        **HEAD_KEYS,
        "num_aux_hidden_states": (int, False),
        "eagle_config": (dict, False),
    },
    "speculators": {
        **HEAD_KEYS,
        "norm_before_residual": (bool, True),  # its readers take different defaults
        "speculators_model_type": (str, True),
        "speculators_version": (str, False),
        "speculators_config": (dict, False),
        "transformer_layer_config": (dict, True),
        "embed_requires_grad": (bool, False),
    },
    "dflash": {
        "architectures": (list, True),
        **LAYER_KEYS,
        "layer_types": (list, False),
        "block_size": (int, False),
        "num_target_layers": (int, False),
        "dflash_config": (dict, True),
    },
    "dflash_hf": {
        "architectures": (list, True),
        **LAYER_KEYS,
        "vocab_size": (int, False),  # it has no table of tokens
        "layer_types": (list, False),
        "block_size": (int, True),
        "mask_token_id": (int, True),
        "target_layer_ids": (list, True),
        "dflash_config": (dict, False),  # for vLLM
    },
    "dflash_speculators": {
        **NESTED_BLOCKS,
        "sliding_window_non_causal": (bool, False),
        "sample_from_anchor": (bool, False),
    },
    "dspark_speculators": {
        **NESTED_BLOCKS,
        "sample_from_anchor": (bool, False),
        **MARKOV_KEYS,
    },
    "dspark": {
        "architectures": (list, True),
        **LAYER_KEYS,
        "layer_types": (list, False),
        "block_size": (int, False),
        "num_target_layers": (int, False),
        "mask_token_id": (int, False),
        "target_layer_ids": (list, False),
        "sample_from_anchor": (bool, False),
        "dflash_config": (dict, False),
        **MARKOV_KEYS,
    },
    "medusa": {
        "architectures": (list, False),
        "model_type": (str, False),
        "hidden_size": (int, False),
        "vocab_size": (int, False),
        "truncated_vocab_size": (int, False),
        "num_heads": (int, False),
        "num_hidden_layers": (int, False),
        "medusa_fc_bias": (bool, False),
        "original_lm_head": (bool, False),
        "dtype": (str, False),
    },
    "hydra": {
        "hydra_num_heads": (int, True),
        "hydra_num_layers": (int, True),
        "hydra_head_arch": (str, True),
        "grounded_heads": (bool, True),
        "hidden_state_offset": (int, False),
    },
}
# keys of variants that are not known here, with the value that means their absence
WITHOUT = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_fc": False,
    "use_aux_norm": False,
    "logit_scale": 1.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "quantization_config": None,
    "parallel_drafting": False,
    "additional_fc": False,
}
# of `eagle_config`, likewise
EAGLE_WITHOUT = {
    "use_aux_hidden_state": True,
    "norm_before_fc": False,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
# keys of published layers that are checked and not handed on to LlamaConfig
UNUSED: dict[str, tuple[type, bool]] = {
    "use_sliding_window": (bool, False),
    "layer_types": (list, False),
    "partial_rotary_factor": (float, False),
    "original_max_position_embeddings": (int, False),
}
