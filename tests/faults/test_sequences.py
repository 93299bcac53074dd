"""Faults in the middle of sequences: their clients are informed, others not affected."""

import contextlib
import itertools
import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http

import shmserve.client
from shmserve.client import Result, ShmserveError
from tests.faults.scene import RECOVERY_S, State, wait_replaced
from tests.support import repositories
from tests.support.sequence_models import controls, instances
from tests.support.servers import Server, running
from tests.support.waiting import repeating, until
from tests.support.wire.triton import infer_inputs

IDLE_S = 3
IDLE_TIME = f"max_sequence_idle_microseconds: {IDLE_S}000000"
FATAL_VALUE = -99  # the model exits when it receives this value
SEQUENCE_COUNT = 8_000
STREAMED_COUNT = 400
MEMORY_TOLERANCE = 160 << 20  # bytes that this many requests may leave allocated in three processes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of a model with two instances of two slots."""
    repository = tmp_path_factory.mktemp("sequences")
    config = f"sequence_batching {{ direct {{ }} {IDLE_TIME} {controls()} }} {instances(2)}"
    repositories.add_as(repository, "summing", "sequencer", config)
    with running(repository, "--exit-timeout-secs=2", grpc=True) as running_server:
        running_server.gate.close()
        yield running_server


def add(
    client: shmserve.client.Server,
    sequence: int,
    value: int,
    start: bool = False,
    end: bool = False,
) -> int:
    """Return the sum of a sequence; raise the server's error."""
    arrays = {"INPUT0": np.full((1, 1), value, np.int32)}
    result = client.infer("summing", arrays, sequence=sequence, start=start, end=end, timeout=30)
    return int(result["OUTPUT0"][0, 0])


@dataclass
class Sums:
    """The sequences of a client, which sums them up one after the other."""

    done_count: int = 0
    lost_count: int = 0  # number of sequences whose worker died
    wrong_responses: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def summing_client(server: Server) -> Iterator[Sums]:
    """Run a client during the with block, which is served at its start and at its end."""
    sums, numbers = Sums(), itertools.count(1_000_001)

    def sum_up() -> None:
        sequence = next(numbers)
        try:
            results = [add(summing, sequence, i + 1, i == 0, i == 3) for i in range(4)]
        except ShmserveError as error:
            sums.lost_count += 1
            if "is lost with it" not in str(error) and "was lost when" not in str(error):
                sums.wrong_responses.append(error)
        else:
            sums.done_count += 1
            if results != [1, 3, 6, 10]:
                sums.wrong_responses.append(results)

    with shmserve.client.connect(server.run_dir) as summing, repeating(sum_up):
        until("the others are served", lambda: sums.done_count > 3)
        yield sums
        done_before = sums.done_count
        until("the others are served", lambda: sums.done_count > done_before + 3)


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.client.Server]:
    """Yield a client, and check afterwards that no sequences are left."""
    before = State.of(server)
    with shmserve.client.connect(server.run_dir) as native_client:
        yield native_client
    until("all is as it was", lambda: not before.differences(State.of(server), MEMORY_TOLERANCE))
    until("nothing is pending", lambda: server.metric("nv_inference_pending_request_count") == 0)


def test_sequences_of_a_killed_worker_fail(server: Server, client: shmserve.client.Server) -> None:
    """This includes the sequences of both instances, and new ones."""
    for sequence in (1, 2, 3, 4):  # sequences 1 and 3 share an instance, as do 2 and 4
        assert add(client, sequence, sequence, start=True) == sequence
    with pytest.raises(ShmserveError) as error_info:
        add(client, 1, FATAL_VALUE)
    assert (
        "the model's worker died, and the state of sequence 1 is lost with it: begin the sequence "
        "again, with the START flag"
    ) in str(error_info.value)
    with pytest.raises(shmserve.client.InvalidArgument) as error_info:
        add(client, 3, 1)
    assert (
        "must specify the START flag on the first request of the sequence; the state of this "
        "sequence was lost when the model's worker died"
    ) in str(error_info.value)
    assert [add(client, 2, 10), add(client, 4, 10)] == [12, 14]
    assert [add(client, 1, 5, start=True), add(client, 3, 6, start=True)] == [5, 6]
    for sequence in (1, 2, 3, 4):
        add(client, sequence, 0, end=True)


