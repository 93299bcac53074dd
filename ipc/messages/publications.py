"""Messages by which the supervisor publishes state: models, regions, processes, health and events.

Gateways, ensembles, workers and local clients receive the messages of the first part. A change with
an `ack_number` greater than 0 is confirmed by `Acknowledged` once the receiver applied it.

The second part is the event feed (ZeroMQ PUB/SUB). A message of the feed has two frames: the topic,
and a packed frame with an `EventHeader` and the event. A subscription to a topic with one of these
prefixes is answered once: `SNAPSHOT` with the current state, `SEQUENCES` with a `SequenceReached`
for each topic, and `RECENT` with the latest events, each in its own message with the event's time.
"""

from __future__ import annotations

from typing import Any, ClassVar, get_args

from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.transport.frames import Message

# Topics of events, and prefixes of a topic for requests.
MODELS = "models"
PROCESSES = "processes"
REGIONS = "regions"
HEALTH = "health"
COUNTERS = "counters"
SNAPSHOT = "snapshot/"  # prefix: the current state
SEQUENCES = "sequences/"  # prefix: sequence numbers
RECENT = "recent/"  # prefix: the latest events


class Acknowledged(Message):
    """Sent by a process to the supervisor when it has applied the change with this number."""

    number: int  # the `ack_number` of the change


# --- models


class ModelPublished(Message):
    """Sent by the supervisor to gateways, ensembles and local clients when a version changes.

    The version has become callable, or has new properties. `endpoint` is the endpoint of its
    scheduler. A version with `latest` serves the requests that name no version.
    """

    name: str
    version: str
    config: ModelSpec
    metadata: dict[str, Any]  # for clients
    endpoint: str  # of the scheduler
    ready: bool
    latest: bool  # whether the version is the latest
    load_seconds: float
    ack_number: int  # for `Acknowledged`


class ReadinessChanged(Message):
    """Sent by the supervisor to gateways when only the readiness of a version has changed."""

    name: str
    version: str
    ready: bool


class ModelWithdrawn(Message):
    """Sent by the supervisor to gateways, workers and local clients when a version is withdrawn.

    The receiver sends no more requests to the version. Requests in flight on it finish.
    """

    name: str
    version: str
    ack_number: int  # for `Acknowledged`


class ModelOnDemand(Message):
    """Sent by the supervisor to gateways and local clients when a model can be loaded on demand.

    The model may be loaded already. When a request needs a version that the receiver does not know,
    the receiver sends `WantModel` first. A `ModelWithdrawn` with the model's name and an empty
    version revokes this message.
    """

    version: ClassVar[str] = ""  # empty: the message concerns the whole model

    name: str
    ack_number: int  # for `Acknowledged`


class SchedulerLost(Message):
    """Sent by the supervisor to the clients of a scheduler that died or was replaced.

    The receiver resubmits the requests of that scheduler to `successor`, and a new `ModelPublished`
    follows. The successor is empty if the version was retired, or if no scheduler can be started
    now. In the latter case the message is sent again, in the end with a successor. Without a
    successor, gateways reject the requests, and workers look the model up again with `FindModel`.
    """

    endpoint: str
    successor: str  # endpoint of the new scheduler; "": none


# --- processes and health


class ProcessExited(Message):
    """Sent by the supervisor to gateways, schedulers and workers when a process has exited.

    The receiver releases the memory of that process, and cancels its requests. If the process was a
    worker, its requests are retried or fail, and a replacement follows. `process` is its pid,
    which is not reused while a receiver may store the exit, or the number of a local client.
    `reason` is meant for clients and may be empty.
    """

    TAG: ClassVar[str] = "Exited"  # not "ProcessExited", which is the tag of `OwnerExited`

    process: int  # pid, or number of a local client
    reason: str


class OwnerExited(Message):
    """Sent by the supervisor to local clients when the process `pid` has exited.

    The memory of that process is no longer valid.
    """

    TAG: ClassVar[str] = "ProcessExited"  # the name in the local clients' protocol since version 1

    pid: int


class ServerEnding(Message):
    """Sent by the supervisor to local clients when it stops and has a successor.

    The successor will listen at the same path, and the client sends new requests to the successor.
    This server still responds to requests in flight. The client confirms with `Acknowledged`.
    """

    ack_number: int  # for `Acknowledged`


class HealthChanged(Message):
    """Sent by the supervisor to gateways and local clients when a health check has a new result.

    With `exiting`, gateways respond to requests for the server's health with an error. `started` is
    whether the loads of the start have ended.
    """

    live: bool  # result of the liveness check
    ready: bool  # result of the readiness check
    exiting: bool  # whether requests for the health fail
    started: bool = True  # whether the startup is complete


# --- regions


