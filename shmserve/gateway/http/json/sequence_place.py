"""Which sequence a request's header names, cut out of it as clients write it (pure).

What a request says besides is the same for all of a sequence, and for all sequences of a program:
so the header without its place is what the cache of prepared requests knows it by. In a JSON text
the pattern can stand in no string, where its quotes would be escaped. Where it stands is not looked
at: what was cut must be what the whole header was found to say, before anything is remembered.
"""

from __future__ import annotations

import copy
import re
from typing import NamedTuple

from shmserve.gateway.inference.prepared import BuiltRequest
from shmserve.gateway.inference.request import WireRequest
from shmserve.ipc.tensors.inference import LONGEST_CORRELATION_ID, SEQUENCE_END, SEQUENCE_START
from shmserve.ipc.tensors.ranges import LARGEST_UNSIGNED

_PLACE = re.compile(
    rb'"sequence_id": ?([1-9][0-9]{0,19}|"[ !#-\[\]-~]{1,%d}"), ?'
    rb'"sequence_start": ?(true|false), ?"sequence_end": ?(true|false)' % LONGEST_CORRELATION_ID
)
_NOWHERE = b'"sequence_id":0'


class SequencePlace(NamedTuple):
    """`header` without the place that it names."""

    header: bytes
    correlation_id: int | str
    flags: int

    def is_of(self, wire: WireRequest) -> bool:
        """Whether it is what a parsed request says."""
        return (wire.correlation_id, wire.flags) == (self.correlation_id, self.flags)

    def take(self, built: BuiltRequest) -> BuiltRequest:
        """Make a repeated request one of this place."""
        wire = built.wire = copy.copy(built.wire)
        wire.correlation_id, wire.flags = self.correlation_id, self.flags
        return built


def sequence_place(header: bytes) -> SequencePlace | None:
    """The one place that a header names; None where it does not, or does so in other words."""
    found = _PLACE.search(header)
    if found is None or header.count(b'"sequence_') != 3:
        return None
    given, start, end = found.groups()
    correlation_id: int | str = given[1:-1].decode() if given[:1] == b'"' else int(given)
    if isinstance(correlation_id, int) and correlation_id > LARGEST_UNSIGNED:
        return None
    flags = SEQUENCE_START * (start == b"true") | SEQUENCE_END * (end == b"true")
    cut = header[: found.start()] + _NOWHERE + header[found.end() :]
    return SequencePlace(cut, correlation_id, flags)
