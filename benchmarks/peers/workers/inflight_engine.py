"""Inflight's own engine as a worker, in the interpreter of the checkout: no server, no thread beside the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peers.workers.work import Cell, Meter, Prompts, Settings, main
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.request import Request
from inflight.sampling import SamplingParams

PACKAGES = ("inflight", "torch")


class Model:
    """The engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, prompts: Prompts, tokens: int, meter: Meter) -> None:
        """Answer each prompt; see ``work.Model``."""
        streams = {}
        for stream, prompt in enumerate(prompts):
            request = Request(prompt, SamplingParams(tokens, ignore_eos=True))
            self._engine.validate(request)
            streams[request.key] = stream
            self._engine.submit(request)
        while self._engine.busy:
            outputs = self._engine.step()
            for output in outputs:
                if output.error is not None:
                    raise output.error
            meter.came({streams[output.key]: len(output.tokens) for output in outputs})

    def log_probs(self, prompt: list[int]) -> npt.NDArray[np.float32]:
        """Return the prompt's logits, of the steps that a request's tokens come from."""
        self._engine.submit(Request(prompt, SamplingParams(1, ignore_eos=True, context_logits=True)))
        found = []
        while self._engine.busy:
            found += [one.context_logits for one in self._engine.step() if one.context_logits is not None]
        return np.concatenate(found)


def prepare(source: Path, output: Path, settings: Settings) -> None:
    """Link the checkpoint's own files, or those of the checkpoint that ModelOpt makes of it in ``precision``."""
    if "precision" in settings:
        from benchmarks.quantized import quantized_checkpoint  # here: older commits run this too, without its modules

        source = quantized_checkpoint(output.parent, source, source.name, settings["precision"])
    for path in source.iterdir():
        (output / path.name).symlink_to(path.resolve())


def load(model: Path, settings: Settings, threads: int, cells: Sequence[Cell]) -> Model:
    """Return the engine with a cache for the largest of the cells.

    ``settings`` are fields of ``EngineConfig``, but for ``precision``, which the checkpoint has already.
    """
    tokens = max(cell.streams * (cell.prompt + cell.output + 32) for cell in cells)
    config = EngineConfig(
        model,
        device="cpu",
        threads=threads,
        num_blocks=-(-tokens // EngineConfig.block_size),
        max_sequence_length=max(cell.prompt + cell.output for cell in cells) + 32,
        **{name: value for name, value in settings.items() if name != "precision"},
    )
    engine = Engine.load(config)
    engine.warm_up()
    return Model(engine)


if __name__ == "__main__":
    import sys

    main(sys.modules[__name__])  # type: ignore[arg-type]
