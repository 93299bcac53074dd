"""The Python backend: models written for Triton, in a worker's loop, batch by batch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from shmserve.errors import Internal, InvalidArgument, Unavailable
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.messages.inference import Cancel, Failed, Finished, Submit
from shmserve.ipc.messages.supervision import WorkerStarted
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.tensors.schemas import INLINE_LIMIT, Inference
from shmserve.workers.backends.python import PythonBackend, log_thread_exception, metrics
from shmserve.workers.main import WorkerInstance
from tests.rigs.called_models import CalledModels, finished, work
from tests.rigs.worker_rig import Region, Rig, inference, model_config, tensor, tensor_config

BIG_SIZE = INLINE_LIMIT  # number of FP32 elements; such a tensor is too large for a message
MODULE_HEAD = """
import asyncio, json, threading
import numpy as np
import triton_python_backend_utils as pb_utils

def given(request, name="X"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

def response(array, **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)], **more)

def failure(text):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))

def first(kept):
    if hasattr(kept, "inputs"):
        kept = kept.inputs()[0]
    return float((kept.as_numpy() if hasattr(kept, "as_numpy") else kept)[0])

class TritonPythonModel:
"""


def config(**fields: Any) -> dict[str, Any]:
    configuration = model_config(
        [tensor_config("X", "FP32", [-1])], [tensor_config("Y", "FP32", [-1])], **fields
    )
    return {**configuration, "backend": "python"}


class Model:
    """A model whose class has the given body."""

    def __init__(self, worker_rig: Rig) -> None:
        self.rig = worker_rig
        self.backend = PythonBackend(worker_rig.context)

    def write(self, body: str, file: str = "model.py") -> Model:
        path = self.rig.context.version_dir / file
        path.write_text(MODULE_HEAD + "".join(f"    {row}\n" for row in dedent(body).splitlines()))
        return self

    def serve(self, body: str, **fields: Any) -> Model:
        self.write(body)
        self.rig.serve(self.backend, config(**fields))
        return self

    def infer(self, *values: Any, **fields: Any) -> list[str | list[float]]:
        """Return the outputs of one batch of requests with small inputs, or their error texts."""
        return self.run(*(input_x(value) for value in values), **fields)

    def run(self, *inputs: TensorRef, **fields: Any) -> list[str | list[float]]:
        parameters = fields.pop("parameters", {})
        requests = [Inference((item,), (), parameters) for item in inputs]
        replies = self.rig.batch(*requests, **fields)
        return [r.message if r.code else r.array("Y", self.rig).tolist() for r in replies]


def input_x(values: Any, memory_range: Range | None = None) -> TensorRef:
    return tensor("X", np.atleast_1d(np.asarray(values, dtype=np.float32)), memory_range)


@pytest.fixture
def model(worker: Rig) -> Iterator[Model]:
    model = Model(worker)
    yield model
    model.backend.unload()
    torch.set_warn_always(False)


@pytest.fixture
def callees(model: Model, tmp_path: Path) -> Iterator[CalledModels]:
    called_models = CalledModels(tmp_path, model.rig.supervisor)
    model.rig.context.control.send(WorkerStarted(1))
    called_models.supervisor.next(WorkerStarted)  # type: ignore[type-var]
    yield called_models
    called_models.close()


def failure_text(text: str) -> str:
    return f"Failed to process the request(s) for model 'm_0_0', message: {text}"


# --- loading


def test_the_arguments_of_initialize(model: Model) -> None:
    model.serve("""
        def initialize(self, args):
            self.told = {"args": args, "dir": pb_utils.get_model_dir()}
        def execute(self, requests):
            return [response(np.zeros(1), parameters={"told": json.dumps(self.told)})]
        """)
    reply = model.rig.infer(input_x(0))
    assert reply.answer is not None
    seen_request = json.loads(reply.answer.parameters["told"])
    context = model.rig.context
    assert json.loads(seen_request["args"].pop("model_config")) == config()
    assert seen_request == {
        "args": {
            "model_instance_kind": "CPU",
            "model_instance_name": "m_0_0",
            "model_instance_device_id": "0",
            "model_repository": str(context.model_dir),
            "model_version": "1",
            "model_name": "m",
        },
        "dir": str(context.version_dir),
    }


def test_modules_beside_the_model(model: Model) -> None:
    context = model.rig.context
    (context.version_dir / "helper_a.py").write_text("A = 1\n")
    (context.model_dir / "helper_b.py").write_text("B = 2\n")
    (context.version_dir / "helper_c.py").write_text("C = 3\n")
    model.serve("""
        def execute(self, requests):
            import helper_a, helper_b
            from . import helper_c
            return [response(np.array([helper_a.A, helper_b.B, helper_c.C], "f4"))]
        """)
    assert model.infer(0) == [[1, 2, 3]]


def test_a_version_folder_that_is_a_package(model: Model) -> None:
    (model.rig.context.version_dir / "__init__.py").write_text("D = 4\n")
    model.serve("""
        def execute(self, requests):
            from . import D
            return [response(np.array([D], "f4"))]
        """)
    assert model.infer(0) == [[4]]


def test_another_file_name(model: Model) -> None:
    body = "def execute(self, requests): return [response(np.ones(1, 'f4'))]"
    model.write(body, "other.py")
    model.rig.serve(model.backend, config(default_model_filename="other.py"))
    assert model.infer(0) == [[1]]


@pytest.mark.parametrize(
    ("body", "fields", "kind", "text"),
    [
        (None, {}, Unavailable, "Python model file '1/model.py' not found"),
        ("pass", {"default_model_filename": "m.pt"}, InvalidArgument, "must end with '.py'"),
        ("pass", {}, InvalidArgument, "does not implement `execute` method"),
        ("def initialize(self, args): 1 / 0\ndef execute(self, requests): pass", {},
         ZeroDivisionError, "division by zero"),
    ],
)  # fmt: skip
def test_models_that_do_not_load(
    model: Model, body: str | None, fields: dict[str, Any], kind: type[Exception], text: str
) -> None:
    if body is not None:
        model.write(body)
    with pytest.raises(kind, match=text):
        model.backend.load(ModelSpec.of(config(**fields)))


def test_a_folder_with_the_name_of_the_file(model: Model) -> None:
    (model.rig.context.version_dir / "model.py").mkdir()
    with pytest.raises(Unavailable, match=r"'1/model.py' not found: it is a folder$"):
        model.backend.load(ModelSpec.of(config()))


@pytest.mark.parametrize("character", ";|&$`<>()[]{}\\\"'*?~#!")
def test_names_that_a_shell_would_read_are_refused(model: Model, character: str) -> None:
    backend = PythonBackend(replace(model.rig.context, model_name=f"a{character}b"))
    with pytest.raises(InvalidArgument, match="Invalid stub name: contains invalid characters"):
        backend.load(ModelSpec.of(config()))
    with pytest.raises(InvalidArgument, match="Invalid stub name: contains invalid characters"):
        backend.complete_config(config())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1\n", r"no class TritonPythonModel$"),
        ("class Mine: ...\n", "'predict' is served, too, but its class Mine has none"),
        ("import torch\nclass Net(torch.nn.Module): ...\n", 'nn.Module: write backend: "pytorch"'),
        ("class Blur:\n    def predict(self, x): ...\n", 'write backend: "native"'),
    ],
)
def test_a_file_without_the_class_is_refused(model: Model, text: str, error: str) -> None:
    """Another kind of class is named, with the backend that serves it."""
    (model.rig.context.version_dir / "model.py").write_text(text)
    with pytest.raises(InvalidArgument, match=error):
        model.backend.load(ModelSpec.of(config()))


def test_auto_complete(model: Model) -> None:
    model.write("""
        @staticmethod
        def auto_complete_config(config):
            assert isinstance(config, pb_utils.ModelConfig)
            config.set_max_batch_size(8)
            return config
        """)
    assert model.backend.complete_config(config()) == config(max_batch_size=8)


def test_nothing_to_auto_complete(model: Model) -> None:
    model.write("pass")
    assert model.backend.complete_config(config()) == config()


def test_auto_complete_that_returns_nothing(model: Model) -> None:
    model.write("@staticmethod\ndef auto_complete_config(config): pass")
    with pytest.raises(Internal, match="must return a valid"):
        model.backend.complete_config(config())


def test_auto_complete_that_returns_invalid_json(model: Model) -> None:
    """Such a configuration could not be sent to the server either."""
    model.write("""
        @staticmethod
        def auto_complete_config(config):
            config.set_max_batch_size(np.int64(8))
            return config
        """)
    with pytest.raises(TypeError, match="int64 is not JSON serializable"):
        model.backend.complete_config(config())


def test_finalize(model: Model, tmp_path: Path) -> None:
    marker_file = tmp_path / "finalized"
    model.serve(f"""
        def execute(self, requests): return [response(np.ones(1, 'f4'))]
        def finalize(self): open({str(marker_file)!r}, "w").close()
        """)
    assert model.infer(0) == [[1]]
    model.backend.unload()
    assert marker_file.exists()
    model.backend = PythonBackend(model.rig.context)


# --- execution


def test_a_batch_in_order(model: Model) -> None:
    model.serve("def execute(self, requests): return [response(2 * given(r)) for r in requests]")
    assert model.infer(1, 2, [3, 4]) == [[2], [4], [6, 8]]


def test_errors_of_single_requests(model: Model) -> None:
    model.serve("""
        def execute(self, requests):
            codes = [pb_utils.TritonError.NOT_FOUND, pb_utils.TritonError.UNAVAILABLE]
            return [
                response(given(r)) if given(r)[0] > 1 else
                pb_utils.InferenceResponse([], pb_utils.TritonError("no", codes[int(given(r)[0])]))
                for r in requests
            ]
        """)
    requests = [inference(input_x(n)) for n in (0, 1, 2)]
    replies = model.rig.batch(*requests)
    assert [reply.code for reply in replies] == ["NOT_FOUND", "UNAVAILABLE", ""]
    assert replies[0].message == "no"


def test_an_exception_fails_only_the_requests_that_caused_it(model: Model) -> None:
    model.serve("""
        def execute(self, requests):
            for request in requests:
                if given(request)[0] < 0:
                    raise ValueError("below zero")
            return [response(given(r)) for r in requests]
        """)
    assert model.infer(1, -1, 2) == [[1], failure_text("ValueError: below zero"), [2]]


@pytest.mark.parametrize("statement", ["raise self", "return ''"])
def test_an_exception_without_a_text(model: Model, statement: str) -> None:
    model.serve(f"""
        class Mute(Exception):
            def __str__(self):
                {statement}

        def execute(self, requests):
            raise self.Mute()
        """)
    assert model.infer(1) == [failure_text("Mute")]


@pytest.mark.parametrize(
    ("returned_value", "text"),
    [
        ("7", "Expected a list in the execute return, found type '<class 'int'>'."),
        ("None", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        ("(yield)", "Expected a list in the execute return, found type '<class 'generator'>'."),
        ("[]", "Number of InferenceResponse objects do not match the number of InferenceRequest "
         "objects. InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"),
        ("[7]", "Expected an 'InferenceResponse' object in the execute function return list, found "
         "type '<class 'int'>'."),
        ("[None]",
         "Expected an 'InferenceResponse' object in the execute function return list, found "
         "type '<class 'NoneType'>'."),
    ],
)  # fmt: skip
def test_wrong_return_values_are_errors(model: Model, returned_value: str, text: str) -> None:
    model.serve(f"def execute(self, requests): return {returned_value}")
    assert model.infer(0) == [failure_text(text)]


def test_an_entry_of_a_batch_that_is_none(model: Model) -> None:
    model.serve("""
        def execute(self, requests):
            return [response(given(r)) if given(r)[0] else None for r in requests]
        """)
    good_output, bad_output = model.infer(1, 0)
    assert good_output == [1]
    assert isinstance(bad_output, str) and "found type '<class 'NoneType'>'" in bad_output


NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
    "configured to handle such a flag."
)


@pytest.mark.parametrize(
    ("returned_value", "text"),
    [
        ("[None]", NOT_ITERATIVE),
        ("None", NOT_ITERATIVE),
        ("[response(given(requests[0]))]",
         failure_text("Expected a None object in the execute function return list for reschduled "
         "request, found type '<class 'shmserve.workers.backends.python.request."
         "InferenceResponse'>'.")),
    ],
)  # fmt: skip
def test_rescheduling_is_refused(model: Model, returned_value: str, text: str) -> None:
    model.serve(f"""
        def execute(self, requests):
            requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return {returned_value}
        """)
    assert model.infer(0) == [text]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return True", True),
        ("return False", False),
        ("return 1", "`is_ready` must return a bool, found type '<class 'int'>'"),
        ("raise ValueError('odd')", "odd"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_model_reports_whether_it_is_ready(
    model: Model, kind: str, body: str, expected: bool | str
) -> None:
    model.serve(f"def execute(self, requests): pass\n{kind} is_ready(self): {body}")
    assert model.backend.checks_ready
    if isinstance(expected, bool):
        assert model.backend.is_ready() is expected
    else:
        with pytest.raises(Exception, match=expected):
            model.backend.is_ready()


def test_is_ready_runs_in_the_loop_of_execute(model: Model) -> None:
    """An object of a model, such as a connection, may belong to the loop."""
    model.serve("""
        loops = set()
        async def execute(self, requests):
            self.loops.add(asyncio.get_running_loop())
            return [response(given(r)) for r in requests]
        async def is_ready(self):
            self.loops.add(asyncio.get_running_loop())
            return len(self.loops) == 1
        """)
    assert model.infer(1) == [[1]] and model.backend.is_ready() and model.infer(2) == [[2]]


def test_a_readiness_check_that_is_no_coroutine_leaves_batches_in_their_thread(
    model: Model,
) -> None:
    model.serve("""
        async def execute(self, requests):
            self.thread = threading.get_ident()
            return [response(given(r)) for r in requests]
        def is_ready(self):
            return self.thread == threading.get_ident()
        """)
    assert model.infer(1) == [[1]] and model.backend.is_ready()


def test_an_attribute_named_is_ready_is_not_called(model: Model) -> None:
    model.serve("is_ready = True\ndef execute(self, requests): pass")
    assert not model.backend.checks_ready


def test_outputs_are_sent_as_the_model_made_them(model: Model) -> None:
    """Like Triton's, the Python backend does not compare outputs with the configuration."""
    model.serve("def execute(self, requests): return [response(np.ones((2, 1), 'f8'))]")
    reply = model.rig.infer(input_x(0))
    (output,) = reply.outputs
    assert (output.datatype, output.shape) == ("FP64", (2, 1))


