"""A model with OUTPUT0 = INPUT0, unless the COMMAND of a request causes a fault."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import threading

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Commands: ok, gate, error, raise, hang, exit, segfault, stop, fork, start."""

    def execute(self, requests):
        commands = [self.command(request) for request in requests]
        answers = [
            self.respond(request, command)
            for request, command in zip(requests, commands, strict=True)
        ]
        for command in commands:
            self.obey(command)
        return answers

    @staticmethod
    def command(request):
        return pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy().flat[0].decode()

    @staticmethod
    def respond(request, command):
        if command == "error":
            return pb_utils.InferenceResponse([], error=pb_utils.TritonError("as you wished"))
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)])

    def obey(self, command):
        if command == "raise":
            raise ValueError("raised as you wished")
        if command == "fork":
            child = os.fork()
            if not child:
                raise ValueError("nobody asked this process")
            os.waitpid(child, 0)
        if command == "start":
            subprocess.Popen(["sh", "-c", "setsid sleep 600 & wait"])
            if not os.fork():
                threading.Event().wait()
        if command == "gate":
            self.wait()
        if command == "hang":
            threading.Event().wait()
        if command == "exit":
            os._exit(3)
        if command == "segfault":
            ctypes.string_at(0)
        if command == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)

    @staticmethod
    def wait():
        """Wait at the gate; an open gate has no listener."""
        with socket.socket(socket.AF_UNIX) as gate:
            try:
                gate.connect(os.environ["GATE"])
            except OSError:
                return
            report = {"batch": [], "rows": [], "pid": os.getpid()}
            gate.sendall(json.dumps(report).encode() + b"\n")
            gate.recv(1)
