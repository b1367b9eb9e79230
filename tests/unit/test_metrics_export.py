"""The exporter against Triton's metric API in miniature: which calls it makes, and that it makes no others."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from inflight.contract import DETOKENIZER, ENGINE, TOKENIZER
from inflight.engine.request import RequestMetrics
from inflight.engine.stats import EngineState, EngineStats, StepCounts
from inflight.errors import QueueFull
from inflight.metrics import FAMILIES, SECONDS
from inflight.settings.deployment import resolve
from inflight.settings.observability import METRICS_VARIABLE
from tests.support.waiting import wait_until

OWN = "inflight_metrics_export_cpu_seconds_total", "inflight_metrics_export_calls_total"
DEMO = Path(__file__).parents[2] / "deployments/demo"
Labels = frozenset[tuple[str, str]]


class FakeApi(ModuleType):
    """``triton_python_backend_utils`` as far as metrics go; a call that a kind has not is an error."""

    def __init__(self) -> None:
        super().__init__("triton_python_backend_utils")
        self.values: dict[tuple[str, Labels], float] = {}
        self.calls: Counter[str] = Counter()
        api = self

        class Metric:
            def __init__(self, name: str, kind: str, labels: dict[str, str]) -> None:
                self._key, self._kind = (name, frozenset(labels.items())), kind
                assert self._key not in api.values, "made twice"
                api.values[self._key] = 0.0

            def increment(self, value: float) -> None:
                assert value > 0 or (value < 0 and self._kind == "gauge")
                api.values[self._key] += value
                api.calls[self._key[0]] += 1

        class MetricFamily:
            COUNTER, GAUGE = "counter", "gauge"

            def __init__(self, name: str, description: str, kind: str) -> None:
                assert description
                self._name, self._kind = name, kind

            def Metric(self, labels: dict[str, str]) -> Metric:
                return Metric(self._name, self._kind, labels)

        self.MetricFamily = MetricFamily

    def value(self, name: str, **labels: str) -> float:
        """Return a series' value."""
        return self.values[name, frozenset((labels | {"version": "1"}).items())]


@pytest.fixture
def api(triton_api: Callable[[ModuleType], None]) -> FakeApi:
    fake = FakeApi()
    triton_api(fake)
    return fake


def _stage(model: str, **observability: object) -> Any:
    from inflight.triton.metrics import StageMetrics

    deployment = resolve({"model": str(DEMO / "model"), "observability": observability}, DEMO, "test")
    return StageMetrics(deployment, {"model_name": model, "model_version": "1"})


@pytest.mark.parametrize("settings", [{"metrics": False}, {}], ids=["deployment", "environment"])
def test_off_makes_no_family(api: FakeApi, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]) -> None:
    if not settings:
        monkeypatch.setenv(METRICS_VARIABLE, "off")
    stage = _stage(TOKENIZER, **settings)
    stage.start()
    stage.count_refusal(QueueFull("full"))
    stage.close()
    assert not api.values


def test_every_family_of_a_kind_of_engine_can_be_filled(api: FakeApi) -> None:
    from inflight.triton.metrics import Exporter

    owners = _owners(EngineStats(), _stage(ENGINE))
    for engine in ("pytorch", "replay", "trtllm"):
        api.values.clear()
        Exporter(ENGINE, "1", engine, owners)._round()
        made = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name, _ in api.values}
        wanted = {family.name for family in FAMILIES.values() if ENGINE in family.stages and engine in family.engines}
        assert made == wanted


def test_gauges_are_moved_to_the_last_bit(api: FakeApi) -> None:
    from inflight.triton.metrics import _Series

    family = api.MetricFamily("inflight_waiting_requests", "what waits", "gauge")
    gauge = _Series(family, {"version": "1"}, falls=True)
    for value in (1.7e9 + 0.3, 0.1, 1, 0.37, 2 / 3, 5e-324, 1e300, 1e-20, 0, -0.1, 0):
        gauge.show(value)
        assert api.value("inflight_waiting_requests") == value
        assert gauge.show(value) == 0


@pytest.mark.parametrize("stage", [TOKENIZER, ENGINE, DETOKENIZER])
def test_every_source_of_the_table_is_an_attribute_of_its_owner(api: FakeApi, stage: str) -> None:
    from inflight.triton.metrics import Exporter
    from inflight.triton.streams import ResponseStreams

    owners = _owners(EngineStats(), _stage(stage))
    owners["streams"] = ResponseStreams(owners["stage"], decoupled=True)
    owners["exporter"] = Exporter(stage, "1", "pytorch", owners)
    sources = [family.source for family in FAMILIES.values() if stage in family.stages]
    missing = [source for source in sources if not hasattr(owners[source.split(".")[0]], source.split(".")[1])]
    assert sources
    assert not missing


