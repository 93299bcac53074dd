"""Model control: the served models in each mode, and replacement of a model under load."""

import base64
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support import repositories
from tests.support.load import Load
from tests.support.servers import Server, running, wait_exited
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, json_request

REQUEST_BODY = json_request(INPUT0=np.zeros(1, np.int32))
BROKEN_CODE = "raise RuntimeError('broken on purpose')\n"

Serve = Callable[..., Server]
Explicit = tuple[Server, Path]


def source(answer: int) -> str:
    text = (repositories.MODELS / "constant" / "1" / "model.py").read_text()
    return text.replace("ANSWER = 1", f"ANSWER = {answer}")


def rewrite(repository: Path, text: str, version: int = 1, name: str = "constant") -> None:
    folder = repository / name / str(version)
    folder.mkdir(exist_ok=True)
    new_path = folder / "model.py.new"
    new_path.write_text(text)
    new_path.rename(folder / "model.py")


def answer(http: Http, model: str = "constant") -> int:
    return int(http.infer(model, REQUEST_BODY).tensors()["OUTPUT0"][0])


def index(http: Http, **body: Any) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the index: (name, version) -> (state, reason)."""
    index_entries = http.post("/v2/repository/index", body or None).ok().json()
    return {
        (item["name"], item.get("version", "")): (item.get("state", ""), item.get("reason", ""))
        for item in index_entries
    }


# --- mode none ---


def test_mode_none_serves_both_repositories_and_refuses_control(
    tmp_path_factory: pytest.TempPathFactory, serve: Serve
) -> None:
    """A configuration of the name in --model-config-name replaces config.pbtxt where it exists."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    folder = repositories.add_as(first, "constant", "constant")
    repositories.add(second, "identity")
    (folder / "configs").mkdir()
    (folder / "configs" / "alt.pbtxt").write_text(
        (folder / "config.pbtxt").read_text()
        + 'parameters { key: "which" value { string_value: "alt" } }\n'
    )
    server = serve([first, second], "--model-config-name=alt")
    with server.http() as http:
        assert index(http) == {("constant", "1"): ("READY", ""), ("identity", "1"): ("READY", "")}
        assert answer(http) == 1
        assert http.config("constant")["parameters"] == {"which": {"string_value": "alt"}}
        assert "which" not in http.config("identity").get("parameters", {})
        for reply in (http.load("constant"), http.unload("constant")):
            assert reply.status == 503
            assert reply.error == (
                "explicit model load / unload is not allowed if polling is enabled "
                "(--model-control-mode is none; restart the server with explicit)"
            )
    assert "no effect" not in server.log()


def test_lines_in_the_log_that_operators_look_for(empty_server: Explicit) -> None:
    server, repository = empty_server
    old_length = len(server.log())
    repositories.add_as(repository, "good", "identity")
    repositories.add_as(repository, "bad", "constant")
    rewrite(repository, BROKEN_CODE, name="bad")
    with server.http() as http:
        http.load("good").ok()
        server.wait_log("loading: good:1")
        server.wait_log("successfully loaded 'good'")
        assert http.load("bad").status == 400
        server.wait_log("failed to load 'bad' version 1: Internal: ")
        server.wait_log("    Traceback (most recent call last):\n      File ")
        new_log = server.log()[old_length:]
        assert new_log.count("version 1: Internal: ") == 1  # the failure is logged only once
        assert f'File "{repository}/bad/1/model.py"' in new_log
        assert "workers/" not in new_log, "frames of the server"
        rewrite(repository, BROKEN_CODE, name="good")
        assert http.load("good").status == 400
        server.wait_log("model 'good': the loaded versions continue to serve: 1")
        http.unload("good").ok()
        server.wait_log("successfully unloaded 'good' version 1")


