"""The page about the fields of OpenAI's and Anthropic's APIs, from the tables by which the gateway reads bodies."""

from __future__ import annotations

import json

from inflight.gateway.field_tables import CHAT, COMPLETIONS
from inflight.gateway.fields import Field, State, Table
from inflight.gateway.messages.fields import COUNT_TOKENS, MESSAGES
from inflight.gateway.responses.fields import RESPONSES

_ENDPOINTS: dict[str, Table] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
}
_HEAD = """\
# The fields of OpenAI's and Anthropic's APIs

Written from the gateway's own tables by `make contract`; a test holds them equal.

A field that clients are known to send is in one of three states. *Served*: its value is checked, and it does what it
says. *Accepted*: its value is checked, and there is nothing to do for it here. *Refused*: 400 with the code
`unsupported_parameter` and its name, unless its value asks for nothing. A null is an absent field. All other fields
have no effect and are named in the header `x-ignored-fields`; with `gateway.strict_fields` they are refused.
"""


def fields_page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(_endpoint(path, table) for path, table in _ENDPOINTS.items())])


def _endpoint(path: str, table: Table) -> str:
    served, accepted, refused = (_of(table, state) for state in ("served", "accepted", "refused"))
    lines = [f"## `{path}`\n", "| served | what it does | value |", "|---|---|---|"]
    lines += [f"| `{field.name}` | {_cell(field.doc)} | {_cell(field.kind.wanted)} |" for field in served]
    lines += ["", "| accepted | why there is nothing to do | value |", "|---|---|---|"]
    lines += [f"| `{field.name}` | {_cell(field.doc)} | {_cell(field.kind.wanted)} |" for field in accepted]
    lines += ["", "| refused | why, or what to use | values that ask for nothing |", "|---|---|---|"]
    lines += [f"| `{field.name}` | {_cell(field.doc)} | {_neutral(field)} |" for field in refused]
    return "\n".join([*lines, ""])


def _of(table: Table, state: State) -> list[Field]:
    return sorted((field for field in table.values() if field.state == state), key=lambda field: field.name)


def _neutral(field: Field) -> str:
    return _cell(", ".join(f"`{json.dumps(value)}`" for value in field.neutral))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
