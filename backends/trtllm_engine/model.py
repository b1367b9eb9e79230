"""Triton backend ``trtllm_engine``: the engine stage on TensorRT-LLM's LLM API."""

from __future__ import annotations

from inflight.manifest import check_deployment
from inflight.settings.deployment import Deployment
from inflight.text.tokenizer import Tokenizer
from inflight.triton import adapter, process
from inflight.triton.engine_stage import EngineStage
from inflight.trtllm.engine import TrtLlmEngine
from inflight.trtllm.factory import make_engine


class TritonPythonModel(EngineStage):
    """The engine stage: it computes in TensorRT-LLM's processes."""

    _engine: TrtLlmEngine | None = None

    def initialize(self, args: dict[str, str]) -> None:
        """Start the stage; TensorRT-LLM does not outlive a start that fails, after which Triton does not finalize."""
        try:
            super().initialize(args)
        except BaseException:
            self._close()
            raise

    def make_engine(self, deployment: Deployment, tokenizer: Tokenizer) -> TrtLlmEngine:
        """Return the engine, if the deployment was made for this machine."""
        check_deployment(adapter.deployment_directory())
        self._engine = make_engine(deployment, tokenizer, on_death=process.server_ender())
        return self._engine

    def finalize(self) -> None:
        """Stop TensorRT-LLM after the stage."""
        try:
            super().finalize()
        finally:
            self._close()

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
