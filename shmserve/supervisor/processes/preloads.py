"""The modules that the zygote of workers imports before it forks."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

_WORKER_MODULE = "shmserve.workers.main"
_TORCH_PRELOADS = ("torch", "shmserve.workers.device:preload_operations")
# Modules that workers import for files that match a pattern: exported programs need torch's
# compiler (1 s and 95 MB), scripted programs a tenth of that, text models 0.2 s and 7 MB.
_PRELOADS_BY_PATTERN = {
    "*/*/*.pt": "shmserve.workers.device:preload_scripted",
    "*/*/*.pt2": "shmserve.workers.device:preload_exported",
    "*/*/config.json": "shmserve.workers.device:preload_text",
}
# Files of models that a backend reads with torch, and the packages that import torch.
_TORCH_FILES = ("*/*.pt", "*/*.pt2", "*/config.json")
_TORCH_PACKAGES = {
    *("torch", "torchvision", "torchaudio", "torchtext", "torch_npu", "torchao", "torchmetrics"),
    *("accelerate", "bitsandbytes", "diffusers", "easyocr", "fairseq", "fastai", "flair", "kornia"),
    *("lightning", "pytorch_lightning", "monai", "mmcv", "mmdet", "open_clip", "peft", "timm"),
    *("sentence_transformers", "speechbrain", "stanza", "transformers", "trl", "TTS", "vllm"),
    *("ultralytics", "whisper", "xformers"),
}


def worker_preloads(
    repositories: Sequence[Path],
    files: Sequence[Path] = (),
    has_devices: bool = False,
    may_add_models: bool = False,
) -> list[str]:
    """Return the modules to import and functions to call, in order, before the zygote forks.

    Importing torch takes a second and about 200 MB. The zygote imports torch if a model's file
    needs it or names it. A worker whose model imports torch in other ways imports it itself.

    Args:
        repositories: The model repositories.
        files: The files of classes, and the folders of checkpoints.
        has_devices: Whether the host has accelerators; workers with ONNX files then import torch.
        may_add_models: Whether models may be added later; then an empty repository imports torch.
    """
    if importlib.util.find_spec("torch") is None:
        return [_WORKER_MODULE]
    model_folders = [model for root in repositories for model in root.glob("*/")]
    patterns = (*_TORCH_FILES, "*/*.onnx") if has_devices else _TORCH_FILES
    is_empty = may_add_models and bool(repositories) and not model_folders
    may_need_torch = is_empty or any(file.is_dir() for file in files)
    sources = {source for file in files for source in _imported_files(file)}
    needs_torch = may_need_torch or any(map(_imports_torch, sources))
    if not needs_torch and not any(_uses_torch(model, patterns) for model in model_folders):
        return [_WORKER_MODULE]
    modules = [
        module
        for pattern, module in _PRELOADS_BY_PATTERN.items()
        if any(_contains_file(root, [pattern]) for root in repositories)
    ]
    return [*_TORCH_PRELOADS, _WORKER_MODULE, *modules]


def _uses_torch(model: Path, patterns: Sequence[str]) -> bool:
    with contextlib.suppress(OSError):
        return _contains_file(model, patterns) or any(map(_imports_torch, model.rglob("*.py")))
    return False


def _contains_file(folder: Path, patterns: Sequence[str]) -> bool:
    with contextlib.suppress(OSError):  # such as a stale mount; the load reports the error
        return any(any(folder.glob(pattern)) for pattern in patterns)
    return False


def _imported_files(file: Path) -> set[Path]:
    """Return a Python file and the files in its folder that it may import, directly or not."""
    imported_files, remaining_files = set[Path](), [file]
    while remaining_files:
        source = remaining_files.pop()
        if source in imported_files:
            continue
        imported_files.add(source)
        for name in _imported_packages(source):
            package = file.parent / name
            with contextlib.suppress(OSError):  # such as a name that is too long for a file
                remaining_files += [package.with_suffix(".py"), *package.glob("*.py")]
    return imported_files


def _imports_torch(source: Path) -> bool:
    """Return whether a Python file names a package that imports torch, in any import."""
    return not _TORCH_PACKAGES.isdisjoint(_imported_packages(source))


def _imported_packages(source: Path) -> Iterator[str]:
    """Yield the packages that a Python file imports anywhere, except relative imports."""
    try:
        with warnings.catch_warnings(action="ignore"):  # loading the file repeats the warnings
            # Only files are read, since the open of a pipe would wait for a writer.
            tree = ast.parse(source.read_bytes() if source.is_file() else b"")
    # Loading the model reports the error.
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
