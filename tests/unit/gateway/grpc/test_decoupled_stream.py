"""Responses of decoupled models in a stream: as they come, each in its form, for credit."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from shmserve.ipc.credit import FIRST_CREDIT
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inferred, pack_inferred
from tests.rigs.gateway_rig import Rig, Scheduler, echo, end, error, identity_config, rig
from tests.support.waiting import until

REPEAT = {
    **identity_config("repeat", "INT32", [-1]),
    "model_transaction_policy": {"decoupled": True},
}
EMPTY_FINAL = "triton_enable_empty_final_response"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("run"), grpc=True) as model_rig:
        model_rig.open()
        yield model_rig


@pytest.fixture
def scheduler(gateway: Rig) -> Scheduler:
    scheduler = gateway.scheduler(echo)
    scheduler.holds_responses = True
    gateway.publish(REPEAT, scheduler)
    return scheduler


class Stream:
    """A call whose requests the test chooses."""

    def __init__(self, gateway: Rig, metadata: Any = ()) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{gateway.port}")
        grpc.channel_ready_future(self._channel).result(20)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.call = stub.ModelStreamInfer(
            iter(self._requests.get, None), timeout=30, metadata=metadata
        )

    def send_request(self, request_id: str, **parameters: bool) -> None:
        request = pb.ModelInferRequest(model_name="repeat", id=request_id)
        request.inputs.add(name="IN", datatype="INT32", shape=[1])
        request.raw_input_contents.append(bytes(4))
        for key, value in parameters.items():
            request.parameters[key].bool_param = value
        self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)

    def close(self) -> None:
        self.end()
        self._channel.close()


@pytest.fixture
def stream(gateway: Rig, scheduler: Scheduler) -> Iterator[Stream]:
    new_stream = Stream(gateway)
    yield new_stream
    new_stream.close()


def first_requests(scheduler: Scheduler, number: int) -> list[tuple[bytes, int]]:
    until("they are here", lambda: len(scheduler.unanswered_submits) >= number)
    return [(peer, submit.id) for peer, submit in scheduler.unanswered_submits]


def response(number: int, value: int, *, final: bool = False) -> m.Responded:
    data = np.full(1, value, np.int32).tobytes()
    answer = Inferred((TensorRef("OUT", "INT32", (1,), data),))
    return m.Responded(number, "", "", *pack_inferred(answer), final)


def values(responses: list[Any]) -> list[tuple[str, int, bool]]:
    return [
        (
            r.infer_response.id,
            int(np.frombuffer(r.infer_response.raw_output_contents[0], np.int32)[0]),
            r.infer_response.parameters["triton_final_response"].bool_param,
        )
        for r in responses
    ]


def take(stream: Stream, number: int) -> list[Any]:
    return [next(stream.call) for _ in range(number)]


def test_responses_of_many_requests_are_interleaved(scheduler: Scheduler, stream: Stream) -> None:
    stream.send_request("a")
    stream.send_request("b")
    (peer, first), (_, second) = first_requests(scheduler, 2)
    scheduler.send(peer, response(second, 1), response(first, 2), response(second, 3, final=True))
    assert values(take(stream, 3)) == [("b", 1, False), ("a", 2, False), ("b", 3, True)]
    scheduler.send(peer, *(response(first, value) for value in range(10)), end(first))
    stream.end()
    assert values(list(stream.call)) == [("a", value, False) for value in range(10)]


def test_a_response_has_the_models_name_and_version(scheduler: Scheduler, stream: Stream) -> None:
    stream.send_request("a")
    ((peer, number),) = first_requests(scheduler, 1)
    scheduler.send(peer, response(number, 1))
    infer_response = take(stream, 1)[0].infer_response
    assert (infer_response.model_name, infer_response.model_version) == ("repeat", "1")
    assert (infer_response.outputs[0].name, infer_response.outputs[0].datatype) == ("OUT", "INT32")
    assert list(infer_response.outputs[0].shape) == [1]


def test_an_empty_final_response_is_sent_on_request(scheduler: Scheduler, stream: Stream) -> None:
    stream.send_request("silent")
    stream.send_request("said", **{EMPTY_FINAL: True})
    (peer, silent_call), (_, second_call) = first_requests(scheduler, 2)
    scheduler.send(peer, end(silent_call), end(second_call))
    stream.end()
    (only_response,) = stream.call
    inferred = only_response.infer_response
    assert (inferred.model_name, inferred.model_version, inferred.id) == ("repeat", "", "said")
    assert inferred.parameters["triton_final_response"].bool_param
    assert not inferred.outputs and not only_response.error_message


def test_an_error_response_does_not_end_the_stream(scheduler: Scheduler, stream: Stream) -> None:
    stream.send_request("a")
    ((peer, number),) = first_requests(scheduler, 1)
    scheduler.send(
        peer,
        response(number, 1),
        error(number, "mid"),
        response(number, 2),
        error(number, "end", final=True),
    )
    stream.end()
    first_response, middle_response, second_response, last_response = stream.call
    assert values([first_response, second_response]) == [("a", 1, False), ("a", 2, False)]
    for streamed, text, final in ((middle_response, "mid", False), (last_response, "end", True)):
        assert streamed.error_message == text
        inferred = streamed.infer_response
        assert (inferred.model_name, inferred.model_version, inferred.id) == ("repeat", "", "a")
        assert inferred.parameters["triton_final_response"].bool_param is final
        assert "triton_final_response" in inferred.parameters


def test_a_failed_request_has_one_error_response(scheduler: Scheduler, stream: Stream) -> None:
    stream.send_request("a")
    ((peer, number),) = first_requests(scheduler, 1)
    failed_message = m.Failed(number, "INTERNAL", "gone", 0, early=False)
    scheduler.send(peer, response(number, 1), failed_message)
    stream.end()
    _, failed_response = stream.call
    assert failed_response.error_message == "gone"
    assert failed_response.infer_response.parameters["triton_final_response"].bool_param


def test_an_error_response_ends_a_strict_stream(gateway: Rig, scheduler: Scheduler) -> None:
    stream = Stream(gateway, (("triton_grpc_error", "true"),))
    stream.send_request("a")
    stream.send_request("b")
    (peer, first_id), (_, second_id) = first_requests(scheduler, 2)
    scheduler.send(peer, response(first_id, 1), error(first_id, "mid"), response(first_id, 2))
    assert values(take(stream, 1)) == [("a", 1, False)]
    with pytest.raises(grpc.RpcError) as caught:
        next(stream.call)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "mid"
    until(
        "both are cancelled",
        lambda: (
            {m.Cancel(first_id), m.Cancel(second_id)}
            <= set(map(_message_key, scheduler.notifications))
        ),
    )
    stream.close()


def _message_key(message: Any) -> Any:
    return m.Cancel(message.id) if isinstance(message, m.Cancel) else None


def test_a_disconnect_cancels_all_requests(gateway: Rig, scheduler: Scheduler) -> None:
    stream = Stream(gateway)
    for n in range(3):
        stream.send_request(str(n))
    waiting = first_requests(scheduler, 3)
    scheduler.send(waiting[0][0], response(waiting[0][1], 1))
    take(stream, 1)
    stream.call.cancel()
    until("all are cancelled", lambda: _cancelled_ids(scheduler) == {n for _, n in waiting})
    stream.close()


def _cancelled_ids(scheduler: Scheduler) -> set[int]:
    return {message.id for message in scheduler.notifications if isinstance(message, m.Cancel)}


def granted_credit(scheduler: Scheduler, number: int) -> int:
    grants = [message for message in scheduler.notifications if isinstance(message, m.Credit)]
    return sum(grant.responses for grant in grants if grant.id == number)


def wait_for_credit(scheduler: Scheduler, number: int, min_credit: int) -> None:
    until("there is credit", lambda: granted_credit(scheduler, number) >= min_credit)


def test_credit_is_returned_for_read_responses(scheduler: Scheduler, stream: Stream) -> None:
    """Each of 1,000 responses is sent within the credit that there is."""
    stream.send_request("a")
    ((peer, number),) = first_requests(scheduler, 1)
    responses: list[Any] = []

    def read() -> None:
        responses.extend(stream.call)

    reader = threading.Thread(target=read)
    reader.start()
    sent = 0
    while sent < 1000:
        credit = FIRST_CREDIT + granted_credit(scheduler, number) - sent
        scheduler.send(peer, *(response(number, sent + k) for k in range(min(credit, 1000 - sent))))
        sent += min(credit, 1000 - sent)
        wait_for_credit(scheduler, number, sent - FIRST_CREDIT + 1)
    scheduler.send(peer, end(number))
    stream.end()
    reader.join(20)
    assert values(responses) == [("a", value, False) for value in range(1000)]
    grants = [message for message in scheduler.notifications if isinstance(message, m.Credit)]
    assert len(grants) <= 1000 // 16


def test_a_client_that_does_not_read_receives_no_credit(
    gateway: Rig, scheduler: Scheduler, tmp_path: Path
) -> None:
    """The bytes that gRPC buffers for a slow client are bounded, and other streams continue."""
    unread_stream, other_stream = Stream(gateway), Stream(gateway)
    unread_stream.send_request("deaf")
    ((peer, number),) = first_requests(scheduler, 1)
    large_outputs = Inferred((TensorRef("OUT", "INT32", (4000,), bytes(16000)),))
    message = m.Responded(number, "", "", *pack_inferred(large_outputs), False)
    credit, sent_count, count_of_other = FIRST_CREDIT, 0, 0
    while credit > sent_count and sent_count < 100_000:
        scheduler.send(peer, *[message] * (credit - sent_count))
        sent_count = credit
        count_of_other += 1
        other_stream.send_request(f"other {count_of_other}")
        peer, last_call = first_requests(scheduler, 1 + count_of_other)[-1]
        scheduler.send(peer, response(last_call, sent_count, final=True))
        assert values(take(other_stream, 1)) == [(f"other {count_of_other}", sent_count, True)]
        credit = FIRST_CREDIT + granted_credit(scheduler, number)
    assert sent_count * 16000 < 64 << 20
    unread_stream.call.cancel()
    until("it is cancelled", lambda: number in _cancelled_ids(scheduler))
    unread_stream.close()
    other_stream.close()


def test_outputs_in_a_workers_memory_are_released(scheduler: Scheduler, stream: Stream) -> None:
    """This includes outputs that arrive after the disconnect."""
    arena = Arena(8 << 20)
    data = bytes(range(200)) * 200

    def large(number: int) -> m.Responded:
        memory_range = arena.allocate(len(data))
        arena.view(memory_range)[:] = data
        answer = Inferred((TensorRef("OUT", "INT32", (len(data) // 4,), memory_range),))
        return m.Responded(number, "", "", *pack_inferred(answer), False)

    def count_releases() -> int:
        releases = [sent for sent in scheduler.notifications if isinstance(sent, m.Release)]
        return sum(len(release.offsets) for release in releases)

    stream.send_request("a")
    ((peer, call_number),) = first_requests(scheduler, 1)
    scheduler.send(peer, large(call_number), large(call_number), response(call_number, 1))
    first, second, _ = take(stream, 3)
    assert [r.infer_response.raw_output_contents[0] for r in (first, second)] == [data, data]
    until("they are released", lambda: count_releases() == 2)
    stream.call.cancel()
    until("it is cancelled", lambda: call_number in _cancelled_ids(scheduler))
    scheduler.send(peer, large(call_number), end(call_number))
    until("what comes late is released", lambda: count_releases() == 3)
    arena.close()


def test_a_unary_call_of_a_decoupled_model_is_refused(gateway: Rig, scheduler: Scheduler) -> None:
    """Holds even if a stream has taught the schema of the request."""
    stream = Stream(gateway)
    for number in range(3):
        stream.send_request(str(number))
    for peer, request_id in first_requests(scheduler, 3):
        scheduler.send(peer, end(request_id))
    request = pb.ModelInferRequest(model_name="repeat", id="0")
    request.inputs.add(name="IN", datatype="INT32", shape=[1])
    request.raw_input_contents.append(bytes(4))
    with (
        grpc.insecure_channel(f"127.0.0.1:{gateway.port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    text = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    assert caught.value.details() == text
    stream.close()
