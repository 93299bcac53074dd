"""Ensembles from the view of clients, rule by rule."""

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

import shmserve.client
from tests.integration.ensembles.clients import floats, infer, stream
from tests.integration.ensembles.repository import LARGE, write
from tests.support.regions import SharedObject
from tests.support.servers import Server, Start
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, in_region, json_input, shm_input
from tests.support.wire.triton import infer_inputs


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    write(models)
    return start(models, grpc=True)


def error(server: Server, model: str, /, **arrays: np.ndarray) -> str:
    with pytest.raises(triton.InferenceServerException) as error_info:
        infer(server, model, **arrays)
    return error_info.value.message()


def outputs(server: Server, model: str, /, **arrays: np.ndarray) -> dict[str, Any]:
    response = infer(server, model, **arrays)
    names = [output["name"] for output in response.get_response()["outputs"]]
    return {name: response.as_numpy(name).tolist() for name in names}


@pytest.mark.parametrize("size", [4, 5000, LARGE])
def test_two_sequential_steps(server: Server, size: int) -> None:
    """Small tensors are in messages; large ones are read where they were written."""
    values = np.arange(2 * size, dtype=np.float32).reshape(2, size)
    assert (infer(server, "two", IN=values).as_numpy("OUT") == (values + 1) * 2).all()


def test_tensors_of_fixed_shapes_are_in_the_ensembles_memory(server: Server) -> None:
    assert "'three': planned memory of 3 tensors between steps: 7.2 MB per request" in server.log()
    values = np.arange(LARGE, dtype=np.float32)[None]
    for _ in range(100):  # a leak of 3.6 MB per request would fill the arena
        assert (infer(server, "three", IN=values).as_numpy("OUT") == values + 3).all()


def test_a_tensor_that_a_step_returns_unchanged_is_not_copied(server: Server) -> None:
    """Readers of both names see the original values, also with concurrent requests."""

    client = triton.InferenceServerClient(server.url, concurrency=6)

    def send_requests(numbers: Iterable[int]) -> None:
        arrays = [np.full(LARGE, number, np.float32) for number in numbers]
        calls = [client.async_infer("passes", infer_inputs(triton, IN=x)) for x in arrays]
        for values, response in zip(arrays, calls, strict=True):
            result = response.get_result()
            assert all((result.as_numpy(name) == values + 1).all() for name in ("OUT", "a"))

    send_requests(range(10))  # inputs are copied until the model is known not to write to them
    copied_before = server.metric("shmserve_copied_bytes_total", model="same")
    send_requests(range(60))
    assert server.metric("shmserve_copied_bytes_total", model="same") == copied_before
    client.close()


def test_a_step_waits_for_all_it_reads(server: Server) -> None:
    assert outputs(server, "diamond", IN=floats(1, 2)) == {"OUT": [5, 7]}


def test_a_nested_ensemble(server: Server) -> None:
    assert outputs(server, "outer", IN=floats(1)[None]) == {"OUT": [[4]]}
    large_array = np.ones((1, LARGE), np.float32)
    for _ in range(20):
        assert (infer(server, "outer", IN=large_array).as_numpy("OUT") == 4).all()


def test_steps_that_no_requested_output_needs_do_not_run(http: Http) -> None:
    tensors = [json_input("IN", floats(1))]
    requested_outputs = {"inputs": tensors, "outputs": [{"name": "GOOD"}]}
    assert http.infer("pruned", requested_outputs).tensors()["GOOD"].tolist() == [2]
    assert http.infer("pruned", {"inputs": tensors}).status == 500


def test_batch_dimensions_are_added_and_removed(server: Server) -> None:
    """A leading 1 is added or removed between models with and without batching."""
    assert outputs(server, "into_batch", IN=floats(1, 2)) == {"OUT": [4, 6]}
    assert outputs(server, "out_of_batch", IN=floats(1, 2)[None]) == {"OUT": [[3, 4]]}


