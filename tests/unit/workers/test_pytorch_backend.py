"""Torch models of each format: names, whole batches, datatypes, errors that say what to write."""

import contextlib
import dataclasses
import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shmserve.errors import Internal, InvalidArgument, ShmserveError, Unavailable, Unsupported
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.arrays import decode_bytes
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import RequestedOutput
from shmserve.workers import backends
from shmserve.workers.backends.pytorch import PytorchBackend
from shmserve.workers.backends.pytorch.programs import Argument, ArgumentBinding, ResultBinding
from shmserve.workers.device import Accelerator, Device, open_device
from tests.rigs.worker_rig import Region, Rig, inference, model_config, tensor, tensor_config

F32 = np.float32


class Affine(torch.nn.Module):
    """A model that returns twice the sum over an image's last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor) -> Tensor:
        return image.sum(-1, keepdim=True) * self.factor


def save_script(module: torch.nn.Module, worker: Rig, *example: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.trace(module, example) if example else torch.jit.script(module)
        torch.jit.save(script, worker.context.version_dir / "model.pt")


def export(module: torch.nn.Module, worker: Rig, *example: Any, dynamic_shapes: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, example, dynamic_shapes=dynamic_shapes)
        torch.export.save(program, worker.context.version_dir / "model.pt2")


def write_class(worker: Rig, text: str) -> None:
    (worker.context.version_dir / "model.py").write_text(f"import torch\n{text}")


def write_forward(worker: Rig, *statements: str, arguments: str = "x") -> None:
    head = f"class Net(torch.nn.Module):\n    def forward(self, {arguments}):\n"
    write_class(worker, head + "".join(f"        {statement}\n" for statement in statements))


def save_affine(worker: Rig, model_kind: str) -> None:
    if model_kind == "script":
        save_script(Affine(), worker, torch.zeros(2, 4))
    elif model_kind == "exported":
        export(Affine(), worker, torch.zeros(2, 4), dynamic_shapes=(BATCH,))
    else:
        write_forward(worker, "return image.sum(-1, keepdim=True) * 2", arguments="image")


def vectors(
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    max_batch_size: int = 8,
    data_type: str = "FP32",
    **fields: Any,
) -> dict[str, Any]:
    return model_config(
        [tensor_config(name, data_type, [size]) for name, size in inputs.items()],
        [tensor_config(name, data_type, [size]) for name, size in outputs.items()],
        max_batch_size,
        **fields,
    )


def serve(worker: Rig, config: dict[str, Any]) -> Rig:
    return worker.serve(PytorchBackend(worker.context), config)


def load_error(worker: Rig, config: dict[str, Any]) -> str:
    with pytest.raises(ShmserveError) as caught:
        PytorchBackend(worker.context).load(ModelSpec.of(config))
    return caught.value.message


BATCH = {0: torch.export.Dim("batch")}


@pytest.mark.parametrize("model_kind", ["script", "exported", "class"])
@pytest.mark.parametrize(("x", "y"), [("image", "y"), ("INPUT__0", "OUTPUT__0")])
def test_a_batch_of_unequal_requests(worker: Rig, model_kind: str, x: str, y: str) -> None:
    save_affine(worker, model_kind)
    serve(worker, vectors({x: 4}, {y: 1}))
    for sizes in ((1,), (1, 3, 2), (2, 2)):
        rows = [np.random.rand(n, 4).astype(F32) for n in sizes]
        replies = worker.batch(*(inference(tensor(x, row)) for row in rows))
        for row, reply in zip(rows, replies, strict=True):
            np.testing.assert_allclose(reply.array(y), row.sum(-1, keepdims=True) * 2, rtol=1e-5)


class ThreeArguments(torch.nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return a - b, a * c


@pytest.mark.parametrize(
    ("names", "order"),
    [(("c", "a", "b"), "cab"), (("X__2", "X__0", "X__1"), "cab"), (("x", "y", "z"), "abc")],
)
@pytest.mark.parametrize("model_kind", ["script", "exported"])
def test_inputs_by_argument_by_index_or_in_order(
    worker: Rig, model_kind: str, names: tuple[str, ...], order: str
) -> None:
    if model_kind == "script":
        save_script(ThreeArguments(), worker)
    else:
        export(ThreeArguments(), worker, *torch.zeros(3, 2, 1), dynamic_shapes=(BATCH,) * 3)
    serve(worker, vectors(dict.fromkeys(names, 1), {"OUTPUT__1": 1, "OUTPUT__0": 1}))
    row = {"a": 7.0, "b": 2.0, "c": 3.0}
    items = [tensor(name, np.array([[row[i]]], F32)) for name, i in zip(names, order, strict=True)]
    reply = worker.infer(*items[::-1])
    assert reply.array("OUTPUT__0").tolist() == [[5]]
    assert reply.array("OUTPUT__1").tolist() == [[21]]


class ByKey(torch.nn.Module):
    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": x["a"] + x["b"], "difference": x["a"] - x["b"]}


@pytest.mark.parametrize("model_kind", ["script", "exported"])
def test_dictionaries_are_passed_by_key(
    worker: Rig, model_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if model_kind == "script":
        save_script(ByKey(), worker)
        names = ["a", "b"]
    else:
        example = {"a": torch.zeros(2, 1), "b": torch.zeros(2, 1)}
        export(ByKey(), worker, example, dynamic_shapes=({"a": BATCH, "b": BATCH},))
        names = ["x_a", "x_b"]
    serve(worker, vectors(dict.fromkeys(names, 1), {"difference": 1, "sum": 1}))
    reply = worker.infer(
        *(tensor(n, np.array([[v]], F32)) for n, v in zip(names, (5, 3), strict=True))
    )
    assert (reply.array("sum").item(), reply.array("difference").item()) == (8, 2)
    assert "mapped by their order" not in caplog.text


DATATYPES = [name for name, size in ITEM_SIZE.items() if size]


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_datatype_of_torch(worker: Rig, datatype: str, rows: int) -> None:
    write_forward(worker, "return x.clone()")
    serve(worker, vectors({"x": 2}, {"y": 2}, data_type=datatype))
    raw = bytes([1] * 2 * ITEM_SIZE[datatype])
    replies = worker.batch(*(inference(TensorRef("x", datatype, (1, 2), raw)) for _ in range(rows)))
    for reply in replies:
        (output,) = reply.outputs
        assert (output.datatype, output.data) == (datatype, raw)


def test_optional_inputs_take_the_models_default(worker: Rig) -> None:
    total = "a + (0 if b is None else b) + (0 if c is None else 10 * c)"
    write_forward(worker, f"return {total}", arguments="a, b=None, c=None")
    config = vectors({"a": 1, "b": 1, "c": 1}, {"y": 1})
    config["input"][1]["optional"] = config["input"][2]["optional"] = True
    serve(worker, config)
    ones = np.ones((1, 1), F32)
    for names, expected in (("a", 1), ("ab", 2), ("ac", 11), ("abc", 12)):
        reply = worker.infer(*(tensor(name, ones) for name in names))
        assert reply.array("y").item() == expected


# --- files and parameters


def test_weights_lie_beside_the_class_and_cannot_run_code(worker: Rig) -> None:
    write_class(
        worker,
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.zeros(1))\n"
        "    def forward(self, x):\n        return x * self.w\n",
    )
    weights = worker.context.version_dir / "model.pt"
    torch.save({"w": torch.tensor([3.0])}, weights)
    config = vectors({"x": 1}, {"y": 1}, default_model_filename="model.py")
    serve(worker, config)
    reply = worker.infer(tensor("x", np.array([[2]], F32)))
    assert reply.array("y").tolist() == [[6]]
    for wrong_weights, text in (
        ({"w": contextlib.suppress}, r"'model\.pt' contains objects that are not tensors"),
        ({"v": torch.ones(1)}, r"'model\.pt' does not fit the class 'Net': (?s:.*)Missing key"),
        ([1], r"'model\.pt' does not fit the class 'Net': Expected state_dict to be dict-like"),
    ):
        torch.save(wrong_weights, weights)
        with pytest.raises(InvalidArgument, match=text):
            PytorchBackend(worker.context).load(ModelSpec.of(config))


@pytest.mark.parametrize("name", ["model.pt", "model.pt2", "model.pth"])
@pytest.mark.parametrize("contents", [b"", b"junk"])
def test_a_file_that_cannot_be_read_is_named(worker: Rig, name: str, contents: bytes) -> None:
    if name == "model.pth":
        write_forward(worker, "return x")
    (worker.context.version_dir / name).write_bytes(contents)
    with pytest.raises(InvalidArgument, match=f"'{name}' cannot be read: "):
        PytorchBackend(worker.context).load(ModelSpec.of(vectors({"x": 1}, {"y": 1})))


def test_a_class_without_forward(worker: Rig) -> None:
    write_class(worker, "class Net(torch.nn.Module): pass\n")
    with pytest.raises(InvalidArgument, match=r"'Net' in 'model\.py' has no method 'forward'"):
        PytorchBackend(worker.context).load(ModelSpec.of(vectors({"x": 1}, {"y": 1})))


class Trap:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("file_name", ["pickle.pt", "pickle.pt2", "script.pt", "exported.pt2"])
def test_a_model_file_cannot_run_code(worker: Rig, tmp_path: Path, file_name: str) -> None:
    """No member of an archive is unpickled, whether the whole file or a part is a pickle."""
    sprung_marker = tmp_path / "sprung"
    name = "model" + Path(file_name).suffix
    path = worker.context.version_dir / name
    if file_name.startswith("pickle"):
        torch.save({"w": Trap(sprung_marker)}, path)
    elif file_name.startswith("script"):
        save_script(Affine(), worker, torch.zeros(2, 4))
        spoil(path, "data.pkl", pickle.dumps(Trap(sprung_marker)))
    else:
        export(Affine(), worker, torch.zeros(2, 4))
        malicious_file = io.BytesIO()
        torch.save(((Trap(sprung_marker),), {}), malicious_file)
        spoil(path, "model.pt", malicious_file.getvalue())
    config = vectors({"image": 4}, {"y": 1}, default_model_filename=name)
    backend = PytorchBackend(worker.context)
    for read in (backend.complete_config, lambda fields: backend.load(ModelSpec.of(fields))):
        with pytest.raises(InvalidArgument, match=f"'{name}' "):
            read(config)
    assert not sprung_marker.exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def spoil(path: Path, member_suffix: str, contents: bytes) -> None:
    """Replace the contents of each archive member whose name has this ending."""
    with zipfile.ZipFile(path) as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    spoiled_members = [name for name in members if name.endswith(member_suffix)]
    assert spoiled_members, list(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, contents if name in spoiled_members else data)


@pytest.mark.parametrize(("suffix", "wrong_suffix"), [(".pt", ".pt2"), (".pt2", ".pt")])
def test_an_archive_with_the_wrong_suffix(worker: Rig, suffix: str, wrong_suffix: str) -> None:
    if suffix == ".pt":
        save_script(Affine(), worker)
    else:
        export(Affine(), worker, torch.zeros(2, 3))
    path = worker.context.version_dir / f"model{suffix}"
    path.rename(path.with_suffix(wrong_suffix))
    with pytest.raises(InvalidArgument, match=rf"change its suffix to '\{suffix}'$"):
        PytorchBackend(worker.context).complete_config(model_config([], []))


def test_keyword_only_arguments(worker: Rig) -> None:
    write_forward(worker, "return a + b", arguments="*, a, b=1")
    config = vectors({"a": 1, "b": 1}, {"y": 1})
    config["input"][1]["optional"] = True
    serve(worker, config)
    ones = np.ones((1, 1), F32)
    for names in ("a", "ab"):
        reply = worker.infer(*(tensor(name, ones) for name in names))
        assert reply.array("y").item() == 2


def test_the_runtime_of_classes_serves_torchscript_without_a_class(worker: Rig) -> None:
    save_script(ThreeArguments(), worker)
    config = vectors({"a": 1, "b": 1, "c": 1}, {"x": 1, "y": 1}, runtime="model.py")
    PytorchBackend(worker.context).load(ModelSpec.of(config))


def test_the_class_called_model_is_served(worker: Rig) -> None:
    write_class(
        worker,
        "class Block(torch.nn.Module):\n    def forward(self, x): return x\n"
        "class Model(torch.nn.Module):\n    def forward(self, x): return x + 1\n",
    )
    serve(worker, vectors({"x": 1}, {"y": 1}, runtime="model.py"))
    reply = worker.infer(tensor("x", np.array([[2]], F32)))
    assert reply.array("y").tolist() == [[3]]


def test_parameters_enable_torch_compile(worker: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def compiled(module: Any, **options: Any) -> Any:
        calls.append(options)
        return module

    monkeypatch.setattr(torch, "compile", compiled)
    write_forward(worker, "return x")
    key = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
    eager = [{"backend": "eager"}]
    for text, expected in (('{"backend": "eager"}', eager), ('{"disable": true}', [])):
        calls.clear()
        serve(worker, vectors({"x": 1}, {"y": 1}, parameters={key: {"string_value": text}}))
        assert calls == expected
    config = vectors({"x": 1}, {"y": 1}, parameters={key: {"string_value": "fast"}})
    assert "is not a JSON object" in load_error(worker, config)


@pytest.mark.parametrize(
    ("value", "inference_mode"),
    [(None, True), ("TRUE", True), ("on", True), ("false", False), ("0", False)],
)
def test_inference_mode(worker: Rig, value: str | None, inference_mode: bool) -> None:
    statements = (
        "assert not torch.is_grad_enabled()",
        "return x + torch.is_inference_mode_enabled()",
    )
    write_forward(worker, *statements)
    parameters = {} if value is None else {"INFERENCE_MODE": {"string_value": value}}
    serve(worker, vectors({"x": 1}, {"y": 1}, parameters=parameters))
    reply = worker.infer(tensor("x", np.zeros((1, 1), F32)))
    assert reply.array("y").item() == inference_mode


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("INFERENCE_MODE", ": failed to convert 'no' to boolean"),
        ("DISABLE_OPTIMIZED_EXECUTION", ": failed to convert 'no' to boolean"),
        ("DISABLE_CUDNN", ": failed to convert 'no' to boolean"),
        ("INTER_OP_THREAD_COUNT", " must be an integer from 0 to 2147483647, got 'no'"),
    ],
)
def test_a_parameter_with_an_invalid_value(worker: Rig, key: str, problem: str) -> None:
    save_script(ThreeArguments(), worker)
    config = vectors({"x": 1, "y": 1, "z": 1}, {"a": 1}, parameters={key: {"string_value": "no"}})
    assert load_error(worker, config) == f"parameter '{key}'{problem}"


def test_a_missing_file(worker: Rig) -> None:
    assert load_error(worker, vectors({"x": 1}, {"y": 1})) == (
        "unable to find '1/model.pt or model.pt2 or model.py' for model instance 'm_0_0'"
    )
    save_script(Affine(), worker, torch.zeros(2, 4))
    folder = worker.context.version_dir
    (folder / "model.pt").rename(folder / "best.jit")
    error = load_error(worker, vectors({"x": 4}, {"y": 1}))
    assert error.endswith(" (found best.jit: set default_model_filename)")
    serve(worker, vectors({"x": 4}, {"y": 1}, default_model_filename="best.jit"))
    (folder / "best.jit").rename(folder.parent / "model.pt")
    error = load_error(worker, vectors({"x": 4}, {"y": 1}))
    assert error.endswith(" (found model.pt beside the folder '1': move it into it)")
    target = folder.rename(folder.parent / "linked")
    folder.symlink_to(target)
    error = load_error(worker, vectors({"x": 4}, {"y": 1}))
    assert error.endswith(f" in '{target}' (found no file)")


# --- auto-complete


def test_an_exported_program_needs_no_configuration(worker: Rig) -> None:
    batch = {0: torch.export.Dim("b", max=6)}
    export(ThreeArguments(), worker, *torch.zeros(3, 2, 1), dynamic_shapes=(batch,) * 3)
    completed = PytorchBackend(worker.context).complete_config(model_config([], []))
    assert completed["max_batch_size"] == 4 and completed["dynamic_batching"] == {}
    assert completed["input"] == [tensor_config(name, "FP32", [1]) for name in "abc"]
    assert completed["output"] == [tensor_config(f"OUTPUT__{n}", "FP32", [1]) for n in (0, 1)]
    serve(worker, completed)


class Scores(torch.nn.Module):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"mean": tokens.float().mean(1), "doubled": tokens * 2}


class Repeated(torch.nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x[:n]


def test_an_exported_integer_is_refused(worker: Rig) -> None:
    sizes: Any = ({0: torch.export.Dim.DYNAMIC}, torch.export.Dim.DYNAMIC)
    export(Repeated(), worker, torch.zeros(4, 2), 3, dynamic_shapes=sizes)
    with pytest.raises(InvalidArgument, match="tensor 'n' of the exported program is SymInt"):
        PytorchBackend(worker.context).complete_config(model_config([], []))


def test_variable_and_absent_dimensions_are_completed(worker: Rig) -> None:
    shape = {**BATCH, 1: torch.export.Dim("length")}
    export(Scores(), worker, torch.zeros(2, 5, dtype=torch.int64), dynamic_shapes=(shape,))
    completed = PytorchBackend(worker.context).complete_config(model_config([], []))
    assert completed["input"] == [tensor_config("tokens", "INT64", [-1])]
    assert completed["output"] == [
        tensor_config("mean", "FP32", [1], reshape={"shape": []}),
        tensor_config("doubled", "INT64", [-1]),
    ]
    serve(worker, completed)
    tokens = np.arange(6, dtype=np.int64).reshape(2, 3)
    reply = worker.infer(tensor("tokens", tokens))
    assert reply.array("mean").tolist() == [[1], [4]]
    assert np.array_equal(reply.array("doubled"), tokens * 2)


class Rank(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + 10 * x.dim()


@pytest.mark.parametrize(("reshape", "result"), [({}, 13), ({"reshape": {"shape": []}}, 3)])
def test_a_script_has_tensors_of_rank_0(
    worker: Rig, reshape: dict[str, Any], result: float
) -> None:
    save_script(Rank(), worker)
    inputs = [tensor_config("x", "FP32", [1], **reshape)]
    serve(worker, model_config(inputs, [tensor_config("y", "FP32", [1])], 0))
    reply = worker.infer(tensor("x", np.full(1, 3, F32)))
    assert reply.array("y").tolist() == [result]


def test_a_program_with_fixed_shapes_does_not_batch(worker: Rig) -> None:
    export(Affine(), worker, torch.zeros(2, 4))
    completed = PytorchBackend(worker.context).complete_config(model_config([], []))
    assert completed["max_batch_size"] == 0
    assert completed["input"] == [tensor_config("image", "FP32", [2, 4])]
    assert "dynamic_shapes" in load_error(worker, vectors({"image": 4}, {"y": 1}))


def test_completion_keeps_the_authors_values(worker: Rig) -> None:
    export(Affine(), worker, torch.zeros(2, 4), dynamic_shapes=(BATCH,))
    configured = model_config([tensor_config("image", "FP32", [-1, 4])], [])
    completed = PytorchBackend(worker.context).complete_config(configured)
    assert completed["max_batch_size"] == 0
    assert completed["input"] == configured["input"]
    assert completed["output"] == [tensor_config("OUTPUT__0", "FP32", [-1, 1])]


def test_the_error_of_a_torchscript_file_names_the_configuration(worker: Rig) -> None:
    save_script(ThreeArguments(), worker)
    with pytest.raises(InvalidArgument) as caught:
        PytorchBackend(worker.context).complete_config(model_config([], []))
    for word in ('name: "a"', 'name: "c"', "data_type", "config.pbtxt", "OUTPUT__0"):
        assert word in caught.value.message


# --- errors at load


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        (
            ["a", "b"],
            ["y"],
            "takes the argument(s) 'c', but its configuration has no input of this name",
        ),
        (["a", "b", "c", "d"], ["y"], "has 4 inputs, but its forward takes 3: 'a', 'b', 'c'"),
        (["X__0", "Y__0", "Z__1"], ["y"], "inputs 'X__0' and 'Y__0' of model 'm' have the same"),
        (["X__0", "X__1", "X__3"], ["y"], "input 'X__3' of model 'm' has the index 3, but the"),
        (["a", "b", "c"], ["x", "y", "z"], "has 3 outputs, but the model returns 2"),
        (["a", "b", "c"], ["Y__2"], "Y__2 in the model configuration refers to an output index"),
    ],
)
def test_contradicting_names_are_refused(
    worker: Rig, inputs: list[str], outputs: list[str], text: str
) -> None:
    save_script(ThreeArguments(), worker)
    config = vectors(dict.fromkeys(inputs, 1), dict.fromkeys(outputs, 1))
    assert text in load_error(worker, config)


@pytest.mark.parametrize(
    ("dims", "data_type", "max_batch_size", "message"),
    [
        ([5], "FP32", 4, "has the shape [5], but its program takes [4]"),
        ([4], "FP64", 4, "has data_type TYPE_FP64, but its program takes TYPE_FP32"),
        ([4], "FP32", 9, "has max_batch_size 9, but its program was exported for 8 at most"),
    ],
)
def test_a_configuration_that_an_exported_program_contradicts(
    worker: Rig, dims: list[int], data_type: str, max_batch_size: int, message: str
) -> None:
    batch = {0: torch.export.Dim("batch", max=8)}
    export(Affine(), worker, torch.zeros(2, 4), dynamic_shapes=(batch,))
    config = model_config(
        [tensor_config("image", data_type, dims)], [tensor_config("y", "FP32", [1])], max_batch_size
    )
    assert message in load_error(worker, config)


class Pair(torch.nn.Module):
    def forward(self, a: list[str], b: list[str]) -> tuple[list[str], list[str]]:
        sums = [x + y for x, y in zip(a, b)]  # noqa: B905 - TorchScript has no `strict`
        return sums, [str(len(x)) for x in sums]


class Upper(torch.nn.Module):
    def forward(self, a: list[str]) -> list[str]:
        return [x.upper() for x in a]


def text_array(*rows: str) -> Any:
    return np.array([row.split() for row in rows], np.object_)


@pytest.mark.parametrize("names", [("a", "b"), ("INPUT__0", "INPUT__1")])
def test_a_script_receives_and_returns_lists_of_texts(worker: Rig, names: tuple[str, str]) -> None:
    """As in Triton, one list contains all rows of a batch, each decoded as UTF-8."""
    first_name, second_name = names
    save_script(Pair(), worker)
    outputs = {"OUTPUT__0": 2, "OUTPUT__1": 2}
    serve(worker, vectors({first_name: 2, second_name: 2}, outputs, data_type="STRING"))
    replies = worker.batch(
        inference(tensor(first_name, text_array("1 2")), tensor(second_name, text_array("x y"))),
        inference(
            tensor(first_name, text_array("3 ä", "5 6")),
            tensor(second_name, text_array("z z", "z zz")),
        ),
    )
    outputs_by_reply = [[decoded(reply, name) for name in outputs] for reply in replies]
    assert outputs_by_reply == [
        [[["1x", "2y"]], [["2", "2"]]],
        [[["3z", "äz"], ["5z", "6zz"]], [["2", "3"], ["2", "3"]]],
    ]
    first, second = np.array([[b"\xff", b"1"]], np.object_), text_array("x y")
    reply = worker.infer(tensor(first_name, first), tensor(second_name, second))
    assert reply.outputs[0].data == b"\x02\0\0\0\xffx\x02\0\0\x001y"


def decoded(reply: Any, name: str) -> Any:
    ref = next(ref for ref in reply.outputs if ref.name == name)
    array = decode_bytes(ref.data, ref.shape, name, "m")
    return np.vectorize(bytes.decode, otypes=[object])(array).tolist()


def test_a_script_may_return_one_list_of_texts(worker: Rig) -> None:
    save_script(Upper(), worker)
    serve(worker, vectors({"a": -1}, {"y": -1}, data_type="STRING", max_batch_size=0))
    reply = worker.infer(tensor("a", np.array(["a", "bc"], np.object_)))
    assert decoded(reply, "y") == ["A", "BC"]
    reply = worker.infer(tensor("a", np.array([b"\xff"], np.object_)))
    assert reply.outputs[0].data == b"\x01\0\0\0\xff"


@pytest.mark.parametrize(
    ("module", "kind", "dims", "expected_error"),
    [
        (*(Affine, "STRING", [1]),
         "input 'a' of model 'm' has data_type TYPE_STRING, but the model takes a tensor"),
        (*(Upper, "FP32", [1]),
         "input 'a' of model 'm' has data_type TYPE_FP32, but the model takes List[str]"),
        (*(Upper, "STRING", [2, 2]),
         "Triton only supports 1 dimensional List of String as input for 'a' for model 'm'"),
    ],
)  # fmt: skip
def test_texts_must_be_lists_of_one_dimension(
    worker: Rig, module: Any, kind: str, dims: list[int], expected_error: str
) -> None:
    save_script(module(), worker)
    config = model_config([tensor_config("a", kind, dims)], [tensor_config("y", kind, dims)])
    assert expected_error in load_error(worker, config)


def test_missing_devices_are_refused(worker: Rig) -> None:
    for name, word in (("npu:0", "torch_npu"), ("cuda:99", "cuda:99")):
        with pytest.raises(Unavailable, match=word):
            open_device(name)
    with pytest.raises(InvalidArgument):
        open_device("cuda")


# --- errors at run time


def test_outputs_that_do_not_match_the_configuration(worker: Rig) -> None:
    write_forward(
        worker,
        "return {0: x.double(), 1: {'z': x}, 2: x[:1], 3: 'text', 4: x.to(torch.complex64),",
        "        5: (x, x)[:0]}[int(x[0, 0])]",
    )
    serve(worker, vectors({"x": 1}, {"y": 1}))
    for case, message in enumerate(
        (
            "configuration expects datatype TYPE_FP32 for output 'y', model provides TYPE_FP64",
            "model 'm' returned the output(s) 'z', but its configuration names 'y'",
            "unexpected shape for inference output 'y' for model 'm'. Expected [2,1], got [1,1].",
            "inference output 'y' is a str, not a tensor",
            "inference output 'y' has the datatype torch.complex64",
            "model 'm' returned 0 output(s), but not 'y'",
        )
    ):
        reply = worker.infer(tensor("x", np.full((2, 1), case, F32)))
        assert reply.code == "INTERNAL"
        assert message in reply.message


# --- memory


@pytest.mark.parametrize("write", ["x.add_(1)", "x.data.add_(1)", "np.add(a := x.numpy(), 1, a)"])
def test_the_clients_region_is_never_written(worker: Rig, region: Region, write: str) -> None:
    """Torch has no read-only tensors, so a model that works in place receives copies."""
    write_forward(worker, "import numpy as np", write, "return x")
    serve(worker, vectors({"x": 4}, {"y": 4}))
    data = np.zeros((1, 4), F32)
    for _ in range(3):
        reply = worker.infer(tensor("x", data, region.write(0, data)))
        assert reply.array("y").tolist() == [[1, 1, 1, 1]]
        assert region.read(0, 16) == bytes(16)


@pytest.mark.parametrize(
    ("statement", "values", "expected"),
    [
        # Only the second batch reaches the memory of the client.
        ("assert x[0, 0] >= 0 or x.add_(1) is None", (0, -9, -9), [False, True, False]),
        # The first batch shows nothing, because it fails before the write.
        ("assert x[0, 0] >= 0 and x.numpy().fill(5) is None", (-9, 1, 1), [False] * 3),
    ],
)
def test_a_write_before_or_after_an_exception_is_detected(
    worker: Rig, region: Region, statement: str, values: Sequence[int], expected: list[bool]
) -> None:
    write_forward(worker, statement, "return x")
    serve(worker, vectors({"x": 1}, {"y": 1}))
    was_changed = []
    for value in values:
        memory_range = region.write(0, data := np.full((1, 1), value, F32))
        worker.batch(inference(tensor("x", data, memory_range)))
        was_changed.append(region.read(0, 4) != data.tobytes())
    assert was_changed == expected


def test_a_model_that_does_not_write_to_its_inputs_receives_views(
    worker: Rig, region: Region
) -> None:
    write_forward(worker, "self.at = x.data_ptr()", "return x")
    backend = PytorchBackend(worker.context)
    worker.serve(backend, vectors({"x": 4}, {"y": 4}))
    data = np.ones((1, 4), F32)
    place, expected = (region.write(64, data), RequestedOutput("y", region.memory_range(256, 16)))
    addresses = []
    for _ in range(3):
        reply = worker.infer(tensor("x", data, place), outputs=[expected])
        assert reply.code == "", reply.message
        program: Any = backend._program.call
        addresses.append(program.at)
    mapped_bytes = np.frombuffer(worker.context.mappings.view(place), np.uint8)
    mapped_address = mapped_bytes.__array_interface__["data"][0]
    assert [address == mapped_address for address in addresses] == [False, True, True]
    assert region.read(256, 16) == data.tobytes()


# --- pure functions on names


def test_call_plan_binds_by_position_and_by_keyword() -> None:
    arguments = [Argument("a"), Argument("b", required=False), Argument("c", required=False)]
    plan = ArgumentBinding("m", ["c", "a"], arguments)
    assert plan.bind({"a": 1, "c": 3}) == ([1], {"c": 3})
    assert plan.bind({"a": 1}) == ([1], {})
    unnamed = ArgumentBinding("m", ["X__0", "X__1"], None)
    assert unnamed.bind({"X__1": 2, "X__0": 1}) == ([1, 2], {})
    with pytest.raises(InvalidArgument, match="by position"):
        unnamed.bind({"X__1": 2})


def test_the_result_plan_maps_named_tuples_by_field() -> None:
    from typing import NamedTuple

    class Pair(NamedTuple):
        low: int
        high: int

    assert ResultBinding("m", ["high", "low"]).map_outputs(Pair(1, 2)) == {"high": 2, "low": 1}
    assert ResultBinding("m", ["Y__1"]).map_outputs(Pair(1, 2)) == {"Y__1": 2}
    with pytest.raises(Internal, match="'low', 'high', but its configuration names 'middle'"):
        ResultBinding("m", ["high", "middle"]).map_outputs(Pair(1, 2))


def test_backends_are_found_by_name() -> None:
    assert backends.find(ModelSpec.of({"backend": "pytorch"})) is PytorchBackend
    with pytest.raises(InvalidArgument, match="unable to find backend 'tensorrt'"):
        backends.find(ModelSpec.of({"backend": "tensorrt", "name": "m"}))
    decoupled = {"backend": "pytorch", "model_transaction_policy": {"decoupled": True}}
    with pytest.raises(Unsupported, match="backend 'pytorch' does not support the 'decoupled'"):
        backends.find(ModelSpec.of({**decoupled, "name": "m"}))


# --- devices with their own memory


def test_a_device_is_synchronized_from_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a current device, which may be another device than the instance's."""
    devices: list[Any] = []
    for name in ("set_device_index", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, devices.append)
    Accelerator("cuda:1").synchronize()
    assert devices == [1, torch.device("cuda:1")]


