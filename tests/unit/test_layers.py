"""Which room (a folder of code) may import which; and that no modules import one another."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# shmserve/ipc and shmserve/workers are links to these folders at the root.
FOLDERS = {"shmserve": "shmserve", "shmserve.ipc": "ipc", "shmserve.workers": "workers"}
FOLDERS["bench"] = "bench"  # bench is no room of the server, but must be free of cycles, too
# Modules that every room may import, and which import no module of the project.
LEAF_MODULES = {"shmserve", "shmserve.errors", "shmserve.logs", "shmserve.model"}
# The start records of processes, which are created by the starting process.
START_MODULES = {"shmserve.gateway.settings", "shmserve.scheduler.settings"}

# room -> the rooms that it may import besides itself; "x.*" is x and every room in it. The order
# is from low to high: a room that is not listed may neither import nor be imported.
LAYERS: dict[str, tuple[str, ...]] = {
    # the words and the memory that processes share
    "ipc.transport": (),
    "ipc.messages": ("ipc", "ipc.transport"),
    "ipc.tensors": ("ipc", "ipc.transport"),
    "ipc.memory": ("ipc.messages", "ipc.tensors", "ipc.transport"),
    "ipc": ("ipc.*",),
    # a worker's process
    "workers.memory": ("ipc.*", "workers", "workers.batch"),
    "workers.batch": ("ipc.*", "workers", "workers.memory", "workers.backends"),
    "workers.bls": ("ipc.*", "workers", "workers.batch"),
    "workers.backends": ("ipc.*", "workers", "workers.batch", "workers.memory"),
    "workers.backends.pytorch": ("ipc.*", "workers.*"),
    "workers.backends.python.importable": ("ipc.tensors", "workers.backends.python"),
    "workers.backends.python": ("ipc.*", "workers.*"),
    "workers.backends.native": ("ipc.*", "workers.*"),
    "workers.backends.onnx": ("ipc.*", "workers.*"),
    "workers.backends.llm.model": ("ipc", "ipc.messages", "workers.backends.llm.*"),
    "workers.backends.llm": ("ipc.*", "workers.*"),
    "workers.backends.vllm": ("ipc.*", "workers.*"),
    "workers": ("ipc.*", "workers.*"),
    # shared by the control plane's processes
    "common": (),
    "proto": (),
    "model_config.rules": ("ipc", "ipc.tensors", "common", "model_config"),
    "model_config": ("ipc", "common", "model_config.*"),
    "config": ("ipc.messages", "common", "model_config"),
    # a scheduler's process
    "scheduler.requests": ("ipc.*", "scheduler"),
    "scheduler.batchers": ("ipc.*", "scheduler.*"),
    "scheduler.instances": ("ipc.*", "scheduler.*"),
    "scheduler.generative": ("ipc.*", "scheduler.*"),
    "scheduler.ensemble": ("ipc.*", "scheduler.*"),
    "scheduler.hosting": ("ipc.*", "common", "scheduler.*"),
    "scheduler": ("ipc.*", "common", "scheduler.*"),
    # a gateway's process: no listener imports another one, and their common modules import none
    "gateway.inference": ("ipc.*", "gateway"),
    "gateway.api": ("ipc.*", "common", "gateway"),
    "gateway": ("ipc.*", "common", "gateway.inference"),
    "gateway.http.json": ("ipc.*", "common", "gateway.inference"),
    "gateway.http.openai": ("ipc.*", "gateway", "gateway.inference", "gateway.http.*"),
    "gateway.http": (*("ipc.*", "common", "gateway", "gateway.inference"),
        *("gateway.api.*", "gateway.http.*")),
    "gateway.grpc.wire": ("ipc.*", "gateway", "gateway.inference", "proto"),
    "gateway.http2": (),
    "gateway.grpc": (*("ipc.*", "common", "proto", "gateway", "gateway.inference"),
        *("gateway.api", "gateway.grpc.*", "gateway.http2")),
    # the supervisor's process
    "supervisor.host": ("ipc.*", "common"),
    "supervisor.resources": ("ipc.*", "supervisor.processes"),
    "supervisor.processes": ("ipc.*", "common", "supervisor.host"),
    "supervisor.regions": ("ipc.*", "common", "supervisor.host"),
    "supervisor.events": ("ipc.*", "supervisor.processes", "supervisor.regions"),
    "supervisor.local_clients": (*("ipc.*", "common"),
        *("supervisor.host", "supervisor.processes", "supervisor.regions")),
    "supervisor.checks": ("ipc.*", "common", "config", "supervisor.host"),
    "supervisor.models": (*("ipc.*", "common", "config", "model_config", "supervisor",
        "supervisor.events"), *("supervisor.host", "supervisor.processes", "supervisor.resources")),
    "supervisor": ("ipc.*", "common", "config", "supervisor.*"),
    # a program that uses a server, and the command
    "client.memory": ("ipc.*", "client", "client.request"),
    "client.request": ("ipc.*", "client", "client.memory"),
    "client": ("ipc.*", "client.*"),
    "protocols": ("ipc", "ipc.tensors", "proto", "model_config", "client.*", "gateway.http2"),
    "cli.grafana": (),
    "cli.kserve": (),
    "cli.systemd": ("config",),
    "perf": ("ipc.*", "common", "client.*", "protocols"),
    "cli": (*("ipc.*", "common", "config", "client"),
        *("supervisor", "supervisor.checks", "supervisor.host", "cli.*", "perf", "protocols")),
    # a replica of Ray Serve, which starts a server
    "ray": ("ipc", "config", "cli"),
    "__main__": ("cli",),
    # starts a server from a script or a test: modules of the package itself
    "": ("client",),
}  # fmt: skip


def _modules() -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for name, folder in FOLDERS.items():
        for path, _, files in os.walk(ROOT / folder):
            for file in files:
                if file.endswith(".py") and not file.endswith("_pb2.py"):
                    parts = Path(path, file).relative_to(ROOT / folder).with_suffix("").parts
                    parts = parts[:-1] if parts[-1] == "__init__" else parts
                    paths[".".join((name, *parts))] = Path(path, file)
    return paths


MODULES = _modules()


def _imported(path: Path) -> Iterator[str]:
    """Return the modules of the project that a file imports anywhere, for types, too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            imported_members = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in imported_members]
        else:
            continue
        yield from (name for name in names if name in MODULES)


