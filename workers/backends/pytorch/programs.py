"""The forms of a torch model: TorchScript, an exported program, or a class in a file.

The mapping of configured inputs and outputs to the model's arguments and results is:

    the argument's name       forward(self, image, mask)          "image", "mask"
    a position after "__"     any forward                         "INPUT__0", "OUTPUT__0"
    neither                   the order in the configuration      with a warning, like Triton

Results are mapped by key (dict), by field (named tuple, dataclass), or by position as above.

Each form is loaded as a `Program`: a callable with the arguments of its forward, and the number of
its results if it is known. The graph of an exported program also describes inputs and outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import logging
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import TensorArgument

from shmserve.errors import Internal, InvalidArgument, Unavailable, missing_package
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.ipc.tensors.signature import Signature, shape_text, shapes_match
from shmserve.workers.device import Device, preload_scripted
from shmserve.workers.memory.tensors import PROTOCOL_DATATYPES
from shmserve.workers.tensor_specs import (
    FileDescription,
    FileTensor,
    escaping_surrogates,
    fits_scalar,
)
from shmserve.workers.user_code import describe_error, import_file

logger = logging.getLogger(__name__)

_INDEXED_NAME = re.compile(r".*__(\d+)")


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a model's forward.

    Attributes:
        name: The name.
        required: Whether the argument has no default.
        is_keyword_only: Whether the argument is keyword-only.
        is_text: Whether the argument is a list of strings.
    """

    name: str
    required: bool = True
    is_keyword_only: bool = False
    is_text: bool = False


