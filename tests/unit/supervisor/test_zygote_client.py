"""What the zygote of workers imports: torch where a model may import it, and only then."""

from pathlib import Path

import pytest

from shmserve.supervisor.processes.zygote_client import worker_preloads

_PLAIN = r"""
import json, os.path
from concurrent import futures
import numpy as np
import triton_python_backend_utils as pb_utils
from . import beside
import helpers, parts.words
import_torch = "\d"
"""


def _preloads(repository: Path, files: dict[str, str], torch: bool = False) -> list[str]:
    for name, text in files.items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return worker_preloads([repository], torch)


def test_models_that_do_without_torch_are_not_given_it(tmp_path: Path) -> None:
    files = {
        "m/config.pbtxt": "",
        "m/1/model.py": _PLAIN,
        "m/1/beside.py": "",
        "m/1/labels.txt": "",
        "m/helpers.py": "",
        "m/1/parts/words.py": "",
        "ensemble/config.pbtxt": "",
    }
    (tmp_path / "ensemble" / "1").mkdir(parents=True)
    assert _preloads(tmp_path, files) == ["shmserve.workers.main"]
    assert "torch" in worker_preloads([tmp_path], torch=True)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("1/model.py", "import numpy, torch"),
        ("1/model.py", "def execute():\n    from torch.nn import functional"),
        ("1/model.py", "import transformers"),
        ("1/model.py", "from shmserve.model import Tensor"),
        ("1/model.py", "import importlib"),
        ("1/model.py", "import"),
        ("1/parts/words.py", "import torch"),
        ("helpers.py", "import torch"),
        ("1/model.pt", ""),
        ("1/model.onnx", ""),
    ],
)
def test_one_model_that_may_import_torch_has_it_imported(
    tmp_path: Path, file: str, text: str
) -> None:
    assert "torch" in _preloads(tmp_path, {"a/1/model.py": _PLAIN, f"m/{file}": text})


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("m/1/model.pt", "shmserve.workers.device:preload_scripted"),
        ("m/1/model.pt2", "shmserve.workers.device:preload_exported"),
        ("m/1/config.json", "shmserve.workers.backends.llm"),
    ],
)
def test_what_a_kind_of_file_needs_is_imported_after_torch(
    tmp_path: Path, file: str, module: str
) -> None:
    found = _preloads(tmp_path, {file: ""})
    assert found[0] == "torch" and found[-1] == module
