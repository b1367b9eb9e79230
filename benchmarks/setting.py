"""What all measurements have in common: where checkpoints are, the device, how much is done, who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.checkpoints import MAX_LENGTH, Shape, checkpoint
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.settings.threads import cpu_threads

BLOCK_SIZE = 16
"""Tokens of a KV cache block, unless a measurement is about that."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Setting:
    """The setting of one run of a command."""

    folder: Path
    """The folder of the checkpoints."""
    say: Callable[[str], object]
    """A function that gets a line about each measurement."""
    quick: bool = False
    """Little is done, to see that all of it works; the figures say nothing."""
    device: str = "cpu"
    threads: int | None = None
    """None: all cores but one, for the engine and for what is measured beside it."""

    def pick(self, full: Value, quick: Value) -> Value:
        """Return how much to do."""
        return quick if self.quick else full

    def checkpoint(self, shape: Shape) -> Path:
        """Return a shape's checkpoint, made if need be."""
        return checkpoint(shape, self.folder)

    def engine(self, model: Shape | Path, tokens: int = 32 * 1024, **settings: Any) -> Engine:
        """Return an engine on the checkpoint, warm; the arguments are those of ``config``."""
        engine = Engine.load(self.config(model, tokens, **settings))
        engine.warm_up()
        return engine

    def config(self, model: Shape | Path, tokens: int = 32 * 1024, **settings: Any) -> EngineConfig:
        """Return an engine's settings, in float32 if they say nothing else.

        Args:
            model: a shape, or a checkpoint's directory.
            tokens: capacity of the KV cache.
            settings: fields of ``EngineConfig``.
        """
        directory = self.checkpoint(model) if isinstance(model, Shape) else model
        block_size = settings.pop("block_size", BLOCK_SIZE)
        chosen: dict[str, Any] = {
            "device": self.device,
            "threads": self.threads or cpu_threads(native=False),
            "dtype": "float32",
            "block_size": block_size,
            "num_blocks": -(-max(tokens, MAX_LENGTH) // block_size),
        }
        return EngineConfig(directory, **(chosen | settings))
