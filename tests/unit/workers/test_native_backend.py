"""Native models: annotations, whole batches, and errors that tell the author what to write."""

import py_compile
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve.model
from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.ipc.model_spec import ModelSpec
from shmserve.model import FP32, INT64, TensorType
from shmserve.workers.backends.native import NativeBackend, declaration
from tests.rigs.worker_rig import Rig, inference, model_config, tensor, tensor_config

F32 = np.float32
Write = Callable[[str], int]
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
HEAD = """
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, NotRequired, Required, TypedDict, TypeVar
import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from shmserve.model import BF16, BYTES, Context, FP32, INT64

T = TypeVar("T")
"""


@pytest.fixture
def write(worker: Rig) -> Write:
    """Return a function that writes the file of the worker's model."""
    return lambda text: (worker.context.version_dir / "model.py").write_text(HEAD + text)


def blank_config(**fields: Any) -> dict[str, Any]:
    return model_config([], [], **fields)


def complete(worker: Rig, config: dict[str, Any] | None = None) -> dict[str, Any]:
    return NativeBackend(worker.context).complete_config(config or blank_config())


def serve(worker: Rig, config: dict[str, Any] | None = None) -> Rig:
    backend = NativeBackend(worker.context)
    return worker.serve(backend, backend.complete_config(config or blank_config()))


def test_the_example_is_served(worker: Rig) -> None:
    source = EXAMPLES / "native_model.py"
    assert len(source.read_text().splitlines()) < 15
    shutil.copy(source, worker.context.version_dir / "native_model.py")
    config = blank_config(
        default_model_filename="native_model.py", parameters={"class": {"string_value": "Blur"}}
    )
    completed = complete(worker, config)
    assert completed["max_batch_size"] == 32
    assert completed["dynamic_batching"] == {}  # the server has the default of the delay
    assert completed["input"] == [tensor_config("image", "FP32", [-1, -1])]
    assert completed["output"] == [tensor_config("output", "FP32", [-1, -1])]
    serve(worker, config)
    rows = [np.ones((n, 5, 6), F32) for n in (1, 2)]
    replies = worker.batch(*(inference(tensor("image", row)) for row in rows))
    for row, reply in zip(rows, replies, strict=True):
        assert reply.array("output").shape == row.shape
        assert reply.array("output")[0, 2, 2] == 1


def test_a_class_whose_source_is_not_readable(worker: Rig) -> None:
    """The positions of its attributes are unknown, or read in the encoding of the file."""
    folder = worker.context.version_dir
    source = f"# coding: latin-1\n{HEAD}# \xe9\nclass Model:\n    predict = 1\n".encode("latin-1")
    (folder / "model.py").write_bytes(source)
    lines = source.count(b"\n")
    with pytest.raises(InvalidArgument, match=f"^m/1/model.py:{lines}:5: 'Model.predict' must be"):
        complete(worker)
    compiled = folder / "compiled_only.pyc"
    py_compile.compile(str(folder / "model.py"), str(compiled), doraise=True)
    (folder / "model.py").write_text("from compiled_only import Model\n")
    with pytest.raises(InvalidArgument, match=f"^{compiled}: 'Model.predict' must be"):
        complete(worker)


def test_annotations_are_checked_when_they_are_written() -> None:
    for wrong_value in ((), (0,), ("8",), (True,)):
        with pytest.raises(TypeError, match="needs dimensions"):
            FP32[(np.ndarray, *wrong_value)]
    annotation: Any = FP32[np.ndarray, 1, -1]
    assert annotation.__metadata__ == (TensorType("FP32", (1, -1)),)
    assert repr(INT64) == "INT64"
    with pytest.raises(TypeError, match="unknown datatype 'float32'; expected BF16, BOOL"):
        TensorType("float32", (1,))