class FakeCopyDevice(Device):
    """A fake device on this host, to and from which tensors are copied."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.moves: list[str] = []

    needs_copies = True

    def put(self, tensor: Tensor) -> Tensor:
        self.moves.append("put")
        return tensor.clone()

    def fetch(self, tensor: Tensor) -> Tensor:
        self.moves.append("fetch")
        return tensor.clone()

    def synchronize(self) -> None:
        self.moves.append("synchronize")


def test_tensors_go_to_a_device_once_a_batch(worker: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCopyDevice()
    monkeypatch.setattr("shmserve.workers.backends.pytorch.open_device", lambda name: device)
    save_script(ThreeArguments(), worker)
    serve(worker, vectors(dict.fromkeys("abc", 1), {"Y__0": 1, "Y__1": 1}))
    rows = [np.full((n, 1), n, F32) for n in (1, 2)]
    requests = [inference(*(tensor(name, row) for name in "abc")) for row in rows]
    for reply, row in zip(worker.batch(*requests), rows, strict=True):
        assert np.array_equal(reply.array("Y__1"), row * row)
    assert device.moves == ["put"] * 3 + ["fetch"] * 2 + ["synchronize"]
    device.moves.clear()
    (only_reply,) = worker.batch(
        inference(*(tensor(n, rows[0]) for n in "abc"), outputs=[RequestedOutput("Y__0")])
    )
    assert only_reply.array("Y__0").tolist() == [[0]]
    assert device.moves == ["put"] * 3 + ["fetch", "synchronize"], "what nobody wants stays there"


@pytest.mark.gpu
@pytest.mark.parametrize("model_kind", ["script", "exported", "class"])
def test_on_a_cuda_device(worker: Rig, region: Region, model_kind: str) -> None:
    save_affine(worker, model_kind)
    if model_kind == "class":
        statements = "assert image.is_cuda", "return image.sum(-1, keepdim=True) * 2"
        write_forward(worker, *statements, arguments="image")
    context = dataclasses.replace(worker.context, device="cuda:0", kind="GPU")
    worker.serve(PytorchBackend(context), vectors({"image": 4}, {"y": 1}))
    rows = [np.random.rand(n, 4).astype(F32) for n in (1, 3)]
    memory_ranges = [region.write(offset, row) for offset, row in zip((0, 1024), rows, strict=True)]
    for count in (1, 2):
        placed_rows = zip(rows[:count], memory_ranges, strict=False)
        replies = worker.batch(*(inference(tensor("image", *placed)) for placed in placed_rows))
        for row, reply in zip(rows, replies, strict=False):
            np.testing.assert_allclose(reply.array("y"), row.sum(-1, keepdims=True) * 2, rtol=1e-5)
