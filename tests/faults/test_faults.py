"""Faults on a running server: other requests are answered, and all resources are as before."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil
import pytest

from tests.faults.scene import (
    ARENA_BYTES,
    RECOVERY_S,
    STOP_GRACE_S,
    Scene,
    State,
    assert_is_as_it_was,
    assert_recovers,
    crime,
    is_right,
    scene,
    start_processes,
)
from tests.support.regions import SharedObject
from tests.support.servers import Server, is_running, wait_exited
from tests.support.waiting import until
from tests.support.wire.raw_http import (
    Reply,
    binary_request,
    in_region,
    raw_connection,
    region_request,
    shm_input,
)

# Allowed growth in bytes: workers share torch's pages only with the zygote that forked them, not
# with its successor.
TORCH_BYTES = 256 << 20

# Maximum seconds before a model that has died often, such as "crimes", is started again.
LONGEST_PAUSE_S = 0.8

NUMBERS = np.arange(65536, dtype=np.float32)


@dataclass(frozen=True)
class Crime:
    """A fault, and the requests that it may fail, with or without their `connections`."""

    commit: Callable[[Scene], None]
    within_s: float = RECOVERY_S
    connections: bool = False
    more_memory: int = 0


# --- processes that are killed or stopped ---


def kill(title: str) -> Callable[[Scene], None]:
    def commit(stage: Scene) -> None:
        victim = stage.process(title)
        victim.kill()
        stage.replaced(victim, title)

    return commit


def stop(title: str) -> Callable[[Scene], None]:
    """Return a fault that stops (SIGSTOP) the process with this title permanently."""

    def commit(stage: Scene) -> None:
        victim = stage.process(title)
        victim.suspend()
        assert wait_exited(victim, STOP_GRACE_S + RECOVERY_S), "a stopped process was left alone"
        stage.replaced(victim, title)

    return commit


def stop_a_zygote(zygote: str, child: str) -> Callable[[Scene], None]:
    """Stop a zygote, then kill one of its processes; a replacement must still start."""

    def commit(stage: Scene) -> None:
        old_process = stage.process(zygote)
        old_process.suspend()
        victim = stage.process(child)
        victim.kill()
        stage.replaced(victim, child)
        assert not is_running(old_process)

    return commit


def stop_all_but_the_supervisor(stage: Scene) -> None:
    victims = [process for process in stage.server.tree() if process.pid != stage.server.pid]
    for victim in victims:
        victim.suspend()
    _, alive = psutil.wait_procs(victims, timeout=STOP_GRACE_S + 2 * RECOVERY_S)
    assert not alive


def stop_briefly(title: str) -> Callable[[Scene], None]:
    """Stop a process briefly; it must not be killed."""

    def commit(stage: Scene) -> None:
        victim = stage.process(title)
        log_length = len(stage.server.log())
        victim.suspend()
        until("it is seen", lambda: "was stopped by a signal;" in stage.server.log()[log_length:])
        victim.resume()
        assert not wait_exited(victim, STOP_GRACE_S)

    return commit


def kill_a_zygote(zygote: str, child: str) -> Callable[[Scene], None]:
    """Kill a zygote and one of its processes; the spare zygote starts the replacement."""

    def commit(stage: Scene) -> None:
        spare = stage.process(f"spare {zygote}")
        victims = {title: stage.process(title) for title in (zygote, child)}
        for victim in victims.values():
            victim.kill()
        for title, victim in victims.items():
            stage.replaced(victim, title)
        assert stage.process(zygote) == spare

    return commit


def kill_repeatedly(stage: Scene) -> None:
    """Kill a worker three times, as soon as it serves; a request with two dead workers fails."""
    for _ in range(3):
        kill("worker simple.0")(stage)
        stage.load.wait_answered(time.monotonic())


def kill_all_but_the_supervisor(stage: Scene) -> None:
    victims = [process for process in stage.server.tree() if process.pid != stage.server.pid]
    for victim in victims:
        victim.kill()
    psutil.wait_procs(victims, timeout=RECOVERY_S)


def kill_with_requests_inside(stage: Scene) -> None:
    """Kill a worker with a batch; the batch is retried, and no request fails."""
    pending = stage.pool.number("gated", 1)
    visit = stage.server.gate.next()
    os.kill(visit.pid, signal.SIGKILL)
    next_visit = stage.server.gate.next()
    assert next_visit.pid != visit.pid
    next_visit.release()
    assert pending.result().tensors()["OUTPUT0"].tolist() == [[1]]


def kill_a_scheduler_that_has_counted(stage: Scene) -> None:
    """Kill a scheduler; its counters must not decrease, since Prometheus would assume a restart."""
    pending = stage.pool.number("gated", 1)
    stage.server.gate.next().release()
    assert pending.result().status == 200
    counters = ("nv_inference_request_success", "shmserve_request_seconds_bucket")
    samples_before = [stage.server.samples(name) for name in counters]
    kill("scheduler gated")(stage)

    def has_counters() -> bool:
        return bool(stage.server.metric(counters[0], model="gated"))

    until("it is heard of again", has_counters, RECOVERY_S)
    for name, samples in zip(counters, samples_before, strict=True):
        found_samples = stage.server.samples(name)
        assert [s for s in found_samples if s[0]["model"] == "gated"] == [
            s for s in samples if s[0]["model"] == "gated"
        ]


def kill_a_scheduler_with_requests_inside(stage: Scene) -> None:
    """Kill a scheduler with a queue and a batch; all requests are submitted again."""
    running_request = stage.pool.number("gated", 1)
    visit = stage.server.gate.next()
    waiting = stage.pool.number("gated", 2)
    stage.server.wait_pending("gated", 1)
    victim = stage.process("scheduler gated")
    victim.kill()
    stage.replaced(victim, "scheduler gated")
    visit.release()
    while not (running_request.done() and waiting.done()):
        stage.server.gate.release_arrivals(0.05)
    assert running_request.result().tensors()["OUTPUT0"].tolist() == [[1]]
    assert waiting.result().tensors()["OUTPUT0"].tolist() == [[2]]


# --- models that misbehave ---


def in_one_batch(stage: Scene, *commands: str) -> list[Reply]:
    """Return the responses to requests for the model "crimes" that are executed together."""
    holder = stage.pool.infer("crimes", crime("gate"))
    visit = stage.server.gate.next()
    pending_calls = []
    for count, word in enumerate(commands, 1):
        pending_calls.append(stage.pool.infer("crimes", crime(word)))
        stage.server.wait_pending("crimes", count)
    visit.release()
    assert is_right(holder.result())
    return [answer.result() for answer in pending_calls]


def model_does(command: str, error: str = "") -> Callable[[Scene], None]:
    """Return a fault in which one request of a batch makes the model execute a command."""

    def commit(stage: Scene) -> None:
        first_reply, bad_reply, second_reply = in_one_batch(stage, "ok", command, "ok")
        assert is_right(first_reply), first_reply
        assert is_right(second_reply), second_reply
        assert bad_reply.status == 500 or (bad_reply.status == 503 and not error), bad_reply
        assert error in bad_reply.error
        assert_text_is_for_clients(bad_reply.error, stage.server)
        sent_at = time.monotonic()
        assert is_right(stage.http.infer("crimes", crime("ok")))
        assert time.monotonic() - sent_at < RECOVERY_S

    return commit


def model_hangs(stage: Scene) -> None:
    """Let the model hang; the log contains the stack of each of the two killed processes."""
    model_does("hang")(stage)
    log = stage.server.log()
    stacks = r"its stacks: wait \(\S+/threading.py:\d+\) < wait [^|]* < obey \(\S+/1/model.py:\d+\)"
    for requests in ("3 requests", "1 request"):
        reason = f"an execution of {requests} exceeded the limit of 3 seconds"
        assert re.search(rf"instance 'crimes_0_0' is killed: {reason}; {stacks}", log), log


def model_forks(stage: Scene) -> None:
    """Let the model fork; the forked process sends no response."""
    assert all(map(is_right, in_one_batch(stage, "ok", "fork", "ok")))
    assert is_right(stage.http.infer("crimes", crime("fork")))


def assert_text_is_for_clients(text: str, server: Server) -> None:
    """Check that an error text contains no path, pid or endpoint of the server."""
    assert str(server.run_dir) not in text
    assert "ipc://" not in text and "Traceback" not in text
    for process in server.tree():
        assert f"pid {process.pid}" not in text


# --- clients that misbehave ---


def infer_head(model: str, size: int, *lines: str) -> bytes:
    start = f"POST /v2/models/{model}/infer HTTP/1.1"
    return "\r\n".join(
        (start, "Host: localhost", f"Content-Length: {size}", *lines, "", "")
    ).encode()


def infer_text(model: str, request: dict) -> bytes:
    body = json.dumps(request).encode()
    return infer_head(model, len(body)) + body


def hang_up_at_every_byte(stage: Scene) -> None:
    """Disconnect at every position of a request, and while it is executed."""
    text = infer_text("crimes", crime("ok"))
    for length in range(1, len(text), 17):
        with raw_connection(stage.server.http_port) as connection:
            connection.sendall(text[:length])
    for _ in range(20):
        with raw_connection(stage.server.http_port) as connection:
            connection.sendall(text)


def hang_up_in_a_batch(stage: Scene) -> None:
    """Disconnect one client of a running batch; the others receive their responses."""
    holder = stage.pool.infer("crimes", crime("gate"))
    visit = stage.server.gate.next()
    remaining_requests = [stage.pool.infer("crimes", crime("ok"))]
    stage.server.wait_pending("crimes", 1)
    with raw_connection(stage.server.http_port) as connection:
        connection.sendall(infer_text("crimes", crime("gate")))
        stage.server.wait_pending("crimes", 2)
        remaining_requests.append(stage.pool.infer("crimes", crime("ok")))
        stage.server.wait_pending("crimes", 3)
        visit.release()
        visit = stage.server.gate.next()
    visit.release()
    assert is_right(holder.result())
    assert all(is_right(answer.result()) for answer in remaining_requests)


def hang_up_instead_of_reading(stage: Scene) -> None:
    """Request large outputs, read a part, and disconnect."""
    values = np.zeros(4_000_000, np.float32).tobytes()
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    body, headers = binary_request([("INPUT0", "FP32", [4_000_000], values)], outputs=outputs)
    head = infer_head("identity", len(body), *(f"{name}: {headers[name]}" for name in headers))
    for _ in range(3):
        with raw_connection(stage.server.http_port) as connection:
            connection.sendall(head + body)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


# --- regions that changed after registration ---


def truncate(new_size: int) -> Callable[[Scene], None]:
    """Return a fault that truncates a registered region; only its client receives an error."""

    def commit(stage: Scene) -> None:
        with SharedObject(2 * NUMBERS.nbytes) as shared_object:
            shared_object.write(NUMBERS)
            stage.http.register("cut", shared_object.key, 2 * NUMBERS.nbytes).ok()
            assert stage.http.infer("identity", region_request("cut", NUMBERS.nbytes)).status == 200
            shared_object.truncate(new_size)
            for _ in range(3):
                reply = stage.http.infer("identity", region_request("cut", NUMBERS.nbytes))
                assert reply.status in (400, 500, 503)
                assert_text_is_for_clients(reply.error, stage.server)
            stage.http.unregister("cut").ok()
            shared_object.truncate(2 * NUMBERS.nbytes)

    return commit


def truncate_while_executing(stage: Scene) -> None:
    """Truncate a region between the worker's check and its write."""
    with SharedObject(2 * 4096) as shared_object:
        stage.http.register("cut", shared_object.key, 2 * 4096).ok()
        request = {
            "inputs": [shm_input("INPUT0", "INT32", [1, 1024], "cut", 4096)],
            "outputs": [{"name": "OUTPUT0", "parameters": in_region("cut", 4096, 4096)}],
        }
        pending = stage.pool.infer("gated", request)
        visit = stage.server.gate.next()
        shared_object.truncate(0)
        visit.release()
        while not pending.done():
            stage.server.gate.release_arrivals(0.05)
        reply = pending.result()
        assert reply.status in (400, 500, 503), reply
        stage.http.unregister("cut").ok()


