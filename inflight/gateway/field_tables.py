"""The tables of fields of /v1/chat/completions and /v1/completions: what each field of OpenAI, vLLM, SGLang and
llama.cpp does here. docs/openai-fields.md is written from them."""

from __future__ import annotations

from inflight.gateway.chat_shapes import CACHE_OPTIONS, MESSAGE, RESPONSE_FORMAT, TOOL, TOOL_CHOICE
from inflight.gateway.fields import Reader, Table, accepted, hint, refused, served, table
from inflight.gateway.values import (
    anything,
    boolean,
    integer,
    list_of,
    mapping,
    mapping_of,
    number,
    object_with,
    one_of,
    one_or_list_of,
    string,
)

_INT32 = 2**31 - 1
_TOKEN = integer(0, _INT32)
_MOST = 4096
"""Values of a list that the tables let through; the deployment's own limits are lower."""
STREAM_OPTIONS = object_with(
    {"include_usage": boolean(), "continuous_usage_stats": boolean(), "include_obfuscation": boolean()}
)
STRUCTURED_OUTPUTS = object_with(
    {
        "json": anything(),
        "json_object": boolean(),
        "regex": string(empty=False),
        "choice": list_of(string(empty=False), _MOST, least=1),
        "grammar": string(empty=False),
        "structural_tag": anything(),
    }
)
TRUNCATION_SIDE = served(
    "truncation_side", one_of("left", "right"), "right: `truncate_prompt_tokens` keeps the prompt's beginning"
)

