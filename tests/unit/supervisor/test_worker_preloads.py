"""The imports of the zygote of workers: torch only if a model may import it."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from shmserve.supervisor.processes.preloads import worker_preloads

_PLAIN_MODEL = r"""
import json, os.path
from concurrent import futures
import numpy as np
import triton_python_backend_utils as pb_utils
from . import beside
import helpers, parts.words
import_torch = "\d"
"""


@pytest.fixture(autouse=True)
def torch_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def _find_preloads(repository: Path, files: dict[str, str], devices: bool = False) -> list[str]:
    for name, text in files.items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return worker_preloads([repository], has_devices=devices)


def test_models_without_torch_do_not_preload_it(tmp_path: Path) -> None:
    files = {
        "m/config.pbtxt": "", "m/1/model.py": _PLAIN_MODEL, "m/1/beside.py": "",
        "m/1/labels.txt": "", "m/helpers.py": "", "m/1/parts/words.py": "",
        "ensemble/config.pbtxt": "",
    }  # fmt: skip
    (tmp_path / "ensemble" / "1").mkdir(parents=True)
    assert _find_preloads(tmp_path, files) == ["shmserve.workers.main"]


@pytest.mark.parametrize(
    "text",
    [
        *("from shmserve.model import FP32", "import importlib", "import cv2, onnxruntime"),
        *("import", f"x = {'1+' * 20_000}1", f"x = {'-' * 200_000}1"),  # not valid, or too deep
    ],
    ids=range(6),
)
def test_a_class_without_torch_costs_none_of_its_memory(tmp_path: Path, text: str) -> None:
    assert _find_preloads(tmp_path, {"m/1/model.py": text}) == ["shmserve.workers.main"]
    (tmp_path / "own.py").write_text(text)
    assert worker_preloads([], [tmp_path / "own.py"], may_add_models=True) == [
        "shmserve.workers.main"
    ]


def test_a_folder_that_cannot_be_read_does_not_stop_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may fail below a model's folder."""
    (tmp_path / "m").mkdir()
    monkeypatch.setattr(Path, "rglob", MagicMock(side_effect=OSError("Stale file handle")))
    assert worker_preloads([tmp_path]) == ["shmserve.workers.main"]


def test_torch_is_preloaded_for_a_class_whose_helper_imports_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"import helpers, {'name' * 100}")
    (tmp_path / "helpers.py").write_text("from parts import words")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "words.py").write_text("import torch")
    assert "torch" in worker_preloads([], [tmp_path / "own.py"])


def test_onnx_files_need_torch_for_devices_only(tmp_path: Path) -> None:
    assert "torch" not in _find_preloads(tmp_path, {"m/1/model.onnx": ""})
    assert "torch" in _find_preloads(tmp_path, {}, devices=True)


def test_an_empty_repository_with_later_models_preloads_torch(tmp_path: Path) -> None:
    assert "torch" in worker_preloads([tmp_path], may_add_models=True)
    assert "torch" not in worker_preloads([tmp_path])


def test_torch_is_not_preloaded_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _find_preloads(tmp_path, {"m/1/model.pt": ""}) == ["shmserve.workers.main"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("1/model.py", "import numpy, torch"),
        ("1/model.py", "def execute():\n    from torch.nn import functional"),
        ("1/model.py", "import transformers"),
        ("1/parts/words.py", "import torch"),
        ("helpers.py", "import torch"),
        ("1/model.pt", ""),
    ],
)
def test_torch_is_preloaded_if_a_model_may_import_it(tmp_path: Path, file: str, text: str) -> None:
    assert "torch" in _find_preloads(tmp_path, {"a/1/model.py": _PLAIN_MODEL, f"m/{file}": text})


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("m/1/model.pt", "shmserve.workers.device:preload_scripted"),
        ("m/1/model.pt2", "shmserve.workers.device:preload_exported"),
        ("m/1/config.json", "shmserve.workers.device:preload_text"),
    ],
)
def test_the_library_for_a_kind_of_file_is_imported_after_torch(
    tmp_path: Path, file: str, module: str
) -> None:
    preloads = _find_preloads(tmp_path, {file: ""})
    assert preloads[0] == "torch" and preloads[-1] == module