def test_only_what_has_changed_is_sent(api: FakeApi) -> None:
    from inflight.triton.metrics import Exporter

    stats = EngineStats()
    exporter = Exporter(ENGINE, "1", "pytorch", _owners(stats))
    exporter._round()
    exporter._round()
    api.calls.clear()
    exporter._round()
    assert set(api.calls) <= {"nv_trt_llm_general_metrics", "nv_trt_llm_runtime_memory_metrics", *OWN}
    stats.count_scheduled(RequestMetrics(arrival_ns=10**9, first_scheduled_ns=10**9 + 3_000_000, prompt_tokens=7))
    stats.steps += 1
    for _ in range(2):  # the first sees that something is counted, the second that nothing is any more
        exporter._round()
    assert api.calls["inflight_prompt_tokens_total"] == 1
    assert api.value("inflight_prompt_tokens_total", model=ENGINE) == 7
    # Of the bounds 0.001, 0.0025 and 0.005, 3 ms is within the last.
    buckets = {
        le: api.value("inflight_request_queue_seconds_bucket", model=ENGINE, le=le) for le in ("0.0025", "0.005")
    }
    assert buckets == {"0.0025": 0, "0.005": 1}
    assert api.value("inflight_request_queue_seconds_bucket", model=ENGINE, le="+Inf") == 1
    assert api.value("inflight_request_queue_seconds_sum", model=ENGINE) == pytest.approx(0.003)
    assert api.calls["inflight_request_queue_seconds_bucket"] == len(SECONDS) + 1 - 2


def test_it_counts_its_own_calls_and_time(api: FakeApi) -> None:
    from inflight.triton.metrics import Exporter

    stats = EngineStats()
    exporter = Exporter(ENGINE, "1", "pytorch", _owners(stats))
    for _ in range(2):
        stats.count_step(StepCounts(3, 3, 0, 5), 0.002)
        exporter._round()
        made = api.calls.total()
        exporter._round()  # shows what the round before it has made
        assert api.value(OWN[1], model=ENGINE) == made
    assert 0 < api.value(OWN[0], model=ENGINE) <= exporter.metrics_export_cpu <= time.thread_time()


def test_while_it_works_what_it_does_at_the_moment_goes_first(api: FakeApi) -> None:
    from inflight.triton.metrics import LIVE, Exporter

    assert all(FAMILIES[name].kind == "gauge" for name in LIVE)

    now = EngineState()
    stats = EngineStats(lambda: now)
    exporter = Exporter(ENGINE, "1", "pytorch", _owners(stats))
    exporter._round()
    now = EngineState(active=5, waiting=5)
    stats.steps, stats.generated_tokens = 1, 3
    exporter._round()
    assert api.value("nv_trt_llm_request_metrics", model=ENGINE, request_type="waiting") == 5
    assert api.value("inflight_waiting_requests", model=ENGINE) == 5
    assert api.value("inflight_generated_tokens_total", model=ENGINE) == 0
    exporter._round()
    assert api.value("inflight_generated_tokens_total", model=ENGINE) == 3


def test_an_idle_engine_is_shown_with_all_that_it_has_counted(api: FakeApi) -> None:
    from inflight.triton.metrics import Exporter

    def active() -> float:
        return api.value("nv_trt_llm_request_metrics", model=ENGINE, request_type="active")

    now = EngineState(active=1)
    stats = EngineStats(lambda: now)
    exporter = Exporter(ENGINE, "1", "pytorch", _owners(stats))
    exporter._round()
    now, stats.steps, stats.generated_tokens = EngineState(), 1, 3
    exporter._round()
    assert (active(), api.value("inflight_generated_tokens_total", model=ENGINE)) == (1, 0)
    exporter._round()
    assert (active(), api.value("inflight_generated_tokens_total", model=ENGINE)) == (0, 3)


