"""The file of a Python model: found by its configuration, imported as Triton imports it."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.model_spec import ModelSpec

logger = logging.getLogger(__name__)


def file_name(config: ModelSpec) -> str:
    """The name of a model's file."""
    return config.default_model_filename or "model.py"


def model_class(config: ModelSpec, model_dir: Path, version_dir: Path) -> Any:
    """The `TritonPythonModel` of a model's file; raises what that raises, Unavailable without it,
    InvalidArgument for another name than a Python file's."""
    file = file_name(config)
    if not file.endswith(".py"):
        raise InvalidArgument(f"Model name must end with '.py'. Model name is \"{file}\".")
    if not (version_dir / file).is_file():
        raise Unavailable(f"Python model file not found in '{version_dir.name}/{file}'")
    if "EXECUTION_ENV_PATH" in config.parameters:
        logger.warning("EXECUTION_ENV_PATH has no effect: models share the server's Python")
    return _import_model(model_dir, version_dir, file).TritonPythonModel


def _import_model(model_dir: Path, version_dir: Path, file: str) -> ModuleType:
    """Import a model's file as `VERSION.NAME`; raises what it raises.

    The version's folder is a package of its own name, so that `from . import` works, and modules
    in it and in the model's folder can be imported.
    """
    package = version_dir.name
    for folder in (str(version_dir), str(model_dir)):
        if folder not in sys.path:
            sys.path.append(folder)
    init = version_dir / "__init__.py"
    if init.is_file():
        spec = importlib.util.spec_from_file_location(
            package, init, submodule_search_locations=[str(version_dir)]
        )
        assert spec is not None
    else:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(version_dir)]
    module = importlib.util.module_from_spec(spec)
    # Not found by searching sys.path, where another folder may have this number as its name.
    sys.modules[package] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)
    return importlib.import_module(f"{package}.{Path(file).stem}")
