"""The model repository on disk: folders, versions, configurations, fingerprints of changes.

    REPOSITORY/NAME/config.pbtxt     optional
    REPOSITORY/NAME/configs/X.pbtxt  in its place, where --model-config-name=X asks for it
    REPOSITORY/NAME/VERSION/...      VERSION is a positive integer without leading zeros

Nothing here loads a model. A model's folder, its config.pbtxt and its version folders may be
symbolic links only to places inside the repository; what is in a version folder may link anywhere.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from shmserve.common.model_names import CLASS_IN_FILE, check_model_name, is_checkpoint
from shmserve.errors import InvalidArgument, clip, refused
from shmserve.model_config import UNWRITTEN, ModelConfig, Source, read_json, read_pbtxt

CONFIG_FILE = "config.pbtxt"
ENGINE_FILE = "engine.yaml"  # of a model that generates text
_NAMED_CONFIGS = "configs"
_OF_ALL_VERSIONS = (_NAMED_CONFIGS, "warmup", "initial_state")  # folders beside the versions
IN_SEVERAL = "model appears in two or more repositories"
_NO_VERSION = "at least one version must be available under the version policy of model"
_VERSION = re.compile(r"[1-9][0-9]{0,9}")
_OUTSIDE = "the model's folder leads out of its repository"
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_NO_MODEL = (".", "__", "lost+found")  # how the names of other folders begin
_BYTECODE = ("__pycache__",)  # written by loading a model: no change of it


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model as the repository has it, not yet read.

    `config_path` is None where it has no configuration; `versions` ascend. `problem`, when not
    empty, says why it cannot be loaded. `class_name`, `file` and `settings` (its parameters by
    name) are set for a model given as a class in a file (see `inline_model`).
    """

    name: str
    path: Path
    repository: Path
    config_path: Path | None = None
    versions: tuple[int, ...] = ()
    problem: str = ""
    class_name: str = ""
    file: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def files(self, version: int) -> list[str]:
        """The names in a version's folder; raises InvalidArgument when it cannot be read."""
        with refused(f"{self.name}/{version}"):
            return sorted(os.listdir(self.path / str(version)))


class ReadConfig(NamedTuple):
    """A configuration as it was read: as `written`, and `filled` with what files and host say."""

    folder: ModelFolder
    written: ModelConfig
    filled: ModelConfig
    source: Source


def scan(repositories: Sequence[Path], config_name: str = "") -> dict[str, ModelFolder]:
    """The models of all repositories by name, in order of name; with their configurations of the
    name `config_name`, where they have one.

    Hidden folders, and lost+found of a volume, are skipped. A model that cannot be loaded (in two
    repositories, bad name, outside) has its `problem` set. Raises InvalidArgument when a repository
    cannot be read.
    """
    found: dict[str, ModelFolder] = {}
    for repository in repositories:
        for path in _subfolders(repository):
            folder = _look(repository, path, config_name)
            if folder is None:
                continue
            if folder.name in found:
                found[folder.name] = replace(found[folder.name], problem=IN_SEVERAL)
            else:
                found[folder.name] = folder
    return dict(sorted(found.items()))


def find(repositories: Sequence[Path], name: str, config_name: str = "") -> ModelFolder | None:
    """The model `name` as `scan` would show it, or None; raises InvalidArgument for a bad name."""
    check_model_name(name)
    roots = [root for root in repositories if os.path.isdir(root / name)]
    seen = (_look(root, root / name, config_name) for root in roots)
    found = [folder for folder in seen if folder is not None]
    if len(found) > 1:
        return replace(found[0], problem=IN_SEVERAL)
    return found[0] if found else None


def read_config(folder: ModelFolder, override: str = "") -> tuple[ModelConfig, Source]:
    """The configuration that a folder's config.pbtxt, or the JSON `override` in its place, says.

    Nothing is filled in but the name. A folder without config.pbtxt gives what is known without:
    nothing, or for `inline_model` the native backend and the class. A name that is not the folder's
    is one more problem of the source. Raises InvalidArgument as `read_pbtxt` and `read_json` do.
    """
    source = UNWRITTEN
    if override:
        config, source = read_json(override)
    elif folder.file is not None:
        config = _inline_config(folder)
    elif folder.config_path is not None:
        text = _read_text(folder.config_path)
        within = folder.config_path.relative_to(folder.path)
        config, source = read_pbtxt(text, f"{folder.name}/{within}")
    else:
        config = ModelConfig()
    if config.name and config.name != folder.name:
        source = source.refusing(
            ("name",),
            f"unexpected directory name '{folder.name}' for model '{config.name}', directory name "
            "must equal model name",
        )
    config.name = folder.name
    return config, source


