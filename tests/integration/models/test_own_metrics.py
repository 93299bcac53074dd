"""Metrics that Python models create with `pb_utils.MetricFamily`, on the metrics page."""

from pathlib import Path

import numpy as np
import pytest

from tests.support import repositories
from tests.support.servers import Server, Start, wait_exited
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, json_request

UNIT = 'a "b"\\\n'

# A model with a gauge that only its own thread changes.
TICKING_MODEL = repositories.python_model("""
    def initialize(self, args):
        gauge = pb_utils.MetricFamily.GAUGE
        self.family = pb_utils.MetricFamily("ticks", "by a thread", gauge)
        ticks = self.family.Metric(labels={"from": "thread"})
        threading.Timer(0.2, lambda: [ticks.set(n) for n in range(1001)]).start()

    def execute(self, requests):
        raise NotImplementedError
""")


# A model that reads the metrics page at the port in its input.
LOOKING_MODEL = repositories.python_model(
    """
    def execute(self, requests):
        port = self.input(requests[0], "INPUT0")[0]

        def page():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
                lines = reply.read().decode().splitlines()
            return sorted(line for line in lines if line.startswith("looked"))

        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        family = pb_utils.MetricFamily("looked", "at", counter)
        one = family.Metric(labels={"a": "1"})
        one.increment(4)
        assert page() == ['looked{a="1"} 4'], page()
        again = pb_utils.MetricFamily(name="looked", description="at", kind=counter)
        again.Metric(labels={"a": "1"}).increment(0.5)
        two = again.Metric(labels={"a": "2"})
        assert one.value() == 4.5 and two.value() == 0
        assert page() == ['looked{a="1"} 4.5', 'looked{a="2"} 0'], page()
        for change in (lambda: one.increment(-1), lambda: one.set(1)):
            try:
                change()
            except pb_utils.TritonModelException:
                continue
            raise AssertionError("a counter goes up")
        level = pb_utils.MetricFamily("looked_level", "at", gauge)
        value = level.Metric()
        value.set(7)
        value.increment(-9)
        assert value.value() == -2 and page()[0] == "looked_level -2", page()
        del one, two, family, again, value, level
        gc.collect()
        until = time.monotonic() + 10
        while page():
            assert time.monotonic() < until, page()
        return [self.response(OUTPUT0=np.ones(1, np.int32))]
""",
    before="import urllib.request",
)


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    """Start a server of "metering" (two instances), its copy "other" (one), and "ticking"."""
    repositories.add(models, "metering")
    config = repositories.add_as(models, "other", "metering") / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 2", "count: 1"))
    for name, source in (("ticking", TICKING_MODEL), ("looking", LOOKING_MODEL)):
        repositories.write(models, name, repositories.identity_config(name, "INT32", [1]), source)
    return start(models)


def meter(http: Http, amount: float, model: str = "metering") -> float:
    """Count an amount; return the total that the instance has counted."""
    request = json_request(AMOUNT=np.array([amount], np.float64))
    return float(http.infer(model, request).tensors()["TOTAL"][0])


def test_the_metrics_of_instances_are_summed(server: Server, http: Http) -> None:
    """The counts of all instances are added, and include each request that was answered."""
    totals = {meter(http, amount) for amount in (0.5, 4, 0.05, 4, 0.5, 20)}
    assert len(totals) == 6
    assert max(totals) < 29.05, "one instance has counted everything"
    meter(http, 7, "other")
    assert server.metric("metering_amounts", by="metering", unit=UNIT) == 29.05
    assert server.metric("metering_amounts", by="other", unit=UNIT) == 7
    assert server.metric("metering_running", by="metering") == 6
    assert server.samples("metering_level") == [({}, 7)]
    assert server.metric("metering_sizes_count", by="metering") == 6
    assert server.metric("metering_sizes_sum", by="metering") == 29.05
    counts = [
        server.metric("metering_sizes_bucket", by="metering", le=le)
        for le in ("0.1", "1", "10", "+Inf")
    ]
    assert counts == [1, 3, 5, 6]


def test_a_thread_of_the_model_changes_its_metrics(server: Server) -> None:
    until("the gauge is shown", lambda: server.metric("ticks", **{"from": "thread"}) == 1000)


def test_a_models_changes_are_exposed_immediately(server: Server, http: Http) -> None:
    for _ in range(2):
        http.infer("looking", json_request(INPUT0=np.array([server.metrics_port], np.int32))).ok()


def test_the_counts_of_a_dead_instance_stay(server: Server, http: Http) -> None:
    meter(http, 3)
    amounts_before = server.metric("metering_amounts", by="metering")
    (worker,) = server.find("worker metering.1")
    worker.kill()
    assert wait_exited(worker, 5)
    until(
        "the instance is back",
        lambda: server.metric("shmserve_instances", model="metering", state="idle") == 2,
    )
    assert server.metric("metering_amounts", by="metering") == amounts_before
    assert meter(http, 1) + meter(http, 1) > 0
    assert server.metric("metering_amounts", by="metering") == amounts_before + 2


def test_metrics_are_removed_with_their_model(empty_server: tuple[Server, Path]) -> None:
    server, repository = empty_server
    repositories.add(repository, "metering")
    with server.http() as http:
        http.load("metering").ok()
        meter(http, 2)
        assert server.samples("metering_amounts") != []
        http.unload("metering").ok()
        until("they are gone", lambda: server.samples("metering_amounts") == [])
        http.load("metering").ok()
        assert [value for _, value in server.samples("metering_amounts")] == [0]