def test_a_model_may_have_any_name_of_a_folder(tmp_path: Path) -> None:
    """Both protocols, metrics, the process table and the log have the name unchanged."""
    names = (".a..b", "é: x", "m" * 255)
    for name in names:
        repositories.add_as(tmp_path, name, "constant")
    explicit = "--model-control-mode=explicit"
    with running(tmp_path, explicit, grpc=True) as server, server.http() as http:
        client = triton_grpc.InferenceServerClient(server.grpc_url)
        for name in names:
            client.load_model(name)
            path = f"/v2/models/{quote(name, safe='')}"
            assert http.get(path).ok().json()["name"] == name
            assert client.get_model_metadata(name).name == name
            reply = http.post(f"{path}/infer", REQUEST_BODY).ok().json()
            assert (reply["model_name"], reply["outputs"][0]["data"]) == (name, [1])
            server.wait_log(f"successfully loaded '{name}'")
        metrics_text = server.metrics()
        assert all(f'model="{name}"' in metrics_text for name in names)
        client.close()


def test_a_broken_model_ends_the_server(repository: Path) -> None:
    repositories.add(repository, "constant", "identity")
    rewrite(repository, BROKEN_CODE)
    with Server([repository]) as server:
        assert server.wait_exit(30) not in (0, None)
        assert "broken on purpose" in server.log()
        server.assert_exited([])


def assert_versionless(server: Server) -> None:
    unknown = "Request for unknown model: "
    with server.http() as http:
        for path, text in (
            ("versionless", "'versionless' has no available versions"),
            ("versionless/versions/1", "'versionless' version 1 is not found"),
            ("unreadable", "'unreadable' is not found"),
            ("unreadable/versions/1", "'unreadable' is not found"),
        ):
            reply = http.get(f"/v2/models/{path}")
            assert (reply.status, reply.error) == (404, unknown + text)


def test_a_broken_model_is_left_out_without_exit_on_error(repository: Path) -> None:
    repositories.add(repository, "constant", "identity")
    rewrite(repository, BROKEN_CODE)
    for name in ("versionless", "unreadable"):
        shutil.rmtree(repositories.add_as(repository, name, "constant") / "1")
    (repository / "unreadable" / "config.pbtxt").write_text("nonsense: 1")
    server = Server([repository], ["--exit-on-error=false", "--log-info=false"])
    try:
        server.wait_ready("/v2/models/identity/ready")
        server.wait_log(" model constant: failed (")
        # Part of the log line about the load.
        assert server.log().count("broken on purpose (model.py:1)") == 1
        for name, reason in (
            ("versionless", "at least one version must be available under the version policy of"),
            ("unreadable", "nonsense: no such field"),
        ):
            server.wait_log(f" model {name}: failed: ")
            lines = [line for line in server.log().splitlines() if f" model {name}: " in line]
            assert len(lines) == 1 and lines[0].startswith("E ") and reason in lines[0]
        with server.http() as http:
            # The worker logs the failure a moment before the index shows it.
            until("it has failed", lambda: index(http)[("constant", "1")][0] != "LOADING")
            assert "broken on purpose" in server.log()
            assert http.get("/v2/health/live").status == 200
            assert http.get("/v2/health/ready").status == 400
            state, reason = index(http)[("constant", "1")]
            assert state == "UNAVAILABLE"
            assert "broken on purpose" in reason
            reply = http.infer("constant", REQUEST_BODY)
            assert reply.status == 404
            assert reply.error == "Request for unknown model: 'constant' has no available versions"
            reply = http.infer("constant/versions/1", REQUEST_BODY)
            assert reply.status == 503
            assert (
                reply.error
                == "Request for unknown model: 'constant' version 1 is not at ready state"
            )
        assert_versionless(server)
        gateway = server.find_one("gateway http 0")
        gateway.kill()
        assert wait_exited(gateway, 5)
        assert_versionless(server)
    finally:
        server.stop()


