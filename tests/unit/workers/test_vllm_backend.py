"""The backend `vllm` with a fake engine. `make test-vllm` runs similar tests with vLLM itself."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.ipc.credit import FIRST_CREDIT
from shmserve.ipc.messages import inference as m
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES, decode_bytes
from shmserve.ipc.tensors.schemas import (
    Inference,
    RequestedOutput,
    pack_inference,
    unpack_inferred,
)
from shmserve.workers.backends.vllm import (
    VllmBackend,
    answers,
    convert_metrics,
    devices_of,
    engine,
)
from shmserve.workers.backends.vllm.answers import VllmAnswer
from shmserve.workers.backends.vllm.engine import Arguments, VllmCall, VllmEngine, max_tokens_cap
from shmserve.workers.main import WorkerInstance
from tests.rigs.stream_rig import Streams
from tests.rigs.worker_rig import CLIENT_PID, rig, tensor
from tests.support.waiting import until


def sample(text: str = "", tokens: Sequence[int] = (), **fields: Any) -> SimpleNamespace:
    """Return a part of a sample in the form of vLLM's `CompletionOutput`."""
    defaults = {"index": 0, "finish_reason": None, "logprobs": None, "cumulative_logprob": None}
    defaults["stop_reason"] = None
    return SimpleNamespace(text=text, token_ids=list(tokens), **{**defaults, **fields})


def output(*samples: SimpleNamespace, is_finished: bool = False, **fields: Any) -> SimpleNamespace:
    """Return a part of a request in the form of vLLM's `RequestOutput`."""
    defaults = {"prompt_token_ids": [7, 8, 9], "num_cached_tokens": 2, "prompt_logprobs": None}
    return SimpleNamespace(outputs=list(samples), finished=is_finished, **{**defaults, **fields})


def vllm_call(text: str = "", logprobs: int | None = None, **fields: Any) -> VllmCall:
    """Return a call for a request that has these fields of vLLM's server."""
    defaults = {"stream": False, "echo": False, "max_tokens": 16, "prompt_logprobs": None}
    defaults |= {"return_tokens_as_token_ids": None, "priority": 0}
    request = SimpleNamespace(**{**defaults, **fields})
    return VllmCall(request, None, SimpleNamespace(logprobs=logprobs), "<{}>".format, text=text)


class RefusedError(Exception):
    """An exception that the fake engine raises for a request."""


