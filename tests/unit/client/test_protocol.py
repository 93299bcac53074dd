"""The page of the native protocol describes the code."""

import dataclasses
import sys
import textwrap
import typing
from pathlib import Path

import pytest

from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.unions import (
    LocalClientToScheduler,
    LocalClientToSupervisor,
    SupervisorToLocalClient,
)
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inference, pack_inference
from shmserve.ipc.transport import frames
from tests.support.servers import run_python

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "shmserve" / "client" / "PROTOCOL.md").read_text()
DIRECTIONS = {
    "program to listener": LocalClientToSupervisor,
    "listener to program": SupervisorToLocalClient,
    "program to scheduler": LocalClientToScheduler,
    "scheduler to program": m.Finished | m.Responded | m.Failed | m.Settled,
}


@pytest.mark.parametrize("title", DIRECTIONS)
def test_the_lists_have_every_message_and_field(title: str) -> None:
    lines = [f"{title[0].upper()}{title[1:]}:\n"]
    for cls in typing.get_args(DIRECTIONS[title]):
        fields = ", ".join(f"{f.name}: {f.type}" for f in dataclasses.fields(cls))
        message = f"{cls.TAG}({fields})"
        lines += textwrap.wrap(message, 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
    assert "\n".join(lines) + "\n\n" in PAGE


def test_the_example_equals_the_packed_message() -> None:
    packed = pack_inference(Inference((TensorRef("x", "UINT8", (2,), b"\x05\x06"),)))
    frame = frames.pack([m.Submit(7, *packed, 1000, 0, 0, 0)]).hex()
    start = PAGE.index(f"    92 {frames.VERSION:02x}")
    assert "".join(PAGE[start : PAGE.index("\n\n", start)].split()) == frame


def test_importing_the_client_costs_little() -> None:
    program = "import shmserve.client, sys; print(*sys.modules)"
    result = run_python("-X", "importtime", "-c", program, check=True)
    loaded_modules = {name.partition(".")[0] for name in result.stdout.split()}
    foreign = loaded_modules - set(sys.stdlib_module_names) - {"shmserve"}
    allowed = {"numpy", "msgpack", "__main__", "sitecustomize", "cython_runtime"}
    assert {n for n in foreign if not n.startswith(("_", "numpy", "cython"))} <= allowed
    assert "asyncio" not in loaded_modules  # asyncio programs import shmserve.client.aio
