"""Both servers: a group of scripts is played against each, one after the other."""

import os
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.system import servers
from bench.system.peer import Missing, TritonFiles, find_triton
from tests.differential import recorder
from tests.differential.calls import Caller
from tests.differential.player import Player, Record
from tests.differential.script import Group, Model
from tests.support.gates import Gate

PEERS = Path(os.environ.get("SHMSERVE_PEERS", Path.home() / ".cache/shmserve-peers"))


@dataclass(frozen=True)
class Watched:
    """A product with more variables, one of which is where the gate is."""

    product: servers.Product
    more: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.product.name

    def command(self, repository: Path, ports: servers.Ports, scratch: Path) -> list[str]:
        return self.product.command(repository, ports, scratch)

    def environment(self) -> dict[str, str]:
        """The product's, and more."""
        return self.product.environment() | {"CUDA_VISIBLE_DEVICES": ""} | dict(self.more)


def triton() -> TritonFiles:
    """Where Triton is; raises `Missing`."""
    return find_triton(PEERS)


def products() -> list[servers.Product]:
    """shmserve and Triton; raises `Missing` without the second."""
    return [servers.Shmserve(), servers.Triton(triton())]


def play(product: servers.Product, group: Group) -> dict[str, Record | str]:
    """Each script's record by its name, or why it came to no end."""
    with tempfile.TemporaryDirectory(prefix="sd-") as folder:
        path = Path(folder)
        models = [model for script in group.scripts for model in script.models]
        folders = [write(path / "models", model) for model in models]
        with _gate(path / "gate") as gate:
            watched = Watched(product, {**group.environment, "GATE": str(gate.path)})
            flags = [*group.flags, *_own_flags(product)]
            with servers.running(watched, folders, flags, notes=[]) as server:
                caller = Caller(server.address("grpc"))
                records: dict[str, Record | str] = {}
                for script in group.scripts:
                    player = Player(caller, server.ports.metrics, gate, script)
                    try:
                        records[script.name] = player.play()
                    except (OSError, AssertionError) as error:
                        died = server.process.poll()
                        ended = "" if died is None else f" (it has ended, with {died})"
                        records[script.name] = f"{product.name}{ended}: {error}"
        return records


def _own_flags(product: servers.Product) -> list[str]:
    """Where Triton's caches are: it looks for them in /opt."""
    if not isinstance(product, servers.Triton):
        return []
    return [f"--cache-directory={product.files.binary.parent.parent / 'caches'}"]


def write(repository: Path, model: Model) -> Path:
    folder = repository / model.name
    (folder / "1").mkdir(parents=True)
    config = textwrap.dedent(model.config)
    (folder / "config.pbtxt").write_text(f'name: "{model.name}"\n{config}')
    if 'backend: "python"' in config:
        (folder / "1" / "model.py").write_text(recorder.text(model))
    for name, content in model.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@contextmanager
def _gate(path: Path) -> Iterator[Gate]:
    gate = Gate(path)
    try:
        yield gate
    finally:
        gate.close()


__all__ = ["Missing", "play", "products", "triton", "write"]
