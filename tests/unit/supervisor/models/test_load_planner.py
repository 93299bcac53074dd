"""Errors of models that cannot be planned: file, line and key, and all errors at once."""

import json
import os
from pathlib import Path

import pytest

from shmserve.common.host import Accelerators
from shmserve.config.command_line import parse
from shmserve.config.server import from_flags
from shmserve.errors import Internal, InvalidArgument, ShmserveError
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.repository import incomplete_files
from shmserve.supervisor.processes.preloads import worker_preloads

UNREAD_ERROR = "failed to load 'm', failed to poll from model repository: "
FAILED_ERROR = "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: "


def planner(tmp_path: Path, config: str | None = None, *extra_flags: str) -> LoadPlanner:
    folder = tmp_path / "repository" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").touch()
    if config is not None:
        (folder / "config.pbtxt").write_bytes(config.encode(errors="surrogateescape"))
    flags = ["--model-repository", str(folder.parent), *extra_flags]
    return LoadPlanner(from_flags(parse(flags), {}), tmp_path / "run", Accelerators("", 0))


def refusal(planner: LoadPlanner, override: str = "", **files: bytes) -> ShmserveError:
    with pytest.raises(ShmserveError) as caught:
        planner.plan("m", override, {name.replace("_", "/"): data for name, data in files.items()})
    return caught.value


def test_without_completion_every_model_needs_a_configuration(tmp_path: Path) -> None:
    strict_planner = planner(tmp_path, None, "--disable-auto-complete-config")
    assert refusal(strict_planner).message == (
        f"{UNREAD_ERROR}there is no config.pbtxt, and --disable-auto-complete-config requires one"
    )
    assert len(strict_planner.plan("m", '{"backend": "python"}', {})) == 1
    assert len(planner(tmp_path / "other").plan("m", "", {})) == 1


def test_all_errors_are_reported_with_file_line_and_key(tmp_path: Path) -> None:
    lines = (
        "\ufeff# A byte order mark, a comment that is not UTF-8 (\udcfc), lines as on Windows.",
        'name: "other"  # \udcfc',
        "max_batch_size: 4",
        "max_batch: 5",
        "input [",
        '  { name: "A" data_type: TYPE_FLOAT dims: [ 4 ] },',
        '  { name: "B" data_type: TYPE_FP32 dims: [ 4, 0 ] }',
        "]",
        "output: {",
        "  data_type: TYPE_FP32 dims: 1 dims: 2",
        "}",
        "dynamic_batching { preferred_batch_size: [ 4,",
        "                                           8 ] }",
    )
    error = refusal(planner(tmp_path, "\r\n".join(lines)))
    assert isinstance(error, Internal)
    error_lines = error.message.removeprefix(UNREAD_ERROR).splitlines()
    assert error_lines == [
        'm/config.pbtxt:4:1: max_batch: no such field; did you mean "max_batch_size"?',
        "m/config.pbtxt:6:26: input[0].data_type: unknown value TYPE_FLOAT; did you mean "
        '"TYPE_FP32"?',
        "m/config.pbtxt:2:1: name: unexpected directory name 'm' for model 'other', directory name "
        "must equal model name",
        "m/config.pbtxt:13:44: dynamic_batching.preferred_batch_size[1]: dynamic batching "
        "preferred size must be <= max batch size for m",
        "m/config.pbtxt:7:47: input[1].dims[1]: model input 'B' dimension must be integer >= 1, or "
        "-1 to indicate a variable-size dimension for m",
        "m/config.pbtxt:9:1: output[0].name: model output must specify 'name' for m",
    ]


def test_errors_of_a_version_and_of_the_file_have_other_types(tmp_path: Path) -> None:
    error = refusal(planner(tmp_path, "\n instance_group { kind: KIND_GPU }\noutput { dims: 1 }"))
    assert isinstance(error, InvalidArgument)
    assert error.message.removeprefix(FAILED_ERROR) == (
        "m/config.pbtxt:3:1: output[0].name: model output must specify 'name' for m\n"
        "m/config.pbtxt:2:19: instance_group[0].kind: instance group m_0 of model m has kind "
        "KIND_GPU but no GPUs are available;\n"
    )


