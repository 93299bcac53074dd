"""shmserve.client with a real server: inputs, outputs, and the memory that contains them."""

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shmserve.client
from shmserve.client import aio
from shmserve.client.connection import ListenerLink
from shmserve.ipc.messages.inference import Finished
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.transport.zmtp import Dealer
from tests.rigs.local_clients import answer, submit
from tests.support import repositories
from tests.support.servers import Server, Start
from tests.support.waiting import until

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.ones((1, 16), np.int32)
ROW = 8192  # elements: 32 KB, which do not travel inside messages


@pytest.fixture(scope="module")
def rows_server(models: Path, start: Start) -> Server:
    """A server of models whose sizes are known beforehand, and of one whose are not."""
    repositories.add(models, "simple", "identity", "text", "echo_request", "types")
    repositories.add_identity(models, "rows", "FP32", [ROW], max_batch_size=8)
    repositories.add_identity(models, "halves", "BF16", [-1])
    return start(models, "--max-queue-size=64")


@pytest.fixture
def client(rows_server: Server) -> Iterator[shmserve.client.Server]:
    with shmserve.client.connect(rows_server.run_dir) as native_client:
        yield native_client


def frames(count: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, ROW), np.float32)


def test_small_tensors_by_keyword_mapping_and_list(client) -> None:
    for result in (
        client.infer("simple", INPUT0=A, INPUT1=B),
        client.infer("simple", {"INPUT0": A, "INPUT1": B}),
        client.infer("simple", INPUT0=A.tolist(), INPUT1=[[1] * 16]),
    ):
        assert set(result) == {"OUTPUT0", "OUTPUT1"}
        assert (result["OUTPUT0"] == A + B).all() and (result["OUTPUT1"] == A - B).all()
        result["OUTPUT0"][:] = 0  # the program's own


def test_only_the_outputs_that_are_asked_for(client) -> None:
    for outputs in (["OUTPUT1"], {"OUTPUT1"}, (name for name in ["OUTPUT1"])):
        assert list(client.infer("simple", INPUT0=A, INPUT1=B, outputs=outputs)) == ["OUTPUT1"]
    for wrong_value in ("OUTPUT1", 1):
        with pytest.raises(shmserve.client.InvalidArgument, match="outputs must be names"):
            client.infer("simple", INPUT0=A, INPUT1=B, outputs=wrong_value)


def test_strings_in_and_out(client) -> None:
    words = np.array([[b"one", b"zwei", b""]], dtype=object)
    output = client.infer("text", INPUT0=words)["OUTPUT0"]
    assert output.dtype == object and (output == words).all()
    many_strings = np.array([[f"{n:05}" for n in range(9000)]])  # more than a message takes
    assert client.infer("text", INPUT0=many_strings)["OUTPUT0"][0, -1] == b"08999"


def test_request_id_and_parameters_arrive(client) -> None:
    signature = client._session.connection().models.resolve("echo_request", "").signature
    (spec,) = signature.inputs.values()
    value = np.zeros([abs(dim) for dim in spec.dims], STORAGE_DTYPES[spec.datatype])
    arrays = {spec.name: value[None] if signature.max_batch_size else value}
    result = client.infer("echo_request", arrays, request_id="7", parameters={"colour": "red"})
    seen_request = json.loads(result["OUTPUT0"].flat[0])
    assert seen_request["id"] == "7" and seen_request["parameters"] == {"colour": "red"}
    assert result.parameters == {"answered": True}


@pytest.mark.parametrize(
    ("error", "text", "model", "inputs"),
    [
        (shmserve.client.NotFound, "unknown model: 'nobody'", "nobody", {"INPUT0": A}),
        (shmserve.client.InvalidArgument, "data-type is 'INT32'", "identity", {"INPUT0": A}),
        (shmserve.client.InvalidArgument, "expected 2 inputs but got 1", "simple", {"INPUT0": A}),
        (shmserve.client.InvalidArgument, "unexpected shape", "simple",
         {"INPUT0": A[:, :3], "INPUT1": B}),
        (shmserve.client.InvalidArgument, "batch-size must be <= 8", "simple",
         {"INPUT0": np.repeat(A, 9, 0), "INPUT1": np.repeat(B, 9, 0)}),
    ],
)  # fmt: skip
def test_errors_are_typed(client, error, text, model, inputs) -> None:
    with pytest.raises(error, match=text) as error_info:
        client.infer(model, inputs)
    assert error_info.value.code in ("NOT_FOUND", "INVALID_ARG")