class FakeEngine:
    """An engine whose outputs the test sets. `aborted` contains the calls that were closed."""

    def __init__(self) -> None:
        self.client = self
        self.errored = False
        self.outputs: list[Any] = []
        self.pause = asyncio.Event()
        self.calls: list[tuple[dict[str, Any], bool, bool]] = []
        self.priorities: list[int] = []
        self.aborted = self.taken_count = 0
        self.ended = False

    async def make_call(
        self, inputs: Mapping[str, Any], parameters: dict[str, Any], echoes: bool, for_openai: bool
    ) -> VllmCall:
        self.calls.append((parameters, echoes, for_openai))
        if parameters.get("temperature", 0) < 0:
            raise RefusedError("temperature")
        return vllm_call(stream=bool(parameters.get("stream")))

    async def generate(
        self, prompt: Any, parameters: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        self.priorities.append(options["priority"])
        try:
            for output in self.outputs:
                if output is None:
                    await self.pause.wait()
                elif isinstance(output, Exception):
                    raise output
                else:
                    self.taken_count += 1
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise

    async def convert(
        self, task: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> dict[str, tuple[str, list[Any]]]:
        assert parameters["add_special_tokens"] is False
        text = "BYTES", [task, inputs["text_input"]]
        return {"token_ids": ("INT32", [1, 2]), "text_output": text}

    @staticmethod
    def client_error(error: BaseException, inputs: Any) -> ShmserveError | None:
        return InvalidArgument(f"{error}: refused") if isinstance(error, RefusedError) else None

    def shutdown(self) -> None:
        self.ended = True


class Model(Streams):
    """A model of the backend with a fake engine."""

    def __init__(self, worker_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(worker_rig)
        self.engine = FakeEngine()
        folder = worker_rig.context.version_dir
        arguments = {"model": "m", "tool_call_parser": "hermes", "enable_lora": True}
        (folder / "model.json").write_text(json.dumps(arguments))
        (folder / "multi_lora.json").write_text('{"french": "/a", "german": "/b"}')

        async def start(arguments: Arguments) -> Any:
            self.arguments = arguments
            return self.engine

        monkeypatch.setattr(VllmEngine, "start", start)
        monkeypatch.setattr(Arguments, "max_model_len", lambda arguments: 512)
        self.backend = VllmBackend(worker_rig.context)
        base = {"name": "m", "backend": "vllm", "max_batch_size": 0, "parameters": {}}
        self.config = self.backend.complete_config(base)
        self.rig.serve(self.backend, self.config)

    def infer(
        self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), key: int = 1, **fields: Any
    ) -> None:
        tensors = []
        for name, value in inputs.items():
            kind = {bool: np.bool_, int: np.int32}.get(type(value), np.object_)
            raw = value.encode() if isinstance(value, str) else value
            array = value if isinstance(value, np.ndarray) else np.array([raw], kind)
            tensors.append(tensor(name, array))
        requested_outputs = tuple(RequestedOutput(name) for name in outputs)
        packed_request = pack_inference(Inference(tuple(tensors), requested_outputs))
        self.rig.execute([m.Work(key, CLIENT_PID, *packed_request, f"id-{key}", **fields)])

    def send_message(self, message: Any) -> None:
        """Send a message of the scheduler, which the pumping thread reads."""
        self.rig.scheduler.post(self.rig._peer, message)
        self.rig.scheduler.flush()

    def _show(self, message: Any, key: int) -> Iterator[Any]:
        if not isinstance(message, m.ExecutionResponded) or message.key != key:
            return
        if message.code:
            yield message.message
        elif message.schema:
            files = {}
            for o in unpack_inferred(message.schema, message.data).outputs:
                assert isinstance(o.data, bytes)
                if o.datatype == "BYTES":
                    array = decode_bytes(memoryview(o.data), o.shape, o.name, "m")
                    files[o.name] = [text.decode() for text in array.ravel()]
                else:
                    files[o.name] = np.frombuffer(o.data, NUMPY_DTYPES[o.datatype]).tolist()
            yield files
        if message.final:
            yield "end"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    with rig(tmp_path) as model_rig:
        model = Model(model_rig, monkeypatch)
        with model.pumping():
            yield model
        model.backend.unload()
        assert model.engine.ended


# --- requests


@pytest.mark.parametrize(
    ("source", "changes", "cap"),
    [("auto", {}, None), ("vllm", {"max_new_tokens": 7}, 7), ("/a/folder", {}, 9)],
)
def test_arguments_limit_the_tokens_as_in_vllms_server(
    source: str, changes: dict[str, Any], cap: int | None
) -> None:
    config = SimpleNamespace(generation_config=source, override_generation_config=changes)
    assert max_tokens_cap(config, {"max_tokens": 9}) == cap


def test_a_stream_has_the_text_of_each_output(model: Model) -> None:
    model.engine.outputs = [
        output(sample("Hel", [1, 2])),
        output(sample("lo", [3], finish_reason="stop"), is_finished=True, prompt_token_ids=None),
    ]
    model.infer({"text_input": "hi", "stream": True, "sampling_parameters": '{"top_k": 1}'})
    assert model.responses(1) == [{"text_output": ["Hel"]}, {"text_output": ["lo"]}, "end"]
    assert model.engine.calls == [({"top_k": 1, "stream": True, "echo": False}, False, False)]


def test_outputs_for_the_openai_apis(model: Model) -> None:
    model.engine.outputs = [
        output(sample("a", [1]), sample("b", [2, 3], index=1)),
        output(sample("c", [4], finish_reason="length"), prompt_token_ids=None),
        output(sample("", [], index=1, finish_reason="stop", stop_reason="x"), is_finished=True),
    ]
    expected = ["text_output", "index", "finish_reason", "usage", "token_ids", "prompt_token_ids"]
    expected.append("stop_reason")
    model.infer({"messages": "[]", "sampling_parameters": '{"stream": true, "n": 2}'}, expected)
    first, second, third, fourth, end_record = model.responses(1)
    assert end_record == "end"
    assert (first["text_output"], second["text_output"]) == (["a"], ["b"])
    assert (first["index"], second["index"]) == ([0], [1])
    assert (first["token_ids"], second["token_ids"]) == ([1], [2, 3])
    assert first["prompt_token_ids"] == [7, 8, 9]
    assert first["usage"] == [""]
    assert third["finish_reason"] == ["length"]
    assert third["prompt_token_ids"] == []
    assert (fourth["finish_reason"], fourth["stop_reason"]) == (["stop"], ['"x"'])
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 2, "samples": [2, 2]}
    assert json.loads(fourth["usage"][0]) == usage
    assert model.engine.calls[0][1:] == (False, True)


def test_outputs_of_triton_s_backend(model: Model) -> None:
    step = {5: SimpleNamespace(logprob=-0.5, rank=1, decoded_token="x")}
    model.engine.outputs = [
        output(sample("x", [5], logprobs=[step], cumulative_logprob=-0.5)),
        output(sample("", [], finish_reason="stop"), is_finished=True),
    ]
    flags = ("finish_reason", "cumulative_logprob", "num_input_tokens", "num_output_tokens")
    request = {f"return_{name}": True for name in (*flags, "logprobs")}
    model.infer({"text_input": "hi", "stream": True, **request})
    first_response, last_response, _ = model.responses(1)
    assert first_response["finish_reason"] == ["None"]
    assert last_response["finish_reason"] == ["stop"]
    assert first_response["cumulative_logprob"] == [-0.5]
    assert (first_response["num_input_tokens"], first_response["num_output_tokens"]) == ([3], [1])
    prompt_logprobs = [{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}]
    assert json.loads(first_response["logprobs"][0]) == prompt_logprobs
    assert last_response["logprobs"] == ["null"]


NEGATIVE = '{"temperature": -1}'


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"text_input": "hi", "image": "..."}, "image: not supported"),
        ({"text_input": "hi", "image": np.empty(0, np.object_)}, "image: not supported"),
        ({"text_input": "hi", "embedding_request": "{}"}, "embedding_request: not supported"),
        ({"text_input": "hi", "sampling_parameters": "["}, "sampling_parameters: "),
        ({"text_input": "hi", "sampling_parameters": NEGATIVE}, "temperature: refused"),
    ],
)
def test_refused_requests(model: Model, inputs: dict[str, Any], problem: str) -> None:
    model.infer(inputs)
    response, end_record = model.responses(1)
    assert response.startswith(problem)
    assert end_record == "end"


