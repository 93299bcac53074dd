"""shmserve.client when something ends: a request, a client, a scheduler, a model, the server."""

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import shmserve.client
from shmserve.client import aio
from shmserve.client.request.prepare import PLAIN
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES
from tests.support import repositories
from tests.support.servers import Server, Start, python_program, run_python
from tests.support.waiting import until

A = np.arange(16, dtype=np.int32).reshape(1, 16)
ROW = 8192
EXPLICIT_FLAGS = ("--model-control-mode=explicit", "--load-model=*")


@pytest.fixture(scope="module")
def gated_server(models: Path, start: Start) -> Server:
    """A server whose model "gated" waits at a gate, and whose "rows" does not."""
    repositories.add(models, "gated", "simple")
    repositories.add_identity(models, "rows", "FP32", [ROW], max_batch_size=8)
    repositories.add_identity(models, "large", "FP32", [ROW], source="gated")
    return start(models, *EXPLICIT_FLAGS)


@pytest.fixture(autouse=True)
def check_settled(gated_server: Server) -> Iterator[None]:
    """No test leaves an execution to the next one, which would take it for its own."""
    yield
    until("nothing is executed", lambda: not gated_server.metric("shmserve_executing_requests"))
    assert gated_server.gate.is_idle(0.001)


@pytest.fixture
def client(gated_server: Server) -> Iterator[shmserve.client.Server]:
    with shmserve.client.connect(gated_server.run_dir) as native_client:
        yield native_client


def _value(server: shmserve.client.Server, number: int) -> dict[str, np.ndarray]:
    spec = server._session.connection().models.resolve("gated", "").signature
    (tensor,) = spec.inputs.values()
    dtype = STORAGE_DTYPES[tensor.datatype]
    shape = [max(dim, 1) for dim in tensor.dims]
    return {"INPUT0": np.full([1, *shape] if spec.max_batch_size else shape, number, dtype)}


def hold_two(
    server: Server, client: shmserve.client.Server
) -> tuple[concurrent.futures.Future[Any], Any, concurrent.futures.Future[Any]]:
    """Send two requests; return the first, its visit of the gate, and the second, which waits."""
    blocking_future = client.infer_async("gated", _value(client, 1))
    visit = server.gate.next()
    waiting = client.infer_async("gated", _value(client, 2))
    server.wait_pending("gated", 1)
    return blocking_future, visit, waiting


def run_into(outcome: concurrent.futures.Future[Any], call: Callable[[], Any]) -> None:
    """Set the result of a call, or its error."""
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)


def test_a_timeout_cancels_a_request(gated_server: Server, client: shmserve.client.Server) -> None:
    blocking_future = client.infer_async("gated", _value(client, 1))
    visit = gated_server.gate.next()
    with pytest.raises(TimeoutError) as error_info:
        client.infer("gated", _value(client, 2), timeout=0.05)
    assert isinstance(error_info.value, shmserve.client.TimedOut)
    gated_server.wait_pending("gated", 0)
    visit.release()
    assert blocking_future.result(20)["OUTPUT0"].flat[0] == 1
    assert gated_server.gate.is_idle()


def test_a_future_without_answer_ends(gated_server: Server, client: shmserve.client.Server) -> None:
    scheduler = gated_server.find_one("scheduler simple")
    assert client.infer("simple", INPUT0=A, INPUT1=A)
    scheduler.suspend()
    try:
        late_future = client.infer_async("simple", INPUT0=A, INPUT1=A, timeout=0.05)
        patient_future = client.infer_async("simple", INPUT0=A, INPUT1=A, timeout=60)
        with pytest.raises(shmserve.client.TimedOut):
            late_future.result(20)
    finally:
        scheduler.resume()
    assert (patient_future.result(20)["OUTPUT0"] == 2 * A).all()


