"""The model directory, a cache of service discovery: which scheduler serves a model that is
called."""

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
    """A model version that serves: its scheduler's endpoint, what it takes, and whether it gives
    any number of responses to a request."""

    endpoint: str
    signature: Signature
    decoupled: bool


class ModelDirectory:
    """The known targets. For any thread."""

    def __init__(self, control: SupervisorLink) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._known: dict[Key, BlsTarget] = {}
        self._losses = 0

    def find(self, key: Key, ends_ns: int = 0) -> BlsTarget:
        """The target that serves it; waits for the supervisor where that is not known, and for a
        model on demand until it is loaded, or the time `ends_ns` has come (0: none).

        Raises NotFound or Unavailable when nobody does.
        """
        while (target := self._known.get(key)) is None:
            losses = self._losses
            patience_s = max(1e-6, (ends_ns - time.monotonic_ns()) / 1e9) if ends_ns else 0.0
            found = self._control.ask(FindModel, *key, patience_s)
            with self._lock:
                # Otherwise what was found may be older than the news of a loss.
                if losses == self._losses:
                    self._known[key] = _target(found)
        return target

    def knows(self, key: Key, target: BlsTarget) -> bool:
        """Whether `target` is what `find` says."""
        return self._known.get(key) is target

    def invalidate(self, model: str) -> None:
        """Ask anew for every version of a model."""
        with self._lock:
            for key in [key for key in self._known if key[0] == model]:
                del self._known[key]

    def doubt(self, key: Key, endpoint: str) -> None:
        """Ask anew if it is still `endpoint` that is known."""
        with self._lock:
            target = self._known.get(key)
            if target is not None and target.endpoint == endpoint:
                del self._known[key]

    def lose(self, endpoint: str) -> None:
        """Drop every target at `endpoint`: its scheduler was lost."""
        with self._lock:
            self._losses += 1
            for key in [key for key, at in self._known.items() if at.endpoint == endpoint]:
                del self._known[key]


def _target(found: dict[str, Any]) -> BlsTarget:
    config = ModelSpec.of(found["config"])
    return BlsTarget(found["endpoint"], Signature(config, found["version"]), config.decoupled)
