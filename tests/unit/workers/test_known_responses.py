"""Small responses of a form that was there before are put together, not written anew: they are the
same as the first one, and what differs is checked as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.ipc.messages.inference import Work
from shmserve.ipc.tensors.inference import (
    Inference,
    RequestedOutput,
    pack_inference,
    unpack_inference,
)
from shmserve.workers.backends import Output, Request, Response
from shmserve.workers.batch import unpack
from tests.rigs.worker_rig import (
    CLIENT_PID,
    FunctionBackend,
    Rig,
    inference,
    model_config,
    rig,
    tensor,
    tensor_config,
)

CONFIG = model_config(
    [tensor_config("X", "FP32", [-1])],
    [tensor_config("A", "FP32", [-1]), tensor_config("B", "INT32", [-1, 2])],
)
A = st.tuples(st.just("A"), st.sampled_from(["<f4", ">f4", "<f8"]), st.sampled_from([(1,), (3,)]))
B = st.tuples(
    st.just("B"), st.sampled_from(["<i4", ">i4"]), st.sampled_from([(1, 2), (2, 2), (2,)])
)
C = st.tuples(st.just("C"), st.just("<i4"), st.just((1,)))
RESPONSES = st.lists(
    st.tuples(
        st.lists(st.one_of(A, B, C), max_size=3, unique_by=lambda item: item[0]),
        st.sampled_from([(), ("A",), ("B", "A")]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as made:
        yield made


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(responses=RESPONSES)
def test_what_comes_again_is_as_it_would_be_alone(worker: Rig, responses: Any) -> None:
    made: list[Response] = []
    worker.serve(FunctionBackend(worker.context, lambda requests: [made[-1]]), CONFIG)
    for count, (outputs, wanted, parameters) in enumerate(responses * 3):
        arrays = {
            name: (np.arange(np.prod(shape)) + count).astype(kind).reshape(shape)
            for name, kind, shape in outputs
        }
        kinds = {"A": "FP32", "B": "INT32", "C": "INT32"}
        made.append(
            Response(
                [Output(name, kinds[name], array) for name, array in arrays.items()],
                {"n": 1} if parameters else {},
            )
        )
        asked = [RequestedOutput(name) for name in wanted]
        (reply,) = worker.batch(inference(tensor("X", np.zeros(1, np.float32)), outputs=asked))
        visible = {name: array for name, array in arrays.items() if name in (wanted or ("A", "B"))}
        wrong = ("A" in visible and visible["A"].dtype == np.float64) or (
            "B" in visible and visible["B"].ndim != 2
        )
        assert (reply.code != "") == wrong, reply.message
        if wrong:
            continue
        assert reply.answer is not None
        assert [ref.name for ref in reply.answer.outputs] == list(visible)
        assert reply.answer.parameters == ({"n": 1} if parameters else {})
        for name, array in visible.items():
            assert np.array_equal(reply.array(name), array)
        assert worker.finished.copied_out == sum(array.nbytes for array in visible.values())


def test_rows_of_another_number_are_checked(worker: Rig) -> None:
    """The shape that a model may give depends on how many rows it was asked for."""
    config = model_config(
        [tensor_config("X", "FP32", [1])], [tensor_config("Y", "FP32", [1])], max_batch_size=8
    )

    def two(requests: list[Request]) -> list[Response]:
        return [Response([Output("Y", "FP32", np.ones((2, 1), np.float32))]) for _ in requests]

    worker.serve(FunctionBackend(worker.context, two), config)
    for rows, code in [(2, "")] * 4 + [(3, "INTERNAL"), (2, "")]:
        (reply,) = worker.batch(inference(tensor("X", np.ones((rows, 1), np.float32))))
        assert reply.code == code


def test_requests_that_only_say_other_things_are_read_once(
    worker: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ids, sequences and limits are beside what is packed, and each has its own."""
    seen: list[Any] = []
    read: list[bytes] = []

    def execute(requests: list[Request]) -> list[Response]:
        seen.extend(request.work for request in requests)
        return [Response([Output("A", "FP32", np.zeros(1, "f4"))]) for _ in requests]

    def counted(packed: bytes) -> Inference:
        read.append(packed)
        return unpack_inference(packed)

    monkeypatch.setattr(unpack, "unpack_inference", counted)
    worker.serve(FunctionBackend(worker.context, execute), CONFIG)
    sent = [
        Work(
            1,
            CLIENT_PID,
            pack_inference(inference(tensor("X", np.full(2, number, np.float32)))),
            request_id=f"id-{number}",
            flags=number % 4,
            correlation_id=number,
            correlation_text="x" * (number % 3),
            timeout_us=number,
            priority=number,
            deadline_ns=number,
        )
        for number in range(8)
    ]
    for work in sent:
        worker.execute([work])
    assert seen == sent
    assert len(read) == 2  # the first, and the second, which it is learnt from
