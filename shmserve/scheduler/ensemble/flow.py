"""The data flow of an ensemble: its graph, plans for outputs, and the flow of a request (pure).

    Graph   the steps of the configuration and the tensors between them
    Plan    the steps that some outputs need, and where each tensor goes; shared by many requests
    Flow    one request: tensors go in, steps to run and responses come out
    Target  the scheduler that serves the model of a step, as the supervisor has published it

The origin of a tensor is the last decoupled step before it, or `ONCE_PER_REQUEST`. Tensors of one
origin have the index of that step's response. A step runs once for each index at which all tensors
that it reads are present. Tensors with the origin `ONCE_PER_REQUEST` are present at every index. A
response of the ensemble has all outputs with one index.

The outputs of a step that does not run are `SKIPPED`, and a step that requires such a tensor does
not run either. An output that is missing in a model's response is `ABSENT`. A step that requires it
fails as if the client had omitted the input. In both cases, optional inputs are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from shmserve.errors import Unavailable
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.schemas import BoundedCache, Schemas
from shmserve.ipc.tensors.signature import Signature
from shmserve.scheduler.ensemble.memory import ABSENT, SKIPPED, TensorKind, Value

ONCE_PER_REQUEST = -1  # the origin of tensors that exist once per request
RESPONSE = -1  # the index of the response among the readers of tensors; steps have indices from 0
_ANY_COUNT = -1  # the number of uses is unknown until the request ends

_CONDITION_PARAMETER = "step[{}].condition"
_MAX_STEP_TEMPLATES = 256  # cached `StepTemplate`s of a step

# The tensors of one step or response: pairs of a name and a value.
Tensors = Sequence[tuple[str, Value]]


@dataclass(frozen=True, slots=True, eq=False)
class StepNode:
    """A step of an ensemble: a model to run, and the tensors that connect it with other steps.

    Attributes:
        version: The model's version; "" is the latest.
        inputs: The ensemble's tensor for each input of the model.
        outputs: The ensemble's tensor for each output of the model.
    """

    index: int
    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    condition: str = ""  # the tensor that decides whether the step runs; "": always
    required_tensors: frozenset[str] = field(init=False)  # the tensors that the step waits for

    def __post_init__(self) -> None:
        tensors = {*self.inputs.values(), *([self.condition] if self.condition else [])}
        object.__setattr__(self, "required_tensors", frozenset(tensors))


@dataclass(frozen=True, eq=False)
class Graph:
    """The steps of an ensemble in the order of its configuration, and its inputs and outputs.

    Attributes:
        max_inflight: The maximum number of requests to a step in flight, in total for all requests
            to the ensemble; 0: unlimited.
    """

    name: str
    steps: tuple[StepNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_inflight: int = 0

    @classmethod
    def from_config(cls, config: ModelSpec) -> Graph:
        """Return the graph of an ensemble's configuration."""
        scheduling = config.ensemble_scheduling
        assert scheduling is not None
        steps = tuple(
            StepNode(i, step.model_name, step.version, step.input_map, step.output_map, condition)
            for i, step in enumerate(scheduling.step)
            for condition in (config.parameters.get(_CONDITION_PARAMETER.format(i), ""),)
        )
        inputs = tuple(tensor.name for tensor in config.input)
        outputs = tuple(tensor.name for tensor in config.output)
        return cls(config.name, steps, inputs, outputs, scheduling.max_inflight_requests)

    @cached_property
    def writers(self) -> Mapping[str, StepNode]:
        """Return the step that makes each tensor, by the tensor's name; inputs are omitted."""
        return {tensor: step for step in self.steps for tensor in step.outputs.values()}

    @cached_property
    def conditions(self) -> frozenset[str]:
        """Return the names of the tensors that decide whether a step runs."""
        return frozenset(step.condition for step in self.steps if step.condition)

    def needed_steps(self, outputs: Iterable[str]) -> frozenset[int]:
        """Return the indices of the steps that these outputs depend on."""
        step_indices: set[int] = set()
        tensors = list(outputs)
        while tensors:
            step = self.writers.get(tensors.pop())
            if step is not None and step.index not in step_indices:
                step_indices.add(step.index)
                tensors += step.required_tensors
        return frozenset(step_indices)

    def origins(self, is_decoupled: Callable[[StepNode], bool]) -> dict[str, int]:
        """Return the origin of each tensor by name.

        The origin is the index of the last decoupled step before the tensor, or ONCE_PER_REQUEST.
        Tensors of steps in cycles are omitted.

        Args:
            is_decoupled: Returns whether the model of a step gives any number of responses.
        """
        tensor_origins = dict.fromkeys(self.inputs, ONCE_PER_REQUEST)
        waiting_steps = list(self.steps)
        known_tensors = tensor_origins.keys()
        while ready_steps := [s for s in waiting_steps if s.required_tensors <= known_tensors]:
            waiting_steps = [step for step in waiting_steps if step not in ready_steps]
            for step in ready_steps:
                origin = step.index if is_decoupled(step) else origin_of(step, tensor_origins)
                tensor_origins.update(dict.fromkeys(step.outputs.values(), origin))
        return tensor_origins


