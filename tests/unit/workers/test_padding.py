"""Padded batches: the inputs that a model receives for unequal requests, and their outputs."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from shmserve.ipc.messages.inference import Work
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.backends.native import NativeBackend
from shmserve.workers.backends.python import PythonBackend
from shmserve.workers.backends.pytorch import PytorchBackend
from shmserve.workers.batch.backend_request import CopyCounter, Input, Output, Request, Response
from shmserve.workers.batch.ragged import Padder
from tests.rigs.worker_rig import Rig, inference, model_config, tensor, tensor_config
from tests.support.repositories import python_model

F32 = np.float32
UNUSED: Any = None
PADDING = {
    "IMAGE": {
        "value": -1,
        "buckets": [[3, 224, 224], [3, 336, 336]],
        "lengths": "LENGTHS",
        "mask": "MASK",
    },
    "FEATURES": {"like": "IMAGE"},
}
DIMS = [3, -1, -1]


def config(padding: dict[str, Any] = PADDING, **fields: Any) -> dict[str, Any]:
    return model_config(
        [tensor_config("IMAGE", "FP32", DIMS)],
        [tensor_config("FEATURES", "FP32", DIMS), tensor_config("SUM", "FP32", [1])],
        8,
        parameters={"padding": {"string_value": json.dumps(padding)}},
        **fields,
    )


TORCH_MODEL = """
import torch
class Net(torch.nn.Module):
    def forward(self, IMAGE, LENGTHS, MASK):
        assert IMAGE.shape == MASK.shape == (3, 3, 336, 336), IMAGE.shape
        assert LENGTHS.tolist() == [[3, 224, 224], [3, 336, 336], [3, 336, 336]]
        assert (IMAGE[~MASK] == -1).all() and (IMAGE[MASK] >= 0).all()
        return {"FEATURES": IMAGE * 2, "SUM": (IMAGE * MASK).sum((1, 2, 3))[:, None]}
"""
NATIVE_MODEL = """
import torch
from typing import NamedTuple
from torch import Tensor
from shmserve.model import BOOL, FP32, INT64

class Out(NamedTuple):
    FEATURES: FP32[Tensor, 3, -1, -1]
    SUM: FP32[Tensor, 1]

class Model:
    max_batch_size = 8
    padding = PADDING

    def predict(self, IMAGE: FP32[Tensor, 3, -1, -1], LENGTHS: INT64[Tensor, 3],
                MASK: BOOL[Tensor, 3, -1, -1]) -> Out:
        assert IMAGE.shape == MASK.shape == (3, 3, 336, 336), IMAGE.shape
        assert LENGTHS.tolist() == [[3, 224, 224], [3, 336, 336], [3, 336, 336]]
        assert (IMAGE[~MASK] == -1).all() and (IMAGE[MASK] >= 0).all()
        return Out(IMAGE * 2, (IMAGE * MASK).sum((1, 2, 3))[:, None])
"""
PYTHON_MODEL = python_model("""
    def one(self, request):
        names = ("IMAGE", "LENGTHS", "MASK")
        image, lengths, mask = (self.input(request, name) for name in names)
        assert image.shape[1:] == mask.shape[1:] == (3, 336, 336), image.shape
        assert len(image) == len(lengths) and (image[~mask] == -1).all()
        return self.response(FEATURES=image * 2, SUM=(image * mask).sum((1, 2, 3))[:, None])
