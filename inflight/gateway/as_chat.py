"""What the Responses and the Messages API share: a request is a chat, and errors name the request's own fields."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from inflight.gateway.chat_request import chat_job, chat_prompt
from inflight.gateway.context import Gateway
from inflight.gateway.counting import counted
from inflight.gateway.errors import ApiError
from inflight.gateway.field_tables import CHAT_READER
from inflight.gateway.generation import ChoiceDelta, Job
from inflight.gateway.tools import read_tools


class FieldNames:
    """The fields of a chat by the names that another API has for them."""

    def __init__(self, renamed: Mapping[str, str]) -> None:
        """``renamed``: patterns of paths of a chat to what stands for them."""
        self._renamed = [(re.compile(rf"(?<![\w.])(?:{pattern})(?!\w)"), name) for pattern, name in renamed.items()]

    def path(self, text: str) -> str:
        """Return a path of a chat, or a text with such paths, with the names of this API."""
        for pattern, name in self._renamed:
            text = pattern.sub(name, text)
        return text

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


def job_of(request: Request, gateway: Gateway, chat: Mapping[str, Any], names: FieldNames, *, stream: bool) -> Job:
    """Return the job of a chat that another API's request asks for.

    Args:
        request: whose it is.
        gateway: knows the deployment.
        chat: the body of the chat completion.
        names: the fields' names in the other API.
        stream: whether the engine sends tokens as they come.

    Raises:
        ApiError: naming the request's own field.
    """
    try:
        return chat_job(request, CHAT_READER.read(chat), gateway, stream=stream)
    except ApiError as error:
        raise names.told(error) from None


def prompt_tokens_of(gateway: Gateway, chat: Mapping[str, Any], names: FieldNames) -> int:
    """Return how many tokens the prompt of a chat has, however long it is.

    Raises:
        ApiError: naming the request's own field.
    """
    try:
        fields = CHAT_READER.read(chat)
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