def test_a_model_sees_the_cancellation(model: Model) -> None:
    model.serve("""
        def execute(self, requests):
            return [response(np.array([request.is_cancelled()], "f4")) for request in requests]
        """)
    model.rig.cancel(2)
    assert model.infer(0, 0, 0) == [[0], "Request was cancelled", [0]]


# --- coroutines and response senders


def test_coroutines_share_a_loop(model: Model) -> None:
    model.serve("""
        loops = set()
        async def execute(self, requests):
            self.loops.add(id(asyncio.get_running_loop()))
            await asyncio.sleep(0)
            assert len(self.loops) == 1
            return [response(given(r)) for r in requests]
        """)
    assert model.infer(1, 2) == [[1], [2]] and model.infer(3) == [[3]]


def test_a_coroutine_raises(model: Model) -> None:
    model.serve("async def execute(self, requests): raise ValueError('from a coroutine')")
    assert model.infer(0) == [failure_text("ValueError: from a coroutine")]


@pytest.mark.parametrize("returned_value", ["None", "[None] * len(requests)"])
def test_responses_that_were_sent(model: Model, returned_value: str) -> None:
    model.serve(f"""
        def execute(self, requests):
            for request in requests:
                array = given(request).copy()
                request.get_response_sender().send(response(array), flags=1)
                array[:] = -1  # too late
            return {returned_value}
        """)
    assert model.infer(1, 2) == [[1], [2]]


