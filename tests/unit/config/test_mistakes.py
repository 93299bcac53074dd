"""Common mistakes in configurations: position, key, value, allowed values, nearest name."""

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
JSON_IO = (
    '"input": [{"name": "I", "data_type": "TYPE_FP32", "dims": [4]}], '
    '"output": [{"name": "O", "data_type": "TYPE_FP32", "dims": [4]}]'
)

# In config.pbtxt; after the backend, max_batch_size and tensors, which are lines 1 to 4.
PBTXT: dict[str, tuple[str, tuple[str, ...]]] = {
    "misspelt field": ("max_batchsize: 4",
        ("m/config.pbtxt:5:1: max_batchsize:", "max_batch_size")),
    "misspelt in a block": ("dynamic_batching {\n  max_queue_delay_us: 5\n}",
        (":6:3: dynamic_batching.max_queue_delay_us:", '"max_queue_delay_microseconds"')),
    "unknown field": ("cheese: 1", (":5:1: cheese: no such field; known are", "max_batch_size")),
    "text for a number": ('version_policy { latest { num_versions: "2" } }', (":5:41:", '"2"')),
    "number for a text": ("name: 7", (":5:7: name: expected a string, found 7",)),
    "fraction": ("priority: 1\ninstance_group { count: 1.5 }", (":6:25:", "integer", "1.5")),
    "too large": ("instance_group { count: 3000000000 }", (":5:25: instance_group[0].count",)),
    "truth": ("response_cache { enable: yes }", (":5:26:", "true or false", "yes")),
    "datatype of numpy": ('input { name: "J" data_type: float32 dims: [1] }',
        (":5:30: input[1].data_type:", "float32", '"TYPE_FP32"')),
    "datatype in quotes": ('input { name: "J" data_type: "TYPE_FP32" dims: [1] }',
        (":5:30: input[1].data_type:", '"TYPE_FP32"')),
    "datatype of another tool": ('input { name: "J" data_type: BYTES dims: [1] }',
        (":5:30:", 'did you mean "TYPE_STRING"?')),
    "dims of nothing": ('input { name: "J" data_type: TYPE_INT8 dims: [0] }', (":5:47: input[1]",)),
    "no dims": ('input { name: "J" data_type: TYPE_INT8 }', (":5:1: input[1].dims:", "dims")),
    "name twice": ('input { name: "I" data_type: TYPE_INT8 dims: [1] }', ("input[1].name:", "'I'")),
    "kind": ("instance_group { kind: GPU }",
        (":5:24: instance_group[0].kind:", "GPU", '"KIND_GPU"')),
    "no GPU": ("instance_group { kind: KIND_GPU }", (":5:18: instance_group[0].kind:", "no GPUs")),
    "preferred": ("dynamic_batching { preferred_batch_size: [ 4, 16 ] }",
        (":5:47: dynamic_batching.preferred_batch_size[1]:", "<= max batch size")),
    "two schedulers": ("dynamic_batching { }\nsequence_batching { }",
        (":6:1: sequence_batching:", 'cannot be set together with "dynamic_batching"')),
    "set twice": ("max_batch_size: 4", (":5:1: max_batch_size: is set more than once",)),
    "no colon": ("priority 1", (":5:10:", 'expected ":"', '"1"')),
    "no brace": ("dynamic_batching {", (":6:1:", '"}"', "5:18", "end of the file")),
    "open string": ('name: "m', (":5:7:", "not closed on its line")),
    "JSON in its place": ('{ "name": "m" }', (":5:1:", "expected a field name", '"{"')),
    "strategy": (
        'dynamic_batching { }\nparameters { key: "batching_strategy" value { string_value: '
        '"adaptve" } }',
        (":6:1:", "'adaptve'", "'prefer_batch', 'prefer_latency', 'adaptive'", "mean 'adaptive'?"),
    ),
    "strategy without target": (
        'dynamic_batching { }\nparameters { key: "batching_strategy" value { string_value: '
        '"adaptive" } }',
        (":6:1:", "target_p99_ms"),
    ),
    "padding": (
        'parameters { key: "padding" value { string_value: "{\\"I\\": {\\"buckts\\": [4]}}" } }',
        (":5:1:", "'buckts'", "did you mean 'buckets'?"),
    ),
    "label file": ('output { name: "P" data_type: TYPE_FP32 dims: [4] label_filename: "l.txt" }',
        (":5:51: output[1].label_filename:", "'l.txt'", "does not exist")),
    "file outside": ('default_model_filename: "../x.py"',
        (":5:1: default_model_filename:", "inside")),
    "another name": ('name: "n"', (":5:1: name:", "'m'", "'n'")),
}  # fmt: skip

