"""System shared memory: registration, status, inputs and outputs in regions, errors."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm

from tests.support.leaks import descriptors
from tests.support.regions import SharedObject
from tests.support.servers import Server
from tests.support.wire.raw_http import (
    Http,
    in_region,
    join_bytes,
    json_input,
    region_request,
    shm_input,
    split_bytes,
)

VALUES = np.arange(1024, dtype=np.float32)
SIZE = VALUES.nbytes
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture(autouse=True)
def nothing_registered(http: Http) -> Iterator[None]:
    """Check that no region is registered before and after each test."""
    yield
    http.unregister().ok()
    assert http.regions().ok().json() == []


@pytest.fixture
def region() -> Iterator[SharedObject]:
    """Yield an object for an input and an output of SIZE bytes each."""
    with SharedObject(2 * SIZE) as shared_object:
        shared_object.write(VALUES)
        yield shared_object


def test_register_status_unregister(http: Http, region: SharedObject) -> None:
    reply = http.register("r", region.key, 2 * SIZE)
    assert (reply.status, reply.body) == (200, b"")
    expected_regions = [{"name": "r", "key": region.key, "offset": 0, "byte_size": 2 * SIZE}]
    assert http.regions().ok().json() == expected_regions
    assert http.regions("r").ok().json() == expected_regions
    reply = http.unregister("r")
    assert (reply.status, reply.body) == (200, b"")
    assert http.regions().ok().json() == []
    reply = http.regions("r")
    assert (reply.status, reply.error) == (404, "Unable to find system shared memory region: 'r'")
    assert http.unregister("r").status == 200


def test_input_and_output(http: Http, region: SharedObject) -> None:
    http.register("r", region.key, 2 * SIZE).ok()
    (output,) = http.infer("identity", region_request("r", SIZE)).ok().json()["outputs"]
    assert output["name"] == "OUTPUT0" and output["shape"] == [1024]
    assert "data" not in output
    assert (region.read(np.float32, 1024, SIZE) == VALUES).all()


def test_input_only_and_output_only(http: Http, region: SharedObject) -> None:
    http.register("r", region.key, 2 * SIZE).ok()
    request: dict = {"inputs": [shm_input("INPUT0", "FP32", [1024], "r", SIZE)]}
    assert (http.infer("identity", request).tensors()["OUTPUT0"] == VALUES).all()
    request = {
        "inputs": [json_input("INPUT0", VALUES[:10] + 5)],
        "outputs": [{"name": "OUTPUT0", "parameters": in_region("r", SIZE)}],
    }
    http.infer("identity", request).ok()
    assert (region.read(np.float32, 10) == VALUES[:10] + 5).all()
    assert (region.read(np.float32, 1014, 40) == VALUES[10:]).all()


def test_several_tensors_in_several_regions(http: Http) -> None:
    a, b = np.arange(16, dtype=np.int32), np.full(16, 7, np.int32)
    with SharedObject(128) as inputs, SharedObject(128) as outputs:
        inputs.write(a)
        inputs.write(b, 64)
        http.register("in", inputs.key, 128).ok()
        http.register("out", outputs.key, 128).ok()
        request = {
            "inputs": [
                shm_input("INPUT0", "INT32", [1, 16], "in", 64),
                shm_input("INPUT1", "INT32", [1, 16], "in", 64, 64),
            ],
            "outputs": [
                {"name": "OUTPUT0", "parameters": in_region("out", 64)},
                {"name": "OUTPUT1", "parameters": in_region("out", 64, 64)},
            ],
        }
        http.infer("simple", request).ok()
        assert (outputs.read(np.int32, 16) == a + b).all()
        assert (outputs.read(np.int32, 16, 64) == a - b).all()


def test_bytes_in_regions(http: Http) -> None:
    words = [b"one", b"", b"three\0"]
    raw = join_bytes(words)
    with SharedObject(4096) as shared_object:
        shared_object.write(raw)
        http.register("r", shared_object.key, 4096).ok()
        request = {
            "inputs": [shm_input("INPUT0", "BYTES", [1, 3], "r", len(raw))],
            "outputs": [{"name": "OUTPUT0", "parameters": in_region("r", 1024, 2048)}],
        }
        http.infer("text", request).ok()
        assert split_bytes(shared_object.read(np.uint8, len(raw), 2048).tobytes()) == words


@pytest.mark.parametrize("offset", [0, PAGE, 1, 8, 4095, 3 * PAGE + 4])
def test_registered_offset(http: Http, offset: int) -> None:
    """Any offset is allowed, aligned to pages or not. It is added only once."""
    with SharedObject(8 * PAGE) as shared:
        shared.write(VALUES[:64], offset)
        http.register("r", shared.key, 1024, offset).ok()
        assert http.infer("identity", region_request("r", 256, output_offset=512)).status == 200
        assert (shared.read(np.uint8, 256, offset + 512).view(np.float32) == VALUES[:64]).all()


def test_the_last_page_of_a_large_object(http: Http) -> None:
    with SharedObject(1024 * PAGE) as shared_object:
        shared_object.write(VALUES, 1023 * PAGE)
        http.register("r", shared_object.key, PAGE, 1023 * PAGE).ok()
        request = {"inputs": [shm_input("INPUT0", "FP32", [1024], "r", PAGE)]}
        assert (http.infer("identity", request).tensors()["OUTPUT0"] == VALUES).all()


@pytest.mark.parametrize(
    ("region_name", "offset", "size", "status", "error"),
    [
        ("x", 0, 64, 404, "Unable to find shared memory region: 'x'"),
        ("r", 2 * SIZE, 64, 400, "Invalid offset for shared memory region: 'r'"),
        ("r", 2 * SIZE - 32, 64, 400, "Invalid offset + byte size for shared memory region: 'r'"),
        ("r", 0, 2 * SIZE + 64, 400, "Invalid offset + byte size for shared memory region: 'r'"),
        ("r", 2**64 - 32, 64, 400, "Invalid offset for shared memory region: 'r'"),
        ("r", 2**63, 64, 400, "region: 'r'"),
    ],
)
def test_outside_of_a_region(
    http: Http,
    region: SharedObject,
    region_name: str,
    offset: int,
    size: int,
    status: int,
    error: str,
) -> None:
    http.register("r", region.key, 2 * SIZE).ok()
    tensor = shm_input("INPUT0", "FP32", [size // 4], region_name, size, offset)
    reply = http.infer("identity", {"inputs": [tensor]})
    assert error in reply.error
    assert reply.status == status
    outputs = [{"name": "OUTPUT0", "parameters": in_region(region_name, size, offset)}]
    reply = http.infer(
        "identity", {"inputs": [json_input("INPUT0", VALUES[:16])], "outputs": outputs}
    )
    assert error in reply.error
    assert reply.status == status
    assert http.infer("identity", region_request("r", SIZE)).status == 200


def test_a_byte_size_that_differs_from_the_shape(http: Http, region: SharedObject) -> None:
    http.register("r", region.key, 2 * SIZE).ok()
    for size in (SIZE - 4, SIZE + 4, 0):
        reply = http.infer("identity", {"inputs": [shm_input("INPUT0", "FP32", [1024], "r", size)]})
        assert reply.status == 400 and "INPUT0" in reply.error


def test_an_output_larger_than_its_range(http: Http, region: SharedObject) -> None:
    http.register("r", region.key, 2 * SIZE).ok()
    request = {
        "inputs": [shm_input("INPUT0", "FP32", [1024], "r", SIZE)],
        "outputs": [{"name": "OUTPUT0", "parameters": in_region("r", SIZE - 4, SIZE)}],
    }
    reply = http.infer("identity", request)
    assert reply.status == 500
    assert reply.error.endswith(
        f"shared memory size specified with the request for output 'OUTPUT0' ({SIZE - 4} bytes) "
        f"should be at least {SIZE} bytes to hold the results"
    )
    assert (region.read(np.float32, 1024, SIZE) == 0).all()
    assert http.infer("identity", region_request("r", SIZE)).status == 200


def test_an_output_of_known_size_is_refused_before_execution(
    server: Server, http: Http, region: SharedObject
) -> None:
    executed = server.metric("nv_inference_exec_count", model="simple")
    http.register("r", region.key, 2 * SIZE).ok()
    row = np.zeros((1, 16), np.int32)
    request = {
        "inputs": [json_input("INPUT0", row), json_input("INPUT1", row)],
        "outputs": [{"name": "OUTPUT0", "parameters": in_region("r", 60)}],
    }
    assert "should be at least 64 bytes" in http.infer("simple", request).error
    assert server.metric("nv_inference_exec_count", model="simple") == executed


@pytest.mark.parametrize(
    ("key", "status", "error"),
    [
        ("/nothing-here", 500, "Unable to open shared memory region: '/nothing-here'"),
        ("/nothing-here", 500, "another container must share its shared memory mount"),
        ("", 400, "cannot register shared memory region 'r' - invalid shm key ''"),
        ("/", 400, "cannot register shared memory region 'r' - invalid shm key '/'"),
        ("//", 400, "cannot register shared memory region 'r' - invalid shm key '//'"),
        ("/.", 400, "invalid shm key"),
        ("/..", 400, "invalid shm key"),
        ("/a/b", 400, "invalid shm key"),
        ("/../etc/passwd", 400, "invalid shm key"),
        ("/x\0y", 400, "invalid shm key"),
        ("/é", 400, "invalid shm key"),
        ("/a b", 400, "invalid shm key"),
        ("/a\n", 400, "invalid shm key"),
        ("/" + "k" * 251, 400, "invalid shm key"),
        ("/" + "k" * 300, 400, "invalid shm key"),
        (
            "/triton_python_backend_shm_region_1",
            400,
            "cannot register shared memory region 'r' with key "
            "'/triton_python_backend_shm_region_1' as the key contains the "
            "reserved prefix 'triton_python_backend_shm_region_'",
        ),
        ("/sem.x", 400, "reserved prefix"),
        ("/nccl-x", 400, "reserved prefix"),
    ],
)
def test_keys_that_are_refused(http: Http, key: str, status: int, error: str) -> None:
    reply = http.register("r", key, 64)
    assert error in reply.error
    assert reply.status == status
    assert http.regions().json() == []


def test_the_same_again_is_fine_and_another_is_not(http: Http, region: SharedObject) -> None:
    http.register("r", region.key, SIZE).ok()
    http.register("r", region.key, SIZE).ok()
    for size, offset in ((2 * SIZE, 0), (SIZE, SIZE)):
        reply = http.register("r", region.key, size, offset)
        assert (reply.status, reply.error) == (400, "shared memory region 'r' already in manager")
    with SharedObject(SIZE) as other_object:
        reply = http.register("r", other_object.key, SIZE)
        assert (reply.status, reply.error) == (400, "shared memory region 'r' already in manager")
    assert len(http.regions().json()) == 1


def test_a_client_that_died_and_starts_again(http: Http, region: SharedObject) -> None:
    """The object is new, with the same name."""
    http.register("r", region.key, 2 * SIZE).ok()
    region.unlink()
    region.create()
    region.write(VALUES + 1)
    http.register("r", region.key, 2 * SIZE).ok()
    assert http.infer("identity", region_request("r", SIZE)).status == 200
    assert (region.read(np.float32, 1024, SIZE) == VALUES + 1).all()


def test_two_names_for_one_object(http: Http, region: SharedObject) -> None:
    http.register("a", region.key, SIZE).ok()
    http.register("b", region.key, SIZE, SIZE).ok()
    request = {
        "inputs": [shm_input("INPUT0", "FP32", [1024], "a", SIZE)],
        "outputs": [{"name": "OUTPUT0", "parameters": in_region("b", SIZE)}],
    }
    http.infer("identity", request).ok()
    assert (region.read(np.float32, 1024, SIZE) == VALUES).all()
    assert [listed["name"] for listed in http.regions().json()] == ["a", "b"]


def test_names_with_odd_characters(http: Http, region: SharedObject) -> None:
    http.register("a%20b.c-%C3%BC", region.key, SIZE).ok()
    (listed,) = http.regions().json()
    assert listed["name"] == "a b.c-ü"
    http.unregister("a%20b.c-%C3%BC").ok()


def test_failed_registrations_leak_none(server: Server, http: Http, region: SharedObject) -> None:
    http.register("r", region.key, 2 * SIZE + 1)
    descriptors_before = descriptors(server.pid)
    for _ in range(50):
        assert http.register("r", region.key, 2 * SIZE + 1).status == 400
        assert http.register("r", "/nothing-here", 1).status == 500
        assert http.register("r", region.key, SIZE).status == 200
        assert http.unregister("r").status == 200
    assert descriptors(server.pid) == descriptors_before


def test_cuda_memory_is_refused(http: Http) -> None:
    body = {"raw_handle": {"b64": "A" * 86 + "=="}, "device_id": 0, "byte_size": 64}
    reply = http.post("/v2/cudasharedmemory/region/c/register", body)
    assert reply.status == 400
    assert reply.error == (
        "failed to register shared memory region: invalid args (failed to register CUDA shared "
        "memory region: 'c', GPUs not supported)"
    )
    assert http.get("/v2/cudasharedmemory/status").ok().json() == []
    assert http.post("/v2/cudasharedmemory/unregister").status == 200


def test_tritonclient(server: Server) -> None:
    """Uses the same calls as the client library's examples."""
    a, b = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
    key = f"test-{os.getpid()}-triton"
    with triton.InferenceServerClient(server.url) as client:
        client.unregister_system_shared_memory()
        handle = shm.create_shared_memory_region("data", "/" + key, 256)
        try:
            shm.set_shared_memory_region(handle, [a, b])
            client.register_system_shared_memory("data", "/" + key, 256)
            assert client.get_system_shared_memory_status("data")[0]["byte_size"] == 256
            inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
            inputs[0].set_shared_memory("data", 64)
            inputs[1].set_shared_memory("data", 64, offset=64)
            outputs = [triton.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
            outputs[0].set_shared_memory("data", 64, offset=128)
            outputs[1].set_shared_memory("data", 64, offset=192)
            result = client.infer("simple", inputs, outputs=outputs)
            for name, offset, expected in (("OUTPUT0", 128, a + b), ("OUTPUT1", 192, a - b)):
                assert result.get_output(name)["shape"] == [1, 16]
                contents_as_numpy = shm.get_contents_as_numpy(handle, np.int32, [1, 16], offset)
                assert (contents_as_numpy == expected).all()
                del contents_as_numpy
            client.unregister_system_shared_memory("data")
            assert client.get_system_shared_memory_status() == []
        finally:
            shm.destroy_shared_memory_region(handle)
