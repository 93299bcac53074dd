"""The settings of the gRPC listener, from the command line."""

from pathlib import Path

import pytest

from shmserve.config import command_line, server
from shmserve.gateway.settings import GrpcSettings


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ([], GrpcSettings()),
        (["--grpc-infer-response-compression-level=low"], GrpcSettings(compression_level=1)),
        (
            [
                "--grpc-keepalive-time=1",
                "--grpc-keepalive-timeout=2",
                "--grpc-keepalive-permit-without-calls=true",
                "--grpc-http2-max-pings-without-data=3",
                "--grpc-http2-min-recv-ping-interval-without-data=4",
                "--grpc-http2-max-ping-strikes=5",
                "--grpc-max-connection-age=6",
                "--grpc-max-connection-age-grace=7",
            ],
            GrpcSettings(None, 0, 1, 2, True, 3, 4, 5, 6, 7),
        ),
    ],
)
def test_every_flag_is_a_setting(flags: list[str], settings: GrpcSettings) -> None:
    config = server.from_flags(
        command_line.parse([f"--model-repository={Path(__file__).parent}", *flags]), {}
    )
    assert config.grpc is not None and config.grpc.settings == settings