def test_without_its_repository_a_server_is_not_live(tmp_path: Path) -> None:
    """The server exits, or reports that it is not live if --exit-on-error is disabled."""
    missing_folder = tmp_path / "missing"
    server = Server([missing_folder], ["--exit-on-error=false"])
    try:
        server.wait_log("the server serves requests, but is not ready")
        assert "no model is served" in server.log()
        with server.http() as http:
            for name, status in (("live", 400), ("ready", 400)):
                assert http.get(f"/v2/health/{name}").status == status
            assert http.get("/v2").status == 200
            infer = http.post("/v2/models/m/infer", {"inputs": []})
            for response in (infer, http.post("/v2/repository/index", {})):
                assert (response.status, response.error) == (503, "Server not ready")
    finally:
        server.stop()


# --- mode explicit ---


def test_explicit_mode(repository: Path, serve: Serve) -> None:
    repositories.add(repository, "constant", "identity", "simple")
    server = serve(repository, "--model-control-mode=explicit", "--load-model=identity")
    with server.http() as http:
        assert http.get("/v2/health/ready").status == 200
        assert index(http) == {
            ("constant", ""): ("", ""),
            ("identity", "1"): ("READY", ""),
            ("simple", ""): ("", ""),
        }
        assert set(index(http, ready=True)) == {("identity", "1")}
        reply = http.load("constant")
        assert (reply.status, reply.body) == (200, b"")
        assert answer(http) == 1
        reply = http.unload("constant")
        assert (reply.status, reply.body) == (200, b"")
        until("it has left", lambda: index(http)[("constant", "1")] == ("UNAVAILABLE", "unloaded"))
        reply = http.infer("constant", REQUEST_BODY)
        assert reply.status == 404
        assert reply.error == "Request for unknown model: 'constant' has no available versions"
        assert http.infer("constant/versions/1", REQUEST_BODY).status == 503
        assert http.get("/v2/models/constant/ready").status == 400
        assert http.get("/v2/health/ready").status == 200
        assert http.unload("constant").status == 200
        assert http.unload("nothing").status == 200
        assert http.load("constant").status == 200 and answer(http) == 1


def test_an_invalid_load_request_does_not_change_the_model(empty_server: Explicit) -> None:
    """This holds for an existing model, and for one that was removed."""
    server, repository = empty_server
    repositories.add_as(repository, "wronged", "constant")
    with server.http() as http:
        index_before = index(http)
        code = {"file:1/model.py": base64.b64encode(source(2).encode()).decode()}
        for load_parameters in ({"config": "nonsense"}, code):
            assert http.load("wronged", **load_parameters).status == 500
            assert index(http) == index_before
            assert http.get("/v2/models/wronged").error.endswith("is not found")
        http.load("wronged").ok()
        http.unload("wronged").ok()
        until("it has ended", lambda: not server.find("scheduler wronged"))
        shutil.rmtree(repository / "wronged")
        for _ in range(2):
            assert ("wronged", "1") not in index(http)
            assert http.get("/v2/health/ready").status == 200
            assert http.get("/v2/models/wronged").error.endswith("has no available versions")
            assert http.load("wronged").status == 500


def test_config_and_file_overrides(empty_server: Explicit) -> None:
    server, repository = empty_server
    repositories.add(repository, "constant")
    with server.http() as http, triton.InferenceServerClient(server.url) as client:
        client.load_model("constant")
        config = http.config("constant")
        config["instance_group"][0]["count"] = 2
        http.load("constant", config=json.dumps(config)).ok()
        until("two instances are left", lambda: len(server.find("worker constant")) == 2)
        assert http.config("constant")["instance_group"][0]["count"] == 2
        files = {"file:1/model.py": source(9).encode()}
        client.load_model("constant", config=json.dumps(config), files=files)
        assert answer(http) == 9
        assert (repository / "constant" / "1" / "model.py").read_text() == source(1)
        http.load("constant").ok()
        assert answer(http) == 1
        until("one instance is left", lambda: len(server.find("worker constant")) == 1)
        with pytest.raises(InferenceServerException):
            client.load_model("constant", files=files)
        assert answer(http) == 1
        encoded = base64.b64encode(source(5).encode()).decode()
        for escape in ("file:../../x", "file:/x", "file:1/../../x"):
            parameters = {"config": json.dumps(config), escape: encoded}
            assert http.load("constant", **parameters).status in (400, 500)
        assert not (repository / "x").exists()
        assert answer(http) == 1


