"""The schedulers of the models of an ensemble's steps, as the supervisor has published them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shmserve.errors import Unavailable
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.signature import Signature
from shmserve.scheduler.ensemble.flow import StepModels
from shmserve.scheduler.ensemble.graph import Graph, Step

# Backends that compute on tensors where they are; a Python model's are copied to the host for it,
# unless it says that they are not to be.
_ON_DEVICE = frozenset({"pytorch", "onnxruntime", "native"})
_STAYS = "FORCE_CPU_ONLY_INPUT_TENSORS"


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A model version that serves: its scheduler's endpoint, what it takes, and the one CUDA device
    of all its instances, if there is one."""

    endpoint: str
    config: ModelSpec
    signature: Signature
    device: int | None


class Targets(StepModels):
    """The models of an ensemble by name and version, "" for the latest. `changes` counts what may
    change how a request goes."""

    def __init__(self, graph: Graph) -> None:
        self._names = frozenset(step.model for step in graph.steps)
        self._known: dict[str, dict[str, Target]] = {}
        self._latest: dict[str, str] = {}
        self._of_steps: dict[int, Target] = {}  # as found since the last news
        self.changes = 0

    def publish(self, message: ModelPublished) -> None:
        """A version may be called, or is somewhere else now."""
        if message.name not in self._names:
            return
        self._of_steps.clear()
        versions = self._known.setdefault(message.name, {})
        known = versions.get(message.version)
        if known is None or known.config != message.config:
            signature = Signature(message.config, message.version)
            versions[message.version] = Target(
                message.endpoint, message.config, signature, _device(message.config)
            )
            self.changes += 1
        else:
            versions[message.version] = replace(known, endpoint=message.endpoint)
        if message.latest and self._latest.get(message.name) != message.version:
            self._latest[message.name] = message.version
            self.changes += 1

    def move(self, endpoint: str, successor: str) -> None:
        """Another scheduler serves what the one at `endpoint` did; "": none does. Until then a
        version that was withdrawn takes what requests have begun."""
        self._of_steps.clear()
        for versions in self._known.values():
            for version, target in list(versions.items()):
                if target.endpoint != endpoint:
                    continue
                if successor:
                    versions[version] = replace(target, endpoint=successor)
                else:
                    del versions[version]
                    self.changes += 1

    def find(self, step: Step) -> Target:
        """The target that runs a step now; raises Unavailable."""
        target = self._of_steps.get(step.index)
        if target is None:
            target = self._of_steps[step.index] = self._find(step)
        return target

    def _find(self, step: Step) -> Target:
        versions = self._known.get(step.model, {})
        target = versions.get(step.version or self._latest.get(step.model, ""))
        if target is None:
            version = f" version {step.version}" if step.version else ""
            raise Unavailable(f"model '{step.model}'{version} is not at ready state")
        return target

    def decoupled(self, step: Step) -> bool:
        return self.find(step).config.decoupled

    def optional(self, step: Step) -> frozenset[str]:
        signature = self.find(step).signature
        return frozenset(signature.inputs) - signature.required

    def device(self, step: Step) -> int | None:
        return self.find(step).device


def _device(config: ModelSpec) -> int | None:
    """The one device of all instances of a model that takes its inputs there, or None."""
    if config.backend not in _ON_DEVICE and config.parameters.get(_STAYS) != "no":
        return None
    if any(group.kind != "KIND_GPU" for group in config.instance_group):
        return None
    devices = {device for group in config.instance_group for device in group.gpus}
    return devices.pop() if len(devices) == 1 else None
