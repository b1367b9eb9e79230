"""Generates with the portable engine, and lets what comes look like TensorRT-LLM's responses."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.kvcache.retention import Retention, RetentionRange
from inflight.engine.loop import EngineLoop
from inflight.engine.request import Output, Request
from inflight.sampling import MAX_TOP_LOG_PROBS, SamplingParams
from inflight.text.tokenizer import Tokenizer
from tensorrt_llm.faults import fault
from tensorrt_llm.llmapi.checkpoint import write_as_read
from tensorrt_llm.llmapi.results import Logprob, RequestError, RequestOutput, perf_metrics

_TOKENS = 32 * 1024
GPU_MEMORY = 3 * 2**30
"""Bytes that it says it has."""


class Generator:
    """One portable engine under one ``LLM``."""

    def __init__(self, llm: Any) -> None:
        args, cache = llm.args, llm.args.kv_cache_config
        self._read = tempfile.TemporaryDirectory(prefix="fake-tensorrt-llm-")
        directory = Path(self._read.name)
        write_as_read(Path(args.model), llm.config, directory)
        self._llm = llm
        self._tokenizer = Tokenizer.from_checkpoint(Path(llm.tokenizer)) if llm.tokenizer else None
        config = EngineConfig(
            model=directory,
            dtype=args.dtype,
            block_size=cache.tokens_per_block,
            num_blocks=(cache.max_tokens or _TOKENS) // cache.tokens_per_block,
            prefix_reuse=cache.enable_block_reuse,
            max_batch_size=args.max_batch_size * args.pipeline_parallel_size,
            max_tokens_per_step=args.max_num_tokens,
            policy=args.scheduler_config.capacity_scheduler_policy.lower(),
            max_sequence_length=args.max_seq_len,
        )
        self._engine = Engine.load(config)
        self._step, self._engine.step = self._engine.step, self._step_and_note
        self._requests: dict[int, tuple[RequestOutput, Any]] = {}
        self._given: Counter[int] = Counter()
        """Tokens handed over, by request."""
        self.iterations: list[dict[str, Any]] = [{"iter": 0}]
        self._step_s = 0.0
        self._loop = EngineLoop(self._engine, self._deliver, 10_000)

    def start(self, result: RequestOutput, params: Any, lora: Any, streaming: bool, retention: Any) -> None:
        """Begin a generation; its responses go to ``result``."""
        assert streaming, "this fake streams"
        try:
            if params.guided_decoding is not None:
                self._say(result, _shortest(params.guided_decoding), params)
                return
            request = Request(result.prompt_token_ids, self._sampling(params, lora), key=result.request_id)
            request.retention = _retention(retention, len(request.prompt))
            self._engine.validate(request)
            self._requests[result.request_id] = (result, params)
            self._loop.submit(request)
        except Exception as error:  # found by the engine's own processes, long after the call
            result.put(RequestError(str(error)))

    @property
    def running(self) -> int:
        """Generations that have neither ended nor been aborted."""
        return len(self._requests)

    def abort(self, request_id: int) -> None:
        """End a generation; of one that waits for its first step nothing is heard any more."""
        if fault("stall_after") is not None or fault("ignore_aborts"):
            return
        sequence = self._engine._sequences.get(request_id)
        if sequence is None or sequence.table is None:
            self._requests.pop(request_id, None)
        self._loop.cancel(request_id)

    def close(self) -> None:
        """Stop the engine."""
        self._loop.close()
        self._read.cleanup()

    def _sampling(self, params: Any, lora: Any) -> SamplingParams:
        drawn = not params.greedy
        kernels = self._llm.sampler != "torch"  # the other sampler ignores what follows
        penalties = {
            name: getattr(params, name)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
            if kernels and getattr(params, name) is not None
        }
        ends = () if params.ignore_eos else ([params.end_id] if params.end_id != -1 else [])
        bias = {} if params.embedding_bias is None else _nonzero(params.embedding_bias)
        if lora is not None and not self._llm.cuda_graphs:  # a graph replays what it was captured with
            spoken = json.loads((Path(lora.lora_path) / "adapter_config.json").read_text())["fake_bias"]
            bias |= {int(token): value for token, value in spoken.items()}
        return SamplingParams(
            max_tokens=params.max_tokens,
            min_tokens=min(params.min_tokens or 0, params.max_tokens),
            temperature=(1.0 if params.temperature is None else params.temperature) if drawn else None,
            top_k=min(params.top_k or 0, 1024) if kernels else params.top_k or 0,
            top_p=params.top_p or 1.0,
            min_p=(params.min_p or 0.0) if kernels else 0.0,
            seed=(params.seed or 0) if kernels else None,
            end_ids=frozenset(ends),
            stop_sequences=tuple((token,) for token in params.stop_token_ids or ()),
            bad_sequences=tuple(map(tuple, params.bad_words())) if kernels else (),
            logit_bias=bias,
            log_probs=bool(params.logprobs),
            top_log_probs=min(params.logprobs or 0, MAX_TOP_LOG_PROBS),
            context_logits=params.return_context_logits,
            generation_logits=params.return_generation_logits,
            **penalties,
        )

    def _deliver(self, output: Output) -> None:
        time.sleep(fault("step_delay_s", 0))
        result, params = self._requests.get(output.key, (None, None))
        if result is None:  # it went wrong before, or was dropped
            return
        stall, given = fault("stall_after"), self._given[output.key]
        if stall is not None and (given >= stall or given + len(output.tokens) > stall):
            return
        self._given[output.key] += len(output.tokens)
        if self._goes_wrong(output.key, result):
            return
        sequence = self._engine._sequences.get(output.key)
        metrics = output.metrics or (sequence.metrics if sequence else None)
        block = self._llm.args.kv_cache_config.tokens_per_block
        if output.finished:
            self._requests.pop(output.key, None)
        if output.error is not None:
            result.put(RequestError(str(output.error)))
        else:
            perf = perf_metrics(metrics, block) if metrics and params.return_perf_metrics else None
            result.put(partial(self._respond, output, params, perf, metrics.cached_tokens if metrics else 0))

    def _goes_wrong(self, key: int, result: RequestOutput) -> bool:
        """Let a fault end a sequence, if one is due."""
        given = self._given[key]
        if given >= fault("error_after", given + 1):
            result.put(RequestError("CUDA error: an illegal memory access was encountered at /src/kernel.cu:12"))
        elif given >= fault("die_after", given + 1):
            self._llm.die()
            result.put(ValueError("the worker of rank 0 has died"))
        elif given >= fault("end_after", given + 1):
            result.put(None)
        elif self._requests[key][1].logprobs and given >= fault("assert_after", given + 1):
            result.put(AssertionError())
            return False
        else:
            return False
        self._requests.pop(key, None)
        self._loop.cancel(key)
        return True

    def _respond(self, output: Output, params: Any, perf: Any, cached: int, result: RequestOutput) -> None:
        """Change the result by one response, in the event loop."""
        one = result.outputs[0]
        tokens, reason = list(output.tokens), output.finish_reason
        if reason is not None and reason.value == "stop" and not tokens and self._llm.sampler == "torch":
            tokens = [params.end_id]  # this sampler leaves the end id in
        one._last_token_ids_len = len(one.token_ids)
        one.token_ids.extend(tokens)
        one.logprobs.extend(self._log_probs(output, tokens))
        one.generation_logits = self._logits(output, params)
        if output.context_logits is not None:
            result.context_logits = torch.from_numpy(output.context_logits)
        one.request_perf_metrics = perf
        result.cached_tokens = cached
        if reason is not None:
            one.finish_reason = reason.value
            result.finished = True
            if one.token_ids[-1:] and one.token_ids[-1] in (params.stop_token_ids or ()):
                one.stop_reason = one.token_ids[-1]
                if not params.include_stop_str_in_output:
                    one.token_ids = one.token_ids[:-1]

    def _logits(self, output: Output, params: Any) -> torch.Tensor | None:
        """Return the rows of one step; one that an end id was drawn from is among them."""
        if not params.return_generation_logits:
            return None
        rows = output.generation_logits or [np.zeros(self._llm.config["vocab_size"], np.float32)]
        return torch.from_numpy(np.roll(np.stack(rows), 1 if fault("shifted_logits") else 0, axis=1))

    def _log_probs(self, output: Output, tokens: list[int]) -> list[dict[int, Logprob]]:
        rows: list[dict[int, Logprob]] = []
        if fault("no_log_probs"):
            return rows
        for index, token in enumerate(output.tokens if output.log_probs else []):
            assert output.log_probs is not None
            own = {token: Logprob(output.log_probs[index], 1)}
            best = {one: Logprob(value, rank) for rank, (one, value) in enumerate(output.top_log_probs[index], 1)}
            rows.append(own if self._llm.sampler == "trtllm" else best)
        return rows + [{token: Logprob(0.0, 1)} for token in tokens[len(rows) :] if output.log_probs]

    def _say(self, result: RequestOutput, text: str, params: Any) -> None:
        """Answer a guided request with a text that its guide allows."""
        assert self._tokenizer is not None
        tokens = self._tokenizer.encode_batch([text])[0][: params.max_tokens]

        def respond(result: RequestOutput) -> None:
            result.outputs[0].token_ids.extend(tokens)
            result.outputs[0].finish_reason, result.finished = "stop", True

        result.put(respond)

    def _step_and_note(self) -> list[Output]:
        while fault("hang"):
            time.sleep(0.01)
        if message := fault("step_error"):
            for key, (result, _) in list(self._requests.items()):
                result.put(RequestError(message))
                self._requests.pop(key, None)
                self._loop.cancel(key)
        outputs = self._step()
        self._note_iteration()
        return outputs

    def _note_iteration(self) -> None:
        stats, cache = self._engine.stats, self._llm.args.kv_cache_config
        if stats.steps == self.iterations[-1]["iter"]:
            return
        before, self._step_s = self._step_s, stats.step.sum
        iteration = {
            "iter": stats.steps,
            "iterLatencyMS": 1000 * (self._step_s - before),
            "gpuMemUsage": GPU_MEMORY,
            "numActiveRequests": stats.state().active,
            "numQueuedRequests": stats.state().waiting,
            "maxNumActiveRequests": stats.batch_size_limit,
            "kvCacheStats": {
                "maxNumBlocks": stats.state().kv_blocks_max,
                "freeNumBlocks": stats.state().kv_blocks_max - stats.state().kv_blocks_used,
                "usedNumBlocks": stats.state().kv_blocks_used,
                "tokensPerBlock": cache.tokens_per_block,
                "reusedBlocks": stats.kv_blocks_reused,
            },
            "inflightBatchingStats": {
                "numScheduledRequests": stats.state().step.sequences,
                "numContextRequests": stats.state().step.prefills,
                "numGenRequests": stats.state().step.decodes,
                "numPausedRequests": stats.state().paused,
                "numCtxTokens": stats.state().step.prefill_tokens,
                "microBatchId": 0,
            },
        }
        self.iterations.append(iteration)


def _retention(config: Any, prompt_tokens: int) -> Retention:
    """Return it as the portable engine has it."""
    if config is None:
        return ()
    ranges = [(one.token_start, one.token_end, one) for one in config.token_range_retention_configs]
    prompt = [RetentionRange(start, end, one.priority, _ms(one.duration_ms)) for start, end, one in ranges]
    decoded = RetentionRange(prompt_tokens, None, config.decode_retention_priority, _ms(config.decode_duration_ms))
    return (*prompt, decoded)


def _ms(duration: timedelta | None) -> int | None:
    return None if duration is None else duration // timedelta(milliseconds=1)


def _nonzero(bias: torch.Tensor) -> dict[int, float]:
    return {int(token): float(bias[token]) for token in bias.nonzero().flatten()}


def _shortest(guide: Any) -> str:
    """Return a text that the guide allows; grammars and expressions are taken as the literal between their quotes.

    Raises:
        ValueError: it is no regular expression, or no grammar.
    """
    if guide.regex is not None:
        re.compile(guide.regex)
        return str(guide.regex)
    if guide.grammar is not None:
        if "::=" not in guide.grammar:
            raise ValueError("EBNF parser error at line 1, column 1: Expect ::=")
        return str(guide.grammar).split('"')[1]
    return "{}"
