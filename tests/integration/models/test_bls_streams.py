"""Models that call decoupled models."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support import repositories
from tests.support.servers import Server
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, json_request

STEPS = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "STEPS" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
# A model that executes commands: most are sent as a response; "error TEXT" fails; "final" ends the
# stream with the response before it; "left PATH", "obey" and "ignore" wait for the cancellation.
STEPS_MODEL = repositories.python_model("""
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request):
        sender = request.get_response_sender()
        steps = self.input(request, "STEPS").tolist()
        last = steps.pop() if steps and steps[-1] in (b"final", b"raise") else None
        for n, step in enumerate(steps):
            word, _, rest = step.decode().partition(" ")
            flags = FINAL if last == b"final" and n == len(steps) - 1 else 0
            if word == "error":
                sender.send(self.failure(rest), flags)
            elif word in ("left", "obey", "ignore"):
                while not sender.is_cancelled():
                    time.sleep(0.001)
                if word == "left":
                    open(rest, "w").close()
                if word == "obey":
                    error = pb_utils.TritonError("it was cancelled", pb_utils.TritonError.CANCELLED)
                    sender.send(pb_utils.InferenceResponse(error=error), FINAL)
                    return
            elif word == "note":
                open(rest, "w").close()
            else:
                sender.send(self.response(OUT=np.array([step], np.object_)), flags)
        if last is None:
            sender.send(flags=FINAL)
