"""What the engine does on a GPU: ``python -m inflight.bench.gpu``, or ``make gpu-bench``; no network is needed.

An 8B-shaped Llama with random weights. Decoding at one stream is bound by reading every weight once for each token: it
is measured against the bandwidth that a copy reaches here. Decoding and prefill at 64 streams are measured beside
transformers' continuous batching in the same run, and FP8 beside bfloat16.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from inflight.bench.checkpoints import SMALL, Shape
from inflight.bench.drive import prompts
from inflight.bench.peers import ContinuousPeer, EnginePeer, Peer, Rates
from inflight.bench.random_weights import random_checkpoint
from inflight.bench.result import Result, write_page, write_result
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.errors import InflightError
from inflight.report.results import print_table

LARGE = Shape("8B", 8.03e9, 128_256, 4096, 14_336, 32, 32, 8)
_COPY_BYTES = 4 << 30
_ROUNDS = 3


@dataclass(frozen=True)
class Size:
    """How much is done."""

    shape: Shape
    streams: int
    prompt: int
    """Tokens of each prompt."""
    output: int
    """Tokens of each answer."""
    tokens_per_step: int
    copy_bytes: int


FULL = Size(LARGE, 64, 512, 128, 8192, _COPY_BYTES)
QUICK = Size(SMALL, 3, 24, 4, 64, 1 << 20)
"""To see that all of it works; the figures say nothing, and are not written."""

Rows = list[dict[str, str | float]]


class Bench:
    """The measurements, on one device."""

    def __init__(self, size: Size, folder: Path, device: torch.device) -> None:
        """
        Args:
            size: how much is done.
            folder: where the checkpoints are, or are made.
            device: to measure.
        """
        self._size, self._folder, self._device = size, folder, device

    def run(self) -> Rows:
        """Return all measurements, each beside what it is held against.

        Raises:
            InflightError: a checkpoint cannot be written, or a request failed.
        """
        size = self._size
        bf16, fp8 = (self._checkpoint(in_fp8) for in_fp8 in (False, True))
        bandwidth = self.bandwidth()
        one, many = self._with(self._engine(bf16)), self._with(self._engine(fp8))
        theirs = self._with(lambda: self._transformers(bf16))[1]
        rows = [
            _row("decode, 1 stream, bf16", one[0].decode, "bandwidth", bandwidth / self._bytes_per_token(2)),
            _row("decode, 1 stream, FP8", many[0].decode, "bandwidth", bandwidth / self._bytes_per_token(1)),
        ]
        for kind in ("decode", "prefill"):
            ours = getattr(one[1], kind)
            name = f"{kind}, {size.streams} streams"
            rows.append(_row(f"{name}, bf16", ours, "transformers' continuous batching", getattr(theirs, kind)))
            rows.append(_row(f"{name}, FP8", getattr(many[1], kind), "bf16", ours))
        return rows

    def bandwidth(self) -> float:
        """Return the bytes per second that a copy reads and writes."""
        source = torch.empty(self._size.copy_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        target.copy_(source)
        seconds = min(self._timed(lambda: target.copy_(source)) for _ in range(_ROUNDS))
        return 2 * source.nbytes / seconds

    def _with(self, make: Callable[[], Peer]) -> tuple[Rates, Rates]:
        """Return the rates at one stream and at many, the best of some rounds after one that is not counted."""
        peer, size = make(), self._size
        try:
            return (self._best(peer, 1, size.output), self._best(peer, size.streams, size.output))
        finally:
            peer.close()
            del peer
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _best(self, peer: Peer, streams: int, output: int) -> Rates:
        generator = np.random.default_rng(0)
        rounds = [peer.run(prompts(generator, streams, self._size.prompt), output) for _ in range(_ROUNDS + 1)][1:]
        return Rates(max(one.prefill for one in rounds), max(one.decode for one in rounds))

    def _engine(self, directory: Path) -> Callable[[], EnginePeer]:
        size, block = self._size, 16
        config = EngineConfig(
            directory,
            device=str(self._device),
            dtype="bfloat16",
            block_size=block,
            num_blocks=size.streams * (-(-(size.prompt + size.output) // block) + 1),
            prefix_reuse=False,
            max_batch_size=size.streams,
            max_tokens_per_step=size.tokens_per_step,
            max_sequence_length=size.prompt + size.output + block,
        )

        def make() -> EnginePeer:
            engine = Engine.load(config)
            engine.warm_up()
            phases = {name: round(seconds, 2) for name, seconds in engine.stats.start_phases.items()}
            print(f"{directory.name}: seconds of the start: {phases}", file=sys.stderr)
            return EnginePeer(engine)

        return make

    def _transformers(self, directory: Path) -> ContinuousPeer:
        from transformers import AutoModelForCausalLM

        size = self._size
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
        model = model.to(self._device).eval()
        return ContinuousPeer(model, size.streams, size.prompt + size.output, size.tokens_per_step)

    def _checkpoint(self, fp8: bool) -> Path:
        name = f"llama-{self._size.shape.name}-{'fp8' if fp8 else 'bf16'}"
        return random_checkpoint(self._size.shape, self._folder / name, fp8, self._device)

    def _bytes_per_token(self, width: int) -> float:
        """Return what decoding a token at one stream reads: linears of ``width`` bytes, the bf16 head, the cache."""
        shape, head_dim = self._size.shape, self._size.shape.hidden // self._size.shape.heads
        kv = shape.kv_heads * head_dim
        layer = shape.hidden * (2 * shape.hidden + 2 * kv + 3 * shape.intermediate)
        context = self._size.prompt + self._size.output / 2
        return shape.layers * (width * layer + 2 * 2 * kv * context) + 2 * shape.vocab * shape.hidden

    def _timed(self, call: Callable[[], object]) -> float:
        self._wait()
        begun = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _row(what: str, ours: float, beside: str, theirs: float) -> dict[str, str | float]:
    return {
        "measurement": what,
        "tokens_per_s": round(ours, 1),
        "beside": beside,
        "its_tokens_per_s": round(theirs, 1),
        "ratio": round(ours / theirs, 3),
    }


def result_of(rows: Sequence[dict[str, str | float]], size: Size, device: str) -> Result:
    """Return the measurements as a result; ``device``: its name."""
    finding = (
        f"On {device}, a Llama of {size.shape.name} with random weights, prompts of {size.prompt} tokens and answers "
        f"of {size.output}: decoding at one stream in bf16 reaches {rows[0]['ratio']:.0%} of what the bandwidth of a "
        f"copy allows."
    )
    return Result("speed", "The engine on a GPU", finding, list(rows))


def main(
    output: Annotated[Path | None, typer.Option(help="Write JSON and a page to this folder too.")] = None,
    checkpoints: Annotated[Path, typer.Option(help="Where the checkpoints are, or are made.")] = Path("artifacts/gpu"),
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    quick: Annotated[bool, typer.Option(help="Little is done; the figures say nothing, and are not written.")] = False,
) -> None:
    """Measure decode and prefill on a GPU, in bf16 and FP8."""
    where, size = torch.device(device), QUICK if quick else FULL
    if where.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gpu-bench: PyTorch finds no CUDA device")
    try:
        rows = Bench(size, checkpoints, where).run()
        name = torch.cuda.get_device_name(where) if where.type == "cuda" else device
        print_table(f"The engine on {name}", rows)
        if output is not None and quick:
            print(f"gpu-bench: nothing is written to {output}: with --quick the figures say nothing")
        elif output is not None:
            result = result_of(rows, size, name)
            write_result(result, output, "make gpu-bench" + ("" if device == "cuda" else f" ARGS='--device {device}'"))
            write_page(output, "The engine on a GPU", "Written by `make gpu-bench`.", [result.name])
    except InflightError as error:
        raise SystemExit(f"gpu-bench: {error}") from None


if __name__ == "__main__":
    typer.run(main)
