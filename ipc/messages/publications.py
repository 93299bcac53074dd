"""Messages by which the supervisor publishes state: models, regions, processes, health and events.

Gateways, ensembles, workers and local clients receive the messages of the first part. A change with
an `acknowledge` number greater than 0 is confirmed by `Acknowledged` once the receiver applied it.

The second part is the event feed (ZeroMQ PUB/SUB). A message of the feed has two frames: the topic,
and a packed frame with an `EventHeader` and the event. Three topic prefixes answer a subscription
once: `SNAPSHOT` carries the current state, `SEQUENCES` one `SequenceReached` for each topic, and
`RECENT` the latest events, each in its own message with the time when the event occurred.
"""

from __future__ import annotations

from typing import Any, ClassVar

from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.transport.frames import message

MODELS = "models"
PROCESSES = "processes"
REGIONS = "regions"
HEALTH = "health"
COUNTERS = "counters"
SNAPSHOT = "snapshot/"
SEQUENCES = "sequences/"
RECENT = "recent/"


@message
class Acknowledged:
    """Sent when the change with this number is applied in this process."""

    number: int


# --- models


@message
class ModelPublished:
    """Sent when a model version becomes callable or changes.

    `endpoint` is the endpoint of its scheduler. A version with `latest` serves the requests that
    name no version.
    """

    name: str
    version: str
    config: ModelSpec
    metadata: dict[str, Any]
    endpoint: str
    ready: bool
    latest: bool
    load_seconds: float
    acknowledge: int


@message
class ReadinessChanged:
    """Sent when only the readiness of a published model version has changed."""

    name: str
    version: str
    ready: bool


@message
class ModelWithdrawn:
    """Sent when a model version must not be called any more. Requests in flight on it finish."""

    name: str
    version: str
    acknowledge: int


@message
class ModelOnDemand:
    """Sent when a model becomes loadable with `WantModel`, whether or not a version serves now.

    A `ModelWithdrawn` with the model's name and an empty version revokes it.
    """

    version: ClassVar[str] = ""  # the model, not one of its versions

    name: str
    acknowledge: int


@message
class SchedulerLost:
    """Sent when the scheduler at `endpoint` died, or its model moved or was replaced.

    The receiver resubmits the requests of that scheduler to `successor`; a new `ModelPublished`
    follows. An empty successor means that the version was retired or that no scheduler can be
    started now; in the latter case the message is repeated, finally with a successor. Gateways then
    reject the requests that they have there. Workers look the model up again with `FindModel`.
    """

    endpoint: str
    successor: str


# --- processes and health


@message
class ProcessExited:
    """Sent when a process of the server has exited, whatever its role.

    The receiver releases the memory of that process, cancels its requests, reruns elsewhere what it
    executed, and expects a replacement if it was an instance. `process` is the process's number:
    its pid, which is not reused while anyone may remember this process, or the number of a local
    client. `reason` is meant for clients and may be empty.
    """

    TAG: ClassVar[str] = "Exited"  # OwnerExited has this class's name as its tag

    process: int
    reason: str


@message
class OwnerExited:
    """Sent to a local client when the process `pid` has exited: its memory is no longer valid."""

    TAG: ClassVar[str] = "ProcessExited"  # the name in the local clients' protocol since version 1

    pid: int


@message
class ServerEnding:
    """Sent to a local client when the server stops and a successor will listen at the same path.

    The local client sends new requests to the successor. Requests in flight are still answered. The
    client confirms with `Acknowledged`.
    """

    acknowledge: int


@message
class HealthChanged:
    """Sent when the result of health checks changes. `exiting`: reject new inferences."""

    live: bool
    ready: bool
    exiting: bool


# --- regions


@message
class MemoryDropped:
    """Sent when a memory must be unmapped: its region was unregistered or its owner exited."""

    memory_id: int


@message
class RegionPublished:
    """Sent when a region may be used under `name`.

    `memory_range` is its range in its object, as `pack_range` of ipc/tensors/descriptors.py encodes
    it. `key` is empty for CUDA memory. `uid` and `group` are those of the owner. A region with
    `draining` is only listed, until `RegionDrained`: its name is free again while requests in
    flight use it, or it belongs to a local client.
    """

    name: str
    key: str
    memory_range: list[Any]
    uid: int
    group: int
    acknowledge: int
    draining: bool = False


@message
class RegionDrained:
    """Sent when a draining region is no longer listed.

    The last request that used the withdrawn generation ended in all gateways, or a local client
    withdrew the memory.
    """

    memory_id: int
    acknowledge: int


@message
class RegionRetired:
    """Sent when a region was unregistered: it is withdrawn once no request uses it.

    Until then requests may use it. Gateways send `RegionInUse` when their use begins and ends.
    """

    memory_id: int
    acknowledge: int


@message
class RegionWithdrawn:
    """Sent when a region's name is free again.

    The gateway sends `RegionReleased` when its last request that uses this generation has ended.
    """

    name: str
    memory_id: int
    acknowledge: int


# --- events of the feed


@message
class EventHeader:
    """The sequence number of an event in its topic, and its time in ns since the epoch.

    A gap in the numbers is the number of lost events.
    """

    sequence: int
    time_ns: int


@message
class ModelChanged:
    """A model version has a new state or reason.

    The states are those of the repository index; an empty state means that the version is gone.
    """

    name: str
    version: str
    state: str
    reason: str


@message
class LoadRefused:
    """A load failed. The model serves what it served before."""

    name: str
    reason: str


@message
class InstancesChanged:
    """The number of instances of a model version has changed, between its bounds."""

    name: str
    version: str
    before: int
    count: int
    reason: str


@message
class ProcessStarted:
    """A process of the server has started."""

    pid: int
    title: str


@message
class ProcessEnded:
    """A process has ended.

    `reason` is its exit status or signal, and why the server killed it if it did.
    """

    pid: int
    title: str
    reason: str


@message
class RegionRegistered:
    """A region was registered, or a local client shared memory.

    `key` is the key of the object, "memfd" for the memory of a local client, and empty for CUDA
    memory. `device` is -1 for host memory.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    uid: int
    device: int


@message
class RegionUnregistered:
    """A region was unregistered. `reason` is empty if its owner requested that."""

    name: str
    reason: str


@message
class RegionBlamed:
    """A region was unregistered because its memory killed a worker."""

    name: str
    reason: str


@message
class ModelCounted:
    """The counters of a model version since its load, and its queue and running requests now."""

    name: str
    version: str
    counters: dict[str, Any]


@message
class SequenceReached:
    """The sequence number of a topic's latest event. A lower number means lost events."""

    topic: str
    sequence: int


ModelNews = ModelPublished | ModelOnDemand
Losses = ModelWithdrawn | SchedulerLost | ProcessExited
RegionNews = RegionPublished | RegionRetired | RegionWithdrawn | RegionDrained
ModelEvent = ModelChanged | LoadRefused | InstancesChanged | ModelCounted
ProcessEvent = ProcessStarted | ProcessEnded
RegionEvent = RegionRegistered | RegionUnregistered | RegionBlamed
TOPICS: dict[type[Any], str] = {
    ModelChanged: MODELS,
    LoadRefused: MODELS,
    InstancesChanged: MODELS,
    ProcessStarted: PROCESSES,
    ProcessEnded: PROCESSES,
    RegionRegistered: REGIONS,
    RegionUnregistered: REGIONS,
    RegionBlamed: REGIONS,
    HealthChanged: HEALTH,
    ModelCounted: COUNTERS,
}
