"""TorchScript, torch.export and nn.Module files with the backend "pytorch"."""

import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.servers import Server, Start
from tests.support.wire.raw_http import Http, json_input

CONFIG = """
name: "{name}"
backend: "pytorch"
{more}
max_batch_size: 8
input [ {inputs} ]
output [ {{ name: "{output}" data_type: TYPE_FP32 dims: [ 4 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
dynamic_batching {{ max_queue_delay_microseconds: 1000 }}
"""
INPUT = '{{ name: "{}" data_type: TYPE_FP32 dims: [ 4 ] }}'

EAGER_MODEL = '''
"""An nn.Module in a file."""
import torch
from torch import nn


class Model(nn.Module):
    """x -> weight * x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return self.weight * x
'''


class Weigh(nn.Module):
    """A model that computes 2 a + b."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.weight * a + b


def add(
    repository: Path, name: str, inputs: list[str], output: str = "OUTPUT__0", settings: str = ""
) -> Path:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    text = CONFIG.format(
        name=name, inputs=", ".join(map(INPUT.format, inputs)), output=output, more=settings
    )
    (repository / name / "config.pbtxt").write_text(textwrap.dedent(text))
    return folder


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    """Start a server of the same function in every format that the backend loads."""
    model = Weigh().eval()
    example = (torch.zeros(2, 4), torch.zeros(2, 4))
    n = torch.export.Dim("batch", max=64)
    program = torch.export.export(model, example, dynamic_shapes={"a": {0: n}, "b": {0: n}})
    platform = 'platform: "pytorch_libtorch"'
    with warnings.catch_warnings():
        # TorchScript is deprecated, but common in existing repositories.
        warnings.simplefilter("ignore")
        net = torch.jit.script(model)
    net.save(str(add(models, "by_index", ["INPUT__0", "INPUT__1"], settings=platform) / "model.pt"))
    net.save(str(add(models, "by_name", ["b", "a"]) / "model.pt"))
    settings = 'default_model_filename: "model.pt2"'
    torch.export.save(
        program, add(models, "exported", ["INPUT__0", "INPUT__1"], settings=settings) / "model.pt2"
    )
    torch.export.save(program, add(models, "exported_by_name", ["b", "a"]) / "model.pt2")
    (add(models, "eager", ["x"]) / "model.py").write_text(EAGER_MODEL)
    return start(models)


A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = np.full((2, 4), 0.5, np.float32)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("by_index", ("INPUT__0", "INPUT__1")),
        ("by_name", ("a", "b")),
        ("exported", ("INPUT__0", "INPUT__1")),
        ("exported_by_name", ("a", "b")),
    ],
)
def test_every_form(http: Http, model: str, names: tuple[str, str]) -> None:
    for rows in (1, 2):
        inputs = [json_input(names[0], A[:rows]), json_input(names[1], B[:rows])]
        output = http.infer(model, {"inputs": inputs}).tensors()["OUTPUT__0"]
        assert np.allclose(output, 2 * A[:rows] + B[:rows])


def test_eager_module(http: Http) -> None:
    assert np.allclose(
        http.infer("eager", {"inputs": [json_input("x", A)]}).tensors()["OUTPUT__0"], 3 * A
    )


def load_error(http: Http, name: str) -> str:
    reply = http.load(name)
    assert reply.status in (400, 500)
    return reply.error


def test_files_that_are_no_models(empty_server: tuple[Server, Path]) -> None:
    server, repository = empty_server
    (
        add(repository, "garbage", ["x"], settings='platform: "pytorch_libtorch"') / "model.pt"
    ).write_bytes(b"garbage")
    add(repository, "missing", ["x"])
    weights = add(repository, "weights", ["x"])
    torch.save({"weights": torch.zeros(3)}, weights / "model.pt")
    (weights / "model.py").write_text("import torch\n")
    with server.http() as http:
        for name in ("garbage", "missing", "weights"):
            error = load_error(http, name)
            assert error.startswith(
                (
                    f"load failed for model '{name}': version 1 is at UNAVAILABLE state: ",
                    f"failed to load '{name}', ",
                )
            ), error
        assert "'runtime' must name the file of the class" in error
        assert server.answers("/v2/health/live")
