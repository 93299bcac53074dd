"""The content of a repository: names, versions, changes, and folders of the server."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.common.host import Accelerators
from shmserve.common.names import check_model_name, names_one_model
from shmserve.config.command_line import parse
from shmserve.config.server import from_flags
from shmserve.errors import InvalidArgument
from shmserve.model_config import UNWRITTEN, to_dict
from shmserve.supervisor.models.load_planner import LoadPlanner, materialise_override
from shmserve.supervisor.models.repository import (
    ModelFolder,
    find,
    fingerprint,
    inline_model,
    lacks_version,
    missing_version_text,
    missing_versions,
    read_config,
    scan,
    version_fingerprint,
    versions_to_load,
)
from tests.rigs.marked_configs import parse_pbtxt
from tests.support.users import ALICE, as_user, needs_users

CONFIG = 'backend: "python" max_batch_size: 4\n'


def make_folder(root: Path, name: str, *versions: str, config: str | None = CONFIG) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for version in versions:
        (folder / version).mkdir()
        (folder / version / "model.py").write_text("x = 1\n")
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


# --- looking -----------------------------------------------------------------------------------


def test_models_and_their_versions_are_found(tmp_path: Path) -> None:
    too_large = (str(2**63), "9" * 30)
    versions = ("1", "10", "2", "20240131235959", str(2**63 - 1))
    make_folder(tmp_path, "b", *versions, "0", "01", "-1", "1a", "warmup", "configs", *too_large)
    make_folder(tmp_path, "a", config=None)
    (tmp_path / "b" / "3").write_text("a file, no version")
    (tmp_path / "readme.txt").write_text("no model")
    (tmp_path / ".git").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "lost+found").mkdir()
    models = scan([tmp_path])
    assert list(models) == ["a", "b"]
    assert models["b"].versions == (1, 2, 10, 20240131235959, 2**63 - 1)
    assert models["b"].config_path == tmp_path / "b" / "config.pbtxt"
    assert models["b"].files(2) == ["model.py"]
    assert models["a"] == ModelFolder("a", tmp_path / "a")
    for name, folder in models.items():
        assert find([tmp_path], name) == folder
    assert find([tmp_path], "c") is None


@pytest.mark.parametrize(
    ("folders", "text"),
    [
        ([], "whose name is an integer, such as 1)"),
        (["configs", "warmup", ".git"], "whose name is an integer, such as 1)"),
        (["v1", "warmup", "01"], "whose name is an integer, such as 1, but found 01, v1)"),
        (["2", "7", "v1"], "'m' (it excludes version 2, 7)"),
    ],
)
def test_a_model_without_a_version_lists_misnamed_folders(
    tmp_path: Path, folders: list[str], text: str
) -> None:
    make_folder(tmp_path, "m", *folders)
    message = missing_version_text(scan([tmp_path])["m"])
    assert message.startswith(
        "at least one version must be available under the version policy of m"
    )
    assert message.endswith(text)
    assert lacks_version(f"load failed for model 'm': {message}\n")
    assert not lacks_version("failed to load 'm', no version is available")


@pytest.mark.parametrize("file", ["model.py", "model.onnx", "model.pt", "config.json"])
def test_files_of_a_version_in_the_model_folder_are_to_be_moved(tmp_path: Path, file: str) -> None:
    make_folder(tmp_path, "m", "v1")
    for name in (file, "weights.safetensors"):
        (tmp_path / "m" / name).write_text("")
    message = missing_version_text(scan([tmp_path])["m"])
    assert message.endswith(f", such as 1; move '{file}' and the files that it needs to 'm/1')")


def test_a_named_configuration_overrides_the_default_one(tmp_path: Path) -> None:
    make_folder(tmp_path, "with", "1", config="max_batch_size: 4")
    make_folder(tmp_path, "without", "1", config="max_batch_size: 4")
    (tmp_path / "with" / "configs").mkdir()
    (tmp_path / "with" / "configs" / "alt.pbtxt").write_text("max_batch_size: x")
    (tmp_path / "without" / "configs").write_text("no folder")
    models = scan([tmp_path], "alt")
    assert models["with"].config_path == tmp_path / "with" / "configs" / "alt.pbtxt"
    assert models["without"].config_path == tmp_path / "without" / "config.pbtxt"
    assert scan([tmp_path], "other")["with"].config_path == tmp_path / "with" / "config.pbtxt"
    assert find([tmp_path], "with", "alt") == models["with"]
    fingerprint_before = fingerprint(models["with"])
    (tmp_path / "with" / "configs" / "alt.pbtxt").write_text("max_batch_size: 5")
    assert fingerprint(models["with"]) != fingerprint_before
    config, _ = read_config(find([tmp_path], "with", "alt") or models["with"])
    assert config.max_batch_size == 5


def test_a_model_in_two_repositories_is_in_none(tmp_path: Path) -> None:
    for repository in ("one", "two", "three"):
        make_folder(tmp_path / repository, "m", "1")
        make_folder(tmp_path / repository, f"only-{repository}", "1")
    repositories = [tmp_path / name for name in ("one", "two", "three")]
    models = scan(repositories)
    assert models["m"].problem == "model appears in two or more repositories"
    assert find(repositories, "m") == models["m"]
    assert [models[f"only-{path.name}"].problem for path in repositories] == ["", "", ""]


def test_a_name_that_cannot_be_requested_is_reported(tmp_path: Path) -> None:
    make_folder(tmp_path, "my\nmodel", "1")
    problem = scan([tmp_path])["my\nmodel"].problem
    assert problem.startswith("invalid model name 'my\\nmodel', ")


def test_links_out_of_the_repository_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    secret = make_folder(tmp_path / "elsewhere", "secret", "1")
    make_folder(repository, "plain", "1")
    (repository / "folder").symlink_to(secret)
    make_folder(repository, "version")
    (repository / "version" / "1").symlink_to(secret / "1")
    make_folder(repository, "config", "1", config=None)
    (repository / "config" / "config.pbtxt").symlink_to(secret / "config.pbtxt")
    (repository / "alias").symlink_to("plain")
    make_folder(repository, "weights", "1")
    (repository / "weights" / "1" / "model.pt").symlink_to(secret / "1" / "model.py")
    models = scan([repository])
    assert {name: folder.problem for name, folder in models.items()} == dict.fromkeys(
        ("alias", "config", "folder", "plain", "version", "weights"), ""
    )
    assert models["folder"].versions == models["version"].versions == (1,)
    assert models["config"].config_path == repository / "config" / "config.pbtxt"


def test_a_link_to_itself_fails_only_its_model(tmp_path: Path) -> None:
    make_folder(tmp_path, "plain", "1")
    for folder in ("config", "version", "file", "lost+found"):
        make_folder(tmp_path, folder, "1", config=None)
    configs = ("config/config.pbtxt", "lost+found/config.pbtxt")
    for loop in ("folder", *configs, "version/2", "file/1/weights"):
        (tmp_path / loop).symlink_to(Path(loop).name)
    models = scan([tmp_path])
    assert {name: folder.versions for name, folder in models.items()} == {
        "plain": (1,),
        "config": (),
        "version": (1,),
        "file": (1,),
    }
    assert find([tmp_path], "folder") is None
    assert models["config"] == find([tmp_path], "config")
    assert models["config"].problem == "the model's folder: Too many levels of symbolic links"
    assert not any(models[name].problem for name in ("plain", "version", "file"))
    assert all(fingerprint(folder) for folder in models.values())


def test_a_name_that_is_no_text_is_reported_escaped(tmp_path: Path) -> None:
    make_folder(tmp_path, os.fsdecode(b"m\xff"), "1")
    ((name, folder),) = scan([tmp_path]).items()
    assert (name, folder.name) == ("m\N{REPLACEMENT CHARACTER}",) * 2
    assert folder.problem.startswith("invalid model name")


def test_a_removed_version_is_an_error(tmp_path: Path) -> None:
    folder = ModelFolder("m", make_folder(tmp_path, "m", "1"), versions=(1, 2))
    assert folder.files(1) == ["model.py"]
    with pytest.raises(InvalidArgument, match="m/2: No such file or directory"):
        folder.files(2)


@pytest.mark.parametrize("path", ["missing", "file"])
def test_a_repository_that_cannot_be_read_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=f"model repository '{path}': N"):
        scan([tmp_path / path])


TRAVERSAL_ERROR = "model name must not contain path traversal characters"
PRINTABLE_ERROR = "model name must be 1 to 255 bytes of printable UTF-8 text"
EMPTY_ERROR = "Model name cannot be empty. Please enter a valid name to deploy."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", EMPTY_ERROR),
        (" \t", EMPTY_ERROR),
        (".", f"invalid model name '.', {TRAVERSAL_ERROR}"),
        ("..", f"invalid model name '..', {TRAVERSAL_ERROR}"),
        (" ..", f"invalid model name ' ..', {TRAVERSAL_ERROR}"),
        ("a/../b", f"invalid model name 'a/../b', {TRAVERSAL_ERROR}"),
        ("../m", f"invalid model name '../m', {TRAVERSAL_ERROR}"),
        ("/etc", f"invalid model name '/etc', {TRAVERSAL_ERROR}"),
        ("a\\b", f"invalid model name 'a\\b', {TRAVERSAL_ERROR}"),
        ("m\0", f"invalid model name 'm\\x00', {TRAVERSAL_ERROR}"),
        ("m\n", PRINTABLE_ERROR),
        ("m\u202e", PRINTABLE_ERROR),
        ("\udcff", PRINTABLE_ERROR),
        ("m\ufffd", PRINTABLE_ERROR),
        ("a" * 256, PRINTABLE_ERROR),
        ("é" * 128, PRINTABLE_ERROR),
    ],
)
def test_bad_names_are_refused(tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_model_name(name)
    assert caught.value.message.endswith(expected)
    with pytest.raises(InvalidArgument):
        find([tmp_path], name)


@pytest.mark.parametrize("name", ["...", "a..b", ".m", "-m", "a b", "a:b", "a%2F", 'é"', "m" * 255])
def test_names_equal_those_of_folders(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path, name, "1")
    assert find([tmp_path], name) == ModelFolder(
        name, tmp_path / name, tmp_path / name / "config.pbtxt", (1,)
    )


@given(st.text(max_size=300))
def test_valid_names_stay_one_part_of_a_path(name: str) -> None:
    try:
        check_model_name(name)
    except InvalidArgument:
        return
    assert os.path.normpath(f"/r/{name}") == f"/r/{name}"
    assert Path("/r", name).parts[2:] == (name,)


# --- configuration -----------------------------------------------------------------------------


def test_the_configuration_of_a_folder_is_read(tmp_path: Path) -> None:
    make_folder(tmp_path, "m", "1")
    folder = scan([tmp_path])["m"]
    config, _ = read_config(folder)
    assert (config.name, config.backend, config.max_batch_size) == ("m", "python", 4)
    override, _ = read_config(folder, '{"name": "m", "backend": "pytorch"}')
    assert (override.backend, override.max_batch_size) == ("pytorch", 0)
    make_folder(tmp_path, "bare", "1", config=None)
    bare_config, source = read_config(scan([tmp_path])["bare"])
    assert (bare_config.backend, source) == ("", UNWRITTEN)


def test_unreadable_configurations_are_refused_without_the_servers_paths(tmp_path: Path) -> None:
    texts = {
        "name": (
            '\n name: "other"',
            "name/config.pbtxt:2:2: name: unexpected directory name 'name' for model 'other', "
            "directory name must equal model name",
        ),
        "typo": ("max_batch: 1", "typo/config.pbtxt:1:1: max_batch: no such field; did you mean"),
    }
    for name, (text, expected) in texts.items():
        make_folder(tmp_path, name, "1", config=text)
        config, source = read_config(scan([tmp_path])[name])
        assert config.name == name
        with pytest.raises(InvalidArgument) as caught:
            source.raise_for_problems(config)
        assert caught.value.message.startswith(expected)
    (make_folder(tmp_path, "bytes") / "config.pbtxt").write_bytes(b"\xff\xfe")
    make_folder(tmp_path, "gone")
    models = scan([tmp_path])
    (tmp_path / "gone" / "config.pbtxt").unlink()
    for name, expected in (("bytes", "not UTF-8 text"), ("gone", "No such file or directory")):
        with pytest.raises(InvalidArgument) as caught:
            read_config(models[name])
        assert caught.value.message == f"{name}/config.pbtxt: {expected}"
    config, source = read_config(models["bytes"], '{"name": "x"}')
    with pytest.raises(InvalidArgument, match="config:1:2: name: unexpected directory name"):
        source.raise_for_problems(config)


@given(
    st.lists(st.integers(1, 50), max_size=8),
    st.one_of(
        st.none(),
        st.just("{}"),
        st.integers(0, 10).map(lambda n: f"{{latest {{num_versions: {n}}}}}"),
        st.just("{all {}}"),
        st.lists(st.integers(1, 50), max_size=6).map(
            lambda versions: f"{{specific {{versions: {versions}}}}}"
        ),
    ),
)
def test_a_policy_chooses_available_versions(available: list[int], policy: str | None) -> None:
    config = parse_pbtxt("" if policy is None else f"version_policy {policy}")
    chosen_versions = versions_to_load(config, available)
    available_versions = sorted(set(available))
    assert chosen_versions == sorted(set(chosen_versions))
    assert set(chosen_versions) <= set(available_versions)
    choice = config.version_policy.WhichOneof("policy_choice")
    if choice == "specific":
        expected = set(config.version_policy.specific.versions)
        assert chosen_versions == [v for v in available_versions if v in expected]
        assert missing_versions(config, available) == sorted(expected - set(available_versions))
    elif choice == "all" or policy == "{}":
        assert chosen_versions == available_versions
    else:
        count = config.version_policy.latest.num_versions if choice else 1
        assert chosen_versions == (available_versions[-count:] if count else [])


# --- changes -----------------------------------------------------------------------------------


def test_the_fingerprint_follows_every_change_but_bytecode(tmp_path: Path) -> None:
    make_folder(tmp_path, "m", "1")
    file = tmp_path / "m" / "1" / "model.py"
    fingerprints = [fingerprint(scan([tmp_path])["m"])]

    def has_changed() -> bool:
        fingerprints.append(fingerprint(scan([tmp_path])["m"]))
        return fingerprints[-1] != fingerprints[-2]

    assert not has_changed()
    file.write_text("x = 22\n")
    assert has_changed()
    os.utime(file, ns=(1, 1))
    assert has_changed()
    stat_before = file.stat()
    copy = file.with_name("new")
    copy.write_text("x = 33\n")
    os.utime(copy, ns=(stat_before.st_atime_ns, stat_before.st_mtime_ns))
    copy.rename(file)  # same size, same time, another file
    assert has_changed()
    (file.parent / "__pycache__").mkdir()
    (file.parent / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"1")
    assert not has_changed()
    (file.parent / "data").mkdir()
    assert has_changed()
    (file.parent / "data" / "w.bin").write_bytes(b"1")
    assert has_changed()
    (tmp_path / "m" / "2").mkdir()
    assert has_changed()
    (tmp_path / "m" / "config.pbtxt").unlink()
    assert has_changed()
    (file.parent / "broken").symlink_to("nowhere")
    assert has_changed()
    (file.parent / "loop").symlink_to("..")
    assert has_changed()
    assert not has_changed()


def test_the_fingerprint_follows_links(tmp_path: Path) -> None:
    make_folder(tmp_path, "m", "1")
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"1")
    (tmp_path / "m" / "1" / "model.pt").symlink_to(weights)
    folder = scan([tmp_path])["m"]
    fingerprint_before = fingerprint(folder)
    weights.write_bytes(b"22")
    assert fingerprint(folder) != fingerprint_before


def test_the_fingerprint_of_a_class_covers_the_packages_beside_it(tmp_path: Path) -> None:
    package = tmp_path / "code" / "configs" / "nested"  # `configs` is a folder of Triton's models
    package.mkdir(parents=True)
    (tmp_path / "code" / "data").mkdir()
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
        (folder / "loop").symlink_to("..")
    (tmp_path / "code" / "model.py").write_text("class Model: ...\n")
    model = inline_model(f"{tmp_path}/code/model.py:Model", tmp_path / "run", {})
    digests = [(fingerprint(model), version_fingerprint(model, 1))]
    for file in ("model.py", "helper.py", "configs/__init__.py", "configs/nested/module.py"):
        (tmp_path / "code" / file).write_text("x = 22\n")
        digests.append((fingerprint(model), version_fingerprint(model, 1)))
    assert all(len(set(column)) == len(digests) for column in zip(*digests, strict=True))
    (tmp_path / "code" / "data" / "script.py").touch()
    (tmp_path / "code" / "result.txt").touch()
    assert fingerprint(model) == digests[-1][0]


@needs_users
def test_a_folder_beside_a_class_may_be_unreadable() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        Path(folder, "model.py").write_text("class Model: ...\n")
        Path(folder, "private").mkdir(mode=0o700)
        argument, run_dir = f"{folder}/model.py:Model", Path(folder, "run")
        model = as_user(ALICE, lambda: inline_model(argument, run_dir, {}))
        assert as_user(ALICE, lambda: fingerprint(model)) == fingerprint(model)


# --- folders of our own ------------------------------------------------------------------------


def test_an_override_becomes_an_ordinary_folder(tmp_path: Path) -> None:
    base = tmp_path / "run" / "overrides"
    path = materialise_override(
        base,
        "m",
        '{"backend": "python", "parameters": {"P": {"string_value": "é\\n\\"x"}}}',
        {"1/model.py": b"x = 1\n", "1/data/w.bin": b"\0", "config.pbtxt": b"ignored"},
    )
    assert (path / "1" / "model.py").read_bytes() == b"x = 1\n"
    assert base.stat().st_mode & 0o077 == 0
    folder = find([path.parent], "m")
    assert folder is not None and folder.versions == (1,)
    assert read_config(folder)[0].parameters["P"].string_value == 'é\n"x'
    copy = materialise_override(base, "m", "{}", {"/1/model.py": b"", ".//1/a//b": b""})
    assert copy != path
    assert sorted(file_path.name for file_path in copy.glob("1/**/*")) == ["a", "b", "model.py"]


@pytest.mark.parametrize(
    "path",
    [
        "", ".", "..", "../x", "1/../../x", "/", "/../x", "/1/model.py", "1/", "1/\x00", "a\\b",
        "x/" * 20 + "x", "1", "1/model.py/x", "n" * 256,
    ],
)  # fmt: skip
def test_an_override_cannot_leave_its_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        materialise_override(tmp_path, "m", "{}", {"1/model.py": b"x", path: b"y"})
    assert str(tmp_path) not in caught.value.message and list(tmp_path.iterdir()) == []


@given(st.text("./a\\\0", max_size=12))
def test_no_override_writes_outside(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    root = tmp_path_factory.mktemp("root")
    base = root / "base"
    try:
        override = materialise_override(base, "m", "{}", {path: b"y"})
    except InvalidArgument:
        override = None
    assert list(root.iterdir()) == [base]
    if override is None:
        assert list(base.iterdir()) == []
    else:
        assert (override / path.lstrip("/")).read_bytes() == b"y"


def test_a_bad_override_leaks_nothing(tmp_path: Path) -> None:
    for name, config in (("..", "{}"), ("m", "{"), ("m", '{"input": [[]]}')):
        with pytest.raises(InvalidArgument):
            materialise_override(tmp_path, name, config, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "class_name", "name"),
    [
        ("sentiment.py", "Model", "sentiment"),
        ("model.py", "Digits", "digits"),
        ("größe.py", "Größe", "größe"),
    ],
)
def test_classes_in_files_are_models(tmp_path: Path, file: str, class_name: str, name: str) -> None:
    (tmp_path / file).write_text("class Model: ...\n")
    spec = f"{tmp_path}/{file}:{class_name}"
    assert names_one_model(spec)
    base = tmp_path / "run"
    folder = inline_model(spec, base, {})
    assert (folder.name, folder.versions, folder.problem) == (name, (1,), "")
    config, _ = read_config(folder)
    config_dict = to_dict(config)
    assert config_dict["backend"] == "native"
    assert config_dict["default_model_filename"] == file
    assert config_dict["parameters"] == {"class": {"string_value": class_name}}
    assert str(tmp_path) not in str(config_dict)
    assert (folder.path / "1" / file).samefile(tmp_path / file)
    fingerprint_before = fingerprint(folder)
    (tmp_path / "unrelated.txt").write_text("x")
    assert fingerprint(folder) == fingerprint_before
    (tmp_path / file).write_text("class Model: pass  # changed\n")
    changed_fingerprint = fingerprint(folder)
    assert changed_fingerprint != fingerprint_before
    (tmp_path / "helper.py").touch()  # which the class may import
    assert fingerprint(folder) != changed_fingerprint
    assert inline_model(spec, base, {}) == folder


def test_a_checkpoint_is_named_after_its_link(tmp_path: Path) -> None:
    """The folders of caches are named after commits."""
    (tmp_path / "989aa7980e4c").mkdir()
    (tmp_path / "989aa7980e4c" / "config.json").touch()
    (tmp_path / "qwen").symlink_to("989aa7980e4c")
    folder = inline_model(f"{tmp_path}/qwen/", tmp_path / "run", {})
    assert folder.name == "qwen" and (folder.path / "1" / "config.json").is_file()


def test_two_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    specs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").touch()
        specs.append(f"{tmp_path}/{name}/model.py:Model")
    config = from_flags(parse(specs), {})
    with pytest.raises(InvalidArgument, match="a model 'model' already exists"):
        LoadPlanner(config, tmp_path / "run", Accelerators("", 0))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("model.py", "expected FILE.py:CLASS"),
        ("model.txt:Model", "expected FILE.py:CLASS"),
        ("model.py:1x", "expected FILE.py:CLASS"),
        ("missing.py:Model", "'missing.py:Model': there is no file 'missing.py'"),
    ],
)
def test_a_missing_class_is_refused(tmp_path: Path, spec: str, expected: str) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        inline_model(spec, tmp_path, {})
    assert not names_one_model("models")


@needs_users
def test_a_class_that_this_user_may_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    tmp_path.chmod(0o700)
    with pytest.raises(InvalidArgument, match=r"there is no file .* that this user may read"):
        as_user(ALICE, lambda: inline_model(f"{tmp_path}/model.py:Model", tmp_path, {}))
