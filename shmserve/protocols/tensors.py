"""Conversion between command-line values and tensors, for `shmserve client`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES, encode_bytes, to_bf16
from shmserve.ipc.tensors.datatypes import ITEM_SIZE

_Array = np.ndarray[Any, Any]

_MAX_STREAM_BYTES = 1 << 30  # for a pipe or a device, which may be endless
_MAX_DIMENSIONS = 32  # numpy's maximum number of dimensions

# Datatype -> the required Python type of JSON elements, and its name in error messages.
_INTEGER_TYPE = (int, "integers")
_NUMBER_TYPE = ((int, float), "numbers")
_ELEMENT_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "BOOL": (bool, "true and false"),
    "BYTES": (str, "texts"),
    **dict.fromkeys(("FP16", "FP32", "FP64", "BF16"), _NUMBER_TYPE),
}


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """An input in the metadata of a model; -1 in `shape` is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def find_input(name: str, inputs: Mapping[str, ModelTensor]) -> ModelTensor:
    """Return the input of this name. Raises InvalidArgument if the model has none."""
    if name not in inputs:
        text = f"the model has no input '{name}'; it has {', '.join(inputs) or 'none'}"
        raise InvalidArgument(text)
    return inputs[name]


def split_input(text: str, flag: str = "input") -> tuple[str, str]:
    """Return the name and the value in the text NAME=VALUE of a flag.

    Raises:
        InvalidArgument: The text has another form.
    """
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise InvalidArgument(f"--{flag}: expected NAME=VALUE, got '{text}'")
    return name, value


def load_inputs(texts: Iterable[str]) -> dict[str, Any]:
    """Return the values of `--input` flags by name; see `load_value`.

    Raises:
        InvalidArgument: A flag is malformed or repeated, or a value cannot be read.
    """
    values: dict[str, Any] = {}
    for name, text in map(split_input, texts):
        if name in values:
            raise InvalidArgument(f"--input: '{name}' is given twice")
        values[name] = load_value(name, text)
    return values


def load_value(name: str, text: str) -> Any:
    """Return the value of a command-line text: JSON, or the content of a file named after @.

    A .npy file is read as an array, and any other file as its bytes (see `encode`).

    Raises:
        InvalidArgument: The text is not JSON, or the file cannot be read.
    """
    if text.startswith("@"):
        return _load_array(name, Path(text[1:]))
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InvalidArgument(f"input '{name}': the lists are nested too deeply") from error
    except ValueError as error:
        hint = "" if text[:1] in tuple('[{"') else f" (quote a string: --input '{name}=\"...\"')"
        raise InvalidArgument(f"input '{name}': not JSON: {error}{hint}") from error


def _load_array(name: str, path: Path) -> _Array:
    try:
        with path.open("rb") as file:
            if path.suffix not in (".npy", ".npz"):
                is_regular = path.is_file()
                content = file.read(-1 if is_regular else _MAX_STREAM_BYTES + 1)
                if not is_regular and len(content) > _MAX_STREAM_BYTES:
                    raise ValueError("found more than 1 GiB; only regular files may be larger")
                return np.array(content, np.object_)
            array = np.load(file, allow_pickle=False)
    except Exception as error:  # numpy may raise any exception for an invalid file
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"input '{name}': cannot read {path}: {reason}") from error
    if not isinstance(array, np.ndarray):
        text = f"input '{name}': {path} contains several arrays; save a single array"
        raise InvalidArgument(text)
    return array


def encode(tensor: ModelTensor, value: Any) -> tuple[list[int], bytes]:
    """Return the shape and the wire bytes of a value (JSON or an array) for an input.

    A value with exactly one dimension less than the input becomes a batch of one if the first
    dimension of the input is variable. A scalar becomes a tensor with one element. The bytes of a
    file become one string, a vector of UINT8, or the pixels of an image.

    Raises:
        InvalidArgument: The elements are not of the datatype.
    """
    if tensor.datatype not in ITEM_SIZE:
        raise InvalidArgument(f"input '{tensor.name}' has the unknown datatype {tensor.datatype}")
    if isinstance(value, np.ndarray) and value.dtype == object and tensor.datatype != "BYTES":
        value = _from_file(tensor, value.item())
    to_array = _from_array if isinstance(value, np.ndarray) else _from_json
    array = to_array(tensor, value)
    shape = list(array.shape)
    if not shape and set(tensor.shape) <= {1, -1}:
        shape = [1] * len(tensor.shape)
    elif tensor.shape[:1] == (-1,) and len(shape) == len(tensor.shape) - 1:
        shape.insert(0, 1)
    try:
        return shape, encode_bytes(array) if tensor.datatype == "BYTES" else array.tobytes()
    except UnicodeEncodeError:  # a surrogate, which JSON can express by an escape
        raise InvalidArgument(f"input '{tensor.name}': a text is not valid Unicode") from None


def decode(datatype: str, shape: list[int], raw: memoryview) -> Any:
    """Return an output as nested lists. Raises ValueError or KeyError if it is malformed."""
    if datatype == "BYTES":
        return np.array([*_decode_texts(raw), None], dtype=np.object_)[:-1].reshape(shape).tolist()
    if datatype == "BF16":
        float32_bits = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        return float32_bits.view(np.float32).reshape(shape).tolist()
    return np.frombuffer(raw, NUMPY_DTYPES[datatype]).reshape(shape).tolist()


