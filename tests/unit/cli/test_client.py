"""The shell's client: values to tensors and back, and whole exchanges with a made-up server."""

import json
import math
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from shmserve.cli import client, main
from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.protocols.servers import read_token
from shmserve.protocols.tensors import ModelTensor, decode, encode, load_value
from tests.support.servers import reply_once

METADATA = {
    "name": "m",
    "versions": ["1"],
    "platform": "python",
    "inputs": [{"name": "X", "datatype": "INT32", "shape": [-1, 2]}],
    "outputs": [{"name": "Y", "datatype": "INT32", "shape": [-1, 2]}],
}


def tensor(datatype: str, *shape: int) -> ModelTensor:
    return ModelTensor("X", datatype, shape)


def decode_raw(datatype: str, shape: list[int], raw: bytes) -> Any:
    return decode(datatype, shape, memoryview(raw))


@pytest.mark.parametrize(
    ("shape", "value", "expected"),
    [
        ((-1, 2), [1, 2], [1, 2]),
        ((-1, 2), [[1, 2], [3, 4]], [2, 2]),
        ((-1,), 3, [1]),
        ((1,), 3, [1]),
        ((-1, 1), 3, [1, 1]),
        ((2,), 3, []),
        ((2,), [1, 2], [2]),
        ((2, 2), [1, 2], [2]),  # the server defines whether the first dimension is the batch's
        ((-1, 2, 2), [1, 2], [2]),  # two dimensions less: likewise
        ((), 3, []),
        ((-1, 2), [], [1, 0]),
        ((-1, 2), [[]], [1, 0]),
    ],
)
def test_a_missing_batch_dimension_is_added(
    shape: tuple[int, ...], value: Any, expected: list[int]
) -> None:
    assert encode(tensor("INT32", *shape), value)[0] == expected


@pytest.mark.parametrize("datatype", [name for name in ITEM_SIZE if name != "BYTES"])
def test_every_datatype_is_encoded_and_decoded(datatype: str) -> None:
    value: Any = [[True, False], [False, True]] if datatype == "BOOL" else [[0, 1], [2, 64]]
    shape, raw = encode(tensor(datatype, -1, 2), value)
    assert (shape, len(raw)) == ([2, 2], 4 * ITEM_SIZE[datatype])
    assert decode_raw(datatype, shape, raw) == value


def test_texts_go_there_and_back() -> None:
    shape, raw = encode(tensor("BYTES", -1, 2), [["", "a\x00"], ["ü", "\n"]])
    assert raw.startswith(b"\0\0\0\0\2\0\0\0a\0\2\0\0\0")
    assert decode_raw("BYTES", shape, raw) == [["", "a\x00"], ["ü", "\n"]]
    assert decode_raw("BYTES", [1], b"\1\0\0\0\xff") == ["\\xff"]
    assert decode_raw("BYTES", [0], b"") == []


@given(
    st_numpy.arrays(
        st.sampled_from(
            [dtype for name, dtype in NUMPY_DTYPES.items() if name not in ("BYTES", "BF16")]
        ),
        st_numpy.array_shapes(min_dims=0, min_side=0),
    )
)
def test_arrays_go_there_and_back(array: np.ndarray[Any, Any]) -> None:
    datatype = next(name for name, dtype in NUMPY_DTYPES.items() if dtype == array.dtype)
    shape, raw = encode(ModelTensor("X", datatype, array.shape), array)
    decoded = np.array(decode_raw(datatype, shape, raw), dtype=array.dtype).reshape(array.shape)
    np.testing.assert_array_equal(decoded, array)