def test_errors_of_an_override_name_its_text(tmp_path: Path) -> None:
    override = '{"backend": "python",\n "maxBatchSize": -1,\n "input": [{"dims": ["x"]}]}'
    lines = (
        'config:3:22: input[0].dims[0]: expected an integer, found "x"',
        "config:2:2: max_batch_size: 'max_batch_size' must be non-negative value for m",
        "config:3:12: input[0].name: model input must specify 'name' for m",
    )
    plans = planner(tmp_path)
    assert tuple(refusal(plans, override).message.removeprefix(UNREAD_ERROR).splitlines()) == lines
    with_files = refusal(plans, override, **{"1_model.py": b""})
    assert tuple(with_files.message.removeprefix(UNREAD_ERROR).splitlines()) == lines


def test_errors_in_completed_fields_have_no_position(tmp_path: Path) -> None:
    plans = planner(tmp_path, 'input { name: "A" data_type: TYPE_FP32 }')
    (spec,) = plans.plan("m", "", {})
    with pytest.raises(InvalidArgument) as caught:
        plans.finalise_config(
            spec,
            {
                "input": [
                    {"name": "A", "data_type": "TYPE_FP32", "dims": [0]},
                    {"name": "B", "data_type": "TYPE_FP32"},
                ],
                "dynamic_batching": {"priority_levels": 2},
            },
        )
    assert caught.value.message.splitlines() == [
        "dynamic_batching.default_priority_level: default priority level must be in range [1, 2] "
        "for m",
        "input[0].dims[0]: model input 'A' dimension must be integer >= 1, or -1 to indicate a "
        "variable-size dimension for m",
        "input[1].dims: model input 'B' must specify 'dims' for m",
    ]
    with pytest.raises(InvalidArgument) as caught:
        plans.finalise_config(spec, {})
    assert caught.value.message == (
        "m/config.pbtxt:1:1: input[0].dims: model input 'A' must specify 'dims' for m"
    )


def test_without_a_file_errors_name_none(tmp_path: Path) -> None:
    plans = planner(tmp_path)
    (tmp_path / "repository" / "m" / "1" / "model.py").unlink()
    assert refusal(plans).message == (
        f"{UNREAD_ERROR}backend: must specify 'platform' or 'backend' for 'm' (expected model.py, "
        "model.onnx, model.pt, or config.json with *.safetensors in 'm/1', found no file)"
    )


@pytest.mark.parametrize("name", ["1/model.py", "config.pbtxt", "engine.yaml", "1/sub/table.json"])
def test_a_pipe_is_not_opened(tmp_path: Path, name: str) -> None:
    plans = planner(tmp_path)
    file = tmp_path / "repository" / "m" / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    assert f"'{name}' is " in refusal(plans).message
    assert plans.aliases("m") is None
    assert worker_preloads([tmp_path / "repository"])  # reads the text of each Python file


@pytest.mark.parametrize(
    "config",
    [
        {"nme": "m"},
        {"name": "other"},
        {"backend": "python", "max_batch_size": -1},
        {"backend": "python", "instance_group": [{"kind": "KIND_GPU"}]},
        {"backend": "python", "version_policy": {"specific": {"versions": [9]}}},
    ],
)
def test_files_of_rejected_overrides_are_removed(tmp_path: Path, config: dict[str, object]) -> None:
    plans = planner(tmp_path)
    refusal(plans, json.dumps(config), **{"1_model.py": b""})
    assert list((tmp_path / "run" / "overrides").iterdir()) == []
    override = '{"backend": "python"}', {"1/model.py": b""}
    (plan,), (other_plan,) = plans.plan("m", *override), plans.plan("m", *override)
    assert plan.model_dir.is_dir()
    plans.discard(plan)
    assert not plan.model_dir.exists()
    assert other_plan.model_dir.is_dir()


@pytest.mark.parametrize("name", ["__m", ".m", "lost+found"])
def test_the_files_of_a_request_may_have_a_name_that_scans_skip(tmp_path: Path, name: str) -> None:
    override = '{"backend": "python"}', {"1/model.py": b""}
    (plan,) = planner(tmp_path).plan(name, *override)
    assert (plan.name, plan.model_dir.name) == (name, name)


TENSORS = (
    'input { name: "x" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
)
EMPTY_MD5 = "d41d8cd98f00b204e9800998ecf8427e"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