ENGINE: dict[str, tuple[str, tuple[str, ...]]] = {
    "misspelt": ("# \nmax_batchsize: 4", ("engine.yaml:2:1: max_batchsize:", "'max_batch_size'?")),
    "unknown": ("cheese: 1", ("engine.yaml:1:1: cheese:", "allowed: ", "block_size")),
    "text": ("block_size: many", (":1:1: block_size: 'many' is not an integer",)),
    "range": ("block_size: 0", (":1:1: block_size: 0 is not 1 to 1024",)),
    "choice": ("weights: int4", ("'int4'", "fp32, bf16, int8", "did you mean 'int8'?")),
    "profile": ("profile: low_latncy", (":1:1: profile:", "did you mean 'low_latency'?")),
    "truth": ("enable_preemption: 1", (":1:1: enable_preemption: 1 is not true or false",)),
    "nested": ("block_size: 16\nspeculative_decoding:\n  metod: draft",
        (":3:3: speculative_decoding.metod:", "did you mean 'method'?")),
    "no mapping": ("speculative_decoding: on", (":1:1: speculative_decoding: True is not a map",)),
    "contradiction": ("max_batch_size: 8\nmax_tokens_per_batch: 4",
        (":2:1: max_tokens_per_batch: 4 is less than max_batch_size 8", )),
    "twice": ("block_size: 8\nblock_size: 16", (":2:1: block_size: already set in line 1",)),
    "a list": ("- block_size", ("engine.yaml: expected a mapping", "a mapping")),
    "no YAML": ("block_size: [8", ("engine.yaml:1:15: invalid YAML",)),
}  # fmt: skip

FILE: dict[str, tuple[str, tuple[str, ...]]] = {
    "misspelt": ("http-prot: 1", ("c.yaml' line 1: http-prot:", "did you mean http-port?")),
    "range": ("id: a\nhttp-port: 70000", ("line 2: http-port: 70000", "0 to 65535")),
    "text": ("gateways: two", ("line 1: gateways: 'two' is not an integer",)),
    "choice": ("model-control-mode: pol", ("line 1:", "none, poll, explicit", "mean 'poll'?")),
    "list": ("http-port: [1, 2]", ("line 1: http-port: takes one value, not a list",)),
    "no such folder": ("model-repository: /nowhere", ("line 1: --model-repository: '/nowhere'",)),
    "meaning": ("cache-config: redis,size=1", ("line 1: --cache-config:", "'redis'", "local")),
    "twice": ("id: a\nid: b", ("line 2: id: already set in line 1",)),
    "tab": ("id:\n\t- a", ("line 2: invalid YAML",)),
}

FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "misspelt": (("--http-prot=1", "."), ("unknown flag --http-prot, did you mean --http-port?",)),
    "underscores": (("--http_port=1", "."), ("did you mean --http-port?",)),
    "one dash": (("-http-port=1", "."), ("unknown flag -http-port, did you mean --http-port?",)),
    "no value": (("--http-port", "--grpc-port=1", "."), ("--http-port: a value is missing",)),
    "choice": (("--rate-limit=execution", "."), ("off, execution_count", "'execution_count'?")),
    "no repository": ((), ("--model-repository: at least one is needed",)),
    "a file, no class": ((__file__,), ("is a file: name the class to serve",)),
    "a file of weights": (("/etc/passwd",), ("move it to FOLDER/passwd/1/model, and serve",)),
    "truth": (("--exit-on-error=maybe", "."), ("'maybe' is not a boolean (true or false)",)),
    "scope": (("--http-restricted-api=infer:k=v", "."), ("'infer'", "allowed:", "inference")),
    "metrics": (("--metrics-config=sumary_latencies=1", "."), ("'sumary_latencies'", "allowed")),
    "device": (("--workspace-byte-size=gpu=8192", "."), ("'gpu'", "cpu, cuda:NUMBER")),
    "load-model": (("--load-model=a", "."), ("--load-model: needs --model-control-mode=explicit",)),
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
    "no predict": ("    def forward(self): ...", ("m/1/model.py:3:1:", "no method 'predict'")),
    "annotation": ("    def predict(self, x: ndarray, y: int) -> FP32[ndarray, 1]: ...",
        (":4:23: argument 'x'", ":4:35: argument 'y'", "annotate it like FP32[")),
    "no result": ("    def predict(self, x: FP32[ndarray, 1]): ...",
        (":4:5:", "no return annotation")),
    "no dims": ("    def predict(self, x: FP32[ndarray]): ...",
        ("FP32[array type, dim, ...] needs dimensions", "found []", "(model.py:4)")),
    "datatype": ("    from shmserve.model import FP33", ("'FP33'", "mean 'FP32'?", "(model.py:4)")),
    "syntax": ("    def predict(self:", ("SyntaxError", "model.py, line 4")),
    "raises": ("    x = 1 / 0", ("ZeroDivisionError: division by zero (model.py:4)",)),
    "ragged": (f"    ragged = ('y',){PREDICT}", (":4:5:", "(allowed: x)", "('y',)")),
}  # fmt: skip