@pytest.mark.parametrize(
    ("datatype", "value", "text"),
    [
        ("INT32", [1.5], "integers, not 1.5"),
        ("INT32", [True], "integers, not true"),
        ("INT32", ["1"], 'integers, not "1"'),
        ("INT32", [None], "integers, not null"),
        ("INT32", {"a": 1}, 'integers, not {"a": 1}'),
        ("INT8", [128], "128 is out of range (allowed: -128 to 127)"),
        ("UINT8", [-1], "-1 is out of range (allowed: 0 to 255)"),
        ("UINT64", [2**64], "is out of range"),
        ("FP64", [10**400], "too large"),
        ("BF16", [10**400], "too large"),
        ("BOOL", [1], "true and false, not 1"),
        ("BYTES", [1], "texts, not 1"),
        ("FP32", [[1], [2, 3]], "unequal"),
        ("FP32", [1, [2]], "numbers, not [2]"),
        ("FP32", [[1], 2], "unequal"),
        ("INT32", np.zeros(2, np.int64), "an array of int64"),
        ("INT32", np.zeros(2, np.float32), "an array of float32"),
        ("BYTES", np.zeros(2, np.float32), "an array of float32"),
        ("BF16", np.zeros(2, np.int32), "an array of int32"),
        ("STRANGE", [1], "unknown datatype STRANGE"),
    ],
)
def test_an_input_that_does_not_fit_is_named(datatype: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        encode(tensor(datatype, -1), value)
    assert text in str(caught.value)
    assert "'X'" in str(caught.value)


def test_arrays_are_converted_to_the_datatype_of_the_model() -> None:
    transposed = np.array([[1, 2], [3, 4]], dtype=">i2").T
    assert encode(tensor("INT32", -1, 2), transposed)[1] == np.array([1, 3, 2, 4], "<i4").tobytes()
    assert encode(tensor("FP16", -1), np.array([1.0, 1e9])) == ([2], b"\x00\x3c\x00\x7c")
    assert encode(tensor("BYTES", -1), np.array(["a", "bc"]))[1] == b"\1\0\0\0a\2\0\0\0bc"


def test_bf16_rounds_to_the_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).integers(0, 2**32, 10_000, np.uint32).view(np.float32)
    _, raw = encode(tensor("BF16", -1), values)
    array = np.array(decode_raw("BF16", [len(values)], raw), np.float32)
    np.testing.assert_array_equal(array, torch.from_numpy(values).bfloat16().float().numpy())


def test_values_are_read_from_json_and_files(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(3))
    assert load_value("X", f"@{path}").tolist() == [0, 1, 2]
    assert load_value("X", '["a"]') == ["a"]
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG\0")
    shape, raw = encode(tensor("BYTES", -1, 1), load_value("X", f"@{picture}"))
    assert (shape, raw) == ([1, 1], b"\5\0\0\0\x89PNG\0")
    np.save(path, np.array([{}]), allow_pickle=True)
    for text in ("@/dev/zero", f"@{path}", f"@{tmp_path / 'none'}", "[1", "@"):
        with pytest.raises(InvalidArgument, match="input 'X'"):
            load_value("X", text)


