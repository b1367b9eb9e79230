"""Stands in for upstream's C++ backend ``tensorrtllm``: its tensors, its parameters, its manners; our tokens.

It reads its parameters as the C++ one does, but where that one warns and goes on, this one refuses to load. What it
generates comes from the portable engine, on the checkpoint of the deployment. Its quirks are those of upstream's
sources: every error is INTERNAL and in the executor's words; flags are those of the first row; without ``top_k`` and
``top_p`` it is greedy, and without a seed the seed is 0; ``stop`` ends the newest request of an id alone, whose last
response has no token, where it streams, and no time of a last one; stop words count before ``min_tokens`` too; each
response of a stream has the log-probs of all tokens so far and the context's logits, and generation logits of shape
[1, tokens, 1, vocabulary], which in a whole answer is [1, 1, max_tokens, vocabulary]; ``num_output_tokens`` counts
``output_ids``, the prompt included where that is among them.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from inflight.engine.factory import make_engine
from inflight.engine.loop import EngineLoop
from inflight.engine.request import FinishReason, Output
from inflight.errors import EngineFailure
from inflight.text.tokenizer import Tokenizer
from inflight.triton import adapter
from inflight.triton.request_reader import OutputOptions, SubRequest, read_request

FACTS = json.loads((Path(__file__).resolve().parents[3] / "facts/tensorrt_llm_model.json").read_text())
REQUIRED = (
    "gpt_model_type",
    "gpt_model_path",
    "tokenizer_dir",
    "guided_decoding_backend",
    "xgrammar_tokenizer_info_path",
)


@dataclass
class Running:
    """One request, until its last response."""

    sender: adapter.TritonSender
    options: OutputOptions
    subrequests: dict[int, SubRequest]
    arrival_ns: int
    request_id: str
    made: dict[int, Output] = field(default_factory=dict)
    """What of each sequence is not sent yet."""
    log_probs: dict[int, list[float]] = field(default_factory=dict)
    """Of all tokens of each sequence so far."""
    context_logits: dict[int, np.ndarray] = field(default_factory=dict)


def read_parameters(config: dict[str, Any]) -> dict[str, str]:
    """Return the parameters, each checked against the recorded table."""
    values = {name: entry["string_value"] for name, entry in config["parameters"].items()}
    for name in REQUIRED:
        if name not in values:
            raise ValueError(f"parameter {name} is missing")
    for name, value in values.items():
        fact = FACTS["parameters"].get(name)
        if fact is None:
            raise ValueError(f"unknown parameter {name}")
        if "${" in value:
            raise ValueError(f"parameter {name} is a placeholder: {value}")
        if "choices" in fact and value not in fact["choices"] and not fact.get("key_must_exist"):
            raise ValueError(f"Invalid {name}: {value}")
        parse(name, fact["value_type"], value)
    if not (Path(values["gpt_model_path"]) / "config.json").is_file():
        raise ValueError(f"no engine in {values['gpt_model_path']}")
    return values


def parse(name: str, kind: str, value: str) -> None:
    """Read a value as the C++ backend does."""
    word = kind.split(" ")[0]
    accepted = FACTS["parameter_parsing"]["bool_accepts"]
    if word == "bool" and value not in accepted["true"] + accepted["false"]:
        raise ValueError(f"{name}: not a bool: {value}")
    if word in ("int", "uint"):
        int(value)
    if word == "float":
        float(value)
    if kind.startswith("csv ints"):
        [int(subrequest) for subrequest in value.replace(";", ",").split(",")]


def _with_upstreams_defaults(arrays: adapter.Arrays) -> adapter.Arrays:
    """Return a request's inputs with what upstream takes where they say nothing."""
    rows = len(arrays["input_ids"])
    given = dict(arrays)
    if "runtime_top_k" not in given and "runtime_top_p" not in given:
        given["runtime_top_k"] = np.ones(rows, np.int32)
    given.setdefault("seed", np.zeros(rows, np.uint64))
    for name in ("streaming", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"):
        if name in given:
            given[name] = np.full_like(given[name], given[name].reshape(-1)[0])
    return given


class TritonPythonModel:
    """The engine's model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters, and load the checkpoint in place of the engine."""
        self._parameters = read_parameters(json.loads(args["model_config"]))
        deployment = adapter.deployment()
        # The demo computes in float32 where it is served; a compiled engine has its own type.
        deployment = deployment.model_copy(update={"engine": deployment.engine.model_copy(update={"dtype": "float32"})})
        self._limits, self._decoupled = deployment.limits, adapter.is_decoupled(args)
        tokenizer = Tokenizer.from_checkpoint(deployment.model)
        self._vocab_size = tokenizer.config.vocab_size
        self._lock = threading.Lock()
        self._running: dict[int, Running] = {}
        self._newest: dict[str, Running] = {}
        self._max_length = json.loads(Path(self._parameters["gpt_model_path"], "config.json").read_text())[
            "build_config"
        ]["max_seq_len"]
        self._loop = EngineLoop(make_engine(deployment, tokenizer), self._deliver, deployment.batching.max_queue_size)

    def finalize(self) -> None:
        """Stop the engine."""
        self._loop.close()

    def execute(self, requests: list[Any]) -> None:
        """Take requests; answers come later."""
        for request in requests:
            sender = adapter.TritonSender(request)
            try:
                self._accept(request, sender)
            except Exception as error:
                sender.fail(EngineFailure(str(error)))

    def _accept(self, request: Any, sender: adapter.TritonSender) -> None:
        arrays, request_id = adapter.read_arrays(request), request.request_id()
        if "stop" in arrays and arrays["stop"].any():
            if not request_id:
                raise RuntimeError("Trying to stop a request but the request ID is not provided")
            with self._lock:
                keys = [key for key, one in self._running.items() if one is self._newest.get(request_id)]
            for key in keys:
                self._loop.cancel(key)
            sender.end(self._decoupled)
            return
        if len(arrays["input_ids"]) > 1 and not self._decoupled:
            raise RuntimeError("Batch > 1 requires the tensorrt_llm backend to be using decoupled transaction policy")
        longest = int(arrays["input_lengths"].max())
        if longest >= self._max_length:
            raise RuntimeError(
                "Executor failed process requestId 1 due to the following error: Encountered an error when fetching "
                f"new request: Prompt length ({longest}) exceeds maximum input length ({self._max_length - 1})."
            )
        if "min_tokens" in arrays and arrays["min_tokens"].max() > 1 and "stop_words_list" in arrays:
            raise RuntimeError("upstream's engine would end at a stop word before min_tokens; nobody asked for that")
        arrays = _with_upstreams_defaults(arrays)
        kind = "pytorch"  # what stands in; the tensors that it has and upstream has not are in no pbtxt of this model
        options, subrequests = read_request(
            arrays, request_id, self._limits, self._vocab_size, self._decoupled, engine=kind, max_sequences=256
        )
        running = Running(
            sender, options, {one.request.key: one for one in subrequests}, time.monotonic_ns(), request_id
        )
        with self._lock:
            self._running |= dict.fromkeys(running.subrequests, running)
            self._newest[request_id] = running
        self._loop.submit(*(subrequest.request for subrequest in subrequests))

    def _deliver(self, output: Output) -> None:
        running = self._running[output.key]
        made = running.made.setdefault(output.key, Output(output.key))
        made.extend(output)
        output = made
        if not (running.options.streaming or output.finished):
            return
        del running.made[output.key]
        subrequest = running.subrequests[output.key]
        if output.finished:
            with self._lock:
                del self._running[output.key], running.subrequests[output.key]
        if output.error is not None:
            text = f"Executor failed process requestId {output.key} due to the following error: {output.error}"
            running.sender.fail(EngineFailure(text))
            return
        stopped = output.finish_reason is FinishReason.CANCELLED
        tokens = [] if stopped and running.options.streaming else output.tokens
        whole = running.options.streaming or running.options.exclude_input_in_output
        running.sender.send(
            self._response(running, subrequest, output, tokens if whole else subrequest.request.prompt + tokens),
            final=not running.subrequests,
        )

    def _response(self, running: Running, subrequest: SubRequest, output: Output, ids: list[int]) -> adapter.Arrays:
        options = running.options
        arrays: adapter.Arrays = {
            "output_ids": np.array(ids, np.int32).reshape(1, 1, -1),
            "sequence_length": np.array([[len(ids)]], np.int32),
        }
        if options.return_log_probs:
            made = running.log_probs.setdefault(output.key, [])
            made += output.log_probs or []
            arrays["cum_log_probs"] = np.array([[sum(made)]], np.float32)
            arrays["output_log_probs"] = np.array(made, np.float32).reshape(1, 1, -1)
        if output.context_logits is not None:
            running.context_logits[output.key] = np.asarray(output.context_logits, np.float32)[None]
        if output.key in running.context_logits:  # in every response from then on
            arrays["context_logits"] = running.context_logits[output.key]
        if subrequest.request.sampling.generation_logits:
            rows = np.asarray(output.generation_logits or [], np.float32).reshape(-1, self._vocab_size)
            room = subrequest.request.sampling.max_tokens - len(rows)
            streamed = rows[None, : len(ids), None]
            arrays["generation_logits"] = (
                streamed if options.streaming else np.pad(rows, ((0, room), (0, 0)))[None, None]
            )
        if options.batch_size > 1:
            arrays["batch_index"] = np.array([[subrequest.batch_index]], np.int32)
        if options.sequences > 1:
            arrays["sequence_index"] = np.array([[subrequest.sequence_index]], np.int32)
        if options.return_num_input_tokens:
            arrays["num_input_tokens"] = np.array([[len(subrequest.request.prompt)]], np.int32)
        if options.return_num_output_tokens:
            arrays["num_output_tokens"] = np.array([[len(ids)]], np.int32)
        if options.return_perf_metrics:
            # A request that was stopped ends without the time of a last token.
            ended = output.finished and output.finish_reason is not FinishReason.CANCELLED
            arrays |= self._perf_metrics(running, ended)
        return arrays

    def _perf_metrics(self, running: Running, finished: bool) -> adapter.Arrays:
        """They come with every response; the last token's time is set at the end."""
        now = time.monotonic_ns()
        times = {
            "arrival_time_ns": running.arrival_ns,
            "first_scheduled_time_ns": now,
            "first_token_time_ns": now,
            "last_token_time_ns": now if finished else 0,
        }
        counts = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")
        drafts = ("total_accepted_draft_tokens", "total_draft_tokens")
        return (
            {name: np.array([[value]], np.int64) for name, value in times.items()}
            | {name: np.ones((1, 1), np.int32) for name in counts}
            | {name: np.zeros((1, 1), np.int32) for name in drafts}
            | {"acceptance_rate": np.zeros((1, 1), np.float32)}
        )
