"""The load planner: finds a model's folder, reads its configuration and selects its versions.

The files of a load request are written to a folder, which is removed when no process uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from google.protobuf import text_format

from shmserve import model_config
from shmserve.common.host import Accelerators
from shmserve.common.names import check_model_name
from shmserve.config.server import ServerConfig
from shmserve.errors import Internal, InvalidArgument, NotFound, ShmserveError
from shmserve.ipc import endpoints
from shmserve.ipc.class_source import (
    DEFAULT_CLASS_NAME,
    class_attribute,
    served_class,
    source_positions,
)
from shmserve.ipc.engine_settings import LLM_BACKEND, EngineSettings
from shmserve.ipc.model_spec import ENVIRONMENT, MODEL_SETTINGS, ModelSpec
from shmserve.model_config import GraphProblem, ModelConfig, Source, read_json
from shmserve.model_config.source import Key, Problem, map_key
from shmserve.supervisor.models import repository
from shmserve.supervisor.models.repository import CONFIG_FILE, ModelFolder, ParsedConfig

logger = logging.getLogger(__name__)


class StepModel(NamedTuple):
    """The model that an ensemble step runs; version "" is the latest."""

    name: str
    version: str


def steps_of(config: ModelSpec) -> list[StepModel]:
    """Return the models of an ensemble's steps in order; other configurations have no steps."""
    ensemble = config.ensemble_scheduling
    steps = ensemble.step if ensemble is not None else ()
    return [StepModel(step.model_name, step.version) for step in steps]


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """A model version to load.

    Attributes:
        config: The configuration, normalised and validated before auto-completion.
        parsed_config: The parsed configuration, from which `config` is completed.
    """

    name: str
    version: str
    model_dir: Path
    config: ModelSpec
    labels: dict[str, list[str]] = field(default_factory=dict)  # the label texts of each output
    fingerprint: str = ""  # a digest of the version's files without its configuration
    parsed_config: ParsedConfig | None = field(default=None, compare=False)

    @property
    def steps(self) -> list[StepModel]:
        """Return the models of an ensemble's steps."""
        return steps_of(self.config)