RESULTS = {
    "tuple": ("", "tuple[FP32[Tensor, 1], INT64[Tensor, 1]]", "(x, x.long())",
        ("output_0", "output_1")),
    "named tuple": (
        "class R(NamedTuple):\n    score: FP32[Tensor, 1]\n    label: INT64[Tensor, 1]\n",
        "R",
        "R(label=x.long(), score=x)",
        ("score", "label"),
    ),
    "typed dict": (
        "class R(TypedDict):\n    score: FP32[Tensor, 1]\n    label: INT64[ndarray, 1]\n",
        "R",
        "{'label': x.long().numpy(), 'score': x}",
        ("score", "label"),
    ),
    "dataclass": ("@dataclass\nclass R:\n    score: FP32[Tensor, 1]\n    label: INT64[Tensor, 1]\n",
        "R", "R(label=x.long(), score=x)", ("score", "label")),
    "generic dataclass with more than fields": (
        "@dataclass\nclass R(Generic[T]):\n    COUNT: ClassVar[int] = 2\n"
        "    score: FP32[Tensor, 1]\n    label: INT64[Tensor, 1]\n",
        "R[int]",
        "R(label=x.long(), score=x)",
        ("score", "label"),
    ),
    "typed dict with a key less": ("class R(TypedDict):\n    score: Required[FP32[Tensor, 1]]\n"
        "    label: INT64[Tensor, 1]\n    more: NotRequired[FP32[Tensor, 1]]\n", "R",
        "{'label': x.long(), 'score': x}", ("score", "label")),
    "typed dict with annotations that are strings": ("class R(TypedDict, total=False):\n"
        "    score: 'Required[FP32[Tensor, 1]]'\n    label: INT64[Tensor, 1]\n"
        "class S(R):\n    more: 'NotRequired[FP32[Tensor, 1]]'\n", "S",
        "{'label': x.long(), 'score': x}", ("score", "label")),
}  # fmt: skip


@pytest.mark.parametrize("annotation_style", RESULTS)
def test_results_of_several_outputs(worker: Rig, write: Write, annotation_style: str) -> None:
    definitions, annotation, value, names = RESULTS[annotation_style]
    write(
        f"{definitions}\nclass Model:\n    def predict(self, x: FP32[Tensor, 1]) -> {annotation}:\n"
        f"        return {value}\n",
    )
    completed = complete(worker)
    kinds = [(output["name"], output["data_type"]) for output in completed["output"][:2]]
    assert kinds == [(names[0], "TYPE_FP32"), (names[1], "TYPE_INT64")]
    serve(worker)
    replies = worker.batch(*(inference(tensor("x", np.full((n, 1), n, F32))) for n in (1, 2)))
    for size, reply in zip((1, 2), replies, strict=True):
        assert reply.array(names[0]).tolist() == [[size]] * size
        assert reply.array(names[1]).tolist() == [[size]] * size


def test_arrays_of_other_libraries_are_returned(worker: Rig, write: Write) -> None:
    write("""
import ml_dtypes
class Array:
    def __array__(self, dtype=None, copy=None):
        return np.array([[1, 2]], ml_dtypes.bfloat16)
class Model:
    def predict(self, x: FP32[Tensor, 1]) -> tuple[BF16[ndarray, 2], BF16[ndarray, 2]]:
        return Array(), np.asarray(Array())
""")
    serve(worker)
    reply = worker.infer(tensor("x", np.ones((1, 1), F32)))
    for name in ("output_0", "output_1"):
        assert reply.array(name).view(np.uint16).tolist() == [[0x3F80, 0x4000]]


def test_inputs_arrive_as_annotated(worker: Rig, write: Write) -> None:
    write("""
class Model:
    def predict(
        self,
        t: BF16[Tensor, 1],
        a: FP32[ndarray, 2],
        s: BYTES[ndarray, 1],
        o: INT64[Tensor, 1] | None = None,
    ) -> BYTES[ndarray, 1]:
        assert t.dtype is torch.bfloat16 and torch.is_inference_mode_enabled()
        assert isinstance(a, ndarray) and isinstance(s, ndarray)
        assert a.shape == (len(t), 2) and s.shape == (len(t), 1)
        return np.array([[b"<" + item + b">"] for item in s.ravel()], dtype=object) \
            if o is None else [[f"{number:d}"] for number in o.ravel()]
""")
    assert complete(worker)["input"] == [
        tensor_config("t", "BF16", [1]),
        tensor_config("a", "FP32", [2]),
        tensor_config("s", "STRING", [1]),
        tensor_config("o", "INT64", [1], optional=True),
    ]
    serve(worker)

    def inputs_of(*texts: bytes) -> list[Any]:
        n = len(texts)
        return [
            tensor("t", np.zeros((n, 1), np.uint16), datatype="BF16"),
            tensor("a", np.zeros((n, 2), F32)),
            tensor("s", np.array([[text] for text in texts], dtype=object)),
        ]

    replies = worker.batch(inference(*inputs_of(b"a")), inference(*inputs_of(b"b", b"c")))
    assert [output.data for reply in replies for output in reply.outputs] == [
        b"\3\0\0\0<a>",
        b"\3\0\0\0<b>\3\0\0\0<c>",
    ]
    reply = worker.infer(*inputs_of(b"a"), tensor("o", np.array([[7]], np.int64)))
    assert reply.outputs[0].data == b"\1\0\0\x007"


