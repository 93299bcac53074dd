"""Code that users wrote: its files as modules, what it says of itself, what it raises in words; and
files of data beside it."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

from shmserve import model as tensor_types
from shmserve.errors import Internal, suggestion


def import_file(path: Path, name: str) -> ModuleType:
    """Run the file at `path` as module `name`; modules beside it can be imported.

    Raises whatever the file raises.
    """
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"'{path.name}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and annotations look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def says_ready(model: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> bool:
    """Readiness by a model's own `is_ready`; a coroutine is run by `run`.

    Raises what it raises, and Internal for what is no bool.
    """
    said = model.is_ready()
    if asyncio.iscoroutine(said):
        said = run(said)
    if not isinstance(said, bool):
        raise Internal(f"`is_ready` must return a bool, found type '{type(said)}'")
    return said


def place(error: BaseException, folder: Path) -> str:
    """` (FILE:LINE)` of where an exception left the code in a model's folder; "" for none of it."""
    roots = {folder, folder.resolve()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if roots.intersection(file.parents):
            return f" ({file.name}:{frame.lineno})"
    return ""


def in_words(error: BaseException) -> str:
    """`Kind: text` of an exception; only its kind where the text cannot be had."""
    kind = type(error).__name__
    try:
        if isinstance(error, ImportError) and error.name == tensor_types.__name__:
            name = str(error).split("'")[1]
            near = suggestion(name, tensor_types.__all__)
            return f"{kind}: there is no '{name}' in {error.name}{near}"
        return f"{kind}: {error}"
    except BaseException:  # its `__str__` is a model's too
        return kind