class LoadPlanner:
    """The reader of a server's repositories, which plans loads.

    Its methods access the disk, and may run in a thread.
    """

    def __init__(self, config: ServerConfig, run_dir: Path, accelerators: Accelerators) -> None:
        """Create a planner, with the folders of the models that are given as files.

        Args:
            config: The settings of the server.
            run_dir: The run directory, where the planner writes folders of models.
            accelerators: The accelerators of the host.

        Raises:
            InvalidArgument: A model that is given as a file is invalid.
        """
        self._config = config
        self._overrides_dir = run_dir / "overrides"
        self._environments_dir = endpoints.environments_dir(run_dir)
        self._accelerators = accelerators
        self._file_models: dict[str, ModelFolder] = {}
        for model_file in config.model_files:
            folder = repository.inline_model(model_file, run_dir / "models", config.class_settings)
            if folder.name in self._file_models:
                raise InvalidArgument(f"'{model_file}': a model '{folder.name}' already exists")
            self._file_models[folder.name] = folder

    def scan(self) -> dict[str, ModelFolder]:
        """Return the models of the repositories by name."""
        return {**repository.scan(*self._roots()), **self._file_models}

    def fingerprint(self, name: str) -> str:
        """Return a text that changes with any file of a model; "" if there is no such model."""
        try:
            folder = self._find(name)
        except InvalidArgument:  # `name` is not a valid model name
            return ""
        return repository.fingerprint(folder) if folder is not None else ""

    def count_repositories(self, name: str) -> int:
        """Return the number of repositories that contain a model."""
        roots = self._config.model_repositories
        return 1 if name in self._file_models else sum(os.path.isdir(root / name) for root in roots)

    def _find(self, name: str) -> ModelFolder | None:
        roots, config_name = self._roots()
        return self._file_models.get(name) or repository.find(roots, name, config_name)

    def _roots(self) -> tuple[tuple[Path, ...], str]:
        return self._config.model_repositories, self._config.model_config_name

    def plan(self, name: str, override: str, files: dict[str, bytes]) -> list[VersionSpec]:
        """Return the versions to load, at least one.

        Args:
            name: The model.
            override: A configuration in JSON that replaces config.pbtxt, or "".
            files: Files, such as "1/model.py", that replace the model's folder.

        Raises:
            ShmserveError: The model cannot be loaded; the text is Triton's.
        """
        try:
            folder = self._open_folder(name, override, files)
        except ShmserveError as error:
            raise _poll_error(name, error) from None
        try:
            return self._plan_versions(folder, override)
        except BaseException:
            self._remove(folder.path)
            raise

    def _plan_versions(self, folder: ModelFolder, override: str) -> list[VersionSpec]:
        name, fault = folder.name, ""
        labels: dict[str, list[str]] = {}
        try:
            written_config, source = repository.read_config(folder, override)
            for tensor in model_config.merge_duplicates(written_config):
                logger.warning("model %s: %s is defined twice with equal values", name, tensor)
            config = self._with_defaults(written_config, folder)
            # If the backend is unknown, no other error of the configuration is reported.
            fault = model_config.unknown_backend_error(config)
            if not fault:
                repository.check_agents(folder, config)
                _add_environment(config, folder)
                self._validate(config, folder, source, is_complete=False)
                labels = model_config.read_labels(config, folder.path)
        except model_config.LoadProblem as error:
            fault = error.message
        except ShmserveError as error:
            layout_hint = repository.layout_hint(folder)
            if not (layout_hint or override):
                layout_hint = repository.no_model_file_hint(folder)
            hints = (layout_hint, *repository.incomplete_files(folder.path, ()))
            hint = "; ".join(filter(None, hints))
            if hint:
                error = InvalidArgument(f"{error.message} ({hint})")
            raise _poll_error(name, error) from None
        hint = repository.layout_hint(folder)
        if hint:
            logger.warning("folder of model %s: %s", name, hint)
        for ignored_name, reason in repository.ignored_folders(folder).items():
            logger.warning(
                "model %s: ignore version directory '%s' which %s", name, ignored_name, reason
            )
        versions = repository.versions_to_load(config, folder.versions)
        for text in repository.incomplete_files(folder.path, versions):
            logger.warning("files of model %s: %s", name, text)
        for version in repository.missing_versions(config, folder.versions):
            logger.error(
                "version %d is specified for model '%s', but the version directory is not present",
                version,
                name,
            )
        if not versions:
            text = f"load failed for model '{name}': {repository.missing_version_text(folder)}\n"
            raise InvalidArgument(text)
        if fault:
            lines = _format_unavailable(versions, fault)
            raise InvalidArgument(f"load failed for model '{name}': {lines}")
        spec = ModelSpec.of(model_config.to_dict(config))
        parsed_config = ParsedConfig(folder, written_config, config, source)
        digests = {version: repository.version_fingerprint(folder, version) for version in versions}
        return [
            VersionSpec(name, str(version), folder.path, spec, labels, digest, parsed_config)
            for version, digest in digests.items()
        ]

    def discard(self, spec: VersionSpec) -> None:
        """Remove the folder of a version that has ended, if it has files of a load request."""
        self._remove(spec.model_dir)

    def has_environments(self) -> bool:
        """Check whether an archive of an environment was unpacked."""
        return self._environments_dir.is_dir()

    def remove_unused_environments(self) -> None:
        """Remove the unpacked archives of environments that no worker has locked."""
        for file in self._environments_dir.glob("*.lock"):
            with file.open() as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for folder in (file.with_suffix(""), file.with_suffix(".part")):
                    shutil.rmtree(folder, ignore_errors=True)

    def _remove(self, folder: Path) -> None:
        if folder.is_relative_to(self._overrides_dir):
            shutil.rmtree(folder.parent, ignore_errors=True)

    def _open_folder(self, name: str, override: str, files: dict[str, bytes]) -> ModelFolder:
        if files:
            if not override:
                raise InvalidArgument("override files are given without a 'config' override")
            path = materialise_override(self._overrides_dir, name, override, files)
            folder = repository.find([path.parent], name)
        else:
            folder = self._find(name)
        if folder is None:
            raise NotFound(f"the model repositories contain no folder '{name}'")
        if folder.problem:
            raise InvalidArgument(folder.problem)
        if not (self._config.auto_complete or folder.config_path or folder.class_file or override):
            text = f"there is no {CONFIG_FILE}, and --disable-auto-complete-config requires one"
            raise NotFound(text)
        return folder

    def _with_defaults(self, written: ModelConfig, folder: ModelFolder) -> ModelConfig:
        """Return the configuration with defaults, which depend on the model's files and host."""
        repository.check_files(folder)
        files = folder.files(folder.versions[-1]) if folder.versions else []
        config = model_config.detect_backend(written, folder.name, files)
        is_guessed = config.backend == "python" and not (written.backend or written.platform)
        if is_guessed or config.backend == "native":
            _select_class(config, folder)
        if self._config.on_cpu:
            for group in config.instance_group:
                group.kind = group.KIND_CPU
                group.ClearField("gpus")
        model_config.merge_duplicates(config)
        return model_config.normalise(config, folder.name, self._accelerators.count)

    def _validate(
        self, config: ModelConfig, folder: ModelFolder, source: Source, *, is_complete: bool
    ) -> None:
        gpu_count, model_dir = self._accelerators.count, folder.path
        model_config.validate(
            config, gpu_count=gpu_count, is_complete=is_complete, model_dir=model_dir, source=source
        )

    def finalise_config(self, spec: VersionSpec, reported_properties: dict[str, Any]) -> ModelSpec:
        """Return the final configuration of a version.

        Args:
            spec: The version, from `plan`.
            reported_properties: The properties that the model reported. For an ensemble, they are
                {"steps": the configuration of each step's model or None, "has_any_version":
                whether any version of each step's model serves, "failures": why each step's
                model could not be loaded, or ""}.

        Raises:
            InvalidArgument: The configuration is invalid.
        """
        assert spec.parsed_config is not None
        folder, written_config, config, source = spec.parsed_config
        if spec.steps:
            return self._complete_ensemble(config, folder, source, reported_properties)
        count = self._accelerators.count
        final = config
        if config.backend == "native":
            source = replace(source, python_class_source=_class_source(config, folder))
        if self._config.auto_complete or config.backend == "native":
            final = model_config.merge_autocomplete(config, reported_properties, source)
        final = model_config.normalise(final, folder.name, count, self._config.model_defaults)
        self._validate(final, folder, source, is_complete=True)
        for text in model_config.warnings_of(written_config, final):
            logger.warning("configuration of model %s: %s", folder.name, text)
        ignored_fields = model_config.ignored_fields(final)
        if ignored_fields:
            logger.info(
                "model %s: these settings are accepted and have no effect: %s",
                folder.name,
                ", ".join(ignored_fields),
            )
        return ModelSpec.of(model_config.to_dict(final))

    def _complete_ensemble(
        self, config: ModelConfig, folder: ModelFolder, source: Source, reported: dict[str, Any]
    ) -> ModelSpec:
        self._validate(config, folder, source, is_complete=True)
        steps = [step and model_config.from_json(step.source) for step in reported["steps"]]
        try:
            composed_config = model_config.compose(
                config, steps, reported["has_any_version"], reported["failures"]
            )
        except GraphProblem as error:
            source.raise_for_problems(config, [Problem(error.key, error.message)], GraphProblem)
            raise
        return ModelSpec.of(model_config.to_dict(composed_config))

    def steps(self, name: str) -> list[StepModel]:
        """Return the models that an ensemble needs.

        The result is empty for other models, and for unreadable models, whose load reports the
        error.
        """
        try:
            model = self._find_with_defaults(name)
        except Exception:
            return []
        return [] if model is None else steps_of(ModelSpec.of(model_config.to_dict(model[1])))

    def _find_with_defaults(self, name: str) -> tuple[ModelFolder, ModelConfig] | None:
        """Return a model's folder and its configuration with defaults; None without a folder.

        Raises:
            ShmserveError: The configuration cannot be read.
        """
        folder = self._find(name)
        if folder is None or folder.problem:
            return None
        return folder, self._with_defaults(repository.read_config(folder)[0], folder)

    def aliases(self, name: str) -> list[str] | None:
        """Return the aliases of a text-generating model, from its files; None for another model.

        The result is None for unreadable models, too: their load reports the error.
        """
        try:
            model = self._find_with_defaults(name)
            if model is None:
                return None
            folder, config = model
            has_sampling = any(tensor.name == "sampling_parameters" for tensor in config.input)
            if not (has_sampling or config.backend in (LLM_BACKEND, "vllm")):
                return None
            path = folder.path / repository.ENGINE_FILE
            settings = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
            aliases = (settings or {}).get("aliases") or []
            return list(EngineSettings.of({"aliases": aliases}).aliases)
        except (ShmserveError, OSError, ValueError, AttributeError, yaml.YAMLError):
            return None


