"""Backend `onnxruntime`: ONNX files, on the CPU or, with onnxruntime-gpu, on a GPU.

The file is `default_model_filename` (model.onnx) in the version folder. Inputs, outputs and batch
size need no configuration: a model whose tensors all have a first dimension that varies is taken to
batch (up to 4, or what --backend-config=onnxruntime,default-max-batch-size=N says). What of a
configuration has an effect is in session.py.

session.py      the session that runs the file: options, device
model_file.py   what the file says of its inputs and outputs
binding.py      a session's inputs and outputs in our memory
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.backends import Backend, ModelContext, Request, Response
from shmserve.workers.backends.described import Description, complete
from shmserve.workers.backends.onnx.binding import DeviceBinding, HostBinding
from shmserve.workers.backends.onnx.session import check, describe, open_session
from shmserve.workers.batch.ragged import Ragged
from shmserve.workers.batch.runner import Runner
from shmserve.workers.device import Device, open_device
from shmserve.workers.model_view import as_model_sees, made_here

_ERROR = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


class OnnxRuntimeError(Exception):
    """An error of onnxruntime, in Triton's form."""


class OnnxBackend(Backend):
    """One session of one ONNX file."""

    read_only_inputs = False  # a session does not write into them

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._loaded: tuple[Any, Description] | None = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Inputs, outputs and batch size, as the file has them."""
        spec = ModelSpec.of(config)
        _, description = self._open(spec)
        ours = made_here(spec)
        clients = Description(
            tuple(tensor for tensor in description.inputs if tensor.name not in ours),
            tuple(tensor for tensor in description.outputs if tensor.name not in ours),
            description.largest_batch,
        )
        most = int(self.context.backend_config.get("default-max-batch-size", "4"))
        return complete(config, clients, most)

    def load(self, config: ModelSpec) -> None:
        """Open the file and match it with the configuration."""
        session, description = self._open(config)
        signature = Signature(as_model_sees(config), self.context.version)
        ragged = Ragged(config)
        of_batches = (*config.batch_input, *config.batch_output)
        made = {name for each in of_batches for name in each.target_name}
        check(signature, description, made)
        self._names = [tensor.name for tensor in description.outputs]
        on_gpu = self.context.kind == "GPU"
        device = open_device(self.context.device) if on_gpu else Device("cpu")
        as_numpy = frozenset() if on_gpu else frozenset(signature.inputs) | made
        self._runner = Runner(self.context, signature, device, as_numpy, ragged)
        self._binding: DeviceBinding | HostBinding
        if on_gpu:
            strings = [t.name for t in description.inputs if t.datatype == "BYTES"]
            strings += [t.name for t in description.outputs if t.datatype == "BYTES"]
            if strings:
                raise InvalidArgument(
                    f"tensor '{strings[0]}' of model '{signature.name}' has data_type TYPE_STRING, "
                    "which no GPU can hold: set instance_group to KIND_CPU"
                )
            self.device_inputs = True
            self._binding = DeviceBinding(session, description, device)
        else:
            self._binding = HostBinding(self.context, session, description)

    def execute(self, requests: list[Request]) -> list[Response]:
        """One run of the session for the whole batch."""
        inputs = self._runner.inputs(requests)
        needed = {name for request in requests for name in request.requested}
        needed.update(requests[0].states)
        wanted = [name for name in self._names if name in needed] or self._names[:1]
        with _in_words():
            outputs = self._binding.run(inputs, wanted, requests)
        return self._runner.responses(requests, outputs)

    def _open(self, config: ModelSpec) -> tuple[Any, Description]:
        if self._loaded is None:
            file = config.default_model_filename or "model.onnx"
            path = self.context.model_file([file], file)
            with _in_words(path):
                session = open_session(self.context, config, path)
            self._loaded = session, describe(session)
        return self._loaded


@contextlib.contextmanager
def _in_words(path: Path | None = None) -> Iterator[None]:
    """Of errors of onnxruntime, what a client may see: `path` by its name alone."""
    try:
        yield
    except Exception as error:
        found = _ERROR.search(str(error))
        if found is None:
            raise
        text = found[2].strip()
        if path is not None:
            text = text.replace(str(path), path.name)
        raise OnnxRuntimeError(f"onnx runtime error {found[1]}: {text}") from None
