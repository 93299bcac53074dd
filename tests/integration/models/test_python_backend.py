"""Unmodified Python models of Triton: errors, calls, coroutines, auto-complete."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve.client
from shmserve.errors import Internal
from tests.support import repositories
from tests.support.regions import SharedObject
from tests.support.request_pool import request_pool
from tests.support.servers import Server
from tests.support.wire.raw_http import Http, Reply, in_region, json_request

Explicit = tuple[Server, Path]


@contextlib.contextmanager
def loading(
    explicit: Explicit, name: str, source: str, dim: int = 1, more: str = ""
) -> Iterator[Http]:
    """Load a model from INPUT0 to OUTPUT0 whose configuration has `more`."""
    server, repository = explicit
    config = repositories.identity_config(name, "INT32", [dim], settings=more)
    repositories.write(repository, name, config, source)
    with server.http() as http:
        http.load(name).ok()
        yield http


def body(*values: int) -> dict:
    return json_request(INPUT0=np.array(values, np.int32))


def call(target: str) -> dict:
    a, b = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 5, np.int32)
    return json_request(TARGET=np.array([target], object), INPUT0=a, INPUT1=b)


def test_a_model_calls_another_model(http: Http) -> None:
    assert (http.infer("caller", call("simple")).tensors()["OUTPUT0"] == np.arange(16)).all()


def test_calls_at_the_same_time(http: Http) -> None:
    output = http.infer("async_caller", call("simple")).tensors()["OUTPUT0"]
    assert (output == 2 * np.arange(16)).all()


@pytest.mark.parametrize("model", ["caller", "async_caller"])
def test_calling_a_missing_model(http: Http, model: str) -> None:
    reply = http.infer(model, call("nothing"))
    assert reply.status in (404, 500) and "nothing" in reply.error
    assert http.infer(model, call("simple")).status == 200


def test_many_calls(server: Server) -> None:
    with request_pool(server, 8) as pool:
        calls = [
            pool.infer(model, call("simple"))
            for model in ("caller", "async_caller")
            for _ in range(16)
        ]
        assert all(answer.result().status == 200 for answer in calls)


def test_a_model_logs(server: Server, http: Http) -> None:
    http.infer("echo_request", body(1)).ok()
    server.wait_log("described a request")


def test_a_failing_initialize_reports_its_reason(empty_server: Explicit) -> None:
    """One or both of two instances report the failure before the load fails."""
    server, repository = empty_server
    two = "instance_group { kind: KIND_CPU count: 2 }"
    arguments = {
        "raise ValueError('not today')": "Internal: ValueError: not today",
        "raise pb_utils.TritonModelException('no')": "Internal: TritonModelException: no",
        "sys.exit(3)": "Internal: SystemExit: 3",
        "os._exit(3)": "Unavailable: the process of instance 'model_3_",
    }
    for number, statement in enumerate(arguments):
        config = repositories.identity_config(f"model_{number}", "FP32", [1], settings=two)
        source = repositories.python_model(f"    def initialize(self, args): {statement}")
        repositories.write(repository, f"model_{number}", config, source)
    with server.http() as http:
        for number, expected_error in enumerate(arguments.values()):
            reply = http.load(f"model_{number}")
            assert reply.status == 400
            prefix = f"load failed for model 'model_{number}': version 1 is at UNAVAILABLE state: "
            assert reply.error.startswith(prefix + expected_error)
        pointer = "version https://git-lfs.github.com/spec/v1\n"
        (repository / "model_0" / "1" / "weights").write_text(pointer)
        assert "('1/weights' is a Git LFS pointer" in http.load("model_0").error


SETTINGS = repositories.python_model(
    """
    def initialize(self, args):
        parser = argparse.ArgumentParser()
        parser.add_argument("--answer", type=int, default=42)
        self.settings = parser.parse_args()

    def one(self, request):
        return self.response(OUTPUT0=np.array([self.settings.answer], np.int32))
""",
    before="import argparse",
)


def test_a_model_that_parses_its_command_line(empty_server: Explicit) -> None:
    """Libraries of models parse sys.argv, which is empty, so every setting has its default."""
    with loading(empty_server, "settings", SETTINGS) as http:
        assert http.infer("settings", body(0)).tensors()["OUTPUT0"].tolist() == [42]


SPEAKER_MODEL = repositories.python_model(
    """
    def one(self, request):
        way = request.request_id()
        if way == "raise":
            raise FileNotFoundError(ODD)
        if way == "error":
            return self.failure(ODD)
        if way == "call":
            pb_utils.InferenceRequest(
                model_name=ODD, requested_output_names=["OUTPUT0"], inputs=[]
            ).exec()
        if way == "measure":
            family = self.family = pb_utils.MetricFamily("odd", ODD, pb_utils.MetricFamily.GAUGE)
            family.Metric({"file": ODD}).set(1)
        return self.response(OUTPUT0=np.array([pb_utils.is_model_ready("speaker")], np.int32))
