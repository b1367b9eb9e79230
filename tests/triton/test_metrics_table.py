"""A live page against the table of families: all of it is there, and what it says adds up over a mix of requests."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.client import AsyncClient, GenerateOptions
from inflight.contract import DETOKENIZER, ENGINE, TOKENIZER
from inflight.errors import InflightError
from inflight.metrics import FAMILIES
from inflight.serve.server import free_ports
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_page, settled_page
from tests.triton.support.servers import Running

TOKENS = 12
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _samples(server: Running) -> Samples:
    """Return Inflight's and upstream's samples, by name and labels but for the version."""
    return _parse(read_page(server.metrics))


def _parse(page: str) -> Samples:
    # Without the comments: by their types the parser would add `_total` to the parts of histograms, which are counters.
    lines = "\n".join(line for line in page.splitlines() if not line.startswith("#"))
    return {
        (sample.name, frozenset(item for item in sample.labels.items() if item[0] != "version")): sample.value
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
        if sample.name.startswith(("inflight_", "nv_trt_llm_", "nv_llm_"))
    }


def _get(samples: Samples, name: str, stage: str = ENGINE, **labels: str) -> float:
    return samples[name, frozenset(({"model": stage} | labels).items())]


def _outcomes(samples: Samples) -> dict[tuple[str, str], int]:
    """Return the counts that are not 0, by stage and outcome."""
    found = [(dict(labels), value) for (name, labels), value in samples.items() if name == "inflight_requests_total"]
    return {(labels["model"], labels["outcome"]): int(value) for labels, value in found if value}


def _expected(engine: str) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Return the series that the table says, but for labels whose values are told at run time."""
    expected = set()
    for family in FAMILIES.values():
        values = [{}] if not family.labels else [{name: one} for name, all_ in family.labels.items() for one in all_]
        if engine == "trtllm" and family.name == "inflight_kv_cache_blocks":
            values.remove({"state": "cached"})
        names = [(family.name, {})]
        if family.kind == "histogram":
            names = [(f"{family.name}_{part}", {}) for part in ("sum", "count")]
            names += [(f"{family.name}_bucket", {"le": f"{one:g}"}) for one in (*family.buckets, float("inf"))]
            names[-1] = (names[-1][0], {"le": "+Inf"})
        for stage in family.stages:
            if family.exported_by(stage, engine):
                labels = [{"model": stage} | own for own in values]
                expected |= {(name, frozenset((one | bound).items())) for name, bound in names for one in labels}
    return expected


def test_metrics_have_the_types_of_the_table(server: Running) -> None:
    page = read_page(server.metrics)
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", page, re.MULTILINE))
    for family in FAMILIES.values():
        if any(family.exported_by(stage, server.engine) for stage in family.stages):
            parts = [f"{family.name}_{part}" for part in ("bucket", "sum", "count")]
            for name in parts if family.kind == "histogram" else [family.name]:
                assert types[name] == ("counter" if family.kind == "histogram" else family.kind)
                assert helps[name] == family.help


def test_metrics_page_has_the_table_and_nothing_else(server: Running) -> None:
    samples = _parse(server.first_page)
    free = {name for name, family in FAMILIES.items() if () in family.labels.values()}
    assert {key for key in samples if key[0] not in free} == _expected(server.engine)
    phases = {stage: set() for stage in (TOKENIZER, ENGINE, DETOKENIZER)}
    for (name, labels), value in samples.items():
        if name == "inflight_startup_seconds":
            phases[dict(labels)["model"]].add(dict(labels)["phase"])
            assert value > 0
    loading = {"load"} if server.engine == "trtllm" else {"weights", "kv_cache"}
    text = {"import", "tokenizer"}
    assert phases == {TOKENIZER: text, DETOKENIZER: text, ENGINE: text | loading | {"warm_up"}}
    [info] = [dict(labels) for name, labels in samples if name == "inflight_build_info"]
    assert (info["engine"], info["checkpoint"]) == (server.engine, "model")
    assert _get(samples, "nv_trt_llm_runtime_memory_metrics", memory_type="cpu") > 50 * 2**20
    began = psutil.Process(server.server.process.pid).create_time()
    for stage in phases:
        assert began - 1 < _get(samples, "inflight_start_time_seconds", stage) < time.time()


def test_heartbeat_time_of_every_stage_rises(server: Running) -> None:
    def beats() -> list[float]:
        samples = _samples(server)
        return [_get(samples, "inflight_heartbeat_time_seconds", stage) for stage in (TOKENIZER, ENGINE, DETOKENIZER)]

    before = beats()
    assert wait_until(lambda: all(new > old for new, old in zip(beats(), before, strict=True)), 30)


async def _ask(client: AsyncClient, kind: str, number: int) -> None:
    """Send one request that ends as its kind says."""
    options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True)
    try:
        if kind == "length":
            await client.generate(f"Request {number}", options)
        elif kind == "engine refuses":
            await client.generate(f"Request {number}", GenerateOptions(temperature=-1.0))
        elif kind == "tokenizer refuses":
            await client.generate("", options)
        else:
            stream = client.stream(f"Request {number}", GenerateOptions(max_tokens=1900, ignore_eos=True))
            async for _ in stream:
                await stream.cancel()
                break
    except InflightError:
        assert kind != "length"


async def _send(server: Running, kinds: list[str]) -> None:
    async with AsyncClient(server.grpc) as client:
        await asyncio.gather(*(_ask(client, kind, number) for number, kind in enumerate(kinds)))


