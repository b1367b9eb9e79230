"""What is predicted of an 8B model on an H200: ``python -m benchmarks.contact.predict FOLDER``.

Nothing here was measured by Inflight. Launches and programs come from the code as it is compiled for compute capability
9.0 (``launches``), bytes and operations from the model's shape, and times from these and the assumptions below, by a
roofline for each part of a step (S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.contact.sizes import FULL, LARGE, Batch
from benchmarks.random_weights import config_of
from benchmarks.result import Row, markdown_table
from benchmarks.traffic import layer_traffic
from inflight.engine.models.reading import read_model_config
from inflight.report.provenance import provenance

_CONFIG = read_model_config(config_of(LARGE))
_SPLIT_KEYS = 256
"""Below so many keys a split was never cut, in the design before."""
_NAMES = {"before": "launches-before.json", "now": "launches.json"}


@dataclass(frozen=True)
class Assumptions:
    """What is not known before it is measured; times in seconds."""

    bandwidth: float = 4.3e12
    """Bytes a second of a copy on an H200, read and written."""
    flops: float = 788e12
    """A second, of a large bfloat16 product there."""
    product_bandwidth: float = 0.85
    """Share of the bandwidth that a product of few rows reaches."""
    product_flops: float = 0.83
    """Share of ``flops`` that a product of many rows reaches."""
    fp8_gain: float = 1.6
    """How much faster products of many rows are in FP8, with fast accumulation."""
    cache_bandwidth: float = 0.7
    """Share of the bandwidth at which keys and values are read block by block."""
    between_bandwidth: float = 0.8
    """The same, of what lies between products."""
    prefill_attention_flops: float = 240e12
    launch_s: float = 2.3e-6
    """The time from the end of a kernel to the start of the next one in a graph."""
    step_s: float = 0.2e-3
    """The time that each step takes once: transfers, the start of the graph."""
    idle_wave_s: float = 1.0e-6
    """The time of a wave of programs that load what they are to do, and find nothing."""
    triton_launch_s: float = 11e-6
    """The host's time for each kernel in the Triton language outside of a graph."""
    torch_launch_s: float = 5e-6
    """The same for PyTorch's own."""
    multiprocessors: int = 132
    head_launches: int = 6
    """The last product and greedy sampling."""


