"""Writes contract.md, deployment.md, metrics.md, models-served.md and openai-fields.md from the tables of the code.

python scripts/write_reference.py docs
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from inflight.contract import DETOKENIZER, ENGINE, ENSEMBLE, TOKENIZER, Tensor
from inflight.contract import STAGES as MODELS
from inflight.metrics import (
    BATCH,
    EXPORT,
    GATEWAY,
    KV_CACHE,
    REQUESTS,
    STAGES,
    SUPERVISOR,
    TOKENS,
    UPSTREAM,
    MetricFamily,
)
from inflight.settings.deployment import Deployment
from inflight.settings.section import EngineKind, ReadBy, Section

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.checkpoints_page import checkpoints_page
from scripts.fields_page import fields_page
from scripts.models_page import models_page

_MODELS = {
    ENSEMBLE: "The client's view: text in, text out.",
    TOKENIZER: "Text or messages to token ids. Internal; its tensors may change.",
    ENGINE: "Token ids in, token ids out. Public, like the ensemble. It is the engine of every `engine.kind`, and "
    "keeps upstream's name, because clients send requests to it.",
    DETOKENIZER: "Token ids to text. Internal; its tensors may change.",
}
_METRICS = """\
# The metrics

Written from `inflight/metrics.py` by `make contract`; a test holds them equal.

`http://<host>:<server.metrics_port>/metrics` has them, beside those of Triton itself (`nv_inference_*`,
`nv_cpu_*`, `nv_gpu_*`). Every series has the labels `model` (the stage that exports it) and `version` too. The column
*engines* says beside which `engine.kind` a family of the engine's stage is exported: the others have nothing to fill
it with, and what is not known is absent, never 0. With `tensorrtllm` the engine is upstream's own backend, which
exports its own families. `observability.metrics: false`, or `inflight serve --no-metrics`, turns all of them off.

## How to read them

- **Requests.** One is a sequence: a row of a batch, times `num_return_sequences`. Each is counted once, by how it
  ended: `stop`, `length`, `cancelled` and `deadline` are the finish reasons, the others the labels of errors
  (`inflight/errors.py`). What the tokenizer refuses is counted there (`model="tokenizer"`), before it is known how many
  sequences it has; so is what the engine's stage refuses. `deadline` has both those that had tokens and those that
  had none. A request that fails behind the engine, because its text cannot be made (`model="detokenizer"`) or a
  response cannot be written, counts once more, as `internal`: the engine has counted its sequences by their own ends,
  and its client saw an error. What Triton cannot parse is counted nowhere.
  `nv_inference_request_failure` of the ensemble counts each request that fails in it twice (Triton 2.51).
- **Times.** Arrival is at the engine's queue. From there to the first step is *queue*, to the first token *prefill*
  (time to first token is both), to the last token *decode*; a sequence shows in each of them when it gets there, and in
  the duration when it ends, whatever its end. Between two tokens: one value for each token after a sequence's first;
  tokens that come together, as with speculation, are 0 apart.
- **Tokens.** Prompt and cached tokens are counted when a sequence is in a step for the first time, generated ones as
  they are made. An end id is not a token; it may be what ends prefill or decode.
- **Histograms** are exported as the counters that they consist of (`_bucket`, `_sum`, `_count`; decision 0007), so
  their `TYPE` says counter. `histogram_quantile(0.95, sum by (le) (rate(inflight_request_queue_seconds_bucket[5m])))`
  is what it always is.
