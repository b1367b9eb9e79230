"""The committed rules: equal to the generator, valid, tested alert by alert, and with a runbook each."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.errors import DeploymentError
from monitoring.generate.__main__ import main
from monitoring.generate.alerts import alerts
from monitoring.generate.health import STAGES
from monitoring.generate.objectives import TTFT, Objectives
from monitoring.generate.rule import Timescale
from monitoring.generate.rules import rule_files
from tests.monitoring.support.stack import SLOW_ENGINE
from tests.support.tables import each_row

ROOT = Path(__file__).parents[2]
MONITORING, RUNBOOKS = ROOT / "monitoring", ROOT / "docs/runbooks"
ALERTS = {one.name: one for group in alerts(Objectives(), Timescale()).values() for one in group}
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")


def _promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@each_row("name", ["recording.yml", "alerts.yml"])
def test_the_committed_rules_are_the_generators(name: str) -> None:
    assert (MONITORING / "rules" / name).read_text() == rule_files(Objectives(), Timescale())[name], "make dashboards"


@needs_promtool
def test_prometheus_accepts_its_configuration() -> None:
    _promtool("check", "config", "prometheus.yml")


@pytest.mark.proof
@needs_promtool
def test_each_scenario_fires_the_alerts_that_it_names_and_no_other_beside_a_healthy_server(tmp_path: Path) -> None:
    data = yaml.safe_load((MONITORING / "rules/tests/alerts.yml").read_text())
    data["rule_files"] = [str(MONITORING / "rules" / name) for name in ("recording.yml", "alerts.yml")]
    by_itself = [one for one in data["tests"] if one["name"] == "nothing is scraped at all"]
    scenarios = [one for one in data["tests"] if one not in by_itself]
    annotated = [one for one in scenarios if "alert_rule_test" in one]  # it looks at the alerts of all servers
    for scenario in annotated:
        scenario["input_series"] += _healthy(scenario["interval"])
    others = [one for one in scenarios if one not in annotated]
    together = [
        _together(interval, [one for one in others if one["interval"] == interval])
        for interval in sorted({one["interval"] for one in others})
    ]
    data["tests"] = [*by_itself, *annotated, *together]
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(data))
    _promtool("test", "rules", str(tmp_path / "alerts.yml"))


def _together(interval: str, scenarios: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one test of all these scenarios, each of a server of its own, beside one that does well all the time.

    promtool evaluates all rules for each minute of a test, which takes as long for one server as for many.
    """
    series, expected = _healthy(interval), []
    for scenario in scenarios:
        instance = f'instance="{scenario["name"]}"'
        for one in scenario["input_series"]:
            assert 'instance="a"' in one["series"]
            series.append(one | {"series": one["series"].replace('instance="a"', instance)})
        for case in scenario["promql_expr_test"]:
            assert "ALERTS{" in case["expr"]
            expected.append(case | {"expr": case["expr"].replace("ALERTS{", f"ALERTS{{{instance}, ")})
    healthy = 'ALERTS{alertstate="firing", instance="b"}'
    times = sorted({one["eval_time"] for one in expected})
    expected += [{"expr": healthy, "eval_time": time, "exp_samples": []} for time in times]
    return {"interval": interval, "input_series": series, "promql_expr_test": expected}