def origin_of(step: StepNode, origins: Mapping[str, int]) -> int:
    """Return the common origin of the tensors that a step reads: a step, or ONCE_PER_REQUEST."""
    return max(origins[tensor] for tensor in step.required_tensors)


@dataclass(frozen=True, slots=True, eq=False)
class ModelProperties:
    """The properties of a step's model that a plan depends on.

    Attributes:
        decoupled: Whether the model gives any number of responses to a request.
        device: The CUDA device whose memory the model reads and writes; None: the host's memory.
    """

    decoupled: bool  # a request may have any number of responses
    optional_inputs: frozenset[str]  # the inputs that a request may omit
    device: int | None  # the CUDA device of its inputs and outputs; None: host memory


class TensorReader:
    """A reader of tensors: a step, or the response with the index `RESPONSE`.

    Attributes:
        tensors: The tensors that the reader waits for, and whether each exists once per request.
        runs_once: Whether the reader runs at most once per request, because all its tensors exist
            once.
        first_keys: The keys (tensor, response index) of the `tensors` for the index 0.
    """

    def __init__(self, index: int, tensors: Iterable[str], origins: Mapping[str, int]) -> None:
        self.index = index
        self.tensors = tuple((tensor, origins[tensor] == ONCE_PER_REQUEST) for tensor in tensors)
        self.runs_once = all(is_once for _, is_once in self.tensors)
        self.first_keys = tuple((tensor, 0) for tensor, _ in self.tensors)  # response 0


class PlannedStep(TensorReader):
    """A step of a plan, with the properties of its model.

    Attributes:
        inputs: The model's inputs: the name, the ensemble's tensor, and whether it is optional.
        repeated_tensors: The tensors that several inputs read, once for each further input.
        templates: A cache that step_messages.py uses: the `StepTemplate` of earlier requests by the
            kinds of their inputs.
        response_schemas: A cache that step_messages.py uses: the unpacked schemas of responses.
    """

    def __init__(self, step: StepNode, model: ModelProperties, origins: Mapping[str, int]) -> None:
        super().__init__(step.index, sorted(step.required_tensors), origins)
        self.node = step
        self.decoupled = model.decoupled
        self.device = model.device
        optional_inputs = model.optional_inputs
        self.inputs = tuple((name, t, name in optional_inputs) for name, t in step.inputs.items())
        tensors = list(step.inputs.values())
        self.repeated_tensors = tuple(t for i, t in enumerate(tensors) if t in tensors[:i])
        self.templates: BoundedCache[Any, Any] = BoundedCache(_MAX_STEP_TEMPLATES)
        self.response_schemas: dict[bool, Schemas[Any]] = {}


class TensorRoute(NamedTuple):
    """The uses of a tensor's values by steps and by responses.

    Attributes:
        use_count: How often each value is used; -1: any number of times.
        is_per_request: Whether the tensor exists once per request.
        readers: The steps that wait for the tensor, and the response if it contains the tensor.
        only_reader: The reader, if it is the only one and waits for no other tensor.
    """

    use_count: int  # how often each value is used; -1: any number of times
    is_per_request: bool  # whether the tensor exists once per request
    readers: tuple[TensorReader, ...]
    only_reader: TensorReader | None


