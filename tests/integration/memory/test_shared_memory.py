"""System shared memory: registration, status, inputs and outputs in regions, errors."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm

from tests.support.regions import SharedObject
from tests.support.servers import Server
from tests.support.wire.raw_http import Http, in_region, json_input, region_request, shm_input

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


@pytest.mark.parametrize("offset", [0, PAGE, 1, 8, 4095, 3 * PAGE + 4])
def test_registered_offset(http: Http, offset: int) -> None:
    """Any offset is allowed, aligned to pages or not. It is added only once."""
    with SharedObject(8 * PAGE) as shared:
        shared.write(VALUES[:64], offset)
        http.register("r", shared.key, 1024, offset).ok()
        assert http.infer("identity", region_request("r", 256, output_offset=512)).status == 200
        assert (shared.read(np.uint8, 256, offset + 512).view(np.float32) == VALUES[:64]).all()


def test_a_client_that_died_and_starts_again(http: Http, region: SharedObject) -> None:
    """The object is new, with the same name."""
    http.register("r", region.key, 2 * SIZE).ok()
    region.unlink()
    region.create()
    region.write(VALUES + 1)
    http.register("r", region.key, 2 * SIZE).ok()
    assert http.infer("identity", region_request("r", SIZE)).status == 200
    assert (region.read(np.float32, 1024, SIZE) == VALUES + 1).all()


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
