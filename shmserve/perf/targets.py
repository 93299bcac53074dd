"""Targets: the server and protocol that a command line selects, the requests, and their regions."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import posix_ipc

from shmserve.client import discovery
from shmserve.client.memory.cuda import open_exporter
from shmserve.client.memory.segments import ALIGNMENT, aligned
from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.memory.cuda_ipc import DeviceAllocation
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.perf import data, measure
from shmserve.perf.data import Inputs
from shmserve.perf.load import probe
from shmserve.protocols import (
    Address,
    AdminTransport,
    LaneFactory,
    OutgoingRequest,
    RegionPart,
    TransportError,
    servers,
)
from shmserve.protocols.connection import EventLoop

_WORDS = "time year people way day man thing woman life child world school state family".split()  # noqa: SIM905

Requests = Callable[[int], Sequence[Any]]  # the encoded requests of a slot


@dataclass(frozen=True)
class LoadTarget:
    """The server and model that a load is sent to.

    Attributes:
        lane_factory: The factory of lanes of the selected protocol.
        requests: A function of the number of slots. Its result maps the index of a slot to the
            encoded requests of this slot.
        statistics: A function that returns the server's statistics by model.
        title: The target's name in reports.
    """

    lane_factory: LaneFactory
    requests: Callable[[int], Requests]
    statistics: Callable[[], dict[str, Mapping[str, Any]]]
    title: str


def connect(args: Namespace, loop: EventLoop, stack: ExitStack) -> LoadTarget:
    """Return the target that the flags select; `stack` closes its resources.

    Raises:
        InvalidArgument: A flag is invalid.
        Unavailable: The server is unreachable.
    """
    if args.openai:
        return _open_openai(args, loop, stack)
    address = servers.parse_address(args.url) if args.url else None
    run_dir = discovery.find(args.run_dir) if address is None else None
    transport: Any = stack.enter_context(contextlib.closing(_metadata_transport(args, address)))
    with prefix_errors(transport):
        model = data.read_interface(transport, args.model, args.model_version)
    options = data.DataOptions(args.input, args.shape, args.data, args.batch, args.text_length)
    items = data.read_requests(model, options)
    output_sizes = data.output_sizes(model, args.batch, args.output_byte_size)
    lane_factory: Any
    if address is None:
        lane_factory = _open_native_lanes(args, run_dir, loop, model)
    else:
        lane_factory = _open_lanes(args, address, loop, model.decoupled)
    stack.callback(lane_factory.close)
    regions = None
    if args.shared_memory != "none" and address is not None:
        regions = stack.enter_context(Regions(transport, args.shared_memory))
        items = regions.inputs(items)
    requests = partial(_slot_requests, args, lane_factory, items, output_sizes, regions)
    _send_probe(args, loop, lane_factory, requests(1)(0)[0])
    models = (args.model, *model.steps)
    statistics = partial(measure.statistics_of, transport, models, args.model_version)
    title = address.address_text if address else str(run_dir)
    return LoadTarget(lane_factory, requests, statistics, title)


@contextlib.contextmanager
def prefix_errors(transport: AdminTransport) -> Iterator[None]:
    """Prefix an error of the transport in this block with the server's address."""
    try:
        yield
    except TransportError as error:
        raise TransportError(f"{transport.address_text}: {error.message}") from None


def _metadata_transport(args: Namespace, address: Address | None) -> Any:
    """Return the transport that reads metadata and statistics.

    For a server on this host, this is the transport to its HTTP or gRPC listener. Without a
    listener it is shared memory, which offers less information.
    """
    try:
        return servers.create_admin_transport(args)
    except Unavailable:
        if address is not None:
            raise
        return servers.create_transport(args)


