"""The benchmark's arithmetic: reports, medians and ratios, verdicts, comparisons, processes."""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from bench.load import perf
from bench.load.client import RequestFailed
from bench.load.closed_loop import Connections, latencies
from bench.peers.measure import PEERS, post
from bench.report import rendering
from bench.report.results import MACHINE, Figure, NotRun, Results, Row, Target, load, spread
from bench.soak import quantile
from bench.system import processes, resources

if TYPE_CHECKING:
    from pathlib import Path


REPORT = """Concurrency,Inferences/Second,Client Send,p50 latency,p99 latency,Avg latency
16,7552.42,45,2004,3819,
"""


def _figure(direction: str = "higher", target: Target | None = None) -> Figure:
    ratio = Target("ratio", 0.8, 1.2) if direction == "higher" else Target("ratio", 1.2, 0.8)
    return Figure("case", "a case", "x/s", direction, target or ratio)  # type: ignore[arg-type]


def _row(own_samples: list[float], peer_samples: list[float], figure: Figure | None = None) -> Row:
    return Row(figure or _figure(), {"shmserve": own_samples, "triton": peer_samples})


def _results(*rows: Row) -> Results:
    machine: dict[str, str | float] = {
        "processor": "P", "cores": 2, "memory_gib": 1.0, "system": "S", "load_before": 0.0,
    }  # fmt: skip
    return Results("2026-01-01", machine, {"python": "3"}, {"repeats": 3, "seconds": 5}, list(rows))


def test_a_report_of_perf_analyzer_is_read_by_column() -> None:
    columns = perf.parse(REPORT)
    assert columns[perf.THROUGHPUT] == 7552.42 and columns[perf.P50] == 2004
    assert "Avg latency" not in columns


@pytest.mark.parametrize("text", ["", "Concurrency\n1\n", REPORT + "1,2,3,4,5,6\n", "a,b\n1,2\n"])
def test_malformed_reports_are_refused(text: str) -> None:
    with pytest.raises(perf.LoadFailed):
        perf.parse(text)


def test_spread_is_the_median_between_the_extremes() -> None:
    result = spread([3.0, 1.0, 10.0])
    assert result is not None
    assert (result.median, result.low, result.high) == (3.0, 1.0, 10.0)
    assert spread([]) is None


def test_ratio_is_of_medians_with_the_extremes_of_the_pairs() -> None:
    ratio = _row([10, 20, 30], [10, 10, 60]).ratio()
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 0.5, 2.0)


@pytest.mark.parametrize(("own", "peer"), [([], [1.0]), ([1.0], []), ([1.0], [0.0])])
def test_a_missing_side_has_no_ratio_and_no_verdict(own: list[float], peer: list[float]) -> None:
    row = _row(own, peer)
    assert row.ratio() is None and row.verdict() == ""


@pytest.mark.parametrize(
    ("direction", "own_value", "verdict"),
    [
        ("higher", 12.0, "aim"), ("higher", 8.0, "must"), ("higher", 7.9, "BELOW"),
        ("lower", 8.0, "aim"), ("lower", 12.0, "must"), ("lower", 12.1, "BELOW"),
    ],
)  # fmt: skip
def test_verdict_on_a_ratio(direction: str, own_value: float, verdict: str) -> None:
    assert _row([own_value], [10.0], _figure(direction)).verdict() == verdict


@pytest.mark.parametrize(("value", "verdict"), [(3.0, "must"), (3.1, "BELOW")])
def test_verdict_on_a_value_needs_no_peer(value: float, verdict: str) -> None:
    figure = _figure("lower", Target("value", 3.0))
    assert Row(figure, {"shmserve": [value]}).verdict() == verdict


def test_results_round_trip_through_their_file(tmp_path: Path) -> None:
    results = _results(_row([1.0], [2.0]))
    results.not_run.append(NotRun("json, triton", "it died", failed=True))
    results.save(tmp_path / "new" / "r.json")
    assert load(tmp_path / "new" / "r.json") == results


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [], "not_run": []}', "\x00"])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not a result"):
        load(path)


def test_the_report_names_what_could_not_be_measured() -> None:
    results = _results(_row([12.0], [10.0]), Row(_figure(), {MACHINE: [1.0]}))
    results.not_run.append(NotRun("Triton", "not there", failed=False))
    results.raw_delays_us["shmserve"] = [110.0, 130.0, 5000.0]
    text = rendering.render(results)
    assert "1.20 [1.20 .. 1.20]" in text and "aim" in text
    assert "Triton: not there" in text and "100 to 120 µs   33.3 %" in text
    assert "2000 and more µs   33.3 %" in text


