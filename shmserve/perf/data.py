"""Request data: generated from shapes, or read from the command line, a file or a program.

JSON files have perf_analyzer's format: {"data": [{"INPUT0": [1, 2], ...}, ...]}. An input is a list
of elements, {"content": [...], "shape": [...]}, or {"b64": "..."}. Nested lists are sequences of
requests. A program is a Python file with a function `requests(inputs)`, which yields a mapping of
arrays for each request; `inputs` maps names to datatype and shape.
"""

from __future__ import annotations

import base64
import itertools
import json
import runpy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument, convert_os_errors, read_text
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.datatypes import FROM_CONFIG, ITEM_SIZE, element_count
from shmserve.protocols import InputTensor, TransportError
from shmserve.protocols.tensors import ModelTensor, find_input, load_inputs

_MAX_REQUESTS = 1000  # maximum number of requests read from a file or a program
_MAX_ELEMENTS = 2**48  # far above the memory of any host, and below the limit of numpy
_SEED = 0
# The exclusive upper bound of random integers. It is small, since models may use them as indices.
_INTEGER_BOUND = 128

Inputs = list[InputTensor]


@dataclass(frozen=True)
class ModelInterface:
    """The inputs, outputs and properties of a model that requests depend on.

    Attributes:
        inputs: The inputs by name.
        outputs: Datatype and row shape of each output; -1 is any size.
        supports_batching: Whether the model batches.
        decoupled: Whether the model is decoupled.
        steps: The models of an ensemble's steps.
        config_error: The reason why the server sent no configuration, or "". Without it,
            `supports_batching` and `steps` are unknown.
    """

    inputs: Mapping[str, ModelTensor]
    outputs: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    supports_batching: bool = False
    decoupled: bool = False
    steps: tuple[str, ...] = ()
    config_error: str = ""


@dataclass(frozen=True)
class DataOptions:
    """The command line's options for request data; `source` is --data: random, zero or a path."""

    values: Sequence[str] = ()  # of --input
    shapes: Sequence[str] = ()  # of --shape
    source: str = "random"  # random, zero or a path
    batch: int = 1  # number of rows
    text_length: int = 128  # characters


def read_interface(transport: Any, model: str, version: str) -> ModelInterface:
    """Return a model's interface from the server.

    The server may reject the request for the configuration: the client lacks a permission, or the
    server lacks the extension. The interface then has a `config_error`.

    Raises:
        TransportError: The server is unreachable, or rejects the request for the metadata.
    """
    config: Mapping[str, Any] = {}
    config_error = ""
    try:
        config = transport.config(model, version)
    except TransportError as error:
        config_error = str(error)
    steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
    inputs = transport.inputs(model, version)
    outputs = {
        o["name"]: (FROM_CONFIG.get(o["data_type"], "BYTES"), tuple(map(int, o.get("dims", ()))))
        for o in config.get("output", ())
    }
    supports_batching = int(config.get("max_batch_size") or 0) > 0
    decoupled = bool((config.get("model_transaction_policy") or {}).get("decoupled"))
    step_models = tuple(dict.fromkeys(step["model_name"] for step in steps))
    return ModelInterface(inputs, outputs, supports_batching, decoupled, step_models, config_error)


def read_requests(interface: ModelInterface, options: DataOptions) -> list[Inputs]:
    """Return the inputs of each request; a load sends these requests in turn.

    Args:
        interface: The model's interface.
        options: The options of the command line.

    Raises:
        InvalidArgument: The data does not fit the model, or a file is invalid.
    """
    if options.batch > 1 and not interface.supports_batching:
        message = f"--batch: {options.batch} rows, but the model does not support batches"
        raise InvalidArgument(message)
    shapes = dict(_parse_shape(text, interface) for text in options.shapes)
    maker = _TensorMaker(interface, options, shapes)
    values = load_inputs(options.values)
    flag_inputs = {name: maker.encode_input(name, value) for name, value in values.items()}
    if options.source in ("random", "zero"):
        requests: Iterable[dict[str, InputTensor]] = [
            {name: maker.generate(name) for name in interface.inputs if name not in flag_inputs}
        ]
    else:
        path = Path(options.source)
        requests = itertools.islice(_read_entries(path, maker), _MAX_REQUESTS)
    request_inputs = [list((request | flag_inputs).values()) for request in requests]
    if not request_inputs:
        raise InvalidArgument(f"--data: '{options.source}' has no request")
    return request_inputs