def test_a_missing_version(client) -> None:
    assert client.infer("simple", INPUT0=A, INPUT1=B, version="1")
    with pytest.raises(shmserve.client.NotFound, match="version 9 is not found"):
        client.infer("simple", INPUT0=A, INPUT1=B, version="9")
    with pytest.raises(shmserve.client.InvalidArgument, match="version must be a string, got 1"):
        client.infer("simple", INPUT0=A, INPUT1=B, version=1)


def test_large_tensors_are_views_of_shared_memory(client) -> None:
    x = frames()
    with client.infer("rows", INPUT0=x) as result:
        y = result["OUTPUT0"]
        assert (y == x).all() and y.sum() == pytest.approx(x.sum(), rel=1e-4)
        own_copy = y.copy()
    assert (own_copy == x).all()
    for use_view in (
        lambda: y[0],
        lambda: y + 1,
        lambda: np.concatenate([y, y]),
        lambda: y.tobytes(),
        lambda: result["OUTPUT0"],
        lambda: dict(result),
        lambda: len(result),
        lambda: np.from_dlpack(y),
    ):
        with pytest.raises(shmserve.client.Released):
            use_view()


def test_large_outputs_of_unknown_size(client, rows_server) -> None:
    x = np.random.default_rng(3).random(100_000).astype(np.float32)
    assert (client.infer("identity", INPUT0=x)["OUTPUT0"] == x).all()


def test_a_region_is_read_and_written_in_place(client) -> None:
    x = frames(4)
    with client.allocate({"INPUT0": ((4, ROW), "FP32"), "OUTPUT0": ((4, ROW), "FP32")}) as region:
        region["INPUT0"][:] = x
        for step in range(3):
            region["INPUT0"][0, 0] = step
            result = client.infer("rows", region)
            assert (
                result["OUTPUT0"].__array_interface__["data"]
                == (region["OUTPUT0"].__array_interface__["data"])
            )
            assert region["OUTPUT0"][0, 0] == step
        assert (region["OUTPUT0"][1:] == x[1:]).all()
        part = client.infer(
            "rows",
            INPUT0=region.view("INPUT0", (2, ROW)),
            outputs={"OUTPUT0": region.view("OUTPUT0", (2, ROW))},
        )
        assert part["OUTPUT0"].shape == (2, ROW)
    with pytest.raises(shmserve.client.Released):
        client.infer("rows", region)
    with pytest.raises(shmserve.client.Released):
        part["OUTPUT0"][0]


@pytest.mark.parametrize("part", [slice(None), slice(1, 2)], ids=["views", "plain views"])
def test_results_end_with_their_own_regions(client, part: slice) -> None:
    sizes = {"a": ((2, 16), "INT32"), "b": ((2, 16), "INT32")}
    input_region, first_region, second_region = (client.allocate(sizes) for _ in range(3))
    for region in (input_region, first_region, second_region):
        region["a"][:], region["b"][:] = A, B
    result = client.infer(
        "simple",
        {
            "INPUT0": input_region["a"][part],
            "INPUT1": input_region.view("b", input_region["a"][part].shape),
        },
        outputs={"OUTPUT0": first_region["a"][part], "OUTPUT1": second_region["b"][part]},
    )
    input_region.release()
    first_region.release()
    assert (result["OUTPUT1"] == A - B).all() and (second_region["b"][part] == A - B).all()
    with pytest.raises(shmserve.client.Released):
        result["OUTPUT0"][0]


