"""Classes with an annotated `predict`, served without configuration."""

import numpy as np
import pytest

from tests.support.pages import GUIDE, blocks
from tests.support.request_pool import request_pool
from tests.support.servers import ROOT, Server, Start
from tests.support.wire.raw_http import Http, json_request

SCALING_MODEL = '''
"""Three models in one file."""
import numpy as np
from torch import Tensor

from shmserve.model import BYTES, FP32, INT32


class Scale:
    max_batch_size = 8
    max_queue_delay_us = 2000

    def load(self, context):
        assert context.device == "cpu"
        self.factor = 2

    def predict(self, x: FP32[Tensor, 4], shift: FP32[Tensor, 4]) -> FP32[Tensor, 4]:
        assert x.shape[1:] == (4,) and x.shape[0] == shift.shape[0]
        return self.factor * x + shift


class Wrong:
    def predict(self, x: FP32[Tensor, 4]) -> FP32[Tensor, 4]:
        return x[:, :2]


class Several:
    instances = 2
    max_batchsize = 4  # a likely misspelling

    def load(self, context):
        self.add = float(context.parameters["add"])

    def predict(self, x: FP32[Tensor, 4]) -> FP32[Tensor, 4]:
        return x + self.add


class Sizes:
    def predict(self, words: BYTES[np.ndarray, -1]) -> INT32[np.ndarray, -1]:
        return np.array([[len(word) for word in row] for row in words], np.int32)
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, start: Start) -> Server:
    """A server of five classes, and of no repository."""
    file = tmp_path_factory.mktemp("native") / "several.py"
    file.write_text(SCALING_MODEL)
    example = ROOT / "examples" / "native_model.py"
    classes = (f"{file}:Scale", f"{file}:Wrong", f"{file}:Sizes", f"{example}:Blur")
    return start((), *classes, f"{file}:Several", "--set", "add=2.5")


def test_annotations_become_metadata(http: Http) -> None:
    assert http.get("/v2/models/scale").ok().json()["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "shift", "datatype": "FP32", "shape": [-1, 4]},
    ]
    assert http.get("/v2/models/scale").json()["outputs"] == [
        {"name": "output", "datatype": "FP32", "shape": [-1, 4]}
    ]
    config = http.config("scale")
    assert config["max_batch_size"] == 8
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 2000


def test_predict(http: Http) -> None:
    x, shift = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((2, 4), np.float32)
    reply = http.infer("scale", json_request(x=x, shift=shift))
    assert (reply.tensors()["output"] == 2 * x + shift).all()


def test_whole_batches(server: Server) -> None:
    with request_pool(server, 16) as pool:
        answers = []
        for number in range(64):
            x = np.full((1 + number % 2, 4), number, np.float32)
            answers.append(pool.infer("scale", json_request(x=x, shift=x)))
        for number, answer in enumerate(answers):
            assert (answer.result().tensors()["output"] == 3 * number).all()
    with server.http() as http:
        stats = http.statistics("scale")
    assert stats["execution_count"] < stats["inference_count"]


def test_texts(http: Http) -> None:
    request = json_request(words=np.array([["", "a", "four"]], object))
    assert http.infer("sizes", request).tensors()["output"].tolist() == [[0, 1, 4]]


def test_the_example(http: Http) -> None:
    image = np.zeros((1, 5, 5), np.float32)
    image[0, 2, 2] = 9
    output = http.infer("blur", json_request(image=image)).tensors()["output"]
    assert np.allclose(output[0, 1:4, 1:4], 1)


def test_the_guides_models_are_the_examples() -> None:
    examples = {"models": ("native_model", "native_stream"), "sequences": ("native_sequence",)}
    for page, names in examples.items():
        page_blocks = blocks(GUIDE / f"{page}.md")
        guide_texts = [
            block.text for block in page_blocks if (block.language, block.use) == ("python", "")
        ]
        for text, name in zip(guide_texts, names, strict=True):
            assert text in (ROOT / "examples" / f"{name}.py").read_text()


def test_a_result_of_the_wrong_shape_is_the_models_error(server: Server, http: Http) -> None:
    reply = http.infer("wrong", json_request(x=np.zeros((1, 4), np.float32)))
    assert reply.status == 500 and "output" in reply.error
    assert server.answers("/v2/health/ready")


def test_a_class_and_the_command_line_set_the_instance_count(http: Http, server: Server) -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    assert (http.infer("several", json_request(x=x)).tensors()["output"] == x + 2.5).all()
    assert [group["count"] for group in http.config("several")["instance_group"]] == [2]
    assert len(server.find("worker several.")) == 2
    misspelt = "'Several.max_batchsize' is unknown; did you mean 'max_batch_size'?"
    assert misspelt in server.log()
