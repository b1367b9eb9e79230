"""Small builds: requests for a tiny checkpoint, and thresholds that any quantization holds."""

from __future__ import annotations

from inflight.export.build.pipeline import Build, Built
from inflight.export.build.request import BuildRequest
from inflight.export.stages import silent

LENIENT = {
    "max_perplexity_increase": 1e6,
    "max_kl_divergence": 1e6,
    "min_exact_match": 0,
    "max_weight_error": 1e6,
    "min_range": 0,
    "min_long_context_recall": 0,
}


def run(request: BuildRequest) -> tuple[Built, list[str]]:
    """Build, and return what was shown."""
    lines: list[str] = []
    return Build(request, lambda stage, line: lines.append(f"{stage}: {line}"), silent).run(), lines
