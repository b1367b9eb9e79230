"""A plugin for pytest: vLLM's tests of its server, with a server that runs already in the place of theirs.

``SERVER_URL`` is where it listens, and ``KEYED_URL`` one that wants a key; ``CHECKPOINT`` is the folder of its
tokenizer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import absent
import anthropic
import openai
import transformers  # before the stand-in for PyTorch, which it would take for the real one

_KEY = "none"
_CONFIG = "hermes"
"""The first of the models in vLLM's tests of tools."""


class RemoteOpenAIServer:
    """What the tests know of vLLM's class of this name; its arguments are of the server that is not started."""

    DUMMY_API_KEY = _KEY

    def __init__(self, model: str, arguments: Any = None, **options: Any) -> None:
        self.url_root = os.environ["KEYED_URL" if "--api-key" in (arguments or ()) else "SERVER_URL"]
        self.host, _, port = self.url_root.removeprefix("http://").partition(":")
        self.port = int(port)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        """Return the URL of a path."""
        return f"{self.url_root}/{'/'.join(part.strip('/') for part in parts if part)}"

    def get_client(self, **options: Any) -> openai.OpenAI:
        """Return a client of OpenAI's SDK."""
        return openai.OpenAI(**_openai(self, options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return an asynchronous client of OpenAI's SDK."""
        return openai.AsyncOpenAI(**_openai(self, options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Return a client of Anthropic's SDK."""
        return anthropic.Anthropic(**_anthropic(self, options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Return an asynchronous client of Anthropic's SDK."""
        return anthropic.AsyncAnthropic(**_anthropic(self, options))


def _openai(server: RemoteOpenAIServer, options: dict[str, Any]) -> dict[str, Any]:
    return {"base_url": server.url_for("v1"), "api_key": _KEY, "max_retries": 0, "timeout": 600} | options


def _anthropic(server: RemoteOpenAIServer, options: dict[str, Any]) -> dict[str, Any]:
    return {"base_url": server.url_root, "api_key": _KEY, "max_retries": 0} | options


_TOKENIZER = transformers.AutoTokenizer.from_pretrained(os.environ["CHECKPOINT"])


def _tokenizer(*arguments: Any, **options: Any) -> Any:
    return _TOKENIZER


def _read(answer: Any) -> Any:
    """Return an answer as vLLM's class of it would hold it: attributes in the place of keys."""
    return json.loads(json.dumps(answer), object_hook=lambda fields: SimpleNamespace(**fields))


_ANSWER = SimpleNamespace(model_validate=_read)


class _Platform:
    """vLLM's account of the machine: none of the devices that tests ask for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: False


transformers.AutoTokenizer.from_pretrained = _tokenizer  # of whatever model a test names
absent.stand_in(
    ("vllm", "torch", "starlette", "fastapi", "PIL", "tests.conftest", "tests.models"),
    {
        "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer, "VLLM_PATH": Path.cwd(), "ROCM_EXTRA_ARGS": []},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.entrypoints.pooling.embed.protocol": {"EmbeddingResponse": _ANSWER},
        "vllm.entrypoints.pooling.scoring.protocol": {"RerankResponse": _ANSWER, "ScoreResponse": _ANSWER},
        "vllm.tokenizers": {"get_tokenizer": _tokenizer},
        "vllm.transformers_utils.repo_utils": {
            "hf_api": lambda: SimpleNamespace(snapshot_download=lambda *arguments, **options: os.environ["CHECKPOINT"])
        },
    },
)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out tests that are there once for each of several models: one server runs."""
    items[:] = [item for item in items if _params(item).get("server_config", _CONFIG) == _CONFIG]


def _params(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def pytest_collection_finish() -> None:
    """Say that the test files have been imported."""
    absent.tests_begin()
