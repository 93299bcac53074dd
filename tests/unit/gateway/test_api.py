"""A gateway's responses apart from inference: health, metadata, repository, regions, metrics."""

import base64
import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from prometheus_client.parser import text_string_to_metric_families

from shmserve.common import auth_tokens
from shmserve.errors import Internal
from shmserve.gateway.api import management
from shmserve.gateway.context import GatewayModel
from shmserve.gateway.http import routing
from shmserve.gateway.http.routes import ROUTES
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.messages.control_requests import RegionReleased, RegisterRegion, UnregisterRegion
from shmserve.ipc.messages.publications import (
    HealthChanged,
    ModelWithdrawn,
    RegionPublished,
    RegionWithdrawn,
)
from shmserve.ipc.tensors.descriptors import Memory, Range, pack_range
from tests.rigs.gateway_rig import SIMPLE_CONFIG, Rig, Scheduler, add_sub, publication, rig
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, in_region, raw_connection


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("run"), id="my server") as model_rig:
        model_rig.open()
        yield model_rig


@pytest.fixture(scope="module")
def simple_scheduler(gateway: Rig) -> Scheduler:
    scheduler = gateway.serve(SIMPLE_CONFIG, add_sub)
    scheduler.statistics = report("simple", "1")
    return scheduler


@pytest.fixture
def http(gateway: Rig, simple_scheduler: Scheduler) -> Iterator[Http]:
    gateway.refusals.clear()
    gateway.payloads.clear()
    for kind in (
        *(RegisterRegion, UnregisterRegion, m.LoadModel, m.UnloadModel, m.IndexRepository),
    ):
        gateway.payloads[kind] = {}
    connection = Http(gateway.port)
    yield connection
    connection.close()


def report(name: str, version: str) -> dict[str, Any]:
    """Return a scheduler's statistics: 3 requests in 2 executions."""
    durations = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    stats: Any = {key: {"count": 3, "ns": 1000 * (n + 1) + 999} for n, key in enumerate(durations)}
    zero_count = {"count": 0, "ns": 0}
    flat_counts = {"inference_count": 3_000_000_001, "execution_count": 2, "success": 3, "fail": 3}
    flat_counts |= {f"{key}_ns": entry["ns"] for key, entry in stats.items()}
    flat_counts |= dict.fromkeys(("cache_hit", "cache_miss", "cache_hit_ns", "cache_miss_ns"), 0)
    counts = [1, 0, 2, 0]
    histogram = {"buckets": [0.001, 0.01, 1.0], "counts": counts, "sum": 0.5, "count": 3}
    return {
        "name": name,
        "version": version,
        "last_inference": 1234,
        "inference_count": 3_000_000_001,
        "execution_count": 2,
        "inference_stats": {**stats, "cache_hit": zero_count, "cache_miss": zero_count},
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
        "shmserve": {
            "failures": {"REJECTED": 4, "CANCELED": 0, "BACKEND": 1, "OTHER": 0},
            "pending": 5,
            "executing": 2,
            "open_sequences": 0,
            "batches_closed": {"full": 1, "delay": 1},
            **flat_counts,
            **dict.fromkeys(
                ("request_seconds", "queue_seconds", "compute_seconds", "batch_size"), histogram
            ),
            "padding": {},
            "instances": {"idle": 1, "busy": 2},
            "instance_changes": {"more": 2, "fewer": 1},
            "workers_lost": 7,
            "retried": 1,
            "overruns": 0,
            "malformed": 0,
            "copied_bytes": {"in": 0, "out": 0},
        },
    }


# --- routes


# The API of every route by the end of its path; a missing route fails the test below.
SCOPES = {
    "/infer": "inference", "/generate": "inference", "/generate_stream": "inference",
    "/live": "health", "/ready": "health", "/v2": "metadata",
    "/versions/{version}]": auth_tokens.MODEL_METADATA, "/config": "model-config",
    "/stats": "statistics", "/index": "model-repository", "/load": "model-repository",
    "/unload": "model-repository", "/register": "shared-memory", "/status": "shared-memory",
    "/unregister": "shared-memory", "/trace/setting": "trace", "/v2/logging": "logging",
    "/v1/models": "metadata", "/v1/models/{id}": "metadata", "/tokenize": "inference",
    "/detokenize": "inference", "/health": "health", "/ping": "health", "/version": "metadata",
    "/": "health", "/openapi.json": "health", "/docs": "health",
    "/docs/models": auth_tokens.MODEL_METADATA, "/completions": "inference",
    "/responses": "inference", "/embeddings": "inference", "/input_tokens": "inference",
}  # fmt: skip


