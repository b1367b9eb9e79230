"""Many prompts at once, answers in the prompts' order. Knows nothing of terminals or files.

A prompt is asked as a chat of one message, so that the checkpoint's chat template is applied to it; a server whose
checkpoint has none says so, and gets the text as it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from inflight.client.aio import AsyncClient, AsyncHttpClient
from inflight.client.answer import Completion
from inflight.client.request import GenerateOptions
from inflight.errors import InflightError, InvalidRequest, UnsupportedFeature


class Asker:
    """Asks prompts of one server."""

    def __init__(self, client: AsyncClient | AsyncHttpClient, options: GenerateOptions, raw: bool = False) -> None:
        """
        Args:
            client: of the server.
            options: of every answer.
            raw: whether no chat template is applied.
        """
        self._client = client
        self._options = options
        self._raw = raw

    async def ask(self, prompt: str) -> Completion:
        """Return the answer to one prompt.

        Raises:
            InflightError: as ``AsyncClient.generate`` does.
        """
        if not self._raw:
            try:
                return await self._client.generate([{"role": "user", "content": prompt}], self._options)
            except (UnsupportedFeature, InvalidRequest) as error:
                if not _has_no_template(error):
                    raise
                self._raw = True
        return await self._client.generate(prompt, self._options)


def _has_no_template(error: InflightError) -> bool:
    """Return whether a server has refused messages altogether: ours without a template, or upstream's ensemble."""
    text = str(error)
    return "no chat template" in text or ("unexpected inference input" in text and "messages" in text)


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt and its answer, or the error that it ended with."""

    index: int
    prompt: str
    completion: Completion | None = None
    error: InflightError | None = None

    def as_json(self) -> str:
        """Return the result as one line of JSON."""
        row: dict[str, object] = {"index": self.index, "prompt": self.prompt}
        if self.error is not None:
            row["error"] = {"status": self.error.status, "message": str(self.error)}
        elif self.completion is not None:
            row |= {
                "text": self.completion.text,
                "finish_reason": self.completion.finish_reason,
                "input_tokens": self.completion.usage.input_tokens,
                "output_tokens": self.completion.usage.output_tokens,
                "seconds": round(self.completion.seconds, 6),
            }
            if self.completion.alternatives:
                row["alternatives"] = [other.text for other in self.completion.alternatives]
        return json.dumps(row, ensure_ascii=False)


async def generate_all(
    asker: Asker,
    prompts: Sequence[str],
    concurrency: int,
    done: Callable[[], None] = lambda: None,
) -> AsyncGenerator[Result, None]:
    """Yield a result for each prompt, in order, with at most ``concurrency`` requests running at a time.

    Args:
        done: called whenever a prompt is answered, in whatever order that happens.
    """
    room = asyncio.Semaphore(concurrency)

    async def answer(index: int, prompt: str) -> Result:
        async with room:
            try:
                return Result(index, prompt, completion=await asker.ask(prompt))
            except InflightError as error:
                return Result(index, prompt, error=error)
            finally:
                done()

    tasks = [asyncio.create_task(answer(index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