def test_an_empty_report_is_rendered() -> None:
    assert "median" in rendering.render(_results())


def test_compare_reports_better_only_without_overlap() -> None:
    earlier_results = _results(_row([10, 11], [10, 10]))
    assert "better" in rendering.compare(earlier_results, _results(_row([12, 13], [10, 10])))
    assert "worse" in rendering.compare(earlier_results, _results(_row([8, 9], [10, 10])))
    overlapping_report = rendering.compare(earlier_results, _results(_row([11, 13], [10, 10])))
    assert "better" not in overlapping_report and "1.14" in overlapping_report


def test_a_tree_has_the_descendants_and_their_memory_and_cpu() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        while len(members := processes.tree(child.pid)) < 2:
            assert child.poll() is None
        assert {process.pid for process in members} >= {child.pid}
        assert os.getpid() not in {process.pid for process in members}
        assert 1 < processes.pss_mb(child.pid) < 1000
        assert processes.cpu_s(child.pid) >= 0
        assert len(processes.running_processes(members)) == 2
        assert not processes.wait_exited(members, 0.02)
    finally:
        child.communicate(b"\n")
    assert processes.wait_exited(members, 5) and processes.signal_all(members, 9) == []


def soak_samples(memory: list[float], fds: list[int], shm: list[float]) -> list[resources.Sample]:
    return [
        resources.Sample({"gateway": mb}, {"gateway": count}, {"gateway": 3}, in_shm)
        for mb, count, in_shm in zip(memory, fds, shm, strict=True)
    ]


@pytest.mark.parametrize(
    ("memory", "descriptors", "shm", "growing"),
    [
        ([20.0, 40, 50, 50, 51, 50], [9] * 6, [0.0] * 6, []),
        ([50.0] * 6, [9, 9, 40, 9, 9, 10], [5.0] * 6, []),
        ([50.0, 50, 50, 50, 60, 60], [9] * 6, [0.0] * 6, ["gateway: memory_mb 50.0 -> 60.0"]),
        ([50.0] * 6, [9, 9, 9, 9, 30, 30], [0.0] * 6, ["gateway: descriptors 9.0 -> 30.0"]),
        ([50.0] * 6, [9] * 6, [0.0, 0, 1, 1, 5, 5], ["/dev/shm: MB 1.0 -> 5.0"]),
    ],
)
def test_growth_in_a_soak_is_reported(
    memory: list[float], descriptors: list[int], shm: list[float], growing: list[str]
) -> None:
    """The last third against the one before; in the first one caches fill."""
    assert resources.growth(soak_samples(memory, descriptors, shm)) == growing


def test_too_short_a_soak_is_reported() -> None:
    assert resources.growth(soak_samples([1.0], [1], [0.0])) == [
        "the run was too short to say what grew"
    ]


def test_processes_started_later_are_ignored() -> None:
    samples = soak_samples([50.0] * 6, [9] * 6, [0.0] * 6)
    samples[-1].memory_mb["worker"] = 900.0
    assert resources.growth(samples) == []


def test_resources_of_this_process() -> None:
    usage = resources.sample(os.getpid())
    assert max(usage.memory_mb.values()) > 1 and max(usage.descriptors.values()) > 2
    assert max(usage.threads.values()) >= 1


@pytest.mark.parametrize(
    ("values", "share", "expected_quantile"), [([], 0.5, 0), ([3, 1, 2], 0.5, 2), ([1], 1, 1)]
)
def test_quantile(values: list[float], share: float, expected_quantile: float) -> None:
    assert quantile(values, share) == expected_quantile


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if body else 400)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"yes")

    def log_message(self, *_: object) -> None:
        pass


def test_the_load_for_peers_measures_requests_of_any_size() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    with contextlib.closing(server.socket):
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        for size in (1, 1_000_000):
            request = post("/", bytes(size))
            latencies_us = latencies(server.server_port, request, in_flight=3, seconds=0.05)
            assert len(latencies_us) >= 3 and min(latencies_us) > 0
        with Connections(server.server_port, [request] * 3) as connections:
            for count in (1, 7):
                assert len(connections.run(lambda sent, count=count: sent < count)) == count  # type: ignore[misc]
        with pytest.raises(RequestFailed, match="400"):
            latencies(server.server_port, post("/", b""), in_flight=1, seconds=0.05)
        server.shutdown()


def test_every_peer_has_a_program_and_a_request_of_each_model() -> None:
    for name, peer in PEERS.items():
        assert peer.request("image").startswith(b"POST ")
        assert bool(peer.request("simple")) == (name != "shmserve, shared memory")
