"""Both servers: a group of scripts is played against each in turn."""

import os
import socket
import tempfile
import textwrap
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench.system import servers
from bench.system.peer import Missing, TritonFiles, find_triton
from tests.differential import recorder
from tests.differential.calls import Caller
from tests.differential.player import Player, Record
from tests.differential.script import Group, Model
from tests.support.gates import Gate
from tests.support.waiting import until

PEERS_FOLDER = Path(os.environ.get("SHMSERVE_PEERS", Path.home() / ".cache/shmserve-peers"))


@dataclass(frozen=True)
class Watched:
    """A product with additional variables, one of which is the path of the gate."""

    product: servers.Product
    variables: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.product.name

    def command(self, repository: Path, ports: servers.Ports, scratch: Path) -> list[str]:
        return self.product.command(repository, ports, scratch)

    def environment(self) -> dict[str, str]:
        return self.product.environment() | {"CUDA_VISIBLE_DEVICES": ""} | dict(self.variables)


def triton() -> TritonFiles:
    """Return the folder of Triton; raise `Missing` if there is none."""
    return find_triton(PEERS_FOLDER)


def products() -> list[servers.Product]:
    """Return shmserve and Triton; raise `Missing` without Triton."""
    return [servers.Shmserve(), servers.Triton(triton())]


def run_group(product: servers.Product, group: Group) -> dict[str, Record | str]:
    """Return each script's record, or the reason why it did not complete, by its name."""
    with tempfile.TemporaryDirectory(prefix="sd-") as folder:
        path = Path(folder)
        models = [model for script in group.scripts for model in script.models]
        folders = [write(path / "models", model) for model in models]
        with closing(Gate(path / "gate")) as gate:
            watched = Watched(product, {**group.environment, "GATE": str(gate.path)})
            flags = [*group.flags, *_own_flags(product)]
            with servers.running(watched, folders, flags, notes=[]) as server:
                # Triton starts to listen for HTTP before it does for the metrics.
                until("metrics", lambda: _is_open(server.ports.metrics))
                caller = Caller(server.address("grpc"))
                records: dict[str, Record | str] = {}
                for script in group.scripts:
                    player = Player(caller, server.ports.metrics, gate, script)
                    try:
                        records[script.name] = player.run()
                    except (OSError, AssertionError) as error:
                        exit_status = server.process.poll()
                        exit_note = (
                            "" if exit_status is None else f" (it has ended, with {exit_status})"
                        )
                        records[script.name] = f"{product.name}{exit_note}: {error}"
        return records


def _is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _own_flags(product: servers.Product) -> list[str]:
    """Return the flag for the folder of Triton's caches, which it searches in /opt by default."""
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


__all__ = ["Missing", "products", "run_group", "triton", "write"]
