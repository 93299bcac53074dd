"""A model's typed configuration: config.pbtxt, normalised and validated by the supervisor.

The configuration is sent as JSON and decoded by the receiver. Fields have the names and the units
of config.pbtxt; some values have a simpler form. A field that is absent in the JSON has the default
of its class. Datatypes are the protocol's ("FP32").
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any, Self

from shmserve.ipc.tensors.datatypes import FROM_CONFIG
from shmserve.ipc.tensors.padding import Padding
from shmserve.ipc.transport.frames import Document, Record, from_map

# The built-in backends, listed because a scan of the installed packages would take longer than the
# import of a class. Other packages register backends by entry points of `BACKEND_GROUP`.
BUILT_IN_BACKENDS = {
    "ascend": "shmserve.workers.backends.ascend:AscendBackend",
    "llm": "shmserve.workers.backends.llm:LlmBackend",
    "native": "shmserve.workers.backends.native:NativeBackend",
    "onnxruntime": "shmserve.workers.backends.onnx:OnnxBackend",
    "python": "shmserve.workers.backends.python:PythonBackend",
    "pytorch": "shmserve.workers.backends.pytorch:PytorchBackend",
    "vllm": "shmserve.workers.backends.vllm:VllmBackend",
}
BACKEND_GROUP = "shmserve.backends"
# Names of parameters in the configurations of models.
STRATEGY_PARAMETER = "batching_strategy"
TARGET_PARAMETER = "target_p99_ms"
MAX_STREAMS = "max_streams"
MIN_INSTANCES = "min_instances"
MAX_INSTANCES = "max_instances"
IDLE_UNLOAD = "idle_unload_secs"
EXECUTION_TIMEOUT = "execution_timeout_seconds"
PADDING = "padding"
ENVIRONMENT = "environment"  # of a model class; configurations set ENVIRONMENT_PATH
ENVIRONMENT_PATH = "EXECUTION_ENV_PATH"
# The names of the parameters that a model may set when it completes its configuration. The next
# constants add the parameters that every backend has, and those that the server or any backend
# reads.
MODEL_SETTINGS = (
    *(STRATEGY_PARAMETER, TARGET_PARAMETER, MAX_STREAMS, MIN_INSTANCES, MAX_INSTANCES, PADDING),
)
KNOWN_SETTINGS = (*MODEL_SETTINGS, IDLE_UNLOAD, EXECUTION_TIMEOUT, ENVIRONMENT_PATH)
KNOWN_PARAMETERS = (
    *KNOWN_SETTINGS,
    *("class", ENVIRONMENT),
    *("FORCE_CPU_ONLY_INPUT_TENSORS", "TORCH_COMPILE_OPTIONAL_PARAMETERS", "INFERENCE_MODE"),
    *("DISABLE_OPTIMIZED_EXECUTION", "INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"),
    *("NUM_THREADS", "NUM_INTEROP_THREADS", "intra_op_thread_count", "inter_op_thread_count"),
    *("execution_mode", "engine", "device_id"),
)
LARGEST_MAX_STREAMS = 65_536
# Limited, because each instance is a process with an entry in the supervisor.
LARGEST_INSTANCE_BOUND = 4096
SHORTEST_TARGET_MS = 0.001
LONGEST_TARGET_MS = 86_400_000.0
LONGEST_IDLE_S = 1_000_000.0
# The metric of decoupled models' time to the first response. `model_metrics` in a configuration
# refers to the metric by its family, and may replace its buckets.
FIRST_RESPONSE_FAMILY = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
_NUMBER = re.compile(r"[-+.0-9eE]+")  # stricter than the syntax of float()


class Strategy(StrEnum):
    """A batching strategy; the first is the default."""

    PREFER_BATCH = "prefer_batch"  # wait up to the maximum delay for a fuller batch
    PREFER_LATENCY = "prefer_latency"  # execute queued requests as soon as an instance is free
    ADAPTIVE = "adaptive"  # wait only if waiting pays and the latency target is met


def parse_strategy(text: str) -> Strategy | None:
    """Return the strategy of this name, or None."""
    return Strategy(text) if text in set(Strategy) else None


def parse_target_ms(text: str) -> float | None:
    """Return a latency target in milliseconds, from a microsecond to a day; None if invalid."""
    return _number_between(SHORTEST_TARGET_MS, LONGEST_TARGET_MS, text)


def parse_idle_unload_s(text: str) -> float | None:
    """Return the idle seconds after which a model on demand is unloaded; None if invalid.

    0 means never; the maximum is about ten days.
    """
    return _number_between(0, LONGEST_IDLE_S, text)


def parse_max_streams(text: str) -> int | None:
    """Return a limit of concurrent decoupled requests per instance; None if invalid."""
    return _integer_up_to(LARGEST_MAX_STREAMS, text)


def parse_instance_bound(text: str) -> int | None:
    """Return a minimum or maximum number of instances; None if invalid."""
    return _integer_up_to(LARGEST_INSTANCE_BOUND, text)


def _number_between(minimum: float, maximum: float, text: str) -> float | None:
    try:
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
    except ValueError:
        return None
    return value if minimum <= value <= maximum else None


def _integer_up_to(maximum: int, text: str) -> int | None:
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(maximum))):
        return None
    return int(text) if 1 <= int(text) <= maximum else None


CORRELATION_ID = "CONTROL_SEQUENCE_CORRID"
_CONTROL_KINDS = (
    *("CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_READY"),
    CORRELATION_ID,
)
# The fields that may change while a version serves: the instances, and the loaded versions.
_MUTABLE_FIELDS = frozenset({"instance_group", "version_policy"})


def _config_field(
    path: str, default: Any = None, convert: Callable[[Any], Any] | None = None
) -> Any:
    """Return a field whose value is at this path of the configuration."""
    return field(default=default, metadata={"path": path, "convert": convert})


def _datatype_field() -> Any:
    return _config_field("data_type", "", _protocol_datatype)


def _protocol_datatype(data_type: str) -> str:
    return FROM_CONFIG.get(data_type, "")


def _parameter_texts(parameters: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value.get("string_value") or "") for name, value in parameters.items()}


class TensorSpec(Record):
    """An input or output; `dims` excludes the batch dimension, and -1 is any size.

    Clients send or receive the shape `dims`. The model receives or returns `model_dims`.
    """

    name: str = ""
    datatype: str = _datatype_field()
    dims: tuple[int, ...] = ()
    optional: bool = False
    ragged: bool = _config_field("allow_ragged_batch", False)  # batched without padding
    reshape: tuple[int, ...] | None = _config_field("reshape.shape")

    @property
    def is_static(self) -> bool:
        """Return whether all dimensions are fixed."""
        return -1 not in self.dims

    @property
    def model_dims(self) -> tuple[int, ...]:
        """Return the dimensions that the model receives or returns."""
        return self.dims if self.reshape is None else self.reshape


class BatchTensor(Record):
    """A tensor of `batch_input` or `batch_output` in a model's configuration.

    A batch input is computed from the shapes of `source_input` in a ragged batch. A batch output is
    split by these shapes.
    """

    kind: str = ""  # for example BATCH_ELEMENT_COUNT
    target_name: tuple[str, ...] = ()  # tensors of the model
    datatype: str = _datatype_field()
    source_input: tuple[str, ...] = ()  # inputs of clients


class LevelPolicy(Record):
    """The limits of a priority level of the queue; 0: no limit.

    With `allow_timeout_override`, a request's own shorter timeout applies.
    """

    timeout_action: str = "REJECT"
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0

    @property
    def has_limits(self) -> bool:
        """Return whether requests of the level may be rejected or may time out."""
        limits = self.max_queue_size, self.default_timeout_microseconds
        return any(limits) or self.allow_timeout_override

    @property
    def delays_expired(self) -> bool:
        """Return whether a request that times out stays queued, behind the rest of its level."""
        return self.timeout_action == "DELAY"

    def own_timeout_us(self, timeout_us: int) -> int:
        """Return `timeout_us`, a request's own timeout, if it overrides the policy's, otherwise 0.

        A request's timeout overrides a longer timeout of the policy, or a policy without a timeout.
        """
        max_timeout_us = self.default_timeout_microseconds or timeout_us + 1
        return timeout_us if self.allow_timeout_override and 0 < timeout_us < max_timeout_us else 0


class DynamicBatching(Record):
    """The settings of the dynamic batcher, or of the sequence batcher's strategy `oldest`."""

    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: LevelPolicy = LevelPolicy()
    priority_queue_policy: dict[int, LevelPolicy] = field(default_factory=dict)
    max_candidate_sequences: int = 0


