"""Backend `python`: a `TritonPythonModel` in model.py, as in Triton's Python backend.

execution.py                        calls of the model's `execute`
request.py tensor.py errors.py      the objects of its API
server.py metrics.py                the functions of its API: other models, logs, metrics
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from shmserve.errors import Internal, InvalidArgument, Unavailable
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers import triton_python_backend_utils as pb_utils
from shmserve.workers.backends import Backend, ModelContext, OutputStream, Request, Response
from shmserve.workers.backends.python import metrics, server
from shmserve.workers.backends.python.execution import DecoupledExecution, PythonExecution
from shmserve.workers.triton_python_backend_utils import ModelConfig
from shmserve.workers.user_code import check_ready

# The modules that models import; the second one is internal to Triton, but some models use it.
_MODULE_NAMES = ("triton_python_backend_utils", "c_python_backend_utils")
# Triton's Python backend refuses them, since it passes names to a shell.
_FORBIDDEN_CHARACTERS = ";|&$`<>()[]{}\\\"'*?~#!"
_FORBIDDEN = frozenset(_FORBIDDEN_CHARACTERS)


class PythonBackend(Backend):
    """The backend of one `TritonPythonModel` object."""

    strict_outputs = False
    metrics = staticmethod(metrics.changes)  # the families created with `pb_utils.MetricFamily`

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        for name in _MODULE_NAMES:
            sys.modules[name] = pb_utils
        self._server = server.ServerApi(context)
        server.install(self._server)
        self._execution: PythonExecution | None = None
        self._decoupled: DecoupledExecution | None = None
        self._class: Any = None
        self._model: Any = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return `config` completed by the model's `auto_complete_config`; pass on its errors."""
        class_ = self._find_class(ModelSpec.of(config))
        completed = ModelConfig(json.dumps(config))
        if hasattr(class_, "auto_complete_config"):
            completed = class_.auto_complete_config(completed)
        if not isinstance(completed, ModelConfig):
            raise Internal(
                f"auto_complete_config function in model '{self.context.model_name}' must return "
                "a valid pb.ModelConfig object."
            )
        # Converted through JSON like in Triton, which rejects values such as numpy's numbers.
        as_json: dict[str, Any] = json.loads(json.dumps(completed.as_dict()))
        return as_json

    def load(self, config: ModelSpec) -> None:
        """Create the model and call its `initialize`, whose errors are passed on."""
        context = self.context
        metrics.set_listener(self._metrics_changed)
        self.device_inputs = config.parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS") == "no"
        class_ = self._find_class(config)
        if not hasattr(class_, "execute"):
            raise InvalidArgument(
                f"Python model {context.version}/{file_name(config)} does not implement `execute` "
                "method."
            )
        self._model = class_()
        if hasattr(self._model, "initialize"):
            self._model.initialize(
                {
                    "model_config": json.dumps(config.source, separators=(",", ":")),
                    "model_instance_kind": context.kind,
                    "model_instance_name": context.instance_name,
                    "model_instance_device_id": str(context.device_id),
                    "model_repository": str(context.model_dir),
                    "model_version": context.version,
                    "model_name": context.model_name,
                }
            )
        sequences = config.sequence_batching
        is_iterative = sequences is not None and sequences.iterative_sequence
        if config.decoupled:
            self._decoupled = DecoupledExecution(context, self._model, is_iterative)
        else:
            self._execution = PythonExecution(context, self._model, is_iterative)
        self.checks_ready = hasattr(self._model, "is_ready")
        self._server.can_call = True

    def execute(self, requests: list[Request]) -> list[Response]:
        """Call the model's `execute`.

        Pass on its errors, and raise Internal for an invalid result.
        """
        assert self._execution is not None
        self._server.executing_requests = requests
        try:
            return self._execution.execute(requests)
        finally:
            self._server.executing_requests = ()

    def execute_decoupled(self, streams: list[OutputStream]) -> None:
        """Call the model's `execute`, which sends responses itself and must return None.

        Errors of the model are passed on.
        """
        assert self._decoupled is not None
        with self._server.decoupled_execution([stream.request for stream in streams]):
            self._decoupled.execute(streams)

    def is_ready(self) -> bool:
        """Call the model's `is_ready`, plain or a coroutine.

        Errors of the model are passed on.

        Raises:
            Internal: The result is not a bool.
        """
        return check_ready(self._model, self._decoupled.run if self._decoupled else asyncio.run)

    def _metrics_changed(self, at_once: bool) -> None:
        self.context.control.wake()
        self.metrics_changed(at_once)

    def unload(self) -> None:
        """Call the model's `finalize`, whose errors are passed on."""
        self._server.can_call = False
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        finally:
            self._model = None
            for execution in (self._execution, self._decoupled):
                if execution is not None:
                    execution.close()
            self._server.calls.close()
            server.install(None)

    # --- loading

    def _find_class(self, config: ModelSpec) -> Any:
        if self._class is None:
            name = self.context.model_name
            if _FORBIDDEN.intersection(name):
                raise InvalidArgument(
                    f"invalid model name '{name}', the name of a Python model must not contain any "
                    f"of {' '.join(_FORBIDDEN_CHARACTERS)}"
                )
            self._class = model_class(config, self.context.model_dir, self.context.version_dir)
        return self._class