class ArgumentBinding:
    """The mapping of a configuration's inputs to the arguments of a call.

    If `arguments` is None, the model's arguments are unknown (`*args`), and inputs are mapped by
    position or order. `string_inputs` are lists of strings.

    Raises:
        InvalidArgument: Inputs and arguments do not match.
    """

    def __init__(self, model: str, inputs: list[str], arguments: Sequence[Argument] | None) -> None:
        self._arguments = arguments
        if arguments is None:
            positions = _positions(model, "input", inputs, len(inputs))
            _warn_of_order(model, "input", inputs)
        else:
            position_by_name = {a.name: position for position, a in enumerate(arguments)}
            if all(name in position_by_name for name in inputs):
                positions = [position_by_name[name] for name in inputs]
            else:
                if len(inputs) > len(arguments):
                    raise InvalidArgument(
                        f"the configuration of model '{model}' has {len(inputs)} inputs, but its "
                        f"forward takes {len(arguments)}: {_quoted_list([*position_by_name])}"
                    )
                positions = _positions(model, "input", inputs, len(arguments))
                _warn_of_order(model, "input", inputs)
            names = [a.name for i, a in enumerate(arguments) if a.required and i not in positions]
            if names:
                raise InvalidArgument(
                    f"model '{model}' takes the argument(s) {_quoted_list(names)}, but "
                    "its configuration has no input of this name; the inputs are "
                    f"{_quoted_list(inputs)}"
                )
        self.positioned_inputs = sorted(zip(positions, inputs, strict=True))
        self.string_inputs = frozenset(
            name
            for position, name in self.positioned_inputs
            if arguments is not None and arguments[position].is_text
        )

    def bind(self, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return (positional, keyword) arguments for the inputs of a request, without absent ones.

        Raises:
            InvalidArgument: An input is absent before another one, and the arguments have no names.
        """
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for position, name in self.positioned_inputs:
            if name not in inputs:
                continue
            argument = None if self._arguments is None else self._arguments[position]
            if position == len(args) and not (argument and argument.is_keyword_only):
                args.append(inputs[name])
            elif argument is None:
                raise InvalidArgument(
                    f"input '{name}' needs the inputs before it, too: the model takes its "
                    "inputs by position"
                )
            else:
                kwargs[argument.name] = inputs[name]
        return args, kwargs


class ResultBinding:
    """The mapping of a call's results to the outputs of a configuration.

    `count` is the number of the model's results, or None if it is known only at run time.

    Raises:
        InvalidArgument: The outputs do not match the count.
    """

    def __init__(self, model: str, outputs: Sequence[str], count: int | None = None) -> None:
        self._model = model
        self._outputs = tuple(outputs)
        self._has_warned = False
        if count is not None and len(outputs) > count:
            raise InvalidArgument(
                f"the configuration of model '{model}' has {len(outputs)} outputs, but the model "
                f"returns {count}"
            )
        limit = len(outputs) if count is None else count
        self._positions = _positions(model, "output", outputs, limit, has_limit=count is not None)

    def map_outputs(self, result: Any) -> dict[str, Any]:
        """Return the value of each output.

        Raises:
            Internal: The model's result does not match the configuration.
        """
        if isinstance(result, Mapping):
            return self._outputs_by_key(result)
        fields = getattr(result, "_fields", None)
        if fields is None and dataclasses.is_dataclass(result):
            fields = [field.name for field in dataclasses.fields(result)]
            result = [getattr(result, field) for field in fields]
        if fields and any(name in fields for name in self._outputs):
            # All outputs are mapped by field, since fields may have another order than outputs.
            return self._outputs_by_key(dict(zip(fields, result, strict=True)))
        if not self._has_warned:
            self._has_warned = True
            _warn_of_order(self._model, "output", self._outputs)
        values = result if isinstance(result, (tuple, list)) else (result,)
        pairs = [*zip(self._outputs, self._positions, strict=True)]
        missing_outputs = [name for name, position in pairs if position >= len(values)]
        if missing_outputs:
            raise Internal(
                f"model '{self._model}' returned {len(values)} output(s), but not "
                f"{_quoted_list(missing_outputs)}"
            )
        return {name: values[position] for name, position in pairs}

    def _outputs_by_key(self, result: Mapping[str, Any]) -> dict[str, Any]:
        missing_outputs = [name for name in self._outputs if name not in result]
        if missing_outputs:
            raise Internal(
                f"model '{self._model}' returned the output(s) "
                f"{_quoted_list(list(map(str, result)))}, but its configuration names "
                f"{_quoted_list(missing_outputs)}"
            )
        return {name: result[name] for name in self._outputs}


def _positions(
    model: str, side: str, names: Sequence[str], limit: int, has_limit: bool = True
) -> list[int]:
    """Return the position of each input or output: the number after "__", or its order."""
    name_matches = [_INDEXED_NAME.fullmatch(name) for name in names]
    if names and all(name_matches):
        indices = [int(match[1]) for match in name_matches if match]
        for position, index in enumerate(indices):
            if index in indices[:position]:
                raise InvalidArgument(
                    f"{side}s '{names[indices.index(index)]}' and '{names[position]}' of model "
                    f"'{model}' have the same index: the number after '__' is the position"
                )
            if has_limit and index >= limit:
                if side == "output":
                    raise InvalidArgument(
                        f"The output {names[position]} in the model configuration refers to an "
                        f"output index which doesn't exist. This model has {limit} outputs"
                    )
                raise InvalidArgument(
                    f"{side} '{names[position]}' of model '{model}' has the index {index}, but the "
                    f"largest possible is {limit - 1}: the number after '__' is the position, "
                    "from 0"
                )
        return indices
    return list(range(len(names)))


def _warn_of_order(model: str, side: str, names: Sequence[str]) -> None:
    """Log a warning if inputs or outputs are mapped by their order in the configuration."""
    if len(names) > 1 and not all(map(_INDEXED_NAME.fullmatch, names)):
        logger.warning(
            "model '%s': %ss %s are neither names of the model nor end in __INDEX; they are "
            "mapped by their order in the configuration",
            model,
            side,
            _quoted_list(names),
        )


def _quoted_list(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


COMPILE_KEY = "TORCH_COMPILE_OPTIONAL_PARAMETERS"


@dataclass(frozen=True, slots=True)
class Program:
    """A loaded model: a callable, and the description of its arguments.

    Attributes:
        arguments: The arguments; None if they are unknown.
        takes_dict: Whether the callable takes all inputs as one dict.
        module: The module with the weights.
    """

    call: Callable[..., Any]
    arguments: Sequence[Argument] | None
    result_count: int | None  # None: unknown
    takes_dict: bool = False
    module: torch.nn.Module | None = None


@contextlib.contextmanager
def _converting_errors(path: Path) -> Iterator[None]:
    """Convert errors to InvalidArgument with the file's name, except out-of-memory errors."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        problem = f"cannot be read: {describe_error(error)}"
        # torch raises `pickle.UnpicklingError` for an object that it refuses to load.
        if type(error).__name__ == "UnpicklingError":
            problem = "contains objects that are not tensors"
        raise InvalidArgument(f"'{path.name}' {problem}") from error


# The functions that write archives with these files, and the suffix of their archives.
_WRITERS = {
    "archive_format": ("torch.export.save", ".pt2"),
    "serialized_exported_program.json": ("torch.export.save", ".pt2"),
    "constants.pkl": ("torch.jit.save", ".pt"),
}


def _check_writer(path: Path, suffix: str) -> None:
    """Raise InvalidArgument if the file is an archive that needs another suffix."""
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        names = {name.rpartition("/")[2] for name in archive.namelist()}
        for writer, own_suffix in (_WRITERS[name] for name in _WRITERS if name in names):
            if own_suffix != suffix:
                text = f"'{path.name}' was written by {writer}: change its suffix to '{own_suffix}'"
                raise InvalidArgument(text)
            return


def load_script(path: Path, device: Device) -> Program:
    """Load a TorchScript archive.

    Raises:
        InvalidArgument: The file was not written by `torch.jit.save`, or cannot be read.
    """
    _check_writer(path, ".pt")
    try:
        with _converting_errors(path), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit")  # deprecations
            preload_scripted()
            module = torch.jit.load(path, map_location=device.torch)  # type: ignore[no-untyped-call]
    except InvalidArgument as error:
        if "locating file constants.pkl" not in str(error):
            raise
        raise InvalidArgument(
            f"'{path.name}' is not TorchScript but a file of torch.save. If it holds the "
            "weights of a class, the configuration's 'runtime' must name the file of the class"
        ) from None
    module.eval()
    schema = module.forward.schema
    inputs = schema.arguments[1:]
    arguments = [
        Argument(a.name, not a.has_default_value(), is_text=_is_strings(a.type)) for a in inputs
    ]
    takes_dict = len(inputs) == 1 and isinstance(inputs[0].type, torch._C.DictType)
    call, count = module, None
    if len(schema.returns) == 1:
        result_type = schema.returns[0].type
        if isinstance(result_type, torch._C.TupleType):
            count = len(result_type.elements())
        elif isinstance(result_type, torch._C.TensorType) or _is_strings(result_type):
            count = 1
        if "str" in str(result_type):
            call = partial(_call_for_texts, module, _is_strings(result_type))
    return Program(call, None if takes_dict else arguments, count, takes_dict, module=module)


def _call_for_texts(module: Any, is_single: bool, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a TorchScript module; strings become bytes, since not all are UTF-8.

    A list of strings (`is_single`) is a single output, not a list of outputs.
    """
    encode = partial(str.encode, errors="surrogateescape")
    with escaping_surrogates():
        result = torch.utils._pytree.tree_map_only(str, encode, module(*args, **kwargs))
    return (result,) if is_single else result


def _is_strings(kind: Any) -> bool:
    """Check whether a TorchScript type is List[str], the type of Triton's BYTES tensors."""
    return str(kind) == "List[str]"


def load_exported(path: Path, device: Device) -> tuple[Program, torch.export.ExportedProgram]:
    """Load an archive of `torch.export.save`.

    Returns:
        The callable program, and the exported program, which contains the graph.

    Raises:
        InvalidArgument: The archive is TorchScript, holds pickled objects, or cannot be read.
    """
    _check_writer(path, ".pt2")
    with _loading_tensors_only(), _converting_errors(path):
        program = torch.export.load(path)
    if device.needs_copies:
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device.torch)
    signature = program.graph_signature
    # Non-tensor arguments were fixed at export and must be passed unchanged.
    leaves = list(signature.user_inputs)
    tensor_positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, str)]
    module = program.module()
    unflatten = torch.utils._pytree.tree_unflatten
    input_spec = program.call_spec.in_spec
    assert input_spec is not None

    def call(*values: torch.Tensor) -> Any:
        all_values: list[Any] = leaves.copy()
        for position, value in zip(tensor_positions, values, strict=True):
            all_values[position] = value
        args, kwargs = unflatten(all_values, input_spec)
        return module(*args, **kwargs)

    is_flat = all(leaf.is_leaf() for leaf in input_spec.children()[0].children())
    has_only_tensors = (
        is_flat and len(tensor_positions) == len(leaves) and not input_spec.children()[1].children()
    )
    arguments = [Argument(str(leaves[position])) for position in tensor_positions]
    return Program(module if has_only_tensors else call, arguments, None, module=module), program


