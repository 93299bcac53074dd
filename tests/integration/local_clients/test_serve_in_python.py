"""`shmserve.serve`: a server for a script, a test or a notebook."""

import asyncio
import contextlib
import copy
import json
import os
import pickle
import pydoc
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NotRequired, TypedDict
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

import shmserve
from shmserve import client
from shmserve.client import aio
from shmserve.errors import Internal, InvalidArgument, ShmserveError, Unavailable
from shmserve.model import FP32
from shmserve.supervisor.checks.access import server_pid
from shmserve.testing import serve_model
from tests.support.servers import write_tokens
from tests.support.waiting import until

__all__ = ["serve_model"]
X = np.ones((1, 4), np.float32)


class Double:
    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
        return x * 2


class ApplicationError(ShmserveError):
    """An error of the program, which the server's failures must not be reported as."""


class Broken(Double):
    def load(self, context: object) -> None:
        raise RuntimeError("the weights are gone")


class Unfit(Double):
    max_batch_size = "8"


class Divide(Double):
    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
        print("divides")
        return x * (1 // 0)


class Sums(TypedDict):
    sum: FP32[np.ndarray, 1]
    more: NotRequired[FP32[np.ndarray, 1]]


class Sum:
    def predict(self, x: FP32[np.ndarray, 4]) -> Sums:
        return {"sum": x.sum(1, keepdims=True)}


SCRIPT = """
import numpy as np
import shmserve
from shmserve.model import FP32

FACTOR = 3

def scaled(x):
    return x * FACTOR

class Triple:
    def load(self, context):
        assert (context.directory / "script.py").is_file() and __file__.endswith("script.py")

    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
        return scaled(x)

with shmserve.serve(Triple) as server:
    print(server.infer("triple", x=np.ones((1, 4), np.float32))["output"].sum())
"""


def test_both_clients_ask_the_control_plane() -> None:
    class Local:
        def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
            return x + 1

    async def infer_locally(run_dir: Path) -> list[float]:
        async with aio.connect(run_dir, timeout=10) as later:
            assert await later.ready() and await later.ready("local")
            assert (await later.metadata("local"))["name"] == "local"
            assert {s["name"] for s in await later.statistics()} == {
                "double",
                "local",
            }
            inputs = ({"x": X * i} for i in range(5))
            return [float(r["output"][0, 0]) async for r in later.map("double", inputs)]

    with shmserve.serve([Double, Local]) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.ready() and server.ready("double") and not server.ready("missing")
        assert server.metadata("double")["inputs"][0]["name"] == "x"
        assert server.infer("local", x=X)["output"].tolist() == [[2, 2, 2, 2]]
        assert server.statistics("local")[0]["inference_count"] == 1
        with pytest.raises(Unavailable, match="explicit model load"):
            server.load("double")
        assert asyncio.run(infer_locally(server.run_dir)) == [0, 2, 4, 6, 8]
        with pytest.raises(InvalidArgument, match=r"'timeuot'.*did you mean 'timeout'"):
            server.infer("double", x=X, timeuot=3)
        with pytest.raises(InvalidArgument, match="'y' for model 'double', allowed are: x"):
            server.infer("double", y=X)
        run_dir = server.run_dir
    assert not run_dir.exists()


def test_the_error_of_a_model_is_raised() -> None:
    expected_error = "RuntimeError: the weights are gone"
    with pytest.raises(Internal, match=expected_error), shmserve.serve(Broken):
        raise AssertionError("entered")
    with pytest.raises(Internal, match="ZeroDivisionError") as caught, shmserve.serve(Divide) as s:
        s.infer("divide", x=X)
    assert f'File "{__file__}"' in caught.value.__notes__[0]
    position = rf"{re.escape(__file__)}:\d+:\d+: 'Unfit.max_batch_size' must be an integer"
    with pytest.raises(InvalidArgument, match=position), shmserve.serve(Unfit):
        raise AssertionError("entered")
    with pytest.raises(ShmserveError, match="no_such"), shmserve.serve("no_such.py:Class"):
        raise AssertionError("entered")


def test_models_of_a_repository_are_loaded_and_unloaded(tmp_path: Path, serve_model) -> None:
    version = tmp_path / "double" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(
        "import numpy as np\nfrom shmserve.model import FP32\nclass Model:\n"
        "    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:\n"
        "        return x * 2\n"
    )
    (tmp_path / "double" / "config.pbtxt").write_text('backend: "native"')
    server = serve_model(tmp_path, model_control_mode="explicit")
    assert server.models() == []
    server.load("double")
    assert server.infer("double", x=X)["output"].sum() == 8
    server.unload("double")
    assert server.models() == []
    server = serve_model(tmp_path / "double", run_dir=tmp_path / "run")
    assert server.models() == [("double", "1")]
    assert server.run_dir == tmp_path / "run" and server.run_dir.is_dir()
    with pytest.raises(InvalidArgument, match="--http-port"):
        serve_model(Double, http_port="none")


ANY_NAME = """
import numpy as np
from shmserve.model import BYTES, INT32

class Lengths:
    def predict(self, image: BYTES[np.ndarray, 1]) -> INT32[np.ndarray, 1]:
        return np.array([[len(each[0])] for each in image], np.int32)
"""


def test_a_class_in_a_repository_takes_a_file_unconfigured(tmp_path: Path, serve_model) -> None:
    """By the shell, and by curl's `--data-binary` with one header."""
    version = tmp_path / "models" / "lengths" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(ANY_NAME)
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"\xff\xd8\xff\0" * 25)
    server = serve_model(tmp_path / "models")
    arguments = f"--run-dir={server.run_dir}", "infer", "lengths", f"--input=image=@{photo}"
    command = [sys.executable, "-m", "shmserve", "client", *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(completed.stdout)["outputs"][0]["data"] == [[100]]

    url = f"{server.url}/v2/models/lengths/infer"
    headers = {"Inference-Header-Content-Length": "0"}
    with urlopen(Request(url, photo.read_bytes(), headers)) as response:
        assert int.from_bytes(response.read()[-4:], "little") == 100
    with pytest.raises(HTTPError) as error_info:
        urlopen(Request(url, photo.read_bytes()))
    with error_info.value as response:
        assert b"a file, needs Inference-Header-Content-Length: 0" in response.read()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@pytest.mark.parametrize("size", [0, 100, 3_000_000])
def test_curl_sends_a_file(tmp_path: Path, serve_model, size: int) -> None:
    """As the guide has it; curl waits for "100 Continue" before a large file."""
    (tmp_path / "lengths.py").write_text(ANY_NAME)
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\n\0" * (size // 4))
    url = serve_model(f"{tmp_path / 'lengths.py'}:Lengths").url
    header = "-HInference-Header-Content-Length: 0"
    command = ["curl", "-sS", "--fail", "--data-binary", "@photo.jpg", header]
    command.append(f"{url}/v2/models/lengths/infer")
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    assert int.from_bytes(completed.stdout[-4:], "little") == size


def test_a_class_is_reloaded_when_its_file_or_helper_changes(tmp_path: Path, serve_model) -> None:
    file, helper = tmp_path / "scale.py", tmp_path / "scale_helper.py"
    text = (
        "import numpy as np\nfrom scale_helper import ONE\nfrom shmserve.model import FP32\n"
        "class Scale:\n    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:\n"
        "        return x * 2 * ONE\n"
    )
    file.write_text(text)
    helper.write_text("ONE = 1\n")
    server = serve_model(f"{file}:Scale", reload=True)
    assert server.infer("scale", x=X)["output"][0, 0] == 2
    file.write_text(text.replace("x * 2", "x * 33"))
    until("it is loaded", lambda: server.infer("scale", x=X)["output"][0, 0] == 33)
    helper.write_text("ONE = 10\n")
    until("the helper is loaded", lambda: server.infer("scale", x=X)["output"][0, 0] == 330)


def test_both_clients_send_a_token(tmp_path: Path, serve_model) -> None:
    tokens = write_tokens(tmp_path / "tokens", "M3hP9dJs6gVc1uAe")
    server = serve_model(Double, auth_token_file=tokens, token="M3hP9dJs6gVc1uAe")
    assert server.ready("double") and server.metadata("double")["name"] == "double"

    async def read_name(token: str) -> object:
        async with aio.connect(server.run_dir, token=token) as async_client:
            return (await async_client.metadata("double"))["name"]

    assert asyncio.run(read_name("M3hP9dJs6gVc1uAe")) == "double"
    with pytest.raises(AttributeError, match=r"await aio.connect\(...\) before the use of 'infer'"):
        aio.connect(server.run_dir).infer  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(client.Unauthenticated, match=r"TOKEN' \(connect\(token=...\)\)"):
        asyncio.run(read_name(""))
    with client.connect(server.run_dir, token="wrong") as wrong_client:
        assert wrong_client.ready("double")
        assert wrong_client.infer("double", x=X)["output"][0, 0] == 2
        with pytest.raises(client.Unauthenticated):
            wrong_client.statistics()


def test_inputs_named_like_options_are_passed_as_a_mapping(serve_model) -> None:
    class Add:
        def predict(
            self, timeout: FP32[np.ndarray, 4], version: FP32[np.ndarray, 4]
        ) -> FP32[np.ndarray, 4]:
            return timeout + version

    server = serve_model(Add)
    assert server.infer("add", {"timeout": X, "version": X}, timeout=9)["output"][0, 0] == 2


def test_a_response_may_lack_an_output_that_is_not_required(serve_model) -> None:
    server = serve_model(Sum)
    result = server.infer("sum", x=X)
    assert list(result) == list(pickle.loads(pickle.dumps(result))) == ["sum"]
    with pytest.raises(TypeError, match=r"a client cannot be pickled.*: call connect\(\)"):
        copy.copy(server)
    assert "did not return" not in server.log.read_text()


def test_arguments_of_a_wrong_type_are_named(serve_model) -> None:
    server = serve_model(Double)
    connect: Any = client.connect
    calls = {
        r"infer\(\) missing 1 required positional argument: 'model'": lambda: server.infer(x=X),
        "in_flight must be an integer >= 1, got 0": lambda: [*server.map("m", [], in_flight=0)],
        "version must be a string, got 1": lambda: server.metadata("double", 1),
        "timeout must be a number, got '1'": lambda: connect(timeout="1"),
        "memory_limit must be a number, got '1G'": lambda: connect(memory_limit="1G"),
    }
    for text, call in calls.items():
        with pytest.raises((InvalidArgument, TypeError), match=text):
            call()
    results = server.map("double", [{"x": X}, {"x": X}, {"x": None}])
    assert [next(results)["output"][0, 0] for _ in range(2)] == [2, 2]
    with pytest.raises(InvalidArgument, match="None"):
        next(results)


def test_help_shows_what_a_user_imports() -> None:
    text = pydoc.plain(pydoc.render_doc(shmserve))
    assert re.search(r"serve\(\s*models:", text)  # from 3.13 on, long signatures are wrapped
    for name in ("model", "client", "client.aio", "errors", "testing", "workers.backends"):
        assert f"shmserve.{name} " in text


def test_a_class_of_a_script_is_served(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    long_folder = tmp_path / ("long" * 20)
    long_folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(long_folder)}
    command = [sys.executable, str(tmp_path / "script.py")]
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=True, env=environment
    )
    assert float(completed.stdout) == 12.0


