"""`shmserve events`: the state of a server and its events, one line per event."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from shmserve.client.events import TOPICS, EventReader, ReceivedEvent
from shmserve.errors import printable_line
from shmserve.ipc.messages import publications as m
from shmserve.ipc.messages.publications import HealthChanged


def run(args: argparse.Namespace) -> int:
    """Print the current state and, with `--follow`, further events until the server exits.

    Returns:
        0.

    Raises:
        BrokenPipeError: The reader of the output has closed it.
        Disconnected: There is no server, or it has exited.
    """
    format_event = _as_json if args.json else _as_text
    topics = tuple(args.topic or (topic for topic in TOPICS if topic != m.COUNTERS))
    with EventReader(args.run_dir, topics if args.follow else ()) as reader:
        for received_event in reader.snapshot():
            if m.TOPICS[type(received_event.event)] in topics:
                print(format_event(received_event), flush=True)
        if args.follow:
            for received_event in reader.follow(sys.stdout.fileno()):
                if received_event.lost_count:
                    print(_format_loss(received_event, args.json), flush=True)
                if received_event.event is not None:
                    print(format_event(received_event), flush=True)
    return 0


def _format_time(received_event: ReceivedEvent) -> str:
    seconds, ms = divmod(received_event.time_ns // 1_000_000, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ms:03d}Z"


def _as_json(received_event: ReceivedEvent) -> str:
    event = received_event.event
    kind = type(event)
    fields = {"time": _format_time(received_event), "topic": m.TOPICS[kind], "event": kind.__name__}
    return json.dumps(fields | asdict(event))


def _format_loss(received_event: ReceivedEvent, as_json: bool) -> str:
    if as_json:
        time_text, topic = _format_time(received_event), received_event.topic
        fields = {"time": time_text, "topic": topic, "event": "EventsLost"}
        return json.dumps(fields | {"count": received_event.lost_count})
    text = f"{received_event.lost_count} events of {received_event.topic} lost"
    return f"{_format_time(received_event)} {text}: they were not read in time"


def _as_text(received_event: ReceivedEvent) -> str:
    return printable_line(f"{_format_time(received_event)} {_describe(received_event.event)}")


def _describe(event: Any) -> str:
    match event:
        case m.ModelChanged(name, version, state, reason):
            subject = f"model {name}{f' version {version}' if version else ''}"
            return f"{subject}: {state or 'gone'}{_reason_suffix(reason)}"
        case m.LoadRefused(name, reason):
            return f"model {name}: not loaded{_reason_suffix(reason)}"
        case m.InstancesChanged(name, version, count_before, count, reason):
            change_text = f"{count} instances (before: {count_before}){_reason_suffix(reason)}"
            return f"model {name} version {version}: {change_text}"
        case m.ProcessStarted(pid, title):
            return f"process {pid} {title}: runs"
        case m.ProcessEnded(pid, title, reason):
            return f"process {pid} {title}: ended ({reason})"
        case m.RegionRegistered(name, key, offset, byte_size, uid, device):
            location = f"{key} from {offset}" if device < 0 else f"on device {device}"
            return f"region {name}: {byte_size} bytes, {location}, of uid {uid}"
        case m.RegionUnregistered(name, reason):
            return f"region {name}: unregistered{_reason_suffix(reason)}"
        case m.RegionBlamed(name, reason):
            return f"region {name}: a request failed{_reason_suffix(reason)}"
        case HealthChanged(_, ready, exiting):
            return f"server: {'stopping' if exiting else 'ready' if ready else 'not ready'}"
        case m.ModelCounted(name, version, counters):
            subject = " ".join(f"{key}={value}" for key, value in counters.items())
            return f"counters of {name} version {version}: {subject}"
    return str(event)


def _reason_suffix(reason: str) -> str:
    return f" ({reason.strip()})" if reason.strip() else ""
