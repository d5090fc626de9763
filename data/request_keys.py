"""Which requests of a server's log may be learned from: the keys that do not change sampling.

A line is learned from if each of its request's keys is in one of these tables; null counts as
absent. The keys are those of the request schemas of OpenAI, vLLM and SGLang, and those that clients
of llama.cpp send to any server. `docs/online.md` has the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.errors import excerpt

# what data.request_log reads
READ = (
    "model", "messages", "prompt", "chat_template_kwargs", "temperature", "top_k", "top_p", "seed",
    "stop",
)  # fmt: skip

# of a line that is no exchange: its tokens or text, and columns of a trace store
OF_A_LINE = (
    "prompt_ids", "response_ids", "response", "reasoning", "finish_reason", "stop_reason", "domain",
    "id", "created", "timestamp", "source", "conversation_id", "turn", "sample_index",
    "model_hash", "tokenizer_hash", "prompt_hash", "index", "key", "lookahead_ids", "fixed_ids",
)  # fmt: skip

# They do not change the distribution of the next token, whatever their value: names and numbers of
# the request, limits, what comes back besides the tokens, where and when it is computed, and
# parameters of samplers that NEUTRAL turns off.
FREE = (
    "user", "metadata", "safety_identifier", "request_id", "rid", "session_id", "extra_key",
    "custom_labels", "store", "service_tier", "priority", "prompt_cache_key",
    "prompt_cache_retention", "cache_salt", "cache_prompt", "id_slot", "keep_alive",
    "max_tokens", "max_completion_tokens", "n",
    "stream", "stream_options", "stream_interval",
    "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "n_probs",
    "timings_per_token",
    "return_token_ids", "return_tokens_as_token_ids", "return_prompt_token_ids",
    "return_prompt_text", "return_token_offsets", "return_mm_kwargs", "return_hidden_states",
    "return_routed_experts", "routed_experts_start_len", "routed_experts_prompt_start",
    "return_cached_tokens_details", "return_meta_info",
    "kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port",
    "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank",
    "prediction", "ngram_corpus_id",
    "guided_decoding_backend", "guided_whitespace_pattern", "mirostat_tau", "mirostat_eta",
    "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "repeat_last_n",
)  # fmt: skip

EMPTY: tuple[object, ...] = ("", [], {})
# They change the distribution, or cannot be followed, but for these values.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "repeat_penalty": (1,), "no_repeat_ngram_size": (0,), "min_p": (0,), "typical_p": (1,),
    "top_a": (0,), "tfs_z": (1,), "mirostat": (0,), "dynatemp_range": (0,), "xtc_probability": (0,),
    "dry_multiplier": (0,), "min_tokens": (0,), "best_of": (1,), "length_penalty": (1,),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,), "ignore_eos": (False,), "echo": (False,),
    "watermark": (False,), "watermarking": (False,),
    "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"), "modalities": (["text"],),
    **dict.fromkeys(
        ("logit_bias", "bad_words", "allowed_token_ids", "logits_processors",
         "custom_logit_processor", "structured_outputs", "structural_tag", "guided_json",
         "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf",
         "grammar", "functions", "suffix", "lora", "lora_path", "lora_request", "vllm_xargs",
         "custom_params", "session_params", "mm_processor_kwargs", "media_io_kwargs",
         "extra_body"),
        EMPTY,
    ),
}  # fmt: skip

# They change the prompt, or how the answer is returned: any value where the line holds the token
# ids of both, else one of these.
WITH_IDS: dict[str, tuple[object, ...]] = {
    "tools": EMPTY, "parallel_tool_calls": (True,), "documents": EMPTY, "chat_template": EMPTY,
    "add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (),
    "truncate_prompt_tokens": (), "truncation_side": (), "input_ids": EMPTY,
    "reasoning_effort": (), "reasoning": EMPTY, "thinking": EMPTY, "enable_thinking": (),
    "include_reasoning": (True,), "separate_reasoning": (True,), "stream_reasoning": (True, False),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "no_stop_trim": (False,), "stop_token_ids": EMPTY,
    "stop_regex": EMPTY,
}  # fmt: skip


class Unusable(ValueError):
    """A line that is not learned from. `kind`: what it is counted under; the message: why."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


def _shown(key: str) -> str:
    """A key as one short word, whatever a client has sent."""
    return key if key.isidentifier() and len(key) <= 40 else excerpt(key, 40)


def check_keys(given: Mapping[str, object], has_ids: bool) -> None:
    """Raise Unusable, of the kind of its name, for the first key that may change the distribution.
    `has_ids`: whether the token ids of prompt and answer are known."""
    for key, value in given.items():
        if value is None or key in READ or key in FREE:
            continue
        if key in WITH_IDS:
            if not has_ids and value not in WITH_IDS[key]:
                raise Unusable(key, f"{key} without the token ids of prompt and answer")
        elif value not in NEUTRAL.get(key, ()):
            known = isinstance(value, int | float)  # other values may be private
            shown = f"{_shown(key)}={excerpt(value, 40)}" if known else _shown(key)
            raise Unusable(_shown(key), f"{shown} may change the server's distribution")
    tools = given.get("tools")
    for tool in tools if isinstance(tools, list) else []:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict"):
            raise Unusable("tools", "a strict tool, to whose schema servers constrain the answer")