IMPORTS = {module: set(_imported(path)) - {module} for module, path in MODULES.items()}


def package_of(module: str) -> str:
    path = MODULES[module]
    name = module if path.name == "__init__.py" else module.rpartition(".")[0]
    name = "shmserve.__main__" if module == "shmserve.__main__" else name
    return name.removeprefix("shmserve").removeprefix(".")


def may_import(importer: str, imported_module: str) -> bool:
    """Return whether the table lets a room import another one."""
    return importer == imported_module or any(
        imported_module == allowed_target
        or (
            allowed_target.endswith(".*")
            and (
                imported_module == allowed_target[:-2]
                or imported_module.startswith(allowed_target[:-1])
            )
        )
        for allowed_target in LAYERS.get(importer, ())
    )


def test_every_package_is_in_the_table() -> None:
    packages = {package_of(module) for module in MODULES if module not in LEAF_MODULES} - {""}
    packages = {name for name in packages if not name.startswith("bench")}
    assert packages == set(LAYERS) - {""}


def test_packages_import_as_the_table_allows() -> None:
    violations = sorted(
        f"{package_of(module)} -> {package_of(imported_module)}: {module} imports {imported_module}"
        for module, imported_modules in IMPORTS.items()
        if not module.startswith("bench")
        for imported_module in imported_modules - LEAF_MODULES - START_MODULES
        if not may_import(package_of(module), package_of(imported_module))
    )
    assert not violations, "\n".join(violations)


def find_cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for imported_module in sorted(imports[module]):
            if imported_module not in number:
                visit(imported_module)
            if imported_module in stack:
                lowest[module] = min(lowest[module], lowest[imported_module])
        if lowest[module] == number[module]:
            start = stack.index(module)
            component = sorted(stack[start:])
            del stack[start:]
            if len(component) > 1:
                cycles.append(component)

    for module in sorted(imports):
        if module not in number:
            visit(module)
    return cycles


def test_import_cycles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert find_cycles(imports) == [["d", "e"], ["a", "b", "c"]]
    assert find_cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_import_each_other() -> None:
    """Imports for types count, too: such modules share a third module."""
    assert find_cycles(IMPORTS) == []