_WITHOUT_DESCRIPTORS = """
import os, resource, sys, threading
import numpy as np
import shmserve.client

def report(call):
    try:
        print(call())
    except shmserve.client.ShmserveError as error:
        print(type(error).__name__)

with shmserve.client.connect(sys.argv[1]) as client:
    a = np.ones((1, 16), np.int32)
    client.infer_async("simple", INPUT0=a, INPUT1=a).result()
    used = len(os.listdir("/proc/self/fd")) - 1  # without that of the listing
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
    infer = lambda: client.infer("simple", INPUT0=a, INPUT1=a)["OUTPUT0"][0, 0]
    thread = threading.Thread(target=report, args=(infer,))
    thread.start()
    thread.join()
    report(lambda: shmserve.client.connect(sys.argv[1]))
"""


def test_a_program_that_has_no_descriptor_left(gated_server: Server) -> None:
    """Requests use the thread's open connection; a call that needs a descriptor raises an error."""
    run = run_python("-c", _WITHOUT_DESCRIPTORS, gated_server.run_dir)
    assert (run.stdout.split(), run.stderr) == (["2", "Unavailable"], "")


def test_a_cancelled_future_is_cancelled_at_the_server(
    gated_server: Server, client: shmserve.client.Server
) -> None:
    blocking_future, visit, waiting = hold_two(gated_server, client)
    assert waiting.cancel()
    gated_server.wait_pending("gated", 0)
    visit.release()
    assert blocking_future.result(20)
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result()


def test_a_thread_that_waits_for_many_futures_detects_a_cancelled_future(
    gated_server: Server, client: shmserve.client.Server
) -> None:
    blocking_future, visit, waiting = hold_two(gated_server, client)
    threading.Timer(0.1, waiting.cancel).start()
    assert concurrent.futures.wait([waiting], 10).done == {waiting}
    assert list(concurrent.futures.as_completed([waiting], 10)) == [waiting]
    gated_server.wait_pending("gated", 0)  # the server detects the exit later than the threads
    visit.release()
    assert blocking_future.result(20)


def test_memory_of_a_thread_is_kept(gated_server: Server, client: shmserve.client.Server) -> None:
    """Holds also when other threads send the same requests."""
    rows = [np.full(ROW, number, np.float32) for number in range(6)]
    results = client.map("large", [{"INPUT0": x} for x in rows[:3]], in_flight=3)
    first_results: list[Any] = []
    futures: list[Any] = []
    first_thread = threading.Thread(target=lambda: first_results.append(next(results)))
    first_thread.start()
    gated_server.gate.next().release()
    first_thread.join()
    visit = gated_server.gate.next()
    gated_server.wait_pending("large", 1)

    def run_in_other_thread() -> None:
        assert client.infer("rows", INPUT0=rows[0][None])
        futures.extend(client.infer_async("large", INPUT0=x) for x in rows[3:])

    waiting_thread = threading.Thread(target=run_in_other_thread)
    waiting_thread.start()
    waiting_thread.join()
    gated_server.wait_pending("large", 4)
    visit.release()
    for _ in range(4):
        gated_server.gate.next().release()
    outputs = [*first_results, *results, *(future.result(20) for future in futures)]
    assert [set(result["OUTPUT0"]) for result in outputs] == [{n} for n in range(6)]


