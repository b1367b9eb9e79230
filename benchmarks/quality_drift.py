"""What quality in production sees: answers of a model, whole or damaged, scored again by a reference that is whole."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from benchmarks.gateway.served import Served, serve
from benchmarks.result import Result, Row
from inflight.errors import EngineFailure
from inflight.resources import DEMO

_GROUP = 64
_PATIENCE_S = 600
_QUESTIONS = ("What is in-flight batching?", "Who are you?", "What is TTFT?", "Tell me about the KV cache.")
_SERIES = re.compile(r'^inflight_gateway_quality_(\w+)_total\{(?:mode|outcome)="(\w+)"\} (\S+)$', re.MULTILINE)
Damage = Callable[[torch.Tensor], torch.Tensor]


def _noise(size: float) -> Damage:
    """Return what adds noise to a weight: normal, ``size`` times its own standard deviation."""
    draw = torch.Generator().manual_seed(0)
    return lambda weight: weight + size * weight.std() * torch.randn(weight.shape, generator=draw)


def _rounded(bits: int) -> Damage:
    """Return what rounds a weight to so many bits, with a scale for each 64 values of a row."""
    most = 2 ** (bits - 1) - 1

    def damage(weight: torch.Tensor) -> torch.Tensor:
        groups = weight.reshape(-1, _GROUP)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
        return (groups / scale).round().clamp(-most - 1, most).mul(scale).reshape(weight.shape)

    return damage


DAMAGES: dict[str, Damage | None] = {
    "the same": None,
    "rounded to 8 bits": _rounded(8),
    "rounded to 4 bits": _rounded(4),
    "5 % noise": _noise(0.05),
    "20 % noise": _noise(0.2),
}


def measure_drift(requests: int, tokens: int, say: Callable[[str], object]) -> Result:
    """Serve the demo whole and damaged, and return what the gateway's metrics say of each served model.

    Raises:
        DeploymentError: a model could not be served.
        EngineFailure: the reference has not scored all answers after minutes.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, serve({"model": str(DEMO / "model")}) as reference:
        for number, (name, damage) in enumerate(DAMAGES.items()):
            model = _checkpoint(Path(folder) / str(number), damage)
            quality = {"sample_ratio": 1.0, "reference": reference.grpc, "max_waiting": requests}
            with serve({"model": str(model), "gateway": {"model_name": "demo", "quality": quality}}) as served:
                _ask(served, requests, tokens)
                rows.append({"served": name, **_seen(served, requests)})
            say(str(rows[-1]))
    finding = (
        "Drift is a token's log-prob as served less the reference's, the mean. Where tokens are drawn from the model's "
        "own distribution it estimates the KL divergence of the served model from the reference; it is 0 where both "
        "are the same, and grows with the damage. The alert fires from 0.05 nats on."
    )
    return Result("drift", "Drift of damaged models from the whole one", finding, rows)


def _checkpoint(folder: Path, damage: Damage | None) -> Path:
    """Write the demo's checkpoint with all of its linears damaged."""
    shutil.copytree(DEMO / "model", folder)
    if damage is not None:
        weights = load_file(folder / "model.safetensors")
        changed = {
            name: damage(weight.float()).to(weight.dtype) if "_proj" in name and weight.ndim == 2 else weight
            for name, weight in weights.items()
        }
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def _ask(served: Served, requests: int, tokens: int) -> None:
    """Ask for answers, half of them greedy, and half drawn from the model's own distribution."""
    with httpx.Client(base_url=served.url, timeout=_PATIENCE_S, trust_env=False) as client:
        for number in range(requests):
            message = {"role": "user", "content": _QUESTIONS[number // 2 % len(_QUESTIONS)]}
            body = {"model": "demo", "messages": [message], "max_tokens": tokens, "temperature": number % 2}
            client.post("/v1/chat/completions", json=body | {"seed": number}).raise_for_status()


def _seen(served: Served, requests: int) -> Row:
    """Return what the metrics say, as soon as all answers have been scored."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        page = httpx.get(f"{served.url}/metrics", timeout=_PATIENCE_S, trust_env=False).text
        found = {(name, label): float(value) for name, label, value in _SERIES.findall(page)}
        if found.get(("answers", "compared"), 0) == requests:
            break
        if time.monotonic() > deadline:
            raise EngineFailure(f"the reference has not scored all answers: {found}")
        time.sleep(0.1)

    def each(*names: str, mode: str) -> float:
        first, second = (found.get((name, mode), 0.0) for name in (*names, "")[:2])
        return (first - second) / found[("tokens", mode)]

    return {
        "tokens": found[("tokens", "plain")] + found[("tokens", "greedy")],
        "drift, drawn (nats)": round(each("above_nats", "below_nats", mode="plain"), 5),
        "drift, greedy (nats)": round(each("above_nats", "below_nats", mode="greedy"), 5),
        "greedy tokens that the reference likes best": round(each("agreeing_tokens", mode="greedy"), 4),
    }