def test_a_worker_is_killed_under_load(server: Server, client: shmserve.client.Server) -> None:
    """Sequences started after the exit was detected run, and the model becomes ready again."""
    with summing_client(server) as sums:
        victim = server.find_one("worker summing.0")
        victim.kill()
        # Fails if the scheduler has not been notified of the exit yet.
        with contextlib.suppress(shmserve.client.Internal):
            add(client, 69, 3, start=True, end=True)
        assert add(client, 70, 3, start=True, end=True) == 3
        wait_replaced(server, victim, "worker summing.0")
        until("it is ready", lambda: server.answers("/v2/health/ready"), within_s=RECOVERY_S * 5)
    assert not sums.wrong_responses and sums.lost_count <= 2


def test_a_scheduler_dies(server: Server, client: shmserve.client.Server) -> None:
    """Only the scheduler knew the slots, so clients must restart their sequences."""
    assert add(client, 80, 1, start=True) == 1
    victim = server.find_one("scheduler summing")
    victim.kill()
    wait_replaced(server, victim, "scheduler summing")
    with pytest.raises(ShmserveError, match="must specify the START flag"):
        add(client, 80, 1)
    assert [add(client, 80, 1, start=True), add(client, 80, 1, end=True)] == [1, 2]


def test_a_client_ends_no_sequence(server: Server, client: shmserve.client.Server) -> None:
    """A limited number waits. Sequences in slots continue, and other clients take turns."""
    assert add(client, 1, 1, start=True) == 1
    x = {"INPUT0": np.zeros((1, 1), np.int32)}
    with shmserve.client.connect(server.run_dir) as greedy:
        futures: list[Future[Result]] = []
        total = 1
        for sequence in range(SEQUENCE_COUNT):
            futures.append(greedy.infer_async("summing", x, sequence=10_000 + sequence, start=True))
            if sequence % 1000 == 0:
                total += 1
                assert add(client, 1, 1) == total
        wait(futures[-1:], 60)
        error = futures[-1].exception(0)
        assert isinstance(error, shmserve.client.QueueFull)
        assert "at most 2048 sequences of a client may wait for a slot of model 'summing'" in str(
            error
        )
        # A slot becomes free when an idle sequence loses it. This client is next.
        assert add(client, 2, 5, start=True) == 5
        assert [add(client, 2, 5), add(client, 2, 5, end=True)] == [10, 15]
    # The other client has disconnected, and its waiting sequences have been removed.
    until("nothing of it waits", lambda: server.metric("nv_inference_pending_request_count") == 0)
    with summing_client(server) as sums:
        pass
    assert not sums.wrong_responses and not sums.lost_count


def test_a_stream_ends_no_sequence(server: Server, client: shmserve.client.Server) -> None:
    """Connections of a gateway take turns, too: each waits only for its own sequences."""
    results: queue.Queue[Any] = queue.Queue()
    inputs = infer_inputs(grpc, INPUT0=np.zeros((1, 1), np.int32))
    with (
        grpc.InferenceServerClient(server.grpc_url) as greedy,
        http.InferenceServerClient(server.url.removeprefix("http://")) as other_client,
    ):
        greedy.start_stream(lambda result, error: results.put(error))
        for sequence in range(1, STREAMED_COUNT):
            greedy.async_stream_infer("summing", inputs, sequence_id=sequence, sequence_start=True)
        for _ in range(4):  # the sequences that received slots
            assert results.get(timeout=30) is None
        began_at = time.monotonic()
        sums = []
        for index in range(3):
            values = infer_inputs(http, INPUT0=np.full((1, 1), index + 1, np.int32))
            flags = {"sequence_start": index == 0, "sequence_end": index == 2}
            result = other_client.infer("summing", values, sequence_id=1_000_000, **flags)
            sums.append(int(result.as_numpy("OUTPUT0")[0, 0]))
        assert sums == [1, 3, 6]
        assert time.monotonic() - began_at < 4 * IDLE_S  # much less than STREAMED / 4 * IDLE_S
        greedy.stop_stream(cancel_requests=True)


def test_two_clients_share_an_id(server: Server, client: shmserve.client.Server) -> None:
    """Both clients use the same sequence, as in Triton."""
    with shmserve.client.connect(server.run_dir) as other, summing_client(server) as sums:
        assert add(client, 5, 1, start=True) == 1
        assert [add(other, 5, 10), add(client, 5, 100), add(other, 5, 1000)] == [11, 111, 1111]
        # A START from either client restarts the sequence for both clients.
        assert [add(other, 5, 7, start=True), add(client, 5, 1)] == [7, 8]
        assert add(client, 5, 1, end=True) == 9
        with pytest.raises(ShmserveError, match="must specify the START flag"):
            add(other, 5, 1)
    assert not sums.wrong_responses and not sums.lost_count