def versions_to_load(config: ModelConfig, available: Sequence[int]) -> list[int]:
    """Which of the `available` versions the model's version_policy wants, ascending; maybe none."""
    have = sorted(set(available))
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "specific":
        return [version for version in have if version in policy.specific.versions]
    if choice == "latest" or not config.HasField("version_policy"):
        count = policy.latest.num_versions if choice else 1
        return have[len(have) - min(count, len(have)) :]
    return have


def missing_versions(config: ModelConfig, available: Sequence[int]) -> list[int]:
    """The versions that the model's version_policy names and that are not `available`."""
    return sorted(set(config.version_policy.specific.versions) - set(available))


def ignored_folders(folder: ModelFolder) -> dict[str, str]:
    """The folders beside the versions that may be meant to be one, and why they are none."""
    names = [each.name for each in _subfolders(folder.path)]
    apart = {*_OF_ALL_VERSIONS, *map(str, folder.versions)}
    return {
        name: "contains leading zeros in its directory name"
        if name.isdecimal() and name.startswith("0")
        else "fails to convert to integral number"
        for name in names
        if name not in apart
    }


def no_version(folder: ModelFolder) -> str:
    """The text for a model none of whose versions is to be loaded, with what may be meant to be
    one."""
    if folder.versions:
        hint = f"it leaves out {', '.join(map(str, folder.versions))}"
    else:
        found = ", ".join(ignored_folders(folder))
        hint = "a version is a folder whose name is a whole number, as 1"
        hint += f", and not {clip(found)}" if found else ""
    return f"{_NO_VERSION} '{folder.name}' ({hint})"


def lacks_version(reason: str) -> bool:
    """Whether it is for want of a version that a load failed."""
    return _NO_VERSION in reason


def fingerprint(folder: ModelFolder) -> str:
    """A text that changes with any file of the model: name, size, time of change or identity; and
    with what keeps the folder from being loaded."""
    return _digest(folder.problem.encode(), _all_lines(folder))


def version_fingerprint(folder: ModelFolder, version: int) -> str:
    """A text that changes with any file that a version of the model may use, but for the model's
    configuration."""
    others = {str(other) for other in folder.versions if other != version}
    apart = others | {CONFIG_FILE, _NAMED_CONFIGS}
    lines = _all_lines(folder)
    return _digest(
        b"", [line for line in lines if os.fsdecode(re.split(rb"[/\0]", line)[0]) not in apart]
    )


def _all_lines(folder: ModelFolder) -> list[bytes]:
    return [_line("", folder.file)] if folder.file is not None else list(_lines(folder.path))


def _digest(first: bytes, lines: list[bytes]) -> str:
    digest = hashlib.sha256(first)
    for line in sorted(lines):
        digest.update(line)
    return digest.hexdigest()


def inline_model(spec: str, base_dir: Path, settings: Mapping[str, str]) -> ModelFolder:
    """The model that "path/file.py:Class" names: no config file, the native backend, `settings` as
    its parameters; or the one that a checkpoint's folder is, called like that.

    It is called as the class in lower case; a class called `Model` takes the file's name instead.
    For the others it looks like any folder: `base_dir`, the server's own, gets NAME/1, a link to
    where the file is. Raises InvalidArgument when there is no such file or its name is not valid.
    """
    if is_checkpoint(spec):
        return _checkpoint(Path(spec).resolve(), base_dir)
    match = CLASS_IN_FILE.fullmatch(spec)
    if match is None:
        raise InvalidArgument(f"'{spec}' is not of the form FILE.py:CLASS")
    file = Path(match["file"]).resolve()
    if not file.is_file():
        raise InvalidArgument(f"'{match['file']}' is not a file")
    class_name = match["name"]
    name = file.stem if class_name == "Model" else class_name.lower()
    path = _linked(base_dir, name, file.parent)
    return ModelFolder(
        *(name, path, base_dir),
        versions=(1,),
        class_name=class_name,
        file=path / "1" / file.name,
        settings=settings,
    )


