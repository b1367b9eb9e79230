"""Load tools that nobody here wrote, unmodified, against the gateway: what each says of the same load."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.clients import AIPERF, CLIENTS, GUIDELLM
from benchmarks.gateway.served import KEY, Served
from benchmarks.peers.environments import home_of
from inflight.errors import EngineFailure, InflightError
from inflight.resources import ROOT

INPUT, OUTPUT = 100, 64
"""Tokens of each request."""
_WAIT_S = 600


def run_tools(
    served: Served, tokenizer: Path, folder: Path, streams: int, requests: int
) -> Iterator[dict[str, object]]:
    """Run each tool whose environment is there; yield its figures, or why it was not run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in commands(served, tokenizer, folder, streams, requests).items():
        row: dict[str, object] = {"tool": name, "completed": 0, "failed": 0, "tokens_per_second": 0.0, "note": ""}
        try:
            yield row | _run(name, words, folder)
        except InflightError as error:
            yield row | {"note": str(error)}


def commands(served: Served, tokenizer: Path, folder: Path, streams: int, requests: int) -> dict[str, str]:
    """Return the command of each tool, with the name of its program first."""
    url, model = served.url, served.gateway.model_name
    return {
        "vllm bench serve": f"vllm bench serve --backend openai-chat --base-url {url} --endpoint /v1/chat/completions "
        f"--model {model} --tokenizer {tokenizer} --dataset-name random --random-input-len {INPUT} "
        f"--random-output-len {OUTPUT} --num-prompts {requests} --max-concurrency {streams} --ignore-eos "
        f"--save-result --result-dir {folder} --result-filename vllm.json --disable-tqdm",
        "GuideLLM": f"guidellm run --backend kind=openai_http,target={url},model={model},api_key={KEY} "
        f"--profile kind=concurrent,streams={streams} --constraint kind=max_requests,count={requests} "
        f"--tokenizer kind=huggingface_auto,model={tokenizer} --data "
        f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT} "
        f"--output kind=json,path={folder}/guidellm.json --disable-progress",
        "AIPerf": f"aiperf profile --model {model} --tokenizer {tokenizer} --url {url} --endpoint-type chat "
        f"--streaming --api-key {KEY} --concurrency {streams} --request-count {requests} "
        f"--synthetic-input-tokens-mean {INPUT} --output-tokens-mean {OUTPUT} --extra-inputs ignore_eos:true "
        f"--artifact-dir {folder}/aiperf --ui none",
    }


def _run(name: str, words: str, folder: Path) -> dict[str, object]:
    program, *arguments = shlex.split(words)
    command = [str(_folder_of(name) / program), *arguments]
    environment = os.environ | {"PYTHONPATH": "", "OPENAI_API_KEY": KEY}
    log = folder / f"{program}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(command, stdout=file, stderr=file, env=environment, timeout=_WAIT_S).returncode
        except subprocess.TimeoutExpired:
            raise EngineFailure(f"{name} took more than {_WAIT_S} s; {log} is its log") from None
    if code:
        raise EngineFailure(f"{name} ended with code {code}; {log} is its log")
    return _FIGURES[name](folder)


def _folder_of(name: str) -> Path:
    """Return the folder of a tool's program."""
    if name == "vllm bench serve":
        return home_of("vllm").python.parent
    return CLIENTS.home_of({"GuideLLM": GUIDELLM, "AIPerf": AIPERF}[name], ROOT / CLIENTS.folder).python.parent


def _of_vllm(folder: Path) -> dict[str, object]:
    found = json.loads((folder / "vllm.json").read_text())
    return {
        "completed": found["completed"],
        "failed": found.get("failed", 0),
        "tokens_per_second": round(found["output_throughput"]),
    }


def _of_guidellm(folder: Path) -> dict[str, object]:
    [found] = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    return {
        "completed": totals["successful"],
        "failed": totals["errored"],
        "tokens_per_second": round(metrics["output_tokens_per_second"]["successful"]["mean"]),
    }


def _of_aiperf(folder: Path) -> dict[str, object]:
    found = json.loads((folder / "aiperf/profile_export_aiperf.json").read_text())
    return {
        "completed": round(found["request_count"]["avg"]),
        "failed": round((found.get("error_request_count") or {"avg": 0})["avg"]),
        "tokens_per_second": round(found["output_token_throughput"]["avg"]),
    }


_FIGURES = {"vllm bench serve": _of_vllm, "GuideLLM": _of_guidellm, "AIPerf": _of_aiperf}