async def test_a_cancelled_task_is_cancelled_at_the_server(gated_server: Server) -> None:
    async with aio.connect(gated_server.run_dir) as server:
        with shmserve.client.connect(gated_server.run_dir) as other_client:
            input_values = _value(other_client, 1)
        blocking_task = asyncio.create_task(server.infer("gated", input_values))
        visit = await asyncio.to_thread(gated_server.gate.next)
        waiting = asyncio.create_task(server.infer("gated", input_values))
        await asyncio.to_thread(gated_server.wait_pending, "gated", 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(gated_server.wait_pending, "gated", 0)
        visit.release()
        assert (await blocking_task)["OUTPUT0"].flat[0] == 1


@pytest.mark.parametrize("as_input", [np.asarray, torch.from_numpy], ids=["array", "tensor"])
def test_memory_of_requests_in_flight_is_kept(
    gated_server: Server, client: shmserve.client.Server, as_input: Callable[..., Any]
) -> None:
    """This includes a request whose program deletes its only, plain view of the memory."""
    x = np.arange(ROW, dtype=np.float32)
    blocking_future = client.infer_async("large", INPUT0=x)
    visit = gated_server.gate.next()
    region = client.allocate({"INPUT0": ((2, ROW), "FP32")})
    region["INPUT0"][1] = x
    answer = client.infer("rows", INPUT0=np.stack([x, -x]))["OUTPUT0"]
    calls = [client.infer_async("large", INPUT0=as_input(a[1])) for a in (region["INPUT0"], answer)]
    region.release()
    del region, answer
    gated_server.wait_pending("large", 2)
    for _ in range(3):
        client.infer("rows", INPUT0=np.zeros((2, ROW), np.float32))
    visit.release()
    gated_server.gate.next().release()
    gated_server.gate.next().release()
    assert blocking_future.result(20)
    for future, expected in zip(calls, (x, -x), strict=True):
        assert (np.asarray(future.result(20)["OUTPUT0"]) == expected).all()


CRASHING_PROGRAM = """
import sys, numpy as np, shmserve.client
client = shmserve.client.connect(sys.argv[1])
region = client.allocate({"INPUT0": ((1, 8192), "FP32")})
client.infer("rows", region)
for _ in range(4):
    client.infer_async("large", INPUT0=np.ones(8192, np.float32))
print("in flight", flush=True)
sys.stdin.read()
"""


def _count_mapped_memories(process: psutil.Process) -> int:
    """Return the number of clients' memories that a process maps or holds."""
    mapped_count = Path(f"/proc/{process.pid}/maps").read_text().count("memfd:shmserve-client")
    for name in os.listdir(f"/proc/{process.pid}/fd"):
        try:
            mapped_count += "memfd:shmserve-client" in os.readlink(f"/proc/{process.pid}/fd/{name}")
        except OSError:
            continue
    return mapped_count


def test_a_killed_client_leaks_none(gated_server: Server, client: shmserve.client.Server) -> None:
    with python_program(CRASHING_PROGRAM, gated_server.run_dir) as run:
        assert run.stdout and run.stdout.readline() == "in flight\n"
        visit = gated_server.gate.next()
        gated_server.wait_pending("large", 3)
        processes = [p for p in gated_server.tree() if not p.cmdline()[0].endswith("zygote")]
        assert sum(map(_count_mapped_memories, processes)) > 1
    gated_server.wait_pending("large", 0)
    visit.release()
    until("all of it is forgotten", lambda: not sum(map(_count_mapped_memories, processes)))
    assert client.infer("simple", INPUT0=A, INPUT1=A)


FORKING_PROGRAM = """
import os, signal, sys, shmserve.client
client = shmserve.client.connect(sys.argv[1])
region = client.allocate({"INPUT0": ((1, 8192), "FP32"), "OUTPUT0": ((1, 8192), "FP32")})
client.infer("rows", region)
child = os.fork()
if not child:
    signal.pause()
print(child, flush=True)
sys.stdin.read()
"""


def test_a_child_does_not_keep_the_memory_of_a_killed_client(gated_server: Server) -> None:
    with python_program(FORKING_PROGRAM, gated_server.run_dir) as program:
        assert program.stdout
        child = psutil.Process(int(program.stdout.readline()))
        try:
            processes = [p for p in gated_server.tree() if not p.cmdline()[0].endswith("zygote")]
            assert sum(map(_count_mapped_memories, processes)) > 0
            program.kill()
            until("all of it is forgotten", lambda: not sum(map(_count_mapped_memories, processes)))
            assert child.is_running()
        finally:
            child.kill()


def test_a_forked_child_does_not_use_its_parents_connection(
    gated_server: Server, client: shmserve.client.Server
) -> None:
    x = np.ones((1, ROW), np.float32)
    region = client.allocate({"INPUT0": ((1, ROW), "FP32")})
    region["INPUT0"][:] = x
    assert client.infer("rows", region)
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            signal.alarm(20)
            with contextlib.suppress(shmserve.client.InvalidArgument):
                client.infer("rows", INPUT0=x)
                os._exit(2)
            region.release()
            client.close()
            with shmserve.client.connect(gated_server.run_dir) as child_client:
                assert (child_client.infer("rows", INPUT0=x)["OUTPUT0"] == x).all()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    connection = client._session.connection()
    for inputs in ({"INPUT0": x}, region):
        assert (client.infer("rows", inputs)["OUTPUT0"] == x).all()
    assert client._session.connection() is connection and connection.alive


async def test_a_forked_child_does_not_close_its_parents_event_loop(gated_server: Server) -> None:
    async with aio.connect(gated_server.run_dir) as server:
        assert await server.infer("simple", INPUT0=A, INPUT1=A)
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                await server.close()
                code = 0
            os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await server.infer("simple", INPUT0=A, INPUT1=A, timeout=10)


def test_every_future_ends_when_the_client_does(gated_server: Server) -> None:
    client = shmserve.client.connect(gated_server.run_dir)
    futures = [client.infer_async("simple", INPUT0=A, INPUT1=A) for _ in range(50)]
    client.close()
    for future in futures:
        with contextlib.suppress(shmserve.client.Disconnected):
            assert future.result(20)


def test_a_client_that_is_never_closed(gated_server: Server) -> None:
    x = np.ones((1, ROW), np.float32)

    async def talk() -> np.ndarray:
        server = await aio.connect(gated_server.run_dir)
        for turn_count in range(5):  # the connection is made in a thread, and may come too late
            task = asyncio.ensure_future(server._get_channel())
            connecting = asyncio.ensure_future(aio.connect(gated_server.run_dir)._connect())
            for _ in range(turn_count):
                await asyncio.sleep(0)
            connecting.cancel()
            await task
        return (await server.infer("rows", INPUT0=x))["OUTPUT0"]

    def state() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        state_before = state()
        results = [
            shmserve.client.connect(gated_server.run_dir).infer("rows", INPUT0=x) for _ in range(3)
        ]
        results.append(
            shmserve.client.connect(gated_server.run_dir).infer_async("rows", INPUT0=x).result(20)
        )
        assert all((result["OUTPUT0"] == x).all() for result in results)
        assert (asyncio.run(talk()) == x).all()
        del results  # the results keep their memory
        until("nothing is left", lambda: state() == state_before)
    with pytest.warns(ResourceWarning, match="a client was not closed"):
        shmserve.client.connect(gated_server.run_dir)


def test_memory_is_taken_back_by_an_interrupted_connection(client: shmserve.client.Server) -> None:
    """The connection's thread waits for no lock that the interrupted thread holds."""
    memories = client._session.memories
    region = client.allocate({"INPUT0": ((ROW,), "FP32")})
    with client._session.connection()._lock:
        del region
        until("it is taken back", lambda: not memories.recycled and not memories._segments)


def test_a_callback_may_close_the_client(gated_server: Server) -> None:
    client = shmserve.client.connect(gated_server.run_dir)
    thread = client._session.connection()._thread
    blocked = client.infer_async("gated", _value(client, 1))
    visit = gated_server.gate.next()
    waiting = [concurrent.futures.Future[object]() for _ in range(2)]
    infer = partial(client.infer, "gated", _value(client, 2))
    threads = [threading.Thread(target=run_into, args=(outcome, infer)) for outcome in waiting]
    for busy_thread in threads:
        busy_thread.start()
    gated_server.wait_pending("gated", 2)
    client.infer_async("simple", INPUT0=A, INPUT1=A).add_done_callback(lambda _: client.close())
    for error in (blocked.exception(20), *(outcome.exception(20) for outcome in waiting)):
        assert isinstance(error, shmserve.client.Disconnected)
    thread.join()
    for busy_thread in threads:
        busy_thread.join()
    gated_server.wait_pending("gated", 0)
    visit.release()
    with pytest.raises(shmserve.client.Disconnected, match="closed"):
        client.infer("simple", INPUT0=A, INPUT1=A)


@pytest.mark.parametrize("ending", ["the client", "the server"])
def test_requests_fail_when_the_connection_ends_first(gated_server: Server, ending: str) -> None:
    """Threads may see their schedulers' links end before the listener's ends."""
    client = shmserve.client.connect(gated_server.run_dir)
    connection = client._session.connection()
    outcome = concurrent.futures.Future[object]()
    at_work, may_continue = threading.Event(), threading.Event()

    def block_connection_thread(_: object) -> None:
        at_work.set()
        may_continue.wait(60)

    infer = partial(client.infer, "gated", _value(client, 1))
    waiting = threading.Thread(target=run_into, args=(outcome, infer))
    waiting.start()
    visit = gated_server.gate.next()
    try:
        connection.call(block_connection_thread)
        assert at_work.wait(10)
        if ending == "the server":
            connection._link._socket.send(b"what is no message")
        closing = threading.Thread(target=client.close)
        with connection._lock:  # no thread is woken
            if ending == "the client":
                closing.start()
            error = outcome.exception(20)
        may_continue.set()
        if ending == "the server":
            closing.start()
        closing.join()
    finally:
        visit.release()
    waiting.join()
    assert isinstance(error, shmserve.client.Disconnected)


def test_a_callback_may_send_requests_and_allocate_memory(client: shmserve.client.Server) -> None:
    """The callback runs in the thread that reads responses, while other threads allocate memory."""
    x = np.ones((4, ROW), np.float32)
    second: concurrent.futures.Future[np.ndarray] = concurrent.futures.Future()

    def chain(first_future: concurrent.futures.Future[shmserve.client.Result]) -> None:
        try:
            with client.allocate({"INPUT0": ((1, ROW), "FP32")}):
                chained = client.infer_async("rows", INPUT0=first_future.result()["OUTPUT0"][:2])
            chained.add_done_callback(lambda f: second.set_result(f.result()["OUTPUT0"]))
        except BaseException as error:
            second.set_exception(error)

    client.infer_async("rows", INPUT0=x).add_done_callback(chain)
    for _ in range(20):
        client.allocate({"INPUT0": ((1, ROW), "FP32")}).release()
    assert (second.result(20) == x[:2]).all()


@pytest.mark.parametrize(
    "send_request",
    [
        lambda client: client.infer("simple", INPUT0=A, INPUT1=A),
        lambda client: next(client.map("simple", [{"INPUT0": A, "INPUT1": A}])),
        lambda client: next(client.stream("simple", INPUT0=A, INPUT1=A)),
    ],
    ids=["infer", "map", "stream"],
)
def test_a_call_from_a_callback_without_a_free_channel_is_refused(
    gated_server: Server,
    client: shmserve.client.Server,
    monkeypatch: pytest.MonkeyPatch,
    send_request: Callable[[shmserve.client.Server], Any],
) -> None:
    """The call would wait for its own thread, which is the one that reads the responses."""
    monkeypatch.setattr("shmserve.client.sync._MAX_CHANNELS", 1)
    send_request(client)  # takes the only channel
    outcome: concurrent.futures.Future[object] = concurrent.futures.Future()
    # The callback of a finished request runs in this thread, which may wait.
    client.infer_async("gated", _value(client, 1)).add_done_callback(
        lambda _: run_into(outcome, partial(send_request, client))
    )
    gated_server.gate.next().release()
    error = outcome.exception(10)
    assert isinstance(error, shmserve.client.Unavailable) and "infer_async" in str(error)
    assert client.infer("simple", INPUT0=A, INPUT1=A)["OUTPUT0"].shape == (1, 16)


def test_a_stream_of_another_thread_is_not_waited_for_in_a_callback(
    gated_server: Server, client: shmserve.client.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmserve.client.sync._MAX_CHANNELS", 0)
    gated_future = client.infer_async("gated", _value(client, 0))
    visit = gated_server.gate.next()
    stream = client.stream("gated", _value(client, 1))
    outcome: concurrent.futures.Future[object] = concurrent.futures.Future()
    gated_future.add_done_callback(lambda _: run_into(outcome, partial(next, stream)))
    visit.release()
    assert isinstance(outcome.exception(10), shmserve.client.Unavailable)
    gated_server.gate.next().release()
    assert next(stream)["OUTPUT0"].flat[0] == 1


def test_a_scheduler_that_is_killed_costs_no_answer(
    gated_server: Server, client: shmserve.client.Server
) -> None:
    futures = [client.infer_async("gated", _value(client, n)) for n in range(3)]
    gated_server.gate.next().release()  # its answer is in transit, or lost with the scheduler
    gated_server.find_one("scheduler gated").send_signal(signal.SIGKILL)
    while not all(future.done() for future in futures):
        try:
            gated_server.gate.next(0.2).release()
        except TimeoutError:
            continue
    assert [f.result(20)["OUTPUT0"].flat[0] for f in futures] == [0, 1, 2]
    until("the new one is ready", lambda: gated_server.answers("/v2/health/ready"))


def test_a_request_with_output_over_its_input_is_not_retried(
    gated_server: Server, client: shmserve.client.Server
) -> None:
    with client.allocate({"INPUT0": ((1, 4), "INT32")}) as region:
        x = region["INPUT0"]
        future = client.infer_async("gated", {"INPUT0": x}, outputs={"OUTPUT0": x})
        running_visit = gated_server.gate.next()
        gated_server.find_one("scheduler gated").send_signal(signal.SIGKILL)
        error = future.exception(20)
        assert isinstance(error, shmserve.client.Unavailable)
        assert "may have changed" in str(error)
        running_visit.release()
        until("the new one is ready", lambda: gated_server.answers("/v2/health/ready"))


def test_a_restarted_server_is_found_again(repository: Path) -> None:
    repositories.add_identity(repository, "rows", "FP32", [ROW], max_batch_size=8)
    first_server = Server([repository]).wait_ready()
    run_dir = first_server.run_dir
    with shmserve.client.connect(run_dir) as client:
        region = client.allocate({"INPUT0": ((1, ROW), "FP32"), "OUTPUT0": ((1, ROW), "FP32")})
        region["INPUT0"][:] = 3
        kept_view = client.infer("rows", INPUT0=np.ones((1, ROW), np.float32))["OUTPUT0"]
        assert client.infer("rows", region)["OUTPUT0"][0, 0] == 3
        late_request = client._session.pack(
            client._session.connection(), ("rows", region, None, "", PLAIN, {})
        )
        folder = first_server.folder
        members = first_server.tree()
        first_server.process.terminate()
        assert first_server.wait_exit(30) == 0
        until("the client has noticed", lambda: not client._session._connection.alive)
        with pytest.raises(shmserve.client.Disconnected):
            client.infer("rows", region)
        first_server.assert_exited(members)
        second_server = Server([repository], run_dir=run_dir).wait_ready()
        try:
            region["INPUT0"][:] = 4
            share_again = client._session.memories.share_again

            def share_without_connection(share: Any) -> None:
                assert not client._session._connection.alive
                share_again(share)

            client._session.memories.share_again = share_without_connection  # type: ignore[method-assign]
            assert client.infer("rows", region)["OUTPUT0"][0, 0] == 4
            assert (kept_view == 1).all()
            with pytest.raises(shmserve.client.Disconnected, match="before the response"):
                client._get_thread_channel().submit(
                    late_request
                )  # it was made for the server before
            assert client.infer_async("rows", region).result(20)["OUTPUT0"][0, 0] == 4
            region.release()
        finally:
            second_server.stop()
            first_server.discard()
    assert not folder.exists()


def test_a_program_pays_for_neither_torch_nor_aiohttp(gated_server: Server) -> None:
    program = (
        "import sys, numpy as np, shmserve.client, shmserve.client.aio\n"
        f"with shmserve.client.connect({str(gated_server.run_dir)!r}) as client:\n"
        "    client.infer('rows', INPUT0=np.ones((1, 8192), np.float32))\n"
        "    client.infer_async('rows', INPUT0=np.ones((1, 8192), np.float32)).result()\n"
        "print(*sys.modules)"
    )
    completed = run_python("-X", "dev", "-W", "error", "-c", program, check=True)
    assert not {"torch", "aiohttp", "uvloop", "zmq", "google.protobuf"} & set(
        completed.stdout.split()
    )
    assert not completed.stderr