@pytest.mark.parametrize(
    "config",
    [
        'backend: "tensorrt"',
        'platform: "tensorrt_plan" max_batch_size: 1',
        'backend: "tensorrt" instance_group { kind: KIND_GPU }',
    ],
)
def test_an_unavailable_backend_is_named_first(tmp_path: Path, config: str) -> None:
    error = refusal(planner(tmp_path, config)).message
    assert "unable to find backend library for backend 'tensorrt' of model 'm'" in error


def test_a_backend_named_ensemble_is_refused_with_the_remedy(tmp_path: Path) -> None:
    error = refusal(planner(tmp_path, 'backend: "ensemble"')).message
    assert error.endswith(", use platform: 'ensemble';\n")


def test_equal_tensors_are_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = ' output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    load_planner = planner(tmp_path, 'backend: "python" ' + TENSORS + output)
    (plan,) = load_planner.plan("m", "", {})
    assert not load_planner.steps("m")
    assert [tensor.name for tensor in plan.config.output] == ["y"]
    assert caplog.text.count("output 'y' is defined twice with equal values") == 1
    other_output = output.replace("dims: 1", "dims: 2")
    error = refusal(planner(tmp_path / "unlike", 'backend: "python" ' + TENSORS + other_output))
    assert "model output 'y' is specified more than once" in error.message