class Plan:
    """The steps and the tensors' routes that requests for the same outputs have in common.

    Attributes:
        routes: The route of each tensor. A tensor that nothing uses has no route.
        devices: The CUDA device of each tensor that stays in a device's memory.
    """

    def __init__(
        self, graph: Graph, outputs: Iterable[str], model_of: Callable[[StepNode], ModelProperties]
    ) -> None:
        """Make a plan.

        Args:
            graph: The ensemble's graph.
            outputs: The outputs that the requests ask for.
            model_of: Returns the properties of a step's model; raises Unavailable if the model is
                not served.
        """
        requested_outputs = tuple(dict.fromkeys(outputs))
        needed_steps = graph.needed_steps(requested_outputs)
        origins = graph.origins(lambda step: model_of(step).decoupled)
        self.outputs = frozenset(requested_outputs)
        needed_nodes = [step for step in graph.steps if step.index in needed_steps]
        self.steps = {s.index: PlannedStep(s, model_of(s), origins) for s in needed_nodes}
        self.response = TensorReader(RESPONSE, requested_outputs, origins)
        all_readers = (*self.steps.values(), self.response)
        self.routes: dict[str, TensorRoute] = {}
        for tensor, origin in origins.items():
            readers = tuple(reader for reader in all_readers if (tensor, 0) in reader.first_keys)
            if readers:
                is_once = origin == ONCE_PER_REQUEST
                has_many_uses = is_once and not all(reader.runs_once for reader in readers)
                is_only = len(readers) == 1 and len(readers[0].tensors) == 1
                use_count = _ANY_COUNT if has_many_uses else len(readers)
                only_reader = readers[0] if is_only else None
                self.routes[tensor] = TensorRoute(use_count, is_once, readers, only_reader)
        self.devices = self._devices(graph.conditions)

    def _devices(self, conditions: frozenset[str]) -> dict[str, int]:
        """Return the device of each tensor whose writer and readers are all on that device."""
        devices: dict[str, int] = {}
        for step in self.steps.values():
            for tensor in step.node.outputs.values():
                route, device = self.routes.get(tensor), step.device
                if device is None or route is None or tensor in conditions:
                    continue
                readers = (self.steps.get(reader.index) for reader in route.readers)
                if all(reader is not None and reader.device == device for reader in readers):
                    devices[tensor] = device
        return devices


class Firing(NamedTuple):
    """One run of a step, whose inputs are complete.

    Attributes:
        response_index: The index of the decoupled step's response that the inputs are from, or 0.
        inputs: The values by the model's names of the inputs. The step must release each value
            once.
        kinds: The datatype and shape of each input of the model; None for omitted inputs.
    """

    step: PlannedStep
    response_index: int  # of the decoupled step whose response has the inputs; else 0
    inputs: dict[str, Value]
    kinds: tuple[TensorKind | None, ...]

    def release(self) -> None:
        """Release the inputs of a step that will not run."""
        for value in self.inputs.values():
            value.release()