_SAMPLING = (
    served(
        "temperature",
        number(0, 100),
        "0: the likeliest token each time. Without it: the checkpoint's own (`generation_config.json`, or "
        "`general.sampling` of a GGUF file); else 1 beside another field of sampling, and 0 without any",
    ),
    served("top_p", number(0, 1), "sample among the likeliest tokens whose sum reaches it; 0: the likeliest alone"),
    served("top_k", integer(-1, _INT32), "sample among so many of the likeliest tokens; 0 or -1: all"),
    served("min_p", number(0, 1), "leave out tokens less likely than this share of the likeliest"),
    served(
        "presence_penalty",
        number(-2, 2),
        "taken off the logit of each token of the output so far; the prompt is not counted",
    ),
    served("frequency_penalty", number(-2, 2), "taken off as often as the token occurs in the output so far"),
    served(
        "repetition_penalty", number(0, 100, above=True), "divides the logits of tokens of prompt and output; 1: none"
    ),
    served(
        "seed",
        integer(-(2**63), 2**64 - 1),
        "the same seed gives the same answer, whatever else is served; choice i has seed + i",
    ),
    served("logit_bias", mapping_of(number(-100, 100), _MOST), "token id, as a string, to what is added to its logit"),
    served("n", integer(1, 128), "choices; at most `limits.max_return_sequences` of the deployment"),
    served("stop", one_or_list_of(string(), _MOST), "strings that end the answer, and are not part of it"),
    served("stop_token_ids", list_of(_TOKEN, _MOST), "token ids that end the answer, beside the checkpoint's end ids"),
    served("ignore_eos", boolean(), "go on behind the checkpoint's end ids, up to the limit of tokens"),
    served("min_tokens", integer(0, _INT32), "no end before so many tokens"),
    served("bad_words", list_of(string(empty=False), _MOST), "words that are not generated"),
    served("allowed_token_ids", list_of(_TOKEN, 1 << 20, least=1), "no other tokens are generated"),
    served("include_stop_str_in_output", boolean(), "show the stop string that ended the answer"),
    served("skip_special_tokens", boolean(), "false: special tokens are shown in the text"),
    served("return_tokens_as_token_ids", boolean(), "log-probs name tokens as `token_id:123`"),
    served("return_token_ids", boolean(), "add `prompt_token_ids` to the answer, and `token_ids` to its choices"),
    TRUNCATION_SIDE,
    served(
        "prompt_logprobs",
        integer(0, 20),
        "log-probs of the prompt's tokens, and of so many of the likeliest at each position, in vLLM's form",
    ),
    served(
        "truncate_prompt_tokens",
        integer(-1, _INT32),
        "keep so many tokens of the prompt; -1: as many as leave room for the answer",
    ),
)
_GUIDES = (
    served("structured_outputs", STRUCTURED_OUTPUTS, "vLLM's: what the answer must be, by one of its keys"),
    served("guided_json", anything(), "a JSON schema that the answer must follow"),
    served("guided_regex", string(empty=False), "a regular expression for the whole answer"),
    served("guided_choice", list_of(string(empty=False), _MOST, least=1), "texts of which the answer is one"),
    served("guided_grammar", string(empty=False), "a grammar in EBNF for the whole answer"),
    served("regex", string(empty=False), "SGLang's name of `guided_regex`"),
    served("ebnf", string(empty=False), "SGLang's name of `guided_grammar`"),
    *hint("guided_decoding_backend", string(64), "the engine's own is llguidance", "auto", "llguidance", "guidance"),
    *refused(
        "guided_whitespace_pattern grammar json_schema", "use `response_format`, `guided_json` or `guided_grammar`"
    ),
)
_REQUEST = (
    served("model", string(empty=False), "one of the names that `/v1/models` lists; without it the first"),
    served("stream", boolean(), "send the answer as server-sent events"),
    served(
        "stream_options",
        STREAM_OPTIONS,
        "`include_usage`: a last chunk with the counts of tokens, whose `choices` is empty; "
        "`continuous_usage_stats` beside it: counts in each chunk; `include_obfuscation` is accepted: there is none",
    ),
    served(
        "priority", integer(-_INT32 - 1, _INT32), "higher is served first, as with SGLang; vLLM serves lower ones first"
    ),
    served(
        "deadline_ms",
        integer(1, _INT32),
        "milliseconds after which the request ends: before its first token with 504, later as `length`",
    ),
    served(
        "client_id",
        string(256),
        "whose turn it uses, with `batching.fairness: client`; where the door or an API key says who asks, that counts",
    ),
    served("user", string(), "as `client_id`, where that is not given"),
    served(
        "request_id",
        string(128, empty=False),
        "part of the answer's `id`; the header x-request-id names the request in the log",
    ),
    served("rid", string(128, empty=False), "SGLang's name of `request_id`"),
    accepted("session_id", string(), "there is one engine, and nothing to keep a session at"),
    accepted("prompt_cache_key", string(), "every prompt shares the prefix cache"),
    *hint("safety_identifier", string(), "nobody looks at it"),
    *hint("metadata", mapping(), "it describes stored answers, and none are stored"),
    *hint(
        "prompt_cache_retention",
        string(),
        "`kv_cache` of the deployment says how long it is kept",
        "in_memory",
        "in-memory",
    ),
    accepted("prompt_cache_options", mapping(), "`kv_cache` of the deployment says what is kept", CACHE_OPTIONS),
    *hint("service_tier", string(64), "there is one tier; `priority` orders requests", "auto", "default"),
    *hint("store", boolean(), "answers are not stored", False),
)
_HINTS = (
    *hint("routed_dp_rank data_parallel_rank", integer(0, _INT32), "there is one engine behind the gateway", 0),
    *hint("stream_interval", integer(1, _INT32), "chunks are as the engine's responses come", 1),
    *hint("custom_labels", mapping(), "metrics have no labels of clients", {}),
    *hint("id_slot", integer(-1, _INT32), "requests have no slots of their own", -1),
    *hint("cache_prompt", boolean(), "`kv_cache.prefix_reuse` of the deployment decides it", True),
    *hint("thinking_token_budget", integer(-1, _INT32), "`max_tokens` bounds reasoning and answer together"),
)
"""Wishes of vLLM's, SGLang's and llama.cpp's clients."""
_REFUSED = (
    *refused("moderation", "answers are not moderated"),
    *refused("use_beam_search", "the KServe ports have beam search: `beam_width`", False),
    *refused("num_beams", "the KServe ports have beam search: `beam_width`", 1),
    *refused("length_penalty", "it is of beam search, which the KServe ports have", 0, 1),
    *refused("early_stopping", "it is of beam search, which the KServe ports have", False),
    *refused(
        "cache_salt extra_key",
        "the prefix cache is shared by all requests; `kv_cache.prefix_reuse: false` switches it off",
        "",
    ),
    *refused("kv_transfer_params ec_transfer_params", "prefill and decoding are not served apart"),
    *refused(
        "bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank",
        "prefill and decoding are not served apart",
    ),
    *refused("lora_path lora lora_request", "adapters are listed in the deployment, and named by `model`"),
    *refused("mm_processor_kwargs media_io_kwargs", "the models served take text", {}),
    *refused("max_dynamic_patch min_dynamic_patch", "the models served take text"),
    *refused("use_audio_in_video return_mm_kwargs", "the models served take text", False),
    *refused("mm_payload", "the models served take text", "tensors", "none"),
    *refused("vllm_xargs custom_params", "they are arguments of extensions, of which there are none", {}),
    *refused("custom_logit_processor", "code of a client is not run", ""),
    *refused("logits_processors", "code of a client is not run", []),
    *refused("stop_regex", "use `stop`, or a grammar", [], ""),
    *refused("spaces_between_special_tokens", "no spaces are put between special tokens", False, True),
    *refused("return_hidden_states", "use /v1/embeddings", False),
    *refused("return_prompt_token_ids", "use `return_token_ids`", False),
    *refused("return_prompt_text", "use /v1/completions with `echo`", False),
    *refused("return_token_offsets", "answers have no offsets; /tokenize has each token's text", False),
    *refused("return_routed_experts return_weight_versions", "answers do not tell how they were computed", False),
    *refused("routed_experts_prompt_start routed_experts_start_len", "answers do not tell how they were computed", 0),
    *refused("return_meta_info return_cached_tokens_details", "`usage` has the counts of tokens", False),
    *refused("no_stop_trim", "use `include_stop_str_in_output`", False),
    *refused("session_params", "nothing of a request is kept for the next one", {}),
    *refused("watermarking", "answers are not marked", False),
    *refused("typical_p tfs_z", "use `top_p`, `top_k` or `min_p`", 1),
    *refused("top_a epsilon_cutoff eta_cutoff", "use `top_p`, `top_k` or `min_p`", 0),
    *refused("top_n_sigma", "use `top_p`, `top_k` or `min_p`", -1, 0),
    *refused("mirostat xtc_probability dry_multiplier", "use `temperature`, `top_p`, `top_k` and `min_p`", 0),
    *refused("dynatemp_range smoothing_factor", "use `temperature`", 0),
    *refused("repeat_penalty", "use `repetition_penalty`", 1),
    *refused("repeat_last_n", "penalties count all tokens", -1),
    *refused("samplers", "the order is fixed: penalties, temperature, `top_k`, `top_p`, `min_p`"),
    *refused("min_keep", "`top_p` and `min_p` keep what they keep", 0),
    *refused("n_probs", "use `logprobs`", 0),
    *refused("n_predict max_new_tokens", "use `max_tokens`"),
    *refused("num_return_sequences", "use `n`", 1),
    *refused("logprob_token_ids", "use /v1/score or /generative_scoring"),
    *refused("repetition_detection", "there is no such limit here"),
)

