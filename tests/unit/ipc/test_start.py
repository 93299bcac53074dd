"""The start records of processes can be encoded and decoded."""

from pathlib import Path

import pytest

from shmserve.common.auth_tokens import Restriction
from shmserve.gateway.settings import GatewaySettings, GatewayStart, GrpcSettings, Tls
from shmserve.ipc.messages.supervision import (
    HostStart,
    SchedulerStart,
    SchedulingLimits,
    WorkerStart,
    decode_start,
    encode_start,
)
from shmserve.ipc.model_spec import ModelSpec
from shmserve.logs import LogSettings

LOG = LogSettings(log_verbose_level=2)
RUN_DIR = Path("/tmp/run")
TLS = Tls("a", "b", None)
START_RECORDS = [
    HostStart("scheduler m", RUN_DIR, LOG),
    SchedulerStart(kind="scheduler", number=3, version="1",
        config=ModelSpec.of({"name": "m", "input": [{"dims": [1, -1]}]}), run_dir=RUN_DIR,
        capability_key=b"\0\xff",
        limits=SchedulingLimits(request_timeout_us=7, quantiles=(0.5, 0.9)),
        snapshot=[{"name": "m"}, []], worker_pids=[1, 2]),
    WorkerStart(
        number=3,
        index=0,
        model_name="m",
        version="1",
        model_dir=Path("/models/\udcff"),  # a file name that is not UTF-8
        run_dir=RUN_DIR,
        device="gpu:1",
        kind="GPU",
        device_id=1,
        instance_name="m_0_gpu1_0",
        backend_config={"a": "b"},
        arena_byte_size=1 << 40,
        threads=2,
        log=LOG,
    ),
    GatewayStart(gateway_name="grpc", run_dir=RUN_DIR,
        settings=GatewaySettings(tokens={"ab": ("admin", "infer")},
        grpc_restricted={"health": Restriction("k", "v")}, allow_client_shm=False),
        grpc=GrpcSettings(TLS, compression_level=6, max_connection_age_ms=1), log=LOG),
    GatewayStart(gateway_name="0", run_dir=RUN_DIR, settings=GatewaySettings(), http_sockets=2),
]  # fmt: skip


@pytest.mark.parametrize("start", START_RECORDS, ids=lambda start: type(start).__name__)
def test_an_encoded_start_decodes_to_the_same_start(start: object) -> None:
    assert decode_start(type(start), encode_start(start)) == start
