"""What a deployment may say of speculation, by kind of engine: nothing is accepted and ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.errors import DeploymentError
from inflight.settings.deployment import load_deployment, validate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "speculation", "complaint"),
    [
        ("pytorch", {"method": "eagle", "draft_model": "x"}, "speculation.method: eagle` needs `engine.kind:` trtllm"),
        ("pytorch", {"method": "medusa", "draft_model": "x"}, "speculation.method: medusa` needs"),
        ("pytorch", {"method": "lookahead"}, "speculation.method: lookahead` needs"),
        ("pytorch", {"method": "ngram", "window_size": 3}, "`window_size` needs `method:` lookahead; it is ngram"),
        ("pytorch", {"method": "draft_target"}, "`method: draft_target` needs `draft_model`"),
        ("pytorch", {"max_draft_tokens": 3}, "`max_draft_tokens` needs `method:`"),
        ("replay", {"method": "ngram"}, "speculation.method` needs an engine with a model"),
        ("trtllm", {"method": "ngram", "adaptive": False}, "speculation.adaptive` needs `engine.kind:` pytorch"),
    ],
)
def test_what_has_no_effect_is_refused(kind: str, speculation: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DeploymentError) as error:
        validate({"model": "m", "engine": {"kind": kind}, "speculation": speculation}, "deployment.yaml")
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_the_demo_with_its_draft_model() -> None:
    """One model, one vocabulary; the draft is small, and found beside the demo's own."""
    deployment = load_deployment(ROOT / "deployments/demo-draft")
    draft = deployment.speculation.draft_model
    assert draft == ROOT / "deployments/demo/draft"
    assert deployment.model == ROOT / "deployments/demo/model"
    assert sum(path.stat().st_size for path in draft.iterdir()) <= 1_500_000