""")
CALLER = """
backend: "python"
input [
  { name: "CODE" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "STEPS" data_type: TYPE_STRING dims: [ -1 ] }
]
output [ { name: "SEEN" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
CALLER_MODEL = """
import asyncio, gc
import numpy as np
import triton_python_backend_utils as pb_utils

def shown(response):
    if response.has_error():
        return "error: " + response.error().message()
    outputs = response.output_tensors()
    return outputs[0].as_numpy()[0].decode() if outputs else "empty"

class TritonPythonModel:
    %s execute(self, requests):
        responses = []
        for request in requests:
            code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
            steps = pb_utils.get_input_tensor_by_name(request, "STEPS")
            def call(model="steps", steps=steps, outputs=("OUT",), **more):
                inputs = [pb_utils.Tensor("STEPS", steps.as_numpy())]
                return pb_utils.InferenceRequest(
                    model_name=model, inputs=inputs, requested_output_names=outputs, **more
                )
            names = dict(globals(), call=call, seen=[])
            body = "".join("\\n    " + line for line in code.splitlines())
            exec("%s run():" + body, names)
            %snames["run"]()
            seen = pb_utils.Tensor("SEEN", np.array(names["seen"], np.object_))
            responses.append(pb_utils.InferenceResponse([seen]))
        return responses
"""
ORDINARY_CODE = """
backend: "python"
input [ { name: "STEPS" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
ORDINARY_MODEL = repositories.python_model("""
    def one(self, request):
        return self.response(OUT=self.input(request, "STEPS"))
""")
ENSEMBLE = """
platform: "ensemble"
input [ { name: "STEPS" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
ensemble_scheduling { step [ {
    model_name: "steps" model_version: -1
    input_map { key: "STEPS" value: "STEPS" }
    output_map { key: "OUT" value: "OUT" }
} ] }
"""
NOT_DECOUPLED = (
    "error: Model steps - Error when running inference: Model steps is using the decoupled. The "
    "current BLS request call doesn't support models using the decoupled transaction policy. "
    "Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
    "models.'"
)
NOT_READY = (
    "error: Model nope - Error when running inference: Failed for execute the inference request. "
    "Model 'nope' is not ready."
)


@pytest.fixture(scope="module")
def server(models: Path, serve_models: Callable[[Path], Server]) -> Server:
    repositories.write(models, "steps", STEPS, STEPS_MODEL)
    repositories.write(models, "ordinary", ORDINARY_CODE, ORDINARY_MODEL)
    repositories.write(models, "caller", CALLER, CALLER_MODEL % ("def", "def", ""))
    for name, words in (
        ("generator", ("def", "Iterator", "time.sleep(0.01)")),
        ("asynchronous", ("async def", "AsyncIterator", "await asyncio.sleep(0.01)")),
    ):
        code = "import asyncio" + STREAMING_CODE.format(*words)
        repositories.write(models, name, 'backend: "native"', code)
    repositories.write(models, "ensemble", ENSEMBLE, "")
    asynchronous = CALLER_MODEL % ("async def", "async def", "await ")
    repositories.write(models, "async_caller", CALLER, asynchronous)
    return serve_models(models)


def run_caller(http: Http, model: str, code: str, *steps: str) -> list[str]:
    request = json_request(CODE=np.array([code], object), STEPS=np.array(steps, object))
    (output,) = http.infer(model, request).ok().json()["outputs"]
    events: list[str] = output["data"]
    return events


ITERATOR = {
    "caller": "iterator = call().exec(decoupled=True)\n",
    "async_caller": "iterator = await call().async_exec(decoupled=True)\n",
}
ITERATING_CODE = {
    "caller": "for response in call().exec(decoupled=True): seen.append(shown(response))",
    "async_caller": "for response in await call().async_exec(decoupled=True):\n"
    "    seen.append(shown(response))",
}


@pytest.mark.parametrize("model", ITERATING_CODE)
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), ["empty"]),
        (("a", "b"), ["a", "b", "empty"]),
        (("a", "b", "final"), ["a", "b"]),
        (("a", "error no", "c"), ["a", "error: no", "c", "empty"]),
        (("error no", "final"), ["error: no"]),
        (tuple("abcdefgh" * 20), [*("abcdefgh" * 20), "empty"]),
    ],
)
def test_each_response_and_the_end(
    http: Http, model: str, steps: tuple[str, ...], expected: list[str]
) -> None:
    assert run_caller(http, model, ITERATING_CODE[model], *steps) == expected


@pytest.mark.parametrize("model", ITERATING_CODE)
def test_an_ordinary_model_s_one_response(http: Http, model: str) -> None:
    code = ITERATING_CODE[model].replace("call()", "call('ordinary')")
    assert run_caller(http, model, code, "only") == ["only"]


def test_an_exhausted_iterator_starts_again(http: Http) -> None:
    code = """
iterator = call().exec(decoupled=True)
first = [shown(each) for each in iterator]
seen.extend([*first, "again"])
try:
    next(iterator)
except StopIteration as error:
    seen.append(str(error))
seen.extend(map(shown, iterator))
"""
    iteration_done = "Iteration is done for the responses."
    assert run_caller(http, "caller", code, "a", "final") == ["a", "again", iteration_done, "a"]


@pytest.mark.parametrize("model", ITERATING_CODE)
def test_an_interrupted_iterator_continues(http: Http, model: str) -> None:
    code = f"""
{ITERATOR[model]}
for rounds in range(2):
    for n, response in enumerate(iterator):
        seen.append(shown(response))
        if n == 1:
            break
    seen.extend(["next", shown(next(iterator)), "for"])
    seen.extend(map(shown, iterator))
    seen.append("over")
"""
    expected_turn = ["a", "b", "next", "c", "for", "d", "e", "over"]
    assert run_caller(http, model, code, *"abcde", "final") == expected_turn * 2


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("call().exec()", NOT_DECOUPLED),
        ("call('ordinary', model_version=7).exec()", NOT_READY.replace("nope", "ordinary")),
        ("call('nope').exec()", NOT_READY),
        ("[*call('nope').exec(decoupled=True)][0]", NOT_READY),
    ],
)
def test_errors_before_the_first_response(http: Http, call: str, error: str) -> None:
    assert run_caller(http, "caller", f"seen.append(shown({call}))", "a") == [error]
    call = call.replace("*call", "*await call") if "*" in call else f"await {call}"
    code = f"seen.append(shown({call.replace('.exec', '.async_exec')}))"
    assert run_caller(http, "async_caller", code, "a") == [error]


@pytest.mark.parametrize("statement", ["iterator.cancel()", "del iterator\ngc.collect()"])
def test_dropping_the_iterator_cancels_the_call(http: Http, tmp_path: Path, statement: str) -> None:
    path = tmp_path / "left"
    code = f"""
iterator = call().exec(decoupled=True)
seen.append(shown(next(iterator)))
{statement}
"""
    assert run_caller(http, "caller", code, "a", f"left {path}") == ["a"]
    until("the model sees it", path.exists)
    code = code.replace("call().exec", "await call().async_exec")
    path.unlink()
    assert run_caller(http, "async_caller", code, "a", f"left {path}") == ["a"]
    until("the model sees it", path.exists)


CANCEL = {
    "before": """
iterator.cancel()
seen.extend(map(shown, iterator))
""",
    "during": """
for n, response in enumerate(iterator):
    seen.append(shown(response))
    if n < 2:
        iterator.cancel()
""",
    "after": """
responses = list(iterator)
iterator.cancel()
seen.extend(map(shown, iterator))
""",
}
STREAMING_CODE = """
import time
from collections.abc import AsyncIterator, Iterator
from numpy import ndarray
from shmserve.model import BYTES

class Model:
    {} predict(self, STEPS: BYTES[ndarray, -1]) -> {}[BYTES[ndarray, 1]]:
        while True:
            yield STEPS[:1]
            {}
"""


@pytest.mark.parametrize("model", ITERATING_CODE)
@pytest.mark.parametrize("cancel_time", ["before", "during"])
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (("a", "obey", "b"), ["a", "error: it was cancelled"]),
        (("a", "ignore", "b", "c"), ["a", "b", "c", "empty"]),
        (("a", "ignore", *"b" * 100, "final"), ["a", *"b" * 100]),
    ],
)
def test_a_cancelled_model_is_notified_and_its_later_responses_arrive(
    http: Http, model: str, cancel_time: str, steps: tuple[str, ...], expected: list[str]
) -> None:
    assert run_caller(http, model, ITERATOR[model] + CANCEL[cancel_time], *steps) == expected


@pytest.mark.parametrize("model", ITERATING_CODE)
def test_a_finished_call_cannot_be_cancelled(http: Http, model: str) -> None:
    code = ITERATOR[model] + CANCEL["after"]
    assert run_caller(http, model, code, "a", "b") == ["a", "b", "empty"]


@pytest.mark.parametrize("called_model", ["generator", "asynchronous", "ensemble"])
def test_the_caller_receives_the_cancellation(http: Http, called_model: str) -> None:
    code = f"""
iterator = call({called_model!r}, outputs=()).exec(decoupled=True)
seen.append(shown(next(iterator)))
iterator.cancel()
for last in iterator:
    pass
assert last.error().code() == pb_utils.TritonError.CANCELLED
seen.append(shown(last))
"""
    first_response, last_response = run_caller(http, "caller", code, "a", "obey")
    assert first_response == "a"
    assert last_response.endswith("request cancelled")


def test_a_task_that_is_cancelled_cancels_the_call(http: Http, tmp_path: Path) -> None:
    begun, path = tmp_path / "begun", tmp_path / "left"
    code = f"""
import os
task = call().async_exec(decoupled=True)
while not os.path.exists({str(begun)!r}):
    await asyncio.sleep(0)
task.cancel()
try:
    await task
except asyncio.CancelledError:
    seen.append("cancelled")
"""
    assert run_caller(http, "async_caller", code, f"note {begun}", f"left {path}") == ["cancelled"]
    until("the model sees it", path.exists)


def test_memory_of_many_responses_is_released(http: Http) -> None:
    """Many large responses, some of which are never read, leave no memory allocated."""
    code = f"""
big = np.array(["x" * {1 << 20}], np.object_)
for _ in range(20):
    inputs = [pb_utils.Tensor("STEPS", np.repeat(big, 6))]
    request = pb_utils.InferenceRequest(
        model_name="steps", inputs=inputs, requested_output_names=["OUT"]
    )
    iterator = request.exec(decoupled=True)
    seen.append(str(len(shown(next(iterator)))))
    del iterator
"""
    assert run_caller(http, "caller", code, "a") == [str(1 << 20)] * 20


def test_a_model_reads_the_memory_use_of_its_calls(http: Http) -> None:
    """A model reads the memory usage to detect leaks, as Triton's tests do."""
    code = """
import c_python_backend_utils
free = c_python_backend_utils.shared_memory.free_memory
before = free()
large = pb_utils.Tensor("STEPS", np.array(["x" * (1 << 20), "final"], np.object_))
iterator = call(steps=large).exec(decoupled=True)
for response in iterator:
    pass
seen.append(str(free() >= before > 1 << 20))
before = free()
iterator = call(steps=pb_utils.Tensor("STEPS", np.array(["x" * (1 << 20), "obey"], np.object_)))
iterator = iterator.exec(decoupled=True)
seen.append(str(before - free() >= 1 << 20))
iterator.cancel()
list(iterator)
seen.append(str(free() >= before))
"""
    assert run_caller(http, "caller", code, "a") == ["True"] * 3