def test_a_thread_that_raises(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's request fails with its exception, unless the request has ended before."""
    monkeypatch.setattr(threading, "excepthook", log_thread_exception)
    model.serve("""
        def execute(self, requests):
            for request in requests:
                args = (given(request), request.get_response_sender())
                threading.Thread(target=self.respond, args=args).start()

        def respond(self, array, sender):
            if array[0] == 1:
                sender.send(response(array))
            raise ValueError("mine")
        """)
    first_output, second_output = model.infer(1, 2)
    assert first_output == [1]
    assert isinstance(second_output, str) and second_output.endswith("message: ValueError: mine")


def test_an_unused_sender_ends_its_request(model: Model) -> None:
    model.serve("def execute(self, requests): requests[0].get_response_sender()")
    (text,) = model.infer(1)
    assert isinstance(text, str) and "found type '<class 'NoneType'>'" in text


# Models that respond with the input of each request.
IDENTITY_BODIES = {
    "a list that is emptied": """
        def execute(self, requests):
            responses = []
            while requests:
                responses.append(response(given(requests.pop(0))))
            return responses
        """,
    "tasks": """
        async def execute(self, requests):
            for request in requests:
                asyncio.get_running_loop().create_task(self.answer(request))
        async def answer(self, request):
            sender = request.get_response_sender()
            await asyncio.sleep(0.02)
            sender.send(response(given(request)))
        """,
    "a response beside an unused sender": """
        senders = []
        def execute(self, requests):
            self.senders += [request.get_response_sender() for request in requests]
            return [response(given(request)) for request in requests]
        """,
    "responses before an error": """
        def execute(self, requests):
            for request in requests:
                request.get_response_sender().send(response(given(request)))
            raise ValueError("afterwards")
        """,
}
# Models that respond with the input of the first request.
SINGLE_IDENTITIES = {
    "other release flags": """
        def execute(self, requests):
            for flags in (0, pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL, 5):
                requests[0].set_release_flags(flags)
            for flags in (-1, "x", None):
                try:
                    requests[0].set_release_flags(flags)
                except TypeError:
                    continue
                raise AssertionError(flags)
            return [response(given(r)) for r in requests]
        """,
    "a thread": """
        def execute(self, requests):
            array = given(requests[0])
            sender = requests[0].get_response_sender()
            timer = threading.Timer(0.05, lambda: sender.send(response(array)))
            timer.start()
        """,
    "more than one response": """
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            assert not sender.is_cancelled()
            sender.send(response(given(requests[0])))
            try:
                sender.send(response(given(requests[0])))
            except pb_utils.TritonModelException as error:
                assert "cannot send more than one response" in str(error)
            sender.send(flags=1)
            try:
                sender.send(flags=1)
            except pb_utils.TritonModelException as error:
                assert "has been closed" in str(error)
        """,
}


@pytest.mark.parametrize("body", IDENTITY_BODIES.values(), ids=IDENTITY_BODIES)
def test_each_request_has_its_response(model: Model, body: str) -> None:
    model.serve(body)
    assert model.infer(1, 2) == [[1], [2]]


@pytest.mark.parametrize("body", SINGLE_IDENTITIES.values(), ids=SINGLE_IDENTITIES)
def test_a_request_has_its_response(model: Model, body: str) -> None:
    model.serve(body)
    assert model.infer(3) == [[3]]


@pytest.mark.parametrize(
    ("send_call", "text"),
    [
        ("send()", "must be provided when the response flags is set to zero."),
        ("send(flags=7)", "Unsupported flag provided."),
        ("send(flags=1)", "cannot send complete final before sending a response."),
        ("send(R()); return [R()]", "cannot send more than one response."),
    ],
)
def test_sends_that_are_refused(model: Model, send_call: str, text: str) -> None:
    model.serve(f"""
        def execute(self, requests, R=pb_utils.InferenceResponse):
            requests[0].get_response_sender().{send_call}
        """)
    (response,) = model.infer(0)
    assert isinstance(response, str) and response.endswith(text)
    assert "TritonModelException" in response


# --- inputs in reused memory


def big_input(region: Region, value: float) -> TensorRef:
    array = np.full(BIG_SIZE // 4, value, np.float32)
    return input_x(array, region.write(0, array))


def run_rounds(model: Model, region: Region, count: int = 12) -> list[Any]:
    """Return the first element of each response to `count` requests in the same memory range."""
    return [
        answer if isinstance(answer, str) else answer[0]
        for number in range(count)
        for answer in model.run(big_input(region, number))
    ]


def test_a_model_that_only_reads_gets_views(model: Model, region: Region) -> None:
    model.serve("""
        def execute(self, requests):
            array = given(requests[0])
            copied = array.flags.writeable
            return [response(np.array([copied], "f4"))]
        """)
    assert run_rounds(model, region, 11) == [1] * 8 + [0] * 3


@pytest.mark.parametrize("output", ["array", "array[:1]", "array.reshape(-1, 2)[0]", "2 * array"])
def test_outputs_that_are_inputs_are_not_kept(model: Model, region: Region, output: str) -> None:
    model.serve(f"""
        def execute(self, requests):
            array = given(requests[0])
            self.copied = array.flags.writeable
            return [response({output})]
        """)
    factor = 2 if "2 *" in output else 1
    assert run_rounds(model, region, 10) == [factor * n for n in range(10)]
    assert not model.backend._model.copied


@pytest.mark.parametrize(
    ("keep", "first"),
    [
        ("given(r)", 0), ("given(r)[:5]", 0), ("torch.from_numpy(given(r))", 0),
        ("r.inputs()[0]", 20), ("r", 20), ("given(r)", 20), ("given(r)[:5]", 20),
        ("given(r)[::-1][-5:][::-1]", 20), ("torch.from_numpy(given(r))", 20),
    ],
)  # fmt: skip
def test_a_model_that_keeps_its_inputs(model: Model, region: Region, keep: str, first: int) -> None:
    """Values from `first` on are kept: a model may begin to keep its inputs late."""
    model.serve(f"""
        kept = []
        def execute(self, requests):
            import torch
            for r in requests:
                if given(r)[0] >= {first}:
                    self.kept.append({keep})
            return [response(np.array([first(k) for k in self.kept] or [-1], "f4"))]
        """)
    for number in range(24):
        (response,) = model.run(big_input(region, number))
        assert response == (list(range(first, number + 1)) or [-1])


WRITE_STATEMENTS: dict[str, str] = {
    "numpy": "array[:] = -1",
    "torch": "import torch; torch.from_numpy(array).fill_(-1)",
    "dlpack": "import torch; torch.from_dlpack(requests[0].inputs()[0]).fill_(-1)",
}


@pytest.mark.parametrize("write", WRITE_STATEMENTS)
@pytest.mark.parametrize("first", [0, 20])
def test_a_model_that_writes_into_its_inputs(
    model: Model, region: Region, write: str, first: int
) -> None:
    """Models may write to their inputs. The client's memory does not change."""
    model.serve(f"""
        def execute(self, requests):
            array = given(requests[0])
            first = array[0]
            if first >= {first}:
                {WRITE_STATEMENTS[write]}
            return [response(np.array([first], "f4"))]
        """)
    for number in range(24):
        assert model.run(big_input(region, number)) == [[number]]
        assert (np.frombuffer(region.read(0, BIG_SIZE), np.float32) == number).all()


@pytest.mark.parametrize("statement", ["raise RuntimeError('so')", "return [failure('so')]"])
def test_an_error_of_read_only_inputs_varies(model: Model, region: Region, statement: str) -> None:
    """An error that disappears with copied inputs counts as an attempt to write to them."""
    model.serve(f"""
        tries = []
        def execute(self, requests):
            array = given(requests[0])
            first = array[0]
            self.tries.append(int(first))
            try:
                if first >= 10:
                    array += 1
            except Exception:
                {statement}
            return [response(np.array([first], "f4"))]
        """)
    assert run_rounds(model, region, 14) == list(range(14))
    assert model.backend._model.tries == [*range(10), 10, *range(10, 14)]


def test_an_error_that_persists_with_copies_is_reported(model: Model, region: Region) -> None:
    model.serve("""
        tries = []
        def execute(self, requests):
            self.tries.append(given(requests[0]).flags.writeable)
            if given(requests[0])[0] >= 10:
                return [failure(f"try {len(self.tries)}")]
            return [response(given(requests[0])[:1])]
        """)
    assert run_rounds(model, region, 12) == [*range(10), "try 12", "try 14"]
    assert model.backend._model.tries[8:] == [False, False, *[False, True] * 2]


# --- calling other models

CALLING_MODEL = """
def execute(self, requests):
    return [self.answer(r) for r in requests]
def answer(self, request):
    reply = pb_utils.InferenceRequest(
        model_name="other",
        requested_output_names=["Y"],
        inputs=[pb_utils.Tensor("X", given(request)[None])],
        **json.loads(request.parameters()),
    ).exec()
    if reply.has_error():
        return pb_utils.InferenceResponse([], error=reply.error())
    return response(pb_utils.get_output_tensor_by_name(reply, "Y").as_numpy()[0])
"""


def doubled_response(submit: Submit) -> Finished:
    (item,) = work(submit).inputs
    assert isinstance(item.data, bytes)
    return finished(submit, tensor("Y", 2 * np.frombuffer(item.data, "f4").reshape(item.shape)))


def test_a_call_ends_with_the_request_it_is_for(model: Model, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")
    model.serve(CALLING_MODEL)
    deadline_ns = time.monotonic_ns() + 10**10
    parameters = {"model_version": 1, "timeout": 10**12, "request_id": "q"}
    running = callees.run(lambda: model.infer(1, deadline_ns=deadline_ns, parameters=parameters))
    assert callees.answer_find("s1").version == "1"
    submit = scheduler.next(Submit)
    assert (submit.deadline_ns, submit.timeout_us) == (deadline_ns, 10**12)
    assert submit.request_id == "q"
    scheduler.send(Failed(submit.id, "UNAVAILABLE", "Request timeout expired", 0, True))
    assert running.result(10) == ["Request timeout expired"]


@pytest.mark.parametrize(
    ("refusal", "code", "text"),
    [
        (("NOT_FOUND", "x"), "INTERNAL",
         "Failed for execute the inference request. Model 'other' is not ready."),
        (("UNAVAILABLE", "it is loading"), "UNAVAILABLE", "it is loading"),
    ],
)  # fmt: skip
def test_a_call_without_a_scheduler_fails(
    model: Model, callees: CalledModels, refusal: tuple[str, str], code: str, text: str
) -> None:
    model.serve(CALLING_MODEL)
    running_call = callees.run(model.rig.batch, inference(input_x(1)))
    callees.supervisor.send(m.Refused(callees.supervisor.next(m.FindModel).id, *refusal))
    (reply,) = running_call.result(10)
    text = f"Model other - Error when running inference: {text}"
    assert (reply.code, reply.message) == (code, text)


def test_calls_at_the_same_time(model: Model, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")
    model.serve("""
        async def execute(self, requests):
            return list(await asyncio.gather(*map(self.answer, requests)))
        async def answer(self, request):
            calls = [
                pb_utils.InferenceRequest(
                    model_name="other",
                    requested_output_names=[],
                    inputs=[pb_utils.Tensor("X", n * given(request)[None])],
                ).async_exec(decoupled=n == 2)
                for n in (1, 2)
            ]
            plain, decoupled = await asyncio.gather(*calls)
            (second,) = decoupled
            if plain.has_error():
                return plain
            tensors = plain.output_tensors() + second.output_tensors()
            return response(sum(t.as_numpy()[0] for t in tensors))
        """)
    running_calls = callees.run(model.infer, 1, 2, 3)
    callees.answer_find("s1")
    submits = [scheduler.next(Submit) for _ in range(6)]
    failing_submit = submits[4]
    scheduler.send(Failed(failing_submit.id, "INVALID_ARG", "not three", 0, False))
    for submit in submits:
        if submit is not failing_submit:
            scheduler.send(doubled_response(submit))
    assert running_calls.result(10) == [[6], [12], "not three"]


def test_a_task_that_is_cancelled_at_once_cancels_its_call(
    model: Model, callees: CalledModels
) -> None:
    scheduler = callees.scheduler("s1")
    model.serve("""
        async def execute(self, requests):
            tensor = pb_utils.Tensor("X", given(requests[0])[None])
            task = pb_utils.InferenceRequest(
                model_name="other", requested_output_names=[], inputs=[tensor]
            ).async_exec()
            task.cancel()
            await asyncio.wait([task])
            return [response(np.ones(1, "f4"))]
        """)
    running_call = callees.run(model.infer, 1)
    callees.answer_find("s1")
    submit = scheduler.next(Submit)
    assert scheduler.next(Cancel) == Cancel(submit.id)
    assert running_call.result(10) == [[1]]


def test_inputs_are_passed_in_place(model: Model, callees: CalledModels, region: Region) -> None:
    scheduler = callees.scheduler("s1")
    model.serve(
        """
        def execute(self, requests):
            reply = pb_utils.InferenceRequest(
                model_name="other",
                requested_output_names=["Y"],
                inputs=[requests[0].inputs()[0]],
            ).exec()
            return [response(reply.output_tensors()[0].as_numpy())]
        """,
        max_batch_size=4,
    )
    array = np.ones((1, BIG_SIZE // 4), np.float32)
    memory_range = region.write(0, array)
    running_call = callees.run(model.rig.batch, inference(tensor("X", array, memory_range)))
    callees.answer_find("s1")
    submit = scheduler.next(Submit)
    assert work(submit).inputs[0].data == memory_range
    scheduler.send(finished(submit, tensor("Y", np.ones((1, 1), "f4"))))
    (reply,) = running_call.result(10)
    assert reply.array("Y").tolist() == [[1]]


def test_no_calls_while_loading(model: Model, tmp_path: Path) -> None:
    model.write("""
        def initialize(self, args):
            self.reply = pb_utils.InferenceRequest(
                model_name="other", requested_output_names=[], inputs=[]
            ).exec()
        def execute(self, requests): return [self.reply]
        """)
    model.rig.serve(model.backend, config())
    (text,) = model.infer(0)
    assert isinstance(text, str) and "only supported during the 'execute' function" in text


def test_loading_other_models(model: Model, callees: CalledModels) -> None:
    model.serve("""
        def execute(self, requests):
            pb_utils.load_model("other", config="{}", files={"file:1/model.py": b"x"})
            pb_utils.unload_model("other", unload_dependents=True)
            ready = [pb_utils.is_model_ready("other", "2"), pb_utils.is_model_ready("other")]
            try:
                pb_utils.load_model("other")
            except pb_utils.TritonModelException as error:
                assert str(error).startswith("Failed to load model: Failed to process the")
                assert str(error).endswith(", message: it cannot be")
            for wrong in ({"x": b""}, 3):
                try:
                    pb_utils.load_model("other", files=wrong)
                except pb_utils.TritonModelException:
                    continue
                assert False
            return [response(np.array(ready, "f4"))]
        """)
    supervisor = callees.supervisor
    running_call = callees.run(model.infer, 0)
    load = supervisor.next(m.LoadModel)
    assert (load.name, load.config, load.files) == ("other", "{}", {"1/model.py": b"x"})
    supervisor.send(m.Answered(load.id, {}))
    unload = supervisor.next(m.UnloadModel)  # type: ignore[type-var]
    assert (unload.name, unload.unload_dependents) == ("other", True)
    supervisor.send(m.Answered(unload.id, {}))
    assert callees.answer_find("s1").version == "2"
    supervisor.send(m.Refused(supervisor.next(m.FindModel).id, "NOT_FOUND", "no"))
    supervisor.send(m.Refused(supervisor.next(m.LoadModel).id, "INVALID_ARG", "it cannot be"))
    assert running_call.result(10) == [[1, 0]]


def test_a_warmup_request_may_create_a_metric(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance has no scheduler yet, which receives all metrics when it is attached."""
    monkeypatch.setattr(metrics, "_families", {})
    monkeypatch.setattr(metrics, "_has_changed", False)
    model.write("""
        def execute(self, requests):
            self.family = pb_utils.MetricFamily("a", "", pb_utils.MetricFamily.COUNTER)
            self.family.Metric().increment(1)
            return [response(given(request)) for request in requests]
        """)
    inputs = {"X": {"data_type": "TYPE_FP32", "dims": [1], "zero_data": True}}
    sample = {"name": "zeros", "batch_size": 1, "inputs": inputs}
    spec = ModelSpec.of(config(model_warmup=[sample]))
    model.backend.load(spec)
    WorkerInstance(model.rig.context, model.backend, spec).warm_up()