def test_an_argument_with_a_default_is_an_input_that_may_be_left_out(
    worker: Rig, write: Write
) -> None:
    write("""
HALF = torch.tensor([0.5])

class Model:
    def predict(self, x: FP32[Tensor, 2], factor: FP32[Tensor, 1] = HALF) -> FP32[Tensor, 2]:
        return x * factor
""")
    assert complete(worker)["input"][1] == tensor_config("factor", "FP32", [1], optional=True)
    serve(worker)
    x = tensor("x", np.ones((1, 2), F32))
    for request, factor in (
        (inference(x), 0.5),
        (inference(x, tensor("factor", np.array([[3]], F32))), 3),
    ):
        (reply,) = worker.batch(request)
        assert reply.outputs[0].data == np.full((1, 2), factor, F32).tobytes()


def test_without_a_batch_dimension(worker: Rig, write: Write) -> None:
    write("""
class Model:
    max_batch_size = 0
    def predict(self, x: FP32[Tensor, -1]) -> FP32[Tensor, 1]:
        return x.sum(0, keepdim=True)
""")
    completed = complete(worker)
    assert completed["max_batch_size"] == 0 and "dynamic_batching" not in completed
    serve(worker)
    reply = worker.infer(tensor("x", np.ones(5, F32)))
    assert reply.array("output").tolist() == [5]


def test_class_attributes_complete_the_configuration(worker: Rig, write: Write) -> None:
    write("""
class Model:
    max_batch_size = 4
    max_queue_delay_us = 300
    def predict(self, x: FP32[Tensor, 1]) -> FP32[Tensor, 1]:
        return x
""")
    completed = complete(worker)
    assert completed["max_batch_size"] == 4
    assert completed["dynamic_batching"] == {"max_queue_delay_microseconds": 300}
    configured = {"preferred_batch_size": [2]}
    completed = complete(worker, blank_config(max_batch_size=2, dynamic_batching=configured))
    assert completed["max_batch_size"] == 2
    assert completed["dynamic_batching"] == configured


def test_a_class_may_choose_its_batching_strategy(worker: Rig, write: Write) -> None:
    text = """
class Model:
    batching_strategy = %s
    target_p99_ms = %s
    def predict(self, x: FP32[Tensor, 1]) -> FP32[Tensor, 1]:
        return x
"""
    write(text % ("'adaptive'", "12.5"))
    strategy, target_p99 = {"string_value": "adaptive"}, {"string_value": "12.5"}
    parameters = complete(worker)["parameters"]
    assert (parameters["batching_strategy"], parameters["target_p99_ms"]) == (strategy, target_p99)
    configured = {"target_p99_ms": {"string_value": "3"}}
    parameters = complete(worker, blank_config(parameters=configured))["parameters"]
    assert parameters == {**configured, "batching_strategy": strategy}
    for values, expected_error in (
        (("7", "None"), "'Model.batching_strategy' must be a string, got 7"),
        (("None", "'5'"), "'Model.target_p99_ms' must be a number of milliseconds, got '5'"),
        (("None", "True"), "'Model.target_p99_ms' must be a number of milliseconds, got True"),
    ):
        write(text % values)
        with pytest.raises(InvalidArgument, match=re.escape(expected_error)):
            complete(worker)