@pytest.mark.parametrize(("file", "name"), [("blur.py", "Blur"), ("model/__init__.py", "Model")])
def test_a_class_may_have_the_name_of_its_module(tmp_path: Path, file: str, name: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"import numpy as np\nfrom shmserve.model import FP32\nclass {name}:\n"
        "    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:\n"
        "        return x * 2\n"
    )
    module = name.lower()
    (tmp_path / "script.py").write_text(
        f"import numpy as np\nimport shmserve\nfrom {module} import {name}\n"
        f"with shmserve.serve({name}) as server:\n"
        f"    print(server.infer('{module}', x=np.ones((1, 4), np.float32))['output'].sum())\n"
    )
    # With `-c`, as in a notebook, the working directory is "" in sys.path.
    for arguments in (["script.py"], ["-c", "import script"]):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stdout == "8.0\n", done.stderr


def test_the_thread_that_starts_a_server_may_end() -> None:
    serving = shmserve.serve(Double, model_control_mode="explicit", load_model="double")
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(1) as pool:
            server = pool.submit(stack.enter_context, serving).result()
            thread = pool.submit(threading.get_native_id).result()
        until("the thread ended", lambda: not Path(f"/proc/self/task/{thread}").exists())
        server.load("double")
        assert server.infer("double", x=X)["output"].sum() == 8.0


def test_a_server_outlives_interrupts_and_forked_processes_of_its_block() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(shmserve.serve(Double))
        if not (child := os.fork()):
            with contextlib.suppress(BaseException):
                stack.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert server.run_dir.exists()
        assert os.getpgid(server_pid(server.run_dir)) != os.getpgid(0)


def test_a_killed_script_leaves_no_files(tmp_path: Path) -> None:
    script = SCRIPT + "    print(server.log.parent, flush=True)\n    input()\n"
    (tmp_path / "script.py").write_text(script)
    pipe = subprocess.PIPE
    command = [sys.executable, "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        total, folder = (process.stdout.readline().strip() for _ in range(2))
        assert total == "12.0" and Path(folder).is_dir()
        process.kill()
    until("the server removed the folder", lambda: not Path(folder).exists())
