"""The tables of fields of /v1/messages and /v1/messages/count_tokens: what each field of Anthropic's API does here."""

from __future__ import annotations

from typing import Any

from inflight.gateway.field_tables import CHAT
from inflight.gateway.fields import Reader, Table, accepted, refused, served, table
from inflight.gateway.values import (
    Kind,
    anything,
    integer,
    list_of,
    mapping,
    object_with,
    one_of,
    string,
)

PASSED_ON = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed logit_bias "
    "stop_token_ids ignore_eos min_tokens bad_words allowed_token_ids priority deadline_ms "
    "client_id"
).split()
"""Fields that mean what they mean in chat completions."""
_INT32 = 2**31 - 1
_MOST = 4096
_CACHE_CONTROL: Kind = object_with({"type": one_of("ephemeral"), "ttl": one_of("5m", "1h")}, required=("type",))
_ONE_MODEL = "one model answers, or none"
_AS_SENT = "messages go to the model as they are sent"
_NO_EDITS: tuple[dict[str, list[Any]], ...] = (
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
)
"""Clearing nothing; Claude Code sends the second."""

_PROMPT = (
    CHAT["model"],
    served(
        "messages",
        anything(),
        "roles user, assistant and system; blocks text, thinking, tool_use and tool_result; a last message of "
        "the assistant is continued",
    ),
    served("system", anything(), "a text, or blocks of text; Claude Code's line for Anthropic's accounts is left out"),
    served("tools", list_of(mapping(), _MOST), "tools with an `input_schema`; Anthropic's own tools are refused"),
    served("tool_choice", mapping(), "auto, any, tool or none; with `disable_parallel_tool_use` one call at most"),
    served(
        "thinking",
        mapping(),
        "`disabled` switches `enable_thinking` of the chat template off; with `enabled` and `adaptive` the model "
        "decides. `budget_tokens` is named as ignored: only `max_tokens` ends the thinking. `display`: `omitted` "
        "leaves its text out",
    ),
    served("output_config", mapping(), "`effort`, as `reasoning_effort` of chats; `format`: json_schema"),
    served("output_format", mapping(), "the older name of `output_config.format`"),
    served("chat_template_kwargs", mapping(), "variables of the checkpoint's chat template"),
    accepted("cache_control", _CACHE_CONTROL, "equal prefixes of prompts are reused by themselves"),
    accepted("betas", list_of(string(), _MOST), "they are named by the fields that they allow"),
    *refused("speed", "all requests have one speed", "standard"),
    *refused("context_management", f"{_AS_SENT}, and no thinking is cleared", *_NO_EDITS),
    *refused("compaction", _AS_SENT),
    *refused("mcp_servers", "this server calls no tools", []),
    *refused("user_profile_id workspace_id billing_policy", "there are no accounts"),
)
COUNT_TOKENS: Table = table(_PROMPT)
MESSAGES: Table = table(
    [CHAT[name] for name in PASSED_ON],
    _PROMPT,
    CHAT["stream"],
    served("max_tokens", integer(1, _INT32), "most tokens to generate, thinking included; the context may end before"),
    served("stop_sequences", list_of(string(empty=False), _MOST), "strings that end the answer, without being part"),
    served("metadata", object_with({"user_id": string()}), "`user_id`: whose turn it uses, with batching.fairness"),
    accepted("service_tier", one_of("auto", "standard_only"), "there is one tier"),
    refused("container", "no code is run"),
    refused("inference_geo", "the answer is made where this server stands"),
    refused("diagnostics", "the cache keeps no account of misses", {}),
    refused("fallbacks fallback_credit_token", _ONE_MODEL, [], "default"),
    refused("thread", "nothing is stored; send all messages"),
    refused("stop", "use `stop_sequences`"),
    refused("max_completion_tokens", "use `max_tokens`"),
    refused("response_format", "use `output_config.format`"),
    refused("reasoning_effort", "use `output_config.effort`"),
    refused("n", "a message is one answer", 1),
)
MESSAGES_READER = Reader(MESSAGES, required=("model", "max_tokens", "messages"))
COUNT_TOKENS_READER = Reader(COUNT_TOKENS, required=("model", "messages"))
