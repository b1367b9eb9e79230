"""A plugin for pytest: SGLang's tests of its server, with a server that runs already in the place of theirs.

``SERVER_URL`` is where it listens, ``CHECKPOINT`` the folder of its tokenizer, ``MODEL`` the name that requests give,
and ``KITS`` the folder of the suite's classes that several test files share.
"""

from __future__ import annotations

import os
import unittest
from types import SimpleNamespace
from typing import Any

import absent
import transformers  # before the stand-in for PyTorch, which it would take for the real one

_MODEL = os.environ["MODEL"]
_TOKENIZER = transformers.AutoTokenizer.from_pretrained(os.environ["CHECKPOINT"])
_MODELS = ("MODEL_NAME", "SMALL_MODEL_NAME", "SMALL_EMBEDDING_MODEL_NAME", "SMALL_CROSS_ENCODER_MODEL_NAME")


def _nothing(*arguments: Any, **named: Any) -> None:
    """Start, stop or register nothing."""


absent.stand_in(
    ("sglang", "torch"),
    {
        "sglang.test.test_utils": {
            "CustomTestCase": unittest.TestCase,
            "DEFAULT_URL_FOR_TEST": os.environ["SERVER_URL"],
            "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": 0,
            "is_in_amd_ci": lambda: False,
            "popen_launch_server": lambda *arguments, **named: SimpleNamespace(pid=0, poll=_nothing),
            **{f"DEFAULT_{name}_FOR_TEST": _MODEL for name in _MODELS},
        },
        "sglang.test.kits": {"__path__": [os.environ["KITS"]]},
        "sglang.srt.utils": {"kill_process_tree": _nothing},
        "sglang.srt.utils.hf_transformers_utils": {"get_tokenizer": lambda *arguments, **named: _TOKENIZER},
        "sglang.test.ci.ci_register": {"register_cuda_ci": _nothing, "register_amd_ci": _nothing},
        "sglang.test.runners": {
            "TEST_RERANK_QUERY_DOCS": [{"query": "What is a replica?", "documents": ["A server.", "A bird."]}] * 2
        },
    },
)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out tests that a class has from another that is run: they are there for another model, and one runs."""
    classes = {item.cls.__name__ for item in items if item.cls}
    items[:] = [item for item in items if not (item.cls and _owner(item) in classes - {item.cls.__name__})]


def _owner(item: Any) -> str:
    """Return the name of the class that a test was written in."""
    return getattr(item.cls, item.name).__qualname__.partition(".")[0]


def pytest_collection_finish() -> None:
    """Say that the test files have been imported."""
    absent.tests_begin()
