"""The tables of fields of /v1/messages and /v1/messages/count_tokens: what each field of Anthropic's API does here."""

from __future__ import annotations

from typing import Any

from inflight.gateway.agent_fields import AGENTS
from inflight.gateway.fields import Reader, Table, accepted, hint, refused, served, table
from inflight.gateway.values import (
    anything,
    boolean,
    integer,
    list_of,
    mapping,
    object_with,
    string,
)

_INT32 = 2**31 - 1
_MOST = 4096
_ONE_MODEL = "one model answers, or none"
_NOT_COUNTED = "the count of the prompt's tokens does not depend on it"
_AS_SENT = "messages go to the model as they are sent"
_KEEPS_ALL = ("all", {"type": "all"})
_NO_EDITS: tuple[dict[str, list[Any]], ...] = (
    {"edits": []},
    *({"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in _KEEPS_ALL),
)
"""Clearing nothing; Claude Code sends the second."""

_PROMPT = (
    *(AGENTS[name] for name in ("model", "add_special_tokens", "chat_template_kwargs", "documents")),
    served(
        "messages",
        anything(),
        "roles user, assistant and system; blocks text, thinking, tool_use and tool_result; a last message of "
        "the assistant is continued",
    ),
    served("system", anything(), "a text, or blocks of text; Claude Code's line for Anthropic's accounts is left out"),
    served(
        "tools",
        list_of(mapping(), _MOST),
        "tools with an `input_schema`; Anthropic's own are left out and named, refused where `tool_choice` names one",
    ),
    served("tool_choice", mapping(), "auto, any, tool or none; with `disable_parallel_tool_use` one call at most"),
    served(
        "thinking",
        mapping(),
        "`disabled` switches `enable_thinking` of the chat template off; with `enabled` and `adaptive` the model "
        "decides. `budget_tokens` is named as ignored: only `max_tokens` ends the thinking. `display`: `omitted` "
        "leaves its text out",
    ),
    served(
        "output_config",
        mapping(),
        "`format`: json_schema; the hints `effort`, as `reasoning_effort` of chats, and `task_budget`: left out",
    ),
    served("output_format", mapping(), "the older name of `output_config.format`"),
    accepted("cache_control", mapping(), "equal prefixes of prompts are reused by themselves"),
    accepted("betas", list_of(string(), _MOST), "they are named by the fields that they allow"),
    *hint("speed", string(64), "all requests have one speed", "standard"),
    *hint("context_management", mapping(), f"{_AS_SENT}, and nothing is cleared", *_NO_EDITS),
    *hint("compaction", anything(), _AS_SENT),
    *hint("user_profile_id workspace_id billing_policy", anything(), "there are no accounts"),
    *hint("diagnostics", anything(), "the cache keeps no account of misses", {}),
    *hint("fallbacks fallback_credit_token", anything(), _ONE_MODEL, [], "default"),
    *refused("mcp_servers", "this server calls no tools", []),
)
MESSAGES: Table = table(
    AGENTS.values(),
    _PROMPT,
    served("max_tokens", integer(1, _INT32), "most tokens to generate, thinking included; the context may end before"),
    served("stop_sequences", list_of(string(empty=False), _MOST), "strings that end the answer, without being part"),
    served("metadata", mapping(), "`user_id`: whose turn it uses, with batching.fairness", {"user_id": None}),
    hint("service_tier", string(64), "there is one tier", "auto", "standard_only"),
    refused("container", "no code is run"),
    refused("inference_geo", "the answer is made where this server stands"),
    refused("thread", "nothing is stored; send all messages"),
    refused("stop", "use `stop_sequences`"),
    refused("max_completion_tokens", "use `max_tokens`"),
    refused("stop_regex", "use `stop_sequences`, or a grammar", [], ""),
    refused("user", "use `metadata.user_id`"),
    refused("parallel_tool_calls", "use `tool_choice.disable_parallel_tool_use`", True),
    refused("logprobs top_logprobs", "a message has no log-probs; use /v1/chat/completions", False, 0),
    accepted(
        "stream_options",
        object_with({"include_obfuscation": boolean(), "include_usage": boolean()}),
        "the last events always have the counts of tokens; no event is padded",
    ),
    refused("response_format", "use `output_config.format`"),
    hint("reasoning_effort", anything(), "use `output_config.effort`"),
    hint("reasoning", anything(), "use `thinking`", "auto"),
    refused("reasoning_format", "use `thinking`", "auto"),
)
_PROMPT_NAMES = frozenset(table(_PROMPT))
COUNT_TOKENS: Table = table(
    [
        one if one.name in _PROMPT_NAMES or one.state != "served" else accepted(one.name, one.kind, _NOT_COUNTED)
        for one in MESSAGES.values()
    ],
    refused("truncate_prompt_tokens", "all of the prompt is counted"),
)
MESSAGES_READER = Reader(MESSAGES, required=("max_tokens", "messages"))
COUNT_TOKENS_READER = Reader(COUNT_TOKENS, required=("messages",))