class Flow:
    """The data flow of one request. A value is released once nothing in the flow uses it.

    Attributes:
        has_responded: Whether there has been a response.
        firings: The runs of steps that must be submitted.
        responses: The responses to send. Each value must be released once for its response.
        absent_outputs: The outputs that a response lacks because no step has returned them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.has_responded = False
        self._values: dict[tuple[str, int], Value] = {}  # by tensor and response index
        # Remaining uses of values with more than one use.
        self._remaining_uses: dict[tuple[str, int], int] = {}
        self._fired_readers: set[tuple[int, int]] = set()  # by the indices of reader and response
        # The number of responses so far, by the index of a decoupled step.
        self._response_counts: dict[int, int] = {}
        self.firings: list[Firing] = []  # runs of steps to submit
        self.responses: list[dict[str, Value]] = []  # to send; values by output
        self.absent_outputs: set[str] = set()

    def begin(self, inputs: Tensors) -> None:
        """Store the request's inputs; omitted inputs are ABSENT."""
        self._store_tensors(inputs, 0)

    def store_response(self, step: PlannedStep, response_index: int, tensors: Tensors) -> None:
        """Store the tensors of a step's response; omitted outputs are ABSENT."""
        if step.decoupled:
            response_index = self._response_counts.get(step.index, 0)
            self._response_counts[step.index] = response_index + 1
        self._store_tensors(tensors, response_index)

    def close(self) -> None:
        """Release all values, because the request has ended or failed."""
        for firing in self.firings:
            firing.release()
        for response in self.responses:
            for value in response.values():
                value.release()
        for value in self._values.values():
            value.release()
        self._values.clear()
        self.firings.clear()
        self.responses.clear()

    def _store_tensors(self, tensors: Tensors, response_index: int) -> None:
        """Store a response's tensors, and start the steps and responses that are now complete."""
        routes = self.plan.routes
        for tensor, value in tensors:
            route = routes.get(tensor)
            if route is None:
                value.release()
            elif route.only_reader is None:
                self._values[tensor, response_index] = value
                if route.use_count != 1:
                    self._remaining_uses[tensor, response_index] = route.use_count
        for tensor, value in tensors:
            route = routes.get(tensor)
            if route is None:
                continue
            if route.only_reader is not None:  # this reader needs no other tensor
                self._start(route.only_reader, response_index, {tensor: value})
            else:
                for reader in route.readers:
                    if reader.runs_once or not route.is_per_request:
                        self._fire(reader, response_index)
                    else:
                        for ready_index in self._find_response_indices(reader):
                            self._fire(reader, ready_index)

    def _find_response_indices(self, reader: TensorReader) -> Iterable[int]:
        """Return the response indices for which a reader may now have all its tensors."""
        for tensor, is_once in reader.tensors:
            if not is_once:
                return sorted([index for name, index in self._values if name == tensor])
        return ()

    def _fire(self, reader: TensorReader, response_index: int) -> None:
        """Start a reader, which is a step or a response, if all tensors that it reads exist.

        The tensors are those of `response_index`, or exist once per request. The reader is started
        at most once for each index.
        """
        firing_key = (reader.index, response_index)
        if firing_key in self._fired_readers:
            return
        values = self._values
        keys: Sequence[tuple[str, int]] = reader.first_keys
        if not reader.runs_once:
            keys = [
                (tensor, 0 if is_once else response_index) for tensor, is_once in reader.tensors
            ]
        for key in keys:
            if key not in values:
                return
        self._fired_readers.add(firing_key)
        reader_values: dict[str, Value] = {}  # by name; the reader must release each value once
        for key in keys:
            remaining_uses = self._remaining_uses.get(key)
            if remaining_uses is None:
                reader_values[key[0]] = values.pop(key)
                continue
            value = reader_values[key[0]] = values[key]
            value.acquire()
            if remaining_uses == 2:
                del self._remaining_uses[key]
            elif remaining_uses != _ANY_COUNT:
                self._remaining_uses[key] = remaining_uses - 1
        self._start(reader, response_index, reader_values)

    def _start(self, reader: TensorReader, response_index: int, values: dict[str, Value]) -> None:
        """Add a run of a step, or a response, with these values.

        The run or the response must release each value once.
        """
        if isinstance(reader, PlannedStep):
            self._run_or_skip(reader, response_index, values)
        else:
            self._respond(values)

    def _run_or_skip(
        self, step: PlannedStep, response_index: int, values: dict[str, Value]
    ) -> None:
        condition = step.node.condition
        is_skipped = bool(condition) and not values[condition].is_true
        inputs: dict[str, Value] = {}
        kinds: list[TensorKind | None] = []
        for name, tensor, is_optional in step.inputs:
            value = values[tensor]
            kinds.append(value.kind)
            if value.kind is not None:
                inputs[name] = value
            elif value is SKIPPED and not is_optional:
                is_skipped = True
        if is_skipped:
            for value in values.values():
                value.release()
            self.store_response(
                step, response_index, [(tensor, SKIPPED) for tensor in step.node.outputs.values()]
            )
            return
        for tensor in step.repeated_tensors:
            values[tensor].acquire()
        if condition and condition not in step.node.inputs.values():
            values[condition].release()
        self.firings.append(Firing(step, response_index, inputs, tuple(kinds)))

    def _respond(self, values: dict[str, Value]) -> None:
        self.has_responded = True
        response: dict[str, Value] = {}
        for name, value in values.items():
            if value.kind is not None:
                response[name] = value
            elif value is ABSENT:
                self.absent_outputs.add(name)
        self.responses.append(response)