def test_without_inputs_there_is_no_batch(worker: Rig, write: Write) -> None:
    write("class Model:\n    def predict(self) -> FP32[Tensor, 1]: ...")
    config = complete(worker)
    assert (config["input"], config["max_batch_size"]) == ([], 0)
    assert "dynamic_batching" not in config


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_load_and_unload_are_called(worker: Rig, write: Write, kind: str) -> None:
    write(
        """
import helper
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    KIND load(self, context: Context):
        assert not self.training
        self.shift = float(context.parameters["shift"])
        assert (context.name, context.version, context.device) == ("m", "1", "cpu")
        self.log = context.directory / "log"
    def predict(self, x: FP32[Tensor, 1]) -> FP32[Tensor, 1]:
        return x + self.shift + helper.ONE
    KIND unload(self):
        self.log.write_text("unloaded")
""".replace("KIND", kind)
    )
    (worker.context.version_dir / "helper.py").write_text("ONE = 1\n")
    backend = NativeBackend(worker.context)
    config = backend.complete_config(blank_config(parameters={"shift": {"string_value": "0.5"}}))
    worker.serve(backend, config)
    reply = worker.infer(tensor("x", np.array([[1]], F32)))
    assert reply.array("output").tolist() == [[2.5]]
    backend.unload()
    assert (worker.context.version_dir / "log").read_text() == "unloaded"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Other: pass", "'model.py' does not define a class 'Model' (it has Other)"),
        ("class Model: pass", "class 'Model' has no method 'predict(self, ...)'"),
        ("class Model:\n    def __init__(self, size): ...",
         "without arguments, but __init__ is missing a required argument: 'size': use default"),
        ("class Model:\n    def load(self): ...\n"
         "    def predict(self, x: FP32[Tensor, 1]) -> FP32[Tensor, 1]: ...",
         "'Model.load' cannot be called: too many positional arguments: define it as 'load(self"),
        ("class Model:\n    def predict(self, x: FP32[list, 1]) -> FP32[Tensor, 1]: ...",
         "argument 'x' of 'Model.predict' is annotated as list: annotate it like FP32[np.ndarray"),
        ("class Model:\n    def predict(self, x: Tensor) -> FP32[Tensor, 1]: ...",
         "argument 'x' of 'Model.predict' is not a tensor: annotate it like FP32[np.ndarray"),
        ("class Model:\n    def predict(self, x) -> FP32[Tensor, 1]: ...",
         "argument 'x' of 'Model.predict' is not a tensor"),
        ("class Model:\n    def predict(self, *x: FP32[Tensor, 1]) -> FP32[Tensor, 1]: ...",
         "is variadic; name each input"),
        ("class Model:\n    def predict(self, x: FP32[Tensor, 1]): ...",
         "'Model.predict' has no return annotation"),
        ("class Model:\n    def predict(self, x: FP32[Tensor, 1]) -> Tensor: ...",
         "the result of 'Model.predict' is not a tensor"),
        ("class Model:\n    def predict(self, x: 'FP32[Nothing, 1]') -> FP32[Tensor, 1]: ...",
         "an annotation of 'Model.predict' cannot be read: NameError: name 'Nothing'"),
        ("class Model:\n    max_batch_size = -1\n"
         "    def predict(self, x: FP32[Tensor, 1]) -> FP32[Tensor, 1]: ...",
         "'Model.max_batch_size' must be an integer >= 0, got -1"),
        *((f"class Model:\n    {text}",
            "'Model.predict' must be an ordinary method") for text in ("predict = 3",
            "def predict() -> FP32[Tensor, 1]: ...",
            "@staticmethod\n    def predict(x: FP32[Tensor, 1]) -> FP32[Tensor, 1]: ...",
            "@classmethod\n    def predict(cls, x: FP32[Tensor, 1]) -> FP32[Tensor, 1]: ...")),
        ("class Model:\n    def predict(self, x: FP32[Tensor, 1], /) -> FP32[Tensor, 1]: ...",
         "argument 'x' of 'Model.predict' is positional-only"),
    ],
)  # fmt: skip
def test_missing_annotations_are_reported(
    worker: Rig, write: Write, text: str, message: str
) -> None:
    write(text)
    with pytest.raises(InvalidArgument) as caught:
        complete(worker)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (
            [tensor_config("x", "FP64", [1])],
            [],
            "input 'x' of model 'm' is TYPE_FP64 [1] in the configuration, but 'predict' has "
            "TYPE_FP32 [1] for 'x'",
        ),
        ([tensor_config("x", "FP32", [1, 1])], [], "but 'predict' has TYPE_FP32 [1] for 'x'"),
        ([tensor_config("z", "FP32", [1])], [], "but 'predict' has no 'z'"),
        ([], [tensor_config("label", "FP32", [1])], "output 'label' of model 'm'"),
    ],
)
def test_a_configuration_that_contradicts_the_annotations(
    worker: Rig, write: Write, inputs: list[Any], outputs: list[Any], message: str
) -> None:
    write(
        "class Model:\n    def predict(self, x: FP32[Tensor, 1]) -> FP32[Tensor, 1]: return x",
    )
    backend = NativeBackend(worker.context)
    config = backend.complete_config(model_config(inputs, outputs))
    with pytest.raises(ShmserveError) as caught:
        backend.load(ModelSpec.of(config))
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("output", "value", "text"),
    [
        ("tuple[FP32[Tensor, 1], FP32[Tensor, 1]]", "x", "did not return 2 values, but Tensor"),
        ("FP32[Tensor, 1]", "None", "inference output 'output' is a NoneType, not a tensor"),
        ("FP32[Tensor, 1]", "{'output': x}", "is a dict, not a tensor: expected a numpy array or"),
        ("FP32[Tensor, 1]", "np.ma.ones((1, 1))", "'output' is a masked array: return its"),
        ("FP32[Tensor, 1]", "x.double()", "model provides TYPE_FP64"),
        ("FP32[Tensor, 1]", "x.sum()", "Expected [1,1], got []"),
        ("FP32[Tensor, 1]", "1 / 0", "message: ZeroDivisionError: division by zero"),
        ("FP32[Tensor, 1]", "{}['k' * 20000]", "kkk... (20002 characters)"),
    ],
)
def test_results_that_contradict_annotations(
    worker: Rig, write: Write, output: str, value: str, text: str
) -> None:
    write(
        f"class Model:\n    def predict(self, x: FP32[Tensor, 1]) -> {output}:\n"
        f"        return {value}\n",
    )
    serve(worker)
    reply = worker.infer(tensor("x", np.zeros((1, 1), F32)))
    assert reply.code == "INTERNAL"
    assert text in reply.message


