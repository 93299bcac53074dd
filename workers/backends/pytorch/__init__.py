"""Backend `pytorch`: TorchScript, exported programs, `nn.Module` classes; Triton's naming rules.

    model.pt    TorchScript
    model.pt2   torch.export.save: inputs, outputs and batch size need no configuration
    model.py    a class; its weights are in model.safetensors, model.pt or model.pth

TYPE_STRING is List[str] of TorchScript: the concatenated texts of all rows, as in Triton. The first
of these files in the version folder is used, unless `default_model_filename` names one. With the
`runtime` model.py, model.py is first. A class whose weights are in model.pt needs `runtime`.

Parameters:

    INFERENCE_MODE                     "false": run under no_grad
    DISABLE_OPTIMIZED_EXECUTION        "true": disable TorchScript's optimiser
    TORCH_COMPILE_OPTIONAL_PARAMETERS  JSON ("{}": torch's defaults): compile a class with
                                       torch.compile. Its cache ends with the server unless
                                       TORCHINDUCTOR_CACHE_DIR in the environment names a folder
    INTRA_OP_THREAD_COUNT, NUM_THREADS the number of threads of one operation
    INTER_OP_THREAD_COUNT, NUM_INTEROP_THREADS  the number of concurrent operations
    ENABLE_JIT_EXECUTOR, ENABLE_JIT_PROFILING, ENABLE_TENSOR_FUSER  switches of TorchScript
    ENABLE_CACHE_CLEANING              "true": release the GPU's cached memory after each batch
    DISABLE_CUDNN                      "true": run without cuDNN

`optimization.cuda.graphs` records a CUDA graph of each batch bucket if all shapes are fixed. Other
parameters of Triton's backend have no effect.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.backends import (
    Backend,
    ModelContext,
    Request,
    Response,
    parse_boolean,
    parse_integer,
)
from shmserve.workers.backends.pytorch.programs import (
    Argument,
    ArgumentBinding,
    Program,
    ResultBinding,
    check,
    describe,
    load_class,
    load_exported,
    load_script,
)
from shmserve.workers.batch.ragged import RaggedRules
from shmserve.workers.batch.runner import Runner
from shmserve.workers.device import open_device
from shmserve.workers.memory.static_plan import CudaRecorder, Graphs, Recorder
from shmserve.workers.tensor_specs import (
    FileDescription,
    as_configured,
    as_scalars,
    complete,
    with_generated_tensors,
)
from shmserve.workers.user_code import describe_error

logger = logging.getLogger(__name__)

_FILE_NAMES = ("model.pt", "model.pt2", "model.py")


class PytorchBackend(Backend):
    """The backend of one torch model on one device."""

    device_inputs = True
    read_only_inputs = False
    strict_shapes = False

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._device = open_device(context.device)
        self._opened_program: tuple[Program, FileDescription | None] | None = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add inputs, outputs and batch size of an exported program to the configuration.

        Raises:
            InvalidArgument: Inputs or outputs are missing, and the model is not an exported
                program, which would describe them.
        """
        spec = ModelSpec.of(config)
        program, description = self._open_program(spec)
        if description is not None:
            return complete(config, description, self.context.backend_config)
        if not spec.input or not spec.output:
            raise InvalidArgument(_missing_tensors_message(spec, program))
        return config

    def load(self, config: ModelSpec) -> None:
        """Load the file and match it with the configuration."""
        signature = Signature(with_generated_tensors(config), self.context.version)
        _set_options(config.parameters)
        program, description = self._open_program(config)
        arguments = program.arguments
        if program.takes_dict:
            arguments = [Argument(name) for name in signature.inputs]
        self._argument_binding = ArgumentBinding(signature.name, list(signature.inputs), arguments)
        _check_strings(signature, self._argument_binding.string_inputs)
        self._results = ResultBinding(signature.name, list(signature.outputs), program.result_count)
        if description is not None:
            check(signature, description, self._argument_binding.positioned_inputs)
        self._scalar_inputs = {
            name
            for position, name in (self._argument_binding.positioned_inputs if description else ())
            if not description.inputs[position].dims  # type: ignore[union-attr]
        }
        self._signature = signature
        cleans_cache = parse_boolean(config.parameters, "ENABLE_CACHE_CLEANING", False)
        self._empties_cache = cleans_cache and self._device.torch.type == "cuda"
        self._program = program
        inference_mode = parse_boolean(config.parameters, "INFERENCE_MODE", True)
        self._no_grad_context: Any = torch.inference_mode if inference_mode else torch.no_grad
        self._runner = Runner(
            self.context, signature, self._device, frozenset(), RaggedRules(config)
        )
        self._graphs = self._plan_memory(config, signature)

    def execute(self, requests: list[Request]) -> list[Response]:
        """Call the model once for the whole batch."""
        inputs = as_scalars(self._runner.inputs(requests), self._scalar_inputs)
        graphs = self._graphs
        with self._no_grad_context():
            with self._runner.detecting_writes():
                outputs = self._call_program(inputs) if graphs is None else graphs.run(inputs)
            outputs = as_configured(outputs, self._signature)
            responses = self._runner.responses(requests, outputs)
        if self._empties_cache:
            torch.cuda.empty_cache()
        return responses

    def _call_program(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        program = self._program
        for name in self._argument_binding.string_inputs & inputs.keys():
            inputs = {**inputs, name: inputs[name].reshape(-1).tolist()}
        args, kwargs = ([inputs], {}) if program.takes_dict else self._argument_binding.bind(inputs)
        return self._results.map_outputs(program.call(*args, **kwargs))

    def _plan_memory(self, config: ModelSpec, signature: Signature) -> Graphs | None:
        """Allocate the memory of a model with fixed shapes; return its CUDA graphs, or None."""
        plan = self._runner.memory_plan(config, self._program.module)
        graphs, recorder, use_graphs = None, self._recorder(), config.optimization.cuda_graphs
        if use_graphs and (plan is None or recorder is None):
            reason = (
                "its shapes are not fixed" if plan is None else "its device does not support them"
            )
            logger.warning("model '%s' runs without CUDA graphs: %s", signature.name, reason)
        if plan is None:
            return None
        if use_graphs and recorder is not None:
            try:
                with self._no_grad_context():
                    call = self._call_program
                    graphs = Graphs(plan, signature, self._device.torch, call, recorder)
            except Exception as error:  # any error, because not every model can be captured
                logger.warning(
                    "model '%s' runs without CUDA graphs: %s", signature.name, describe_error(error)
                )
            else:
                plan = replace(plan, workspace=graphs.workspace)
        plan.log(signature.name)
        return graphs

    def _recorder(self) -> Recorder | None:
        """Return a recorder of CUDA graphs, or None if this device is not a CUDA device."""
        return CudaRecorder(self._device.torch) if self._device.torch.type == "cuda" else None

    def _open_program(self, config: ModelSpec) -> tuple[Program, FileDescription | None]:
        if self._opened_program is None:
            path = self._find_file(config)
            if path.suffix == ".py":
                program = load_class(path, self._device, self.context.model_name, config.parameters)
                self._opened_program = program, None
            elif path.suffix == ".pt2":
                program, exported_program = load_exported(path, self._device)
                self._opened_program = program, describe(exported_program)
            else:
                self._opened_program = load_script(path, self._device), None
        return self._opened_program

    def _find_file(self, config: ModelSpec) -> Path:
        configured_name = config.default_model_filename
        if config.runtime.endswith((".py", ".pt", ".pt2", ".pth")):  # not an engine of Triton's
            configured_name = configured_name or config.runtime
        names = [configured_name] if configured_name else [*_FILE_NAMES]
        if configured_name == "model.py" and not config.default_model_filename:
            # Triton's runtime model.py serves TorchScript, too.
            names = ["model.py", "model.pt", "model.pt2"]
        return self.context.model_file(names, " or ".join(names))


def _check_strings(signature: Signature, string_inputs: frozenset[str]) -> None:
    """Raise InvalidArgument if BYTES inputs and lists of strings do not match.

    BYTES tensors must also have one dimension; the error text is then Triton's.
    """
    for spec in signature.inputs.values():
        if (spec.datatype == "BYTES") != (spec.name in string_inputs):
            accepted_type = "List[str] in TorchScript" if spec.name in string_inputs else "a tensor"
            raise InvalidArgument(
                f"input '{spec.name}' of model '{signature.name}' has data_type "
                f"{TO_CONFIG[spec.datatype]}, but the model takes {accepted_type}: only List[str] "
                "takes TYPE_STRING"
            )
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs.values():
            if spec.datatype == "BYTES" and len(spec.model_dims) != 1:
                raise InvalidArgument(
                    f"Triton only supports 1 dimensional List of String as {side} for "
                    f"'{spec.name}' for model '{signature.name}'"
                )


# The switches of TorchScript that Triton's parameters set.
_JIT_SWITCHES = {
    "ENABLE_JIT_EXECUTOR": "_jit_set_profiling_executor",
    "ENABLE_JIT_PROFILING": "_jit_set_profiling_mode",
    "ENABLE_TENSOR_FUSER": "_jit_set_texpr_fuser_enabled",
}


# The parameters that set a number of threads; 0 is torch's default.
_THREAD_COUNTS = {
    "INTRA_OP_THREAD_COUNT": torch.set_num_threads,
    "NUM_THREADS": torch.set_num_threads,
    "INTER_OP_THREAD_COUNT": torch.set_num_interop_threads,
    "NUM_INTEROP_THREADS": torch.set_num_interop_threads,
}


def _set_options(parameters: dict[str, str]) -> None:
    if parse_boolean(parameters, "DISABLE_OPTIMIZED_EXECUTION", False):
        torch._C._set_graph_executor_optimize(False)
    for parameter_name, switch_name in _JIT_SWITCHES.items():
        if parameter_name in parameters:
            getattr(torch._C, switch_name)(parse_boolean(parameters, parameter_name, True))
    for parameter_name, set_threads in _THREAD_COUNTS.items():
        if count := parse_integer(parameters, parameter_name, 0):
            # Torch permits an inter-op count only before parallel work has started.
            with contextlib.suppress(RuntimeError):
                set_threads(count)
    if parse_boolean(parameters, "DISABLE_CUDNN", False):
        torch.backends.cudnn.enabled = False


def _missing_tensors_message(config: ModelSpec, program: Program) -> str:
    names = [argument.name for argument in program.arguments] if program.arguments else ["INPUT__0"]
    inputs = ", ".join(
        f'{{ name: "{n}" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }}' for n in names
    )
    return (
        f"model '{config.name}': the model file does not contain the datatypes and shapes "
        f"of its inputs and outputs. Write them into config.pbtxt, for example: input [ {inputs} ] "
        'output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1000 ] } ]'
    )
