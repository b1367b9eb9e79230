"""How soon `inflight serve` is back: a process of its server is killed or stopped under streams.

Measured from outside, as clients see it: when the streams that ran have ended, and when a whole answer comes again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.result import Result, Row
from inflight.client.aio import AsyncClient, AsyncHttpClient, Retry, Timeouts
from inflight.client.request import GenerateOptions
from inflight.errors import EngineFailure, InflightError
from inflight.serve.server import free_ports
from inflight.shared_counters import read_pulses

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
SERVER = "Triton"
VICTIMS = ("tokenizer", "tensorrt_llm", "detokenizer", SERVER)
LIMIT_S = 5.0
"""Within which running requests are to have ended."""
_LONG = GenerateOptions(max_tokens=1900, ignore_eos=True)  # nearly all that the demo's context has room for
_SHORT = GenerateOptions(max_tokens=4)
_START_S, _END_S = 180.0, 60.0
_ASK_S, _PAUSE_S = 2.0, 0.05
_Client = AsyncClient | AsyncHttpClient


@dataclass(frozen=True)
class Serve:
    """A running `inflight serve`."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str
    metrics: str
    said: Path
    """The file of what it has said."""

    def process_of(self, victim: str) -> int:
        """Return the process id of a stage, or of Triton."""
        command = self.process.pid
        [server] = map(int, Path(f"/proc/{command}/task/{command}/children").read_text().split())
        stages = {name: process for process, (name, _) in read_pulses(server).items()}
        return server if victim == SERVER else stages[victim]

    @property
    def starts(self) -> int:
        """How often it has started its server again, and that was ready."""
        return self.said.read_text().count("ready again in")

    def last_cause(self) -> str:
        """Return what it said last of a new start."""
        lines = [line for line in self.said.read_text().splitlines() if " restarts in " in line]
        return lines[-1].removeprefix("inflight: ").partition(";")[0] if lines else ""


@contextmanager
def serving() -> Iterator[Serve]:
    """Run `inflight serve` with the demo on free ports; it is stopped at the end, if it runs still."""
    http, grpc, metrics = free_ports(3)
    command = [str(Path(sys.executable).with_name("inflight")), "serve", f"--http-port={http}"]
    command += [f"--grpc-port={grpc}", f"--metrics-port={metrics}", "--no-gateway"]
    with TemporaryDirectory(prefix="inflight-recovery-") as folder:
        said = Path(folder) / "said"
        with said.open("w") as file:
            environment = os.environ | {"XDG_STATE_HOME": folder}
            process = subprocess.Popen(command, stderr=file, start_new_session=True, env=environment)
        try:
            yield Serve(process, f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"127.0.0.1:{metrics}", said)
        finally:
            process.terminate()
            process.wait()


async def _stream(client: _Client, runs: asyncio.Event) -> tuple[str, float]:
    """Return how a stream ended, and when."""
    try:
        async with client.stream("What is in-flight batching?", _LONG) as stream:
            async for _ in stream:
                runs.set()
        end = "whole"
    except InflightError as error:
        end = type(error).__name__
    runs.set()
    return end, time.monotonic()


async def _good_answer(url: str) -> float:
    """Return when a whole answer came; each try has a connection of its own."""
    while True:
        with suppress(InflightError):
            async with AsyncClient(url, retry=Retry(attempts=1), timeouts=Timeouts(total=_ASK_S)) as client:
                await client.generate("What is a token?", _SHORT)
                return time.monotonic()
        await asyncio.sleep(_PAUSE_S)


async def _hurt(serve: Serve, number: signal.Signals, victim: str, streams: int) -> Row:
    async with AsyncClient(serve.grpc) as grpc, AsyncHttpClient(serve.http) as http:
        await grpc.wait_ready(_START_S)
        running = [asyncio.Event() for _ in range(streams)]
        tasks = [asyncio.create_task(_stream((grpc, http)[place % 2], running[place])) for place in range(streams)]
        await asyncio.gather(*(event.wait() for event in running))
        if any(task.done() for task in tasks):
            raise EngineFailure("a stream ended before all of them ran")
        os.kill(serve.process_of(victim), number)
        began = time.monotonic()
        good, ended = await asyncio.gather(
            asyncio.wait_for(_good_answer(serve.grpc), _START_S), asyncio.wait(tasks, timeout=_END_S)
        )
        for task in ended[1]:
            task.cancel()
        ends = [task.result() for task in ended[0]]
    kinds = Counter(end for end, _ in ends)
    return {
        "signal": number.name,
        "process": victim,
        "streams": streams,
        "running requests ended, s": round(max(when for _, when in ends) - began, 2),
        "next good answer, s": round(good - began, 2),
        "ended whole": kinds.pop("whole", 0),
        "typed errors": kinds.total(),
        "kinds": ", ".join(kinds) or "none",
        "no end": len(ended[1]),
        "cause that was said": serve.last_cause(),
    }


def measure_recovery(streams: int, say: Callable[[str], object]) -> Result:
    """Hurt each process of a demo's server in each way, and measure; half of the streams are gRPC's, half HTTP's.

    Raises:
        EngineFailure: the streams did not run together.
        InflightError: the server did not start.
    """
    rows: list[Row] = []
    starts: list[float] = []
    for number in SIGNALS:
        began = time.monotonic()
        with serving() as serve:  # anew: a row of ends makes the pauses grow
            starts.append(asyncio.run(_good_answer(serve.grpc)) - began)
            for victim in VICTIMS:
                rows.append(asyncio.run(_hurt(serve, number, victim, streams)))
                say(f"{number.name} of {victim}: answers again after {rows[-1]['next good answer, s']} s")
    return Result("recovery", "A server that comes back", _finding(rows, streams, starts), rows)


def _finding(rows: Sequence[Row], streams: int, starts: Sequence[float]) -> str:
    ended = max(float(row["running requests ended, s"]) for row in rows)
    answered = [float(row["next good answer, s"]) for row in rows]
    endless = sum(int(row["no end"]) for row in rows)
    kept = ended <= LIMIT_S and not endless
    return (
        f"`inflight serve` with the demo and {streams} streams, half over gRPC and half over HTTP; one process is "
        f"killed or stopped. After at most {ended:g} s all running requests had ended (the limit is {LIMIT_S:g} s, "
        f"which is {'kept' if kept else 'missed'}), {endless} streams had no end, and the next good answer came after "
        f"{min(answered):g} to {max(answered):g} s: the notice, the pause before a new start (0, 1, 2 and 4 s for "
        "four in a row) and the start itself; the first starts of these runs took "
        f"{' and '.join(f'{seconds:.1f}' for seconds in starts)} s to their first answers."
    )
