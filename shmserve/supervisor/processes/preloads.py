"""What the zygote of workers imports before it forks them: all that they need, and torch, a second
and some 200 MB, unless none of them will ask for it."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

_WORKER = "shmserve.workers.main"
_TORCH = ("torch", "shmserve.workers.preloads:operations")
# What workers of such files need, for whoever has some: of exported programs torch's compiler, a
# second and 95 MB, of scripted ones a tenth of that, of models of text 0.2 s and 7 MB.
_PRELOADS_FOR = {
    "*/*/*.pt": "shmserve.workers.preloads:scripted",
    "*/*/*.pt2": "shmserve.workers.preloads:exported",
    "*/*/config.json": "shmserve.workers.backends.llm",
}
# What brings no torch along when it is imported. Of importlib it cannot be said.
_WITHOUT_TORCH = (sys.stdlib_module_names - {"importlib"}) | {
    *("numpy", "triton_python_backend_utils", "c_python_backend_utils")
}


def worker_preloads(repositories: Sequence[Path], torch: bool) -> list[str]:
    """Return the modules to import and the functions (MODULE:FUNCTION) to call, in this order.

    Torch is among them where it is wanted, or where a model in one of the repositories may import
    it.
    """
    models = (model for root in repositories for model in root.glob("*/"))
    if not torch and not any(map(_may_import_torch, models)):
        return [_WORKER]
    found = [
        module
        for pattern, module in _PRELOADS_FOR.items()
        if any(any(root.glob(pattern)) for root in repositories)
    ]
    return [*_TORCH, _WORKER, *found]


def _may_import_torch(model: Path) -> bool:
    """Whether workers of the model in this folder may import torch: with its code, which says so,
    or because it has files but no code, which others' code reads."""
    sources = list(model.rglob("*.py"))
    if not sources:
        return any(model.glob("*/*"))
    known = {*_WITHOUT_TORCH, *(path.stem for path in sources), *(p.parent.name for p in sources)}
    try:
        with warnings.catch_warnings(action="ignore"):  # whoever runs it has them
            return any(not known.issuperset(_imported(path)) for path in sources)
    except (OSError, SyntaxError, ValueError):  # whoever loads it says what is wrong with it
        return True


def _imported(source: Path) -> Iterator[str]:
    """The packages that a Python file names in imports, at its top or later, but for its own."""
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