def test_incomplete_files_do_not_hinder_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_planner = planner(tmp_path, None)
    folder = tmp_path / "repository" / "m"
    for file in ("2/not_loaded", "1/big", "1/model.onnx/weights"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(POINTER)
    (folder / "1" / "big").write_bytes(POINTER + bytes(1024))
    for link in ("3", "labels.txt", ".#config.pbtxt"):
        (folder / link).symlink_to("nowhere")
    (folder.parent / "other").symlink_to("nowhere")
    (folder / "2").rename(folder / "0")
    load_planner.scan()
    (plan,) = load_planner.plan("m", "", {})
    texts = incomplete_files(plan.model_dir, [plan.version])
    assert texts == [
        "'1/model.onnx/weights' is a Git LFS pointer, not the file: run 'git lfs pull' in the "
        "clone",
        "'3' is a link whose target does not exist",
        "'labels.txt' is a link whose target does not exist",
    ]
    assert [text in caplog.text for text in texts] == [True] * len(texts)
    assert f"'{folder.parent}/other' is skipped: it is a link whose target" in caplog.text


@pytest.mark.parametrize("suffix", ["onnx", "pt", "pt2", "safetensors", "json"])
@pytest.mark.parametrize(
    ("contents", "expected_text"),
    [
        (b"\n <!DOCTYPE html>" + bytes(4096), "a web page, not the file: download"),
        (b"<HTML><body>Sign in</body></HTML>", "a web page, not the file: download"),
        (b'<?xml version="1.0"?><Error>', "a web page, not the file: download"),
        (b"", "empty: copy or download it again"),
        (POINTER, "a Git LFS pointer, not the file: run 'git lfs pull' in the clone"),
        (b"<\0\0\0\0\0\0\0{}", None),
        (b"\x08\x07", None),
    ],
)
def test_a_file_without_its_contents_is_named(
    tmp_path: Path, suffix: str, contents: bytes, expected_text: str | None
) -> None:
    file = tmp_path / "1" / f"model.{suffix}"
    file.parent.mkdir()
    file.write_bytes(contents)
    for name in ("README.html", "1/__init__.py"):
        (tmp_path / name).write_bytes(b"<html>" if "html" in name else b"")
    texts = incomplete_files(tmp_path, [1])
    if expected_text is None:
        assert not texts
    else:
        (text,) = texts
        assert text.startswith(f"'1/{file.name}' is {expected_text}")


def test_a_configuration_without_its_contents_is_named(tmp_path: Path) -> None:
    load_planner = planner(tmp_path, POINTER.decode())
    assert "('config.pbtxt' is a Git LFS pointer, not the file" in refusal(load_planner).message
    file = tmp_path / "repository" / "m" / "config.pbtxt"
    file.unlink()
    file.symlink_to("nowhere")
    expected_text = f"{UNREAD_ERROR}'config.pbtxt' is a link whose target does not exist"
    assert refusal(load_planner).message == expected_text


def test_a_misplaced_configuration_is_named(tmp_path: Path) -> None:
    plans = planner(tmp_path, None)
    folder = tmp_path / "repository" / "m" / "1"
    (folder / "model.py").unlink()
    (folder / "config.pbtxt").write_text("")
    assert "'m/1/config.pbtxt' is not read: move it to 'm/config.pbtxt'" in refusal(plans).message
    (folder / "config.pbtxt").unlink()
    (folder.parent / "inner").mkdir()
    (folder.parent / "inner" / "config.pbtxt").write_text("")
    text = "'m/inner' is a model: is the folder 'm' the repository?"
    assert text in refusal(plans).message
    (folder.parent / "inner" / "config.pbtxt").unlink()
    folder.rmdir()
    assert refusal(plans).message.endswith(", such as 1, but found inner)")
    (tmp_path / "repository" / "1").mkdir()
    (tmp_path / "repository" / "1" / "model.py").touch()
    with pytest.raises(ShmserveError, match="is the folder 'repository' a model, not a repository"):
        plans.plan("1", "", {})


@pytest.mark.parametrize("name", ["config.pbtxt.txt", "Config.pbtxt"])
def test_a_misnamed_configuration_is_named(tmp_path: Path, name: str) -> None:
    plans = planner(tmp_path, None)
    folder = tmp_path / "repository" / "m"
    (folder / name).touch()
    (folder / "1" / "model.py").unlink()
    assert f"'m/{name}' is not read: rename it to 'config.pbtxt'" in refusal(plans).message


@pytest.mark.parametrize("placeholder", ["${size}", "{{ .Values.size }}"])
def test_an_unfilled_template_is_named(tmp_path: Path, placeholder: str) -> None:
    error = refusal(planner(tmp_path, f"max_batch_size: {placeholder}\n")).message
    assert f"the file is a template: fill in its placeholders {placeholder}" in error


def test_a_preferred_batch_size_is_compared_with_the_completed_size(tmp_path: Path) -> None:
    config = 'backend: "python" dynamic_batching { preferred_batch_size: 2 }'
    assert len(planner(tmp_path, config).plan("m", "", {})) == 1


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        (f'"checksum" parameters {{ key: "MD5:1/model.py" value: "{EMPTY_MD5}" }}', ""),
        (
            '"checksum" parameters { key: "MD5:1/model.py" value: "00" }',
            "Mismatched MD5 hash for file",
        ),
        ('"checksum" parameters { key: "MD5:1/none.py" value: "00" }', "'1/none.py'"),
        ('"checksum" parameters { key: "SHA1:1/model.py" value: "00" }', "expected 'MD5:FILE'"),
        ('"redirect"', "repository agent 'redirect' is not available"),
    ],
)
def test_repository_agents(tmp_path: Path, agent: str, text: str) -> None:
    config = f'backend: "python" model_repository_agents {{ agents {{ name: {agent} }} }}'
    load_planner = planner(tmp_path, config)
    if text:
        message = refusal(load_planner).message
        assert text in message
        assert message.startswith("failed to load 'm', failed to poll from model repository: ")
    else:
        assert len(load_planner.plan("m", "", {})) == 1


@pytest.mark.parametrize(
    ("config", "engine", "aliases"),
    [
        ('backend: "llm"', None, []),
        ('backend: "llm"', "aliases: [gpt, org/x]\n", ["gpt", "org/x"]),
        ('backend: "llm"', "", []),
        ('backend: "llm"', "aliases: gpt", None),
        ('backend: "llm"', "- x", None),
        ('backend: "llm"', "{", None),
        ('backend: "python"', "aliases: [gpt]\n", None),
        (
            'backend: "x" input { name: "sampling_parameters" data_type: TYPE_STRING dims: 1 }',
            *("aliases: [gpt]\n", ["gpt"]),
        ),
        ("wrong", None, None),
    ],
)
def test_aliases_are_read_without_loading(
    tmp_path: Path, config: str, engine: str | None, aliases: list[str] | None
) -> None:
    load_planner = planner(tmp_path, config)
    folder = next(path.parent for path in tmp_path.rglob("config.pbtxt"))
    if engine is not None:
        (folder / "engine.yaml").write_text(engine)
    assert load_planner.aliases(folder.name) == aliases
    assert load_planner.aliases("nobody") is None