class SequenceControl(Record):
    """The value of a control input for each request of a sequence.

    The value of a control that is false or true is the first or the second element of the field
    `..._false_true` that is set. The value of a correlation id has this `datatype`.
    """

    kind: str = "CONTROL_SEQUENCE_START"
    datatype: str = _datatype_field()
    int32_false_true: tuple[int, ...] = ()  # the values for false and true
    fp32_false_true: tuple[float, ...] = ()
    bool_false_true: tuple[bool, ...] = ()


class ControlTensor(Record):
    """An input that receives properties of the request's sequence, such as its start or id."""

    name: str = ""
    control: tuple[SequenceControl, ...] = ()  # the kinds of control


class InitialState(Record):
    """The initial state of a sequence: the bytes of a file, or zeros."""

    dims: tuple[int, ...] = ()
    data_file: str = ""  # its name in the folder `initial_state`


class SequenceState(Record):
    """A tensor that a model returns for the next request of the same sequence."""

    input_name: str = ""  # receives the state
    output_name: str = ""  # returns the next state
    datatype: str = _datatype_field()
    dims: tuple[int, ...] = ()
    initial_state: tuple[InitialState, ...] = ()
    use_same_buffer_for_input_output: bool = False


class SequenceBatching(Record):
    """The sequence batcher, its control inputs and states."""

    max_sequence_idle_microseconds: int = 0
    control_input: tuple[ControlTensor, ...] = ()
    state: tuple[SequenceState, ...] = ()  # the tensors that the server stores for each sequence
    direct_delay_microseconds: int = _config_field("direct.max_queue_delay_microseconds", 0)
    minimum_slot_utilization: float = _config_field("direct.minimum_slot_utilization", 0.0)
    oldest: DynamicBatching | None = None  # the settings of the strategy `oldest`
    iterative_sequence: bool = False

    @property
    def controls(self) -> list[tuple[str, SequenceControl]]:
        """Return the controls with the names of their inputs.

        As in Triton, the last kind of `_CONTROL_KINDS` sets an input that has several kinds.
        """
        return [
            (
                tensor.name,
                max(tensor.control, key=lambda control: _CONTROL_KINDS.index(control.kind)),
            )
            for tensor in self.control_input
            if tensor.control
        ]

    @property
    def correlation_input(self) -> tuple[str, str]:
        """Return name and datatype of the input for the correlation id; empty if there is none."""
        for name, control in self.controls:
            if control.kind == CORRELATION_ID:
                return name, control.datatype
        return "", ""