- **How new they are.** While the engine works, what it does at the moment (requests, batch, KV cache blocks: upstream's
  gauges and Inflight's) is 0.2 s behind it, and all else two seconds at most; once it is idle, all of the engine's
  stage is shown within 0.4 s. The tokenizer and the detokenizer show theirs once a second.
- On `trtllm`, steps are the iterations that TensorRT-LLM reports. A generating sequence counts as one token of a step,
  without drafts. KV cache blocks have no state `cached`: they are among the free ones there. The GPU's memory is what
  TensorRT-LLM reports, the CPU's that of the stage's own process.

## What they cost

Stages count in plain numbers, with metrics or without: about 0.3 us for each token. Exporting is what costs more, and
`make bench ARGS="observability --output loadtest/results/observability.json"` measures it in two ways; this takes some
six minutes on a machine to itself.

- **As CPU time.** Each stage counts what its exporter uses (`inflight_metrics_export_cpu_seconds_total`) and the values
  that it hands to the server (`inflight_metrics_export_calls_total`). What one value costs the server is told by two
  idle servers side by side, one with metrics and one without; all that the first uses more is charged to its values,
  which are few while it is idle, so it is too much rather than too little. Both sides together, over the CPU time of
  all the server's processes in the same seconds, is the share that the stages and the engine did not get.
- **As throughput.** The same streams from a server without metrics, one with them, and one with traces too, in turn,
  round after round; the ratio is the median of the rounds', with its 95 % interval.

On two cores, with the clients and the collector on the same ones
([loadtest/results/observability.json](../loadtest/results/observability.json), with commit, machine and date):

| engine | shown | tokens/s | ratio, 95 % interval | exporting, CPU ms per s | of the server's CPU | a scrape, CPU ms |
|---|---|---|---|---|---|---|
| `replay`, never waits | off | 47,928 | | | | |
| `replay`, never waits | metrics | 46,066 | 1.003 (0.835 to 1.050) | 14.7 | 1.13 % | 0.8 |
| `replay`, never waits | metrics and traces | 41,939 | 0.910 (0.865 to 0.983) | 14.5 | 1.07 % | 0.8 |
| `replay`, 10 ms per step | off | 1,211 | | | | |
| `replay`, 10 ms per step | metrics | 1,211 | 1.001 (0.993 to 1.006) | 19.4 | 2.47 % | 0.8 |
| `replay`, 10 ms per step | metrics and traces | 1,208 | 0.997 (0.996 to 1.003) | 18.1 | 2.23 % | 0.8 |
| `pytorch` | off | 4,590 | | | | |
| `pytorch` | metrics | 5,115 | 1.112 (0.913 to 1.148) | 10.4 | 0.65 % | 0.7 |
| `pytorch` | metrics and traces | 4,361 | 0.985 (0.807 to 1.042) | 11.5 | 0.72 % | 0.7 |

Where the engine sets the pace, as a GPU does with steps of some ten milliseconds, metrics cost nothing that can be
told from noise, and metrics with traces of every request 0.3 % of throughput. Where every core is busy all the time
the ratios are noise and cost together: `replay` without a wait answers 230 requests a second here, each of which
Triton counts in four models (the server without metrics lacks Triton's own too), and between runs its median ratio has
been 0.91 to 1.00, that of `pytorch`, which shares its two cores with the clients, 0.92 to 1.11. There the CPU time
tells more: exporting takes 0.6 to 1.1 % of it.

The exporter works by the clock, whatever the load: some 100 values a second while the engine works, few while it is
idle. So its share is largest where the server gets little CPU time, because others use the machine. On a server in
production, `sum(rate(inflight_metrics_export_cpu_seconds_total[5m]))` is the stages' part of it, in cores.

## Kubernetes

The Gateway API Inference Extension picks a pod by its queue and its KV cache. Its metric names for Triton with
TensorRT-LLM are upstream's, which every engine of Inflight exports (`replay` with an empty KV cache). Give its endpoint
picker these flags, and the metrics port (8002 by default), which is not the port of requests:

    total-queued-requests-metric: 'nv_trt_llm_request_metrics{request_type=waiting}'
    kv-cache-usage-percentage-metric: 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}'
    lora-info-metric: ''

The fraction is that of blocks in use; cached blocks without an owner can be had, and do not count.
"""
_GROUPS = {
    "Upstream's": UPSTREAM,
    "Requests": REQUESTS,
    "Tokens": TOKENS,
    "Steps": BATCH,
    "KV cache": KV_CACHE,
    "Stages": STAGES,
    "Exporting": EXPORT,
}


def files() -> dict[str, str]:
    """Return the generated pages by name."""
    return {
        "contract.md": contract_page(),
        "checkpoints.md": checkpoints_page(),
        "deployment.md": deployment_page(),
        "metrics.md": metrics_page(),
        "models-served.md": models_page(),
        "openai-fields.md": fields_page(),
    }


def contract_page() -> str:
    """Return the page about the tensors of every stage."""
    parts = [
        "# The contract\n\n"
        "Written from `inflight/contract.py` by `make contract`; a test holds them equal.\n\n"
        "Names, types and shapes are those of the TensorRT-LLM ensemble (1.2.x). **+** marks Inflight's own additions. "
        "*refused* marks inputs that are not supported: a request that uses one fails with `UNIMPLEMENTED` and the "
        "tensor's name, unless its value requests nothing. *X only* marks tensors that every other `engine.kind` "
        "refuses in the same way. `replay`, which runs no model, refuses by name whatever it would ignore: sampling, "
        "penalties, stops, log-probs and logits. To Triton every input is optional; the stages check what a request "
        "needs. Shapes are without the batch dimension; `text_output` has none.\n"
    ]
    for model, (inputs, outputs) in MODELS.items():
        parts.append(
            f"\n## `{model}`\n\n{_MODELS[model]}\n\n### Inputs\n\n{_table(inputs)}\n### Outputs\n\n{_table(outputs)}"
        )
    return "".join(parts)


def _table(tensors: tuple[Tensor, ...]) -> str:
    rows = [f"| {_mark(one)}`{one.name}` | {one.dtype} | {list(one.dims)} | {_meaning(one)} |" for one in tensors]
    return "| tensor | type | shape | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _mark(tensor: Tensor) -> str:
    return "**+** " if tensor.own else ""


def _meaning(tensor: Tensor) -> str:
    if tensor.served_by is None:
        return tensor.doc
    mark = f"*{', '.join(tensor.served_by)} only*" if tensor.served_by else "*refused*"
    return f"{mark}: {tensor.doc}"


def deployment_page() -> str:
    """Return the page about ``deployment.yaml``."""
    head = (
        "# deployment.yaml\n\n"
        "Written from `inflight/settings/` by `make contract`; a test holds them equal.\n\n"
        "A deployment is a directory with this file. An unknown key or a wrong value stops the start with an error "
        "that names it, what is allowed and the nearest known key.\n\n"
        "The column *engines* says which kinds of engine (`engine.kind`) read a key, or some of its values, where not "
        "all do; the others refuse it.\n\n"
        "| key | default | engines | meaning |\n|---|---|---|---|\n"
    )
    return head + "\n".join(_rows(Deployment, "")) + "\n"


def _rows(section: type[Section], prefix: str, outer: Sequence[ReadBy] = ()) -> list[str]:
    rows: list[str] = []
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        marks = [*outer, *(mark for mark in field.metadata if isinstance(mark, ReadBy))]
        if isinstance(kind, type) and issubclass(kind, Section):
            rows += _rows(kind, f"{prefix}{name}.", [*marks, *kind.read_by])
        else:
            rows.append(f"| `{prefix}{name}` | {_default(field)} | {_engines(marks)} | {field.description} |")
    return rows


def _engines(marks: Sequence[ReadBy]) -> str:
    """Return which engines read a key, and which read those of its values that not every engine reads."""
    whole = [mark.engines for mark in marks if not mark.values]
    known = [engine for engine in get_args(EngineKind) if whole and all(engine in engines for engines in whole)]
    some = [f"{', '.join(mark.values)}: {', '.join(mark.engines)}" for mark in marks if mark.values]
    return "; ".join([*([", ".join(known)] if known else []), *some])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "`null`"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


_GATEWAY_METRICS = """
## The gateway's

The process of [OpenAI's API](gateway.md) has a page of its own, `http://<host>:<gateway.port>/metrics`, which needs an
API key where the deployment has keys. `route` is a path of the table of routes, or `other`; `status` is that of the
answer, 499 where the client left before it began. The time to the first token is of the engine's first token, whether
the answer is streamed or not.

| family | type | labels | meaning |
|---|---|---|---|
"""


_SUPERVISOR_METRICS = """
## `inflight serve`

With the door, and on `server.status_port`, `/metrics` is one page of all parts: Triton's, the gateway's, the door's and
these. It is there while Triton is away, without what Triton would say. `inflight_restarts_total` is the count of
`inflight serve` itself there, without the labels of the stages, and has the causes `gateway` and `door` too.

| family | type | labels | meaning |
|---|---|---|---|
"""


def metrics_page() -> str:
    """Return the page about the metric families."""
    stages = "".join(f"\n## {title}\n\n{_families(families)}" for title, families in _GROUPS.items())
    gateway = _GATEWAY_METRICS + "".join(map(_gateway_family, GATEWAY))
    return _METRICS + stages + gateway + _SUPERVISOR_METRICS + "".join(map(_gateway_family, SUPERVISOR))


def _families(families: tuple[MetricFamily, ...]) -> str:
    head = "| family | type | labels | stages | engines | meaning |\n|---|---|---|---|---|---|\n"
    return head + "".join(_family(family) for family in families)


def _family(family: MetricFamily) -> str:
    engines = ", ".join(family.engines) if ENGINE in family.stages else ""
    stages = ", ".join(family.stages)
    return f"| `{family.name}` | {family.kind} | {_labels(family)} | {stages} | {engines} | {_text(family)} |\n"


def _gateway_family(family: MetricFamily) -> str:
    return f"| `{family.name}` | {family.kind} | {_labels(family)} | {_text(family)} |\n"


def _labels(family: MetricFamily) -> str:
    return "; ".join(f"`{name}`: {', '.join(values) or 'any'}" for name, values in family.labels.items())


def _text(family: MetricFamily) -> str:
    return family.help if not family.buckets else f"{family.help}; bounds {', '.join(f'{b:g}' for b in family.buckets)}"


if __name__ == "__main__":
    for name, text in files().items():
        (Path(sys.argv[1]) / name).write_text(text)
