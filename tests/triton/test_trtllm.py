"""What only the engine ``trtllm`` does, through a real server: guides, adapters, faults at the start, the watchdog."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inflight import errors
from inflight.client import Client, GenerateOptions
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.errors import DeploymentError
from inflight.serve.command import override_server
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import load_deployment
from inflight.text.tokenizer import Tokenizer
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_metric
from tests.triton.support.servers import Running, on_engine, run
from tests.trtllm.support.driving import ask, deployment
from tests.trtllm.support.driving import run as generate
from tests.trtllm.support.fake_package import InstallationWithFake

pytestmark = pytest.mark.proof

QUESTION = "What is a paged KV cache?"


@pytest.fixture(scope="module")
def guided_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("guided")
    (directory / "adapter").mkdir()
    config = {"r": 8, "target_modules": ["q_proj"], "fake_bias": {"42": 1000.0}}
    (directory / "adapter/adapter_config.json").write_text(json.dumps(config))
    settings = {"guided_decoding": "xgrammar", "lora": {"answer": "adapter"}, "sampler": "torch"}
    yield from run(on_engine("trtllm", directory, tensorrt_llm=settings))


def test_trtllm_text_is_the_portable_engines(guided_server: Running) -> None:
    given = deployment()
    tokenizer = Tokenizer.from_checkpoint(given.model)
    portable = Engine.load(EngineConfig.of(given), tokenizer)
    questions = [QUESTION, "What is TTFT?", "What is FP8?", "Name three uses of a prefix cache.", "Hi"]
    prompts = tokenizer.encode_batch(questions, add_special_tokens=True)
    requests = [ask(prompt, max_tokens=40, end_ids=tokenizer.config.end_ids) for prompt in prompts]
    expected = [tokenizer.decode(output.tokens) for output in generate(portable, *requests)]
    with Client(guided_server.grpc) as client:
        assert [client.generate(text, GenerateOptions(max_tokens=40)).text for text in questions] == expected


def test_trtllm_guided_decoding_and_lora(guided_server: Running) -> None:
    guide = GenerateOptions(guided_decoding_guide_type="ebnf_grammar", guided_decoding_guide='root ::= "yes, it is"')
    with Client(guided_server.grpc) as client:
        assert client.generate(QUESTION, guide).text.strip() == "yes, it is"
        plain = client.generate(QUESTION, GenerateOptions(max_tokens=4)).text
        assert client.generate(QUESTION, GenerateOptions(max_tokens=4, lora_name="answer")).text != plain
        with pytest.raises(errors.InvalidRequest, match="this deployment has: answer"):
            client.generate(QUESTION, GenerateOptions(lora_name="other"))


def test_trtllm_refuses_what_its_sampler_would_ignore(guided_server: Running) -> None:
    with Client(guided_server.grpc) as client:
        with pytest.raises(errors.UnsupportedFeature, match=r"repetition_penalty .* `tensorrt_llm.sampler: trtllm`"):
            client.generate(QUESTION, GenerateOptions(repetition_penalty=1.2))
        tops = client.generate(QUESTION, GenerateOptions(max_tokens=3, num_top_log_probs=2))
        assert [len(row) for row in tops.top_log_probs] == [2, 2, 2]


def test_trtllm_start_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faults.json").write_text('{"version": "1.1.0"}')
    monkeypatch.setenv("FAKE_TENSORRT_LLM", str(tmp_path / "faults.json"))
    with pytest.raises(DeploymentError, match=r"TensorRT-LLM 1.1.0 is installed, 1.2.x is served") as said:
        next(run(on_engine("trtllm", tmp_path)))
    assert "model.py" not in str(said.value), "a traceback is for the log"


def test_trtllm_start_beyond_start_timeout_s_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faults.json").write_text('{"start_s": 60}')
    monkeypatch.setenv("FAKE_TENSORRT_LLM", str(tmp_path / "faults.json"))
    http, grpc, metrics = free_ports(3)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    given = load_deployment(on_engine("trtllm", tmp_path, server={"start_timeout_s": 4}))
    server = TritonServer(tmp_path, override_server(given, ports), InstallationWithFake.find())
    try:
        server.start()
        with pytest.raises(DeploymentError, match=r"not ready within 4 s \(server.start_timeout_s\)"):
            server.wait_ready()
    finally:
        server.stop(at_once=True)


def test_trtllm_late_refusal_is_an_invalid_request(guided_server: Running) -> None:
    guide = GenerateOptions(guided_decoding_guide_type="regex", guided_decoding_guide="(")
    with Client(guided_server.grpc) as client, pytest.raises(errors.InvalidRequest, match="TensorRT-LLM refuses the"):
        client.generate(QUESTION, guide)


def test_trtllm_watchdog_fails_requests_and_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text("{}")
    monkeypatch.setenv("FAKE_TENSORRT_LLM", str(faults))
    # Triton keeps what failed, and waits for it until its exit timeout.
    serving = run(on_engine("trtllm", tmp_path, tensorrt_llm={"watchdog_s": 5}), exit_timeout_s=3)
    server = next(serving)
    assert httpx.get(f"{server.http}/v2/health/ready", timeout=60).status_code == 200
    faults.write_text('{"stall_after": 3}')
    ends: list[str] = []

    def ask_and_fail() -> None:
        with Client(server.grpc) as client, pytest.raises(errors.EngineFailure, match="no progress for 5 s"):
            list(client.stream(QUESTION, GenerateOptions(max_tokens=50)))
        ends.append(server.log)

    threads = [threading.Thread(target=ask_and_fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 4, "each request ends with the error"
    with pytest.raises(httpx.TransportError):
        wait_until(lambda: httpx.get(f"{server.http}/v2/health/ready", timeout=60).status_code != 200)
    server.server.process.wait(30)
    assert "no progress for 5 s" in server.log
    serving.close()


def test_trtllm_shutdown_is_clean(tmp_path: Path) -> None:
    serving = run(on_engine("trtllm", tmp_path), exit_timeout_s=30)
    server = next(serving)
    with Client(server.grpc) as client:
        client.generate(QUESTION, GenerateOptions(max_tokens=4))
    assert wait_until(lambda: read_metric(server.metrics, "inflight_requests_total", outcome="length") == 1)
    server.server.process.send_signal(signal.SIGTERM)
    server.server.process.wait(30)  # not until its exit timeout is over
    assert "Traceback" not in server.log
    serving.close()


def test_trtllm_without_settings_refuses_guides_and_lora(server: Running) -> None:
    guide, adapter = GenerateOptions(guided_decoding_guide_type="json"), GenerateOptions(lora_name="answer")
    refusal, text = errors.UnsupportedFeature, "lora_name is not supported by this engine"
    if server.engine == "trtllm":
        refusal, text = errors.InvalidRequest, "lora_name is 'answer'; this deployment has: none"
    with Client(server.grpc) as client:
        if server.engine != "pytorch":  # which serves guides
            with pytest.raises(errors.UnsupportedFeature, match="guided_decoding_guide_type is not supported by this"):
                client.generate(QUESTION, guide)
        with pytest.raises(refusal, match=text):
            client.generate(QUESTION, adapter)