def test_regions_are_checked(client) -> None:
    for spec in (((1,), "FLOAT"), ("FP32", [1])):
        with pytest.raises(shmserve.client.InvalidArgument, match="allowed: BOOL, UINT8"):
            client.allocate({"x": spec})
    for shape in ((1, -1), (1.5,)):
        with pytest.raises(shmserve.client.InvalidArgument, match="not an integer"):
            client.allocate({"x": (shape, "FP32")})
    for tensors in ([1], {"x": (3,)}, {"x": 3}, {5: ((3,), "FP32")}):
        with pytest.raises(shmserve.client.InvalidArgument, match=r"\(shape, datatype\)"):
            client.allocate(tensors)
    client.allocate({"x": ((np.int64(2), 3), "FP32"), "y": (3, np.float32)}).release()
    with client.allocate({"INPUT0": ((1, ROW), "FP32"), "OUTPUT0": ((1, ROW), "INT32")}) as region:
        expected = "output 'OUTPUT0' of model 'rows' is FP32, but the region's tensor is INT32"
        with pytest.raises(shmserve.client.InvalidArgument, match=expected):
            client.infer("rows", region)
    # Strings are written in place if they fit.
    words = client.allocate({"OUTPUT0": ((40000,), "UINT8")})
    result = client.infer("text", INPUT0=[["a" * 30000, "b"]], outputs=words)
    assert result["OUTPUT0"].tolist() == [[b"a" * 30000, b"b"]]
    integers = client.allocate({"OUTPUT0": ((1, ROW), "INT32")})
    with integers, pytest.raises(shmserve.client.InvalidArgument, match=expected):
        client.infer("rows", INPUT0=frames(), outputs=integers)
    integers = client.allocate({"any": ((1, ROW), "INT32")})
    with integers, pytest.raises(shmserve.client.InvalidArgument, match=expected):
        client.infer("rows", INPUT0=frames(), outputs={"OUTPUT0": integers["any"]})
    with pytest.raises(shmserve.client.Unavailable, match="may use 1073741824 bytes"):
        client.allocate({"x": ((1 << 31,), "UINT8")})
    with client.allocate({"x": ((1,), "FP32")}) as region:
        with pytest.raises(shmserve.client.InvalidArgument, match="neither an input nor"):
            client.infer("rows", region)
        with pytest.raises(shmserve.client.InvalidArgument, match="too small for"):
            region.view("x", (2,))
    with client.allocate({"x": ((4,), "FP32"), "y": ((4,), "FP32")}) as region:
        for wrong_shape in ((-1,), (-2, -2), -4):  # numpy's -1 would reach to the memory's end
            with pytest.raises(shmserve.client.InvalidArgument, match="not an integer"):
                region.view("x", wrong_shape)
    with pytest.raises(shmserve.client.InvalidArgument, match="memory from `allocate`"):
        client.infer("rows", INPUT0=frames(), outputs={"OUTPUT0": frames()})


def test_torch_in_torch_out(client) -> None:
    x = torch.rand(2, ROW)
    y = client.infer("rows", INPUT0=x)["OUTPUT0"]
    assert isinstance(y, torch.Tensor) and torch.equal(x, y)
    small_result = client.infer("simple", INPUT0=torch.from_numpy(A), INPUT1=torch.from_numpy(B))
    assert torch.equal(small_result["OUTPUT0"], torch.from_numpy(A + B))
    grown_tensor = torch.rand(1, ROW, requires_grad=True)
    assert torch.equal(client.infer("rows", INPUT0=grown_tensor)["OUTPUT0"], grown_tensor)


def test_bfloat16(client) -> None:
    x = torch.rand(20_000).to(torch.bfloat16)
    for part in (x, x[:9]):
        y = client.infer("halves", INPUT0=part)["OUTPUT0"]
        assert y.dtype == torch.bfloat16 and torch.equal(part, y)


def test_dlpack_in_and_out(client) -> None:
    class Foreign:
        def __init__(self, array: np.ndarray) -> None:
            self._array = array

        def __dlpack__(self, **options):
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    x = frames()
    y = client.infer("rows", INPUT0=Foreign(x))["OUTPUT0"]
    assert torch.equal(torch.utils.dlpack.from_dlpack(y), torch.from_numpy(x))


