"""The interface to cuda-bindings: its names and types are real, the driver is a fake."""

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as real
import pytest

from shmserve.errors import Unavailable
from shmserve.ipc.memory.cuda_ipc import CudaError, Driver

RAW_HANDLE = bytes(range(64))
SUCCESS = real.CUresult.CUDA_SUCCESS


class Recorder:
    """A fake of cuda-bindings' `driver`, with its types, that records calls."""

    CUresult = real.CUresult
    CUipcMemHandle = real.CUipcMemHandle
    CUdeviceptr = real.CUdeviceptr

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, tuple[Any, ...]] = {
            "cuDeviceGet": (SUCCESS, "device"),
            "cuDevicePrimaryCtxRetain": (SUCCESS, "context"),
            "cuCtxPopCurrent": (SUCCESS, "context"),
            "cuIpcOpenMemHandle": (SUCCESS, real.CUdeviceptr(0x7000)),
            "cuMemGetAddressRange": (SUCCESS, real.CUdeviceptr(0x6000), 4096),
            "cuDeviceGetUuid": (SUCCESS, SimpleNamespace(bytes=bytes(16))),
        }

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if name.startswith("__"):
            raise AttributeError(name)
        assert callable(getattr(real, name)), "cuda-bindings has no such function"

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return self.results.get(name, (SUCCESS,))

        return call

    def names(self) -> list[str]:
        """Return the names of the functions called since the last call."""
        called_names = [call[0] for call in self.calls]
        self.calls.clear()
        return called_names


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", recorder)
    return recorder


def test_handles_are_opened_and_closed_in_the_devices_context(module: Recorder) -> None:
    driver = Driver()
    assert module.names() == ["cuInit"]
    assert driver.open(RAW_HANDLE, 1) == 0x7000
    retain_call, push, open_call, pop = module.calls[1:]
    assert module.calls[0] == ("cuDeviceGet", 1)
    assert retain_call == ("cuDevicePrimaryCtxRetain", "device")
    assert push == ("cuCtxPushCurrent", "context")
    assert pop == ("cuCtxPopCurrent",)
    assert ctypes.string_at(open_call[1].getPtr(), 64) == RAW_HANDLE
    assert open_call[2] == real.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    module.names()
    assert driver.extent(0x7000, 1) == (0x6000, 4096)
    assert int(module.calls[1][1]) == 0x7000
    assert module.names() == ["cuCtxPushCurrent", "cuMemGetAddressRange", "cuCtxPopCurrent"]
    driver.close(0x7000, 1)
    assert module.names() == [
        *("cuCtxPushCurrent", "cuCtxSynchronize", "cuIpcCloseMemHandle", "cuCtxPopCurrent")
    ]
    assert driver.uuid(1) == bytes(16)
    driver.synchronize(1)


def test_a_handle_that_the_driver_refuses_is_an_error(module: Recorder) -> None:
    driver = Driver()
    module.results["cuIpcOpenMemHandle"] = (
        real.CUresult.CUDA_ERROR_INVALID_VALUE,
        real.CUdeviceptr(0),
    )
    with pytest.raises(CudaError, match=r"cuIpcOpenMemHandle failed with .*INVALID_VALUE"):
        driver.open(RAW_HANDLE, 0)
    assert module.names()[-1] == "cuCtxPopCurrent"
    module.results["cuInit"] = (real.CUresult.CUDA_ERROR_NO_DEVICE,)
    with pytest.raises(Unavailable, match="needs a GPU, and this host has none"):
        Driver()


def test_a_program_allocates_and_exports(module: Recorder) -> None:
    raw = real.CUipcMemHandle()
    ctypes.memmove(raw.getPtr(), RAW_HANDLE, 64)
    module.results["cuMemAlloc"] = (SUCCESS, real.CUdeviceptr(0x7000))
    module.results["cuIpcGetMemHandle"] = (SUCCESS, raw)
    driver = Driver()
    assert driver.allocate(4096, 0) == 0x7000
    assert module.calls[-4][:2] == ("cuMemAlloc", 4096)
    assert module.calls[-3][0] == "cuMemsetD8" and module.calls[-3][2:] == (0, 4096)
    assert driver.export(0x7000, 0) == RAW_HANDLE
    host = bytearray(16)
    driver.read(0x7000, memoryview(host), 0)
    synchronized, copy_call, _ = module.calls[-3:]
    assert synchronized == ("cuCtxSynchronize",)
    assert copy_call[0] == "cuMemcpyDtoH" and int(copy_call[2]) == 0x7000 and copy_call[3] == 16
    assert copy_call[1] == ctypes.addressof((ctypes.c_char * 16).from_buffer(host))
    module.names()
    driver.write(0x7000, memoryview(b"x" * 16), 0)
    driver.free(0x7000, 0)
    assert [name for name in module.names() if "Ctx" not in name] == ["cuMemcpyHtoD", "cuMemFree"]


def test_host_memory_is_pinned_for_all_devices(module: Recorder) -> None:
    driver = Driver()
    driver.pin(0x8000, 4096, 0)
    portable = real.CU_MEMHOSTREGISTER_PORTABLE
    assert module.calls[-2] == ("cuMemHostRegister", 0x8000, 4096, portable)
    driver.unpin(0x8000, 0)
    assert module.names()[-4:] == [
        *("cuCtxPushCurrent", "cuCtxSynchronize", "cuMemHostUnregister", "cuCtxPopCurrent")
    ]
    already_registered = real.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    module.results["cuMemHostRegister"] = (already_registered,)
    with pytest.raises(CudaError, match="ALREADY_REGISTERED"):
        driver.pin(0x8000, 4096, 0)