def give_pages_back(stage: Scene) -> None:
    """Punch holes into a region in use; readers see zeros."""
    with SharedObject(2 * NUMBERS.nbytes) as shared_object:
        shared_object.write(NUMBERS)
        stage.http.register("holes", shared_object.key, 2 * NUMBERS.nbytes).ok()
        for _ in range(20):
            pending = stage.pool.infer("identity", region_request("holes", NUMBERS.nbytes))
            shared_object.punch()
            assert pending.result().status == 200
        stage.http.unregister("holes").ok()


def unlink_while_used(stage: Scene) -> None:
    """Unlink a region in use; the registered object remains usable, also for new workers."""
    with SharedObject(2 * NUMBERS.nbytes) as region:
        region.write(NUMBERS)
        stage.http.register("gone", region.key, 2 * NUMBERS.nbytes).ok()
        region.path.unlink()
        for more in range(2):
            region.write(NUMBERS + more)
            stage.http.infer("identity", region_request("gone", NUMBERS.nbytes)).ok()
            assert (region.read(np.float32, len(NUMBERS), NUMBERS.nbytes) == NUMBERS + more).all()
            if not more:
                kill("worker identity.0")(stage)
        stage.http.unregister("gone").ok()


def unregister_while_used(stage: Scene) -> None:
    """Unregister a region in use: its requests use it to their end, also if its name is reused."""
    with SharedObject(2 * 4096) as shared_object, SharedObject(2 * 4096) as other_object:
        shared_object.write(np.full(1024, 5, np.int32))
        stage.http.register("r", shared_object.key, 2 * 4096).ok()
        request = {
            "inputs": [shm_input("INPUT0", "INT32", [1, 1024], "r", 4096)],
            "outputs": [{"name": "OUTPUT0", "parameters": in_region("r", 4096, 4096)}],
        }
        pending = stage.pool.infer("gated", request)
        visit = stage.server.gate.next()
        stage.http.unregister("r").ok()
        stage.http.infer("identity", region_request("r", 4096)).ok()
        stage.http.register("r", other_object.key, 2 * 4096).ok()
        visit.release()
        assert pending.result().status == 200
        assert (shared_object.read(np.int32, 1024, 4096) == 5).all()
        assert not other_object.read(np.int32, 2048).any()
        stage.http.unregister("r").ok()


