"""The engine stage's metrics on Triton's endpoint: upstream's names and labels, and figures that are true."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from inflight.client import Client, GenerateOptions
from inflight.errors import InflightError, InvalidRequest
from monitoring.generate.promql import FAILURES_COUNTED
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_metric, read_page, settled_page, value_in
from tests.triton.support.servers import Running

UPSTREAM = {
    "nv_trt_llm_request_metrics": ("request_type", "active max scheduled context waiting"),
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", "max free used tokens_per reused fraction"),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        "total_context_tokens generation_requests micro_batch_id paused_requests",
    ),
    "nv_trt_llm_general_metrics": ("general_type", "timestamp iteration_counter"),
}


def test_upstream_metric_families_exist_before_any_request(server: Running) -> None:
    page = server.first_page
    for family, (label, values) in UPSTREAM.items():
        found = re.findall(rf'^{family}\{{.*{label}="(\w+)".*\}}', page, re.MULTILINE)
        assert sorted(found) == sorted(values.split()), family
        assert f"# TYPE {family} gauge" in page
    for name in ("nv_llm_input_token_len", "nv_llm_output_token_len"):
        bounds = re.findall(rf'^{name}_bucket.*le="(.*?)"', page, re.MULTILINE)
        assert sorted(bounds, key=float) == ["10", "50", "100", "500", "1000", "+Inf"]


def test_triton_counts_a_failure_in_the_ensemble_as_often_as_the_alerts_take_it_to(server: Running) -> None:
    def failures() -> float:
        return read_metric(server.metrics, "nv_inference_request_failure", model="ensemble", reason="OTHER")

    with Client(server.grpc) as client:
        settled_page(server.metrics)
        before = failures()
        for options in (
            GenerateOptions(max_tokens=0),
            GenerateOptions(temperature=-1.0),
            GenerateOptions(top_p=5.0),
        ):
            with pytest.raises(InflightError):
                client.generate("x", options)
    assert wait_until(lambda: failures() - before == 3 * FAILURES_COUNTED, 30)


def test_metrics_after_three_requests_are_true(server: Running) -> None:
    metrics = server.metrics
    before = settled_page(metrics)

    def added(name: str, **labels: str) -> float:
        return read_metric(metrics, name, **labels) - value_in(before, name, **labels)

    options = GenerateOptions(max_tokens=20, ignore_eos=True, return_num_input_tokens=True)
    prompt = "True figures: what is a paged KV cache, and which blocks do requests with equal beginnings share?"
    with Client(server.grpc) as client:
        prompt_tokens = sum(client.generate(prompt, options).usage.input_tokens or 0 for _ in range(3))
        with pytest.raises(InvalidRequest):
            client.generate("x", GenerateOptions(temperature=-1.0))
    # The last response leaves before the engine's thread has counted its request.
    assert wait_until(lambda: added("inflight_requests_total", outcome="length") == 3, 30)
    assert wait_until(lambda: added("inflight_requests_total", outcome="invalid", model="tensorrt_llm") == 1, 30)
    settled_page(metrics)
    assert added("inflight_generated_tokens_total") == 60
    assert added("inflight_prompt_tokens_total") == prompt_tokens
    cached = added("inflight_cached_tokens_total")
    assert 0 < cached <= prompt_tokens * 2 / 3, "the second and third prompt are mostly cached"
    assert added("inflight_time_to_first_token_seconds_count") == 3
    assert added("inflight_inter_token_seconds_count") == 3 * 19
    assert added("nv_llm_output_token_len_bucket", le="50") == 3
    blocks = {
        state: read_metric(metrics, "inflight_kv_cache_blocks", state=state) for state in ("used", "cached", "free")
    }
    assert blocks["used"] == 0
    # TensorRT-LLM counts cached blocks among the free ones, and not apart.
    assert (blocks["cached"] > 0) == (server.engine == "pytorch")
    total = read_metric(metrics, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max")
    assert sum(blocks.values()) == total
    # Upstream's "free" is what can be had: cached blocks without an owner included.
    assert read_metric(metrics, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="free") == total


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_accepts_the_metrics_page(server: Running) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=read_page(server.metrics), capture_output=True, text=True
    )
    remarks = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("inflight_")]
    # Histograms are exported as the counters that they consist of: docs/decisions/0007.
    ours = [line for line in remarks if not re.match(r"inflight_\w+_seconds_(bucket|sum|count) ", line)]
    assert done.returncode in (0, 3), done.stderr  # 3: style remarks, of which Triton's own families earn some
    assert not ours, ours
