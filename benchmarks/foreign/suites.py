"""The suites: which files of each are run, and with which of our plugins in the place of the server they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environments import Home
from benchmarks.foreign.fetch import LLAMA_TESTS, VLLM, VLLM_TESTS
from benchmarks.peers.environments import LLAMA


@dataclass(frozen=True)
class Suite:
    """Tests of one project, which are run with pytest."""

    name: str
    project: str
    source: str
    """What was run: a package and its version."""
    plugin: str
    """The module in ``plugins``."""
    files: Sequence[str]
    """Relative to the suite's folder."""
    folder: str = ""
    """Relative to the environment; empty: the command line gives it."""
    models: Sequence[str] = ("demo",)
    """The names of the model that is served: those that the tests give."""
    context: int = 5120
    """Tokens of the context: the longest request of the tests has nearly that many. The demo's own context is shorter:
    what it writes beyond that means nothing, and the tests of the API do not read it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the plugin reads, with paths relative to the suite's folder."""

    def root(self, home: Home, given: Path | None) -> Path:
        """Return the folder in which it runs."""
        return (home.folder / self.folder if self.folder else given or Path()).resolve()


_API = "tests/entrypoints"
_OPENAI = f"{_API}/openai"
_CHAT = (
    "batched_chat_completions",
    "chat",
    "chat_completion",
    "chat_echo",
    "chat_logit_bias_validation",
    "completion_with_function_calling",
    "enable_force_include_usage",
    "include_reasoning",
    "logprob_token_ids",
    "root_path",
    "thinking_token_budget",
)
_MODELS = (
    "Qwen/Qwen3-0.6B",
    "BAAI/bge-base-en-v1.5",
    "BAAI/bge-reranker-base",
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "NousResearch/Hermes-3-Llama-3.1-8B",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "claude-3-7-sonnet-latest",
    "intfloat/multilingual-e5-small",
)
_RESPONSES = ("basic", "function_call", "namespace_tool_separator", "simple", "stateful", "structured_output")
VLLM_SUITE = Suite(
    "vllm",
    "vLLM",
    f"vllm {VLLM}",
    "vllm_tests",
    (
        f"{_OPENAI}/test_chunked_prompt.py",
        f"{_OPENAI}/test_return_token_ids.py",
        f"{_OPENAI}/test_return_tokens_as_ids.py",
        *(f"{_OPENAI}/chat_completion/test_{name}.py" for name in _CHAT),
        f"{_OPENAI}/completion/test_completion.py",
        f"{_OPENAI}/completion/test_token_in_token_out.py",
        f"{_OPENAI}/models/test_models.py",
        *(f"{_OPENAI}/responses/test_{name}.py" for name in _RESPONSES),
        f"{_API}/anthropic/test_messages.py",
        f"{_API}/generate/generative_scoring/test_generative_scoring_e2e.py",
        f"{_API}/pooling/embed/test_online.py",
        f"{_API}/pooling/embed/test_online_dimensions.py",
        f"{_API}/pooling/scoring/test_bi_encoder_online.py",
        f"{_API}/pooling/scoring/test_cross_encoder_online.py",
        f"{_API}/serve/instrumentator/test_basic.py",
        f"{_API}/serve/instrumentator/test_metrics.py",
        f"{_API}/serve/middleware/test_optional_middleware.py",
        f"{_API}/serve/tokenize/test_tokenization.py",
        "tests/tool_use/test_chat_completions.py",
        "tests/tool_use/test_parallel_tool_calls.py",
        "tests/tool_use/test_tool_calls.py",
    ),
    VLLM_TESTS,
    _MODELS,
    context=8192,  # as the tests of the tokenizer expect it
)
_SGLANG = "test/registered"
SGLANG_SUITE = Suite(
    "sglang",
    "SGLang",
    "the source tree that --sglang names",
    "sglang_tests",
    (
        f"{_SGLANG}/openai_server/basic/test_anthropic_server.py",
        f"{_SGLANG}/openai_server/basic/test_openai_server.py",
        f"{_SGLANG}/openai_server/features/test_json_mode.py",
        f"{_SGLANG}/openai_server/features/test_openai_server_ebnf.py",
        f"{_SGLANG}/openai_server/function_call",
        f"{_SGLANG}/openai_server/validation",
        f"{_SGLANG}/prefill_only/test_openai_embedding.py",
        f"{_SGLANG}/prefill_only/test_score_api.py",
        "test/manual/openai_server",
    ),
    environment={"KITS": "python/sglang/test/kits"},
)
_LLAMA = (
    "basic",
    "chat_completion",
    "compat_anthropic",
    "compat_oai_responses",
    "completion",
    "embedding",
    "ignore_eos",
    "metrics",
    "rerank",
    "security",
    "template",
    "tokenize",
    "tool_call",
)
LLAMA_SUITE = Suite(
    "llama.cpp",
    "llama.cpp",
    f"llama-cpp-python {LLAMA}",
    "llama_tests",
    tuple(f"unit/test_{name}.py" for name in _LLAMA),
    LLAMA_TESTS,
    (
        "demo",
        "codellama70b",
        "davinci-002",
        "gpt-3.5-turbo",
        "gpt-3.5-turbo-instruct",
        "gpt-4.1",
        "test",
        "text-embedding-3-small",
    ),
)
SUITES = {suite.name: suite for suite in (VLLM_SUITE, SGLANG_SUITE, LLAMA_SUITE)}
KEYS = ("sk-this-is-the-secret-key", "test")
"""The keys that the tests of keys send."""
