"""Prefix reuse of a model with recurrent layers: a prompt that many share, and a conversation that goes on."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.drive import Driver, Stream, ask
from benchmarks.figures import columns, curves, panels
from benchmarks.result import Result, Row
from benchmarks.setting import Setting
from inflight.engine.engine import Engine
from inflight.engine.model_runner import ModelRunner
from inflight.engine.models.build import build_model
from inflight.engine.models.naming import CheckpointNames
from inflight.engine.models.reading import read_model_config
from inflight.engine.shards import Shards

_MODEL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "dtype": "float32",
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "tie_word_embeddings": True,
}
_TINY = _MODEL | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
_SHARED, _QUESTION, _ANSWER = 500, 40, 24
"""Tokens of the prompt that all share and of what each adds, about those of ``loadtest/scenarios/shared-prefix.toml``,
and of an answer in the conversation. The shared prompt does not end where a chunk does."""


class _RandomShards(Shards):
    """Stands for a checkpoint's files; always draws the same weights. Norms, which are offsets, are zero."""

    def __init__(self, model: dict[str, Any]) -> None:
        outline = build_model(read_model_config(model), 1)
        naming = CheckpointNames(outline.config, ())
        self._shapes = {naming.of(name): one.shape for name, one in outline.named_parameters()}
        if outline.config.tie_word_embeddings:
            del self._shapes["lm_head.weight"]
        self.names = frozenset(self._shapes)

    def load(self, names: Collection[str], take: Callable[[str, Tensor], None]) -> None:
        """Call ``take`` with each of the tensors ``names``, one after the other."""
        generator = torch.Generator().manual_seed(0)
        for name in sorted(self.names.intersection(names)):
            weight = torch.zeros(self._shapes[name])
            take(name, weight if weight.dim() == 1 else weight.normal_(0, 0.02, generator=generator))


def hybrid_reuse(setting: Setting) -> Result:
    """Ask questions behind one prompt, and go on with a conversation: with reuse and without."""
    model, rows = setting.pick(_MODEL, _TINY), list[Row]()
    with tempfile.TemporaryDirectory(prefix="inflight-hybrid-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        for reuse in (False, True):
            config = setting.config(Path(folder), 8192, prefix_reuse=reuse, max_batch_size=8)
            engine = Engine(ModelRunner(config, lambda _: _RandomShards(model)), None)
            engine.warm_up()
            kind = "reuse" if reuse else "no reuse"
            setting.say(f"hybrid: {_SHARED} shared tokens, {kind}")
            for number, stream in enumerate(_questions(Driver(engine), setting.pick(4, 3)), 1):
                rows.append({"scenario": "shared prompt", "kind": kind, "request": number, **_figures([stream])})
            setting.say(f"hybrid: a conversation, {kind}")
            for number, stream in enumerate(_conversation(Driver(engine), setting.pick(4, 2)), 1):
                rows.append({"scenario": "conversation", "kind": kind, "request": number, **_figures([stream])})
            state = engine._runner._state_pool.nbytes // engine._runner._state_pool.slots
    return _result(rows, sum(map(torch.Size.numel, _RandomShards(model)._shapes.values())), state)


def _questions(driver: Driver, count: int) -> list[Stream]:
    generator = np.random.default_rng(1)
    beginning = generator.integers(1, 32_000, _SHARED).tolist()
    prompts = [[*beginning, *generator.integers(1, 32_000, _QUESTION).tolist()] for _ in range(count)]
    return [stream for prompt in prompts for stream in driver.run([ask(prompt, 1)])]


def _conversation(driver: Driver, turns: int) -> list[Stream]:
    """Each turn's prompt has all that was said before, the answers too."""
    generator, streams = np.random.default_rng(2), list[Stream]()
    prompt = generator.integers(1, 32_000, 200).tolist()
    for _ in range(turns):
        streams += driver.run([ask(prompt, _ANSWER)])
        prompt = [*prompt, *streams[-1].tokens, *generator.integers(1, 32_000, _QUESTION).tolist()]
    return streams


def _figures(streams: Sequence[Stream]) -> Row:
    prompt = sum(one.metrics.prompt_tokens for one in streams)
    cached = sum(one.metrics.cached_tokens for one in streams)
    return {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_%": round(100 * cached / prompt, 1),
        "ttft_ms": round(1000 * statistics.median(one.ttft_s for one in streams), 1),
    }


def _result(rows: list[Row], parameters: int, state_bytes: int) -> Result:
    def seen(scenario: str, kind: str, name: str, first: int) -> list[float]:
        own = [row for row in rows if (row["scenario"], row["kind"]) == (scenario, kind)]
        return [float(row[name]) for row in own[first:]]

    def middle(scenario: str, kind: str, name: str, first: int) -> float:
        return round(statistics.median(seen(scenario, kind, name, first)), 1)

    shared, talk = "shared prompt", "conversation"
    finding = (
        f"{parameters / 1e6:.0f} million parameters; a state of {state_bytes / 2**20:.1f} MiB per sequence. Behind a "
        f"prompt of {_SHARED} tokens that all share, the first request leaves a snapshot in its own last part, and the "
        "second one, which departs from it, leaves one where it does. From the third on "
        f"{middle(shared, 'reuse', 'hit_%', 2)} % of a prompt are not computed: the first token comes after "
        f"{middle(shared, 'reuse', 'ttft_ms', 2)} ms in the median in place of "
        f"{middle(shared, 'no reuse', 'ttft_ms', 2)}. In a conversation each turn computes the answer before it, the "
        "new question, and up to 63 tokens before them: "
        f"{middle(talk, 'reuse', 'hit_%', 1)} % are not computed, and the first token comes after "
        f"{middle(talk, 'reuse', 'ttft_ms', 1)} ms in place of {middle(talk, 'no reuse', 'ttft_ms', 1)}."
    )
    figure, panes = panels(2)
    for pane, scenario in zip(panes, (shared, talk), strict=True):
        own = [row for row in rows if row["scenario"] == scenario]
        lines = {kind: columns(own, "request", "ttft_ms", kind) for kind in ("no reuse", "reuse")}
        curves(pane, lines, f"{scenario}: request", "TTFT, ms")
    return Result("hybrid-reuse", "Prefix reuse of a hybrid", finding, rows, figure)