@contextlib.contextmanager
def _loading_tensors_only() -> Iterator[None]:
    """Restrict torch.export.load to tensors.

    Without the restriction, torch unpickles other objects in an archive, which may execute code.
    """
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    saved_variables = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ[names[0]] = "1"
    try:
        yield
    finally:
        del os.environ[names[0]]
        os.environ.update(saved_variables)


def load_class(path: Path, device: Device, name: str, parameters: dict[str, str]) -> Program:
    """Return the `torch.nn.Module` in a Python file, with the weights in the same folder, if any.

    The module is compiled with `torch.compile` if the configuration's parameters have options for
    it.

    Raises:
        InvalidArgument: The class has no `forward`, the weights do not fit the class, or an option
            is invalid.
    """
    module_class = _module_class(import_file(path, f"shmserve_model_{name}"), path)
    module: torch.nn.Module = module_class()
    if module_class.forward is torch.nn.Module.forward:
        text = f"class '{module_class.__name__}' in '{path.name}' has no method 'forward'"
        raise InvalidArgument(text)
    weights = _find_weights(path)
    if weights is not None:
        weights_by_name = _read_weights(weights)
        try:
            module.load_state_dict(weights_by_name)
        except (RuntimeError, TypeError) as error:
            text = f"'{weights.name}' does not fit the class '{module_class.__name__}': {error}"
            raise InvalidArgument(text) from error
    module.to(device.torch).eval()
    options = _compile_options(parameters)
    try:
        call = module if options is None else torch.compile(module, **options)
    except Exception as error:
        raise InvalidArgument(f"parameter '{COMPILE_KEY}': {describe_error(error)}") from error
    return Program(call, _arguments(module.forward), None, module=module)


