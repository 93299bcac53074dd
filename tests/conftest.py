"""Fixtures of all tests: guards against leaks, and servers' logs in the report of a failure."""

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path

import gevent
import hypothesis
import pytest

# The tests' own helpers are imported as tests.NAME from wherever pytest is started.
if (root := str(Path(__file__).resolve().parent.parent)) not in sys.path:
    sys.path.insert(0, root)

from tests.support import certificates, leaks, servers, tokens, watchdog
from tests.support.request_pool import RequestPool, request_pool
from tests.support.wire.raw_http import Http

# The name of a unix socket has at most 107 bytes. pytest needs 66 of them for the folder of a test.
if len(tempfile.gettempdir()) > 16:
    tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"

# The duration of an example depends on the machine and its other work.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

# A run that is ended by SIGTERM, for example by timeout(1), ends as by Ctrl-C: objects, servers
# and folders are removed. By the default action they would remain.
signal.signal(signal.SIGTERM, signal.default_int_handler)
# Servers inherit an ignored SIGHUP, for example when the run was started by nohup.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

tokens.watch()

_LOG_END = 12_000
# Some tests use select(2), which knows 1,024 descriptors.
_MAX_DESCRIPTORS = 512
_LONGEST_SHOWN = 24
_NEEDS_TORCH = ("No module named 'torch'", "shmserve[torch]")


@functools.cache
def _start_what_stays() -> None:
    """tritonclient's event loop, gRPC's threads, the standard library's tracker, the watchdog."""
    watchdog.start()
    gevent.get_hub().loop  # noqa: B018
    resource_tracker.ensure_running()
    with contextlib.suppress(ImportError):
        import grpc

        with grpc.insecure_channel("127.0.0.1:1") as channel, contextlib.suppress(grpc.RpcError):
            channel.unary_unary("/nobody/answers")(b"", timeout=1)


@functools.cache
def _start_cuda() -> None:
    """A device's descriptors, which the driver opens when they are first needed and then keeps."""
    import torch

    if torch.cuda.is_available():
        from shmserve.ipc.memory.cuda_ipc import Driver

        torch.ones(1, device="cuda").cpu()
        driver = Driver()
        pointer = driver.allocate(1, 0)
        driver.export(pointer, 0)
        driver.free(pointer, 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty model repository that the tests of a module share."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the keys and certificates of a CA, a server and a client."""
    return certificates.make(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def start() -> Iterator[servers.Start]:
    """Start servers that the tests of a module share, ready on return; see `servers.running`."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(servers.running(*args, **options))


@pytest.fixture
def http(server: servers.Server) -> Iterator[Http]:
    with server.http() as connection:
        yield connection


@pytest.fixture
def pool(server: servers.Server) -> Iterator[RequestPool]:
    """Yield a pool of requests to the test's server; all have completed when it ends."""
    with request_pool(server) as pool_of_requests:
        yield pool_of_requests


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder for sockets, whose paths are short, that every user may enter."""
    folder_path = Path(tempfile.mkdtemp(prefix="st-"))
    folder_path.chmod(0o711)
    yield folder_path
    shutil.rmtree(folder_path)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Yield a new folder for sockets, whose paths are short."""
    with tempfile.TemporaryDirectory(prefix="st-") as folder_name:
        yield Path(folder_name)


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test leaves no object, process, descriptor or socket behind."""
    if "unit" in request.path.parts:
        yield
        assert len(os.listdir("/proc/self/fd")) < _MAX_DESCRIPTORS, "some tests leak descriptors"
        return
    _start_what_stays()
    if request.node.get_closest_marker("gpu"):
        _start_cuda()
    snapshot_before = leaks.Snapshot.take()
    yield
    snapshot_before.assert_restored()


@pytest.fixture(autouse=True)
def token_guard() -> Iterator[None]:
    """The code of the server has dropped no memory that it was to hand on, or back."""
    tokens.LOST_TOKENS.clear()
    yield
    assert not tokens.LOST_TOKENS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a CUDA device where there is none."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    if not importlib.util.find_spec("torch") or not import_module("torch").cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device here"))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Long bytes do not show in a test's name."""
    if isinstance(val, bytes) and len(val) > _LONGEST_SHOWN:
        return f"{argname} of {len(val)} bytes"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the logs of the running servers to the report of a failure; skip what needs torch."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.failed:
        for server in servers.RUNNING_SERVERS:
            report.sections.append((f"log of server {server.pid}", server.log()[-_LOG_END:]))
        _skip_without_torch(report, *(text for _, text in report.sections))
    return report  # type: ignore[return-value]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skip a file that imports torch where it is not installed."""
    report: pytest.CollectReport = yield  # type: ignore[assignment]
    if report.failed:
        _skip_without_torch(report)
    return report  # type: ignore[return-value]


def _skip_without_torch(report: pytest.TestReport | pytest.CollectReport, *logs: str) -> None:
    """Turn a failure for want of torch, in the test or in a server, into a skipped test."""
    texts = (report.longreprtext, *logs)
    if importlib.util.find_spec("torch") is None and any(
        hint in text for hint in _NEEDS_TORCH for text in texts
    ):
        report.outcome = "skipped"
        report.longrepr = (report.nodeid, 0, "Skipped: torch is not installed")
