"""Values of the fields of chats that the Responses and the Messages API have too."""

from __future__ import annotations

from typing import Any

CHAT_FIELDS: dict[str, Any] = {
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "truncation_side": "right",
    "add_special_tokens": True,
    "chat_template_kwargs": {"a": 1},
    "documents": [{"text": "Hi"}],
    "structured_outputs": {"regex": "a"},
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "regex": "a",
    "ebnf": 'root ::= "a"',
}
"""Those that do the same there."""
REFUSED_OF_CHATS: dict[str, Any] = dict.fromkeys(
    (
        "use_beam_search num_beams length_penalty early_stopping cache_salt kv_transfer_params lora_path lora "
        "lora_request mm_processor_kwargs media_io_kwargs vllm_xargs custom_params custom_logit_processor "
        "logits_processors stop_regex spaces_between_special_tokens return_hidden_states typical_p top_a tfs_z "
        "top_n_sigma epsilon_cutoff eta_cutoff mirostat xtc_probability dry_multiplier dynatemp_range "
        "smoothing_factor num_return_sequences prompt_logprobs logprob_token_ids "
        "repetition_detection separate_reasoning stream_reasoning audio "
        "functions function_call echo best_of n "
        "chat_template reasoning_format suffix "
        "guided_whitespace_pattern grammar json_schema return_tokens_as_token_ids return_token_ids "
        "extra_key no_stop_trim session_params watermarking ec_transfer_params "
        "bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank "
        "max_dynamic_patch min_dynamic_patch use_audio_in_video return_mm_kwargs mm_payload return_prompt_token_ids "
        "return_prompt_text return_token_offsets return_routed_experts return_weight_versions return_meta_info "
        "return_cached_tokens_details routed_experts_prompt_start routed_experts_start_len repeat_penalty "
        "repeat_last_n samplers min_keep n_probs task "
        "continue_final_message include_reasoning add_generation_prompt request_id rid"
    ).split(),
    "something",
)
"""Those that are refused there."""
HINTS_OF_CHATS: dict[str, Any] = {
    "guided_decoding_backend": "outlines",
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "store": True,
    "routed_dp_rank": 1,
    "data_parallel_rank": 1,
    "stream_interval": 4,
    "custom_labels": {"team": "a"},
    "id_slot": 3,
    "cache_prompt": False,
    "thinking_token_budget": 100,
    "verbosity": "low",
    "reasoning_effort": "low",
    "thinking": {"type": "disabled"},
    "prediction": {"type": "content", "content": "Hi"},
    "web_search_options": {},
}
"""Wishes of chats, with values that nothing obeys there."""