# Backends that compute on a device's tensors without a copy to the host. The inputs of a Python
# model are copied to the host unless its parameter FORCE_CPU_ONLY_INPUT_TENSORS is "no".
_DEVICE_BACKENDS = frozenset({"pytorch", "onnxruntime", "native"})
_KEEP_ON_DEVICE = "FORCE_CPU_ONLY_INPUT_TENSORS"


@dataclass(frozen=True, slots=True, eq=False)
class Target(ModelProperties):
    """A model version that is served: its scheduler's endpoint and its signature."""

    endpoint: str
    config: ModelSpec
    signature: Signature

    @classmethod
    def from_message(cls, message: ModelPublished) -> Target:
        """Return the target that a message publishes."""
        config = message.config
        signature = Signature(config, message.version)
        optional_inputs = frozenset(signature.inputs) - signature.required_inputs
        return cls(
            config.decoupled, optional_inputs, _device(config), message.endpoint, config, signature
        )


class Targets:
    """The served versions of the models of an ensemble's steps, by name and version.

    Attributes:
        change_count: The number of changes so far that have made earlier plans invalid.
    """

    def __init__(self, graph: Graph) -> None:
        self._names = frozenset(step.model for step in graph.steps)
        self._versions: dict[str, dict[str, Target]] = {}
        self._latest_versions: dict[str, str] = {}
        # The target of each step by the step's index: a cache that each publication clears.
        self._targets_by_step: dict[int, Target] = {}
        self.change_count = 0

    def publish(self, message: ModelPublished) -> None:
        """Register a version that is served, or its new endpoint."""
        if message.name not in self._names:
            return
        self._targets_by_step.clear()
        versions = self._versions.setdefault(message.name, {})
        target = versions.get(message.version)
        if target is None or target.config != message.config:
            versions[message.version] = Target.from_message(message)
            self.change_count += 1
        else:
            versions[message.version] = replace(target, endpoint=message.endpoint)
        if message.latest and self._latest_versions.get(message.name) != message.version:
            self._latest_versions[message.name] = message.version
            self.change_count += 1

    def replace_scheduler(self, endpoint: str, successor: str) -> None:
        """Replace the scheduler at `endpoint` by its successor.

        If `successor` is empty, the versions of the scheduler are removed. A withdrawn version
        stays until then, because requests that have begun still use it.
        """
        self._targets_by_step.clear()
        for versions in self._versions.values():
            for version, target in list(versions.items()):
                if target.endpoint != endpoint:
                    continue
                if successor:
                    versions[version] = replace(target, endpoint=successor)
                else:
                    del versions[version]
                    self.change_count += 1

    def find(self, step: StepNode) -> Target:
        """Return the target that runs a step now.

        Raises:
            Unavailable: The step's model is not served.
        """
        target = self._targets_by_step.get(step.index)
        if target is None:
            target = self._targets_by_step[step.index] = self._find(step)
        return target

    def _find(self, step: StepNode) -> Target:
        versions = self._versions.get(step.model, {})
        target = versions.get(step.version or self._latest_versions.get(step.model, ""))
        if target is None:
            version = f" version {step.version}" if step.version else ""
            raise Unavailable(f"model '{step.model}'{version} is not at ready state")
        return target


def _device(config: ModelSpec) -> int | None:
    """Return the CUDA device of all instances if the model reads inputs there, otherwise None."""
    if config.backend not in _DEVICE_BACKENDS and config.parameters.get(_KEEP_ON_DEVICE) != "no":
        return None
    if any(group.kind != "KIND_GPU" for group in config.instance_group):
        return None
    devices = {device for group in config.instance_group for device in group.gpus}
    return devices.pop() if len(devices) == 1 else None