""")


@pytest.mark.parametrize("model_kind", ["pytorch", "native", "python"])
def test_images_of_224_and_336_share_a_batch(worker: Rig, model_kind: str) -> None:
    """Images are padded to the smallest common bucket, with lengths and a mask."""
    path = worker.context.version_dir / "model.py"
    if model_kind == "pytorch":
        path.write_text(TORCH_MODEL)
        worker.serve(PytorchBackend(worker.context), config())
    elif model_kind == "python":
        path.write_text(PYTHON_MODEL)
        worker.serve(PythonBackend(worker.context), config())
    else:
        path.write_text(NATIVE_MODEL.replace("PADDING", repr(PADDING)))
        backend = NativeBackend(worker.context)
        completed = backend.complete_config(model_config([], []))
        # The shape that clients send, without padding.
        assert completed["input"] == [tensor_config("IMAGE", "FP32", DIMS)]
        worker.serve(backend, completed)
    rng = np.random.default_rng(1)
    images = [rng.random((rows, 3, size, size), F32) for rows, size in ((1, 224), (2, 336))]
    for _ in range(2):
        replies = worker.batch(*(inference(tensor("IMAGE", image)) for image in images))
        for image, reply in zip(images, replies, strict=True):
            np.testing.assert_array_equal(reply.array("FEATURES", worker), image * 2)
            sums = image.sum((1, 2, 3))[:, None]
            np.testing.assert_allclose(reply.array("SUM", worker), sums, rtol=1e-4)


def make_padder(padding: dict[str, Any], data_type: str = "FP32", dims: Any = (-1,)) -> Padder:
    configuration = config(padding)
    configuration["input"] = [tensor_config("IMAGE", data_type, dims)]
    configuration["output"] = [tensor_config("FEATURES", data_type, [-1, 2])]
    signature = Signature(ModelSpec.of(configuration), "1")
    assert signature.padding is not None
    return Padder(signature.padding, signature, CopyCounter())


def request(array: Any, datatype: str = "FP32") -> Request:
    raw = array if isinstance(array, torch.Tensor) else memoryview(bytearray(array.tobytes()))
    shape = tuple(array.shape)
    if isinstance(array, torch.Tensor):
        raw = array.reshape(-1).view(torch.uint8)
    item = Input("IMAGE", datatype, shape, raw, on_device=isinstance(raw, torch.Tensor))
    return Request(Work(0, 0, b"", []), UNUSED, shape[0], {"IMAGE": item}, {})


def test_without_buckets_a_batch_is_padded_to_its_maximum() -> None:
    requests = [request(np.ones((1, n), F32)) for n in (1, 3)]
    padded_batch = make_padder({"IMAGE": {"lengths": "N"}}).pad(requests)
    assert padded_batch.padded_shapes == {"IMAGE": (3,)}
    assert [r.inputs["IMAGE"].numpy().tolist() for r in requests] == [[[1, 0, 0]], [[1, 1, 1]]]
    assert [r.inputs["N"].numpy().tolist() for r in requests] == [[[1]], [[3]]]


@pytest.mark.parametrize(
    ("datatype", "value"), [("BF16", 1.5), ("INT8", -128), ("BOOL", 1), ("UINT64", 2**64 - 1)]
)
def test_the_padding_value_has_the_inputs_datatype(datatype: str, value: float) -> None:
    from shmserve.ipc.tensors.arrays import NUMPY_DTYPES

    kind = NUMPY_DTYPES.get(datatype, np.dtype(np.uint16))
    requests = [request(np.zeros((1, n), kind), datatype) for n in (1, 2)]
    make_padder({"IMAGE": {"value": value}}, datatype).pad(requests)
    image = requests[0].inputs["IMAGE"].torch()
    assert image[0, 1].item() == value and image[0, 0].item() == 0


def test_inputs_on_a_device_are_padded_there() -> None:
    """Uses torch tensors on the host, because no test machine has the device."""
    rows = [torch.arange(1, 1 + n, dtype=torch.float32).reshape(1, n) for n in (1, 3)]
    requests = [request(row) for row in rows]
    make_padder({"IMAGE": {"value": 7}}).pad(requests)
    padded = requests[0].inputs["IMAGE"].batch
    assert isinstance(padded, torch.Tensor) and padded is requests[1].inputs["IMAGE"].batch
    assert padded.view(torch.float32).tolist() == [1, 7, 7, 1, 2, 3]
    assert requests[1].inputs["IMAGE"].torch().tolist() == [[1, 2, 3]]


def test_an_output_that_cannot_be_cut_is_an_error_to_its_request() -> None:
    padder = make_padder({"IMAGE": {}, "FEATURES": {"like": "IMAGE"}})
    padded_batch = padder.pad([request(np.ones((1, n), F32)) for n in (1, 3, 2)])
    shapes = ((1, 3, 2), (1, 2, 2), (1, 2, 2))
    responses = [Response([Output("FEATURES", "FP32", np.zeros(shape, F32))]) for shape in shapes]
    padder.cut(responses, padded_batch)
    assert responses[0].outputs[0].shape == (1, 1, 2) and responses[1].error is not None
    assert responses[1].error.message == (
        "inference output 'FEATURES' has the shape [1,2,2], which cannot be cut like input "
        "'IMAGE', whose padded shape is [3]"
    )
    assert responses[2].outputs[0].shape == (1, 2, 2), "the model cut it itself"


def test_a_batch_that_is_padded_is_gathered_without_another_copy(worker: Rig) -> None:
    path = worker.context.version_dir / "model.py"
    path.write_text(
        TORCH_MODEL.replace("(3, 3, 336, 336)", "IMAGE.shape").replace("        assert L", "#")
    )
    worker.serve(PytorchBackend(worker.context), config())
    images = [np.ones((1, 3, size, size), F32) for size in (224, 336)]
    for _ in range(2):
        worker.context.copy_counter.take()
        worker.batch(*(inference(tensor("IMAGE", image)) for image in images))
    inline_bytes = padded_bytes = sum(image.nbytes for image in images)
    assert worker.finished.copied_input_bytes == inline_bytes + padded_bytes