def _open_native_lanes(
    args: Namespace, run_dir: Path | None, loop: EventLoop, model: data.ModelInterface
) -> LaneFactory:
    from shmserve.protocols.native import NativeLaneFactory

    assert run_dir is not None
    device = {"none": "", "system": "cpu", "cuda": "cuda:0"}[args.shared_memory]
    rows = (args.batch,) if model.supports_batching else ()
    specs = {
        name: (
            (args.output_byte_size // ITEM_SIZE[datatype],) if -1 in dims else (*rows, *dims),
            datatype,
        )
        for name, (datatype, dims) in model.outputs.items()
        if datatype != "BYTES"  # BYTES outputs are decoded and have no range
    }
    return NativeLaneFactory(
        run_dir, loop, is_decoupled=model.decoupled, device=device, output_specs=specs
    )


def _open_lanes(
    args: Namespace, address: Address, loop: EventLoop, is_decoupled: bool
) -> LaneFactory:
    credentials = servers.read_credentials(args)
    if address.protocol == "grpc":
        from shmserve.protocols.grpc import GrpcLaneFactory

        return GrpcLaneFactory(address, credentials, loop, is_decoupled=is_decoupled)
    from shmserve.protocols.http import GenerateLaneFactory, HttpLaneFactory

    factory_class = GenerateLaneFactory if is_decoupled else HttpLaneFactory
    return factory_class(address, credentials, loop)


def _slot_requests(
    args: Namespace,
    lane_factory: LaneFactory,
    items: Sequence[data.Inputs],
    output_sizes: dict[str, int],
    regions: Regions | None,
    concurrency: int,
) -> Requests:
    """Return a function that returns the encoded requests of a slot.

    The slots share the same requests unless each slot has its own sequences or memory.
    """
    output_parts = regions.outputs(output_sizes, concurrency) if regions and output_sizes else None
    step_count = args.sequence_length
    first_sequence = random.getrandbits(62) + 1

    def encode_slot(slot: int) -> list[Any]:
        request_count = math.lcm(len(items), step_count) if step_count else len(items)
        slot_parts = output_parts[slot] if output_parts else {}
        return [
            lane_factory.encode(
                OutgoingRequest(
                    *(args.model, args.model_version, "", 0, items[number % len(items)]),
                    list(slot_parts),
                    first_sequence + slot if step_count else 0,
                    is_start=bool(step_count) and number % step_count == 0,
                    is_end=bool(step_count) and number % step_count == step_count - 1,
                    output_parts=slot_parts,
                )
            )
            for number in range(request_count)
        ]

    if step_count or args.shared_memory != "none":
        return encode_slot
    return partial(_rotate_requests, encode_slot(0))


def _rotate_requests(requests: Sequence[Any], slot: int) -> Sequence[Any]:
    """Return the requests rotated for a slot, so that neighbouring slots start differently."""
    shift = slot % len(requests)
    return [*requests[shift:], *requests[:shift]]


def _send_probe(args: Namespace, loop: EventLoop, lane_factory: LaneFactory, request: Any) -> None:
    """Send one request before the load starts, and raise its error."""
    if args.sequence_length:
        return  # the request would start a sequence that never ends
    error = probe(loop, lane_factory, request, args.patience)
    if error:
        if args.shared_memory != "none":
            error += f" (outputs of unknown size have {args.output_byte_size} bytes in shared "
            error += "memory: --output-byte-size)"
        raise Unavailable(f"the first request to '{args.model}' failed: {error}")


def _open_openai(args: Namespace, loop: EventLoop, stack: ExitStack) -> LoadTarget:
    from shmserve.protocols.http import OPENAI_PATHS, OpenAILaneFactory

    if args.url is None:
        raise InvalidArgument("--openai requires --url http://HOST:PORT")
    address = servers.parse_address(args.url)
    if address.protocol != "http":
        raise InvalidArgument(f"--openai requires --url http://HOST:PORT, got '{args.url}'")
    credentials = servers.read_credentials(args)
    lane_factory = OpenAILaneFactory(address, credentials, loop)
    path = OPENAI_PATHS[args.openai]
    requests = [lane_factory.post_json(path, body) for body in _bodies(args)]
    _send_probe(args, loop, lane_factory, requests[0])
    title = address.address_text + path
    return LoadTarget(lane_factory, lambda slots: partial(_rotate_requests, requests), dict, title)


def _bodies(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the bodies of requests: from --data, completed with defaults, or generated prompts."""
    defaults: dict[str, Any] = {"model": args.model, "max_tokens": args.max_tokens, "stream": True}
    defaults["stream_options"] = {"include_usage": True}
    path = Path(args.data)
    if args.data not in ("random", "zero"):
        bodies = data.run_program(path, {}) if path.suffix == ".py" else iter(data.read_json(path))
        for number, entry in enumerate(bodies):
            if not isinstance(entry, dict):
                raise InvalidArgument(f"--data: entry {number} of '{path}' is not a JSON object")
            body = {**defaults, **entry}
            if not body["stream"]:
                del body["stream_options"]  # servers reject this field without `stream`
            yield body
        return
    rng = random.Random(args.seed)
    for _ in range(16):  # prompts differ, so that prefix caches do not serve all of them
        prompt = " ".join(rng.choices(_WORDS, k=args.prompt_words))
        chat = {"messages": [{"role": "user", "content": prompt}]}
        yield {**defaults, **(chat if args.openai == "chat" else {"prompt": prompt})}


class SystemMemory:
    """A POSIX shared memory object, removed by `close`."""

    kind = "system"

    def __init__(self, name: str, byte_size: int) -> None:
        """Create the object with this name. Raises Unavailable if memory is exhausted."""
        self._key = f"/{name}"
        try:
            shared_memory = posix_ipc.SharedMemory(self._key, posix_ipc.O_CREX, 0o600, byte_size)
            os.posix_fallocate(shared_memory.fd, 0, byte_size)
            self._bytes = mmap.mmap(shared_memory.fd, byte_size)
        except BaseException as error:  # also an interrupt
            with contextlib.suppress(posix_ipc.Error):
                posix_ipc.unlink_shared_memory(self._key)
            if not isinstance(error, OSError | posix_ipc.Error):
                raise
            text = f"{byte_size} bytes of shared memory cannot be allocated: {error}"
            raise Unavailable(text) from None
        shared_memory.close_fd()
        self.fields: dict[str, Any] = {"key": self._key, "offset": 0, "byte_size": byte_size}

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset."""
        self._bytes[offset : offset + len(data)] = data

    def close(self) -> None:
        """Release the memory."""
        posix_ipc.unlink_shared_memory(self._key)
        self._bytes.close()


class CudaMemory:
    """Memory of CUDA device 0, exported by its handle."""

    kind = "cuda"

    def __init__(self, name: str, byte_size: int) -> None:
        """Allocate the memory. Raises Unavailable without a device or without enough memory."""
        self._memory: DeviceAllocation | None = DeviceAllocation(open_exporter(), 0, byte_size)
        self._pointer, self._cuda = self._memory.pointer, self._memory.cuda
        handle = self._memory.handle.raw
        self.fields: dict[str, Any] = {"raw_handle": handle, "device_id": 0, "byte_size": byte_size}

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes to an offset of the device memory."""
        if data:
            self._cuda.write(self._pointer + offset, memoryview(data), 0)

    def close(self) -> None:
        """Release the memory."""
        self._memory = None


RegionMemory = SystemMemory | CudaMemory
MEMORY_TYPES: dict[str, type[RegionMemory]] = {"system": SystemMemory, "cuda": CudaMemory}


class Regions:
    """The two regions of a run; a context that unregisters and removes them.

    in     | request 0: input, input | request 1: ...          read by the server
    out    | slot 0: output, output | slot 1: ...              written by the server, never read
    """

    def __init__(self, transport: AdminTransport, kind: str) -> None:
        self._transport = transport
        self._memory_type = MEMORY_TYPES[kind]
        self._memories: dict[str, RegionMemory] = {}

    def inputs(self, items: Sequence[Inputs]) -> list[Inputs]:
        """Return the same requests with their inputs in a region.

        Raises:
            Unavailable: There is no memory for the region.
            TransportError: The server rejects the region.
        """
        parts: list[RegionPart] = []
        name = self._region_name("in")
        offset = 0
        for tensor in (tensor for item in items for tensor in item):
            parts.append(RegionPart(name, offset, len(tensor.raw)))
            offset += aligned(len(tensor.raw))
        memory = self._register_region(name, offset)
        unused_parts = iter(parts)
        pairs = [[(tensor, next(unused_parts)) for tensor in item] for item in items]
        for tensor, part in (pair for item in pairs for pair in item):
            memory.write(part.offset, tensor.raw)
        return [[replace(t, raw=b"", region_part=part) for t, part in item] for item in pairs]

    def outputs(self, byte_sizes: Mapping[str, int], slots: int) -> list[dict[str, RegionPart]]:
        """Reserve space in a region for the outputs of each slot; return the parts by output.

        Raises:
            Unavailable: There is no memory for the region.
            TransportError: The server rejects the region.
        """
        name = self._region_name(f"out{slots}")
        output_parts: list[dict[str, RegionPart]] = []
        offset = 0
        for _ in range(slots):
            output_parts.append({})
            for output, size in byte_sizes.items():
                output_parts[-1][output] = RegionPart(name, offset, size)
                offset += aligned(size)
        self._register_region(name, offset)
        return output_parts

    def _region_name(self, purpose: str) -> str:
        return f"perf-{os.getpid()}-{purpose}-{len(self._memories)}"

    def _register_region(self, name: str, byte_size: int) -> RegionMemory:
        memory = self._memory_type(name, max(byte_size, ALIGNMENT))
        self._memories[name] = memory
        self._transport.register(memory.kind, name, memory.fields)
        return memory

    def __enter__(self) -> Regions:
        return self

    def __exit__(self, *error: object) -> None:
        for name, memory in self._memories.items():
            # The server has exited, or the region is already unregistered.
            with contextlib.suppress(TransportError):
                self._transport.unregister(memory.kind, name)
            memory.close()