@dataclass(frozen=True)
class Design:
    """The engine at one commit: what its steps launch."""

    steps: Mapping[str, Mapping[str, Any]]
    assumed: Assumptions

    @property
    def is_fused(self) -> bool:
        """Whether sums go with norms, and rotations with storing."""
        return "add_rms_norm" in self.steps["decode 1 x 512"]["per_layer"]

    def launches(self, step: str) -> int:
        """Return the launches of a whole step."""
        found = self.steps[step]
        return (
            LARGE.layers * sum(found["per_layer"].values()) + sum(found["once"].values()) + self.assumed.head_launches
        )

    def decode_s(self, batch: Batch, fp8: bool = False) -> float:
        """Return the seconds of a step in which a batch decodes."""
        one = self.assumed
        step = f"decode {batch.name}" + (", FP8" if fp8 else "")
        rows, width = batch.streams, 1 if fp8 else 2
        read = (width * _layer_weights() + 2 * _head_weights()) / (one.bandwidth * one.product_bandwidth)
        done = 2 * rows * (_layer_weights() / (one.fp8_gain if fp8 else 1) + _head_weights())
        products = max(read, done / (one.flops * one.product_flops))
        cache = rows * batch.context * cache_bytes() / (one.bandwidth * one.cache_bandwidth)
        between = self._between_s(rows, fp8)
        return products + cache + between + self.launches(step) * one.launch_s + self._idle_s(step, batch) + one.step_s

    def eager_s(self, batch: Batch) -> float:
        """Return the seconds of the host that launches a decoding step kernel by kernel."""
        found = self.steps[f"decode {batch.name}"]
        ours = {kernel["name"] for kernel in found["kernels"]}
        counts = [(LARGE.layers * count, name) for name, count in found["per_layer"].items()]
        counts += [(count, name) for name, count in found["once"].items()]
        one = self.assumed
        return sum(count * (one.triton_launch_s if name in ours else one.torch_launch_s) for count, name in counts)

    def mixed_s(self) -> float:
        """Return the seconds of the kernels of a step of eight that decode and a hundred tokens of a prompt."""
        return self.decode_s(Batch(8, 512, 128)) + 100 * self._token_s(100)

    def prefill_rate(self, batch: Batch, fp8: bool = False) -> float:
        """Return the tokens a second of prompts."""
        tokens = min(FULL.tokens_per_step, batch.streams * batch.prompt)
        launches = self.launches(f"prefill {FULL.prefill}") * self.assumed.launch_s
        step = tokens * self._token_s(batch.prompt, fp8) + launches + self.assumed.step_s
        read = (1 if fp8 else 2) * _layer_weights() / (self.assumed.bandwidth * self.assumed.product_bandwidth)
        return tokens / max(step, read + launches)

    def _token_s(self, prompt: int, fp8: bool = False) -> float:
        """Return the seconds of a token of a prompt, among many."""
        one = self.assumed
        products = 2 * _layer_weights() / (one.flops * one.product_flops * (one.fp8_gain if fp8 else 1))
        attention = 2 * LARGE.layers * LARGE.hidden * prompt / one.prefill_attention_flops
        return products + attention + self._between_s(FULL.prefill, fp8) / FULL.prefill

    def _between_s(self, tokens: int, fp8: bool) -> float:
        """Return the seconds of what lies between a step's products, but for launches."""
        return self.between_bytes(tokens, fp8) / (self.assumed.bandwidth * self.assumed.between_bandwidth)

    def between_bytes(self, tokens: int, fp8: bool = False) -> int:
        """Return what all layers read and write between products and attention, in a step of ``tokens``."""
        if not self.is_fused:
            return LARGE.layers * tokens * _bytes_before(fp8)
        kernels = layer_traffic(_CONFIG, tokens, 0, fp8)
        return LARGE.layers * sum(one.nbytes for one in kernels if one.name not in ("product", "attend"))

    def _idle_s(self, step: str, batch: Batch) -> float:
        """Return the seconds of programs of attention that find nothing to do."""
        kernel = next(kernel for kernel in self.steps[step]["kernels"] if kernel["name"] == "attend")
        pairs = batch.streams * LARGE.kv_heads
        splits = max(1, kernel["programs"] // pairs)
        used = pairs * min(splits, math.ceil(batch.context / max(_SPLIT_KEYS, math.ceil(batch.context / splits))))
        resident = max(1, min(2048 // (32 * kernel["warps"]), 65_536 // (32 * kernel["warps"] * kernel["registers"])))
        waves = max(0, kernel["programs"] - used) / (self.assumed.multiprocessors * resident)
        return LARGE.layers * waves * self.assumed.idle_wave_s


def cache_bytes() -> int:
    """Return the bytes of a token's keys and values in bfloat16."""
    return 2 * 2 * _CONFIG.num_layers * _CONFIG.num_kv_heads * _CONFIG.head_dim


def _layer_weights() -> int:
    hidden, kv = _CONFIG.hidden_size, _CONFIG.num_kv_heads * _CONFIG.head_dim
    return _CONFIG.num_layers * hidden * (2 * hidden + 2 * kv + 3 * _CONFIG.intermediate_size)


def _head_weights() -> int:
    return _CONFIG.hidden_size * _CONFIG.vocab_size


def _bytes_before(fp8: bool) -> int:
    """Return what a token moved in a layer between products when each of these was a kernel of its own."""
    hidden, inner = _CONFIG.hidden_size, _CONFIG.intermediate_size
    kv = _CONFIG.num_kv_heads * _CONFIG.head_dim
    norms, sums = 2 * 2 * hidden, 2 * 3 * hidden
    rotations = 6 * 2 * (hidden + kv)  # read and written, in pieces of two bytes: some six times as long
    quantized = (2 * hidden + inner + hidden) * 3 // 2 if fp8 else 0
    return 2 * (norms + sums + rotations + 2 * 2 * kv + 3 * inner + quantized)


def rows(designs: Mapping[str, Design]) -> list[Row]:
    """Return what each design is predicted to reach; the names are those of ``contact.jsonl``."""
    found: list[Row] = []

    def add(result: str, unit: str, values: Mapping[str, float], roofline: float | str = "") -> None:
        rounded = {name: round(value, 3) for name, value in values.items()}
        found.append({"result": result, **rounded, "roofline": roofline, "unit": unit})

    for batch, fp8 in (*((one, False) for one in FULL.batches), *((one, True) for one in FULL.fp8_batches)):
        name = f"{batch.name}, {'FP8' if fp8 else 'bf16'}"
        rates = {key: batch.streams / one.decode_s(batch, fp8) for key, one in designs.items()}
        add(f"decode {name}", "tok/s", rates, round(_roofline(batch, fp8), 1))
        add(f"prefill {name}", "tok/s", {key: one.prefill_rate(batch, fp8) for key, one in designs.items()})
    for batch in FULL.mode_batches:
        rates = {key: batch.streams / one.decode_s(batch) for key, one in designs.items()}
        eager = {key: batch.streams / max(one.eager_s(batch), one.decode_s(batch)) for key, one in designs.items()}
        add(f"decode {batch.name}, as it is", "tok/s", rates)
        add(f"decode {batch.name}, no graph either", "tok/s", eager)
    add("mixed step, time of kernels", "ms", {key: 1000 * one.mixed_s() for key, one in designs.items()})
    for batch in (FULL.batches[0], FULL.batches[2]):
        launches = {key: float(one.launches(f"decode {batch.name}")) for key, one in designs.items()}
        add(f"launches of a decode step at {batch.streams}", "launches", launches)
    add("copy", "TB/s", {key: one.assumed.bandwidth / 1e12 for key, one in designs.items()})
    return found


def _roofline(batch: Batch, fp8: bool) -> float:
    """Return the tokens a second at which all weights and keys are read at the bandwidth of a copy."""
    one = Assumptions()
    read = (1 if fp8 else 2) * _layer_weights() + 2 * _head_weights() + batch.streams * batch.context * cache_bytes()
    done = 2 * batch.streams * (_layer_weights() + _head_weights())
    return batch.streams / max(read / one.bandwidth, done / one.flops)


def layer_rows(designs: Mapping[str, Design]) -> list[Row]:
    """Return the launches of a layer and of a step, by kernel."""
    found: list[Row] = []
    for step in designs["now"].steps:
        if step in designs["before"].steps:
            row: dict[str, float | str] = {"step": step}
            for name, design in designs.items():
                row |= {f"per layer, {name}": sum(design.steps[step]["per_layer"].values())}
                row |= {f"whole step, {name}": design.launches(step)}
                attend = [one["programs"] for one in design.steps[step]["kernels"] if one["name"] == "attend"]
                row |= {f"attention programs, {name}": max(attend, default=0)}
            found.append(row)
    return found


def byte_rows(designs: Mapping[str, Design]) -> list[Row]:
    """Return what a step reads and writes, in MB: weights and cache once, and what lies between by each design."""
    found: list[Row] = []
    cases = [(one.name, one.streams, one.streams * one.context, False) for one in FULL.batches]
    cases += [(f"{one.name}, FP8", one.streams, one.streams * one.context, True) for one in FULL.fp8_batches]
    for name, tokens, context, fp8 in [*cases, (f"prefill {FULL.prefill}", FULL.prefill, 0, False)]:
        row: dict[str, float | str] = {"step": name if name.startswith("prefill") else f"decode {name}"}
        row["weights, MB"] = round(((1 if fp8 else 2) * _layer_weights() + 2 * _head_weights()) / 1e6)
        row["cache, MB"] = round(context * cache_bytes() / 1e6)
        for key, design in designs.items():
            row[f"between products, {key}, MB"] = round(design.between_bytes(tokens, fp8) / 1e6, 1)
        found.append(row)
    return found


def main(folder: Path) -> None:
    """Write ``predictions.json`` and the page of the folder."""
    records = {name: json.loads((folder / file).read_text()) for name, file in _NAMES.items()}
    assumed = Assumptions()
    designs = {
        name: Design({step["name"]: step for step in record["steps"]}, assumed) for name, record in records.items()
    }
    predicted, launched, moved = rows(designs), layer_rows(designs), byte_rows(designs)
    record = {
        "command": "make gpu-predictions",
        **provenance(),
        "what": "predictions for an H200; nothing was measured on a GPU",
        "designs": {name: one["commit"] for name, one in records.items()},
        "assumptions": asdict(assumed),
        "rows": predicted,
        "launches": launched,
        "bytes": moved,
    }
    (folder / "predictions.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "README.md").write_text(_page(record))


def _page(record: Mapping[str, Any]) -> str:
    commits = record["designs"]
    assumed: list[Row] = [
        {"assumption": name.replace("_", " "), "value": f"{value:g}"} for name, value in record["assumptions"].items()
    ]
    return f"""# Predictions for a GPU

**Nothing on this page was measured on a GPU.** It is what is predicted of an 8B Llama (Llama 3.1's shape) on one H200,
so that [the first contact](../../first-contact.md) has something to be held against. "Before" is commit
{commits["before"]}, "now" is commit {commits["now"]}. Launches and programs are counted in the code as it is compiled
for compute capability 9.0; bytes and operations follow from the model's shape; times follow from these and from the
assumptions at the end. The roofline is the time in which the weights and the cache are read at the bandwidth of a copy,
or the products are computed at full speed.

{markdown_table(record["rows"])}

## Launches

The launches of a step include the last product and greedy sampling. The programs are those of the largest launch of
attention in a layer. Those before were counted once, by a variant of the program that counts today's; that design lacks
what today's program looks for, so the variant is not kept.

{markdown_table(record["launches"])}

## Bytes

What lies between products is all that norms, sums, rotations, storing and gates read and write, at the least; where a
kernel loads two bytes at a time it counts several times.

{markdown_table(record["bytes"])}

## Assumptions

Bandwidth and FLOP/s are those of a copy and of a large bfloat16 product on an H200. The other values are estimates.
Times are in seconds.

{markdown_table(assumed)}

[predictions.json](predictions.json), [launches.json](launches.json), [launches-before.json](launches-before.json):
`{record["command"]}`, commit {record["commit"]}, {record["date"]}, {record["machine"]}
"""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
