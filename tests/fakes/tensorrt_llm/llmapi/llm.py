"""``LLM``: its arguments held to the recorded tables, its generations made by the portable engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

from tensorrt_llm.executor import LoRARequest
from tensorrt_llm.faults import fault
from tensorrt_llm.llmapi.checkpoint import read_config
from tensorrt_llm.llmapi.configs import CudaGraphConfig, KvCacheConfig, SchedulerConfig, SpeculativeConfig
from tensorrt_llm.llmapi.generator import Generator
from tensorrt_llm.llmapi.results import RequestError, RequestOutput
from tensorrt_llm.llmapi.retention import KvCacheRetentionConfig
from tensorrt_llm.lora_helper import LoraConfig
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.tables import LLM_API, LLM_ARGS, model, names

_NESTED = {
    "kv_cache_config": KvCacheConfig,
    "scheduler_config": SchedulerConfig,
    "cuda_graph_config": CudaGraphConfig,
    "lora_config": LoraConfig,
    "speculative_config": SpeculativeConfig,
}
"""Arguments whose values are objects of the API."""
_TABLES = ("BaseLlmArgs", "TorchLlmArgs_extra")
_SAMPLER_BUFFERS = 5


class Executor:
    """Runs the engine's processes; once it has shut down it does not come back."""

    def __init__(self) -> None:
        self.down = False

    def is_shutdown(self) -> bool:
        """Return whether it has shut down."""
        return self.down


class LLM:
    """The PyTorch flow."""

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        allowed = names(*_TABLES)
        for key in arguments:
            if key not in allowed:
                raise ValueError(f"{type(self).__name__} got invalid argument: {key}")
        self.args = self._validate({"model": model} | arguments)
        time.sleep(fault("start_s", 0))
        if message := fault("crash_at_start"):
            raise RuntimeError(message)
        world = self.args.tensor_parallel_size * self.args.pipeline_parallel_size
        if world > fault("gpus", 2):
            raise RuntimeError(f"Only {fault('gpus', 2)} GPUs are available, but {world} are required.")
        self.tokenizer = None if self.args.skip_tokenizer_init else self.args.tokenizer or self.args.model
        self.config = read_config(Path(self.args.model), self.args.trust_remote_code)
        self._allocate_sampler()
        self._executor: Executor | None = Executor()
        self._generator = Generator(self)
        self._ids = itertools.count(1)
        self._asked = False
        self._stats_done = False

    def _validate(self, arguments: dict[str, Any]) -> Any:
        fields = [field for table in _TABLES for field in LLM_ARGS[table]]
        unique = {field["name"].split()[0]: field for field in fields}
        args = model(type(self).__name__, list(unique.values()))(**arguments)
        for name, wanted in _NESTED.items():
            given = arguments.get(name)
            if given is not None and not isinstance(given, wanted):
                raise TypeError(f"{name} must be {wanted.__name__}")
        speculative = args.speculative_config
        if speculative is not None and not speculative.supports_backend("pytorch"):
            raise ValueError(f"{type(speculative).__name__} is not supported by the pytorch backend")
        if args.guided_decoding_backend is not None and args.skip_tokenizer_init:
            raise ValueError("guided decoding needs a tokenizer")
        if speculative is not None and args.sampler_type == "TRTLLMSampler":
            raise ValueError("TRTLLMSampler does not support speculative decoding")
        sizes = getattr(args.cuda_graph_config, "batch_sizes", None)
        if sizes and max(sizes) > args.max_batch_size:
            raise ValueError("cuda_graph_config.batch_sizes exceed max_batch_size")
        # Left out they are on; the recorded default is their class's.
        self.cuda_graphs = arguments.get("cuda_graph_config", "default") is not None
        return args

    def _allocate_sampler(self) -> None:
        """Take memory for the trtllm sampler: several tables of all slots by all positions."""
        length = self.args.max_seq_len or self.config["max_position_embeddings"]
        slots = self.args.max_batch_size * self.args.pipeline_parallel_size
        size = _SAMPLER_BUFFERS * 4 * slots * length
        if self.sampler == "trtllm" and size > fault("sampler_bytes", 1 << 30):
            raise RuntimeError(f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB")

    @property
    def sampler(self) -> str:
        """What draws the tokens."""
        return "trtllm" if self.args.sampler_type == "TRTLLMSampler" else "torch"

    def generate_async(self, inputs: list[int], sampling_params: Any = None, **more: Any) -> RequestOutput:
        """Begin a generation."""
        known = {field["name"] for field in LLM_API["generate_async"]["parameters"]}
        if unknown := set(more) - known:
            raise TypeError(f"generate_async() got an unexpected keyword argument '{min(unknown)}'")
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        if message := fault("raise_in_generate"):
            raise RuntimeError(message)
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(params)}")
        if params.end_id is None and self.tokenizer is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if not self.args.enable_chunked_prefill and len(inputs) > self.args.max_num_tokens:
            raise ValueError("The sum of prompt length should not exceed max_num_tokens")
        retention = more.get("kv_cache_retention_config")
        if not isinstance(retention, KvCacheRetentionConfig | None):
            raise TypeError(f"kv_cache_retention_config must be KvCacheRetentionConfig, but got {type(retention)}")
        self._asked = True
        self._stats_done = False
        result = RequestOutput(next(self._ids), list(inputs), self._generator.abort)
        if refusal := self._refusal(params, more.get("lora_request")):
            result.put(RequestError(refusal))
        else:
            self._generator.start(result, params, more.get("lora_request"), more.get("streaming", False), retention)
        return result

    def _refusal(self, params: Any, lora: Any) -> str | None:
        """Return what the engine's own processes find wrong with a request, which is told in its stream."""
        if lora is not None and not (isinstance(lora, LoRARequest) and self.args.lora_config is not None):
            return "LoRA is not enabled"
        if params.guided_decoding is not None and self.args.guided_decoding_backend is None:
            return "guided decoding is not enabled"
        return fault("refuse")

    def get_stats_async(self, timeout: float | None = 2) -> Any:
        """Return an asynchronous iterator over the iterations' statistics.

        It ends when none comes in time, and so does every other at once until the next request.
        """
        return self._stats(timeout)

    async def _stats(self, timeout: float | None) -> Any:
        if not self.args.enable_iter_perf_stats or not self._asked:
            return
        seen, waited = len(self._generator.iterations), 0.0
        while not self._stats_done and waited < (timeout or 0):
            await asyncio.sleep(0.02)
            waited += 0.02
            for iteration in self._generator.iterations[seen:]:
                seen, waited = seen + 1, 0.0
                yield json.loads(json.dumps(iteration))
        self._stats_done = True

    @property
    def running(self) -> int:
        """Generations that have neither ended nor been aborted."""
        return self._generator.running

    @property
    def iteration(self) -> dict[str, Any]:
        """Statistics of the newest iteration."""
        return self._generator.iterations[-1]

    def die(self) -> None:
        """Shut down because of a fault that is not of one request."""
        assert self._executor is not None
        self._executor.down = True

    def shutdown(self) -> None:
        """Stop the engine."""
        self._generator.close()
        self._executor = None