def test_every_route_has_a_scope() -> None:
    """Each route belongs to the right API, and its handler is called only with that permission."""
    for route in ROUTES.routes:
        assert route.scope in (*auth_tokens.RESTRICTABLE, auth_tokens.MODEL_METADATA), route
        (end,) = [end for end in SCOPES if route.path.endswith(end)] or ["not in the table"]
        assert route.scope == SCOPES.get(end), route
    assert {route.method for route in ROUTES.routes} == {"GET", "POST"}
    # A handler is looked up in one function only, which authorises before anything else.
    assert inspect.getsource(routing).count("route.handler") == 1
    source = inspect.getsource(routing.App.handle)
    assert source.index("check_authorised(route, request, cors)") < source.index("route.handler")


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/v2/models/m/infer", ("m", "")),
        ("/v2/models/m/versions/12/infer?x=/y", ("m", "12")),
        ("/v2/models/a%2Fb%20c/infer", ("a/b c", "")),
        ("http://localhost:8000/v2/models/m/infer", ("m", "")),
        ("HTTPS://h/v2/models/m/infer?x", ("m", "")),
        ("ftp://h/v2/models/m/infer", None),
        ("http:///v2/models/m/x?http://h/v2/models/m/infer", None),
        ("/v2/models/m/versions/x/infer", None),
        ("/v2/models/m/versions/-1/infer", None),
        ("/v2/models/m/versions//infer", None),
        ("/v2/models//infer", None),
        ("/v2/models/m/infer/", None),
        ("/v2/models/m/versions/\u0661/infer", None),
        ("/V2/models/m/infer", None),
        ("//v2/models/m/infer", None),
        ("/v2/models/m/../m/infer", None),
    ],
)
def test_paths_are_matched_as_they_were_sent(path: str, parts: tuple[str, ...] | None) -> None:
    route = ROUTES.find(path)
    assert (route and route[1]) == parts


def test_trace_settings_are_of_a_model_not_of_a_version(gateway: Rig, http: Http) -> None:
    assert http.get("/v2/models/simple/versions/1/trace/setting").status == 404


# --- health and metadata


def test_health_is_that_of_the_supervisor(gateway: Rig, http: Http) -> None:
    for is_live, is_ready in ((True, True), (True, False), (False, False), (True, True)):
        gateway.send(HealthChanged(live=is_live, ready=is_ready, exiting=False))
        gateway.apply(lambda number: RegionWithdrawn("", 0, number))
        assert http.get("/v2/health/live").status == (200 if is_live else 400)
        assert http.get("/v2/health/ready").status == (200 if is_ready else 400)
    reply = http.get("/v2/health/ready")
    assert (reply.body, reply.headers["Content-Length"]) == (b"", "0")


def test_readiness_is_supervised(gateway: Rig, simple_scheduler: Scheduler, http: Http) -> None:
    http.get("/v2/models/simple/ready").ok()
    gateway.publish(SIMPLE_CONFIG, simple_scheduler, ready=False)
    reply = http.get("/v2/models/simple/ready")
    assert (reply.status, reply.error) == (400, "Model version not ready")
    # The model restarts: requests wait for it at its scheduler.
    row = {"datatype": "INT32", "shape": [1, 16], "data": [1] * 16}
    inputs = [{"name": name, **row} for name in ("INPUT0", "INPUT1")]
    http.infer("simple", {"inputs": inputs}).ok()
    gateway.publish(SIMPLE_CONFIG, simple_scheduler)
    http.get("/v2/models/simple/versions/1/ready").ok()
    for path in ("/v2/models/simple/versions/2/ready", "/v2/models/nope/ready"):
        assert http.get(path).error == "Model version not ready"