class MemoryDropped(Message):
    """Sent by the supervisor to workers, which unmap a memory.

    The memory's region was unregistered, or its owner has exited. An ensemble sends this message to
    the supervisor to have a memory of its own unmapped.
    """

    memory_id: int


class RegionPublished(Message):
    """Sent by the supervisor to gateways when a region may be used under `name`.

    `memory_range` is its range in its object, as `pack_range` of ipc/tensors/descriptors.py encodes
    it. `key` is empty for CUDA memory. `uid` and `group` are the owner's. Gateways only list a
    region with `draining`, until `RegionDrained`. Either its name is free again although requests
    in flight still use it, or it belongs to a local client.
    """

    name: str
    key: str  # name of the shared memory object
    memory_range: list[Any]  # packed by `pack_range`
    uid: int
    group: int  # gid of the owner
    ack_number: int  # for `Acknowledged`
    draining: bool = False  # whether the region is only listed


class RegionDrained(Message):
    """Sent by the supervisor to gateways when a draining region is no longer listed.

    The last requests that used the withdrawn memory have ended in all gateways, or a local client
    has withdrawn the memory.
    """

    memory_id: int
    ack_number: int  # for `Acknowledged`


class RegionRetired(Message):
    """Sent by the supervisor to gateways when a region was unregistered.

    The region is withdrawn once no request uses it. Until then requests may use it. Gateways send
    `RegionInUse` when their use begins and ends.
    """

    memory_id: int
    ack_number: int  # for `Acknowledged`


class RegionWithdrawn(Message):
    """Sent by the supervisor to gateways when a region's name is free again.

    The gateway sends `RegionReleased` when its last request that uses this memory has ended.
    """

    name: str
    memory_id: int
    ack_number: int  # for `Acknowledged`


# --- events of the feed


class EventHeader(Message):
    """The sequence number of an event in its topic, and its time in ns since the epoch.

    The size of a gap in the numbers is the number of lost events.
    """

    sequence: int  # number of the event in its topic
    time_ns: int


class ModelChanged(Message):
    """Published when a model version has a new state or reason.

    The states are as in the repository index; an empty state means that the version is gone.
    """

    name: str
    version: str
    state: str  # of the version
    reason: str


class LoadRefused(Message):
    """Published when a load has failed.

    The versions that served before continue to serve.
    """

    name: str
    reason: str


class InstancesChanged(Message):
    """Published when the autoscaler has changed the number of instances of a model version."""

    name: str
    version: str
    before: int  # number of instances before
    count: int  # number of instances now
    reason: str


class ProcessStarted(Message):
    """Published when a process of the server has started."""

    pid: int
    title: str  # shown by `ps`


class ProcessEnded(Message):
    """Published when a process has ended.

    `reason` is its exit status or signal, and why the server killed it if it did.
    """

    pid: int
    title: str  # shown by `ps`
    reason: str


class RegionRegistered(Message):
    """Published when a region was registered, or a local client has shared memory.

    `key` is the key of the object, "memfd" for the memory of a local client, and empty for CUDA
    memory. `device` is -1 for host memory.
    """

    name: str
    key: str  # name of the shared memory object
    offset: int
    byte_size: int
    uid: int
    device: int  # ordinal of the device; -1: host memory


class RegionUnregistered(Message):
    """Published when a region was unregistered.

    `reason` is empty if the owner has unregistered the region.
    """

    name: str
    reason: str


class RegionBlamed(Message):
    """Published when a region is unregistered because it was truncated and a worker died."""

    name: str
    reason: str


class ModelCounted(Message):
    """Published with the counters of a model version since its load.

    The counters include the current numbers of queued and of running requests.
    """

    name: str
    version: str
    counters: dict[str, Any]


class SequenceReached(Message):
    """Published with the sequence number of a topic's latest event.

    A subscriber that has received only lower numbers has lost events.
    """

    topic: str
    sequence: int  # number of the latest event


ModelPublication = ModelPublished | ModelOnDemand
# Reports that a model version, a scheduler or a process is gone.
Loss = ModelWithdrawn | SchedulerLost | ProcessExited
RegionChange = RegionPublished | RegionRetired | RegionWithdrawn | RegionDrained
ModelEvent = ModelChanged | LoadRefused | InstancesChanged | ModelCounted
ProcessEvent = ProcessStarted | ProcessEnded
RegionEvent = RegionRegistered | RegionUnregistered | RegionBlamed
TOPICS: dict[type[Any], str] = {
    **dict.fromkeys((ModelChanged, LoadRefused, InstancesChanged), MODELS),
    **dict.fromkeys(get_args(ProcessEvent), PROCESSES),
    **dict.fromkeys(get_args(RegionEvent), REGIONS),
    HealthChanged: HEALTH,
    ModelCounted: COUNTERS,
}