def test_an_unexpected_error_fails_only_its_request(model: Model) -> None:
    model.engine.outputs = [output(sample("a", [1])), RuntimeError("broken")]
    model.infer({"text_input": "hi"})
    first_response, error, end_record = model.responses(1)
    assert first_response == {"text_output": ["a"]}
    assert "RuntimeError: broken" in error
    assert end_record == "end"
    assert model.backend.is_ready()


def test_a_failed_engine_ends_the_warm_up(model: Model) -> None:
    model.engine.errored, model.engine.outputs = True, [RuntimeError("broken")]
    inputs = {"text_input": {"data_type": "TYPE_STRING", "dims": [1], "zero_data": True}}
    sample = {"name": "zeros", "batch_size": 1, "inputs": inputs}
    instance = WorkerInstance(
        model.rig.context, model.backend, ModelSpec.of({**model.config, "model_warmup": [sample]})
    )
    with pytest.raises(InvalidArgument, match=r"failed to run warmup sample 'zeros': .*broken"):
        instance.warm_up()


def test_a_priority_is_passed_on(model: Model) -> None:
    model.engine.outputs = [output(sample("a", [1], finish_reason="stop"), is_finished=True)]
    model.infer({"text_input": "hi"}, priority=3)
    model.responses(1)
    assert model.engine.priorities == [3]