def _healthy(interval: str) -> list[dict[str, str]]:
    """Return the series of a second server, which does well all the time."""
    interval_s = {"1m": 60, "15s": 15}[interval]
    values: dict[str, str] = {
        'up{job="inflight"': "1",
        'up{job="inflight-ready"': "1",
        'up{job="inflight-gateway"': "1",
        'inflight_serve_part_up{part="gateway"': "1",
        "inflight_running_requests{": "4",
        "inflight_waiting_requests{": "2",
        "inflight_queue_limit{": "256",
        'inflight_kv_cache_blocks{state="used"': "20",
        'inflight_kv_cache_blocks{state="free"': "80",
        "inflight_kv_cache_reserved_blocks{": "10",
        'inflight_start_time_seconds{model="tensorrt_llm"': "1",
        "inflight_preemptions_total{": "0",
    }
    rising = {
        "inflight_prompt_tokens_total{": 100,
        "inflight_cached_tokens_total{": 90,
        "inflight_generated_tokens_total{": 400,
        'inflight_step_tokens_total{kind="decode"': 400,
        'inflight_requests_total{outcome="stop"': 40,
        'inflight_gateway_requests_total{status="200"': 40,
        'nv_inference_request_success{model="ensemble"': 40,
        "inflight_request_queue_seconds_count{": 40,
        "inflight_time_to_first_token_seconds_sum{": 4,
        "inflight_inter_token_seconds_sum{": 4,
        **{f'inflight_heartbeat_time_seconds{{model="{stage}"': interval_s for stage in STAGES},
    }
    for name, count in (("time_to_first_token", 40), ("inter_token", 400)):
        rising |= {f'inflight_{name}_seconds_bucket{{le="{le}"': count for le in ("0.05", "0.1", "0.5", "1", "+Inf")}
        rising[f"inflight_{name}_seconds_count{{"] = count
    values |= {series: f"0+{step}" for series, step in rising.items()}
    return [
        {"series": f'{series}{"" if series.endswith("{") else ","}instance="b"}}', "values": f"{value}x400"}
        for series, value in values.items()
    ]


def test_every_alert_is_seen_firing_and_quiet() -> None:
    firing, quiet = set(), set()
    for scenario in yaml.safe_load((MONITORING / "rules/tests/alerts.yml").read_text())["tests"]:
        for case in scenario["promql_expr_test"]:
            named = set(re.search(r'alertname=~"([^"]+)"', case["expr"])[1].split("|"))
            seen = {re.search(r'"(.+)"', sample["labels"])[1] for sample in case["exp_samples"]}
            assert seen <= named
            firing |= seen
            quiet |= named - seen
    assert firing == set(ALERTS)
    assert quiet == set(ALERTS)


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(ALERTS)