@contextlib.contextmanager
def run_under_load(server: Server, http: Http, repository: Path) -> Iterator[Load]:
    """Run clients of two models during the block; each request must succeed."""
    repositories.add(repository, "simple", "identity")
    for name in ("simple", "identity"):
        http.load(name).ok()
    with Load(server) as load:
        yield load
    assert load.troubles() == []


def test_a_reload_loses_no_request(empty_server: Explicit) -> None:
    server, repository = empty_server
    success_counts = [server.metric("nv_inference_request_success")]
    with server.http() as http, run_under_load(server, http, repository) as load:
        for _ in range(3):
            http.load("simple").ok()
            http.load("identity").ok()
            success_counts.append(server.metric("nv_inference_request_success"))
    # No request is lost from the count, and the count never decreases.
    assert success_counts == sorted(success_counts)
    answered = success_counts[0] + len(load.answers)
    until("all are counted", lambda: server.metric("nv_inference_request_success") == answered)


def test_a_failed_reload_keeps_the_old_version(empty_server: Explicit) -> None:
    server, repository = empty_server
    repositories.add(repository, "constant")
    with server.http() as http, run_under_load(server, http, repository):
        http.load("constant").ok()
        rewrite(repository, BROKEN_CODE)
        assert http.load("constant").status == 400
        assert answer(http) == 1 and http.get("/v2/health/ready").status == 200
        assert http.get("/v2/models/constant/ready").status == 200
        config = repository / "constant" / "config.pbtxt"
        good_config = config.read_text()
        config.write_text(good_config + "\nnonsense: 7\n")
        assert http.load("constant").status in (400, 500) and answer(http) == 1
        config.write_text(good_config)
        rewrite(repository, source(2))
        http.load("constant").ok()
        assert answer(http) == 2


def test_a_failed_version_is_removed_with_its_folder(empty_server: Explicit) -> None:
    server, repository = empty_server
    repositories.add_as(repository, "versions", "constant", "version_policy: { all {} }\n")
    rewrite(repository, BROKEN_CODE, 2, "versions")
    with server.http() as http:
        assert http.load("versions").status == 400
        assert http.get("/v2/health/ready").status == 400
        assert ("versions", "2") in index(http)
        shutil.rmtree(repository / "versions" / "2")
        http.load("versions").ok()
        assert index(http)[("versions", "1")] == ("READY", "")
        assert ("versions", "2") not in index(http)
        assert http.get("/v2/health/ready").status == 200


def test_unload_while_a_worker_starts_again(empty_server: Explicit) -> None:
    server, repository = empty_server
    log_length = len(server.log())
    repositories.add(repository, "constant")
    waiting = (
        "import os, socket\ngate = socket.socket(socket.AF_UNIX)\n"
        "gate.connect(os.environ['GATE'])\n"
        'gate.sendall(b\'{"batch": [], "rows": [], "pid": 0}\\n\')\ngate.recv(1)\n'
    )
    with server.http() as http:
        http.load("constant").ok()
        rewrite(repository, waiting + source(2))
        (worker,) = server.find("worker constant.0")
        worker.kill()
        visit = server.gate.next()
        http.unload("constant").ok()
        visit.release()
        until("it is unloaded", lambda: index(http)[("constant", "1")][1] == "unloaded")
        until("its processes have ended", lambda: not server.find("worker constant"))
        rewrite(repository, source(3))
        http.load("constant").ok()
        assert answer(http) == 3
    assert "Traceback" not in server.log()[log_length:]


