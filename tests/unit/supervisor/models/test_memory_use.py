"""The memory of models, of which each process counts for those that it runs for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.supervisor.models import residency
from shmserve.supervisor.models.residency import MemoryUse


@dataclass(eq=False)
class Version:
    """A version with these processes."""

    spec: SimpleNamespace
    running: list[int]
    loaded: bool
    instances: SimpleNamespace

    def pids(self) -> list[int]:
        """They."""
        return self.running


def version(name: str, *pids: int, loaded: bool = True, device: int = 0) -> Any:
    instances = SimpleNamespace(device_byte_size=device)
    return Version(SimpleNamespace(name=name), list(pids), loaded, instances)


def model(name: str, *versions: Any) -> Any:
    return SimpleNamespace(name=name, versions=versions)


def test_models_are_as_large_as_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {1: 100, 2: 60, 3: 40}
    monkeypatch.setattr(residency, "private_bytes", sizes.__getitem__)
    a, b, coming = version("a", 1, 2, device=7), version("b", 2, 3), version("c", loaded=False)
    use = MemoryUse()

    def found(*models: Any) -> list[int]:
        return [use.byte_size(each) for each in models]

    assert found(model("a", a)) == [0], "nothing is known"
    asyncio.run(use.measure([a, b, coming]))
    # The second process is of two of them. What is coming will have as much as others.
    assert found(model("a", a), model("b", b), model("c", coming)) == [137, 70, 103]
    sizes[1] = 1000
    asyncio.run(use.measure([a, b]))
    assert found(model("a", a)) == [137], "it was looked at just now"
    asyncio.run(use.measure([b]))
    assert found(model("a", version("a", loaded=False))) == [137], "as much as it had"
    assert found(model("a", a, version("a", loaded=False))) == [274]