def _select_class(config: ModelConfig, folder: ModelFolder) -> None:
    """Set the class to serve in the configuration, if the file has no `TritonPythonModel`.

    A class that the configuration names is kept.

    Raises:
        InvalidArgument: Several classes can be served.
    """
    class_text = None if "class" in config.parameters else _class_text(config, folder)
    if class_text is None:
        return
    text, _, file = class_text
    try:
        name = served_class(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{file}: {error.message}") from None
    if name:
        config.backend = "native"
        config.parameters["class"].string_value = name


# The keys of a configuration that an attribute or method of a class sets. All other attributes set
# the key of their own name.
_KEYS_OF_ATTRIBUTE: dict[str, tuple[Key, ...]] = {
    "instances": (("instance_group",),),
    "max_queue_delay_us": (("dynamic_batching", "max_queue_delay_microseconds"),),
    "predict": (("input",), ("output",)),
    **{name: (("parameters", map_key(name)),) for name in MODEL_SETTINGS},
}


def _class_source(config: ModelConfig, folder: ModelFolder) -> Source | None:
    """Return the positions of the class's attributes; None if the class's file is unreadable."""
    class_text = _class_text(config, folder)
    if class_text is None:
        return None
    text, name, file = class_text
    positions: dict[Key, str] = {}
    for attribute, position in source_positions(text, name).items():
        for key in _KEYS_OF_ATTRIBUTE.get(attribute, ((attribute,),)):
            positions[key] = position
    return Source(file, positions)


def _class_text(config: ModelConfig, folder: ModelFolder) -> tuple[bytes, str, str] | None:
    """Return (content, class name, file name) of a class's file; None if it is unreadable."""
    file = config.default_model_filename or "model.py"
    relative_path = Path(str(folder.versions[-1] if folder.versions else 1), file)
    try:
        text = (folder.path / relative_path).read_bytes()
    except OSError:  # the load reports the error
        return None
    name = config.parameters["class"].string_value if "class" in config.parameters else ""
    return text, name or DEFAULT_CLASS_NAME, f"{folder.name}/{relative_path}"


def _add_environment(config: ModelConfig, folder: ModelFolder) -> None:
    """Copy the attribute `environment` of a model's class to the configuration's parameters.

    The attribute is read from the text of the file, since only that environment may be able to
    import the file.

    Raises:
        InvalidArgument: The attribute is not a literal string.
    """
    class_text = _class_text(config, folder) if config.backend == "native" else None
    if class_text is None or ENVIRONMENT in config.parameters:
        return
    text, name, file = class_text
    try:
        value = class_attribute(text, name, ENVIRONMENT)
    except InvalidArgument as error:
        raise InvalidArgument(f"{file}:{error.message}") from None
    if isinstance(value, str):
        config.parameters[ENVIRONMENT].string_value = value


def _poll_error(name: str, error: ShmserveError) -> Internal:
    text = f"failed to load '{name}', failed to poll from model repository: {error.message}"
    return Internal(text)


def _format_unavailable(versions: list[int], problem: str) -> str:
    reason = f"UNAVAILABLE state: {InvalidArgument.title}: {problem}"
    return "".join(f"version {version} is at {reason};\n" for version in versions)


def materialise_override(root: Path, name: str, override: str, files: Mapping[str, bytes]) -> Path:
    """Write the configuration and the files of a load request to a new model folder.

    Args:
        root: The folder in which the new folder is created.
        name: The model.
        override: The configuration, which becomes config.pbtxt.
        files: The contents by path, such as "1/model.py". Paths are relative to the model's folder
            even if they start with a slash.

    Returns:
        The model's folder, `root`/<unique>/`name`.

    Raises:
        InvalidArgument: The configuration cannot be parsed, or a path contains ".." or is used
            twice.
    """
    check_model_name(name)
    config, _ = read_json(override)
    contents = dict(files)
    contents[CONFIG_FILE] = text_format.MessageToString(config).encode()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    unique_folder = Path(tempfile.mkdtemp(prefix="override-", dir=root))
    try:
        for relative_path, content in contents.items():
            _write(unique_folder / name, relative_path, content)
    except BaseException:
        shutil.rmtree(unique_folder, ignore_errors=True)
        raise
    return unique_folder / name


def _write(root: Path, relative_path: str, content: bytes) -> None:
    parts = [part for part in relative_path.split("/") if part not in ("", ".")]
    is_safe = parts and all(part != ".." and len(part.encode()) <= 255 for part in parts)
    if not is_safe or "\0" in relative_path or "\\" in relative_path or len(parts) > 16:
        allowed_text = "1 to 16 names of at most 255 bytes, without '..' and backslashes"
        text = f"invalid file override path '{relative_path}' (allowed: {allowed_text})"
        raise InvalidArgument(text)
    path = root.joinpath(*parts)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "xb") as file:
            file.write(content)
    except (FileExistsError, NotADirectoryError):
        raise InvalidArgument(f"file override path '{relative_path}' is used twice") from None