def _decode_texts(data: memoryview) -> Iterator[str]:
    r"""Yield the elements of a BYTES tensor, with `\xNN` for bytes that are not UTF-8."""
    position = 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 4], "little")
        position += 4
        if position + length > len(data):
            raise ValueError("a string is longer than its tensor")
        yield bytes(data[position : position + length]).decode("utf-8", "backslashreplace")
        position += length


def _from_json(tensor: ModelTensor, value: Any) -> _Array:
    shape = _nested_shape(value)
    if len(shape) > _MAX_DIMENSIONS:
        raise InvalidArgument(
            f"input '{tensor.name}': the lists are nested too deeply: {len(shape)} levels "
            f"(maximum: {_MAX_DIMENSIONS})"
        )
    kind, element_name = _ELEMENT_TYPES.get(tensor.datatype, _INTEGER_TYPE)
    elements: list[Any] = []
    for element in _leaves(tensor, value, shape):
        # In Python, True is an integer, too.
        if not isinstance(element, kind) or (isinstance(element, bool) and kind is not bool):
            raise InvalidArgument(
                f"input '{tensor.name}' is {tensor.datatype}: its elements are {element_name}, not "
                f"{json.dumps(element)}"
            )
        elements.append(element)
    return _typed_array(tensor, elements).reshape(shape)


def _typed_array(tensor: ModelTensor, elements: list[Any]) -> _Array:
    # BF16 is the upper half of FP32.
    dtype = NUMPY_DTYPES.get(tensor.datatype, np.dtype(np.float32))
    if dtype.kind in "iu":
        integer_limits = np.iinfo(dtype)
        for element in elements:
            if not integer_limits.min <= element <= integer_limits.max:
                raise InvalidArgument(
                    f"input '{tensor.name}' is {tensor.datatype}: {element} is out of range "
                    f"(allowed: {integer_limits.min} to {integer_limits.max})"
                )
    try:
        with np.errstate(over="ignore"):
            array = np.array(elements, dtype=dtype)
    except OverflowError as error:
        raise InvalidArgument(f"input '{tensor.name}' is {tensor.datatype}: {error}") from error
    return to_bf16(array) if tensor.datatype == "BF16" else array


def _nested_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of nested lists by the first element of each list."""
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _leaves(tensor: ModelTensor, value: Any, shape: tuple[int, ...]) -> Iterator[Any]:
    if not shape:
        yield value
        return
    if not isinstance(value, list) or len(value) != shape[0]:
        raise InvalidArgument(f"input '{tensor.name}': the lists are of unequal length or depth")
    for item in value:
        yield from _leaves(tensor, item, shape[1:])


def _from_file(tensor: ModelTensor, content: bytes) -> _Array:
    """Return the content of a file for a UINT8 input: its bytes, or the pixels of an image.

    The input of pixels is HWC or CHW with 1 or 3 channels, or HW, after a batch dimension if any.

    Raises:
        InvalidArgument: The input is not of UINT8, or the file is not an image of the input's size.
    """
    subject = f"input '{tensor.name}' is {tensor.datatype} {list(tensor.shape)}"
    if tensor.datatype != "UINT8":
        raise InvalidArgument(
            f"{subject}: only BYTES and UINT8 inputs accept the bytes of a file; convert an image "
            "to an array with the model's preprocessing (scale, mean, size), and save the array as "
            "a .npy file with numpy.save"
        )
    if tensor.shape in ((-1,), (-1, -1), (1, -1)):
        return np.frombuffer(content, np.uint8)
    try:
        from PIL import Image
    except ImportError as error:
        text = f"{subject}: decoding an image needs Pillow (pip install pillow)"
        raise InvalidArgument(text) from error
    dims = tensor.shape[-3:]
    has_channels_first = len(dims) == 3 and dims[0] in (1, 3) and dims[2] not in (1, 3)
    channels = dims[0 if has_channels_first else -1] if len(dims) == 3 else 1
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).partition(" <")[0]  # without the name of the file object
        raise InvalidArgument(f"{subject}, but the file is not an image: {reason}") from error
    if len(dims) == 3:
        pixels = pixels.reshape(*pixels.shape[:2], -1)
    if has_channels_first:
        pixels = pixels.transpose(2, 0, 1)
    pixels = pixels.reshape([1] * (len(tensor.shape) - len(dims)) + list(pixels.shape))
    size_pairs = zip(tensor.shape, pixels.shape, strict=False)
    if len(tensor.shape) != pixels.ndim or any(dim not in (-1, size) for dim, size in size_pairs):
        raise InvalidArgument(f"{subject}, but the image has {list(pixels.shape)}: resize it")
    return np.ascontiguousarray(pixels)


def _from_array(tensor: ModelTensor, array: _Array) -> _Array:
    is_floating = tensor.datatype == "BF16" or NUMPY_DTYPES[tensor.datatype].kind == "f"
    if tensor.datatype == "BYTES":
        if array.dtype.kind in "SUO":
            return array
    elif is_floating and array.dtype.kind == "f":
        # The model's datatype may have less precision; every other conversion must keep the values.
        with np.errstate(over="ignore"):
            if tensor.datatype == "BF16":
                return to_bf16(array.astype(np.float32))
            return array.astype(NUMPY_DTYPES[tensor.datatype])
    elif tensor.datatype != "BF16" and np.can_cast(
        array.dtype, NUMPY_DTYPES[tensor.datatype], "safe"
    ):
        return array.astype(NUMPY_DTYPES[tensor.datatype])
    raise InvalidArgument(
        f"input '{tensor.name}': expected {tensor.datatype}, got an array of {array.dtype}, whose "
        "values may not fit"
    )