def file_name(config: ModelSpec) -> str:
    """Return the name of a model's file."""
    return config.default_model_filename or "model.py"


def model_class(config: ModelSpec, model_dir: Path, version_dir: Path) -> Any:
    """Return the `TritonPythonModel` of a model's file. Errors of the file are passed on.

    Raises:
        Unavailable: The file does not exist.
        InvalidArgument: The name is not that of a Python file.
    """
    file = file_name(config)
    if not file.endswith(".py"):
        raise InvalidArgument(f"Model name must end with '.py'. Model name is \"{file}\".")
    if not (version_dir / file).is_file():
        raise Unavailable(f"Python model file not found in '{version_dir.name}/{file}'")
    module = _import_model(model_dir, version_dir, file)
    if not hasattr(module, "TritonPythonModel"):
        raise InvalidArgument(f"'{file}' has no class TritonPythonModel{_hint(module, file)}")
    return module.TritonPythonModel


def _hint(module: Any, file: str) -> str:
    """Return advice for a model file without a `TritonPythonModel`, or ""."""
    torch = sys.modules.get("torch")
    for name, class_ in vars(module).items():
        if not isinstance(class_, type) or class_.__module__ != module.__name__:
            continue
        if torch is not None and issubclass(class_, torch.nn.Module):
            return (
                f'. Its class {name} is an nn.Module: write backend: "pytorch", '
                f'runtime: "{file}", and the inputs and outputs into config.pbtxt'
            )
        if hasattr(class_, "predict"):
            return (
                f". Its class {name} has a method 'predict': write backend: \"native\" and "
                f'parameters {{ key: "class" value {{ string_value: "{name}" }} }} into '
                "config.pbtxt"
            )
    return ""


def _import_model(model_dir: Path, version_dir: Path, file: str) -> ModuleType:
    """Import a model's file as `VERSION.NAME`, whose errors are passed on.

    The version's folder is a package of its own name, so that `from . import` works. Modules in
    that folder and in the model's folder can be imported.
    """
    package = version_dir.name
    for folder in (str(version_dir), str(model_dir)):
        if folder not in sys.path:
            sys.path.append(folder)
    init_file = version_dir / "__init__.py"
    if init_file.is_file():
        spec = importlib.util.spec_from_file_location(
            package, init_file, submodule_search_locations=[str(version_dir)]
        )
        assert spec is not None
    else:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(version_dir)]
    module = importlib.util.module_from_spec(spec)
    # Not found through sys.path, where another folder may have the same number as its name.
    sys.modules[package] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)
    return importlib.import_module(f"{package}.{Path(file).stem}")
