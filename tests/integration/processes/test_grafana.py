"""`shmserve grafana`: every query of dashboard and alerts, with a real Prometheus."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rigs import watched
from tests.support.servers import Server, Start, hold_ports, port_of, run_command
from tests.support.waiting import until

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool here")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="there is no Prometheus here")
FLAGS = ("--exit-on-error=false", "--strict-readiness=false", "--cache-config=local,size=1048576")


def dashboard() -> dict[str, Any]:
    completed = run_command("grafana")
    assert (completed.returncode, completed.stderr) == (0, "")
    return dict(json.loads(completed.stdout))


def alerts() -> list[dict[str, Any]]:
    completed = run_command("grafana", "--alerts")
    assert (completed.returncode, completed.stderr) == (0, "")
    (group,) = yaml.safe_load(completed.stdout)["groups"]
    return list(group["rules"])


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    watched.add_models(models, generative=True)
    return start(models, *FLAGS)


SERVER_LABELS = 'instance="one",job="shmserve"'
MODEL = f'{SERVER_LABELS},model="m",version="1"'
FAILED = "nv_inference_request_failure{" + MODEL + ',reason="%s"}'
WAITED = "shmserve_queue_seconds_sum{" + MODEL + "}"
BUCKET = "shmserve_queue_seconds_bucket{" + MODEL + ',le="%s"}'
# A model completes ten requests per second. Samples are 30 s apart. A second server exists, too.
HEALTHY = {
    f"up{{{SERVER_LABELS}}}": "1x60",
    'up{instance="two",job="shmserve"}': "1x60",
    f"shmserve_shm_regions{{{SERVER_LABELS}}}": "0x60",
    f"shmserve_model_failed{{{MODEL}}}": "0x60",
    f"shmserve_load_failures_total{{{SERVER_LABELS}}}": "3x60",
    f'shmserve_instances{{{MODEL},state="idle"}}': "1x60",
    f'shmserve_instances{{{MODEL},state="starting"}}': "0x60",
    f"shmserve_workers_lost_total{{{MODEL}}}": "2x60",
    f"nv_inference_request_success{{{MODEL}}}": "0+300x60",
    f"shmserve_request_seconds_sum{{{MODEL}}}": "0+30x60",
    WAITED: "0+3x60",
    BUCKET % "0.1": "0+300x60",
    BUCKET % "1": "0+300x60",
    BUCKET % "+Inf": "0+300x60",
    FAILED % "REJECTED": "0x60",
    FAILED % "OTHER": "0x60",
    FAILED % "CANCELED": "0x60",
    f"shmserve_overruns_total{{{MODEL}}}": "1x60",
    f"shmserve_llm_preemption_total{{{MODEL}}}": "5x60",
}
NO_INSTANCE = f'shmserve_instances{{{MODEL},state="idle"}}'
STARTING = f'shmserve_instances{{{MODEL},state="starting"}}'
# The alert, the changed series, a time without the alert, and a time with it ("": it never fires).
ALARMS: list[tuple[str, dict[str, str], str, str]] = [
    ("ShmserveDown", {f"up{{{SERVER_LABELS}}}": "1x10 0x50"}, "5m", "6m30s"),
    ("ShmserveDown", {'up{instance="two",job="shmserve"}': "1x10 0x50"}, "20m", ""),
    ("ShmserveModelFailed", {f"shmserve_model_failed{{{MODEL}}}": "0x10 1x50"}, "5m", "6m30s"),
    ("ShmserveModelFailed", {f"shmserve_model_failed{{{MODEL}}}": "0x10 1 0x50"}, "6m", ""),
    ("ShmserveLoadsFail", {f"shmserve_load_failures_total{{{SERVER_LABELS}}}": "3x10 4x50"}, "5m",
     "6m"),
    ("ShmserveLoadsFail", {f"shmserve_load_failures_total{{{SERVER_LABELS}}}": "3x10 4x50"}, "17m",
     ""),
    ("ShmserveNoInstance", {NO_INSTANCE: "1x10 0x50", STARTING: "0x10 1x50"}, "6m", "7m30s"),
    ("ShmserveNoInstance", {NO_INSTANCE: "0x60"}, "20m", ""),  # no instance is configured
    ("ShmserveWorkersDie", {f"shmserve_workers_lost_total{{{MODEL}}}": "2x10 3x50"}, "5m", "6m"),
    # One of eleven requests fails.
    ("ShmserveRequestsFail", {FAILED % "OTHER": "0+30x60"}, "4m", "8m"),
    ("ShmserveRequestsFail", {FAILED % "OTHER": "0+12x60"}, "20m", ""),
    ("ShmserveRequestsFail", {FAILED % "CANCELED": "0+300x60"}, "20m", ""),
    ("ShmserveRequestsAreRejected", {FAILED % "REJECTED": "0+3x60"}, "4m", "8m"),
    ("ShmserveRequestsWait", {WAITED: "0+24x60", BUCKET % "0.1": "0+30x60"}, "9m", "13m"),
    ("ShmserveRequestsWait", {WAITED: "0+24x60"}, "20m", ""),  # requests wait, but only briefly
    ("ShmserveExecutionsOverrun", {f"shmserve_overruns_total{{{MODEL}}}": "1x10 2x50"}, "5m", "6m"),
    ("ShmserveBlocksRunOut", {f"shmserve_llm_preemption_total{{{MODEL}}}": "0+6x60"}, "9m", "13m"),
    ("ShmserveBlocksRunOut", {f"shmserve_llm_preemption_total{{{MODEL}}}": "0+2x60"}, "20m", ""),
]  # fmt: skip


class Prometheus:
    """A real Prometheus that scrapes a server every two seconds."""

    def __init__(self, folder: Path, server: Server) -> None:
        assert PROMETHEUS
        (port_socket,) = hold_ports(1)
        self._url = f"127.0.0.1:{port_of(port_socket)}"
        port_socket.close()
        (folder / "alerts.yaml").write_text(run_command("grafana", "--alerts").stdout)
        target = {"targets": [f"127.0.0.1:{server.metrics_port}"]}
        config = {
            # A scrape may take the whole interval on a busy machine.
            "global": {"scrape_interval": "2s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [{"job_name": "shmserve", "static_configs": [target]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.log = folder / "log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self._url}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **query: str) -> Any:
        url = f"http://{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]

    def numbers(self, query: str) -> list[float]:
        result = self.get("query", query=query)["result"]
        values = [float(series["value"][1]) for series in result]
        return [value for value in values if not math.isnan(value)]

    def scrapes(self) -> bool:
        with contextlib.suppress(OSError):
            return self.numbers("up") == [1.0]
        return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    prometheus_process = Prometheus(tmp_path_factory.mktemp("prometheus"), server)
    try:
        until(f"it scrapes:\n{prometheus_process.log.read_text()}", prometheus_process.scrapes)
        with watched.send_under_load(server, generative=True):
            yield prometheus_process
    finally:
        prometheus_process.stop()


@needs_prometheus
def test_every_panel_has_data(server: Server, prometheus: Prometheus) -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"].replace("$model", ".*").replace("$__rate_interval", "10s")
            until(f"{panel['title']}: {query}", partial(prometheus.numbers, query))


@needs_prometheus
def test_the_alert_rules_are_valid(server: Server, prometheus: Prometheus) -> None:
    (group,) = prometheus.get("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in alerts()]

    def evaluated() -> bool:
        (group,) = prometheus.get("rules")["groups"]
        return {rule["health"] for rule in group["rules"]} == {"ok"}

    until("each can be evaluated", evaluated)

    def state(name: str) -> str:
        (group,) = prometheus.get("rules")["groups"]
        return next(str(rule["state"]) for rule in group["rules"] if rule["name"] == name)

    until("the server was seen", lambda: state("ShmserveGone") == "inactive")
    assert state("ShmserveWorkersDie") == "inactive"
    until("one in four fails", lambda: state("ShmserveRequestsFail") == "pending")
    with server.http() as http:
        watched.command(http, "exit")
    until("a worker's death is alarming", lambda: state("ShmserveWorkersDie") == "firing")


def rule_test(series: dict[str, str], eval_time: str, *names: str) -> dict[str, Any]:
    """Return a promtool test in which exactly these alerts fire at a time."""
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names]
    return {
        "interval": "30s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": eval_time,
                "exp_samples": expected,
            }
        ],
    }


@needs_promtool
def test_each_alert_fires_when_it_should_and_alone(tmp_path: Path) -> None:
    assert PROMTOOL
    assert {"ShmserveGone", *(a[0] for a in ALARMS)} == {alert["alert"] for alert in alerts()}
    (tmp_path / "alerts.yaml").write_text(run_command("grafana", "--alerts").stdout)
    stale_series = {f"shmserve_shm_regions{{{SERVER_LABELS}}}": "0x10 stale"}
    tests = [
        rule_test(HEALTHY, "25m"),
        rule_test({**HEALTHY, **stale_series}, "6m"),
        rule_test({**HEALTHY, **stale_series}, "7m", "ShmserveGone"),
    ]
    for name, changed_series, silent_at, fires_at in ALARMS:
        assert changed_series.keys() <= HEALTHY.keys()
        tests.append(rule_test({**HEALTHY, **changed_series}, silent_at))
        if fires_at:
            tests.append(rule_test({**HEALTHY, **changed_series}, fires_at, name))
    rules = {"rule_files": ["alerts.yaml"], "evaluation_interval": "30s", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(rules))
    for verb in (["check", "rules", "alerts.yaml"], ["test", "rules", "tests.yaml"]):
        result = subprocess.run([PROMTOOL, *verb], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_the_page_of_metrics_is_well_formed(server: Server) -> None:
    """Promtool's advice against the style of Triton's names is ignored."""
    assert PROMTOOL
    with watched.send_under_load(server, generative=True):
        page = server.metrics()
    run = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True, text=True)
    lines = (run.stdout + run.stderr).splitlines()
    assert not [line for line in lines if not line.startswith("nv_")]


def check_metrics(server: Server, *queries: str) -> None:
    """Check that the server publishes each metric of these queries."""
    with watched.send_under_load(server, generative=True):
        until("text is made", lambda: server.metric("shmserve_llm_tokens_generated", model="tiny"))
        page = server.metrics()
    families = set(re.findall(r"^(\w+)[ {]", page, re.MULTILINE))
    for query in queries:
        metric_names = set(re.findall(r"\b((?:nv|shmserve)_\w+)", query))
        assert metric_names and metric_names <= families, query


def test_every_named_metric_exists(server: Server) -> None:
    """This test also runs without Prometheus."""
    check_metrics(server, *(t["expr"] for p in dashboard()["panels"] for t in p.get("targets", ())))


@pytest.mark.usefixtures("server")
def test_alerts_use_no_metric_that_a_flag_disables(models: Path, serve: Start) -> None:
    flags = ("--allow-cpu-metrics=false", "--metrics-config=counter_latencies=false")
    check_metrics(serve(models, *FLAGS, *flags), *(rule["expr"] for rule in alerts()))