def test_an_ensemble_may_reshape_its_tensors(server: Server) -> None:
    """The steps see the shapes of `reshape`, and clients those of `dims`."""
    assert outputs(server, "reshaped", IN=floats(1, 2).reshape(1, 2, 1)) == {"OUT": [[[4, 6]]]}


def test_an_output_that_a_model_left_out(server: Server) -> None:
    """A step may lack optional inputs; the error texts are Triton's."""
    assert error(server, "absent_required", IN=floats(-1)) == (
        "in ensemble 'absent_required', [request id: rid] expected 1 inputs but got 0 inputs for "
        "model 'plain'. Got input(s) [], but missing required input(s) ['X']. Please provide all "
        "required input(s)."
    )
    assert outputs(server, "absent_optional", IN=floats(-1)) == {"OUT": [b"X"]}
    assert outputs(server, "absent_optional", IN=floats(1)) == {"OUT": [b"X Z"]}
    assert outputs(server, "absent_output", IN=floats(-1)) == {"ALWAYS": [0]}
    assert outputs(server, "absent_output", IN=floats(1)) == {"OUT": [1], "ALWAYS": [2]}


def test_an_optional_input_of_the_ensemble(server: Server) -> None:
    assert outputs(server, "optional_input", IN=floats(1)) == {"OUT": [b"X"]}
    assert outputs(server, "optional_input", IN=floats(1), MORE=floats(1)) == {"OUT": [b"X Z"]}


def test_a_step_with_a_condition(server: Server) -> None:
    """If all rows are false, the step and its dependents are skipped; other outputs remain."""
    assert outputs(server, "conditional", IN=floats(-1, -2)) == {"ALWAYS": [0, -1]}
    assert outputs(server, "conditional", IN=floats(-1, 2)) == {
        "SOMETIMES": [1, 4],
        "ALWAYS": [0, 3],
    }


@pytest.mark.parametrize(("run", "expected"), [(True, {"OUT", "ALWAYS"}), (False, {"ALWAYS"})])
def test_a_condition_that_the_client_sends(server: Server, run: bool, expected: set[str]) -> None:
    assert outputs(server, "asked", IN=floats(1), RUN=np.array([run])).keys() == expected


def test_a_condition_in_a_clients_memory_is_refused(server: Server) -> None:
    """Schedulers do not read memory that a client may truncate."""
    with SharedObject(4096) as shared_object, server.http() as http:
        http.register("condition", shared_object.key, 4096).ok()
        tensors = [json_input("IN", floats(1)), shm_input("RUN", "BOOL", [1], "condition", 1)]
        refused_reply = http.infer("asked", {"inputs": tensors})
        assert (refused_reply.status, refused_reply.error) == (
            400,
            "in ensemble 'asked', input 'RUN' is a step's condition: send its data in the request, "
            "not in a shared memory region",
        )
        http.unregister("condition").ok()


def test_errors_are_prefixed_by_each_ensemble(server: Server) -> None:
    """Each ensemble adds its name once."""
    text = error(server, "outer_fails", IN=floats(1))
    assert text.startswith(
        "in ensemble 'outer_fails', in ensemble 'fails', Failed to process the request(s) for "
        "model 'boom_0_0', message: ValueError: boom"
    )
    assert error(server, "wrong_shape", IN=floats(1)) == (
        "in ensemble 'wrong_shape', [request id: rid] unexpected shape for input 'X' for model "
        "'fixed1'. Expected [4], got [1]. "
    )


