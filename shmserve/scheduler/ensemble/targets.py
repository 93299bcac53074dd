"""The schedulers of the models of an ensemble's steps, as the supervisor has published them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shmserve.errors import Unavailable
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.signature import Signature
from shmserve.scheduler.ensemble.flow import Graph, ModelProperties, StepNode

# These backends compute on tensors where they are. A Python model's inputs are copied to the host
# unless its configuration has the parameter.
_ON_DEVICE = frozenset({"pytorch", "onnxruntime", "native"})
_KEEP_ON_DEVICE = "FORCE_CPU_ONLY_INPUT_TENSORS"


@dataclass(frozen=True, slots=True, eq=False)
class Target(ModelProperties):
    """A model version that is served: its scheduler's endpoint and its signature."""

    endpoint: str
    config: ModelSpec
    signature: Signature

    @classmethod
    def of(cls, message: ModelPublished) -> Target:
        """Return the target that a message publishes."""
        config = message.config
        signature = Signature(config, message.version)
        optional = frozenset(signature.inputs) - signature.required
        return cls(config.decoupled, optional, _device(config), message.endpoint, config, signature)


class Targets:
    """The models of an ensemble by name and version.

    Attributes:
        changes: The number of changes after which earlier plans are no longer valid.
    """

    def __init__(self, graph: Graph) -> None:
        self._names = frozenset(step.model for step in graph.steps)
        self._known: dict[str, dict[str, Target]] = {}
        self._latest: dict[str, str] = {}
        self._of_steps: dict[int, Target] = {}  # found since the last publication
        self.changes = 0

    def publish(self, message: ModelPublished) -> None:
        """Register a version that is served, or its new endpoint."""
        if message.name not in self._names:
            return
        self._of_steps.clear()
        versions = self._known.setdefault(message.name, {})
        known = versions.get(message.version)
        if known is None or known.config != message.config:
            versions[message.version] = Target.of(message)
            self.changes += 1
        else:
            versions[message.version] = replace(known, endpoint=message.endpoint)
        if message.latest and self._latest.get(message.name) != message.version:
            self._latest[message.name] = message.version
            self.changes += 1

    def move(self, endpoint: str, successor: str) -> None:
        """Replace the scheduler at `endpoint` by its successor; "": its versions are removed.

        A version that was withdrawn stays until then, for requests that have begun.
        """
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

    def find(self, step: StepNode) -> Target:
        """Return the target that runs a step now.

        Raises:
            Unavailable: The step's model is not served.
        """
        target = self._of_steps.get(step.index)
        if target is None:
            target = self._of_steps[step.index] = self._find(step)
        return target

    def _find(self, step: StepNode) -> Target:
        versions = self._known.get(step.model, {})
        target = versions.get(step.version or self._latest.get(step.model, ""))
        if target is None:
            version = f" version {step.version}" if step.version else ""
            raise Unavailable(f"model '{step.model}'{version} is not at ready state")
        return target


def _device(config: ModelSpec) -> int | None:
    """Return the one CUDA device of all instances of a model that takes its inputs there."""
    if config.backend not in _ON_DEVICE and config.parameters.get(_KEEP_ON_DEVICE) != "no":
        return None
    if any(group.kind != "KIND_GPU" for group in config.instance_group):
        return None
    devices = {device for group in config.instance_group for device in group.gpus}
    return devices.pop() if len(devices) == 1 else None