@dataclass(frozen=True)
class _TensorMaker:
    """A maker of the input tensors of requests."""

    model: ModelInterface
    options: DataOptions
    shapes: Mapping[str, tuple[int, ...]]
    random: np.random.Generator = field(default_factory=partial(np.random.default_rng, _SEED))

    def tensor(self, name: str) -> ModelTensor:
        """Return an input of the model; raise InvalidArgument if there is none by this name."""
        return find_input(name, self.model.inputs)

    def shape(self, name: str, row_shape: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the shape of an input with its batch; `row_shape` overrides the model's."""
        tensor = self.tensor(name)
        row_dims = tensor.shape[1:] if self.model.supports_batching else tensor.shape
        row_dims = self.shapes.get(name, row_dims) if row_shape is None else tuple(row_shape)
        if -1 in row_dims:
            dims = ",".join(map(str, row_dims))
            reason = self.model.config_error
            hint = (
                f". The server sent no configuration of the model ({reason}): if the model has a "
                "batch dimension, leave out the first number"
            )
            raise InvalidArgument(
                f"input '{name}' has the shape [{dims}], with dimensions of any size (-1). "
                f"Choose them with --shape {name}:{dims.replace('-1', 'N')}"
                f"{hint if reason else ''}"
            )
        shape = (self.options.batch, *row_dims) if self.model.supports_batching else row_dims
        if element_count(shape) > _MAX_ELEMENTS:
            raise InvalidArgument(f"input '{name}': the shape {list(shape)} is too large")
        return shape

    def generate(self, name: str) -> InputTensor:
        """Return an input with generated content: zeros, or random numbers or letters."""
        tensor, shape = self.tensor(name), self.shape(name)
        is_zero = self.options.source == "zero"
        # BF16 is the upper half of FP32.
        dtype = NUMPY_DTYPES.get(tensor.datatype, np.dtype(np.float32))
        if tensor.datatype == "BYTES":
            text_length = 0 if is_zero else self.options.text_length
            letters = self.random.integers(97, 123, (element_count(shape), text_length), np.uint8)
            array: Any = np.array([row.tobytes() for row in letters], np.object_).reshape(shape)
        elif is_zero:
            array = np.zeros(shape, dtype)
        elif dtype.kind == "f":
            array = self.random.random(shape).astype(dtype)
        else:
            upper_bound = 2 if tensor.datatype == "BOOL" else _INTEGER_BOUND
            array = self.random.integers(0, upper_bound, shape).astype(dtype)
        return self.encode_input(name, array)

    def encode_input(self, name: str, value: Any) -> InputTensor:
        """Return an input with the content `value`: JSON or an array."""
        return InputTensor.of(self.tensor(name), value)

    def from_elements(self, name: str, value: Any) -> InputTensor:
        """Return an input, given its elements in a file as a flat or nested list."""
        members = value if isinstance(value, dict) else {"content": value}
        shape = self.shape(name, members.get("shape"))
        if "b64" in members:
            return self._from_bytes(name, shape, base64.b64decode(members["b64"], validate=True))
        flat_array = np.array(members["content"], np.object_).ravel()
        if flat_array.size * self.options.batch == element_count(shape):
            flat_array = np.tile(flat_array, self.options.batch)
        if flat_array.size != element_count(shape):
            text = f"input '{name}': {flat_array.size} elements do not fit the shape {shape}"
            raise InvalidArgument(text)
        return self.encode_input(name, flat_array.reshape(shape).tolist())

    def _from_bytes(self, name: str, shape: tuple[int, ...], data: bytes) -> InputTensor:
        datatype = self.tensor(name).datatype
        expected_size = ITEM_SIZE[datatype] * element_count(shape)
        if expected_size and len(data) != expected_size:
            raise InvalidArgument(
                f"input '{name}': got {len(data)} bytes, expected {expected_size} for the shape "
                f"{shape}"
            )
        return InputTensor(name, datatype, list(shape), data)


def _parse_shape(text: str, model: ModelInterface) -> tuple[str, tuple[int, ...]]:
    name, colon, dims = text.rpartition(":")
    try:
        shape = tuple(int(dim) for dim in dims.split(",")) if dims else ()
    except ValueError:
        shape = (-1,)
    if not colon or any(dim < 0 for dim in shape):
        raise InvalidArgument(f"--shape: expected NAME:N,N,..., got '{text}'")
    if name not in model.inputs:
        message = f"--shape: the model has no input '{name}'; it has {', '.join(model.inputs)}"
        raise InvalidArgument(message)
    return name, shape


def read_json(path: Path) -> list[Any]:
    """Return the requests of a file: a JSON list, an object's list "data", or lines (.jsonl)."""
    text = read_text("--data", path)
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"--data: '{path}' is not JSON: {error}") from None
    document = document.get("data", [document]) if isinstance(document, dict) else document
    if not isinstance(document, list):
        raise InvalidArgument(f"--data: '{path}' has no list of requests")
    return [entry for item in document for entry in (item if isinstance(item, list) else [item])]


def _read_entries(path: Path, maker: _TensorMaker) -> Iterator[dict[str, InputTensor]]:
    if path.suffix == ".py":
        interface = {name: (spec.datatype, spec.shape) for name, spec in maker.model.inputs.items()}
        entries, convert = run_program(path, interface), maker.encode_input
        problem = "is not a mapping of inputs to values"
    else:
        entries, convert = iter(read_json(path)), maker.from_elements
        problem = "must be a JSON object {input: values}"
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise InvalidArgument(f"--data: request {number} of '{path}' {problem}")
        try:
            yield {name: convert(name, value) for name, value in entry.items()}
        except (InvalidArgument, KeyError, ValueError, TypeError) as error:
            text = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidArgument(f"--data: request {number} of '{path}': {text}") from None


def run_program(path: Path, *arguments: Any) -> Iterator[Any]:
    """Yield the values of the function `requests` of a Python file."""
    with convert_os_errors(f"--data: cannot read '{path}'"), path.open():
        pass
    try:
        function = runpy.run_path(str(path)).get("requests")
        if not callable(function):
            raise InvalidArgument(f"--data: '{path}' has no function `requests`")
        yield from function(*arguments)
    except InvalidArgument:
        raise
    except Exception as error:  # the user's program may raise any exception
        raise InvalidArgument(f"--data: '{path}' failed: {type(error).__name__}: {error}") from None


def output_sizes(interface: ModelInterface, batch: int, default_size: int) -> dict[str, int]:
    """Return the byte size of each output of a request; variable sizes are `default_size`."""
    sizes = {}
    for name, (datatype, dims) in interface.outputs.items():
        is_fixed = ITEM_SIZE[datatype] and -1 not in dims
        rows = batch if interface.supports_batching else 1
        sizes[name] = rows * element_count(dims) * ITEM_SIZE[datatype] if is_fixed else default_size
    return sizes
