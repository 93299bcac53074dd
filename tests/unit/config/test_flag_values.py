"""The values of flags: caches, resources, gRPC's settings."""

from pathlib import Path

import pytest

from shmserve.config import command_line, server
from shmserve.config.flags import cache_byte_size, parse_resources
from shmserve.errors import InvalidArgument
from shmserve.gateway.settings import GrpcSettings


def test_the_size_of_the_cache() -> None:
    assert cache_byte_size([], None) == 0
    assert cache_byte_size([], 5) == 5
    assert cache_byte_size(["local,size=1048576"], None) == 1 << 20
    assert cache_byte_size(["local,size=1", "local,size=2"], None) == 2


@pytest.mark.parametrize(
    ("flags", "byte_size", "text"),
    [
        (["local"], None, "is not local,size=BYTES"),
        (["local,size"], None, "is not local,size=BYTES"),
        (["local,size=x"], None, "'x' is not an integer"),
        (["local,size=-1"], None, "out of range"),
        (["local,width=1"], None, "unknown setting 'width'"),
        (["redis,host=x"], None, "no cache 'redis'"),
        (
            ["local,size=1", "redis,host=x"],
            None,
            "found multiple cache configurations, but only a single cache is currently supported",
        ),
        (["local,size=1"], 1, "Incompatible flags"),
    ],
)
def test_wrong_cache_flags_are_refused(flags: list[str], byte_size: int | None, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        cache_byte_size(flags, byte_size)


def test_a_resource_is_per_device_of_one_device_or_global() -> None:
    assert parse_resources(["R1:10", "R2:5:0", "R2:8:1", "R3:2:global"]) == (
        ("R1", None, 10),
        ("R2", 0, 5),
        ("R2", 1, 8),
        ("R3", -1, 2),
    )


@pytest.mark.parametrize("text", ["", "R", "R:", ":3", "R:x", "R:1:", "R:1:x", "R:-1", "R:1:2:3"])
def test_malformed_resources_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--rate-limit-resource: "):
        parse_resources([text])


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ([], GrpcSettings()),
        (["--grpc-infer-response-compression-level=low"], GrpcSettings(compression_level=1)),
        (["--grpc-keepalive-time=1", "--grpc-keepalive-timeout=2",
         "--grpc-keepalive-permit-without-calls=true", "--grpc-http2-max-pings-without-data=3",
         "--grpc-http2-min-recv-ping-interval-without-data=4", "--grpc-http2-max-ping-strikes=5",
         "--grpc-max-connection-age=6", "--grpc-max-connection-age-grace=7"],
         GrpcSettings(None, 0, 1, 2, True, 3, 4, 5, 6, 7)),
    ],
)  # fmt: skip
def test_every_flag_is_a_setting(flags: list[str], settings: GrpcSettings) -> None:
    config = server.from_flags(
        command_line.parse([f"--model-repository={Path(__file__).parent}", *flags]), {}
    )
    assert config.grpc is not None and config.grpc.settings == settings


def test_names_and_origins_are_checked_and_repeat() -> None:
    flags = [
        *("--allowed-host=inference.example.com", "--allowed-host=*.corp.test", "--allowed-host=*"),
        *("--cors-allow-origin=https://app.example.com:8443", "--cors-allow-origin=*"),
        *("--served-model-name=org/name", "--served-model-name=tiny=gpt"),
    ]
    repository = f"--model-repository={Path(__file__).parent}"
    config = server.from_flags(command_line.parse([repository, *flags]), {})
    assert config.gateway.allowed_hosts == ("inference.example.com", "*.corp.test", "*")
    assert config.gateway.cors_origins == ("https://app.example.com:8443", "*")
    assert config.gateway.served_names == (("", "org/name"), ("tiny", "gpt"))
    wrong_cases = {
        "--allowed-host": ("https://a.example", "a.example:80", "a.*.example", ""),
        "--cors-allow-origin": ("app.example.com", "https://a.example/", "https://A/b", "null"),
        "--served-model-name": ("", "tiny=", "=gpt"),
    }
    for flag, values in wrong_cases.items():
        for value in values:
            with pytest.raises(InvalidArgument, match=f"{flag}: (got )?'"):
                server.from_flags(command_line.parse([repository, f"{flag}={value}"]), {})