class EnsembleStep(Record):
    """A step of an ensemble; the maps are from its model's tensor names to the ensemble's."""

    model_name: str = ""
    model_version: int = -1
    input_map: dict[str, str] = field(default_factory=dict)
    output_map: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Return the version to run, "" for the latest."""
        return str(self.model_version) if self.model_version > 0 else ""


class EnsembleScheduling(Record):
    """The steps of an ensemble; `max_inflight_requests` 0: no limit."""

    step: tuple[EnsembleStep, ...] = ()
    max_inflight_requests: int = 0


class LimitedResource(Record):
    """An amount of a resource of the rate limiter, per device or, if `is_global`, per host."""

    name: str = ""
    is_global: bool = _config_field("global", False)
    count: int = 0  # units that an execution needs


class RateLimit(Record):
    """The resources and priority of an execution for the rate limiter."""

    resources: tuple[LimitedResource, ...] = ()
    priority: int = 0

    @property
    def needs_resources(self) -> bool:
        """Return whether an execution requires resources."""
        return any(resource.count for resource in self.resources)


class InstanceGroup(Record):
    """Instances of one kind; for KIND_GPU, `count` on each of `gpus`."""

    name: str = ""
    kind: str = "KIND_CPU"  # KIND_CPU, KIND_GPU or KIND_MODEL
    count: int = 1  # number of instances
    rate_limiter: RateLimit = RateLimit()
    gpus: tuple[int, ...] = ()  # ordinals


class ExecutionAccelerator(Record):
    """An execution provider of onnxruntime."""

    name: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


class GraphShape(Record):
    """A batch size to record a CUDA graph for."""

    batch_size: int = 0


class Optimization(Record):
    """The settings of `optimization` that have an effect.

    `execution_accelerators` maps the name of a field of config.pbtxt to its accelerators.
    """

    graph_level: int = _config_field("graph.level", 0)
    cuda_graphs: bool = _config_field("cuda.graphs", False)
    cuda_graph_spec: tuple[GraphShape, ...] = _config_field("cuda.graph_spec", ())
    execution_accelerators: dict[str, tuple[ExecutionAccelerator, ...]] = field(
        default_factory=dict
    )


class WarmupInput(Record):
    """An input of a warm-up sample; `zero_data` and `random_data` are None if they are not set."""

    datatype: str = _datatype_field()
    dims: tuple[int, ...] = ()
    zero_data: bool | None = None
    random_data: bool | None = None
    input_data_file: str = ""


class WarmupSample(Record):
    """A batch to run before a model is ready, `count` times (0: once)."""

    name: str = ""
    batch_size: int = 0
    inputs: dict[str, WarmupInput] = field(default_factory=dict)
    count: int = 0  # number of executions


class MetricControl(Record):
    """The configured histogram buckets of a metric family."""

    family: str = _config_field("metric_identifier.family", "")  # the name of the metric family
    buckets: tuple[float, ...] = _config_field("histogram_options.buckets", ())


class ModelSpec(Document):
    """A model's configuration.

    `source` is the JSON of `GET /v2/models/NAME/config`, for presentation and comparison.
    """

    name: str = ""
    platform: str = ""
    backend: str = ""
    runtime: str = ""
    max_batch_size: int = 0
    input: tuple[TensorSpec, ...] = ()
    output: tuple[TensorSpec, ...] = ()
    batch_input: tuple[BatchTensor, ...] = ()
    batch_output: tuple[BatchTensor, ...] = ()  # outputs of whole batches
    optimization: Optimization = Optimization()
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    ensemble_scheduling: EnsembleScheduling | None = None
    instance_group: tuple[InstanceGroup, ...] = ()
    default_model_filename: str = ""
    metric_tags: dict[str, str] = field(default_factory=dict)  # labels of metrics
    parameters: dict[str, str] = field(default_factory=dict, metadata={"convert": _parameter_texts})
    model_warmup: tuple[WarmupSample, ...] = ()
    decoupled: bool = _config_field("model_transaction_policy.decoupled", False)
    caches_responses: bool = _config_field("response_cache.enable", False)
    metric_control: tuple[MetricControl, ...] = _config_field("model_metrics.metric_control", ())
    source: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, source: Mapping[str, Any]) -> Self:
        """Return the configuration in this JSON."""
        return from_map(cls, {**source, "source": source})

    @property
    def padding(self) -> Padding | None:
        """Return the padding of the inputs; None: inputs are not padded."""
        text = self.parameters.get(PADDING, "")
        return Padding.of(text, {spec.name: spec.dims for spec in self.input}) if text else None

    @property
    def environment(self) -> str:
        """Return the path of the model's own Python environment as it is configured, or ""."""
        class_environment = self.parameters.get(ENVIRONMENT, "") if self.backend == "native" else ""
        return self.parameters.get(ENVIRONMENT_PATH, "") or class_environment

    @property
    def has_scheduler(self) -> bool:
        """Return whether the configuration has a batcher, a sequence batcher or an ensemble."""
        schedulers = self.dynamic_batching, self.sequence_batching, self.ensemble_scheduling
        return any(scheduler is not None for scheduler in schedulers)

    @property
    def may_omit_outputs(self) -> bool:
        """Return whether a response may lack requested outputs.

        A class of the backend `native` declares such outputs, and its worker checks that no other
        output is missing.
        """
        return self.ensemble_scheduling is not None or self.backend == "native"

    @property
    def immutable_config(self) -> dict[str, Any]:
        """Return the part of `source` that cannot change while a version serves."""
        return {key: value for key, value in self.source.items() if key not in _MUTABLE_FIELDS}
