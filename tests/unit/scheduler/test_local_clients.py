"""A scheduler's checks of the fields in local clients' requests."""

from pathlib import Path

import pytest

from shmserve.errors import InvalidArgument
from shmserve.ipc.endpoints import FIRST_LOCAL_CLIENT as FIRST
from shmserve.ipc.endpoints import Capabilities
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.inference import MAX_TIMEOUT_US
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inference, pack_inference
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.trace import TraceContext
from shmserve.scheduler.hosting.local_clients import LocalClientRules
from tests.support.servers import run_python

CONFIG = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "X", "data_type": "TYPE_INT8", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_INT8", "dims": [2]}],
}
NOW = 10**15
SECOND_NS = 10**9


@pytest.mark.parametrize(
    ("arrival", "expected"),
    [
        (NOW - 1, NOW - 1), (NOW - SECOND_NS, NOW - SECOND_NS), (NOW - SECOND_NS - 1, NOW),
        (1, NOW), (0, NOW), (-(2**63), NOW),
    ],
)  # fmt: skip
def test_an_arrival_time_is_accepted_within_a_second(arrival: int, expected: int) -> None:
    """A reported arrival one day ago would distort the mean of all requests for months."""
    packed_request = pack_inference(Inference((TensorRef("X", "INT8", (1, 2), b"ab"),), ()))
    rules = LocalClientRules(Capabilities(bytes(32)), Signature(ModelSpec.of(CONFIG), "1"))
    submit = m.Submit(1, *packed_request, arrival, 0, 0, 0, "mine")
    checked_submit = rules.validate(FIRST, submit, NOW)
    assert checked_submit.arrived_ns == expected
    assert checked_submit.request_id == "mine"
    assert (checked_submit.schema, checked_submit.data) == packed_request


@pytest.mark.parametrize(
    ("deadline", "timeout_us", "limit", "end_ns"),
    [
        (0, 0, 0, 0),
        (NOW + SECOND_NS, 0, 0, NOW + SECOND_NS),
        (0, 500, 0, NOW - 7 + 500_000),
        (0, 0, 500, NOW - 7 + 500_000),
        (NOW + 1, 500, 400, NOW + 1),
        (NOW + SECOND_NS, 500, 400, NOW - 7 + 400_000),
        (NOW + SECOND_NS, 300, 400, NOW - 7 + 300_000),
        (-1, -1, 400, NOW - 7 + 400_000),
        (0, (1 << 64) - 1, 0, NOW - 7 + MAX_TIMEOUT_US * 1000),
    ],
)
def test_the_shortest_limit_holds(deadline: int, timeout_us: int, limit: int, end_ns: int) -> None:
    packed_request = pack_inference(Inference((TensorRef("X", "INT8", (1, 2), b"ab"),), ()))
    rules = LocalClientRules(Capabilities(bytes(32)), Signature(ModelSpec.of(CONFIG), "1"), limit)
    submit = m.Submit(1, *packed_request, NOW - 7, deadline, timeout_us, 0, "")
    assert rules.validate(FIRST, submit, NOW).deadline_ns == end_ns


def test_a_deadline_counts_from_the_arrival_at_the_scheduler() -> None:
    packed_request = pack_inference(Inference((TensorRef("X", "INT8", (1, 2), b"ab"),), ()))
    rules = LocalClientRules(Capabilities(bytes(32)), Signature(ModelSpec.of(CONFIG), "1"), 400)
    submit = m.Submit(1, *packed_request, NOW + SECOND_NS, 0, 0, 0, "")
    assert rules.validate(FIRST, submit, NOW).deadline_ns == NOW + 400_000


def test_a_valid_trace_context_is_continued() -> None:
    packed_request = pack_inference(Inference((TensorRef("X", "INT8", (1, 2), b"ab"),), ()))
    rules = LocalClientRules(Capabilities(bytes(32)), Signature(ModelSpec.of(CONFIG), "1"), 500)
    trace = TraceContext.new().encoded
    submit = m.Submit(1, *packed_request, NOW, 0, 0, 0, "mine", trace=trace)
    # The trace context of a client is accepted.
    assert rules.validate(FIRST, submit, NOW).trace == trace
    with pytest.raises(InvalidArgument, match="trace is malformed"):
        rules.validate(FIRST, m.Submit(1, *packed_request, NOW, 0, 0, 0, trace="00-x"), NOW)


# malloc maps larger blocks than each list of the frame, which is therefore on the heap. The log
# record of the malformed frame is above the lists, and stays.
_LARGE_FRAME = """
import logging, os, socket, sys
from pathlib import Path
from shmserve.ipc import endpoints, processes
from shmserve.ipc.transport import zmtp
from shmserve.scheduler.hosting.local_clients import LocalClientListener

def resident():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10

class Keep(logging.Handler):
    records = []
    def emit(self, record):
        self.records.append(bytes(400_000))

logging.basicConfig(handlers=[Keep()])
processes.unmap_large_blocks_on_free()
capabilities, number = endpoints.Capabilities(b"key"), endpoints.FIRST_LOCAL_CLIENT
listener = LocalClientListener(f"ipc://{sys.argv[1]}", capabilities, None)
identity = f"{number}.{capabilities.token(number)}.one".encode()
lists = (b"\\xdd" + (60_000).to_bytes(4, "big") + b"\\xc0" * 60_000) * 60
frame = b"\\xdd" + (61).to_bytes(4, "big") + b"\\x01" + lists
frame = memoryview(b"\\2" + len(frame).to_bytes(8, "big") + frame)
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    client.send(zmtp.GREETING + zmtp.ready_command("DEALER", identity))
    listener.router.receive()
    before = resident()
    while frame:
        frame = frame[client.send(frame[:60_000]):]
        listener.router.receive()
listener.process_exited(number)
print(len(Keep.records), resident() - before)
"""


def test_memory_of_large_frames_is_returned_after_the_exit_of_their_client(tmp_path: Path) -> None:
    run = run_python("-c", _LARGE_FRAME, tmp_path / "socket")
    assert run.returncode == 0, run.stderr
    records, kept_bytes = map(int, run.stdout.split())
    assert records == 1 and kept_bytes < 4 << 20
