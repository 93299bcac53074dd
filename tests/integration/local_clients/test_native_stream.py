"""shmserve.client with models that give many responses: order, credit, regions, leaving."""

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve.client
from shmserve.client import aio
from shmserve.ipc.credit import FIRST_CREDIT
from shmserve.ipc.scheduler_client import SchedulerClient
from tests.support import repositories
from tests.support.servers import Server, Start, python_program, running
from tests.support.waiting import until

CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [
  { name: "STEPS" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "SIZE" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
# Executes the steps in order: a number is sent SIZE times, and the other steps are commands.
MODEL = repositories.python_model("""
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request):
        sender = request.get_response_sender()
        steps = self.input(request, "STEPS")
        size = self.input(request, "SIZE")
        size = 1 if size is None else int(size[0])
        for step in steps.tolist():
            word, _, rest = step.decode().partition(" ")
            if word.isdigit():
                sender.send(self.response(OUT=np.full(size, int(word), np.int32)))
            elif word == "error":
                sender.send(self.failure(rest))
            elif word == "note":
                open(rest, "w").close()
            elif word == "left":
                while not sender.is_cancelled():
                    time.sleep(0.001)
                open(rest, "w").close()
            elif word == "raise":
                raise ValueError(rest)
            elif word == "return":
                return
            elif word == "die":
                os._exit(1)
        sender.send(flags=FINAL)
""")


@pytest.fixture(scope="module")
def streaming_server(models: Path, start: Start) -> Server:
    repositories.add(models, "repeat", "simple")
    repositories.write(models, "steps", CONFIG, MODEL)
    repositories.add_identity(models, "rows", "FP32", [8192], max_batch_size=8)
    return start(models)


@pytest.fixture
def client(streaming_server: Server) -> Iterator[shmserve.client.Server]:
    with shmserve.client.connect(streaming_server.run_dir) as native_client:
        yield native_client


def repeat(count: int) -> dict[str, Any]:
    return {
        "IN": np.arange(count, dtype=np.int32) + 7,
        "DELAY": np.zeros(count, np.uint32),
        "WAIT": np.zeros(1, np.uint32),
    }


def values(responses: Any) -> list[int]:
    return [int(response["OUT"][0]) for response in responses]


@pytest.mark.parametrize("count", [0, 1, FIRST_CREDIT, 10 * FIRST_CREDIT + 1])
def test_responses_arrive_in_order(client: shmserve.client.Server, count: int) -> None:
    responses = list(client.stream("repeat", **repeat(count)))
    assert values(responses) == [7 + n for n in range(count)]
    assert [int(response["IDX"][0]) for response in responses] == [*range(count)]


def test_many_streams_at_once_and_inferences_between(client: shmserve.client.Server) -> None:
    inputs = {"INPUT0": np.ones((1, 16), np.int32), "INPUT1": np.ones((1, 16), np.int32)}
    streams = [client.stream("repeat", repeat(100)) for _ in range(8)]
    for turn in range(100):
        assert [values([next(stream)])[0] for stream in streams] == [7 + turn] * 8
        assert client.infer("simple", inputs)["OUTPUT0"][0, 0] == 2
    assert [list(stream) for stream in streams] == [[]] * 8


def test_an_ordinary_model_gives_one_response(client: shmserve.client.Server) -> None:
    rows = np.random.default_rng(0).random((2, 8192), np.float32)
    for inputs in ({"INPUT0": rows}, {"INPUT0": rows[:1]}):
        (response,) = client.stream("rows", inputs)
        assert (response["OUTPUT0"] == inputs["INPUT0"]).all()


def test_a_decoupled_model_takes_streams_only(client: shmserve.client.Server) -> None:
    for infer in (client.infer, client.infer_async):
        with pytest.raises(shmserve.client.Unsupported, match="use `stream`"):
            infer("repeat", repeat(1))
    with pytest.raises(shmserve.client.Unsupported, match="use `stream`"):
        next(client.map("repeat", [repeat(1)]))


def test_large_responses_are_copied_from_the_workers_memory(client: shmserve.client.Server) -> None:
    """The responses have more bytes than the credit; each array belongs to the program."""
    steps = [b"%d" % n for n in range(12)]
    size = np.array([1 << 18], np.int32)  # 1 MiB each
    responses = list(client.stream("steps", STEPS=steps, SIZE=size))
    assert [set(response["OUT"].tolist()) for response in responses] == [{n} for n in range(12)]


def test_an_error_between_responses_does_not_end_the_stream(client: shmserve.client.Server) -> None:
    stream = client.stream("steps", STEPS=[b"1", b"error no second one", b"3"])
    assert values([next(stream)]) == [1]
    with pytest.raises(shmserve.client.ShmserveError, match="no second one"):
        next(stream)
    assert values(stream) == [3]


def test_wrong_stream_requests_are_refused_at_once(client: shmserve.client.Server) -> None:
    with pytest.raises(shmserve.client.NotFound):
        client.stream("nobody", X=[1])
    with pytest.raises(shmserve.client.InvalidArgument, match="unexpected inference input 'X'"):
        client.stream("steps", STEPS=[b"1"], X=[1])


# --- in a region


def test_responses_in_regions_arrive_singly(client: shmserve.client.Server, tmp_path: Path) -> None:
    """A response stays readable until the next one is requested."""
    marker_file = tmp_path / "second"
    with client.allocate({"OUT": ((4,), "INT32")}) as region:
        steps = [b"1", b"2", b"note " + os.fsencode(marker_file), b"3"]
        stream = client.stream("steps", {"STEPS": steps, "SIZE": [4]}, outputs=region)
        assert next(stream)["OUT"].tolist() == region["OUT"].tolist() == [1] * 4
        assert values(client.stream("steps", STEPS=[b"9"])) == [9]  # the model is not held up
        assert region["OUT"].tolist() == [1] * 4 and not marker_file.exists()
        for n in (2, 3):
            assert next(stream)["OUT"].tolist() == region["OUT"].tolist() == [n] * 4
        assert marker_file.exists() and list(stream) == []
        assert region["OUT"].tolist() == [3] * 4


def test_a_request_and_its_responses_in_one_region(client: shmserve.client.Server) -> None:
    specs = {"IN": ((50,), "INT32"), "DELAY": ((50,), "UINT32"), "WAIT": ((1,), "UINT32")}
    with client.allocate({**specs, "OUT": ((1,), "INT32"), "IDX": ((1,), "UINT32")}) as region:
        for _ in range(2):
            for name, array in repeat(50).items():
                region[name][:] = array
            for n, response in enumerate(client.stream("repeat", region)):
                assert response["OUT"][0] == region["OUT"][0] == n + 7
            assert n == 49


def test_an_error_in_a_region_delays_no_later_request(client: shmserve.client.Server) -> None:
    with client.allocate({"OUT": ((1,), "INT32")}) as region:
        steps = [b"1", b"error two", b"error three", b"4"]
        stream = client.stream("steps", {"STEPS": steps}, outputs=region)
        assert next(stream)["OUT"][0] == 1
        for text in ("two", "three"):
            with pytest.raises(shmserve.client.ShmserveError, match=text):
                next(stream)
        assert values(stream) == [4]


# --- leaving


def disconnect_message(path: Path) -> bytes:
    return b"left " + os.fsencode(path)


WAYS_TO_LEAVE: dict[str, Callable[[list[Any]], None]] = {
    "close": lambda streams: streams[0].close(),
    "with": lambda streams: streams[0].__exit__(None, None, None),
    "collected": lambda streams: streams.clear(),
}


@pytest.mark.parametrize("ending", WAYS_TO_LEAVE)
def test_closing_a_stream_cancels_its_request(
    client: shmserve.client.Server, tmp_path: Path, ending: str
) -> None:
    streams = [client.stream("steps", STEPS=[b"1", disconnect_message(tmp_path / "seen")])]
    assert values([next(streams[0])]) == [1]
    stream = streams[0]
    if ending == "collected":
        del stream
    WAYS_TO_LEAVE[ending](streams)
    gc.collect()
    until("the model sees it", (tmp_path / "seen").exists)
    if streams:
        assert list(streams[0]) == []


def test_an_expired_stream_is_cancelled(client: shmserve.client.Server, tmp_path: Path) -> None:
    late = client.stream("steps", STEPS=[b"1", disconnect_message(tmp_path / "seen")], timeout=0.2)
    assert values([next(late)]) == [1]
    with pytest.raises(shmserve.client.TimedOut):
        next(late)
    assert list(late) == []
    until("the model sees it", (tmp_path / "seen").exists)


def test_a_program_that_dies_cancels(streaming_server: Server, tmp_path: Path) -> None:
    program = f"""
import shmserve.client, sys
server = shmserve.client.connect({str(streaming_server.run_dir)!r})
stream = server.stream("steps", STEPS=[b"1", {disconnect_message(tmp_path / "seen")!r}])
print(next(stream)["OUT"][0], flush=True)
next(stream)
"""
    with python_program(program) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
    until("the model sees it", (tmp_path / "seen").exists)


def test_a_reader_that_stops_reading_stops_only_its_own_stream(
    client: shmserve.client.Server, tmp_path: Path
) -> None:
    marker_file = tmp_path / "sent"
    steps = [*([b"1"] * (3 * FIRST_CREDIT)), b"note " + os.fsencode(marker_file)]
    unread_stream = client.stream("steps", STEPS=steps)
    assert values(client.stream("steps", STEPS=[b"2"] * 200)) == [2] * 200
    assert not marker_file.exists()
    assert values(unread_stream) == [1] * (3 * FIRST_CREDIT) and marker_file.exists()


def test_a_client_that_releases_nothing_takes_no_memory_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This client is refused more memory; other clients are not."""
    repository = tmp_path / "models"
    repositories.write(repository, "steps", CONFIG, MODEL)
    size = np.array([1 << 18], np.int32)  # a MiB a response
    with (
        running(repository, f"--arena-byte-size={16 << 20}") as server,
        shmserve.client.connect(server.run_dir) as hoarding_client,
        shmserve.client.connect(server.run_dir) as other_client,
    ):
        steps: Any = [b"%d" % n for n in range(20)]
        with monkeypatch.context() as release_patch:
            release_patch.setattr(SchedulerClient, "release", lambda *_: None)
            stream = hoarding_client.stream("steps", STEPS=steps, SIZE=size)
            assert [int(next(stream)["OUT"][-1]) for _ in range(8)] == [*range(8)]
            with pytest.raises(shmserve.client.Unavailable, match="client holds "):
                next(stream)
            stream.close()
        few_steps = {"STEPS": steps[:4]}
        for client, inputs in (
            (other_client, few_steps),
            (hoarding_client, few_steps),
            (other_client, few_steps | {"SIZE": size}),
        ):
            for _ in range(4):
                assert values(client.stream("steps", inputs)) == [*range(4)]
        hoarding_client.close()
        half_size = np.array([8 << 18], np.int32)  # half of it

        def is_back() -> bool:
            try:
                return values(other_client.stream("steps", STEPS=steps[:1], SIZE=half_size)) == [0]
            except shmserve.client.Unavailable:
                return False

        until("what who has left held is back", is_back)


# --- asyncio


def test_asyncio(streaming_server: Server) -> None:
    async def read_stream(client: aio.Server, count: int) -> list[int]:
        return [int(r["OUT"][0]) async for r in client.stream("repeat", repeat(count))]

    async def check_asyncio_client() -> list[list[int]]:
        async with aio.connect(streaming_server.run_dir) as client:
            with pytest.raises(shmserve.client.Unsupported):
                await client.infer("repeat", repeat(1))
            return await asyncio.gather(*(read_stream(client, count) for count in (0, 1, 40, 200)))

    assert asyncio.run(check_asyncio_client()) == [
        [7 + n for n in range(k)] for k in (0, 1, 40, 200)
    ]


@pytest.mark.parametrize("ending", ["aclose", "with", "collected", "cancelled", "timeout"])
async def test_closing_a_stream_in_asyncio_cancels_its_request(
    streaming_server: Server, tmp_path: Path, ending: str
) -> None:
    async with aio.connect(streaming_server.run_dir) as client:
        steps = [b"1", disconnect_message(tmp_path / "seen")]
        stream = client.stream("steps", STEPS=steps, timeout=0.3 if ending == "timeout" else None)
        assert (await anext(stream))["OUT"][0] == 1
        match ending:
            case "aclose":
                await stream.aclose()
            case "with":
                async with stream:
                    pass
            case "cancelled":
                task = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                task.cancel()
            case "timeout":
                with pytest.raises(shmserve.client.TimedOut):
                    await anext(stream)
        if ending == "collected":
            del stream
            gc.collect()
        await asyncio.to_thread(until, "the model has seen it", (tmp_path / "seen").exists)
        if ending not in ("collected", "cancelled"):
            assert [response async for response in stream] == []
