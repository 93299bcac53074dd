"""What an application is built of: flags by their names."""

from typing import Any

import pytest

import shmserve.ray
from shmserve.errors import InvalidArgument
from shmserve.ray import server


def test_flags_are_those_of_the_command_line() -> None:
    flags = {"model-repository": "/models", "load-model": ["a", "b"], "allow-grpc": False}
    assert server.arguments({**flags, "gateways": 2}) == [
        *("--model-repository=/models", "--load-model=a", "--load-model=b"),
        *("--allow-grpc=false", "--gateways=2"),
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"model-repositry": "/models"}, "unknown flag --model-repositry, did you mean"),
        ({"gateways": "many"}, "--gateways: "),
        (
            {"server": "/run/http.sock", "gateways": 2},
            "server: a server that is there has its own flags; found gateways",
        ),
    ],
)
def test_what_is_wrong_is_told_when_the_application_is_built(
    args: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        shmserve.ray.app(args)


def test_the_file_of_config_is_read_on_the_node() -> None:
    server.check({"config": "/only/there.yaml", "gateways": 2})
