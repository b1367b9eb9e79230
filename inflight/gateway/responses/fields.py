"""The table of fields of /v1/responses: what each field of OpenAI's Responses API does here."""

from __future__ import annotations

from inflight.gateway.agent_fields import AGENTS
from inflight.gateway.field_tables import CHAT
from inflight.gateway.fields import Reader, Shape, Table, accepted, hint, refused, served, table
from inflight.gateway.values import (
    anything,
    boolean,
    integer,
    list_of,
    mapping,
    mapping_of,
    object_with,
    one_of,
    string,
)

LOG_PROBS, SEALED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_OF_OTHER_ITEMS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What ``include`` may ask of items that no response of this server has."""
_INT32 = 2**31 - 1
_MOST_TOOLS = 1024
_NO_STORE = "nothing is stored; send the whole conversation as `input`"
_WORD = string(64)
_REASONING: Shape = {
    "effort": None,
    **table(
        hint("summary generate_summary", _WORD, "no summary is made; the text of the reasoning is shown", "auto"),
        hint("context", _WORD, "reasoning of earlier turns is kept as the chat template keeps it", "auto"),
        hint("mode", _WORD, "there is one", "standard"),
    ),
}

RESPONSES: Table = table(
    AGENTS.values(),
    [CHAT[name] for name in ("stop", "parallel_tool_calls", "user")],
    served("input", anything(), "a user's text, or a list of items: messages, reasoning, calls and their outputs"),
    served("instructions", string(), "the system's message, before all items"),
    served("max_output_tokens", integer(1, _INT32), "most tokens to generate, reasoning included"),
    served("top_logprobs", integer(0, 20), "so many of the likeliest tokens at each position; brings log-probs"),
    served(
        "include",
        list_of(one_of(LOG_PROBS, SEALED_REASONING, *_OF_OTHER_ITEMS), 16),
        f"`{LOG_PROBS}`: log-probs of the tokens; `{SEALED_REASONING}`: the reasoning as an opaque text too, which is "
        "encoded and not encrypted; other values are of items that no response has",
    ),
    served(
        "tools",
        list_of(mapping(), _MOST_TOOLS),
        "functions, namespaces of functions, and custom tools; others are left out and named, and refused where "
        "`tool_choice` demands one",
    ),
    served("tool_choice", anything(), "none, auto, required, one tool, or `allowed_tools`"),
    served(
        "text",
        mapping(),
        "`format`: text, json_object or json_schema; the hint `verbosity`, as `verbosity` of chats",
    ),
    served("reasoning", mapping(), "hints: `effort`, as `reasoning_effort` of chats; no `summary` is made", _REASONING),
    served("metadata", mapping_of(string(512), 16), "repeated in the response"),
    served("safety_identifier", string(), "repeated in the response"),
    accepted("max_tool_calls", integer(1, _INT32), "it limits built-in tools, of which there are none"),
    accepted("client_metadata", anything(), "notes of Codex to its own service"),
    accepted(
        "stream_options",
        object_with({"include_obfuscation": boolean(), "include_usage": boolean()}),
        "the last event always has the counts of tokens; no event is padded",
    ),
    refused("previous_response_id conversation previous_input_messages", _NO_STORE),
    refused("enable_response_messages", "the response has the output alone", False),
    refused("background", "a response ends with its connection", False),
    refused("background_options", "a response ends with its connection"),
    hint("truncation", string(64), "a conversation that is too long is refused, and never cut", "disabled"),
    hint("context_management", anything(), "a conversation is never compacted", []),
    refused("prompt", "no prompt templates are stored; use `instructions` and `input`"),
    refused("access_programs", "there are none"),
    refused("image", "the models served take text"),
    refused("messages input_ids", "use `input`, or /v1/chat/completions"),
    refused("max_tokens max_completion_tokens n_predict max_new_tokens", "use `max_output_tokens`"),
    refused("response_format", "use `text.format`"),
    hint("reasoning_effort thinking", anything(), "use `reasoning.effort`", "auto"),
    hint("verbosity", anything(), "use `text.verbosity`"),
    refused("reasoning_format", "use `reasoning.effort`", "auto"),
    refused("logprobs", f"use `top_logprobs`, or `include` with `{LOG_PROBS}`", False),
)
RESPONSES_READER = Reader(RESPONSES, required=("input",))
