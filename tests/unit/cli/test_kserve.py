"""`shmserve kserve`: the manifest is what KServe's API takes, and its flags are the server's."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from shmserve import __version__, cli
from shmserve.config import command_line, server

SCHEMA = json.loads(Path(__file__).with_name("serving_runtime.schema.json").read_text())


def print_manifest(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["kserve", *arguments]) == 0
    return dict(yaml.safe_load(capsys.readouterr().out))


@pytest.fixture
def manifest(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return print_manifest(capsys)


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (container,) = manifest["spec"]["containers"]
    return dict(container)


def test_the_manifest_is_valid_for_the_api(manifest: dict[str, Any]) -> None:
    jsonschema_rs.validator_for(SCHEMA).validate(manifest)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifest: manifest.update(apiVersion="serving.kserve.io/v1beta1"),
        lambda manifest: manifest["spec"].update(terminationGracePeriodSeconds=40),
        lambda manifest: manifest["spec"].pop("containers"),
        lambda manifest: manifest["spec"]["containers"][0].pop("name"),
        lambda manifest: manifest["spec"]["containers"][0]["readinessProbe"].update(period=5),
        lambda manifest: manifest["spec"]["annotations"].update({"prometheus.kserve.io/port": 80}),
        lambda manifest: manifest["spec"]["volumes"][0]["emptyDir"].update(medium=1),
    ],
)
def test_the_schema_refuses(
    manifest: dict[str, Any], spoil: Callable[[dict[str, Any]], object]
) -> None:
    corrupted = copy.deepcopy(manifest)
    spoil(corrupted)
    assert not jsonschema_rs.validator_for(SCHEMA).is_valid(corrupted)


def test_the_image_is_named(capsys: pytest.CaptureFixture[str], manifest: dict[str, Any]) -> None:
    assert container(manifest)["image"] == f"shmserve:{__version__}"
    assert container(print_manifest(capsys, "--image=registry/a:1"))["image"] == "registry/a:1"


def test_the_flags_of_the_container_match_its_ports_and_probes(
    manifest: dict[str, Any], tmp_path: Path
) -> None:
    main = container(manifest)
    assert main["name"] == "kserve-container"  # the folder at which KServe mounts the model
    assert main["command"] == ["shmserve", "serve"]
    args = [argument.replace("/mnt/models", str(tmp_path)) for argument in main["args"]]
    config = server.from_flags(command_line.parse(args), {})
    assert config.model_repositories == (tmp_path,)  # where KServe puts the models
    assert [port["containerPort"] for port in main["ports"]] == [config.http.port]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert main[probe]["httpGet"]["port"] == config.http.port
    annotations = manifest["spec"]["annotations"]
    assert annotations["prometheus.kserve.io/port"] == str(config.metrics_port)
    (_, pause) = main["lifecycle"]["preStop"]["exec"]["command"]
    assert int(pause) + config.exit_timeout_s < 30  # terminationGracePeriodSeconds


def test_shared_memory_is_mounted(manifest: dict[str, Any]) -> None:
    (mount,) = manifest["spec"]["volumes"]
    assert mount["emptyDir"]["medium"] == "Memory"
    assert container(manifest)["volumeMounts"] == [{"name": mount["name"], "mountPath": "/dev/shm"}]