def test_a_prompt_is_converted_to_tokens(model: Model) -> None:
    settings = '{"task": "tokenize", "add_special_tokens": false}'
    model.infer({"text_input": "hi", "sampling_parameters": settings})
    assert model.responses(1) == [{"token_ids": [1, 2], "text_output": ["tokenize", "hi"]}, "end"]


# --- clients that disconnect or do not read


def test_a_cancelled_request_is_aborted(model: Model) -> None:
    model.engine.outputs = [output(sample("a", [1])), None]
    model.infer({"text_input": "hi"})
    assert model.responses(1, 1) == [{"text_output": ["a"]}]
    model.send_message(m.CancelExecution(1))
    assert model.responses(1)[-1] == "end"
    until("the engine aborts it", lambda: model.engine.aborted == 1)


def test_outputs_are_not_read_from_the_engine_without_credit(model: Model) -> None:
    model.engine.outputs = [output(sample("a", [1])) for _ in range(FIRST_CREDIT + 20)]
    model.infer({"text_input": "hi"})
    assert len(model.responses(1, FIRST_CREDIT)) == FIRST_CREDIT
    assert model.engine.taken_count <= FIRST_CREDIT + 1
    model.send_message(m.CreditExecution(1, 20))
    assert len(model.responses(1)) == FIRST_CREDIT + 20 + 1


# --- the engine's end


def test_a_dead_engine_ends_the_worker(model: Model) -> None:
    model.engine.outputs = [output(sample("a", [1])), None, RuntimeError("dead")]
    model.infer({"text_input": "hi"})
    model.responses(1, 1)
    model.engine.errored = True
    assert not model.backend.is_ready()
    inbox = model.rig.context.control.inbox
    until("the main loop is told", lambda: len(inbox) == 1)
    assert isinstance(inbox.pop(), Exception)


# --- metrics


def test_metrics_of_prometheus() -> None:
    registry = CollectorRegistry()
    names: dict[str, Any] = {"labelnames": ["model_name"], "registry": registry}
    Counter("vllm:tokens", "Tokens.", **names).labels("m").inc(3)
    Gauge("vllm:running", "Running.", **names).labels("m").set(2)
    time_histogram = Histogram("vllm:time", "Time.", buckets=[1, 2], **names).labels("m")
    for value in (0.5, 0.6, 1.5, 9):
        time_histogram.observe(value)
    counter, gauge, histogram = convert_metrics(registry.collect(), "1")
    labels = (("model_name", "m"), ("version", "1"))
    assert counter == ["vllm:tokens_total", "Tokens.", "COUNTER", [[labels, [3.0], []]]]
    assert gauge[:3] == ["vllm:running", "Running.", "GAUGE"]
    assert gauge[3][0][1] == [0, 0, 2]
    assert histogram[3] == [[labels, [pytest.approx(11.6), 2, 1, 1], [1.0, 2.0]]]


# --- answers


def logprob_entry(token: int, logprob: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank, decoded_token=f"<{token}>")


def test_logprobs_of_an_echoed_prompt() -> None:
    call = vllm_call(text="ab", logprobs=1, echo=True, prompt_logprobs=1)
    answer = VllmAnswer(call, ["text_output", "logprobs"], [])
    answer_parts = output(
        sample("c", [3], finish_reason="stop", logprobs=[{3: logprob_entry(3, -1.0, 1)}]),
        is_finished=True,
        prompt_token_ids=[1, 2],
        prompt_logprobs=[
            None,
            {2: logprob_entry(2, float("-inf"), 5), 4: logprob_entry(4, -0.1, 1)},
        ],
    )
    ((response, is_last),) = answer.responses(answer_parts)
    outputs = {tensor.name: tensor.data[0] for tensor in response}
    assert is_last
    assert outputs["text_output"] == b"abc"
    document = json.loads(outputs["logprobs"])
    first_entry, second_entry, third_entry = document["content"]
    assert (first_entry["token"], first_entry["logprob"]) == ("<1>", None)
    assert second_entry["logprob"] == -9999.0
    assert [tensor["token_id"] for tensor in second_entry["top_logprobs"]] == [4]
    assert (third_entry["token"], third_entry["logprob"]) == ("<3>", -1.0)
    assert document["prompt"][0] is None and document["prompt"][1]["rank"] == 5


