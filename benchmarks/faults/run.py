"""One fault under streams, from the start of a server to what it leaves behind."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from benchmarks.faults.kinds import Fault
from benchmarks.faults.place import Place, make_place
from benchmarks.faults.served import Served, serving
from benchmarks.faults.streams import WHOLE, Clients, Seen, have_all_run, start_all
from inflight.errors import InflightError

_GOOD_S, _END_S, _PAUSE_S = 120.0, 180.0, 0.3
"""How long is waited for the last good answer, and for the streams' ends; and the pause between two questions."""


@dataclass
class Outcome:
    """What was seen of one fault."""

    fault: Fault
    good_s: float | None = None
    """The longest time that a question waited for a good answer, over gRPC or through the gateway; None: for ever."""
    chunks_s: list[float] = field(default_factory=list)
    """When chunks came, in seconds from the fault."""
    equal: int = 0
    """Streams that ended with the text that they would have had."""
    unequal: int = 0
    """Streams that ended as if whole, with another text."""
    errors: Counter[str] = field(default_factory=Counter)
    """How many streams ended with an error, by its kind."""
    messages: Counter[str] = field(default_factory=Counter)
    """The same by its message."""
    endless: int = 0
    said: str = ""
    exit_code: int | None = None
    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    failure: str = ""
    """Why the fault could not be measured; empty: it was."""

    def count(self, streams: Sequence[Seen], texts: Sequence[str]) -> None:
        """Take in how the streams ended; ``texts``: what they were to be."""
        for seen, text in zip(streams, texts, strict=True):
            if seen.end == WHOLE:
                self.equal += seen.text == text
                self.unequal += seen.text != text
            elif seen.end:
                self.errors[seen.end] += 1
                self.messages[seen.error] += 1
            else:
                self.endless += 1


def unbroken_texts(streams: int) -> list[str]:
    """Return the texts of the streams of a server that nothing happens to.

    Raises:
        InflightError: it cannot be served, or a stream ended with an error.
    """

    async def read(served: Served) -> Sequence[Seen]:
        async with Clients(served) as clients:
            await clients.wait_ready()
            seen, tasks = start_all(clients, streams)
            await asyncio.gather(*tasks)
            return seen

    with make_place() as place, serving(place) as served:
        seen = asyncio.run(read(served))
    if wrong := [one.end for one in seen if one.end != WHOLE]:
        raise InflightError(f"a stream ended without any fault: {wrong[0]}")
    return [one.text for one in seen]


def try_fault(fault: Fault, texts: Sequence[str]) -> Outcome:
    """Hurt a new server under streams whose unbroken texts are known, and stop it."""
    outcome = Outcome(fault)
    with make_place() as place:
        try:
            with serving(place, fault.environment) as served:
                try:
                    asyncio.run(_hurt(outcome, served, place, texts))
                finally:
                    outcome.said = served.last_words()
                outcome.exit_code = served.end()
        except InflightError as error:
            outcome.failure = str(error)
        outcome.processes = list(place.wait_until_empty().values())
        outcome.files = place.files()
    return outcome


async def _hurt(outcome: Outcome, served: Served, place: Place, texts: Sequence[str]) -> None:
    async with Clients(served) as clients:
        await clients.wait_ready()
        streams, tasks = await have_all_run(clients, len(texts))
        over = asyncio.Event()
        with ExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, outcome.fault.act(served, place))
            began = time.monotonic()
            asking = asyncio.create_task(_longest_wait(clients, over))
            await asyncio.wait(tasks, timeout=outcome.fault.lasts_s)
        _, endless = await asyncio.wait(tasks, timeout=_END_S)
        over.set()
        with suppress(TimeoutError):
            outcome.good_s = await asyncio.wait_for(asking, _GOOD_S)
        for task in endless:
            task.cancel()
    outcome.count(streams, texts)
    outcome.chunks_s = [at - began for one in streams for at in one.at]


async def _longest_wait(clients: Clients, over: asyncio.Event) -> float:
    """Return the longest time that a question has waited for a good answer, of all until one after ``over``."""

    async def wait(good_answer: Callable[[], Awaitable[float]]) -> float:
        longest, ended = 0.0, False
        while not ended:
            ended, asked = over.is_set(), time.monotonic()
            longest = max(longest, await good_answer() - asked)
            await asyncio.sleep(_PAUSE_S)
        return longest

    return max(await asyncio.gather(wait(clients.good_grpc_answer), wait(clients.good_openai_answer)))
