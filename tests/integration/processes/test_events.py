"""The server's events, as its subscribers receive them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import shmserve.client
from shmserve.client.events import EventReader
from shmserve.ipc.messages import publications as m
from tests.support import repositories
from tests.support.load import infer_simple
from tests.support.regions import SharedObject
from tests.support.servers import ROOT, Server, Start, run_command, suspend
from tests.support.waiting import until
from tests.support.wire.raw_http import shm_input


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, "simple", "identity")
    repositories.write(models, "broken", "", "raise RuntimeError('so it is')")
    flags = ("--model-control-mode=explicit", "--load-model=simple")
    return start(models, *flags)


@pytest.fixture
def events(server: Server) -> Iterator[EventReader]:
    with EventReader(server.run_dir) as reader:
        reader.snapshot()
        yield reader


def read_until(events: EventReader, is_last: Callable[[Any], bool]) -> list[Any]:
    received_events: list[Any] = []
    for entry in events.follow():
        assert not entry.lost_count
        received_events.append(entry.event)
        if is_last(entry.event):
            return received_events
    raise AssertionError


@contextlib.contextmanager
def follow_events(
    server: Server, *flags: str
) -> Iterator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """Run `shmserve events --follow`; yield the process and a function for its next line."""
    command = [sys.executable, "-m", "shmserve", "events", "--follow", *flags]
    with subprocess.Popen(
        [*command, f"--run-dir={server.run_dir}"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        output = process.stdout

        def line() -> str:
            output_line = output.readline()
            assert output_line, "it has ended"
            return output_line

        try:
            yield process, line
        finally:
            process.kill()


def test_the_reader_of_the_output_ends_the_command(server: Server) -> None:
    """As `head` does, which reads some lines. No event occurs after the first ones."""
    with follow_events(server, "--topic=health") as (process, line):
        line()
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(10) == 1


def test_a_load_and_an_unload(server: Server, events: EventReader) -> None:
    with server.http() as http:
        http.load("identity").ok()
        http.unload("identity").ok()
    received = read_until(
        events, lambda e: e == m.ModelChanged("identity", "1", "UNAVAILABLE", "unloaded")
    )
    states = [e.state for e in received if isinstance(e, m.ModelChanged)]
    assert states == ["LOADING", "READY", "UNLOADING", "UNAVAILABLE"]
    titles = {e.title for e in received if isinstance(e, m.ProcessStarted)}
    assert titles == {"worker identity.0 cpu", "scheduler identity"}
    end_reasons = {e.title: e.reason for e in received if isinstance(e, m.ProcessEnded)}
    assert end_reasons == dict.fromkeys(titles, "exit status 0")


@pytest.mark.parametrize(("model", "reason"), [("broken", "so it is"), ("none", "no folder")])
def test_a_load_is_refused(server: Server, events: EventReader, model: str, reason: str) -> None:
    with server.http() as http:
        assert http.load(model).status >= 400
        http.unload(model).ok()  # otherwise the failed model would keep the server unready
    *_, refused_event = read_until(events, lambda event: isinstance(event, m.LoadRefused))
    assert refused_event.name == model and reason in refused_event.reason


def test_a_killed_worker(server: Server, events: EventReader) -> None:
    victim = server.find_one("worker simple.0")
    victim.kill()
    received = read_until(events, lambda e: isinstance(e, m.ModelChanged) and e.state == "READY")
    assert m.ProcessEnded(victim.pid, "worker simple.0 cpu", "signal 9") in received
    assert m.ModelChanged("simple", "1", "LOADING", "a process is being restarted") in received
    server.wait_ready()


def test_the_end_reason_of_a_hanging_worker(server: Server, events: EventReader) -> None:
    victim = server.find_one("worker simple.0")
    suspend(victim)
    received = read_until(events, lambda e: isinstance(e, m.ModelChanged) and e.state == "READY")
    reason = "signal 9: it was stopped for 0.4 s"
    assert m.ProcessEnded(victim.pid, "worker simple.0 cpu", reason) in received
    server.wait_ready()


def test_regions(server: Server, events: EventReader) -> None:
    with SharedObject(8192) as shared_object, server.http() as http:
        http.register("a", shared_object.key, 4096, 4096).ok()
        registered = m.RegionRegistered("a", shared_object.key, 4096, 4096, os.getuid(), -1)
        assert registered in read_until(events, lambda e: isinstance(e, m.RegionRegistered))
        printed = run_command("events", f"--run-dir={server.run_dir}", "--topic=regions").stdout
        assert f" region a: 4096 bytes, {shared_object.key} from 4096" in printed
        http.unregister("a").ok()
        assert m.RegionUnregistered("a", "") in read_until(
            events, lambda e: isinstance(e, m.RegionUnregistered)
        )


def test_the_memory_of_a_program(server: Server, events: EventReader) -> None:
    """The memory is listed and counted like a region, but requests cannot name it."""
    name = f"shmserve.client {os.getpid()}."
    with shmserve.client.connect(server.run_dir) as program, server.http() as http:
        region = program.allocate({"x": ((16,), "INT32")})
        *_, shared = read_until(events, lambda e: isinstance(e, m.RegionRegistered))
        assert shared.name.startswith(name)
        assert region and (shared.key, shared.offset, shared.uid) == ("memfd", 0, os.getuid())
        row = {field: getattr(shared, field) for field in ("name", "key", "offset", "byte_size")}
        status = "/v2/systemsharedmemory/status"  # a gateway learns of the region a moment later
        until("it is listed", lambda: http.get(status).ok().json() == [row])
        assert server.metric("shmserve_shm_unnamed_regions") == 1
        assert server.metric("shmserve_shm_unnamed_region_bytes") == shared.byte_size
        assert server.metric("shmserve_shm_regions") == 0
        printed = run_command("events", f"--run-dir={server.run_dir}", "--topic=regions").stdout
        assert f" region {shared.name}: {shared.byte_size} bytes, memfd from 0, of uid" in printed
        inputs = [shm_input(n, "INT32", [1, 16], shared.name, 64) for n in ("INPUT0", "INPUT1")]
        refused_reply = http.infer("simple", {"inputs": inputs})
        assert "Unable to find shared memory region" in refused_reply.error
    *_, unregistered = read_until(events, lambda e: isinstance(e, m.RegionUnregistered))
    assert unregistered == m.RegionUnregistered(shared.name, "its program has disconnected")
    until("it is gone", lambda: server.metric("shmserve_shm_unnamed_regions") == 0)


def test_a_region_that_killed_a_worker(server: Server, events: EventReader) -> None:
    with SharedObject(8192) as shared_object, server.http() as http:
        http.register("b", shared_object.key, 8192).ok()
        shared_object.truncate(0)
        server.find_one("worker simple.0").send_signal(signal.SIGBUS)
        received_events = read_until(events, lambda e: isinstance(e, m.RegionUnregistered))
        reason = "it was truncated while a worker used it, and the worker died"
        assert received_events[-1] == m.RegionUnregistered("b", reason)
        assert m.RegionBlamed("b", reason) in received_events
    server.wait_ready()


def test_counters_are_published_repeatedly(server: Server, events: EventReader) -> None:
    def counters() -> dict[str, int]:
        *_, counters_event = read_until(events, lambda event: isinstance(event, m.ModelCounted))
        assert (counters_event.name, counters_event.version) == ("simple", "1")
        return counters_event.counters

    counters_before = counters()
    with server.http() as http:
        assert infer_simple(http, 1) == ""
    while (counters_after := counters())["success"] == counters_before["success"]:
        pass
    assert counters_after["success"] == counters_before["success"] + 1
    assert counters_after["request_ns"] > counters_before["request_ns"]
    assert counters_after["pending"] == counters_after["executing"] == 0


def test_states_and_events_are_printed(server: Server) -> None:
    completed = run_command("events", f"--run-dir={server.run_dir}")
    assert completed.returncode == 0 and not completed.stderr
    for text in (" server: ready\n", " model simple version 1: READY\n", "scheduler simple: runs"):
        assert text in completed.stdout
    with follow_events(server, "--json", "--topic=models") as (process, line):
        while '"name": "simple"' not in line():
            pass
        with server.http() as http:
            assert http.load("none").status >= 400
        while (event := json.loads(line()))["event"] != "LoadRefused":
            pass
        assert event["name"] == "none" and "contain no folder" in event["reason"]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_counters_are_printed_only_if_they_are_asked_for(server: Server) -> None:
    with (
        follow_events(server) as (process, line),
        follow_events(server, "--topic=counters") as (_, count),
    ):
        printed_text = ""
        while "counters of simple" not in printed_text:  # counters are sent once per second
            printed_text = count()
        first_line = line()  # the process runs and has begun to print the snapshot
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stdout is not None and "counters" not in first_line + process.stdout.read()


def test_zeromq_is_the_supervisors_alone(server: Server) -> None:
    """No process that forks others has ZeroMQ's threads."""

    def has_loaded_zmq(pid: int) -> bool:
        return "libzmq" in Path(f"/proc/{pid}/maps").read_text()

    assert [process.pid for process in server.tree() if has_loaded_zmq(process.pid)] == [server.pid]


def test_a_stopped_subscriber_delays_no_other(server: Server) -> None:
    """A stopped subscriber receives the missed events later, as far as its queue holds them."""
    with (
        SharedObject(4096) as shared_object,
        server.http() as http,
        follow_events(server, "--topic=regions") as (process, line),
    ):
        http.register("first", shared_object.key, 4096).ok()
        assert " region first: " in line()  # printed as part of the snapshot, or as an event
        suspend(psutil.Process(process.pid))
        for _ in range(100):
            http.register("again", shared_object.key, 4096).ok()
            http.unregister("again").ok()
        http.unregister("first").ok()
        process.send_signal(signal.SIGCONT)
        assert [line() for _ in range(201)][-1].endswith(" region first: unregistered\n")