def test_tokens_are_shown_by_their_ids() -> None:
    call = vllm_call(logprobs=1, return_tokens_as_token_ids=True)
    step = {3: logprob_entry(3, -1.0, 2), 4: logprob_entry(4, -0.5, 1)}
    parts = output(sample("c", [3], finish_reason="stop", logprobs=[step]), is_finished=True)
    (((logprobs,), _),) = VllmAnswer(call, ["logprobs"], []).responses(parts)
    (entry,) = json.loads(logprobs.data[0])["content"]
    assert (entry["token"], entry["token_id"], entry["rank"]) == ("token_id:3", 3, 2)
    assert [likeliest["token"] for likeliest in entry["top_logprobs"]] == ["token_id:4"]


def test_tokens_of_reasoning_are_counted() -> None:
    call = vllm_call(stream=True)
    call.make_parser = lambda: SimpleNamespace(count_reasoning_tokens=lambda tokens: tokens[-1])
    answer = VllmAnswer(call, ["usage"], [])
    samples = sample("a", [1, 2]), sample("b", [3], index=1), sample("c", [4])
    responses = [*answer.responses(output(*samples, is_finished=True))]
    assert json.loads(responses[-1][0][0].data[0])["reasoning_tokens"] == 4 + 3


def test_messages_with_tokens_have_the_number_of_reasoning_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "parse_message", lambda *arguments: {"reasoning": "a"})
    call = vllm_call(stream=True)
    call.make_parser = lambda: SimpleNamespace(count_reasoning_tokens=len)
    for names, counts in ((["message", "token_ids"], [2, 3]), (["message"], [None, None])):
        answer = VllmAnswer(call, names, [])
        parts = [output(sample("a", tokens)) for tokens in ([1, 2], [3])]
        tensors = [next(answer.responses(part))[0] for part in parts]
        messages = [t.data[0] for response in tensors for t in response if t.name == "message"]
        assert [json.loads(text).get("reasoning_tokens") for text in messages] == counts


def test_only_the_prompt() -> None:
    call = vllm_call(text="ab", echo=True, max_tokens=0)
    answer = VllmAnswer(call, ["text_output", "finish_reason", "usage"], [])
    answer_parts = output(sample("c", [3], finish_reason="length"), is_finished=True)
    ((response, _),) = answer.responses(answer_parts)
    outputs = {tensor.name: tensor.data[0] for tensor in response}
    assert (outputs["text_output"], outputs["finish_reason"]) == (b"ab", "length")
    assert json.loads(outputs["usage"])["completion_tokens"] == 0


# --- configuration


def test_the_configuration_is_completed(model: Model) -> None:
    names = {tensor["name"] for tensor in model.config["input"]}
    assert names >= {"text_input", "messages", "input_ids", "return_logprobs", "image"}
    outputs = [tensor["name"] for tensor in model.config["output"]]
    assert "message" in outputs  # because model.json names a tool parser
    assert model.config["model_transaction_policy"] == {"decoupled": True}
    parameters = {"max_model_len": "512", "adapters": "french\ngerman"}
    assert model.config["parameters"] == {
        name: {"string_value": text} for name, text in parameters.items()
    }
    assert model.arguments.server_arguments == {"tool_call_parser": "hermes"}
    engine_arguments = {"model": "m", "served_model_name": "m", "enable_lora": True}
    assert model.arguments.engine == engine_arguments


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "1/model.json is missing"),
        ("{", "1/model.json is not JSON"),
        ("[]", "1/model.json is not a JSON object"),
        ("{}", "1/model.json: 'model' is missing"),
    ],
)
def test_a_bad_arguments_file_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    if text is not None:
        (folder / "model.json").write_text(text)
    with pytest.raises(InvalidArgument, match=problem):
        Arguments.read(folder, "m")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_ENVIRONMENT", {})
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(Unavailable, match=r"needs the package vllm.*shmserve\[vllm\]"):
        Arguments({}, {}, {}).for_vllm()


