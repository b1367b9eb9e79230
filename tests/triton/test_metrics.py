"""The engine stage's metrics on Triton's endpoint: upstream's names and labels, and figures that are true."""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest

from inflight.client import Client, GenerateOptions
from inflight.errors import InvalidRequest
from tests.triton.conftest import Running, on_engine, run
from tests.triton.metrics_page import read_metric, wait_until

UPSTREAM = {
    "nv_trt_llm_request_metrics": ("request_type", "active max scheduled context waiting"),
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", "max free used tokens_per reused fraction"),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        "total_context_tokens generation_requests micro_batch_id paused_requests",
    ),
    "nv_trt_llm_general_metrics": ("general_type", "timestamp iteration_counter"),
}


@pytest.fixture(scope="module")
def fresh_server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from run(on_engine(engine, tmp_path_factory.mktemp(engine)))


def _page(server: Running) -> str:
    with urllib.request.urlopen(server.metrics, timeout=10) as response:
        return str(response.read().decode())


def test_upstreams_families_exist_before_any_request(fresh_server: Running) -> None:
    page = _page(fresh_server)
    for family, (label, values) in UPSTREAM.items():
        found = re.findall(rf'^{family}\{{.*{label}="(\w+)".*\}}', page, re.MULTILINE)
        assert sorted(found) == sorted(values.split()), family
        assert f"# TYPE {family} gauge" in page
    for name in ("nv_llm_input_token_len", "nv_llm_output_token_len"):
        bounds = re.findall(rf'^{name}_bucket.*le="(.*?)"', page, re.MULTILINE)
        assert sorted(bounds, key=float) == ["10", "50", "100", "500", "1000", "+Inf"]


def test_figures_are_true(fresh_server: Running) -> None:
    options = GenerateOptions(max_tokens=20, ignore_eos=True, return_num_input_tokens=True)
    prompt = "What is a paged KV cache, and which blocks does it share between requests with equal beginnings?"
    with Client(fresh_server.grpc) as client:
        prompt_tokens = sum(client.generate(prompt, options).usage.input_tokens or 0 for _ in range(3))
        with pytest.raises(InvalidRequest):
            client.generate("x", GenerateOptions(temperature=-1.0))
    metrics = fresh_server.metrics
    assert wait_until(lambda: read_metric(metrics, "inflight_requests_total", outcome="length") == 3, 2)
    assert read_metric(metrics, "inflight_requests_total", outcome="invalid", model="tensorrt_llm") == 1
    assert read_metric(metrics, "inflight_generated_tokens_total") == 60
    assert read_metric(metrics, "inflight_prompt_tokens_total") == prompt_tokens
    cached = read_metric(metrics, "inflight_cached_tokens_total")
    assert 0 < cached <= prompt_tokens * 2 / 3, "the second and third prompt are mostly cached"
    assert read_metric(metrics, "inflight_time_to_first_token_seconds_count") == 3
    assert read_metric(metrics, "inflight_inter_token_seconds_count") == 3 * 19
    assert read_metric(metrics, "nv_llm_output_token_len_bucket", le="50") == 3
    blocks = {
        state: read_metric(metrics, "inflight_kv_cache_blocks", state=state) for state in ("used", "cached", "free")
    }
    assert blocks["used"] == 0
    # TensorRT-LLM counts cached blocks among the free ones, and not apart.
    assert (blocks["cached"] > 0) == (fresh_server.engine == "pytorch")
    total = read_metric(metrics, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max")
    assert sum(blocks.values()) == total
    # Upstream's "free" is what can be had: cached blocks without an owner included.
    assert read_metric(metrics, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="free") == total


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_accepts_the_page(fresh_server: Running) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=_page(fresh_server), capture_output=True, text=True)
    remarks = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("inflight_")]
    # Histograms are exported as the counters that they consist of: docs/decisions/0007.
    ours = [line for line in remarks if not re.match(r"inflight_\w+_seconds_(bucket|sum|count) ", line)]
    assert done.returncode in (0, 3), done.stderr  # 3: style remarks, of which Triton's own families earn some
    assert not ours, ours
