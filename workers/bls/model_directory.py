"""The model directory, a cache of the schedulers that serve the called models."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from shmserve.ipc.messages.control_requests import FindModel
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.links.supervisor import SupervisorLink

Key = tuple[str, str]  # a model's name, and its version or "" for the latest


@dataclass(frozen=True, slots=True, eq=False)
class BlsTarget:
    """A loaded model version.

    Attributes:
        endpoint: The endpoint of its scheduler.
        signature: The inputs and outputs of the model.
        decoupled: Whether it may send any number of responses to a request.
    """

    endpoint: str
    signature: Signature
    decoupled: bool


class ModelDirectory:
    """A thread-safe cache of the targets that the supervisor has reported."""

    def __init__(self, control: SupervisorLink) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._known: dict[Key, BlsTarget] = {}
        self._losses = 0

    def find(self, key: Key, ends_ns: int = 0) -> BlsTarget:
        """Return the target of a model. Query the supervisor if the target is not cached.

        The query of a model that is loaded on demand waits until the model is loaded.

        Args:
            key: The name and version of the model.
            ends_ns: The deadline by the monotonic clock; 0 for none.

        Raises:
            NotFound: There is no such model.
            Unavailable: The model is not loaded.
        """
        while (target := self._known.get(key)) is None:
            losses = self._losses
            patience_s = max(1e-6, (ends_ns - time.monotonic_ns()) / 1e9) if ends_ns else 0.0
            found = self._control.ask(FindModel, *key, patience_s)
            with self._lock:
                # After another loss, the supervisor's response may be outdated.
                if losses == self._losses:
                    self._known[key] = _target(found)
        return target

    def knows(self, key: Key, target: BlsTarget) -> bool:
        """Return whether `target` is the cached target of `key`."""
        return self._known.get(key) is target

    def invalidate(self, model: str) -> None:
        """Remove every version of a model, so that `find` queries the supervisor again."""
        with self._lock:
            for key in [key for key in self._known if key[0] == model]:
                del self._known[key]

    def doubt(self, key: Key, endpoint: str) -> None:
        """Remove the target of `key` if its endpoint is still `endpoint`."""
        with self._lock:
            target = self._known.get(key)
            if target is not None and target.endpoint == endpoint:
                del self._known[key]

    def lose(self, endpoint: str) -> None:
        """Remove every target at `endpoint`, whose scheduler was lost."""
        with self._lock:
            self._losses += 1
            for key in [key for key, at in self._known.items() if at.endpoint == endpoint]:
                del self._known[key]


def _target(found: dict[str, Any]) -> BlsTarget:
    config = ModelSpec.of(found["config"])
    return BlsTarget(found["endpoint"], Signature(config, found["version"]), config.decoupled)
