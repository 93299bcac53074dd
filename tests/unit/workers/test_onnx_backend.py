"""ONNX models: completion from the file, outputs computed in place, options, readable errors."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, numpy_helper

from shmserve.errors import Internal, InvalidArgument, ShmserveError, Unavailable
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.schemas import RequestedOutput
from shmserve.workers.backends.onnx import (
    OnnxBackend,
    describe,
    import_onnxruntime,
    providers,
    session_options,
)
from shmserve.workers.backends.onnx.binding import DeviceBinding
from shmserve.workers.device import Device
from shmserve.workers.tensor_specs import escaping_surrogates
from tests.rigs.worker_rig import Region, Rig, inference, model_config, tensor, tensor_config
from tests.support.onnx_models import FLOAT, save

F32 = np.float32
BARE_CONFIG: dict[str, Any] = {"name": "m", "max_batch_size": 0, "backend": "onnxruntime"}
LARGE_DIM = 32 * 1024


def save_sum(worker: Rig, dims: tuple[Any, ...] = ("batch", 4), sums: Any = None) -> None:
    given = [("a", FLOAT, dims), ("b", FLOAT, dims)]
    save(worker.context.version_dir, [("Add", "a b", "s")], given, [("s", FLOAT, sums or dims)])


def serve(worker: Rig) -> Rig:
    """Serve the file with the configuration that the backend completes."""
    backend = OnnxBackend(worker.context)
    return worker.serve(backend, backend.complete_config(BARE_CONFIG))


def test_a_file_completes_inputs_outputs_and_batch_size(worker: Rig) -> None:
    save_sum(worker)
    completed = OnnxBackend(worker.context).complete_config(BARE_CONFIG)
    assert completed["max_batch_size"] == 4 and completed["dynamic_batching"] == {}
    assert completed["input"] == [
        {"name": "a", "data_type": "TYPE_FP32", "dims": [4]},
        {"name": "b", "data_type": "TYPE_FP32", "dims": [4]},
    ]
    assert completed["output"] == [{"name": "s", "data_type": "TYPE_FP32", "dims": [4]}]


def test_a_fixed_first_dimension_is_no_batch_and_a_scalar_has_one_element(worker: Rig) -> None:
    save(
        worker.context.version_dir,
        [("ReduceSum", "a", "s", {"keepdims": 0})],
        [("a", FLOAT, (2, 4))],
        [("s", FLOAT, ())],
    )
    completed = OnnxBackend(worker.context).complete_config(BARE_CONFIG)
    assert completed["max_batch_size"] == 0
    with pytest.raises(InvalidArgument, match="autofill failed for model 'm': model does not"):
        OnnxBackend(worker.context).complete_config(BARE_CONFIG | {"max_batch_size": 8})
    scalar = {"name": "s", "data_type": "TYPE_FP32", "dims": [1]}
    assert completed["output"] == [scalar]
    worker.serve(OnnxBackend(worker.context), completed)
    reply = worker.infer(tensor("a", np.ones((2, 4), F32)))
    assert reply.array("s").tolist() == [8.0]


def test_a_batch_runs_as_one(worker: Rig) -> None:
    save_sum(worker)
    serve(worker)
    ones = np.ones((1, 4), F32)
    requests = [inference(tensor("a", ones * n), tensor("b", ones)) for n in range(3)]
    replies = worker.batch(*requests)
    assert [reply.array("s").tolist() for reply in replies] == [[[n + 1.0] * 4] for n in range(3)]


@pytest.mark.parametrize("dims", [("batch", LARGE_DIM), ("batch", "n")])
def test_a_large_output_is_computed_in_the_arena(worker: Rig, dims: tuple[Any, ...]) -> None:
    """Holds for fixed shapes and for shapes that follow from the inputs. Nothing is copied."""
    save_sum(worker, dims)
    serve(worker)
    large_array = np.arange(LARGE_DIM, dtype=F32)[None]
    reply = worker.infer(tensor("a", large_array), tensor("b", large_array))
    np.testing.assert_array_equal(reply.array("s", worker), large_array + large_array)
    assert worker.finished.copied_output_bytes == 0


def test_a_large_output_is_computed_in_the_clients_region(worker: Rig, region: Region) -> None:
    save_sum(worker, ("batch", LARGE_DIM))
    serve(worker)
    large_array = np.arange(LARGE_DIM, dtype=F32)[None]
    requested_output = RequestedOutput("s", region.memory_range(0, large_array.nbytes))
    inputs = (tensor("a", large_array), tensor("b", large_array))
    reply = worker.infer(*inputs, outputs=[requested_output])
    assert reply.code == ""
    assert region.read(0, large_array.nbytes) == (large_array + large_array).tobytes()
    assert worker.finished.copied_output_bytes == 0


def test_an_output_shape_that_contradicts_the_file_is_accepted(worker: Rig) -> None:
    """The file declares `s` as long as `a`, but `s` has only the non-zero elements of `a`."""
    save(
        worker.context.version_dir,
        [("NonZero", "a", "i"), ("Cast", "i", "s", {"to": FLOAT})],
        [("a", FLOAT, ("n",))],
        [("s", FLOAT, (1, "n"))],
    )
    serve(worker)
    a = np.zeros(LARGE_DIM, F32)
    a[7] = a[9] = 1
    for _ in range(2):
        reply = worker.infer(tensor("a", a))
        assert reply.array("s").tolist() == [[7.0, 9.0]]
        worker.instance.send_reply(worker.finished)
        assert len(worker.context.output_memory) == 0  # the unused reservation is free again
    a = np.ones(LARGE_DIM, F32)
    reply = worker.infer(tensor("a", a))
    assert reply.array("s", worker).shape == (1, LARGE_DIM)


def test_ragged_batches_are_flat_for_the_model_and_cut_for_clients(worker: Rig) -> None:
    """The model computes s = 100 * (total number of elements) + a. See §3, ragged batches."""
    save(
        worker.context.version_dir,
        [
            ("ReduceMax", "ends", "all", {"keepdims": 1}),
            ("Constant", "", "hundred", {"value_float": 100.0}),
            ("Mul", "all hundred", "more"),
            ("Add", "a more", "s"),
        ],
        [("a", FLOAT, ("n",)), ("ends", FLOAT, ("k",))],
        [("s", FLOAT, ("n",))],
    )
    config = model_config(
        [tensor_config("a", "FP32", [-1], allow_ragged_batch=True)],
        [tensor_config("s", "FP32", [-1])],
        4,
        batch_input=[
            {
                "kind": "BATCH_ACCUMULATED_ELEMENT_COUNT",
                "target_name": ["ends"],
                "data_type": "TYPE_FP32",
                "source_input": ["a"],
            }
        ],
        batch_output=[
            {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["s"], "source_input": ["a"]}
        ],
    )
    worker.serve(OnnxBackend(worker.context), config)
    rows = [np.ones((1, size), F32) * size for size in (2, 3)]
    replies = worker.batch(*(inference(tensor("a", row)) for row in rows))
    assert [reply.array("s").tolist() for reply in replies] == [[[502.0] * 2], [[503.0] * 3]]


def test_text_in_and_out(worker: Rig) -> None:
    text = int(TensorProto.STRING)
    dims = ("batch", 2)
    inputs, outputs = [("a", text, dims)], [("s", text, dims)]
    save(worker.context.version_dir, [("Identity", "a", "s")], inputs, outputs)
    serve(worker)
    reply = worker.infer(tensor("a", np.array([["é", "b"]], object)))
    assert reply.outputs[0].data == b"\x02\0\0\0" + "é".encode() + b"\x01\0\0\0b"
    reply = worker.infer(tensor("a", np.array([[b"\xff\0z", b"b"]], object)))
    assert reply.outputs[0].data == b"\x03\0\0\0\xff\0z\x01\0\0\0b"
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode()


def test_invalid_bytes_are_escaped_in_one_thread() -> None:
    with escaping_surrogates(), ThreadPoolExecutor(1) as pool:
        with escaping_surrogates():
            assert b"\xff".decode() == "\udcff"
        assert "\udcff".encode() == b"\xff"
        assert isinstance(pool.submit(b"\xff".decode).exception(), UnicodeDecodeError)
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode()


def test_bf16_is_passed_unchanged(worker: Rig) -> None:
    bf16, dims = int(TensorProto.BFLOAT16), ("batch", 2)
    inputs, outputs = [("a", bf16, dims)], [("s", bf16, dims)]
    save(worker.context.version_dir, [("Identity", "a", "s")], inputs, outputs)
    serve(worker)
    patterns = np.array([[0x3F80, 0x4000]], np.uint16)
    reply = worker.infer(tensor("a", patterns, datatype="BF16"))
    np.testing.assert_array_equal(reply.array("s"), patterns)


def test_errors_of_a_run_have_tritons_text(worker: Rig) -> None:
    save_sum(worker, ("batch", "n"))
    serve(worker)
    two, three = (tensor(name, np.ones((1, n), F32)) for name, n in (("a", 2), ("b", 3)))
    reply = worker.infer(two, three)
    assert "onnx runtime error" in reply.message


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_batch_size": 8}, "dimension must be -1; but shape expected by the model is [2,4]"),
        ({"input": [tensor_config("a", "FP32", [2, 4])]}, "expects 1 inputs, model provides 2"),
        ({"output": [tensor_config("x", "FP32", [4])]}, "unexpected inference output 'x'"),
        ({"output": [tensor_config("s", "INT8", [2, 4])]}, "TYPE_INT8 for output 's'"),
        ({"input": [tensor_config(n, "FP32", [2, 5]) for n in "ab"]}, "the model expects 2"),
    ],
)
def test_a_configuration_promising_too_much(worker: Rig, change: dict[str, Any], text: str) -> None:
    save_sum(worker, (2, 4))
    inputs = [tensor_config(name, "FP32", [2, 4]) for name in "ab"]
    config = model_config(inputs, [tensor_config("s", "FP32", [2, 4])], 0) | change
    with pytest.raises(InvalidArgument, match=text.replace("[", r"\[")):
        OnnxBackend(worker.context).load(ModelSpec.of(config))


def test_a_missing_package_is_named(worker: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    save_sum(worker)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(Unavailable, match=r"needs the package onnxruntime.*shmserve\[onnx\]"):
        OnnxBackend(worker.context).complete_config(BARE_CONFIG)


def test_a_missing_or_broken_file(worker: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"unable to find '1/model.onnx'"):
        OnnxBackend(worker.context).complete_config(BARE_CONFIG)
    (worker.context.version_dir / "model.onnx").write_bytes(b"no model")
    with pytest.raises(Internal, match=r"^onnx runtime error 7: Load model from model.onnx failed"):
        OnnxBackend(worker.context).complete_config(BARE_CONFIG)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(Unavailable, match=r"user has no permission to read '/.*/1/model.onnx'"):
        OnnxBackend(worker.context).complete_config(BARE_CONFIG)


def parameters(**values: str) -> dict[str, Any]:
    keys = {key: {"string_value": value} for key, value in values.items()}
    return {"name": "m", "parameters": keys}


def test_options_of_a_configuration() -> None:
    runtime = import_onnxruntime()
    config = parameters(
        intra_op_thread_count="3", inter_op_thread_count="2", execution_mode="1"
    ) | {"optimization": {"graph": {"level": 2}}}
    config["parameters"]["session.disable_prepacking"] = {"string_value": "1"}
    config["parameters"]["enable_mem_pattern"] = {"string_value": "0"}
    options = session_options(runtime, ModelSpec.of(config), 8)
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == runtime.ExecutionMode.ORT_PARALLEL
    assert not options.enable_mem_pattern and options.enable_cpu_mem_arena
    level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert options.graph_optimization_level == level
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert session_options(runtime, ModelSpec.of({"name": "m"}), 8).intra_op_num_threads == 8


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("intra_op_thread_count", " must be an integer from 0 to 2147483647, got '9999999999'"),
        ("execution_mode", ": failed to convert '9999999999' to boolean"),
    ],
)
def test_an_invalid_option_is_refused(key: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"parameter '{key}'{text}"):
        session_options(import_onnxruntime(), ModelSpec.of(parameters(**{key: "9999999999"})), 1)


def test_providers_by_kind_and_accelerator() -> None:
    cuda = {"device_id": "1"}
    assert providers(ModelSpec.of(BARE_CONFIG), "CPU", 0) == [("CPUExecutionProvider", {})]
    assert providers(ModelSpec.of(BARE_CONFIG), "GPU", 1) == [
        ("CUDAExecutionProvider", cuda),
        ("CPUExecutionProvider", {}),
    ]
    tensorrt = {"precision_mode": "FP16", "max_workspace_size_bytes": "9", "trt_dla_core": "0"}
    accelerators = {"gpu_execution_accelerator": [{"name": "tensorrt", "parameters": tensorrt}]}
    config = parameters(cudnn_conv_algo_search="1", do_copy_in_default_stream="0")
    config["parameters"]["arena_extend_strategy"] = {"string_value": "kSameAsRequested"}
    config |= {"optimization": {"execution_accelerators": accelerators}}
    assert providers(ModelSpec.of(config), "GPU", 1) == [
        (
            "TensorrtExecutionProvider",
            cuda | {"trt_fp16_enable": "1", "trt_max_workspace_size": "9", "trt_dla_core": "0"},
        ),
        (
            "CUDAExecutionProvider",
            cuda
            | {"cudnn_conv_algo_search": "HEURISTIC", "do_copy_in_default_stream": "0"}
            | {"arena_extend_strategy": "kSameAsRequested"},
        ),
        ("CPUExecutionProvider", {}),
    ]
    tensorrt["precision_mode"] = "FP8"
    with pytest.raises(InvalidArgument, match="must be FP32, FP16, INT8, got 'FP8'"):
        providers(ModelSpec.of(config), "GPU", 0)
    accelerators["gpu_execution_accelerator"] = [{"name": "magic"}]
    with pytest.raises(InvalidArgument, match="unknown execution accelerator 'magic'"):
        providers(ModelSpec.of(config), "GPU", 0)


def test_the_binding_of_a_device_accepts_and_returns_tensors(worker: Rig) -> None:
    """Without a GPU, the host acts as the device."""
    save_sum(worker)
    runtime = import_onnxruntime()
    path = worker.context.version_dir / "model.onnx"
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    binding = DeviceBinding(session, describe(session), Device("cpu"), runtime.RunOptions())
    device_tensor = torch.arange(8.0).view(2, 4)
    for _ in range(2):
        outputs = binding.run({"a": device_tensor, "b": device_tensor}, ["s"], [])
        assert torch.equal(outputs["s"], device_tensor + device_tensor)


def test_a_gpu_needs_the_gpu_package(worker: Rig) -> None:
    if "CUDAExecutionProvider" in import_onnxruntime().get_available_providers():
        pytest.skip("the installed onnxruntime has CUDA")
    save_sum(worker)
    object.__setattr__(worker.context, "kind", "GPU")
    with pytest.raises(ShmserveError, match=r"needs CUDAExecutionProvider.*onnxruntime-gpu"):
        OnnxBackend(worker.context).complete_config(BARE_CONFIG)


@pytest.mark.parametrize("fields", [BARE_CONFIG, None])
def test_a_scalar_has_one_element_for_clients(worker: Rig, fields: dict[str, Any] | None) -> None:
    nodes = [("Mul", "a b", "c", {}), ("ReduceSum", "c", "s", {"keepdims": 0})]
    save(
        worker.context.version_dir,
        nodes,
        [("a", FLOAT, ()), ("b", FLOAT, ("n",))],
        [("c", FLOAT, ("n",)), ("s", FLOAT, ())],
    )
    inputs = [tensor_config("a", "FP32", [1]), tensor_config("b", "FP32", [-1])]
    outputs = [tensor_config("c", "FP32", [-1]), tensor_config("s", "FP32", [1])]
    config = fields or model_config(inputs, outputs, 0)
    worker.serve(OnnxBackend(worker.context), OnnxBackend(worker.context).complete_config(config))
    scale, values = np.array([3], np.float32), np.array([1, 2], np.float32)
    reply = worker.infer(tensor("a", scale), tensor("b", values))
    assert [output.shape for output in reply.outputs] == [(2,), (1,)]
    assert reply.outputs[1].data == np.float32(9).tobytes()


def test_an_output_has_its_true_shape(worker: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sent_messages: list[Any] = []
    monkeypatch.setattr(worker.context.control, "send", sent_messages.append)
    save_sum(worker, (2, 4))
    inputs = [tensor_config(name, "FP32", [2, 4]) for name in "ab"]
    config = model_config(inputs, [tensor_config("s", "FP32", [8])], 0)
    worker.serve(OnnxBackend(worker.context), config)
    ones = np.ones((2, 4), np.float32)
    for _ in range(2):
        reply = worker.infer(tensor("a", ones), tensor("b", ones))
        assert reply.outputs[0].shape == (2, 4)
    (warning,) = sent_messages
    assert warning.text.startswith("unexpected shape for inference output 's'")


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("seq(map(int64,tensor(float)))", "without ZipMap"),
        ("seq(tensor(float))", "ConcatFrom"),
        ("optional(tensor(float))", "with a tensor in its place$"),
        ("sparse_tensor(float)", "with a tensor in its place$"),
        ("tensor(float8e4m3fn)", "add a Cast"),
    ],
)
def test_sequences_and_maps_are_refused_with_the_remedy(kind: str, remedy: str) -> None:
    label = SimpleNamespace(name="label", type="tensor(int64)", shape=["n"])
    outputs = [label, SimpleNamespace(name="p", type=kind, shape=[])]
    session = SimpleNamespace(get_inputs=lambda: [label], get_outputs=lambda: outputs)
    session.get_overridable_initializers = list
    with pytest.raises(InvalidArgument, match=f"output 'p' .*{remedy}"):
        describe(session)
    assert [tensor.name for tensor in describe(session, ["label"]).outputs] == ["label"]


def test_a_sequence_as_an_input_is_refused_with_the_remedy() -> None:
    items = SimpleNamespace(name="items", type="seq(tensor(float))", shape=[])
    session = SimpleNamespace(get_inputs=lambda: [items], get_overridable_initializers=list)
    with pytest.raises(InvalidArgument, match=r"input 'items' .* can send: .*SplitToSequence\)$"):
        describe(session)


def test_a_configured_initializer_is_an_optional_input(worker: Rig) -> None:
    weights = numpy_helper.from_array(np.full(2, 3, F32), "w")
    inputs = [("x", FLOAT, (2,)), ("w", FLOAT, (2,))]
    save(worker.context.version_dir, [("Mul", "x w", "y")], inputs, [("y", FLOAT, (2,))], [weights])
    configs = [tensor_config("x", "FP32", [2]), tensor_config("w", "FP32", [2], optional=True)]
    config = model_config(configs, [tensor_config("y", "FP32", [2])], 0)
    worker.serve(OnnxBackend(worker.context), config)
    x, w = (tensor(name, np.full(2, value, F32)) for name, value in (("x", 1), ("w", 5)))
    (default,), (replaced,) = worker.batch(inference(x)), worker.batch(inference(x, w))
    assert default.array("y").tolist() == [3, 3] and replaced.array("y").tolist() == [5, 5]


def test_the_file_may_be_in_a_folder_of_its_name(worker: Rig) -> None:
    folder = worker.context.version_dir / "model.onnx"
    folder.mkdir(parents=True)
    with pytest.raises(Unavailable, match=r"find '1/model\.onnx/model\.onnx' for .* 'm_0_0'$"):
        OnnxBackend(worker.context).complete_config(BARE_CONFIG)
    save(folder, [("Identity", "a", "s", {})], [("a", FLOAT, (2,))], [("s", FLOAT, (2,))])
    assert OnnxBackend(worker.context).complete_config(BARE_CONFIG)["output"][0]["dims"] == [2]


def test_strings_that_are_not_utf8_reach_the_model(worker: Rig) -> None:
    inputs = [("a", int(TensorProto.STRING), ("n", 1))]
    outputs = [("s", int(TensorProto.INT64), (2,))]
    save(worker.context.version_dir, [("Shape", "a", "s")], inputs, outputs)
    serve(worker)
    reply = worker.infer(tensor("a", np.array([[b"\xffa"], [b"b"]], object)))
    assert reply.outputs[0].data == np.array([2, 1]).tobytes()


@pytest.mark.parametrize("text", ["1", "true", "ON"])
def test_switches_have_all_spellings_of_booleans(text: str) -> None:
    config = ModelSpec.of({"parameters": {"execution_mode": {"string_value": text}}})
    runtime = import_onnxruntime()
    options = session_options(runtime, config, 1)
    assert options.execution_mode == runtime.ExecutionMode.ORT_PARALLEL


def test_the_arena_can_be_shrunk_after_each_run(worker: Rig) -> None:
    save_sum(worker)
    shrinkage = {"string_value": "no device"}
    config = BARE_CONFIG | {"parameters": {"memory.enable_memory_arena_shrinkage": shrinkage}}
    backend = OnnxBackend(worker.context)
    worker.serve(backend, backend.complete_config(config))
    ones = np.ones((1, 4), np.float32)
    reply = worker.infer(tensor("a", ones), tensor("b", ones))
    assert reply.answer is None and "no device" in reply.message


def test_libraries_of_operators_are_loaded(worker: Rig) -> None:
    save_sum(worker, (2, 4))
    config = {**BARE_CONFIG, "model_operations": {"op_library_filename": ["ops.so"]}}
    (worker.context.model_dir / "ops.so").write_bytes(b"no library")
    with pytest.raises(Exception, match=r"ops\.so"):
        OnnxBackend(worker.context).complete_config(config)