def test_strided_and_empty_inputs(client) -> None:
    x = np.asfortranarray(frames(4))[::2]
    assert (client.infer("rows", INPUT0=x)["OUTPUT0"] == x).all()
    assert client.infer("identity", INPUT0=np.empty(0, np.float32))["OUTPUT0"].shape == (0,)


def test_a_signal_handler_cannot_use_the_client_while_its_thread_waits(client) -> None:
    assert client.infer("simple", INPUT0=A, INPUT1=B)
    with client._get_thread_channel().lock:  # a waiting thread holds this lock
        for use_client in (lambda: client.infer("simple", INPUT0=A, INPUT1=B), client.close):
            with pytest.raises(shmserve.client.Unavailable, match="a signal handler cannot use"):
                use_client()
    assert client.infer("simple", INPUT0=A, INPUT1=B)


def test_many_in_flight_in_order(client) -> None:
    arrays = [{"INPUT0": frames(seed=seed)} for seed in range(40)]
    for inputs, result in zip(arrays, client.map("rows", arrays, in_flight=8), strict=True):
        assert (result["OUTPUT0"] == inputs["INPUT0"]).all()
    small_inputs = ({"INPUT0": A * n, "INPUT1": B} for n in range(100))
    for n, result in enumerate(client.map("simple", small_inputs)):
        assert (result["OUTPUT1"] == A * n - B).all()


def test_futures(client) -> None:
    futures = [client.infer_async("simple", INPUT0=A * n, INPUT1=B) for n in range(50)]
    completed, _ = concurrent.futures.wait(futures, timeout=20)
    assert len(completed) == 50
    assert all((f.result()["OUTPUT0"] == A * n + B).all() for n, f in enumerate(futures))


def test_timeouts_of_answered_requests_are_removed(client) -> None:
    for _ in range(20):
        calls = [client.infer_async("simple", INPUT0=A, INPUT1=B, timeout=600) for _ in range(100)]
        assert len(concurrent.futures.wait(calls, timeout=20).done) == 100
    assert len(client._session.connection().timers._heap) < 1500


def test_finished_calls_keep_no_memory(client) -> None:
    """Without garbage collection, too: no cycle contains results, errors or regions."""
    x = frames()
    gc.collect()
    gc.disable()
    try:
        for _ in range(8):
            assert (client.infer_async("rows", INPUT0=x).result(20)["OUTPUT0"] == x).all()
        (kept,) = client._session.connection().models.resolve("rows", "").templates._values.values()
        assert 1 <= len(kept._free_slots) <= 2
        region = client.allocate({"INPUT0": ((1, ROW), "FP32"), "OUTPUT0": ((1, ROW), "FP32")})
        lease_ref = weakref.ref(region.lease)
        client.infer_async("rows", region).result(20)
        with contextlib.suppress(shmserve.client.InvalidArgument):
            client.infer("rows", region, parameters={"x": None})
        region.release()
        until("the connection's thread has let go", lambda: lease_ref() is None)
        # The server has a region's memory back as well, though nothing is allocated any more.
        region = client.allocate({"INPUT0": ((1, ROW), "FP32")})
        kept_array = np.asarray(region["INPUT0"])
        address = region.segment.address
        del region
        memories = client._session.memories
        assert memories.find(address, 1) is not None
        del kept_array
        until("it is withdrawn", lambda: memories.find(address, 1) is None)
    finally:
        gc.enable()


def test_from_many_threads(client) -> None:
    mismatches: list[object] = []

    def send_requests(seed: int) -> None:
        x = frames(seed=seed)
        answers = (client.infer("rows", INPUT0=x)["OUTPUT0"] for _ in range(10))
        mismatches.extend(seed for y in answers if not (y == x).all())

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(send_requests, range(6)))
    assert not mismatches


