"""The names of ``tensorrt_llm.llmapi`` that are recorded."""

from tensorrt_llm.llmapi.configs import (
    CapacitySchedulerPolicy,
    CudaGraphConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SchedulerConfig,
)
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.results import RequestError
from tensorrt_llm.llmapi.retention import KvCacheRetentionConfig
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = [
    "LLM",
    "CapacitySchedulerPolicy",
    "CudaGraphConfig",
    "DraftTargetDecodingConfig",
    "EagleDecodingConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "LookaheadDecodingConfig",
    "MedusaDecodingConfig",
    "NGramDecodingConfig",
    "RequestError",
    "SamplingParams",
    "SchedulerConfig",
]
