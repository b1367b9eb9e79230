"""docs/openai-fields.md, from the tables that the gateway itself reads bodies by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from inflight.gateway.embeddings import EMBEDDINGS
from inflight.gateway.field_tables import CHAT, COMPLETIONS
from inflight.gateway.fields import Field, Table
from inflight.gateway.messages.fields import COUNT_TOKENS, MESSAGES
from inflight.gateway.rerank import RERANK
from inflight.gateway.responses.fields import RESPONSES
from inflight.gateway.scores import GENERATIVE, SCORE

_HEAD = """\
# The fields of OpenAI's and Anthropic's endpoints

Written from the gateway's tables of fields by `make contract`; a test holds them equal.

Each field that clients of OpenAI, Anthropic, vLLM, SGLang and llama.cpp are known to send is in one of three states:

- **served**: its value is checked, and it does what the table says;
- **accepted**: its value is checked, and there is nothing to do for it here;
- **refused**: the answer is 400 with the code `unsupported_parameter` and the field's name in `param`, unless the value
  asks for nothing. Such values stand in brackets.

A null is an absent field. A field that is in no table is let through: the header `x-ignored-fields` of the answer names
it, and `inflight_gateway_ignored_fields_total` counts it. With `gateway.strict_fields: true` it is refused. The same
holds for a field inside of another, which is named by its path, such as `tools[0].function.foo`. What the fields mean
together is in [the gateway's semantics](gateway-semantics.md) and [the APIs of agents](gateway-agents.md).
"""
_INSIDE = """
## Inside of the fields of chats

Fields of a message that the checkpoint's chat template reads are known besides.

| in | known | refused |
|---|---|---|
"""
_TITLES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/score": SCORE,
    "/generative_scoring": GENERATIVE,
    "/v1/rerank": RERANK,
}


def fields_page() -> str:
    """Return the page about the fields of bodies."""
    tables = "".join(f"\n## `{path}`\n\n{_table(fields)}" for path, fields in _TITLES.items())
    return _HEAD + tables + _INSIDE + "".join(_rows_inside())


def _rows_inside() -> Iterator[str]:
    """Yield a row for each object inside of a chat's fields."""
    shapes = [(one.name, one.inside) for one in CHAT.values() if one.inside is not None]
    while shapes:
        path, shape = shapes.pop(0)
        known, refused = ([name for name, one in shape.items() if isinstance(one, Field) is no] for no in (False, True))
        shapes[:0] = [(f"{path}.{name}", one) for name, one in shape.items() if isinstance(one, Mapping)]
        reasons = "; ".join(f"`{name}`: {shape[name].doc}" for name in refused)
        yield f"| `{path}` | {', '.join(f'`{name}`' for name in sorted(known))} | {reasons} |\n"


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
