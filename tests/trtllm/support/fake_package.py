"""How a test gets the fake TensorRT-LLM: in its own process, or in the engine stage of a server that it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from inflight.resources import BACKENDS
from inflight.serve.installation import TritonInstallation, find_installation

FAKES = Path(__file__).parents[2] / "fakes"
_BACKEND = """\
import importlib.util
import sys

sys.path.insert(0, {fakes!r})
spec = importlib.util.spec_from_file_location("trtllm_engine", {model!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
TritonPythonModel = module.TritonPythonModel
"""


@contextmanager
def importable() -> Iterator[None]:
    """Make ``import tensorrt_llm`` give the fake, and leave no trace of it."""
    sys.path.insert(0, str(FAKES))
    try:
        yield
    finally:
        sys.path.remove(str(FAKES))
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]


class InstallationWithFake(TritonInstallation):
    """A Triton whose backend ``trtllm_engine`` is the real one, in a process that finds the fake.

    The stub ignores ``PYTHONPATH``, so the path is set by a file around the backend's own; nothing is written outside
    the server's directory of backends.
    """

    @classmethod
    def find(cls) -> InstallationWithFake:
        """Return the installation at hand."""
        found = find_installation()
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)})

    def assemble_backends(self, directory: Path) -> Path:
        """Fill ``directory`` as ever, but for that one backend."""
        super().assemble_backends(directory)
        backend = directory / "trtllm_engine"
        backend.unlink()
        backend.mkdir()
        model = BACKENDS / "trtllm_engine/model.py"
        (backend / "model.py").write_text(_BACKEND.format(fakes=str(FAKES), model=str(model)))
        return directory