LOAD: dict[str, tuple[str, tuple[str, ...]]] = {
    "misspelt": ('{"backend": "python",\n"maxBatchsize": 4}', ("config:2:1:", "max_batch_size")),
    "type": ('{"backend": "python", "max_batch_size": "4x"}', ("config:1:41:", "4x", "integer")),
    "no JSON": ('{"backend": python}', ("config: not valid JSON", "line 1 column 13")),
    "a list": ("[]", ("config: expected a JSON object",)),
    "twice": ('{"backend": "python", "backend": "onnx"}', ("backend",)),
    "rule": (
        f'{{"backend": "python", "max_batch_size": 4, {JSON_IO},\n'
        '"dynamic_batching": {"preferred_batch_size": [8]}}',
        ("config:2:47: dynamic_batching.preferred_batch_size[0]:", "<= max batch size"),
    ),
}


def planner(tmp_path: Path, *arguments: str) -> LoadPlanner:
    parsed = command_line.parse([*arguments, str(tmp_path / "models")])
    return LoadPlanner(server.from_flags(parsed, {}), tmp_path / "run", Accelerators("", 0))


def check_pbtxt(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "models" / "m" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(PYTHON_CONFIG + TENSORS + text + "\n")
    check_plan(tmp_path, "")


def check_plan(tmp_path: Path, override: str) -> None:
    plans = planner(tmp_path)
    (spec,) = plans.plan("m", override, {})
    plans.complete(spec, spec.config.source)


def check_override(tmp_path: Path, text: str) -> None:
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    check_plan(tmp_path, text)


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
        plans.complete(spec, completed)


MISTAKE_TABLES: tuple[tuple[Callable, dict], ...] = (
    *((check_pbtxt, PBTXT), (check_engine, ENGINE), (check_file, FILE), (check_flags, FLAGS)),
    *((check_class, CLASS), (check_override, LOAD)),
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
    check_pbtxt: ("max_batchsize: 1\nprority: 2\ninstance_group { count: x }",
        ("max_batchsize", "prority", "instance_group[0].count")),
    check_engine: ("block_size: 0\nweights: x\ncheese: 1", ("block_size", "weights", "cheese")),
    check_file: ("http-prot: 1\ngateways: x", ("http-prot", "gateways")),
    check_flags: (("--http-prot=1", "--gateways=x", "--log-format=y"),
        ("--http-prot", "--gateways", "--log-format")),
    check_class: ("    max_batch_size = -1\n    instances = 'x'\n    def predict(self, a, b): ...",
        (":4:5:", ":5:5:", ":6:23:", ":6:26:")),
    check_override: ('{"backend": "python", "cheese": 1, "max_batch_size": []}',
        ("config:1:23:", "config:1:36:")),
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


def test_there_are_many_mistakes() -> None:
    assert len(MISTAKES) >= 60


def test_a_breakpoint_in_a_worker_names_the_page_of_the_guide() -> None:
    assert describe_error(bdb.BdbQuit()) == (
        "BdbQuit: a worker has no terminal for breakpoint(); see `shmserve guide debug`"
    )


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