def test_metadata(http: Http) -> None:
    server = http.get("/v2").ok().json()
    assert list(server) == ["name", "version", "extensions"]
    assert server["name"] == "my server"
    assert "binary_tensor_data" in server["extensions"]
    model = http.get("/v2/models/simple").ok().json()
    assert list(model) == ["name", "versions", "platform", "inputs", "outputs"]
    assert model["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": [-1, 16]}
    assert http.get("/v2/models/simple/config").ok().json() == SIMPLE_CONFIG


def test_triton_clients_work(gateway: Rig, simple_scheduler: Scheduler, http: Http) -> None:
    with contextlib.closing(triton.InferenceServerClient(f"127.0.0.1:{gateway.port}")) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("simple")
        assert client.get_server_metadata()["name"] == "my server"
        assert client.get_model_metadata("simple", "1")["versions"] == ["1"]
        assert client.get_model_config("simple")["max_batch_size"] == 8
        assert client.get_inference_statistics("simple")["model_stats"][0]["execution_count"] == 2
        row = np.arange(16, dtype=np.int32).reshape(1, 16)
        for binary in (True, False):
            inputs = [triton.InferInput(n, row.shape, "INT32") for n in ("INPUT0", "INPUT1")]
            for tensor in inputs:
                tensor.set_data_from_numpy(row, binary_data=binary)
            outputs = [triton.InferRequestedOutput(n, binary) for n in ("OUTPUT1", "OUTPUT0")]
            for compression in (None, "gzip", "deflate"):
                result = client.infer(
                    "simple",
                    inputs,
                    outputs=outputs,
                    request_id="9",
                    parameters={"custom": 1},
                    request_compression_algorithm=compression,
                    response_compression_algorithm=compression,
                )
                assert np.array_equal(result.as_numpy("OUTPUT0"), row + row)
                assert not result.as_numpy("OUTPUT1").any()
                assert result.get_response()["id"] == "9"
        with pytest.raises(triton.InferenceServerException, match=r"^\[400\] .*expected 2 inputs"):
            client.infer("simple", inputs[:1])


# --- the repository


def test_the_index_is_that_of_the_supervisor(gateway: Rig, http: Http) -> None:
    rows = [{"name": "simple", "version": "1", "state": "READY"}]
    gateway.payloads[m.IndexRepository] = {"models": rows}
    assert http.post("/v2/repository/index").ok().json() == rows
    assert http.post("/v2/repository/any/index", {"ready": True}).ok().json() == rows
    assert [message.ready for message in gateway.received_of(m.IndexRepository)] == [False, True]
    refusal = http.post("/v2/repository/index", {"ready": 1})
    assert (refusal.status, refusal.error) == (400, "Invalid value for 'ready': expected a boolean")


def test_models_are_loaded_and_unloaded_by_the_supervisor(gateway: Rig, http: Http) -> None:
    path = "/v2/repository/models/a%2Emodel"
    contents = bytes(range(256)) * 10
    http.post(f"{path}/load").ok()
    files = {"file:1/model.py": base64.encodebytes(contents).decode()}
    http.post(f"{path}/load", {"parameters": {"config": "{}", **files}}).ok()
    http.post(f"{path}/unload").ok()
    http.post(f"{path}/unload", {"parameters": {"unload_dependents": True}}).ok()
    unpadded_files = {"file:1/model.py": "eA"}  # accepted by Triton, too
    http.post(f"{path}/load", {"parameters": {"config": "{}", **unpadded_files}}).ok()
    loads = [(x.name, x.config, x.files) for x in gateway.received_of(m.LoadModel)]
    assert loads == [
        ("a.model", "", {}),
        ("a.model", "{}", {"1/model.py": contents}),
        ("a.model", "{}", {"1/model.py": b"x"}),
    ]
    unload_requests = [(x.name, x.unload_dependents) for x in gateway.received_of(m.UnloadModel)]
    assert unload_requests == [("a.model", False), ("a.model", True)]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("models/m/load", {"parameters": {"x": "y"}}, 500, "unexpected error on creating Triton"),
        ("models/m/load", {"parameters": {"config": 1}}, 500, "attempt to access JSON non-string"),
        ("models/m/load", {"parameters": []}, 500, "attempt to get members for non-object"),
        ("models/m/load", {"parameters": {"file:a": "!"}}, 400, "not valid base64"),
        ("models/../load", {}, 400, "model name must not contain path traversal characters"),
        ("models/%2e%2e/load", {}, 400, "model name must not contain path traversal characters"),
        ("models/a%2Fb/load", {}, 400, "model name must not contain path traversal characters"),
        ("models/%20../load", {}, 400, "model name must not contain path traversal characters"),
        ("models/m/unload", {"parameters": {"unload_dependents": 1}}, 400,
         "non-boolean as boolean"),
        ("models/m/unload", {"parameters": []}, 400, "attempt to get members for non-object"),
        ("models/m/unload", b"{", 400, "failed to parse the request JSON buffer"),
        ("models/m/load", b"{", 500, "failed to parse the request JSON buffer"),
    ],
)  # fmt: skip
def test_wrong_repository_requests_do_not_reach_the_supervisor(
    gateway: Rig, http: Http, path: str, body: Any, status: int, text: str
) -> None:
    received_before = len(gateway.received)
    reply = http.post(f"/v2/repository/{path}", body)
    assert reply.status == status
    assert text in reply.error
    assert len(gateway.received) == received_before


