"""A stand-in for pyACL: records every call, keeps the device's memory in the host's, and runs files
that say in JSON what a model's tensors are. It doubles: output i is twice input i."""

import ctypes
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

_KINDS = {0: np.float32, 3: np.int32, 16: np.complex64}


def write(path: Path, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
    """Write the file of a model. A tensor has name, type (ACL's number) and dims."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"inputs": inputs, "outputs": outputs}))


class FakeAcl:
    """A stand-in for `acl`; `alive` are undestroyed objects, `failing` fails with error 507."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self.alive: dict[int, str] = {}
        self.failing = failing
        self._numbers = itertools.count(1)
        self._objects: dict[int, Any] = {}
        self.rt = SimpleNamespace(
            set_device=self._plain("rt.set_device"),
            reset_device=self._plain("rt.reset_device"),
            create_context=self._maker("rt.create_context"),
            destroy_context=self._breaker("rt.destroy_context"),
            malloc=self._malloc,
            free=self._breaker("rt.free"),
            memcpy=self._memcpy,
        )
        self.mdl = SimpleNamespace(
            query_size=lambda path: (3000, 100, self._call("mdl.query_size")),
            load_from_file_with_mem=self._load,
            unload=self._breaker("mdl.unload"),
            create_desc=lambda: self._make("mdl.create_desc", [])[0],
            destroy_desc=self._breaker("mdl.destroy_desc"),
            get_desc=self._describe,
            create_dataset=lambda: self._make("mdl.create_dataset", [])[0],
            destroy_dataset=self._breaker("mdl.destroy_dataset"),
            add_dataset_buffer=self._add,
            execute=self._execute,
        )
        for side in ("input", "output"):
            self._accessors(side)

    def _accessors(self, side: str) -> None:
        def tensor(description: int, index: int) -> Any:
            return self._objects[description][0][f"{side}s"][index]

        def size(description: int, index: int) -> int:
            pointer = tensor(description, index)
            return int(np.prod(pointer["dims"])) * np.dtype(_KINDS[pointer["type"]]).itemsize

        getters: dict[str, Callable[..., Any]] = {
            f"get_num_{side}s": lambda d: len(self._objects[d][0][f"{side}s"]),
            f"get_{side}_name_by_index": lambda d, i: tensor(d, i)["name"],
            f"get_{side}_data_type": lambda d, i: tensor(d, i)["type"],
            f"get_{side}_dims": lambda d, i: ({"dims": tensor(d, i)["dims"]}, 0),
            f"get_{side}_size_by_index": size,
        }
        for name, getter in getters.items():
            setattr(self.mdl, name, getter)

    # --- of the module itself

    def init(self) -> int:
        return self._call("init")

    def finalize(self) -> int:
        return self._call("finalize")

    def create_data_buffer(self, address: int, byte_size: int) -> int:
        address_of_buffer: int = self._make("create_data_buffer", (address, byte_size))[0]
        return address_of_buffer

    def destroy_data_buffer(self, buffer: int) -> int:
        return self._breaker("destroy_data_buffer")(buffer)

    # --- helpers of all calls

    def _call(self, name: str) -> int:
        self.calls.append(name)
        return 507 if name == self.failing else 0

    def _make(self, name: str, content: Any) -> tuple[Any, int]:
        error = self._call(name)
        number = next(self._numbers)
        if not error:
            self.alive[number] = name
            self._objects[number] = content
        return number, error

    def _plain(self, name: str) -> Callable[[int], int]:
        return lambda device: self._call(name)

    def _maker(self, name: str) -> Callable[[int], tuple[Any, int]]:
        return lambda device: self._make(name, device)

    def _breaker(self, name: str) -> Callable[[int], int]:
        def end(number: int) -> int:
            del self.alive[number]
            return self._call(name)

        return end

    # --- memory, and models

    def _malloc(self, size: int, policy: int) -> tuple[int, int]:
        buffer = ctypes.create_string_buffer(size)
        error = self._call("rt.malloc")
        address = ctypes.addressof(buffer)
        if not error:
            self.alive[address] = "rt.malloc"
            self._objects[address] = buffer
        return address, error

    def _memcpy(self, destination: int, capacity: int, source: int, size: int, kind: int) -> int:
        assert size <= capacity and kind in (1, 2)
        ctypes.memmove(destination, source, size)
        return self._call("rt.memcpy")

    def _load(self, path: str, *memory: int) -> tuple[Any, int]:
        workspace, workspace_size, weights, weights_size = memory
        assert (workspace_size, weights_size) == (3000, 100)
        assert workspace >= weights + weights_size
        return self._make("mdl.load_from_file_with_mem", json.loads(Path(path).read_text()))

    def _describe(self, description: int, model: int) -> int:
        self._objects[description].append(self._objects[model])
        return self._call("mdl.get_desc")

    def _add(self, dataset: int, buffer: int) -> tuple[int, int]:
        self._objects[dataset].append(self._objects[buffer])
        return dataset, self._call("mdl.add_dataset_buffer")

    def _execute(self, model: int, inputs: int, outputs: int) -> int:
        sides = zip(self._objects[inputs], self._objects[outputs], strict=True)
        for tensor, (source, target) in zip(self._objects[model]["inputs"], sides, strict=True):
            kind = np.dtype(_KINDS[tensor["type"]])
            values = np.frombuffer(ctypes.string_at(*source), kind)
            ctypes.memmove(target[0], (values * 2).tobytes(), target[1])
        return self._call("mdl.execute")