def test_requests_total_counts_every_request_once_and_metrics_add_up(server: Running) -> None:
    before = _parse(settled_page(server.metrics))

    def added() -> Samples:
        return {key: value - before.get(key, 0.0) for key, value in _samples(server).items()}

    numbers = {"length": 13, "engine refuses": 7, "tokenizer refuses": 5, "cancelled": 6}
    kinds = [kind for kind, number in numbers.items() for _ in range(number)]
    random.Random(7).shuffle(kinds)
    asyncio.run(_send(server, kinds))
    assert wait_until(lambda: sum(_outcomes(added()).values()) == len(kinds), 30), _outcomes(added())
    samples = added()
    outcomes = _outcomes(samples)
    cancelled = outcomes.pop((ENGINE, "cancelled"), 0)  # the engine may have made all tokens before its client goes
    assert outcomes == {(ENGINE, "length"): 13 + 6 - cancelled, (ENGINE, "invalid"): 7, (TOKENIZER, "invalid"): 5}

    def get(name: str, **labels: str) -> float:
        return _get(samples, f"inflight_{name}", **labels)

    ended = 13 + 6
    for name in ("request_queue", "request_prefill", "request_decode", "time_to_first_token", "request_duration"):
        assert get(f"{name}_seconds_count") == get(f"{name}_seconds_bucket", le="+Inf") == ended, name
    generated = get("generated_tokens_total")
    assert generated >= 13 * TOKENS + 6
    assert get("inter_token_seconds_count") == generated - ended
    lengths = {"response_metric_type": "total_output_tokens"}
    assert _get(samples, "nv_llm_output_token_len_sum", **lengths) == generated
    assert _get(samples, "nv_llm_output_token_len_count", **lengths) == ended
    lengths = {"response_metric_type": "total_input_tokens"}
    assert _get(samples, "nv_llm_input_token_len_sum", **lengths) == get("prompt_tokens_total")
    first = get("time_to_first_token_seconds_sum")
    assert get("request_queue_seconds_sum") + get("request_prefill_seconds_sum") == pytest.approx(first)
    assert get("inter_token_seconds_sum") == pytest.approx(get("request_decode_seconds_sum"))
    assert get("request_duration_seconds_sum") >= first + get("request_decode_seconds_sum")
    for name in ("inflight_running_requests", "inflight_waiting_requests"):
        assert _get(_samples(server), name) == 0
    assert get("responses_total") >= ended
    assert 1 <= _get(samples, "inflight_tokenizer_seconds_count", TOKENIZER) <= len(kinds)

    def detokenized() -> float:
        return _get(added(), "inflight_detokenizer_seconds_count", DETOKENIZER)

    assert wait_until(lambda: detokenized() >= get("responses_total"), 30), "each stage shows its own in its own time"
    on_gpu = _get(_samples(server), "nv_trt_llm_runtime_memory_metrics", memory_type="gpu")
    assert on_gpu == (3 * 2**30 if server.engine == "trtllm" else 0)
    assert get("step_seconds_count") == get("steps_total") <= get("step_sequences_total")
    if server.engine == "pytorch":
        decoded = generated - ended  # a sequence's last token is never computed, and its first came of the prompt
        assert get("step_tokens_total", kind="decode") == decoded
        assert get("step_tokens_total", kind="prefill") == get("prompt_tokens_total") - get("cached_tokens_total")
        parts = sum(get("step_part_seconds_total", part=part) for part in ("schedule", "draft", "run", "finish"))
        assert parts == pytest.approx(get("step_seconds_sum"))


def test_histogram_buckets_rise_with_their_bounds(server: Running) -> None:
    samples = _samples(server)
    histograms: dict[tuple[str, frozenset[tuple[str, str]]], list[tuple[float, float]]] = {}
    for (name, labels), value in samples.items():
        bound = dict(labels).get("le")
        if bound is not None:
            histograms.setdefault((name, labels - {("le", bound)}), []).append((float(bound), value))
    assert len(histograms) >= 10
    for key, buckets in histograms.items():
        counts = [count for _, count in sorted(buckets)]
        assert counts == sorted(counts), key


@pytest.mark.proof
@pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed")
@pytest.mark.parametrize("engine", ["pytorch"], indirect=True, scope="session")  # each writes the same kinds
def test_prometheus_computes_quantiles_of_the_histograms(server: Running, tmp_path: Path) -> None:
    asyncio.run(_send(server, ["length"] * 3))
    target = server.metrics.removeprefix("http://").removesuffix("/metrics")
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: test, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL)
    try:
        quantile = "histogram_quantile(0.5, sum by (le) (inflight_time_to_first_token_seconds_bucket))"

        def median() -> float:
            try:
                answer = httpx.get(f"http://{address}/api/v1/query", params={"query": quantile}, timeout=60).json()
            except (httpx.HTTPError, ValueError):  # it starts: no connection, or no JSON yet
                return 0.0
            found = answer.get("data", {}).get("result", [])
            return float(found[0]["value"][1]) if found else 0.0

        assert wait_until(lambda: 0 < median() < 60, 30)
        kinds = httpx.get(f"http://{address}/api/v1/metadata", timeout=60).json()["data"]
        assert kinds["inflight_time_to_first_token_seconds_bucket"][0]["type"] == "counter"
    finally:
        process.terminate()
        process.wait(120)