def test_errors_of_the_supervisor_are_returned(gateway: Rig, http: Http) -> None:
    gateway.refusals[m.LoadModel] = ("INVALID_ARG", "load failed for model 'm': no\n")
    reply = http.post("/v2/repository/models/m/load")
    assert (reply.status, reply.error) == (400, "load failed for model 'm': no\n")


def test_a_disconnect_does_not_cancel_a_load(gateway: Rig, http: Http) -> None:
    del gateway.payloads[m.LoadModel]
    p = "/v2/repository/models/slow/load"

    def load_requests() -> list[m.LoadModel]:
        return [message for message in gateway.received_of(m.LoadModel) if message.name == "slow"]

    with raw_connection(gateway.port) as link:
        link.sendall(f"POST {p} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
        until("the supervisor is asked", load_requests)
    (message,) = load_requests()
    gateway.send(m.Answered(message.id, {}), m.Refused(message.id, "INTERNAL", "late"))
    gateway.payloads[m.LoadModel] = {}
    http.post("/v2/repository/models/next/load").ok()


# --- regions


def test_regions_are_registered_by_the_supervisor(gateway: Rig, http: Http) -> None:
    path = "/v2/systemsharedmemory"
    http.register("a%20region", "/key", 64).ok()
    http.post(f"{path}/region/r/register", {"key": "/key", "byte_size": 2**63 - 1}).ok()
    http.unregister("r").ok()
    http.unregister().ok()
    registered = gateway.received_of(RegisterRegion)
    assert [(x.name, x.key, x.offset, x.byte_size) for x in registered] == [
        ("a region", "/key", 0, 64),
        ("r", "/key", 0, 2**63 - 1),
    ]
    assert [x.name for x in gateway.received_of(UnregisterRegion)] == ["r", ""]
    gateway.refusals[RegisterRegion] = (
        "ALREADY_EXISTS",
        "shared memory region 'r' already in manager",
    )
    reply = http.register("r", "/key", 64)
    assert (reply.status, reply.error) == (400, "shared memory region 'r' already in manager")


@pytest.mark.parametrize("value", [True, -1, 1.0, "1", None, 2**63, 2**70, [], {}])
@pytest.mark.parametrize("field", ["byte_size", "offset"])
def test_sizes_are_whole_numbers(gateway: Rig, http: Http, field: str, value: Any) -> None:
    received_before = len(gateway.received)
    body = {"key": "/key", "byte_size": 64, "offset": 0, field: value}
    reply = http.post("/v2/systemsharedmemory/region/r/register", body)
    assert reply.status == 400
    assert reply.error.startswith(f"'{field}' must be an integer in [0, 9223372036854775807], got ")
    assert len(gateway.received) == received_before


@pytest.mark.parametrize(
    ("name", "body", "status", "text"),
    [
        ("r", {"byte_size": 64}, 400, "Shared memory register request has no 'key' field"),
        ("r", {"key": "/k"}, 400, "Shared memory register request has no 'byte_size' field"),
        ("r", [], 400, "Shared memory register request has no 'key' field"),
        ("r", {"key": 1, "byte_size": 1}, 500, "attempt to access JSON non-string as string"),
        ("r%0a", {"key": "/k", "byte_size": 1}, 400, "1 to 255 printable characters"),
        ("r" * 256, {"key": "/k", "byte_size": 1}, 400, "1 to 255 printable characters"),
    ],
)
def test_registering_is_checked(http: Http, name: str, body: Any, status: int, text: str) -> None:
    reply = http.post(f"/v2/systemsharedmemory/region/{name}/register", body)
    assert reply.status == status
    assert text in reply.error


def region(name: str, memory_id: int, offset: int) -> Callable[[int], RegionPublished]:
    memory = Memory(memory_id, os.getpid(), 3, 4, 10_000, sealed=False)
    memory_range = list(pack_range(Range(memory, offset, 100)))
    return lambda number: RegionPublished(name, f"/{name}", memory_range, os.getuid(), -1, number)


def test_the_status_of_regions(gateway: Rig, http: Http) -> None:
    gateway.apply(region("b", 1, 0))
    gateway.apply(region("a", 2, 4096))
    first_region = {"name": "a", "key": "/a", "offset": 4096, "byte_size": 100}
    second_region = {"name": "b", "key": "/b", "offset": 0, "byte_size": 100}
    assert http.regions().json() == [first_region, second_region]
    assert http.regions("b").json() == [second_region]
    missing_region = http.regions("c")
    assert missing_region.status == 404
    assert missing_region.error == "Unable to find system shared memory region: 'c'"
    gateway.apply(lambda number: RegionWithdrawn("b", 1, number))
    gateway.apply(lambda number: RegionWithdrawn("a", 2, number))
    assert http.regions().json() == []
    assert RegionReleased(1) in gateway.received
    inputs = [
        {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "parameters": in_region("a", 64)}
    ]
    assert http.infer("simple", {"inputs": inputs}).status == 404


# --- statistics and metrics


def test_statistics_equal_those_of_the_schedulers(http: Http) -> None:
    statistics = {key: value for key, value in report("simple", "1").items() if key != "shmserve"}
    for path in ("models/stats", "models/simple/stats", "models/simple/versions/1/stats"):
        assert http.get(f"/v2/{path}").ok().json() == {"model_stats": [statistics]}
    for name in ("simple", "nope"):
        beyond_int64 = http.get(f"/v2/models/{name}/versions/9223372036854775808/stats")
        assert beyond_int64.status == 400
        assert "version should be an integral value > 0" in beyond_int64.error


def test_a_silent_scheduler_does_not_delay_statistics(gateway: Rig, http: Http) -> None:
    gateway.serve({**SIMPLE_CONFIG, "name": "silent"}, add_sub)
    answers: list[int] = []

    def send_request(path: str) -> None:
        connection = Http(gateway.port)
        answers.append(connection.get(path).status)
        connection.close()

    # Two at once: each waits its own time.
    askers = [
        threading.Thread(target=send_request, args=(path,))
        for path in ("/v2/models/silent/stats", "/v2/models/stats")
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(10)
    assert sorted(answers) == [200, 503]
    gateway.apply(lambda number: ModelWithdrawn("silent", "1", number))


def test_metrics_contain_triton_and_own_families(gateway: Rig, http: Http) -> None:
    scraper = Http(gateway.metrics_port)
    reply = scraper.get("/metrics").ok()
    assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"
    text = reply.body.decode()
    for line in (
        "# HELP nv_inference_exec_count Number of model executions performed "
        "(does not include cached requests)",
        "# TYPE nv_inference_count counter",
        'nv_inference_count{model="simple",version="1"} 3000000001',
        'nv_inference_request_success{model="simple",version="1"} 3',
        'nv_inference_request_failure{model="simple",reason="REJECTED",version="1"} 4',
        'nv_inference_request_failure{model="simple",reason="OTHER",version="1"} 0',
        'nv_inference_request_duration_us{model="simple",version="1"} 1',
        'nv_inference_compute_infer_duration_us{model="simple",version="1"} 5',
        "# TYPE nv_inference_pending_request_count gauge",
        'nv_inference_pending_request_count{model="simple",version="1"} 5',
        'shmserve_queue_seconds_bucket{model="simple",version="1",le="0.01"} 1',
        'shmserve_queue_seconds_bucket{model="simple",version="1",le="+Inf"} 3',
        'shmserve_queue_seconds_sum{model="simple",version="1"} 0.5',
        'shmserve_batches_closed_total{model="simple",reason="full",version="1"} 1',
        'shmserve_workers_lost_total{model="simple",version="1"} 7',
        'shmserve_instances{model="simple",state="busy",version="1"} 2',
        'shmserve_instance_changes_total{change="more",model="simple",version="1"} 2',
        "shmserve_shm_regions 0",
    ):
        assert line in text.splitlines(), line
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {"nv_cpu_utilization", "nv_cpu_memory_total_bytes"} <= set(families)
    assert 0 <= families["nv_cpu_utilization"].samples[0].value <= 1
    assert not [name for name in families if name.endswith("_created")]
    assert scraper.get("/v2").ok().body == b""
    assert scraper.post("/metrics").status == 405
    assert http.get("/metrics").status == 404
    scraper.close()


def test_a_models_tags_are_labels_of_its_metrics(
    gateway: Rig, simple_scheduler: Scheduler, http: Http
) -> None:
    scraper = Http(gateway.metrics_port)
    gateway.publish(
        {**SIMPLE_CONFIG, "metric_tags": {"team": 'bl"ue', "not-a label": "x"}}, simple_scheduler
    )
    try:
        text = scraper.get("/metrics/").ok().body.decode()
    finally:
        gateway.publish(SIMPLE_CONFIG, simple_scheduler)
    tagged = {"model": "simple", "version": "1", "_team": 'bl"ue', "_not_a_label": "x"}
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (
        "nv_inference_count",
        "nv_inference_queue_duration_us",
        "nv_model_load_duration_secs",
    ):
        assert [sample.labels for sample in families[name].samples] == [tagged], name
    reasons = [sample.labels for sample in families["nv_inference_request_failure"].samples]
    assert all(tagged.items() <= labels.items() for labels in reasons)
    (instances, *_) = families["shmserve_instances"].samples
    assert instances.labels.keys() == {"model", "version", "state"}
    scraper.close()


def test_metrics_omit_a_bad_report(gateway: Rig, simple_scheduler: Scheduler, http: Http) -> None:
    simple_scheduler.statistics = {"name": "simple"}
    scraper = Http(gateway.metrics_port)
    assert scraper.get("/metrics").error == Internal().message
    simple_scheduler.statistics = report("simple", "1")
    scraper.get("/metrics").ok()
    scraper.close()


# --- examples of /docs


def test_each_model_has_an_example(simple_scheduler: Scheduler) -> None:
    """The example has the required inputs, binary where JSON has no form, and abbreviated."""
    dynamic_input, half_type = {"name": "X", "data_type": "TYPE_FP32", "dims": [-1, 3]}, "TYPE_FP16"
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"input": [dynamic_input], "max_batch_size": 4},
         {"inputs": [json_tensor("FP32", [1, 1, 3], data=[1, 1, 1])]}),
        ({"input": [{**dynamic_input, "data_type": "TYPE_STRING", "dims": [1]}]},
         {"inputs": [json_tensor("BYTES", [1], data=["text"])]}),
        ({"input": [{**dynamic_input, "dims": [3, 224, 224]}]},
         {"inputs": [json_tensor("FP32", [3, 224, 224], fill=1, count=150528)]}),
        ({"input": [{**dynamic_input, "data_type": half_type, "dims": [2]}]},
         {"inputs": [json_tensor("FP16", [2], parameters={"binary_data_size": 4})],
         "parameters": {"binary_data_output": True}}),
        ({"input": [dynamic_input, {**dynamic_input, "name": "Y", "optional": True}]},
         {"inputs": [json_tensor("FP32", [1, 3], data=[1, 1, 1])]}),
    ]  # fmt: skip
    for config, body in cases:
        published = publication({"name": "m", **config}, simple_scheduler)
        (example,) = management._model_examples("m", GatewayModel(published))
        assert example["body"] == body
    (late_example,) = management._model_examples("late", None)
    assert late_example == {"model": "late", "path": "/v2/models/late", "headers": {}}


def json_tensor(datatype: str, shape: list[int], **data: Any) -> dict[str, Any]:
    return {"name": "X", "datatype": datatype, "shape": shape, **data}
