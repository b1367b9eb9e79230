"""What the Responses and the Messages API share: a request is a chat, and errors name the request's own fields."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from inflight.gateway.chat_request import chat_job, chat_prompt
from inflight.gateway.context import Gateway
from inflight.gateway.counting import counted
from inflight.gateway.errors import ApiError
from inflight.gateway.field_tables import CHAT_READER
from inflight.gateway.fields import Fields
from inflight.gateway.generation import ChoiceDelta, Job
from inflight.gateway.tools import read_tools

_BEFORE = r"(?<![\w./'\"])"
"""A path begins here, and no more of a path or of a quotation goes before."""
_ELEMENT = re.compile(_BEFORE + r"(\w+)\[(\d{1,6})\]")


@dataclass(frozen=True)
class FieldNames:
    """The fields of a chat by the names that another API has for them."""

    renamed: Mapping[str, str]
    """Patterns of paths of a chat to what stands for them."""
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lists of a chat to the path in the request of each of their elements."""

    def at(self, **places: Sequence[str]) -> FieldNames:
        """Return the same names for one request, whose elements of lists stand at these ``places``."""
        return replace(self, places=places)

    def path(self, text: str) -> str:
        """Return a path of a chat, or a text with such paths, with the names of this API.

        What a text quotes, and the path inside of a schema, are the client's own words.
        """
        text = _ELEMENT.sub(self._place, text)
        for pattern, name in self.renamed.items():
            text = re.sub(rf"{_BEFORE}(?:{pattern})(?!\w)", name, text)
        return text

    def _place(self, element: re.Match[str]) -> str:
        places, index = self.places.get(element[1], ()), int(element[2])
        return places[index] if index < len(places) else element[0]

    def told(self, error: ApiError) -> ApiError:
        """Return an error with the names of this API."""
        param = None if error.param is None else self.path(error.param)
        return ApiError(
            error.status,
            self.path(error.message),
            code=error.code,
            param=param,
            type=error.type,
            headers=error.headers,
        )


def fields_of(gateway: Gateway, chat: Mapping[str, Any], names: FieldNames, ignored: Sequence[str]) -> Fields:
    """Return the fields of a chat that another API's request asks for, with the other API's names of what is ignored.

    Args:
        gateway: knows the deployment.
        chat: the body of the chat completion.
        names: the fields' names in the other API.
        ignored: what is left out of the request itself.

    Raises:
        ApiError: naming the request's own field.
    """
    try:
        fields = gateway.read(CHAT_READER, chat)
    except ApiError as error:
        raise names.told(error) from None
    return replace(fields, ignored=(*ignored, *map(names.path, fields.ignored)))


def job_of(request: Request, gateway: Gateway, fields: Fields, names: FieldNames, *, stream: bool) -> Job:
    """Return the job of a chat that another API's request asks for.

    Args:
        request: whose it is.
        gateway: knows the deployment.
        fields: of the chat completion.
        names: the fields' names in the other API.
        stream: whether the engine sends tokens as they come.

    Raises:
        ApiError: naming the request's own field.
    """
    try:
        return chat_job(request, fields, gateway, stream=stream)
    except ApiError as error:
        raise names.told(error) from None


def prompt_tokens_of(gateway: Gateway, fields: Fields, names: FieldNames) -> int:
    """Return how many tokens the prompt of a chat has, however long it is.

    Raises:
        ApiError: naming the request's own field.
    """
    try:
        tools, _ = read_tools(fields)
        _, ids = chat_prompt(fields, gateway, tools)
    except ApiError as error:
        raise names.told(error) from None
    return len(ids)


async def deltas_of(
    request: Request, gateway: Gateway, job: Job, names: FieldNames
) -> AsyncGenerator[ChoiceDelta, None]:
    """Generate, and yield what comes; closing the generator cancels the request at the engine.

    Raises:
        ApiError: naming the request's own field.
    """
    try:
        async with aclosing(counted(request, gateway, job)) as deltas:
            async for delta in deltas:
                yield delta
    except ApiError as error:
        raise names.told(error) from error