""",
    before="""
ODD = os.fsdecode(b"n\\xe4me")  # of a file, by bytes that are not UTF-8
""",
)


def test_an_error_message_that_is_not_unicode(empty_server: Explicit) -> None:
    with loading(empty_server, "speaker", SPEAKER_MODEL) as http:

        def send_request(action: str) -> Reply:
            return http.infer("speaker", {"id": action, **body(0)})

        for action in ("raise", "error"):
            assert send_request(action).error.endswith("n\\udce4me")
        for action in ("call", "measure", "nothing"):
            assert send_request(action).tensors()["OUTPUT0"].tolist() == [1]
        assert 'odd{file="n\\\\udce4me"} 1' in empty_server[0].metrics()


POOL_MODEL = repositories.python_model(
    """
    def one(self, request):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            (squared,) = pool.map(square, [self.input(request, "INPUT0")])
        return self.response(OUTPUT0=squared)
""",
    before="""
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

def square(array):
    return array * array
""",
)


def test_processes_of_a_model_can_import_its_file(empty_server: Explicit) -> None:
    with loading(empty_server, "pool", POOL_MODEL, -1) as http:
        assert http.infer("pool", body(3, 4)).ok().tensors()["OUTPUT0"].tolist() == [9, 16]


MEDDLING_MODEL = """
import logging.config

from gevent import monkey

monkey.patch_all()


class TritonPythonModel:
    def initialize(self, args):
        logging.config.dictConfig({"version": 1})

    def execute(self, requests):
        return [1 / 0]
"""


def test_a_model_may_change_modules_and_loggers_of_its_process(empty_server: Explicit) -> None:
    with loading(empty_server, "meddler", MEDDLING_MODEL) as http:
        assert "ZeroDivisionError" in http.infer("meddler", body(0)).error
    assert "return [1 / 0]" in empty_server[0].log()


PARTIAL_MODEL = repositories.python_model("""
    def one(self, request):
        array = self.input(request, "INPUT0")
        return self.response(OUTPUT0=array) if array[0] else self.response()
""")


def test_a_missing_output_is_not_replaced_by_an_old_output(empty_server: Explicit) -> None:
    """Triton's clients get no output, the native client an error; the old result is erased."""
    server, _ = empty_server
    instances = "instance_group { count: 2 kind: KIND_CPU }"
    sevens, zeros_input = np.full(6, 7, np.int32), np.zeros(6, np.int32)
    lacks = "model 'partial' did not return the requested outputs 'OUTPUT0'"
    with (
        loading(empty_server, "partial", PARTIAL_MODEL, -1, instances) as http,
        SharedObject(24) as region,
    ):
        http.register("partial", region.key, 24).ok()
        for value, output_count in ((sevens, 1), (zeros_input, 0)):
            outputs = [{"name": "OUTPUT0", "parameters": in_region("partial", 24)}]
            request = json_request(INPUT0=value) | {"outputs": outputs}
            assert len(http.infer("partial", request).ok().json()["outputs"]) == output_count
            assert (np.frombuffer(region.path.read_bytes(), np.int32) == value).all()
        http.unregister("partial").ok()
    with shmserve.client.connect(server.run_dir) as client:
        sizes = {"INPUT0": ((6,), "INT32"), "OUTPUT0": ((6,), "INT32")}
        with client.allocate(sizes) as region:
            region["INPUT0"][:] = sevens
            assert (client.infer("partial", region)["OUTPUT0"] == sevens).all()
            region["INPUT0"][:] = zeros_input
            for inputs in (region, {"INPUT0": zeros_input}):
                with pytest.raises(Internal, match=lacks):
                    client.infer("partial", inputs)
            assert not region["OUTPUT0"].any()
        with pytest.raises(Internal, match=lacks):
            client.infer("partial", INPUT0=np.zeros(1 << 16, np.int32), outputs=["OUTPUT0"])
    message = "model 'partial' did not return the requested outputs OUTPUT0"
    assert server.log().count(message) == 1