def test_more_threads_than_a_scheduler_takes_links(client) -> None:
    """All threads submit at once, so that no thread can reuse the link of an exited one."""
    count = 24
    all_have_asked = threading.Barrier(count)
    answers: list[float] = []

    def send_requests(number: int) -> None:
        x = np.full(4, number, np.float32)
        answers.append(client.infer("identity", INPUT0=x, timeout=20)["OUTPUT0"][0])
        results = client.map("identity", [{"INPUT0": x}] * 3, in_flight=2, timeout=20)
        answers.extend(response["OUTPUT0"][0] for response in results)
        all_have_asked.wait()

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(send_requests, range(count)))
    assert sorted(answers) == sorted([*range(count)] * 4)
    assert len(client._channels) <= 15


def test_more_requests_than_a_frame_may_contain(client, rows_server: Server) -> None:
    x = np.ones(4000, np.float32)
    count = (64 << 20) // x.nbytes + 100

    async def send_requests() -> list[shmserve.client.Result | BaseException]:
        async with aio.connect(rows_server.run_dir) as server:
            calls = (server.infer("identity", INPUT0=x) for _ in range(count))
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert (await server.infer("identity", INPUT0=x))["OUTPUT0"].shape == x.shape
            return answers

    refused = [a for a in asyncio.run(send_requests()) if not isinstance(a, shmserve.client.Result)]
    # Most find the queue full.
    assert all(isinstance(error, shmserve.client.QueueFull) for error in refused)
    with pytest.raises(shmserve.client.InvalidArgument, match="maximum: 1048576"):
        client.infer("identity", INPUT0=x, parameters={"x": "y" * (1 << 20)})
    future = client.infer_async("identity", INPUT0=x, parameters={"x": "y" * (1 << 20)})
    assert isinstance(future.exception(20), shmserve.client.InvalidArgument)


def test_a_link_that_the_server_ends(client) -> None:
    connection = client._session.connection()
    endpoint = connection.models.resolve("identity", "").endpoint
    other_dealers = [Dealer(endpoint, f"{connection.identity}.other{n}") for n in range(16)]
    x = np.ones(4, np.float32)
    request = submit((TensorRef("INPUT0", "FP32", (4,), x.tobytes()),))
    for dealer in other_dealers:
        dealer.send(request)
        assert isinstance(answer(dealer), Finished)
    with pytest.raises(
        shmserve.client.Unavailable, match="before the response, also after one retry"
    ):
        client.infer("identity", INPUT0=x, timeout=20)
    for dealer in other_dealers:
        dealer.close()
    assert (client.infer("identity", INPUT0=x, timeout=20)["OUTPUT0"] == x).all()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can create a PID namespace")
def test_a_program_in_another_pid_namespace_needs_memory_for_large_outputs(rows_server) -> None:
    """As in a container that shares only the run directory."""
    code = f"""
import numpy as np, shmserve.client
x = np.ones(100_000, np.float32)
with shmserve.client.connect({str(rows_server.run_dir)!r}) as server:
    print(server.infer("identity", INPUT0=x[:4])["OUTPUT0"])
    memory = server.allocate({{"y": (x.shape, "FP32")}})["y"]
    print(server.infer("identity", INPUT0=x, outputs={{"OUTPUT0": memory}})["OUTPUT0"].sum())
    server.infer("identity", INPUT0=x)
"""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.split("\n")[:2] == ["[1. 1. 1. 1.]", "100000.0"], run.stderr
    assert "in the server's PID namespace" in run.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can create a PID namespace")
@pytest.mark.parametrize(
    ("prefix", "is_other"), [((), False), (("unshare", "--pid", "--fork", "--kill-child"), True)]
)
def test_a_server_in_a_container_is_in_another_pid_namespace(tmp_path, prefix, is_other) -> None:
    code = f"""
import socket
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind({str(tmp_path / "listener")!r})
listener.listen()
print(flush=True)
input()
"""
    command, link = [*prefix, sys.executable, "-c", code], ListenerLink()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        link.connect(tmp_path / "listener", 10)
        assert link.is_in_other_pid_namespace() is is_other
        process.communicate("\n")
    link.close()