def _module_class(module: Any, path: Path) -> type[torch.nn.Module]:
    module_classes = (c for _, c in sorted(vars(module).items()) if isinstance(c, type))
    classes = [c for c in module_classes if issubclass(c, torch.nn.Module)]
    own_classes = [c for c in classes if c.__module__ == module.__name__] or classes
    if not own_classes:
        raise InvalidArgument(f"'{path.name}' does not define a subclass of torch.nn.Module")
    for module_class in own_classes:
        if module_class.__name__ == "Model":
            return module_class
    if len(own_classes) > 1:
        names = ", ".join(c.__name__ for c in own_classes)
        logger.warning(
            "'%s' defines the modules %s; %s is served. To select a class, name it 'Model'",
            path.name,
            names,
            own_classes[0].__name__,
        )
    return own_classes[0]


def _find_weights(path: Path) -> Path | None:
    weight_files = [path.with_suffix(suffix) for suffix in (".safetensors", ".pt", ".pth")]
    return next((file for file in weight_files if file.exists()), None)


def _read_weights(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        try:
            load_file = importlib.import_module("safetensors.torch").load_file
        except ImportError as error:
            raise Unavailable(missing_package(f"'{path.name}'", error, "torch")) from error
        read_file = load_file
    else:
        read_file = partial(torch.load, map_location="cpu", weights_only=True)
    with _converting_errors(path):
        state_dict: dict[str, Any] = read_file(path)
    return state_dict


def _arguments(forward: Callable[..., Any]) -> list[Argument] | None:
    arguments = []
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        is_required = parameter.default is parameter.empty
        is_keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        arguments.append(Argument(parameter.name, is_required, is_keyword_only=is_keyword_only))
    return arguments


def _compile_options(parameters: dict[str, str]) -> dict[str, Any] | None:
    options_json = parameters.get(COMPILE_KEY)
    if options_json is None:
        return None
    try:
        options = json.loads(options_json)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"parameter '{COMPILE_KEY}' is not a JSON object: {error}") from None
    if not isinstance(options, dict):
        text = f'parameter \'{COMPILE_KEY}\' is not a JSON object (such as {{"mode": "default"}})'
        raise InvalidArgument(text)
    return None if options.get("disable") in (True, "True", "true") else options


_UNBOUNDED = 2**31  # the batch size of a program without a limit


