"""Small builds: requests for a tiny checkpoint, and thresholds that any quantization holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inflight.export.build.pipeline import Build
from inflight.export.build.request import BuildRequest
from tests.support.progress import silent

LENIENT = {
    "max_perplexity_increase": 1e6,
    "max_kl_divergence": 1e6,
    "min_exact_match": 0,
    "max_weight_error": 1e6,
    "min_range": 0,
    "min_long_context_recall": 0,
}


@dataclass(frozen=True)
class Built:
    """Where the deployment is, and which stages ran."""

    directory: Path
    ran: tuple[str, ...]


def run(request: BuildRequest) -> tuple[Built, list[str]]:
    """Build, and return what was shown."""
    lines: list[str] = []
    ran = Build(request, lambda stage, line: lines.append(f"{stage}: {line}"), silent).run()
    return Built(request.output, ran), lines
