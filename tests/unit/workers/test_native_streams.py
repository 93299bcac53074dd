"""Native models whose `predict` yields responses or is a coroutine."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest

from shmserve.errors import Internal, InvalidArgument
from shmserve.ipc.credit import FIRST_CREDIT
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers.backends.native import NativeBackend
from tests.rigs.stream_rig import Streams
from tests.rigs.worker_rig import Region, Rig, inference, model_config, rig, tensor, tensor_config
from tests.support.waiting import until

HEAD = """
import asyncio, sys, threading, time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator
from typing import NamedTuple
import torch
from numpy import ndarray
from torch import Tensor
from shmserve.model import FP32

class Pair(NamedTuple):
    y: FP32[ndarray, -1]
    z: FP32[ndarray, -1]

class Model:
    records = []
"""
FAILED_REQUEST = "Failed to process the request(s) for model 'm_0_0', message: "
ARRAY = "FP32[ndarray, -1]"


LOADED_BACKENDS: list[NativeBackend] = []


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as model_rig:
        yield model_rig
        while LOADED_BACKENDS:
            LOADED_BACKENDS.pop().unload()


class Model(Streams):
    """A native model whose class has the given body."""

    def __init__(self, worker: Rig, body: str, **fields: Any) -> None:
        (worker.context.version_dir / "model.py").write_text(HEAD + indent(body, "    "))
        self.backend = NativeBackend(worker.context)
        self.config = self.backend.complete_config(model_config([], [], **fields))
        worker.serve(self.backend, self.config)
        LOADED_BACKENDS.append(self.backend)
        super().__init__(worker, "x", "output", self.config["max_batch_size"] > 0)

    @property
    def records(self) -> list[Any]:
        records: list[Any] = self.backend._model.records
        return records


MODEL_KINDS = {
    "generator": f"""
def predict(self, x: {ARRAY}) -> Iterator[{ARRAY}]:
    for n in range(int(x[0])):
        yield x + n
""",
    "asynchronous generator": f"""
async def predict(self, x: {ARRAY}) -> AsyncIterator[{ARRAY}]:
    for n in range(int(x[0])):
        await asyncio.sleep(0)
        yield x + n
""",
    "a method that returns an iterator": f"""
def predict(self, x: {ARRAY}) -> Iterable[{ARRAY}]:
    return [x + n for n in range(int(x[0]))]
""",
    "of tensors": """
def predict(self, x: FP32[Tensor, -1]) -> Generator[FP32[Tensor, -1], None, None]:
    for n in range(int(x[0])):
        assert torch.is_inference_mode_enabled()
        yield x + n
""",
    "asynchronous, of tensors": """
async def predict(self, x: FP32[Tensor, -1]) -> AsyncGenerator[FP32[Tensor, -1], None]:
    for n in range(int(x[0])):
        assert torch.is_inference_mode_enabled()
        yield x + n
""",
}


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_each_yield_is_a_response(worker: Rig, kind: str) -> None:
    model = Model(worker, MODEL_KINDS[kind])
    assert model.config["model_transaction_policy"] == {"decoupled": True}
    assert model.config["max_batch_size"] == 0
    assert "dynamic_batching" not in model.config
    with model.pumping():
        model.begin(3, 0, 1)
        assert model.responses(1) == [[3], [4], [5], "end"]
        assert model.responses(2) == ["end"] and model.responses(3) == [[1], "end"]
    assert worker.finished.replies == []


def test_rows_of_one_request(worker: Rig) -> None:
    m = Model(worker, "max_batch_size = 4" + MODEL_KINDS["generator"].replace("x[0]", "x[0, 0]"))
    assert m.config["max_batch_size"] == 4
    assert "dynamic_batching" not in m.config
    m.begin([2, 5])
    assert m.responses(1) == [[2, 5], [3, 6], "end"]


def test_several_outputs(worker: Rig) -> None:
    body = f"def predict(self, x: {ARRAY}) -> Iterator[Pair]:\n    yield Pair(x, -x)\n"
    model = Model(worker, body)
    assert [output["name"] for output in model.config["output"]] == ["y", "z"]


def test_inputs_are_the_models_own(worker: Rig, region: Region) -> None:
    memory_range = region.write(0, np.array([2], np.float32))
    body = f"""
def predict(self, x: {ARRAY}) -> Iterator[{ARRAY}]:
    x += 1
    yield x
    x += 1
    yield x
"""
    model = Model(worker, body)
    model.begin(2, memory_range=memory_range)
    assert model.responses(1) == [[3], [4], "end"]
    assert region.read(0, 4) == np.array([2], np.float32).tobytes()


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_error_ends_the_stream(worker: Rig, kind: str) -> None:
    iterator = "AsyncIterator" if "async" in kind else "Iterator"
    body = f"""
{kind} predict(self, x: {ARRAY}) -> {iterator}[{ARRAY}]:
    if x[0] < 0:
        raise ValueError("before")
    yield x
    raise ValueError("after")
