"""Events of the publish/subscribe feed: what happened in the server, and snapshots of what is.

A message there has two frames: a topic, and a frame as everybody's here: an `EventHeader`, then the
event. On a topic that begins with `SNAPSHOT` there come, once, as many as it takes to say what is,
on one that begins with `SEQUENCES` a `SequenceReached` for each topic, and on one that begins with
`RECENT` the latest events, each in a message of its own with the time when it happened.
"""

from __future__ import annotations

from typing import Any

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
class EventHeader:
    """The how-manieth event of its topic this is (a gap: that many were lost on the way), and when
    it happened, in ns since the epoch."""

    sequence: int
    time_ns: int


@message
class HealthChanged:
    """The response of health checks from now on. `exiting`: refuse new inferences."""

    live: bool
    ready: bool
    exiting: bool


@message
class ModelChanged:
    """A model version is in another state (those of the repository index; "" when nothing is left
    of it), or for another reason."""

    name: str
    version: str
    state: str
    reason: str


@message
class LoadRefused:
    """A model was not loaded; what it served before, it serves still."""

    name: str
    reason: str


@message
class InstancesChanged:
    """A model version has another number of instances, between its bounds, for this reason."""

    name: str
    version: str
    before: int
    count: int
    reason: str


@message
class ProcessStarted:
    """A process of the server."""

    pid: int
    title: str


@message
class ProcessEnded:
    """The end of a process; `reason` has its exit status or signal, and why it was killed if the
    server did that."""

    pid: int
    title: str
    reason: str


@message
class RegionRegistered:
    """A shared memory region has a name, or a local client shares memory; `key` of its object
    ("memfd": of a local client's), or "" for memory on a CUDA device (-1: of the host)."""

    name: str
    key: str
    offset: int
    byte_size: int
    uid: int
    device: int


@message
class RegionUnregistered:
    """A name is free; `reason` is "" where its owner asked for that."""

    name: str
    reason: str


@message
class RegionBlamed:
    """A worker died of this region's memory: it is unregistered."""

    name: str
    reason: str


@message
class ModelCounted:
    """The counters of a model version since it was loaded, and what is in the queue and at workers
    now."""

    name: str
    version: str
    counters: dict[str, Any]


@message
class SequenceReached:
    """The number of the latest event of a topic: who does not have it has lost what is missing."""

    topic: str
    sequence: int


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