_RESPONSE_FORMAT = served(
    "response_format",
    anything(),
    "text, json_object (a schema may be given), json_schema or structural_tag",
    RESPONSE_FORMAT,
)

_TEMPLATE = (
    served("chat_template_kwargs", mapping(), "variables of the checkpoint's chat template"),
    served("add_generation_prompt", boolean(), "false: the prompt does not begin the assistant's message"),
    served(
        "continue_final_message", boolean(), "the answer goes on with the last message, which must be the assistant's"
    ),
    served(
        "add_special_tokens",
        boolean(),
        "put the checkpoint's special tokens around the prompt; a chat's template has them",
    ),
    served("documents", list_of(mapping(), _MOST), "for chat templates that know `documents`; others are refused"),
    *hint(
        "reasoning_effort",
        string(64),
        "goes to chat templates that know `reasoning_effort`; `none` switches their `enable_thinking` off",
    ),
    *hint("verbosity", string(64), "goes to chat templates that know `verbosity`", "medium"),
    *hint("thinking reasoning", anything(), "use `reasoning_effort` or `chat_template_kwargs`", "auto"),
    served("include_reasoning", boolean(), "false: reasoning is left out of the answer"),
    *refused("separate_reasoning", "`gateway.reasoning_parser: none` leaves reasoning in the text", True),
    *refused("stream_reasoning", "reasoning is streamed as it comes", True),
)
CHAT: Table = table(
    _SAMPLING,
    _GUIDES,
    _REQUEST,
    _TEMPLATE,
    _REFUSED,
    _HINTS,
    served("messages", anything(), "roles system, developer, user, assistant and tool; text only", MESSAGE),
    served("max_completion_tokens", integer(1, _INT32), "most tokens to generate; without it: the rest of the context"),
    served("max_tokens", integer(1, _INT32), "the older name of `max_completion_tokens`"),
    served("logprobs", boolean(), "log-probs of the tokens, by the model itself: before temperature and penalties"),
    served("top_logprobs", integer(0, 20), "so many of the likeliest tokens at each position; needs `logprobs`"),
    _RESPONSE_FORMAT,
    served("tools", anything(), "functions that the model may call, where its chat format is known", TOOL),
    served("tool_choice", anything(), "none, auto, required, one function, or `allowed_tools`", TOOL_CHOICE),
    served("parallel_tool_calls", boolean(), "false: one call at most"),
    accepted("modalities", list_of(one_of("text"), 1), "answers are text"),
    hint("prediction", mapping(), "`speculation` of the deployment drafts without it"),
    hint("web_search_options", mapping(), "there is no search"),
    refused("audio", "answers are text"),
    refused("functions", "OpenAI has replaced them by `tools`", []),
    refused("function_call", "OpenAI has replaced it by `tool_choice`", "none"),
    refused("echo", "use `continue_final_message`, or /v1/completions", False),
    refused("best_of", "use `n`", 1),
    refused("chat_template", "the checkpoint's own template is used", ""),
    refused("prompt input_ids", "use `messages`, or /v1/completions"),
    refused("reasoning_format", "use `reasoning_effort` or `chat_template_kwargs`", "auto"),
    refused("suffix", "a chat has no text behind the answer", ""),
    refused("task", "chat templates have no tasks"),
)
COMPLETIONS: Table = table(
    _SAMPLING,
    _GUIDES,
    _REQUEST,
    _REFUSED,
    _HINTS,
    served("prompt", anything(), "a text, a list of texts, a list of token ids, or a list of such lists"),
    served("max_tokens", integer(0, _INT32), "most tokens to generate; 16 without it, as OpenAI; 0 needs `echo`"),
    served("logprobs", integer(0, 20), "log-probs of the tokens, and of so many of the likeliest at each position"),
    served("echo", boolean(), "begin the text, and the log-probs, with the prompt"),
    served("best_of", integer(1, 128), "must be equal to `n`: no choices are made and dropped"),
    served("add_special_tokens", boolean(), "true without it: a prompt of text gets the checkpoint's special tokens"),
    _RESPONSE_FORMAT,
    refused("suffix", "the models served fill no gaps", ""),
    refused("prompt_embeds", "prompts are text or token ids"),
    refused("max_completion_tokens", "use `max_tokens`"),
    refused("messages", "use /v1/chat/completions"),
    refused("tools", "use /v1/chat/completions", []),
    refused("tool_choice", "use /v1/chat/completions", "none"),
    refused("top_logprobs", "here `logprobs` is the number of likeliest tokens"),
    refused("chat_template_kwargs", "use /v1/chat/completions", {}),
)
CHAT_READER = Reader(CHAT, required=("messages",))
COMPLETION_READER = Reader(COMPLETIONS, required=("prompt",))
