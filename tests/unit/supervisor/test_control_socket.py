"""The supervisor's socket to its processes, and changes that each of them acknowledges."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.common.trace_settings import TraceSettings
from shmserve.errors import InvalidArgument
from shmserve.ipc import endpoints
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.control_requests import ChangeLogging, FindModel, IndexRepository
from shmserve.ipc.messages.publications import Acknowledged, SchedulerLost
from shmserve.ipc.transport.zmtp import Dealer
from shmserve.supervisor.processes.control_socket import (
    Acknowledgements,
    ControlSocket,
    TraceControl,
)
from tests.rigs.arrivals import receive_arrived


async def test_the_last_messages_of_a_process_are_read_before_its_end(tmp_path: Path) -> None:
    """The end of a process may be noticed while its words wait to be read."""
    received: list[Any] = []
    control = ControlSocket(endpoints.control(tmp_path))
    control.register_peer(os.getpid(), "worker", received.append)
    worker = Dealer(endpoints.control(tmp_path), f"worker.1.0.{os.getpid()}")
    worker.send(m.WorkerStarted(os.getpid()))
    worker.send(m.LoadFailed("INTERNAL", "no such file"))
    control.remove_process(os.getpid())
    worker.close()
    control.close()
    assert received == [m.WorkerStarted(os.getpid()), m.LoadFailed("INTERNAL", "no such file")]


async def test_requests_reach_handlers_and_acknowledgements_waiters(tmp_path: Path) -> None:
    """All other messages go to the component that started the process."""
    received: list[Any] = []
    calls: list[Any] = []
    control = ControlSocket(endpoints.control(tmp_path))
    control.serve((IndexRepository, FindModel), lambda pid, message: calls.append((pid, message)))
    gateway = Dealer(endpoints.control(tmp_path), f"gateway.1.{os.getpid()}")
    gateway.send(m.Started())
    gateway.send(IndexRepository(1, False))
    control.receive_all()
    assert not (received or calls), "nobody has started it"
    control.register_peer(os.getpid(), "gateway", received.append)
    acknowledged = asyncio.ensure_future(control.publish(Acknowledged, "gateway"))
    await asyncio.sleep(0)
    assert not acknowledged.done()
    gateway.send(Acknowledged(1))
    control.receive_all()
    await acknowledged
    gateway.close()
    control.close()
    assert received == [m.Started()]
    assert calls == [(os.getpid(), IndexRepository(1, False))]


async def test_only_workers_that_call_models_receive_news_of_schedulers(tmp_path: Path) -> None:
    stop_message, lost_message = m.Stop(), SchedulerLost("ipc://a", "")
    control = ControlSocket(endpoints.control(tmp_path))
    control.register_peer(os.getpid(), "worker", lambda message: None)
    worker = Dealer(endpoints.control(tmp_path), f"worker.1.0.{os.getpid()}")
    worker.send(m.WorkerStarted(os.getpid()))
    control.receive_all()
    received = []
    for _ in range(2):
        control.broadcast(SchedulerLost("ipc://a", ""), "caller")
        control.broadcast(m.Stop(), "worker", "caller")
        control.flush()
        received.append(receive_arrived(worker))
        control.add_caller(os.getpid())
    worker.close()
    control.close()
    assert received == [[stop_message], [lost_message, stop_message]]


async def test_a_message_of_another_role_is_refused(tmp_path: Path) -> None:
    """Models run foreign code in workers: that changes no log settings, and registers no region."""
    received: list[Any] = []
    control = ControlSocket(endpoints.control(tmp_path))
    control.serve((ChangeLogging, FindModel), lambda pid, text: received.append(text))
    control.register_peer(os.getpid(), "worker", received.append)
    worker = Dealer(endpoints.control(tmp_path), f"worker.1.0.{os.getpid()}")
    for text in (
        ChangeLogging(1, {"log_verbose_level": 7}),
        m.Started(),
        Acknowledged(1),
        FindModel(1, "m", ""),
    ):
        worker.send(text)
    control.receive_all()
    worker.close()
    control.close()
    assert received == [FindModel(1, "m", "")]


async def test_a_refused_trace_setting_leaves_no_settings_of_its_model() -> None:
    """A new gateway or scheduler receives the settings only if they were changed."""
    sent: list[Any] = []
    control: Any = SimpleNamespace(
        broadcast=lambda message, *roles: sent.append(message),
        send=lambda address, message: sent.append(message),
    )
    tracing = TraceControl(control, TraceSettings())
    for model in ("m", ""):
        with pytest.raises(InvalidArgument, match="invalid trace setting"):
            tracing.change(model, {"trace_level": ("TIMESTAMPS",)})
    tracing.send_settings(1)
    assert not sent
    tracing.change("m", {"trace_rate": 5})
    with pytest.raises(InvalidArgument, match="invalid trace setting"):
        tracing.change("m", {"trace_level": ("TIMESTAMPS",), "trace_rate": 7})
    assert tracing.change("m", {})["trace_rate"] == ["5"]
    assert [[*message.settings] for message in sent] == [["", "m"]]


async def test_every_connected_peer_must_acknowledge() -> None:
    changes = Acknowledgements()
    number = changes.begin({1, 2, 3})
    waiting_change = asyncio.ensure_future(changes.until_next_complete())
    changes.record_acknowledged(1, number)
    changes.record_acknowledged(1, number)
    changes.remove_peer(2)
    changes.record_acknowledged(4, number)
    changes.record_acknowledged(3, number + 1)
    assert not changes.is_acknowledged(number)
    await asyncio.sleep(0)
    changes.record_acknowledged(3, number)
    assert changes.is_acknowledged(number)
    await waiting_change
    assert changes.is_acknowledged(changes.begin(set()))


def test_a_change_that_all_peers_know_is_dropped() -> None:
    """A program may stay for weeks and acknowledge nothing, and models come and go."""
    changes = Acknowledgements()
    number = changes.begin({1})
    changes.record_acknowledged(1, number)
    assert not changes._missing_peers
    changes.record_acknowledged(1, number)
    assert changes.is_acknowledged(number)