def test_request_parameters_are_forwarded_to_every_step(server: Server) -> None:
    """A step receives the request's id, correlation id, flags, timeout and custom parameters."""
    request = {
        "id": "mine",
        "parameters": {"sequence_id": 7, "sequence_start": True, "timeout": 5_000_000,
            "colour": "red"},
        "inputs": [json_input("IN", floats(1))],
    }  # fmt: skip
    with server.http() as http:
        reply = http.infer("tells", request).ok()
    seen_request = ast.literal_eval(reply.tensors()["OUT"][0].decode())
    assert seen_request[:4] == ["mine", 7, 1, 5_000_000] and "red" in seen_request[4]
    assert reply.json()["parameters"] == {
        "sequence_id": 7,
        "sequence_start": True,
        "sequence_end": False,
    }


def test_each_response_of_a_decoupled_step_is_a_response(server: Server) -> None:
    assert stream(server, "counts", IN=floats(3)) == [[0], [1], [2]]
    assert sorted(stream(server, "counts_then", IN=floats(3))) == [[1], [2], [3]]
    assert stream(server, "counts_then", IN=floats(0)) == []


def test_a_step_joins_a_stream_with_a_single_tensor(server: Server) -> None:
    """A step reads a decoupled tensor and a single one; Triton rejects such a graph."""
    assert sorted(stream(server, "counts_meets", IN=floats(3))) == [[3], [4], [5]]


@pytest.mark.parametrize("model", ["counts_large", "counts_limited"])
def test_many_large_responses(server: Server, model: str) -> None:
    """`max_inflight_requests`: the responses together exceed any arena."""
    responses = stream(server, model, IN=floats(300))
    assert sorted(responses) == [[i + 1, i + 1] for i in range(300)]


def test_through_shared_memory(server: Server) -> None:
    """Inputs and outputs in a client's region are read and written by the steps' workers."""
    size = LARGE * 4
    values = np.arange(LARGE, dtype=np.float32)
    with SharedObject(2 * size) as shared_object, server.http() as http:
        shared_object.write(values, 0)
        http.register("both", shared_object.key, 2 * size).ok()
        request = {
            "inputs": [shm_input("IN", "FP32", [1, LARGE], "both", size)],
            "outputs": [{"name": "OUT", "parameters": in_region("both", size, size)}],
        }
        for model, result in (("two", (values + 1) * 2), ("three", values + 3)):
            http.infer(model, request).ok()
            assert (shared_object.read(np.float32, LARGE, size) == result).all()
        http.unregister("both").ok()


def test_a_local_client(server: Server) -> None:
    values = np.arange(LARGE, dtype=np.float32)[None]
    with shmserve.client.connect(server.run_dir) as session:
        for _ in range(3):
            assert (session.infer("two", {"IN": values})["OUT"] == (values + 1) * 2).all()
            assert (session.infer("outer", {"IN": values[:, :3]})["OUT"] == [[2, 4, 6]]).all()


def test_statistics_are_sums_of_steps(server: Server) -> None:
    """Compute times are sums of the steps; each request is one execution."""
    client = triton.InferenceServerClient(server.url)

    def stats(model: str) -> Any:
        return client.get_inference_statistics(model)["model_stats"][0]

    before = {name: stats(name) for name in ("two", "add", "double")}
    for _ in range(5):
        infer(server, "two", IN=np.ones((3, 5), np.float32))
    after = {name: stats(name) for name in ("two", "add", "double")}

    def growth(name: str, key: str, field: str) -> int:
        parts = (stats["inference_stats"][key][field] for stats in (after[name], before[name]))
        return next(parts) - next(parts)

    assert after["two"]["execution_count"] - before["two"]["execution_count"] == 5
    assert after["two"]["inference_count"] - before["two"]["inference_count"] == 15
    for key in ("compute_input", "compute_infer", "compute_output"):
        assert growth("two", key, "ns") == growth("add", key, "ns") + growth("double", key, "ns")
        assert growth("two", key, "count") == 5
    sizes = {row["batch_size"] for row in after["two"]["batch_stats"]}
    assert 3 in sizes
    until(
        "nothing is pending",
        lambda: server.metric("nv_inference_pending_request_count", model="two") == 0,
    )
    client.close()
