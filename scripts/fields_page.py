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

There is one rule. A **demand** changes what the answer means: it is obeyed, or refused by name. A **hint** is a wish
about quality, cost or storage: no request is refused for it. Each field that clients of OpenAI, Anthropic, vLLM, SGLang
and llama.cpp are known to send is in one of four states:

- **served**: a demand; its value is checked, and it does what the table says;
- **refused**: a demand that is not served. The answer is 400 with the code `unsupported_parameter` and the field's name
  in `param`, unless the value asks for nothing. Such values stand in brackets;
- **accepted**: its value is checked, and what it asks for is so anyway;
- **hint**: obeyed where the table says so. Else it is left out, and the answer's header `x-ignored-fields` names it,
  unless the value asks for what is so anyway. Such values stand in brackets.

For example, `reasoning_effort: high` for a model whose chat template has no levels is answered, with
`x-ignored-fields: reasoning_effort`.

A null is an absent field. A field that is in no table is let through and named as well. The same holds inside of a
field, by the path, such as `tools[0].function.foo`. `inflight_gateway_ignored_fields_total` counts what is named. With
`gateway.strict_fields: true` what would be named is refused. What the fields mean together is in [the gateway's
semantics](gateway-semantics.md) and [the APIs of agents](gateway-agents.md).
"""
_INSIDE = """
## Inside of fields

Fields of a chat's message that the checkpoint's chat template reads are known besides.

| in | known | refused | hints |
|---|---|---|---|
"""
TABLES = {
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
    tables = "".join(f"\n## `{path}`\n\n{_table(fields)}" for path, fields in TABLES.items())
    return _HEAD + tables + _INSIDE + "".join(_rows_inside())


def _rows_inside() -> Iterator[str]:
    """Yield a row for each object inside of a field; one that several endpoints have stands once."""
    fields = (one for table in TABLES.values() for one in table.values() if one.inside is not None)
    shapes = list({id(one.inside): (one.name, one.inside) for one in fields}.values())
    while shapes:
        path, shape = shapes.pop(0)
        shapes[:0] = [(f"{path}.{name}", one) for name, one in shape.items() if isinstance(one, Mapping)]
        known = ", ".join(f"`{name}`" for name in sorted(shape) if not isinstance(shape[name], Field))
        inner = [one for one in shape.values() if isinstance(one, Field)]
        refused, hints = (
            "; ".join(f"`{one.name}`: {one.doc}" for one in inner if one.state == state)
            for state in ("refused", "hint")
        )
        yield f"| `{path}` | {known} | {refused} | {hints} |\n"


def _table(fields: Table) -> str:
    order = ("served", "hint", "accepted", "refused")
    rows = sorted(fields.values(), key=lambda one: (order.index(one.state), one.name))
    return "| field | state | value | meaning |\n|---|---|---|---|\n" + "".join(map(_row, rows))


def _row(field: Field) -> str:
    shown = ", ".join(f"`{json.dumps(one)}`" for one in field.neutral)
    kind = "" if field.state == "refused" else field.kind.wanted
    value = " ".join(filter(None, (kind, f"({shown})" if shown else "")))
    return f"| `{field.name}` | {field.state} | {value} | {field.doc} |\n"
