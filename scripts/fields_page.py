"""docs/openai-fields.md, from the tables that the gateway itself reads bodies by."""

from __future__ import annotations

import json

from inflight.gateway.field_tables import CHAT, COMPLETIONS
from inflight.gateway.fields import Field, Table
from inflight.gateway.messages.fields import COUNT_TOKENS, MESSAGES
from inflight.gateway.responses.fields import RESPONSES

_HEAD = """\
# The fields of OpenAI's and Anthropic's endpoints

Written from the gateway's tables of fields by `make contract`; a test holds them equal.

Each field that clients of OpenAI, Anthropic, vLLM, SGLang and llama.cpp are known to send is in one of three states:

- **served**: its value is checked, and it does what the table says;
- **accepted**: its value is checked, and there is nothing to do for it here;
- **refused**: the answer is 400 with the code `unsupported_parameter` and the field's name in `param`, unless the value
  asks for nothing. Such values stand in brackets.

A null is an absent field. A field that is in no table is let through: the header `x-ignored-fields` of the answer names
it, and `inflight_gateway_ignored_fields_total` counts it. With `gateway.strict_fields: true` it is refused. What the
fields mean together is in [the gateway's semantics](gateway-semantics.md) and [the APIs of agents](gateway-agents.md).
"""
_TITLES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
}


def fields_page() -> str:
    """Return the page about the fields of all endpoints that generate."""
    return _HEAD + "".join(f"\n## `{path}`\n\n{_table(fields)}" for path, fields in _TITLES.items())


def _table(fields: Table) -> str:
    order = ("served", "accepted", "refused")
    rows = sorted(fields.values(), key=lambda one: (order.index(one.state), one.name))
    return "| field | state | value | meaning |\n|---|---|---|---|\n" + "".join(map(_row, rows))


def _row(field: Field) -> str:
    value = field.kind.wanted if field.state != "refused" else _neutral(field)
    return f"| `{field.name}` | {field.state} | {value} | {field.doc} |\n"


def _neutral(field: Field) -> str:
    shown = ", ".join(f"`{json.dumps(one)}`" for one in field.neutral)
    return f"({shown})" if shown else ""