"""
    model = Model(worker, body)
    model.begin(1, -1)
    assert model.responses(1) == [[1], f"{FAILED_REQUEST}ValueError: after", "end"]
    assert model.responses(2) == [f"{FAILED_REQUEST}ValueError: before", "end"]


def test_a_yielded_value_that_is_no_tensor_ends_the_stream(worker: Rig) -> None:
    model = Model(worker, f"def predict(self, x: {ARRAY}) -> Iterator[{ARRAY}]:\n    yield 'text'")
    model.begin(1)
    error, end = model.responses(1)
    assert error.startswith("inference output 'output' is a str, not a tensor")
    assert end == "end"


def test_load_may_replace_predict(worker: Rig) -> None:
    body = f"""
def load(self, context):
    self.predict = lambda x: iter([x + 1])
def predict(self, x: {ARRAY}) -> Iterator[{ARRAY}]: ...
"""
    model = Model(worker, body)
    model.begin(1)
    assert model.responses(1) == [[2], "end"]


def test_a_disconnecting_client_closes_the_generator(worker: Rig) -> None:
    body = f"""
def predict(self, x: {ARRAY}) -> Iterator[{ARRAY}]:
    try:
        while True:
            yield x
    except GeneratorExit:
        self.records.append("closed")
        raise
"""
    model = Model(worker, body)
    with model.pumping():
        model.begin(7)
        assert model.responses(1, FIRST_CREDIT) == [[7]] * FIRST_CREDIT
        model.cancel(1)
        assert model.responses(1)[-1] == "end"
    assert model.records == ["closed"]


def test_a_disconnecting_client_cancels_the_asynchronous_generator(worker: Rig) -> None:
    body = f"""
async def predict(self, x: {ARRAY}) -> AsyncIterator[{ARRAY}]:
    try:
        yield x
        await asyncio.Event().wait()
    finally:
        self.records.append("closed")
"""
    model = Model(worker, body)
    with model.pumping():
        model.begin(7)
        assert model.responses(1, 1) == [[7]]
        model.cancel(1)
        assert model.responses(1) == [[7], "request cancelled", "end"]
        until("it is closed", lambda: model.records == ["closed"])


def test_a_new_scheduler_ends_the_streams_of_the_previous_one(worker: Rig) -> None:
    """The second stream waits for the slot of the first one, and the third one receives it."""
    body = f"""
max_streams = 1
async def predict(self, x: {ARRAY}) -> AsyncIterator[{ARRAY}]:
    try:
        yield x
        await asyncio.Event().wait()
    finally:
        self.records.append("closed")
"""
    model = Model(worker, body)
    with model.pumping():
        model.begin(7, 8)
        assert model.responses(1, 1) == [[7]]
    worker.attach()
    until("it is closed", lambda: "closed" in model.records)
    assert not worker.instance.link.has_open_requests
    model.messages.clear()
    with model.pumping():
        model.begin(9)
        assert model.responses(1, 1) == [[9]]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_long_computation_can_check_for_its_clients_disconnect(worker: Rig, kind: str) -> None:
    iterator = "AsyncIterator" if "async" in kind else "Iterator"
    body = f"""
def load(self, context):
    self.context = context

{kind} predict(self, x: {ARRAY}) -> {iterator}[{ARRAY}]:
    yield x
    self.records.append("computes")
    while not self.context.cancelled:
        time.sleep(0.001)
    self.records.append("seen")
"""
    model = Model(worker, body)
    with model.pumping():
        model.begin(7)
        assert model.responses(1, 1) == [[7]]
        until("it goes on", lambda: model.records == ["computes"])
        model.cancel(1)
        assert model.responses(1) == [[7], *["request cancelled"] * ("async" in kind), "end"]
        until("it is seen", lambda: model.records == ["computes", "seen"])
    assert not model.backend._model.context.cancelled, "outside of a request"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_model_reports_whether_it_is_ready(worker: Rig, kind: str, stream: bool) -> None:
    result = "AsyncIterator" if stream else ""
    body = f"""
async def predict(self, x: {ARRAY}) -> {f"{result}[{ARRAY}]" if stream else ARRAY}:
    {"yield" if stream else "return"} x

{kind} is_ready(self):
    assert torch.is_inference_mode_enabled()
    return self.records[-1]
"""
    model = Model(worker, body)
    assert model.backend.checks_ready
    for records in (True, False):
        model.records.append(records)
        assert model.backend.is_ready() is records
    model.records.append(1)
    with pytest.raises(Internal, match="`is_ready` must return a bool, found type '<class 'int'>'"):
        model.backend.is_ready()


def test_batches_run_while_a_model_reports_whether_it_is_ready(worker: Rig) -> None:
    body = f"""
go = asyncio.Event()
async def predict(self, x: {ARRAY}) -> {ARRAY}:
    self.go.set()
    return x if x.all() else sys.exit("no data")

async def is_ready(self):
    self.records.append("waits")
    await self.go.wait()
    return True