def test_an_engine_that_becomes_idle_during_a_round_is_shown_by_the_next(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inflight.triton.metrics import Exporter

    now = EngineState(active=1)
    stats = EngineStats(lambda: now)
    exporter = Exporter(ENGINE, "1", "pytorch", _owners(stats))
    exporter._round()
    names_to_show = exporter._names_to_show

    def then_the_request_ends() -> Sequence[str]:
        nonlocal now
        names = names_to_show()
        now, stats.generated_tokens = EngineState(), 3
        return names

    stats.steps = 1
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(exporter, "_names_to_show", then_the_request_ends)
        exporter._round()
    seen = []
    for _ in range(3):
        active = api.value("nv_trt_llm_request_metrics", model=ENGINE, request_type="active")
        seen.append((active, api.value("inflight_generated_tokens_total", model=ENGINE)))
        exporter._round()
    assert seen[0] == (1, 0)
    assert seen[-1] == (0, 3)
    assert (0, 0) not in seen, "who sees an idle engine sees all that it has counted"


def test_whatever_a_step_counts_is_shown_when_it_rests(api: FakeApi) -> None:
    """Each kind of pulse: an outcome, a step, a response."""
    from inflight.triton.metrics import PULSE, Exporter

    assert all(name in FAMILIES for name in PULSE)
    stats, stage = EngineStats(), _stage(ENGINE)
    owners = _owners(stats, stage)
    exporter = Exporter(ENGINE, "1", "pytorch", owners)
    pulses = (
        lambda: setattr(owners["streams"], "responses", 1),
        lambda: stats.count_step(StepCounts(1, 1, 0, 1), 0.001),
        lambda: stage.count_refusal(QueueFull("full")),
    )
    for count, pulse in enumerate(pulses, 1):
        for _ in range(3):
            exporter._round()
        stats.generated_tokens += 1
        pulse()
        for _ in range(2):
            exporter._round()
        assert api.value("inflight_generated_tokens_total", model=ENGINE) == count


def test_a_fault_in_one_round_does_not_end_the_thread(api: FakeApi, caplog: pytest.LogCaptureFixture) -> None:
    from inflight.triton.metrics import Exporter

    stats, stage = EngineStats(), _Stage()
    exporter = Exporter(ENGINE, "1", "pytorch", _owners(stats, stage))
    exporter.start()
    outcomes, stage.requests = stage.requests, None  # type: ignore[assignment]
    assert wait_until(lambda: "the metrics could not be exported" in caplog.text)
    stats.generated_tokens, stage.requests = 9, outcomes
    assert wait_until(lambda: api.value("inflight_generated_tokens_total", model=ENGINE) == 9)
    exporter.close()


def test_the_state_is_asked_for_when_it_is_read() -> None:
    now = EngineState(active=48, waiting=48)
    stats = EngineStats(lambda: now)
    assert (stats.running_requests, stats.state().active, stats.waiting_requests) == (0, 48, 48)
    now = EngineState(active=48, running=32, waiting=16, step=StepCounts(32, 2, 30, 64), kv_blocks_max=9)
    assert (stats.running_requests, stats.state().active, stats.waiting_requests) == (32, 48, 16)
    assert stats.request_metrics == {"active": 48, "max": 0, "scheduled": 32, "context": 2, "waiting": 16}
    assert stats.inflight_batcher_metrics["generation_requests"] == 30
    assert stats.kv_cache_blocks == {"used": 0, "free": 9, "cached": 0}


def test_outcomes_are_read_before_what_else_is_counted_of_a_request(api: FakeApi) -> None:
    from inflight.triton.metrics import Exporter

    stats = EngineStats()

    class Ending(_Stage):
        @property
        def requests(self) -> dict[str, int]:  # type: ignore[override]
            stats.generated_tokens += 1  # a request ends while the figures are read
            return {"length": stats.generated_tokens - 1}

    values = Exporter(ENGINE, "1", "pytorch", _owners(stats, Ending()))._read(
        ["inflight_generated_tokens_total", "inflight_requests_total"]
    )
    assert values["inflight_requests_total"]["length"] < values["inflight_generated_tokens_total"]


def test_a_refusal_counts_the_sequences_of_its_request(api: FakeApi) -> None:
    stage = _stage(ENGINE)
    stage.count_refusal(QueueFull("full"), 3)
    stage.count_refusal(QueueFull("full"))
    assert stage.requests["queue_full"] == 4


def test_what_the_detokenizer_fails_is_counted(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _backend(DETOKENIZER)
    model, failed = module.TritonPythonModel(), []
    model._metrics = _stage(DETOKENIZER)
    request = SimpleNamespace(inputs=list, request_id=lambda: "mine", is_cancelled=lambda: False)
    model._answer(request, SimpleNamespace(fail=failed.append))  # without a postprocessor it cannot be answered
    assert len(failed) == 1
    monkeypatch.setattr(module.adapter, "error_response", lambda error, request_id: failed.append(error))
    model._answer_once(request)
    assert len(failed) == model._metrics.requests["internal"] == 2
    model._metrics.start()
    assert api.value("inflight_requests_total", model=DETOKENIZER, outcome="internal") == 2
    model._metrics.close()


def test_a_long_request_whose_answer_cannot_be_sent_ends_with_the_error(api: FakeApi) -> None:
    """Shared memory may be used up; in a thread of the stage's own nobody else would tell the client."""
    model, failed = _backend(TOKENIZER).TritonPythonModel(), []
    model._preprocess = lambda raw: {}

    def send(arrays: object, final: bool) -> None:
        raise error

    error = MemoryError("no shared memory is left")
    model._answer_long(None, SimpleNamespace(send=send, fail=failed.append))
    assert failed == [error]


def _backend(stage: str) -> Any:
    path = DEMO.parents[1] / f"backends/{stage}/model.py"
    spec = importlib.util.spec_from_file_location(f"{stage}_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _owners(stats: EngineStats, stage: object = None) -> dict[str, Any]:
    return {"engine": stats, "stage": stage or _Stage(), "streams": SimpleNamespace(responses=0)}


class _Stage:
    requests, queue_limit, startup = {"length": 0}, 8, {"import": 1.0}
    start_time, heartbeat_time, build_info = 1.0, 1.0, {("0", "pytorch", "model"): 1}