@each_row("name", ALERTS)
def test_a_runbook_says_what_it_means_what_to_look_at_and_what_to_do(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", text, re.M) == ["What it means", "What to look at", "What to do"]


def test_every_alert_says_what_is_wrong_where_and_how_bad() -> None:
    for group in yaml.safe_load((MONITORING / "rules/alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            notes = rule["annotations"]
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert "$labels.instance" in notes["summary"]
            assert notes["runbook_url"].endswith(f"/{rule['alert']}.md")


def test_the_page_names_the_alerts_with_their_severities_and_the_objectives() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(runbooks/(\w+)\.md\) \| (\w+) \|", page, re.M)
    assert rows == [(one.name, one.name, one.severity) for one in ALERTS.values()]
    for objective in (Objectives().ttft, Objectives().itl):
        assert f"| {objective.text.replace(f' of {objective.title}', '')} |" in page


def test_the_page_says_which_alerts_a_fault_has_proven() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    tested = "".join(
        (ROOT / f"tests/monitoring/test_{name}.py").read_text() for name in ("faults", "faults_of_load", "trends")
    )
    waited = set(re.findall(r'wait_firing\(\s*"(\w+)"', tested)) | set(SLOW_ENGINE)
    said = dict(re.findall(r"^\| \[(\w+)\]\(.* (fault|scenario) \|$", page, re.M))
    assert said == {name: "fault" if name in waited else "scenario" for name in ALERTS}
    assert f"{len(waited)} of {len(ALERTS)} by faults" in page


@each_row(("seconds", "factor", "text"), [(300, 1, "5m"), (5400, 1, "1h30m"), (300, 15, "20s"), (60, 16, "3s750ms")])
def test_timescale_span_is_a_duration_of_promql(seconds: float, factor: float, text: str) -> None:
    assert Timescale(factor).span(seconds) == text


def test_timescale_shortens_every_window_and_nothing_else() -> None:
    committed, scaled = (rule_files(Objectives(), Timescale(factor)) for factor in (1, 15))
    assert "[20s]" in scaled["recording.yml"]
    assert "offset 4m" in scaled["alerts.yml"]
    assert "[4h48m]" in scaled["recording.yml"]
    assert not re.search(r"\[5m\]|\[1h\]|offset 1h|for: 10m", "".join(scaled.values()))
    names = [re.findall(r"(?:alert|record): (\S+)", "".join(files.values())) for files in (committed, scaled)]
    assert names[0] == names[1]


@each_row(
    ("change", "said"),
    [
        ({"threshold_s": 0.9}, "0.9 s is no bucket of inflight_time_to_first_token_seconds: 0.001, .*did you mean 1?"),
        ({"target": 1.0}, "between 0 and 1"),
    ],
)
def test_an_objective_that_cannot_be_counted_is_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(DeploymentError, match=said):
        replace(TTFT, **change)


@each_row("factor", [0.5, 0, -1, float("nan")])
def test_timescale_that_lengthens_is_refused(factor: float) -> None:
    with pytest.raises(DeploymentError, match="must be 1"):
        Timescale(factor)


def test_objectives_reach_the_rules() -> None:
    objectives = Objectives(replace(TTFT, threshold_s=2.5, target=0.95))
    files = rule_files(objectives, Timescale())
    assert "14.4 * 0.05" in files["alerts.yml"]
    assert "p95_5m > 2.5" in files["alerts.yml"]
    assert 'inflight_time_to_first_token_seconds_bucket{le="2.5"}' in files["recording.yml"]


def test_runbooks_may_lie_elsewhere(tmp_path: Path) -> None:
    main("https://wiki.example/runbooks/", tmp_path)
    rules = (tmp_path / "rules/alerts.yml").read_text()
    assert "runbook_url: https://wiki.example/runbooks/InflightItlHigh.md" in rules
    dashboard = (tmp_path / "dashboards/inflight-overview.json").read_text()
    assert '"url": "https://wiki.example/runbooks/InflightItlHigh.md"' in dashboard
    assert "/public/" not in dashboard


@pytest.mark.proof
@pytest.mark.skipif(not shutil.which("docker-compose"), reason="docker-compose is not installed")
@each_row("profile", ["cpu", "gpu", "replicas"])
def test_compose_accepts_the_monitors_beside_a_server(profile: str) -> None:
    command = ["docker-compose", "--profile", profile, "--profile", "monitoring", "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_monitors_of_compose_are_pinned_bound_and_cannot_write_their_configuration() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = {name: one for name, one in composed["services"].items() if one["profiles"] == ["monitoring"]}
    assert set(services) == {"prometheus", "grafana", "jaeger"}
    for service in services.values():
        assert re.search(r":v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}$", service["image"])
        assert all(port.startswith("${BIND:-127.0.0.1}:") for port in service["ports"])
        for volume in service.get("volumes", []):
            defaults = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume)  # of variables
            source, *_, mode = defaults.split(":")
            assert source in composed["volumes"] or (mode == "ro" and (ROOT / source).exists())


def test_prometheus_of_compose_finds_the_server_by_its_alias() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    (target,) = yaml.safe_load((MONITORING / "targets.compose.yml").read_text())
    for profile in ("cpu", "gpu"):
        (alias,) = composed["services"][profile]["networks"]["default"]["aliases"]
        labels = {"__ready_address": f"{alias}:8000", "__gateway_address": f"{alias}:8080"}
        assert target == {"targets": [f"{alias}:8002"], "labels": labels}


def test_prometheus_of_compose_finds_each_replica_by_its_name() -> None:
    replicas = [
        name for name in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"] if "replica-" in name
    ]
    assert yaml.safe_load((MONITORING / "targets.replicas.yml").read_text()) == [
        {
            "targets": [f"{name}:8002"],
            "labels": {"__ready_address": f"{name}:8000", "__gateway_address": f"{name}:8080"},
        }
        for name in replicas
    ]


def test_one_page_of_all_parts_is_taken_by_two_jobs_without_a_family_twice() -> None:
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    rules = {job["job_name"]: job.get("metric_relabel_configs") for job in jobs}
    gateway = {"source_labels": ["__name__"], "regex": "inflight_gateway_.+"}
    assert rules["inflight"] == [{**gateway, "action": "drop"}]
    assert rules["inflight-gateway"] == [{**gateway, "action": "keep"}]