# --- mode poll ---


@pytest.fixture(scope="module")
def polling_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explicit]:
    folder = tmp_path_factory.mktemp("polled")
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1", "--exit-on-error=false")
    with running(folder, *flags) as running_server:
        yield running_server, folder


@pytest.fixture
def empty_polling(polling_server: Explicit) -> Iterator[Explicit]:
    """Yield a server in poll mode with a repository that is empty when a test begins."""
    server, folder = polling_server
    yield polling_server
    for model in folder.iterdir():
        shutil.rmtree(model)
    with server.http() as http:
        until("nothing is served", lambda: not index(http, ready=True))
    until("nothing is loaded", lambda: not server.find("scheduler"))


def test_poll_mode(tmp_path: Path, empty_polling: Explicit) -> None:
    """Folders are moved atomically, because a poll could otherwise find an incomplete model."""
    server, repository = empty_polling
    for name in ("constant", "simple", "identity"):
        repositories.add_as(tmp_path, name, name).rename(repository / name)
    with server.http() as http:
        ready = {(name, "1") for name in ("constant", "simple", "identity")}
        until("they are loaded", lambda: set(index(http, ready=True)) == ready)
        with Load(server) as load:
            assert answer(http) == 1
            rewrite(repository, source(2))
            until("the new code answers", lambda: answer(http) == 2)
            rewrite(repository, BROKEN_CODE)
            server.wait_log("broken on purpose")
            assert answer(http) == 2
            rewrite(repository, source(3), version=2)
            until("the new version answers", lambda: answer(http) == 3)
            repositories.add_as(tmp_path, "added", "constant").rename(repository / "added")
            until("the new one is served", lambda: http.infer("added", REQUEST_BODY).status == 200)
            (repository / "added").rename(tmp_path / "removed")
            until("the removed one is not", lambda: http.infer("added", REQUEST_BODY).status != 200)
            until("nor is it known", lambda: ("added", "1") not in index(http))
            assert http.get("/v2/health/ready").status == 200
        assert load.troubles() == []
        assert http.load("constant").status == 503


def test_polls_wait_for_no_model(tmp_path: Path, empty_polling: Explicit) -> None:
    """A model whose load is slow, or hangs, does not delay changes of other models."""
    server, repository = empty_polling
    repositories.add_as(tmp_path, "constant", "constant").rename(repository / "constant")
    with server.http() as http:
        until("it is served", lambda: http.infer("constant", REQUEST_BODY).status == 200)
        repositories.add_slow(tmp_path, "a").rename(repository / "a")
        loading = server.gate.next()
        rewrite(repository, source(2))
        until("the new code answers", lambda: answer(http) == 2)
        assert http.get("/v2/health/ready").status == 400
        loading.release()
        until("it is loaded at last", lambda: http.get("/v2/health/ready").status == 200)


def test_removing_a_broken_model_leaves_the_server_ready(
    tmp_path: Path, empty_polling: Explicit
) -> None:
    server, repository = empty_polling
    for name in ("broken", "unread"):
        repositories.add_as(tmp_path, name, "constant")
    rewrite(tmp_path, BROKEN_CODE, name="broken")
    (tmp_path / "unread" / "config.pbtxt").write_text("nonsense: 7")
    for name in ("broken", "unread"):
        (tmp_path / name).rename(repository / name)

    def have_failed(by_version: dict[tuple[str, str], tuple[str, str]]) -> bool:
        states = [by_version.get(key, ("", ""))[0] for key in (("broken", "1"), ("unread", ""))]
        return states == ["UNAVAILABLE", "UNAVAILABLE"]

    with server.http() as http:
        until("both have failed", lambda: have_failed(index(http)))
    assert not server.answers("/v2/health/ready")
    shutil.rmtree(repository / "broken")
    shutil.rmtree(repository / "unread")
    until("the server is ready", lambda: server.answers("/v2/health/ready"))
