"""Regions of a run: their registration, the ranges in them, and their removal."""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shmserve.perf import targets
from shmserve.perf.targets import Regions
from shmserve.protocols import InputTensor
from tests.rigs.fake_cuda import FakeCuda

ITEMS = [
    [InputTensor("A", "UINT8", [3], b"abc"), InputTensor("B", "UINT8", [2], b"de")],
    [InputTensor("A", "UINT8", [1], b"f"), InputTensor("B", "UINT8", [0], b"")],
]


class Transport:
    """A transport that stores the registrations."""

    def __init__(self) -> None:
        self.registered: dict[str, tuple[str, Mapping[str, Any]]] = {}

    def register(self, kind: str, name: str, fields: Mapping[str, Any]) -> None:
        self.registered[name] = (kind, dict(fields))

    def unregister(self, kind: str, name: str) -> None:
        assert self.registered.pop(name)[0] == kind


def test_inputs_are_written_to_the_ranges_of_the_requests() -> None:
    transport: Any = Transport()
    with Regions(transport, "system") as regions:
        placed_items = regions.inputs(ITEMS)
        ((kind, fields),) = transport.registered.values()
        content = Path("/dev/shm", fields["key"].lstrip("/")).read_bytes()
        assert (kind, fields["byte_size"]) == ("system", len(content))
        for item, sent_item in zip(placed_items, ITEMS, strict=True):
            for tensor, original in zip(item, sent_item, strict=True):
                assert tensor.region_part is not None and tensor.raw == b""
                assert tensor.region_part.region in transport.registered
                offset = tensor.region_part.offset
                assert content[offset : offset + tensor.region_part.byte_size] == original.raw
    assert not transport.registered
    assert not os.path.exists(f"/dev/shm{fields['key']}")


def test_slots_have_ranges_of_their_own() -> None:
    transport: Any = Transport()
    with Regions(transport, "system") as regions:
        slot_outputs = regions.outputs({"Y": 100, "Z": 4}, 3)
        ranges = sorted(
            (tensor_range.offset, tensor_range.offset + tensor_range.byte_size)
            for slot in slot_outputs
            for tensor_range in slot.values()
        )
        assert len(ranges) == 6
        assert all(end <= next_begin for (_, end), (next_begin, _) in itertools.pairwise(ranges))
        ((_, fields),) = transport.registered.values()
        assert ranges[-1][1] <= fields["byte_size"]


def test_memory_of_a_device_is_registered_by_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().exporting()
    monkeypatch.setattr(targets, "open_exporter", lambda: cuda)
    transport: Any = Transport()
    with Regions(transport, "cuda") as regions:
        placed_items = regions.inputs(ITEMS)
        ((kind, fields),) = transport.registered.values()
        assert (kind, fields["device_id"], len(fields["raw_handle"])) == ("cuda", 0, 64)
        assert placed_items[0][1].region_part is not None
    assert not transport.registered