def test_a_worker_that_dies_before_its_answer_is_read(client) -> None:
    connection = client._session.connection()
    copied, remaining_losses = connection.copy_range, [1]

    def read_or_fail(memory_range: Range) -> bytes:
        if remaining_losses[0]:
            remaining_losses[0] -= 1
            raise shmserve.client.Unavailable("the memory of a tensor has been released")
        return bytes(copied(memory_range))

    connection.copy_range = read_or_fail
    x = np.arange(20000, dtype=np.float32)
    assert (client.infer("identity", INPUT0=x)["OUTPUT0"] == x).all()
    remaining_losses[0] = 2
    future = client.infer_async("identity", INPUT0=x)
    assert isinstance(future.exception(20), shmserve.client.Unavailable)
    (prepared,) = connection.models.resolve("identity", "").templates._values.values()
    assert len({id(slot) for slot in prepared._free_slots}) == len(prepared._free_slots) == 1


def test_an_invalid_timeout(client) -> None:
    x = np.ones(4, np.float32)
    for seconds in (1e7, 1e12, float("inf")):
        assert client.infer_async("identity", INPUT0=x, timeout=seconds).result(20)
        assert client.infer("identity", INPUT0=x, timeout=seconds)
    for seconds in (0, -1):
        with pytest.raises(shmserve.client.TimedOut):
            client.infer("identity", INPUT0=x, timeout=seconds)


def test_a_stream_of_one_response(client) -> None:
    (only_response,) = client.stream("simple", INPUT0=A, INPUT1=B)
    assert (only_response["OUTPUT0"] == A + B).all()


async def test_asyncio(rows_server: Server) -> None:
    async with aio.connect(rows_server.run_dir) as server:
        arrays = [frames(seed=seed) for seed in range(20)]
        results = await asyncio.gather(*(server.infer("rows", INPUT0=x) for x in arrays))
        assert all((r["OUTPUT0"] == x).all() for r, x in zip(results, arrays, strict=True))
        assert ("rows", "1") in await server.models()
        with await server.allocate({"INPUT0": ((1, ROW), "FP32")}) as region:
            region["INPUT0"][:] = arrays[0]
            assert (await server.infer("rows", region))["OUTPUT0"].shape == (1, ROW)
        async for result in server.stream("simple", INPUT0=A, INPUT1=B):
            assert (result["OUTPUT0"] == A + B).all()
        with pytest.raises(shmserve.client.NotFound):
            await server.infer("nobody", INPUT0=A)


def test_a_client_of_another_event_loop_is_refused(rows_server: Server) -> None:
    server = asyncio.run(_open_client(rows_server))
    for _ in range(2):
        with pytest.raises(shmserve.client.InvalidArgument, match="another event loop"):
            asyncio.run(server.infer("simple", INPUT0=A, INPUT1=B, timeout=5))
    asyncio.run(server.close())


async def _open_client(rows: Server) -> aio.Server:
    server = await aio.connect(rows.run_dir)
    assert await server.infer("simple", INPUT0=A, INPUT1=B)
    return server


def test_calls_of_a_closed_client_are_refused(rows_server: Server) -> None:
    client = shmserve.client.connect(rows_server.run_dir)
    y = client.infer("rows", INPUT0=frames())["OUTPUT0"]
    client.close()
    client.close()
    assert (y == frames()).all()  # its memory is the program's
    with pytest.raises(shmserve.client.Disconnected, match="closed"):
        client.infer("simple", INPUT0=A, INPUT1=B)


@pytest.mark.parametrize("seconds", [0, -1, 1e-9, 1e12, float("inf")])
def test_any_patience_with_the_listener(rows_server: Server, seconds: float) -> None:
    with contextlib.ExitStack() as stack:
        if seconds < 1:
            stack.enter_context(contextlib.suppress(shmserve.client.Disconnected))
        stack.enter_context(shmserve.client.connect(rows_server.run_dir, timeout=seconds))