def _checkpoint(folder: Path, base_dir: Path) -> ModelFolder:
    name = _NO_NAME.sub("-", folder.name).lstrip(".-") or "model"
    path = _linked(base_dir, name, folder)
    settings = path / ENGINE_FILE
    settings.unlink(missing_ok=True)
    if (folder / ENGINE_FILE).is_file():
        settings.symlink_to(folder / ENGINE_FILE)
    return ModelFolder(name, path, base_dir, versions=(1,))


def _linked(base_dir: Path, name: str, folder: Path) -> Path:
    """The folder of a model in `base_dir` whose one version is `folder`."""
    check_model_name(name)
    path = base_dir / name
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    link = path / "1"
    link.unlink(missing_ok=True)
    link.symlink_to(folder, target_is_directory=True)
    return path


def _subfolders(repository: Path) -> list[Path]:
    shown = repository.absolute().name  # no more of the path: clients who ask see it, too
    with refused(f"model repository '{shown}'"), os.scandir(repository) as entries:
        names = sorted(entry.name for entry in entries if os.path.isdir(entry))
    return [repository / name for name in names if not name.startswith(_NO_MODEL)]


def _look(repository: Path, path: Path, config_name: str) -> ModelFolder | None:
    """The folder as a model; None for one that has neither a model's name nor its contents."""
    name = os.fsencode(path.name).decode(errors="replace")  # what is no text cannot be sent
    if _leads_out(path, repository):
        return ModelFolder(name, path, repository, problem=_OUTSIDE)
    config_path = path / CONFIG_FILE
    try:
        versions = sorted(int(entry.name) for entry in _versions(path))
        named = path / _NAMED_CONFIGS / f"{config_name}.pbtxt"
        if config_name and _is_file(named):
            config_path = named
        has_config = _is_file(config_path)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        return ModelFolder(name, path, repository, problem=f"the model's folder: {reason}")
    folder = ModelFolder(
        name,
        path,
        repository,
        config_path if has_config else None,
        tuple(versions),
    )
    try:
        check_model_name(path.name)
    except InvalidArgument as error:
        has_contents = bool(versions) or folder.config_path is not None
        return replace(folder, problem=error.message) if has_contents else None
    parts = [config_path, *(path / str(version) for version in versions)]
    if any(_leads_out(part, repository) for part in parts):
        return replace(folder, problem=_OUTSIDE)
    return folder


# Of os.path, not of Path: one link that leads to itself, or one folder that may not be read, would
# end the look at all models.
def _leads_out(path: Path, repository: Path) -> bool:
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(repository))


def _versions(path: Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return [
            entry for entry in entries if _VERSION.fullmatch(entry.name) and os.path.isdir(entry)
        ]


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _read_text(path: Path) -> str:
    with refused(f"{path.parent.name}/{path.name}", "not UTF-8 text"):
        return path.read_text(encoding="utf-8")


def _inline_config(folder: ModelFolder) -> ModelConfig:
    assert folder.file is not None
    config = ModelConfig(backend="native", default_model_filename=folder.file.name)
    for name, value in {**folder.settings, "class": folder.class_name}.items():
        config.parameters[name].string_value = value
    return config


def _lines(root: Path) -> Iterator[bytes]:
    """A line for each file below `root`, links followed, each folder once."""
    seen: set[tuple[int, int]] = set()
    waiting = [("", root)]
    while waiting:
        prefix, folder = waiting.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            children = sorted(os.listdir(folder))
        except OSError:  # went away between two looks: the next one sees it
            continue
        for name in children:
            if name in _BYTECODE:
                continue
            path = folder / name
            if os.path.isdir(path):
                waiting.append((f"{prefix}{name}/", path))
            yield _line(prefix + name, path)


def _line(name: str, path: Path) -> bytes:
    try:
        status = path.stat()
    except OSError:
        return os.fsencode(name) + b"\0gone\n"
    if stat.S_ISDIR(status.st_mode):  # its own times change with what is in it, bytecode too
        return os.fsencode(name) + b"\0folder\n"
    numbers = (status.st_ino, status.st_size, status.st_mtime_ns)
    return os.fsencode(name) + f"\0{numbers}\n".encode()