class Handler(BaseHTTPRequestHandler):
    """A server with one model, which sends its input back as Y and counts on the right headers."""

    def do_GET(self) -> None:
        if self.path == "/v2/models/m/ready":
            return self.reply(400, {"error": "Model version not ready"})
        if self.path.startswith("/v2/models/m"):
            return self.reply(200, METADATA)
        return self.reply(404, {"error": "Request for unknown model:\n'x\x1b[2J' is not found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        length = int(self.headers["Inference-Header-Content-Length"])
        request = json.loads(body[:length])
        self.server.requests.append((self.path, request))  # type: ignore[attr-defined]
        (tensor,) = request["inputs"]
        size = tensor["parameters"]["binary_data_size"]
        assert len(body) == length + size
        output = {**tensor, "name": "Y"}
        answer = {"model_name": "m", "model_version": "1", "outputs": [output]}
        self.reply(200, answer, body[length:])

    def reply(self, status: int, content: Any, binary: bytes = b"") -> None:
        header = json.dumps(content).encode()
        self.send_response(status)
        if binary:
            self.send_header("Inference-Header-Content-Length", str(len(header)))
        self.send_header("Content-Length", str(len(header) + len(binary)))
        self.end_headers()
        self.wfile.write(header + binary)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(*arguments: str) -> int:
    try:
        return main(["client", "infer", *arguments])
    except SystemExit as exit_:
        return cast("int", exit_.code)


def url(server: HTTPServer) -> str:
    return f"--url=http://127.0.0.1:{server.server_port}"


def test_infer(server: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("m", url(server), "--input", "X=[1, -2]") == 0
    assert json.loads(capsys.readouterr().out) == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [{"name": "Y", "datatype": "INT32", "shape": [1, 2], "data": [[1, -2]]}],
    }
    size = {"binary_data_size": 8}
    expected_input = {"name": "X", "datatype": "INT32", "shape": [1, 2], "parameters": size}
    ((path, request),) = server.requests  # type: ignore[attr-defined]
    assert path == "/v2/models/m/infer"
    assert request == {"inputs": [expected_input], "parameters": {"binary_data_output": True}}


def test_a_request_may_have_no_inputs(server: HTTPServer) -> None:
    run("m", url(server))
    ((_, request),) = server.requests  # type: ignore[attr-defined]
    assert request["inputs"] == []


def test_every_option_is_sent(server: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model-version=3", "--request-id=a b", "--timeout-us=500", "--output=Y"]
    options += ["--parameter=explain=true", "--parameter=top=0.5", "--parameter=k=-3"]
    options += ["--parameter=mode=a=b", '--parameter=quoted="1"', "--parameter=empty="]
    assert run("m", url(server), "--input=X=[[]]", *options) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert output == {"name": "Y", "datatype": "INT32", "shape": [1, 0], "data": [[]]}
    ((path, request),) = server.requests  # type: ignore[attr-defined]
    assert path == "/v2/models/m/versions/3/infer"
    assert request["id"] == "a b"
    parameters = {"explain": True, "top": 0.5, "k": -3, "mode": "a=b", "quoted": "1", "empty": ""}
    assert request["parameters"] == {"deadline_us": 500, **parameters}
    assert request["outputs"] == [{"name": "Y", "parameters": {"binary_data": True}}]


def test_an_error_for_an_unready_model_lists_the_states(
    server: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client.run(["ready", "m", url(server)]) == 1
    error = capsys.readouterr().err
    assert error.endswith(
        "Model version not ready; `shmserve client models` lists the models with their states and "
        "reasons\n"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["x", "--input=X=1"], 1, "'x?[2J' is not found; `shmserve client models` lists"),
        (["m", "--input=Z=1"], 2, "the model has no input 'Z'; it has X"),
        (["m", "--input=X=[1.5]"], 2, "integers, not 1.5"),
        (["m", "--input=X"], 2, "--input: expected NAME=VALUE, got 'X'"),
        (["m", "--input=X=["], 2, "input 'X': not JSON"),
        (["m", "--input=X=hello"], 2, """quote a string: --input 'X="..."'"""),
        (["m", f"--input=X={'[' * 100_000}"], 2, "input 'X': the lists are nested too deeply"),
        (["m", f"--input=X={'[' * 99}1{']' * 99}"], 2, "the lists are nested too deeply"),
        (["m", "--input=X=1", "--parameter=a"], 2, "--parameter: expected NAME=VALUE, got 'a'"),
        (["m", "--input=X=1", "--parameter=a=[1]"], 2, "'a' must be true, false, a number or a"),
        (["m", "--input=X=1", "--parameter=a=null"], 2, "or a string, got null"),
        (["m", "--input=X=1", f"--parameter=a={2**63}"], 2, "'a' must be a 64-bit integer"),
        (["m", "--input=X=1", "--parameter=a=NaN"], 2, "'a' must be a finite number, got NaN"),
        (
            ["m", "--input=X=@/dev/null"],
            2,
            "inputs accept the bytes of a file",
        ),
        (["m", "--input=X=@/dev/none"], 2, "cannot read /dev/none: No such file or directory\n"),
        (["m", "--input", "-x=1"], 2, "expected one argument (write --input=VALUE if"),
        (["m", "--input=X=1", "--url=ftp://a"], 2, "--url: expected"),
        (["m", "--input=X=1", "--url="], 2, "--url: the value is empty; omit the flag for its"),
        (["m", "--input=X=1", "--url=http://a:b"], 2, "--url: expected"),
        (["m", "--input=X=1", "--url=http://u:p@a"], 2, "--url: expected"),
        (["m", "--input=X=1", "--url=http://a?q"], 2, "--url: expected"),
        (["m", "--input=X=1", "--url=http://a#f"], 2, "--url: expected"),
        (["m", "--input=X=1", "--url=http://a:0"], 2, "--url: expected"),
        (["", "--input=X=1"], 2, "MODEL: the name of the model is empty"),
        (["m", "--input=X=1", "--url=127.0.0.1:1"], 1,
         "infer: http://127.0.0.1:1: no response: Con"),
        (["m", "--input=X=1", "--url=unix:/nowhere"], 1,
         "unix:/nowhere: no response: No such file"),
        (["m", "--input=X=1", "--header=x"], 2, "--header: expected NAME:VALUE in ASCII, got 'x'"),
        (["m", "--input=X=1", "--header=A:b\nc"], 2, "in ASCII, got 'A:b\\nc'"),
        (["m", "--input=X=1", "--header=A b:c"], 2, "in ASCII, got 'A b:c'"),
        (["m", "--input=X=1", "--header=A:\u65e5"], 2, "in ASCII, got 'A:\u65e5'"),
        (["m", "--input=X=1", "--client-key=x"], 2, "must be given together"),
        (["m", "--input=X=1", "--token-file=/dev/null"], 2, "'/dev/null' has no token"),
        (["m", "--input=X=1", "--token-file=/"], 2, "cannot read '/': Is a directory"),
        (["m", "--input=X=1", "--url=https://x", "--root-cert=/dev/null"], 2,
         "--root-cert: cannot"),
        (["m", "--input=X=1", "--url=x", "--run-dir=y"], 2, "not allowed with argument --url"),
        (["m", "--input=X=1", "--url=http://a..b"], 2, "--url: expected"),
        (["\udcff", "--input=X=1"], 2, "'\\udcff' is not UTF-8 text"),
        (["m", "--input=X=1", "--timeout-us=x"], 2, "--timeout-us: 'x' is not an integer"),
        (["m", "--input=X=1", "--timeout-us=-5"], 2, "--timeout-us: -5 is out of range"),
        (["m", "--input=X=1", f"--sequence={2**64}"], 2, f"--sequence: {2**64} exceeds 64 bits"),
        (["m", "--input=X=1", f"--sequence={'9' * 5000}"], 2, "exceeds 64 bits"),
        (["m", "--input=X=1", "--input=X=2"], 2, "--input: 'X' is given twice"),
        ([], 2, "MODEL"),
        (["m", "--nothing"], 2, "unrecognized arguments: --nothing"),
    ],
)  # fmt: skip
def test_each_error_is_one_line(
    server: HTTPServer,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    text: str,
) -> None:
    server_arguments = [] if any(text.startswith("--url") for text in arguments) else [url(server)]
    completed = run(*arguments[:1], *server_arguments, *arguments[1:])
    captured = capsys.readouterr()
    assert (completed, captured.out) == (status, "")
    assert text in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["ready", "stats", "unload"])
def test_an_empty_name_does_not_select_all_models(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["client", verb, "", "--url=http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == "shmserve: MODEL: the name of the model is empty\n"


@pytest.mark.parametrize("letter", ["\u00f6", "\0", "\ufeff"])
def test_a_token_that_no_header_can_contain_is_refused(tmp_path: Path, letter: str) -> None:
    path = tmp_path / "token"
    path.write_text(f"# a comment\n{letter}oken-of-16-letters", encoding="utf-8")
    with pytest.raises(InvalidArgument, match=r"^--token-file: the token in '.*' is not printable"):
        read_token(str(path))


@pytest.mark.parametrize("model", [b"{}", b"[]"])
@pytest.mark.parametrize("length", [b"", b"Inference-Header-Content-Length: x\r\n"])
def test_statistics_of_a_server_without_them(
    model: bytes, length: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with reply_once(b"HTTP/1.0 200 OK\r\n%s\r\n%s" % (length, model)) as port:
        assert client.run(["stats", "m", f"--url=http://127.0.0.1:{port}"]) == 1
    assert "the server's response" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["ready", "stats"])
def test_a_silent_server_is_not_waited_for(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shmserve.protocols.http.QUERY_TIMEOUT_S", 0.1)
    monkeypatch.setattr("shmserve.protocols.grpc.QUERY_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for scheme, reason in (("http", "no response: timed out"), ("grpc", "Deadline Exceeded")):
            address = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
            assert client.run([verb, "m", f"--url={address}"]) == 1
            assert f"{address}: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"\x93NUMPY\x01\x00\x04\x00{{{{", b"junk"])
def test_a_file_that_holds_no_array(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="input 'X': cannot read "):
        load_value("X", f"@{path}")


def test_a_file_that_holds_several_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.zeros(1), b=np.zeros(1))
    with pytest.raises(InvalidArgument, match="contains several arrays; save a single array"):
        load_value("X", f"@{path}")


def write_picture(path: Path, size: tuple[int, int] = (4, 3)) -> Path:
    pytest.importorskip("PIL.Image").new("RGB", size, (10, 20, 30)).save(path)
    return path


@pytest.mark.parametrize(
    ("shape", "pixels"),
    [
        ((-1, -1, 3), [3, 4, 3]), ((-1, -1, -1, 3), [1, 3, 4, 3]), ((-1, 3, 3, 4), [1, 3, 3, 4]),
        ((1, 3, -1, -1), [1, 3, 3, 4]), ((3, 4), [3, 4]), ((-1, 3, 4, 1), [1, 3, 4, 1]),
    ],
)  # fmt: skip
def test_the_pixels_of_a_file(tmp_path: Path, shape: tuple[int, ...], pixels: list[int]) -> None:
    value = load_value("X", f"@{write_picture(tmp_path / 'photo.png')}")
    encoded, raw = encode(ModelTensor("X", "UINT8", shape), value)
    assert encoded == pixels and len(raw) == math.prod(pixels)
    if 1 not in shape and shape[-1] == 3:
        assert raw[:3] == bytes((10, 20, 30))
    if pixels == [1, 3, 3, 4]:
        assert raw == bytes((10,) * 12 + (20,) * 12 + (30,) * 12)


def test_the_bytes_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(b"\xff\xd8\0")
    value = load_value("X", f"@{file}")
    assert encode(ModelTensor("X", "UINT8", (-1,)), value) == ([3], b"\xff\xd8\0")
    assert encode(ModelTensor("X", "UINT8", (-1, -1)), value) == ([1, 3], b"\xff\xd8\0")
    assert encode(ModelTensor("X", "BYTES", (-1, 1)), value) == ([1, 1], b"\3\0\0\0\xff\xd8\0")


@pytest.mark.parametrize(
    ("datatype", "shape", "text"),
    [
        ("FP32", (-1, 3, 3, 4), "with the model's preprocessing"),
        ("UINT8", (-1, 224, 224, 3), r"\[-1, 224, 224, 3\], but the image has \[1, 3, 4, 3\]"),
        ("UINT8", (2, 2, 2, 3, 4), "resize it"),
    ],
)
def test_the_error_names_what_a_file_lacks(
    tmp_path: Path, datatype: str, shape: tuple[int, ...], text: str
) -> None:
    value = load_value("X", f"@{write_picture(tmp_path / 'photo.png')}")
    with pytest.raises(InvalidArgument, match=text):
        encode(ModelTensor("X", datatype, shape), value)


def test_a_file_that_is_no_image_and_a_host_without_pillow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(b"text")
    with pytest.raises(
        InvalidArgument, match=r"not an image: cannot identify image file$|pip install pillow"
    ):
        encode(ModelTensor("X", "UINT8", (-1, -1, 3)), load_value("X", f"@{file}"))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidArgument, match="pip install pillow"):
        encode(ModelTensor("X", "UINT8", (-1, -1, 3)), load_value("X", f"@{file}"))


@pytest.mark.parametrize(
    "command",
    [
        "client config m --url=",
        "perf m --openai=chat --url=",
        "top --once --metrics-url=",
        "profile m --metrics-url=",
    ],
)
def test_an_unauthorised_command_names_the_flag_of_the_token(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body = b'{"error":"this server requires a known token"}'
    head = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n" % len(body)
    with reply_once(head + body) as port:
        assert main([*command.split()[:-1], f"{command.split()[-1]}http://127.0.0.1:{port}"]) == 1
    assert capsys.readouterr().err.endswith("; choose the file of a token with --token-file\n")


def test_a_port_of_grpc_is_no_port_of_http(capsys: pytest.CaptureFixture[str]) -> None:
    with reply_once(b"\0\0\x06\x04\0\0\0\0\0\0\x05\0\0\x40\0") as port:
        assert client.run(["models", f"--url=http://127.0.0.1:{port}"]) == 1
    assert "is not HTTP/1.1 (gRPC needs --url grpc://" in capsys.readouterr().err
