"""Triton backend ``inflight_engine``: the engine stage on the portable engine."""

from __future__ import annotations

from inflight.engine.factory import make_engine
from inflight.triton.engine_stage import EngineStage


class TritonPythonModel(EngineStage):
    """The engine stage: it computes in its own process."""

    make_engine = staticmethod(make_engine)
