"""Targets: the door that a command line selects, and the requests of each slot."""

from __future__ import annotations

import argparse
import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shmserve.client import discovery
from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.perf import data, measure
from shmserve.perf.load import probe
from shmserve.perf.regions import Regions
from shmserve.protocols import Address, Door, OutgoingRequest, servers
from shmserve.protocols.connection import Poller

_WORDS = "time year people way day man thing woman life child world school state family".split()  # noqa: SIM905

Requests = Callable[[int], Sequence[Any]]  # the encoded requests of a slot


@dataclass(frozen=True)
class LoadTarget:
    """The target of a load.

    Attributes:
        door: The protocol's door.
        requests: Returns the requests of the slots, for a number of slots.
        statistics: Returns the server's statistics by model.
        streams: Whether the model is decoupled.
        where: The target's name in reports.
    """

    door: Door
    requests: Callable[[int], Requests]
    statistics: Callable[[], dict[str, Mapping[str, Any]]]
    streams: bool
    where: str


def target(args: argparse.Namespace, poller: Poller, stack: contextlib.ExitStack) -> LoadTarget:
    """Return the target that the flags select, with its resources on the stack.

    Raises:
        InvalidArgument: A flag is invalid.
        Unavailable: The server is unreachable.
    """
    if args.openai:
        return _openai(args, poller, stack)
    address = servers.address(args.url) if args.url else None
    run_dir = discovery.find(args.run_dir) if address is None else None
    transport: Any = stack.enter_context(contextlib.closing(_teller(args, address)))
    config = data.config_of(transport, args.model, args.model_version)
    model = data.signature(transport, config, args.model, args.model_version)
    given = data.Given(args.input, args.shape, args.data, args.batch, args.text_length)
    items = data.items(model, given)
    sizes = data.output_sizes(model, args.batch, args.output_byte_size)
    door: Any
    if address is None:
        door = _native(args, run_dir, poller, model, sizes)
    else:
        door = _door(args, address, poller, model.decoupled)
    stack.callback(door.close)
    placed = None
    if args.shared_memory != "none" and address is not None:
        placed = stack.enter_context(Regions(transport, args.shared_memory))
        items = placed.inputs(items)
    requests = partial(_requests, args, door, items, sizes, placed)
    _try_one(args, poller, door, requests(1)(0)[0])
    models = (args.model, *model.steps)
    statistics = partial(measure.statistics_of, transport, models, args.model_version)
    where = address.where if address else str(run_dir)
    return LoadTarget(door, requests, statistics, door.streams, where)


def _teller(args: argparse.Namespace, address: Address | None) -> Any:
    """Return the transport for metadata and statistics.

    For a server on this host this is its listener; without one it is shared memory, which offers
    less information.
    """
    try:
        return servers.admin_transport(args)
    except Unavailable:
        if address is not None:
            raise
        return servers.transport(args)


def _native(
    args: argparse.Namespace,
    run_dir: Path | None,
    poller: Poller,
    model: data.ModelInterface,
    sizes: dict[str, int],
) -> Door:
    from shmserve.protocols.native import NativeDoor

    assert run_dir is not None
    device = {"none": "", "system": "cpu", "cuda": "cuda:0"}[args.shared_memory]
    rows = (args.batch,) if model.batches else ()
    specs = {
        name: (
            (args.output_byte_size // ITEM_SIZE[datatype],) if -1 in dims else (*rows, *dims),
            datatype,
        )
        for name, (datatype, dims) in model.outputs.items()
        if datatype != "BYTES"  # BYTES outputs are decoded and have no range
    }
    return NativeDoor(run_dir, poller, streams=model.decoupled, device=device, output_specs=specs)


def _door(args: argparse.Namespace, address: Address, poller: Poller, streams: bool) -> Door:
    given = servers.credentials(args)
    if address.protocol == "grpc":
        from shmserve.protocols.grpc import GrpcDoor

        return GrpcDoor(address, given, poller, streams=streams)
    if streams:
        from shmserve.protocols.http import GenerateDoor

        return GenerateDoor(address, given, poller)
    from shmserve.protocols.http import HttpDoor

    return HttpDoor(address, given, poller)


def _requests(
    args: argparse.Namespace,
    door: Door,
    items: Sequence[data.Item],
    sizes: dict[str, int],
    placed: Regions | None,
    slots: int,
) -> Requests:
    """Return the encoded requests of each slot, which slots share if they are identical."""
    output_parts = placed.outputs(sizes, slots) if placed is not None and sizes else None
    length = args.sequence_length
    first_sequence = random.getrandbits(62) + 1

    def made(slot: int) -> list[Any]:
        count = math.lcm(len(items), length) if length else len(items)
        parts = output_parts[slot] if output_parts else {}
        return [
            door.encode(
                OutgoingRequest(
                    *(args.model, args.model_version, "", 0, items[number % len(items)]),
                    list(parts),
                    first_sequence + slot if length else 0,
                    start=bool(length) and number % length == 0,
                    end=bool(length) and number % length == length - 1,
                    parts=parts,
                )
            )
            for number in range(count)
        ]

    if length or args.shared_memory != "none":
        return made
    return partial(_turned, made(0))


def _turned(requests: Sequence[Any], slot: int) -> Sequence[Any]:
    """Return the requests rotated for a slot, so that neighbouring slots start differently."""
    first = slot % len(requests)
    return [*requests[first:], *requests[:first]]


def _try_one(args: argparse.Namespace, poller: Poller, door: Door, request: Any) -> None:
    """Send one request, and raise its error before the load starts."""
    if args.sequence_length:
        return  # it would start a sequence
    error = probe(poller, door, request, args.patience)
    if error:
        if args.shared_memory != "none":
            error += f" (outputs of unknown size have {args.output_byte_size} bytes in shared "
            error += "memory: --output-byte-size)"
        raise Unavailable(f"the first request to '{args.model}' failed: {error}")


def _openai(args: argparse.Namespace, poller: Poller, stack: contextlib.ExitStack) -> LoadTarget:
    from shmserve.protocols.http import OPENAI, OpenAIDoor, OpenAIRequest

    if args.url is None:
        raise InvalidArgument("--openai takes --url http://HOST:PORT")
    address = servers.address(args.url)
    if address.protocol != "http":
        raise InvalidArgument(f"--openai takes --url http://HOST:PORT, not '{args.url}'")
    door = OpenAIDoor(address, servers.credentials(args), poller, OPENAI[args.openai])
    requests = [door.encode(OpenAIRequest(body)) for body in _bodies(args)]
    _try_one(args, poller, door, requests[0])
    where = address.where + door.route
    return LoadTarget(door, lambda slots: partial(_turned, requests), dict, True, where)


def _bodies(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the bodies of requests: from --data, completed with defaults, or generated prompts."""
    usual: dict[str, Any] = {"model": args.model, "max_tokens": args.max_tokens, "stream": True}
    usual["stream_options"] = {"include_usage": True}
    path = Path(args.data)
    if args.data not in ("random", "zero"):
        found = data.yielded(path, {}) if path.suffix == ".py" else iter(data.entries(path))
        for number, entry in enumerate(found):
            if not isinstance(entry, dict):
                raise InvalidArgument(f"--data: entry {number} of '{path}' is no object")
            yield {**usual, **entry}
        return
    draw = random.Random(args.seed)
    for _ in range(16):  # different prompts, so that prefix caches do not serve all
        prompt = " ".join(draw.choices(_WORDS, k=args.prompt_words))
        chat = {"messages": [{"role": "user", "content": prompt}]}
        yield {**usual, **(chat if args.openai == "chat" else {"prompt": prompt})}