def describe(exported_program: torch.export.ExportedProgram) -> FileDescription:
    """Describe the inputs and outputs in the graph of a program.

    Raises:
        InvalidArgument: The protocol does not have the datatype of a tensor.
    """
    signature = exported_program.graph_signature
    values = {node.name: node.meta.get("val") for node in exported_program.graph.nodes}
    names = [name for name in signature.user_inputs if isinstance(name, str)]
    inputs = tuple(_describe_tensor(name, values[name]) for name in names)
    specs = (spec for spec in signature.output_specs if spec.kind.name == "USER_OUTPUT")
    node_names = [spec.arg.name if isinstance(spec.arg, TensorArgument) else None for spec in specs]
    names_of_results = _result_names(exported_program, len(node_names))
    pairs = zip(names_of_results, node_names, strict=True)
    outputs = tuple(_describe_tensor(name, values[r]) for name, r in pairs if r is not None)
    return FileDescription(inputs, outputs, _largest_batch(exported_program, (*inputs, *outputs)))


def _describe_tensor(name: str, value: Any) -> FileTensor:
    dtype: Any = getattr(value, "dtype", type(value).__name__)  # an integer may be an input, too
    datatype = PROTOCOL_DATATYPES.get(dtype)
    if datatype is None:
        text = f"tensor '{name}' of the exported program is {dtype}, which no client can send"
        raise InvalidArgument(text)
    dims = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    symbols = tuple("" if isinstance(size, int) else str(size) for size in value.shape)
    return FileTensor(name, datatype, dims, symbols)


def _result_names(exported_program: torch.export.ExportedProgram, count: int) -> Sequence[str]:
    out_spec = exported_program.call_spec.out_spec
    if out_spec is not None and out_spec.type is not None and len(out_spec.children()) == count:
        if issubclass(out_spec.type, Mapping):
            return [str(key) for key in out_spec.context]
        if hasattr(out_spec.type, "_fields") or hasattr(out_spec.context, "_fields"):
            tuple_type = out_spec.context if hasattr(out_spec.context, "_fields") else out_spec.type
            return list(tuple_type._fields)
    return [f"OUTPUT__{index}" for index in range(count)]


def _largest_batch(program: torch.export.ExportedProgram, tensors: Sequence[FileTensor]) -> int:
    batch_symbols = {tensor.leading_symbol for tensor in tensors}
    if len(batch_symbols) != 1 or "" in batch_symbols:
        return 0
    symbol = batch_symbols.pop()
    for constrained_symbol, bounds in program.range_constraints.items():
        if str(constrained_symbol) == symbol:
            upper_bound = bounds.upper
            return int(upper_bound) if upper_bound < _UNBOUNDED else _UNBOUNDED
    return 0  # an expression such as 2*s0 is not a batch dimension


def check(
    signature: Signature, description: FileDescription, positioned_inputs: Sequence[tuple[int, str]]
) -> None:
    """Check a configuration against an exported program.

    Raises:
        InvalidArgument: The configuration contradicts the program.
    """
    is_ragged = any(spec.ragged for spec in signature.inputs.values())
    max_batch_size = 0 if is_ragged else signature.max_batch_size
    if max_batch_size > 0 and description.largest_batch == 0:
        raise InvalidArgument(
            f"model '{signature.name}' has max_batch_size {max_batch_size}, but its program was "
            "exported with a fixed first dimension: export it with "
            "dynamic_shapes={...: {0: torch.export.Dim('batch')}}"
        )
    if max_batch_size > description.largest_batch:
        raise InvalidArgument(
            f"model '{signature.name}' has max_batch_size {max_batch_size}, but its program was "
            f"exported for {description.largest_batch} at most"
        )
    for position, name in positioned_inputs:
        spec, tensor = signature.inputs[name], description.inputs[position]
        if spec.datatype != tensor.datatype:
            raise InvalidArgument(
                f"input '{name}' of model '{signature.name}' has data_type "
                f"{TO_CONFIG[spec.datatype]}, but its program takes {TO_CONFIG[tensor.datatype]}"
            )
        if spec.ragged:
            continue  # the output may have any number of dimensions
        if fits_scalar(spec, tensor) and max_batch_size == 0:
            continue
        dims = spec.model_dims
        expected_dims = tensor.dims[1:] if signature.max_batch_size > 0 else tensor.dims
        if not shapes_match(dims, expected_dims):
            raise InvalidArgument(
                f"input '{name}' of model '{signature.name}' has the shape {shape_text(dims)}, but "
                f"its program takes {shape_text(expected_dims)}"
            )
