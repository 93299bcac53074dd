"""Common mistakes in configurations, each with its position, value and the nearest name."""

import asyncio
import bdb
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve.common.host import Accelerators
from shmserve.config import command_line, server
from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.workers.backends.llm import engine_file
from shmserve.workers.backends.native import NativeBackend
from shmserve.workers.user_code import describe_error, import_file, model_traceback, source_location
from tests.rigs.worker_rig import rig

TENSORS = """input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "O" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PYTHON_CONFIG = 'backend: "python"\nmax_batch_size: 8\n'
PREDICT = """
    def predict(self, x: FP32[ndarray, 1]) -> FP32[ndarray, 1]:
        return x
"""
HEAD = "from numpy import ndarray\nfrom shmserve.model import FP32\nclass Model:\n"

# In config.pbtxt; after the backend, max_batch_size and tensors, which are lines 1 to 4.
PBTXT: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown field": ("cheese: 1", (":5:1: cheese: no such field; known are", "max_batch_size")),
    "number for a text": ("name: 7", (":5:7: name: expected a string, found 7",)),
    "datatype of numpy": ('input { name: "J" data_type: float32 dims: [1] }',
        (":5:30: input[1].data_type:", "float32", '"TYPE_FP32"')),
    "datatype in quotes": ('input { name: "J" data_type: "TYPE_FP32" dims: [1] }',
        (":5:30: input[1].data_type:", '"TYPE_FP32"')),
    "datatype of another tool": ('input { name: "J" data_type: BYTES dims: [1] }',
        (":5:30:", 'did you mean "TYPE_STRING"?')),
    "JSON in its place": ('{ "name": "m" }', (":5:1:", "expected a field name", '"{"')),
    "strategy": (
        'dynamic_batching { }\nparameters { key: "batching_strategy" value { string_value: '
        '"adaptve" } }',
        (":6:1:", "'adaptve'", "'prefer_batch', 'prefer_latency', 'adaptive'", "mean 'adaptive'?"),
    ),
    "padding": (
        'parameters { key: "padding" value { string_value: "{\\"I\\": {\\"buckts\\": [4]}}" } }',
        (":5:1:", "'buckts'", "did you mean 'buckets'?"),
    ),
}  # fmt: skip

ENGINE: dict[str, tuple[str, tuple[str, ...]]] = {
    "misspelt": ("# \nmax_batchsize: 4", ("engine.yaml:2:1: max_batchsize:", "'max_batch_size'?")),
    "unknown": ("cheese: 1", ("engine.yaml:1:1: cheese:", "allowed: ", "block_size")),
    "choice": ("weights: int4", ("'int4'", "fp32, bf16, int8", "did you mean 'int8'?")),
    "nested": ("block_size: 16\nspeculative_decoding:\n  metod: draft",
        (":3:3: speculative_decoding.metod:", "did you mean 'method'?")),
    "twice": ("block_size: 8\nblock_size: 16", (":2:1: block_size: already set in line 1",)),
    "a list": ("- block_size", ("engine.yaml: expected a mapping", "a mapping")),
    "no YAML": ("block_size: [8", ("engine.yaml:1:15: invalid YAML",)),
}  # fmt: skip

FILE: dict[str, tuple[str, tuple[str, ...]]] = {
    "choice": ("model-control-mode: pol", ("line 1:", "none, poll, explicit", "mean 'poll'?")),
    "meaning": ("cache-config: redis,size=1", ("line 1: --cache-config:", "'redis'", "local")),
    "tab": ("id:\n\t- a", ("line 2: invalid YAML",)),
}

FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one dash": (("-http-port=1", "."), ("unknown flag -http-port, did you mean --http-port?",)),
    "choice": (("--rate-limit=execution", "."), ("off, execution_count", "'execution_count'?")),
    "device": (("--workspace-byte-size=gpu=8192", "."), ("'gpu'", "cpu, cuda:NUMBER")),
}

CLASS: dict[str, tuple[str, tuple[str, ...]]] = {
    "number": (f"    max_batch_size = '8'{PREDICT}", ("m/1/model.py:4:5:", "integer >= 0", "'8'")),
    "delay": (f"    max_queue_delay_us = 0.5{PREDICT}", (":4:5:", "max_queue_delay_us", "0.5")),
    "strategy": (f"    batching_strategy = 'adaptve'{PREDICT}",
        ("m/1/model.py:4:5:", "'adaptve'", "did you mean 'adaptive'?")),
    "target": (f"    target_p99_ms = '5 ms'{PREDICT}", (":4:5:", "a number of milliseconds")),
    "no target": (f"    x = 1\n    batching_strategy = 'adaptive'{PREDICT}",
        ("m/1/model.py:5:5:", "target_p99_ms")),
    "groups": (f"    instance_group = {{'count': 2}}{PREDICT}", (":4:5:", "a list of mappings")),
    "kind": (f"    instance_group = [{{'kind': 'GPU'}}]{PREDICT}",
        ("instance_group[0].kind:", "KIND_GPU")),
    "padding": (f"    padding = ['x']{PREDICT}", (":4:5:", "'Model.padding' must be a mapping")),
    "no predict": ("    def forward(self): ...", ("m/1/model.py:3:1:", "no method 'predict(")),
    "annotation": ("    def predict(self, x: ndarray, y: int) -> FP32[ndarray, 1]: ...",
        (":4:23: argument 'x'", ":4:35: argument 'y'", "annotate it like FP32[")),
    "no dims": ("    def predict(self, x: FP32[ndarray]): ...",
        ("FP32[array type, dim, ...] needs dimensions", "found []", "(model.py:4)")),
    "datatype": ("    from shmserve.model import FP33", ("'FP33'", "mean 'FP32'?", "(model.py:4)")),
    "syntax": ("    def predict(self:", ("SyntaxError", "model.py, line 4")),
    "raises": ("    x = 1 / 0", ("ZeroDivisionError: division by zero (model.py:4)",)),
    "ragged": (f"    ragged = ('y',){PREDICT}", (":4:5:", "(allowed: x)", "('y',)")),
}  # fmt: skip


def planner(tmp_path: Path, *arguments: str) -> LoadPlanner:
    parsed = command_line.parse([*arguments, str(tmp_path / "models")])
    return LoadPlanner(server.from_flags(parsed, {}), tmp_path / "run", Accelerators("", 0))


def check_pbtxt(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "models" / "m" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(PYTHON_CONFIG + TENSORS + text + "\n")
    plans = planner(tmp_path)
    (spec,) = plans.plan("m", "", {})
    plans.finalise_config(spec, spec.config.source)


def check_engine(tmp_path: Path, text: str) -> None:
    engine_file.parse(text)


def check_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    check_flags(tmp_path, (f"--config={tmp_path / 'c.yaml'}",))


def check_flags(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    server.from_flags(command_line.parse(arguments), {})


def check_class(tmp_path: Path, text: str) -> None:
    (tmp_path / "models").mkdir()
    with rig(tmp_path / "models") as model_rig:
        (model_rig.context.version_dir / "model.py").write_text(HEAD + text)
        backend = 'backend: "native"\n'
        (model_rig.context.model_dir / "config.pbtxt").write_text(backend)
        plans = planner(tmp_path)
        (spec,) = plans.plan("m", "", {})
        try:
            completed = NativeBackend(model_rig.context).complete_config(spec.config.source)
        except InvalidArgument:
            raise
        except Exception as error:  # in the form in which a worker reports it
            raise InvalidArgument(
                describe_error(error) + source_location(error, model_rig.context.version_dir)
            ) from None
        plans.finalise_config(spec, completed)


MISTAKE_TABLES: tuple[tuple[Callable, dict], ...] = (
    *((check_pbtxt, PBTXT), (check_engine, ENGINE), (check_file, FILE)),
    *((check_flags, FLAGS), (check_class, CLASS)),
)
MISTAKES = {
    f"{read_file.__name__[6:]}: {name}": (read_file, *case)
    for read_file, table in MISTAKE_TABLES
    for name, case in table.items()
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_files_are_reported(tmp_path: Path, mistake: str) -> None:
    read_file, text, expected_parts = MISTAKES[mistake]
    with pytest.raises(ShmserveError) as caught:
        read_file(tmp_path, text)
    message = caught.value.message
    for part in expected_parts:
        assert part in message, message


# Several mistakes of each kind together, and the names in their messages.
MULTIPLE_MISTAKES = {
    check_engine: ("block_size: 0\nweights: x\ncheese: 1", ("block_size", "weights", "cheese")),
    check_flags: (("--http-prot=1", "--gateways=x", "--log-format=y"),
        ("--http-prot", "--gateways", "--log-format")),
    check_class: ("    max_batch_size = -1\n    instances = 'x'\n    def predict(self, a, b): ...",
        (":4:5:", ":5:5:", ":6:23:", ":6:26:")),
}  # fmt: skip


@pytest.mark.parametrize(
    "read_file", MULTIPLE_MISTAKES, ids=lambda read_file: read_file.__name__[6:]
)
def test_all_mistakes_are_reported_together(tmp_path: Path, read_file: Callable) -> None:
    text, expected_parts = MULTIPLE_MISTAKES[read_file]
    with pytest.raises(ShmserveError) as caught:
        read_file(tmp_path, text)
    message = caught.value.message
    assert [part for part in expected_parts if part not in message] == [], message


def test_meaningless_flags_are_reported_together(tmp_path: Path) -> None:
    arguments = ("--cache-config=x", "--rate-limit-resource=y", "--backend-config=z", "/nowhere")
    with pytest.raises(InvalidArgument) as caught:
        check_flags(tmp_path, arguments)
    for word in ("--cache-config:", "--rate-limit-resource:", "--backend-config:", "/nowhere"):
        assert word in caught.value.message


def test_a_breakpoint_in_a_worker_names_the_page_of_the_guide() -> None:
    assert describe_error(bdb.BdbQuit()) == (
        "BdbQuit: a worker has no terminal for breakpoint(); see `shmserve guide debug`"
    )


def test_a_triton_model_that_is_served_as_a_class_names_the_repository() -> None:
    name = "triton_python_backend_utils"
    error = ModuleNotFoundError(f"No module named '{name}'", name=name)
    assert describe_error(error).endswith(": serve the model's repository, not its file as a class")


def test_frames_of_the_event_loop_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "1/model.py"
    code = compile("async def predict(): 1 / 0", str(path), "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    with pytest.raises(ZeroDivisionError) as caught:
        asyncio.run(namespace["predict"]())
    # The frame of this file would follow the server's frames.
    caught.value.__traceback__ = caught.tb.tb_next
    assert model_traceback(caught.value, path.parent).splitlines()[1:2] == [
        f'  File "{path}", line 1, in predict'
    ]


def test_a_file_of_a_package_has_relative_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "a_package/inner").mkdir(parents=True)
    for file in ("a_package/__init__.py", "a_package/inner/__init__.py"):
        (tmp_path / file).touch()
    (tmp_path / "a_package/values.py").write_text("K = 5\n")
    path = tmp_path / "a_package/inner/model.py"
    path.write_text("from ..values import K\n")
    assert import_file(path, "a_model").K == 5
    for name in [name for name in sys.modules if name.startswith("a_package")]:
        monkeypatch.delitem(sys.modules, name)


def test_an_invalid_line_is_shown_with_the_users_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "1").symlink_to(tmp_path / "user")
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "user/invalid_line.py").write_text("x = 1\ny = (\n")
    (tmp_path / "user/imports_it.py").write_text("import invalid_line\n")
    position = [f'  File "{tmp_path}/user/invalid_line.py", line 2', "    y = ("]
    frame = f'  File "{tmp_path}/user/imports_it.py", line 1, in <module>'
    for name, frames in (("invalid_line", []), ("imports_it", [frame, "    import invalid_line"])):
        with pytest.raises(SyntaxError) as caught:
            import_file(tmp_path / "1" / f"{name}.py", name)
        monkeypatch.delitem(sys.modules, name)
        lines = model_traceback(caught.value, tmp_path / "1").splitlines()
        assert lines[-1].strip() == "^"
        shown_lines = [*frames, *position]
        assert lines[-1 - len(shown_lines) : -1] == shown_lines
