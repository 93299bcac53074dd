"""The model repository on disk: folders, versions, configurations, fingerprints of changes.

    REPOSITORY/NAME/config.pbtxt     optional
    REPOSITORY/NAME/configs/X.pbtxt  used instead if --model-config-name=X is given
    REPOSITORY/NAME/VERSION/...      VERSION is a positive 64-bit integer without leading zeros

This module loads no model. Links to any folder or file are followed, since a user who can write to
the repository can run code in the server's workers anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from shmserve.common.names import CLASS_IN_FILE, check_model_name, is_checkpoint
from shmserve.errors import InvalidArgument, clip, convert_os_errors
from shmserve.logs import warn_once
from shmserve.model_config import (
    UNWRITTEN,
    ModelConfig,
    Source,
    detect_backend,
    read_json,
    read_pbtxt,
)
from shmserve.model_config.completion import CHECKPOINT_FILE

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.pbtxt"
ENGINE_FILE = "engine.yaml"  # the settings file of a model that generates text
_NAMED_CONFIGS = "configs"  # the folder of the configurations that --model-config-name selects
# Folders of a model that belong to all of its versions.
_SHARED_FOLDERS = (_NAMED_CONFIGS, "warmup", "initial_state")
DUPLICATE_MODEL = "model appears in two or more repositories"
_NO_VERSION = "at least one version must be available under the version policy of model"
_VERSION_NAME = re.compile(r"[1-9][0-9]{0,18}")
_MAX_VERSION = 2**63 - 1
_LFS_MARK = b"version https://git-lfs.github.com/spec/v1"
_PLACEHOLDER = re.compile(r"\$\{\w+\}|(?<=: )\{\{[^{}\n]+\}\}")
_INVALID_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
# A line with a comment; the group is the line's start up to and including "#".
_COMMENT = re.compile(rb"""^((?:[^"'#\n]|"[^"\n]*"|'[^'\n]*')*#).*$""", re.MULTILINE)
_MISNAMED_CONFIG = re.compile(r"config\.(pb|txt|prototxt).*", re.IGNORECASE)
_IGNORED_PREFIXES = (".", "__", "lost+found")  # prefixes of folders that are not models
_DANGLING = "a link whose target does not exist"
# The suffixes of files that are opened. Pipes of other names may belong to the model's code.
_OPENED_SUFFIX = re.compile(r"\.(bin|jinja|json|model|onnx|pbtxt|pt2?|py|safetensors|txt|yaml)")
# The suffixes of files whose contents a download may have replaced by a web page.
_DATA_SUFFIX = re.compile(r"\.(bin|data|json|model|onnx|pth?|pt2|safetensors)")
_WEB_PAGE = re.compile(rb"\s*<(!doctype|html|head|\?xml)", re.IGNORECASE)
# Maximum bytes of the pointer file that Git LFS leaves in place of the real file.
_MAX_POINTER_BYTES = 1024
_IGNORED_NAMES = ("__pycache__",)  # written when a model is loaded, and not a change of the model


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model in a repository, before its configuration is read.

    Attributes:
        config_path: The configuration, or None if there is no file.
        versions: The version numbers, ascending.
        class_name: The class of a model that is given as a class in a file, see `inline_model`.
        class_file: The file of this class.
        class_settings: The parameters of this class by name.
    """

    name: str
    path: Path
    config_path: Path | None = None
    versions: tuple[int, ...] = ()
    problem: str = ""  # why the model cannot be loaded, or empty
    class_name: str = ""
    class_file: Path | None = None
    class_settings: Mapping[str, str] = field(default_factory=dict)

    def files(self, version: int) -> list[str]:
        """Return the names of the files in a version's folder.

        Raises:
            InvalidArgument: The folder cannot be read.
        """
        with convert_os_errors(f"{self.name}/{version}"):
            return sorted(os.listdir(self.path / str(version)))


class ParsedConfig(NamedTuple):
    """A configuration as read from its file, and the same with defaults filled in."""

    folder: ModelFolder
    written: ModelConfig
    with_defaults: ModelConfig
    source: Source


def scan(repositories: Sequence[Path], config_name: str = "") -> dict[str, ModelFolder]:
    """Return the models of all repositories by name, sorted.

    Hidden folders and lost+found are skipped. A model that cannot be loaded (a bad name, or several
    repositories with the model) has a `problem`.

    Args:
        repositories: The folders to scan.
        config_name: The name of a configuration to prefer, from --model-config-name.

    Raises:
        InvalidArgument: A repository cannot be read.
    """
    folders: dict[str, ModelFolder] = {}
    for repository in repositories:
        for path in _subfolders(repository):
            folder = _read_folder(path, config_name)
            if folder is not None and folder.name in folders:
                folder = replace(folders[folder.name], problem=DUPLICATE_MODEL)
            if folder is not None:
                folders[folder.name] = folder
        for path in filter(_is_dangling, repository.iterdir()):
            warn_once(logger, f"model repository: '%s' is skipped: it is {_DANGLING}", str(path))
    return dict(sorted(folders.items()))


def find(repositories: Sequence[Path], name: str, config_name: str = "") -> ModelFolder | None:
    """Return a model as `scan` does, or None; raise InvalidArgument for a bad name."""
    check_model_name(name)
    roots = [root for root in repositories if os.path.isdir(root / name)]
    folders = list(filter(None, (_read_folder(root / name, config_name) for root in roots)))
    if len(folders) > 1:
        return replace(folders[0], problem=DUPLICATE_MODEL)
    return folders[0] if folders else None


def read_config(folder: ModelFolder, override: str = "") -> tuple[ModelConfig, Source]:
    """Return the written configuration of a folder, and its source for error messages.

    Of the defaults, only the name is set. Without a configuration file the result is empty, or for
    an `inline_model` the native backend with the class. If the file has another name than the
    folder, the source's problems contain this mistake.

    Args:
        folder: The model.
        override: A configuration in JSON that replaces the file, or "".

    Raises:
        InvalidArgument: The configuration cannot be parsed.
    """
    source = UNWRITTEN
    if override:
        config, source = read_json(override)
    elif folder.class_file is not None:
        config = _inline_config(folder)
    elif folder.config_path is not None:
        text = _read_text(folder.config_path)
        relative_path = folder.config_path.relative_to(folder.path)
        try:
            config, source = read_pbtxt(text, f"{folder.name}/{relative_path}")
        except InvalidArgument as error:
            raise InvalidArgument(error.message + _template_hint(text)) from None
        if source.problems and _PLACEHOLDER.search(text):
            source = source.with_problem((), _template_hint(text).lstrip())
    else:
        config = ModelConfig()
    if config.name and config.name != folder.name:
        source = source.with_problem(
            ("name",),
            f"unexpected directory name '{folder.name}' for model '{config.name}', directory name "
            "must equal model name",
        )
    config.name = folder.name
    return config, source


def _template_hint(text: str) -> str:
    """Return a hint at placeholders such as ${max_batch_size} in a configuration, or ""."""
    placeholders = sorted(set(_PLACEHOLDER.findall(text)))
    if not placeholders:
        return ""
    return f" (the file is a template: fill in its placeholders {clip(', '.join(placeholders))})"


def layout_hint(folder: ModelFolder) -> str:
    """Return a hint at the mistake in the layout of a model without a configuration, or ""."""
    if folder.config_path is not None:
        return ""
    for path in _subfolders(folder.path):
        if not _is_file(path / CONFIG_FILE):
            continue
        shown_path = f"{folder.name}/{path.name}"
        if path.name in map(str, folder.versions):
            config_path = f"{folder.name}/{CONFIG_FILE}"
            return f"'{shown_path}/{CONFIG_FILE}' is not read: move it to '{config_path}'"
        return f"'{shown_path}' is a model: is the folder '{folder.name}' the repository?"
    with convert_os_errors(folder.name):
        names = sorted(filter(_MISNAMED_CONFIG.fullmatch, os.listdir(folder.path)))
    if names:
        return f"'{folder.name}/{names[0]}' is not read: rename it to '{CONFIG_FILE}'"
    if not folder.versions and folder.name.isdecimal():
        parent = folder.path.resolve().parent.name
        return f"'{folder.name}' is a version: is the folder '{parent}' a model, not a repository?"
    return "" if folder.versions else _no_version_hint(folder)


def no_model_file_hint(folder: ModelFolder) -> str:
    """Return a hint for a model without a configuration and without a known file, or ""."""
    files = folder.files(folder.versions[-1]) if folder.versions else []
    if (
        not folder.versions
        or folder.config_path
        or detect_backend(ModelConfig(), "", files).backend
    ):
        return ""
    expected_text = "model.py, model.onnx, model.pt, or config.json with *.safetensors"
    found_text = clip(", ".join(files)) or "no file"
    return f"expected {expected_text} in '{folder.name}/{folder.versions[-1]}', found {found_text}"


def incomplete_files(model_dir: Path, versions: Iterable[int | str]) -> list[str]:
    """Return a text for each dangling link and each file without its contents.

    The files are those of the model's folder, of its `versions` and of their subfolders.
    """
    texts: list[str] = []
    for path in _model_paths(model_dir, versions):
        problem = ""
        with contextlib.suppress(OSError):  # the model may not need a file that cannot be read
            problem = _DANGLING if _is_dangling(path) else _content_problem(path)
        if problem:
            texts.append(f"'{path.relative_to(model_dir)}' is {problem}")
    return texts


def _content_problem(path: Path) -> str:
    """Return what a file contains instead of its contents, and the remedy, or ""."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        start = file.read(_MAX_POINTER_BYTES)
    if len(start) < _MAX_POINTER_BYTES and start.startswith(_LFS_MARK):
        return "a Git LFS pointer, not the file: run 'git lfs pull' in the clone"
    if not _DATA_SUFFIX.fullmatch(path.suffix):
        return ""
    if _WEB_PAGE.match(start):
        return "a web page, not the file: download the file itself, with a token if it needs one"
    return "" if start else "empty: copy or download it again"


def check_files(folder: ModelFolder) -> None:
    """Check that no file that the server opens is a pipe, whose open waits for a writer.

    Raises:
        InvalidArgument: A file of the model or of its newest version is a pipe, socket or device.
    """
    for path in _model_paths(folder.path, (*folder.versions[-1:], *_SHARED_FOLDERS)):
        # For a file in an unreadable folder, these functions return False; Path's raise an error.
        is_opened = _OPENED_SUFFIX.fullmatch(path.suffix) and os.path.exists(path)
        if is_opened and not (os.path.isfile(path) or os.path.isdir(path)):
            name = path.relative_to(folder.path)
            raise InvalidArgument(f"'{name}' is a pipe, socket or device, expected a file")


def _model_paths(model_dir: Path, folders: Iterable[int | str]) -> list[Path]:
    patterns = ["*", *(f"{folder}/{files}" for folder in folders for files in ("*", "*/*"))]
    return sorted(path for pattern in patterns for path in model_dir.glob(pattern))


def check_agents(folder: ModelFolder, config: ModelConfig) -> None:
    """Run the repository agents that a configuration names.

    Raises:
        InvalidArgument: An agent is unknown, or has refused the model.
    """
    for agent in config.model_repository_agents.agents:
        if agent.name != "checksum":
            text = f"repository agent '{agent.name}' is not available (allowed: 'checksum')"
            raise InvalidArgument(text)
        for key, expected_digest in sorted(agent.parameters.items()):
            algorithm, _, file = key.partition(":")
            if algorithm != "MD5" or not file:
                text = f"unexpected parameter '{key}' of agent 'checksum', expected 'MD5:FILE'"
                raise InvalidArgument(text)
            with convert_os_errors(f"file '{file}' for agent 'checksum'"):
                digest = hashlib.md5((folder.path / file).read_bytes()).hexdigest()
            if digest != expected_digest.strip().lower():
                raise InvalidArgument(
                    f"Mismatched MD5 hash for file {file}, expect: {expected_digest}, got: {digest}"
                )


def versions_to_load(config: ModelConfig, available_versions: Sequence[int]) -> list[int]:
    """Return the available versions that a configuration's version_policy selects, ascending."""
    versions = sorted(set(available_versions))
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "specific":
        return [version for version in versions if version in policy.specific.versions]
    if choice == "latest" or not config.HasField("version_policy"):
        count = policy.latest.num_versions if choice else 1
        return versions[len(versions) - min(count, len(versions)) :]
    return versions


def missing_versions(config: ModelConfig, available_versions: Sequence[int]) -> list[int]:
    """Return the versions that a configuration's version_policy names and that are missing."""
    return sorted(set(config.version_policy.specific.versions) - set(available_versions))


def ignored_folders(folder: ModelFolder) -> dict[str, str]:
    """Return the folders that may be misnamed versions, with the reasons why they are ignored."""
    names = {path.name for path in _subfolders(folder.path)}
    names -= {*_SHARED_FOLDERS, *map(str, folder.versions)}
    leading_zeros = "contains leading zeros in its directory name"
    no_integer = "fails to convert to integral number"
    return {n: leading_zeros if re.fullmatch(r"0\d*", n) else no_integer for n in sorted(names)}


def missing_version_text(folder: ModelFolder) -> str:
    """Return the error text for a model without a version to load."""
    if folder.versions:
        hint = f"it excludes version {', '.join(map(str, folder.versions))}"
    else:
        hint = _no_version_hint(folder)
    return f"{_NO_VERSION} '{folder.name}' ({hint})"


def _no_version_hint(folder: ModelFolder) -> str:
    ignored_names = ", ".join(ignored_folders(folder))
    hint = "a version is a folder whose name is an integer, such as 1"
    with convert_os_errors(folder.name):
        detected_config = detect_backend(ModelConfig(), "", os.listdir(folder.path))
    if detected_config.backend:
        file = detected_config.default_model_filename or CHECKPOINT_FILE
        return f"{hint}; move '{file}' and the files that it needs to '{folder.name}/1'"
    return hint + (f", but found {clip(ignored_names)}" if ignored_names else "")


def lacks_version(reason: str) -> bool:
    """Check whether a load failed because there was no version to load."""
    return _NO_VERSION in reason


def fingerprint(folder: ModelFolder) -> str:
    """Return a digest of a model's files (names, sizes, times, inodes) and of its `problem`."""
    return _digest(folder.problem.encode(), _model_file_lines(folder))


def version_fingerprint(folder: ModelFolder, version: int) -> str:
    """Return a digest of the files that a version may use, without the configuration."""
    other_versions = {str(number) for number in folder.versions if number != version}
    excluded_names = {os.fsencode(name) for name in other_versions | {CONFIG_FILE, _NAMED_CONFIGS}}
    lines = [
        ln for ln in _model_file_lines(folder) if re.split(rb"[/\0]", ln)[0] not in excluded_names
    ]
    return _digest(b"", lines)


def _model_file_lines(folder: ModelFolder) -> list[bytes]:
    if folder.class_file is None:
        return list(_file_lines(folder.path))
    # The class may import other modules in the folder of its file.
    files = {str(folder.class_file), *_python_files(folder.class_file.parent)}
    # Full paths, because `version_fingerprint` excludes some names at the top of a model's folder.
    return [_file_line(file, Path(file)) for file in files]


def _python_files(root: Path) -> Iterator[str]:
    """Yield the modules in a folder and in the packages below it, without following links.

    Folders that this process may not read are skipped.
    """
    for parent, folders, names in os.walk(root):
        folders[:] = [n for n in folders if os.path.isfile(os.path.join(parent, n, "__init__.py"))]
        yield from (os.path.join(parent, name) for name in names if name.endswith(".py"))


def _digest(prefix: bytes, lines: list[bytes]) -> str:
    return hashlib.sha256(prefix + b"".join(sorted(lines))).hexdigest()


def inline_model(argument: str, base_dir: Path, class_settings: Mapping[str, str]) -> ModelFolder:
    """Return a model for "path/file.py:Class", or for the folder of a checkpoint.

    A class is a model of the native backend without a configuration file. The model is named after
    the class in lower case, or after the file if the class is called `Model`. A checkpoint is named
    after its folder, or after the link to it. NAME/1 in `base_dir` becomes a link to the folder of
    the file or the checkpoint.

    Args:
        argument: The class or the folder.
        base_dir: The folder in which the model's folder is created.
        class_settings: The parameters of the class by name.

    Raises:
        InvalidArgument: The file does not exist, or the name is not valid.
    """
    if is_checkpoint(argument):
        return _checkpoint(Path(os.path.abspath(argument)), base_dir)
    match = CLASS_IN_FILE.fullmatch(argument)
    if match is None:
        raise InvalidArgument(f"model '{argument}': expected FILE.py:CLASS")
    file = Path(match["file"]).resolve()
    if not (os.path.isfile(file) and os.access(file, os.R_OK)):
        text = f"there is no file '{match['file']}' that this user may read"
        raise InvalidArgument(f"model '{argument}': {text}")
    class_name = match["name"]
    name = file.stem if class_name == "Model" else class_name.lower()
    path = _link_folder(base_dir, name, file.parent)
    linked_file = path / "1" / file.name
    return ModelFolder(name, path, None, (1,), "", class_name, linked_file, class_settings)


def _checkpoint(folder: Path, base_dir: Path) -> ModelFolder:
    name = _INVALID_CHARACTERS.sub("-", folder.name).lstrip(".-") or "model"
    path = _link_folder(base_dir, name, folder)
    settings_link = path / ENGINE_FILE
    settings_link.unlink(missing_ok=True)
    if (folder / ENGINE_FILE).is_file():
        settings_link.symlink_to(folder / ENGINE_FILE)
    return ModelFolder(name, path, versions=(1,))


def _link_folder(base_dir: Path, name: str, folder: Path) -> Path:
    """Return a model's folder in `base_dir` with one version, a link to `folder`."""
    check_model_name(name)
    path = base_dir / name
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    link = path / "1"
    link.unlink(missing_ok=True)
    link.symlink_to(folder, target_is_directory=True)
    return path


def _subfolders(repository: Path) -> list[Path]:
    name = repository.absolute().name  # without the path, because clients see the error
    with convert_os_errors(f"model repository '{name}'"), os.scandir(repository) as entries:
        names = sorted(entry.name for entry in entries if os.path.isdir(entry))
    return [repository / name for name in names if not name.startswith(_IGNORED_PREFIXES)]


def _is_dangling(path: Path) -> bool:
    """Return whether a path is a link without a target, except hidden ones (editors' locks)."""
    return not path.name.startswith(".") and os.path.islink(path) and not os.path.exists(path)


def _read_folder(path: Path, config_name: str) -> ModelFolder | None:
    """Return the model in a folder; None if the folder has no model's name or contents."""
    # Messages can contain only UTF-8, so other bytes of the name are replaced.
    name = os.fsencode(path.name).decode(errors="replace")
    config_path = path / CONFIG_FILE
    try:
        versions = _read_versions(path)
        named_config_path = path / _NAMED_CONFIGS / f"{config_name}.pbtxt"
        if config_name and _is_file(named_config_path):
            config_path = named_config_path
        has_config = _is_file(config_path)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        return ModelFolder(name, path, problem=f"the model's folder: {reason}")
    problem = ""
    if not has_config and os.path.lexists(config_path):
        fault = _DANGLING if _is_dangling(config_path) else "not a file"
        problem = f"'{config_path.name}' is {fault}"
    config_file = config_path if has_config else None
    folder = ModelFolder(name, path, config_file, tuple(versions), problem)
    try:
        check_model_name(path.name)
    except InvalidArgument as error:
        has_contents = bool(versions) or folder.config_path is not None
        return replace(folder, problem=error.message) if has_contents else None
    return folder


def _read_versions(path: Path) -> list[int]:
    with os.scandir(path) as entries:
        version_folders = (entry for entry in entries if _VERSION_NAME.fullmatch(entry.name))
        versions = sorted(int(entry.name) for entry in version_folders if os.path.isdir(entry))
    return [version for version in versions if version <= _MAX_VERSION]


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _read_text(path: Path) -> str:
    with convert_os_errors(f"{path.parent.name}/{path.name}", "not UTF-8 text"):
        # Comments may have any encoding, as in Triton. Editors of Windows write a byte order mark.
        text = _COMMENT.sub(rb"\1", path.read_bytes()).decode("utf-8-sig")
        return re.sub("\r\n?", "\n", text)


def _inline_config(folder: ModelFolder) -> ModelConfig:
    assert folder.class_file is not None
    config = ModelConfig(backend="native", default_model_filename=folder.class_file.name)
    for name, value in {**folder.class_settings, "class": folder.class_name}.items():
        config.parameters[name].string_value = value
    return config


def _file_lines(root: Path) -> Iterator[bytes]:
    """Yield the `_file_line` of each file below `root`; follow links, but visit a folder once."""
    visited_folders: set[tuple[int, int]] = set()
    unvisited_folders = [("", root)]
    while unvisited_folders:
        prefix, folder = unvisited_folders.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in visited_folders:
                continue
            visited_folders.add((status.st_dev, status.st_ino))
            children = os.listdir(folder)
        except OSError:  # the next poll detects that the folder was removed in the meantime
            continue
        for name in sorted({*children} - {*_IGNORED_NAMES}):
            path = folder / name
            if os.path.isdir(path):
                unvisited_folders.append((f"{prefix}{name}/", path))
            yield _file_line(prefix + name, path)


def _file_line(name: str, path: Path) -> bytes:
    try:
        status = path.stat()
    except OSError:
        return os.fsencode(name) + b"\0gone\n"
    if stat.S_ISDIR(status.st_mode):  # its times change with any file in it, even bytecode
        return os.fsencode(name) + b"\0folder\n"
    numbers = (status.st_ino, status.st_size, status.st_mtime_ns)
    return os.fsencode(name) + f"\0{numbers}\n".encode()