def test_an_annotated_module_is_called(worker: Rig, write: Write) -> None:
    write(
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x: FP32[Tensor, 2]) -> FP32[Tensor, 2]:\n"
        "        return -x\n",
    )
    serve(worker)
    reply = worker.infer(tensor("x", np.array([[1, 2]], F32)))
    assert reply.array("output").tolist() == [[-1, -2]]


def test_the_error_for_a_missing_annotation_contains_the_lines_to_add(
    worker: Rig, write: Write
) -> None:
    write(
        "class Model(torch.nn.Module):\n    def forward(self, image: Tensor, size): return image\n",
    )
    with pytest.raises(InvalidArgument) as caught:
        complete(worker)
    first_line, *lines = caught.value.message.split("\n")
    assert 'write backend: "pytorch", runtime: "model.py"' in first_line
    assert [line.strip() for line in lines] == [
        "from shmserve.model import FP32",
        "def predict(self, image: FP32[torch.Tensor, -1], size: FP32[torch.Tensor, -1]) -> "
        "FP32[torch.Tensor, -1]:",
        "return self(image, size)",
    ]


def test_the_reference_has_every_attribute_and_its_default() -> None:
    text = shmserve.model.__doc__ or ""
    attributes = set(declaration._KNOWN_ATTRIBUTES) - {"predict", "load", "unload", "is_ready"}
    assert set(re.findall(r"^    (\w+) = .*  \S", text, re.MULTILINE)) == attributes
    assert "max_batch_size = 32 " in text and "max_streams = 64 " in text