def test_an_argument_that_vllm_rejects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(arguments: Arguments) -> None:
        raise ValueError("no number")

    monkeypatch.setattr(Arguments, "for_vllm", reject)
    monkeypatch.setattr(VllmEngine, "client_error", lambda error: f"max_model_len: {error}")
    with pytest.raises(InvalidArgument, match=r"model\.json: max_model_len: no number"):
        Arguments({}, {}, {}).max_model_len()


def test_arguments_of_repositories_for_triton(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    (folder / "weights").mkdir(parents=True)
    body = {"model": "weights", "enforce_eager": "true", "disable_log_requests": "true"}
    (folder / "model.json").write_text(json.dumps({**body, "enable_lora": True}))
    (folder / "multi_lora.json").write_text('{"alpaca": "/a"}')
    arguments = Arguments.read(folder, "m")
    engine = {"model": str(folder / "weights"), "enforce_eager": True, "enable_lora": True}
    assert arguments.engine == {**engine, "served_model_name": "m"}
    assert arguments.adapters == {"alpaca": "/a"}


def test_older_names_of_constraints() -> None:
    body = engine._request_body({"n": 2, "seed": None, "guided_regex": "a", "guided_json": None})
    assert body == {"n": 2, "structured_outputs": {"regex": "a"}}
    parameters = {"guided_decoding": {"choice": ["a"], "regex": None}, "guided_choice": ["b"]}
    assert engine._request_body(parameters) == {"structured_outputs": {"choice": ["b"]}}
    as_texts = {"structured_outputs": '{"regex": "a"}', "guided_decoding": '{"regex": "a"}'}
    assert engine._request_body(as_texts) == {"structured_outputs": {"regex": "a"}}
    repeated_fields = {"guided_regex": "a", "structured_outputs": {"regex": "a"}}
    assert engine._request_body(repeated_fields) == {"structured_outputs": {"regex": "a"}}
    with pytest.raises(InvalidArgument, match=r"outputs: .*'a'.* contradicts guided_\*: .*'b'"):
        engine._request_body({**repeated_fields, "guided_regex": "b"})


def test_the_id_of_a_request_is_no_parameter() -> None:
    request_class = SimpleNamespace(model_fields=("temperature",), model_validate=dict)
    parameters = {"id": "x1", "temperature": 0}
    assert engine._parse_request(request_class, parameters) == {"temperature": 0}
    with pytest.raises(InvalidArgument, match="temperatur: vLLM has no such parameter, did you"):
        engine._parse_request(request_class, {**parameters, "temperatur": 0})


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_constraints_that_are_no_object(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: 'x' is not an object"):
        engine._request_body({name: "x"})


@pytest.mark.parametrize(
    ("kind", "size", "device_ids", "visible", "expected"),
    [
        ("GPU", 1, "", None, "1"),
        ("GPU", 1, "", "2,GPU-a", "GPU-a"),
        ("GPU", 2, "", "", "instance_group: with tensor_parallel_size, the kind must be KIND_MO"),
        ("MODEL", 2, "2, 3", "", "2,3"),
        ("MODEL", 2, "1,0", "4,5", "5,4"),
        ("MODEL", 1, "", "4,5", ""),
    ],
)
def test_devices(
    kind: str,
    size: int,
    device_ids: str,
    visible: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number counts among the devices that the server's environment makes visible."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    parameters = {"GPU_DEVICE_IDS": {"string_value": device_ids}} if device_ids else {}
    spec = ModelSpec.of({"name": "m", "parameters": parameters})
    context: Any = SimpleNamespace(kind=kind, device_id=1)
    arguments = {"tensor_parallel_size": size}
    if expected.startswith("instance_group"):
        with pytest.raises(InvalidArgument, match=expected):
            devices_of(context, spec, arguments)
    else:
        assert devices_of(context, spec, arguments) == expected
