"""OpenVINO GenAI as a worker: its continuous batching, stepped by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.workers.work import Cell, Meter, Prompts, Settings, main

PACKAGES = ("openvino", "openvino-genai", "optimum-intel", "nncf")
_BLOCK = 32
"""Tokens of a block of its KV cache on a CPU."""


class Model:
    """The pipeline; and, for log-probs, the compiled model itself, since the pipeline returns none."""

    def __init__(self, directory: Path, settings: Settings, threads: int, cells: Sequence[Cell]) -> None:
        self._directory = directory
        self._properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, **settings["properties"]}
        self._cells = cells
        self._scheduler = settings.get("scheduler", {})
        self._pipeline: Any = None

    def _load(self) -> Any:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        streams = max(cell.streams for cell in self._cells)
        blocks = max(cell.streams * (-(-(cell.prompt + cell.output) // _BLOCK) + 1) for cell in self._cells)
        chosen = {"num_kv_blocks": blocks, "max_num_seqs": streams, "enable_prefix_caching": False}
        for name, value in (chosen | self._scheduler).items():
            setattr(scheduler, name, value)
        return openvino_genai.ContinuousBatchingPipeline(str(self._directory), scheduler, "CPU", self._properties)

    def run(self, prompts: Prompts, tokens: int, meter: Meter) -> None:
        """Answer each prompt; see ``work.Model``."""
        import openvino
        import openvino_genai

        if self._pipeline is None:
            self._pipeline = self._load()
            meter.begin()  # loading is no part of a run
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        config.set_eos_token_id(0)  # it refuses none
        handles = [
            self._pipeline.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            meter.came({stream: _new_tokens(handle) for stream, handle in enumerate(handles) if handle.can_read()})

    def log_probs(self, prompt: list[int]) -> npt.NDArray[np.float32]:
        """Return the prompt's logits, of the compiled model with the same properties."""
        import openvino

        if self._pipeline is None:
            model = openvino.Core().read_model(self._directory / "openvino_model.xml")
            self._pipeline = openvino.Core().compile_model(model, "CPU", self._properties).create_infer_request()
        self._pipeline.reset_state()
        # One by one, so that what is read back from a quantized cache is part of it.
        return np.concatenate([self._next(token, place) for place, token in enumerate(prompt)])

    def _next(self, token: int, place: int) -> npt.NDArray[np.float32]:
        inputs = {
            "input_ids": np.array([[token]], np.int64),
            "attention_mask": np.ones((1, place + 1), np.int64),
            "position_ids": np.array([[place]], np.int64),
            "beam_idx": np.zeros(1, np.int32),
        }
        named = {name: value for name, value in inputs.items() if name in _names(self._pipeline)}
        return np.array(self._pipeline.infer(named)["logits"][0])


def _names(request: Any) -> set[str]:
    return {name for tensor in request.get_compiled_model().inputs for name in tensor.names}


def _new_tokens(handle: Any) -> int:
    return sum(len(output.generated_ids) for output in handle.read().values())


def prepare(source: Path, output: Path, settings: Settings) -> None:
    """Export the checkpoint with the weight format of ``settings``."""
    program = Path(sys.executable).parent / "optimum-cli"
    words = ["export", "openvino", "-m", str(source), "--task", "text-generation-with-past"]
    formats = ["--weight-format", settings["weights"], *settings.get("export", [])]
    subprocess.run([str(program), *words, *formats, str(output)], check=True)


def load(model: Path, settings: Settings, threads: int, cells: Sequence[Cell]) -> Model:
    """Return the model; it is compiled by the first call, which says for what."""
    return Model(model, settings, threads, cells)


if __name__ == "__main__":
    main(sys.modules[__name__])  # type: ignore[arg-type]