"""
    model = Model(worker, body)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(model.backend.is_ready()))
    thread.start()
    until("it waits", lambda: model.records)
    reply = worker.infer(tensor("x", np.ones((1, 1), np.float32)))
    assert reply.array("output").tolist() == [[1]]
    thread.join()
    assert results == [True]
    reply = worker.infer(tensor("x", np.zeros((1, 1), np.float32)))
    assert reply.message == f"{FAILED_REQUEST}SystemExit: no data"
    assert model.backend.is_ready()


def test_any_number_of_cancelled_requests_may_wait(worker: Rig) -> None:
    body = f"""
max_streams = 1
go = threading.Event()
def predict(self, x: {ARRAY}) -> Iterator[{ARRAY}]:
    self.go.wait(10)
    yield x
"""
    model = Model(worker, body)
    count = sys.getrecursionlimit()
    model.begin(*range(count))
    for key in range(2, count):
        model.cancel(key)
    model.backend._model.go.set()
    with model.pumping():  # the messages of all requests may be larger than the socket's buffer
        assert model.responses(count) == [[count - 1], "end"]


def test_a_model_without_is_ready_is_not_checked(worker: Rig) -> None:
    assert not Model(worker, MODEL_KINDS["generator"]).backend.checks_ready


@pytest.mark.parametrize("kind", ["generator", "asynchronous generator"])
def test_a_stream_without_credit_does_not_delay_other_streams(worker: Rig, kind: str) -> None:
    model = Model(worker, MODEL_KINDS[kind])
    with model.pumping():
        model.begin(2 * FIRST_CREDIT, 2)
        assert len(model.responses(1, FIRST_CREDIT)) == FIRST_CREDIT
        assert model.responses(2) == [[2], [3], "end"]
        model.credit(1, FIRST_CREDIT)
        assert len(model.responses(1)) == 2 * FIRST_CREDIT + 1


def test_waiting_streams_do_not_block_others(worker: Rig) -> None:
    """Each waiting stream has its own thread, whatever their number."""
    stream_count = 40
    model = Model(worker, MODEL_KINDS["asynchronous generator"])
    with model.pumping():
        model.begin(*([2 * FIRST_CREDIT] * (stream_count + 1)))
        for key in range(1, stream_count + 2):
            assert len(model.responses(key, FIRST_CREDIT)) == FIRST_CREDIT
        model.credit(stream_count + 1, FIRST_CREDIT)
        assert len(model.responses(stream_count + 1)) == 2 * FIRST_CREDIT + 1
        for key in range(1, stream_count + 1):
            model.cancel(key)
        assert model.responses(1)[-1] == "end"


def test_max_streams_run_at_a_time(worker: Rig) -> None:
    body = f"""
max_streams = 2
go = threading.Event()
def predict(self, x: {ARRAY}) -> Iterator[{ARRAY}]:
    self.records.append(int(x[0]))
    if len(self.records) == 2:
        threading.Timer(0.1, self.go.set).start()
    self.go.wait(10)
    self.records.append(-int(x[0]))
    yield x
"""
    model = Model(worker, body)
    model.begin(1, 2, 3)
    for key in (1, 2, 3):
        assert model.responses(key) == [[key], "end"]
    assert sorted(model.records[:2]) == [1, 2]
    assert model.records.index(3) > 2, "it began when one had ended"


def test_an_asynchronous_model_responds_once(worker: Rig) -> None:
    body = f"""
async def predict(self, x: {ARRAY}) -> {ARRAY}:
    await asyncio.sleep(0)
    return x * 2
"""
    assert "model_transaction_policy" not in Model(worker, body).config
    rows = [np.array([[n]], np.float32) for n in (1, 2)]
    replies = worker.batch(*(inference(tensor("x", row)) for row in rows))
    assert [reply.array("output").tolist() for reply in replies] == [[[2]], [[4]]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"def predict(self, x: {ARRAY}) -> {ARRAY}:\n    yield x", "'-> Iterator[...]'"),
        (f"async def predict(self, x: {ARRAY}) -> {ARRAY}:\n    yield x", "'-> AsyncIterator"),
        (f"def predict(self, x: {ARRAY}) -> Iterator:\n    yield x", "'-> Iterator[...]'"),
        (f"def predict(self, x: {ARRAY}) -> Iterator[int]:\n    yield x", "is not a tensor"),
    ],
)
def test_a_generator_must_declare_its_values(worker: Rig, body: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Model(worker, body)
    assert message in caught.value.message


@pytest.mark.parametrize("streams", [False, True])
def test_configuration_and_predict_must_agree(worker: Rig, streams: bool) -> None:
    kind = "generator" if streams else "of tensors"
    body = (
        MODEL_KINDS[kind]
        if streams
        else f"def predict(self, x: {ARRAY}) -> {ARRAY}:\n    return x\n"
    )
    (worker.context.version_dir / "model.py").write_text(HEAD + indent(body, "    "))
    tensors = [tensor_config("x", "FP32", [-1])], [tensor_config("output", "FP32", [-1])]
    config = model_config(*tensors, model_transaction_policy={"decoupled": not streams})
    with pytest.raises(InvalidArgument, match="transaction policy"):
        NativeBackend(worker.context).load(ModelSpec.of(config))