def leave_processes_behind(stage: Scene) -> None:
    """Kill a worker; the processes started by its model exit at once, including their children."""
    worker, child_processes = start_processes(stage.server)
    worker.kill()
    _, alive = psutil.wait_procs(child_processes, timeout=RECOVERY_S)
    assert not alive

    def is_ready_again() -> bool:
        return stage.server.answers("/v2/models/crimes/ready")

    until("it is here again", is_ready_again, LONGEST_PAUSE_S + RECOVERY_S)


CRIMES: dict[str, Crime] = {
    "kill a worker": Crime(kill("worker simple.0")),
    "kill a worker again and again": Crime(kill_repeatedly),
    "kill a worker with a batch": Crime(kill_with_requests_inside),
    "kill a scheduler": Crime(kill("scheduler simple")),
    "kill a scheduler that has counted": Crime(kill_a_scheduler_that_has_counted),
    "kill a scheduler with a queue": Crime(kill_a_scheduler_with_requests_inside),
    "kill a gateway": Crime(kill("gateway http 0"), connections=True),
    "kill the zygote of the workers": Crime(kill_a_zygote("worker zygote", "worker gated.0")),
    "kill the zygote of the others": Crime(kill_a_zygote("front zygote", "scheduler gated")),
    "kill a spare zygote": Crime(kill("spare worker zygote")),
    "kill everyone but the supervisor": Crime(kill_all_but_the_supervisor, within_s=10.0,
        connections=True),
    "stop a worker": Crime(stop("worker simple.0"), within_s=STOP_GRACE_S + RECOVERY_S),
    "stop a scheduler": Crime(stop("scheduler simple"), within_s=STOP_GRACE_S + RECOVERY_S),
    "stop a gateway": Crime(stop("gateway http 0"), within_s=STOP_GRACE_S + RECOVERY_S,
        connections=True),
    "stop the zygote of the workers": Crime(stop_a_zygote("worker zygote", "worker gated.0")),
    "stop the zygote of the others": Crime(stop_a_zygote("front zygote", "scheduler gated")),
    "stop everyone but the supervisor": Crime(stop_all_but_the_supervisor, within_s=10.0,
        connections=True, more_memory=TORCH_BYTES),
    "stop a worker for a moment": Crime(stop_briefly("worker simple.0")),
    "an error for one of a batch": Crime(model_does("error", "as you wished")),
    "an exception": Crime(model_does("raise", "ValueError: raised as you wished")),
    "a fork": Crime(model_forks),
    "a hang": Crime(model_hangs),
    "os._exit": Crime(model_does("exit")),
    "a segmentation fault": Crime(model_does("segfault")),
    "a model that stops itself": Crime(model_does("stop")),
    "a model that leaves processes behind": Crime(leave_processes_behind),
    "clients that hang up while they ask": Crime(hang_up_at_every_byte),
    "a client that hangs up in a batch": Crime(hang_up_in_a_batch),
    "clients that hang up instead of reading": Crime(hang_up_instead_of_reading,
        more_memory=3 * ARENA_BYTES),
    "a region cut to nothing": Crime(truncate(0)),
    "a region cut in its output": Crime(truncate(NUMBERS.nbytes + 4096)),
    "a region cut while executing": Crime(truncate_while_executing),
    "a region whose pages are given back": Crime(give_pages_back),
    "a region unlinked while used": Crime(unlink_while_used),
    "a region unregistered while used": Crime(unregister_while_used),
}  # fmt: skip


@pytest.mark.parametrize("name", CRIMES)
@pytest.mark.usefixtures("state_before")
def test_recovery_from_a_crime(server: Server, name: str) -> None:
    crime = CRIMES[name]
    with scene(server, crime.more_memory) as stage:
        crime.commit(stage)
        assert_recovers(stage, time.monotonic(), crime.within_s)
        unexpected_answers = [
            answer
            for answer in stage.load.troubles()
            if not (crime.connections and answer.is_disconnected)
        ]
        assert unexpected_answers == []


def test_no_resources_remain_after_all_faults(server: Server, state_before: State) -> None:
    assert_is_as_it_was(server, state_before, TORCH_BYTES + 3 * ARENA_BYTES)
