"""A model that connects to every socket of its server and sends messages of other roles."""

import json
import os
import socket
import stat
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.control_requests import (
    ChangeLogging,
    LoadModel,
    RegisterRegion,
    UnloadModel,
    UnregisterRegion,
)
from shmserve.ipc.messages.inference import BatchFinished, InstanceReady, Release
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.zmtp import Dealer

PATIENCE_S = 5.0


def commands(pid):
    """Return commands with an effect from each role; `pid` is the process that they concern."""
    return [
        m.Started(),
        m.GatewayReady(),
        m.SchedulerReady(pid),
        m.WorkerStarted(pid),
        UnregisterRegion(1, "", 0, []),
        RegisterRegion(2, "foreign", "/foreign", 0, 4096, 0, [], False, False),
        ChangeLogging(3, {"log_verbose_level": 7}),
        UnloadModel(4, "constant", False),
        LoadModel(5, "spare", "", {}),
        m.StatisticsSnapshot({}, []),
        m.KillInstance(pid, "it was asked for"),
        InstanceReady(0, pid),
        BatchFinished(1, 0, 0, 0, 0, []),
        Release(pid, list(range(0, 1 << 20, 4096))),
        ProcessExited(pid, "it was asked for"),
        m.InstanceGone(0, "it was asked for"),
        m.Drain(),
        m.Drained(),
        m.Stop(),
    ]


class TritonPythonModel:
    """PLAN: {"run_dir", "pids"}; REPORT: by socket and name, whether it was let in."""

    def initialize(self, args):
        """Create the lists of accepted links, which stay open."""
        self.links = []

    def execute(self, requests):
        responses = []
        for request in requests:
            plan = pb_utils.get_input_tensor_by_name(request, "PLAN").as_numpy().flat[0]
            report = json.dumps(self.intrude(**json.loads(plan))).encode()
            tensor = pb_utils.Tensor("REPORT", np.array([report], object))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses

    def intrude(self, run_dir, pids):
        """Connect to every socket in the name of every process, including this one."""
        findings = {}
        for path in sorted(Path(run_dir).rglob("*")):
            if not stat.S_ISSOCK(path.stat().st_mode):
                continue
            if path.name == "door":
                findings["door"] = self.at_the_door(path)
                continue
            for pid in (os.getpid(), *pids):
                names = (f"gateway.0.{pid}", f"0.{pid}", f"{pid}.1.ab", f"scheduler.1.{pid}")
                patience_s = 0.0 if pid == os.getpid() else PATIENCE_S
                attempts = [self.let_in(path, name, commands(pid), patience_s) for name in names]
                findings[f"{path.relative_to(run_dir)} {pid}"] = attempts
        return findings

    def let_in(self, path, name, messages, patience_s):
        """Return whether the peer keeps the link after all commands."""
        link = Dealer(f"ipc://{path}", name)
        for message in messages:
            link.send(message)
        end = time.monotonic() + patience_s
        while link.connected and time.monotonic() < end:
            link.wait(end - time.monotonic())
            link.receive()
        self.links.append(link)
        return link.connected

    @staticmethod
    def at_the_door(path):
        """Return the errors that a local client receives for messages of other roles."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.settimeout(PATIENCE_S)
            door.connect(str(path))
            for message in commands(os.getpid()):
                try:
                    door.send(frames.pack([message]))
                except OSError:
                    break
            try:
                return door.recv(1 << 16) != b""
            except OSError:
                return False
