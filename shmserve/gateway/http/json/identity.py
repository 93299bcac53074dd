"""Which request a header is of, cut out of it as clients write it: its id, and its place in a
sequence (pure).

What a request says besides is the same for all that a program sends: so the header without these is
what the cache of prepared requests knows it by. The id is cut out where it comes first. In a JSON
text the pattern of a place can stand in no string, where its quotes would be escaped. Where it
stands is not looked at: what was cut must be what the whole header was found to say, before
anything is remembered.
"""

from __future__ import annotations

import re

from shmserve.gateway.http.json.fingerprint import LONGEST_TEXT
from shmserve.gateway.inference.request import RequestIdentity
from shmserve.ipc.tensors.inference import LONGEST_CORRELATION_ID, SEQUENCE_END, SEQUENCE_START
from shmserve.ipc.tensors.ranges import LARGEST_UNSIGNED

_ID = re.compile(rb'\{"id": ?"([ !#-\[\]-~]*)"')
_PLACE = re.compile(
    rb'"sequence_id": ?([1-9][0-9]{0,19}|"[ !#-\[\]-~]{1,%d}"), ?'
    rb'"sequence_start": ?(true|false), ?"sequence_end": ?(true|false)' % LONGEST_CORRELATION_ID
)
_NO_ID = b'{"id":0'
_NOWHERE = b'"sequence_id":0'


def identity(header: bytes) -> tuple[bytes, RequestIdentity | None]:
    """A header without what it alone says, and that; as it is, and None, where it says nothing, or
    in other words."""
    if len(header) > LONGEST_TEXT:
        return header, None
    request_id = ""
    correlation_id: int | str = 0
    flags = at = 0
    kept: list[bytes] = []
    if (named := _ID.match(header)) is not None:
        request_id = named[1].decode()
        kept.append(_NO_ID)
        at = named.end()
    if b'"sequence_id"' in header:
        placed = _PLACE.search(header, at)
        if placed is None or header.count(b'"sequence_') != 3:
            return header, None
        given, start, end = placed.groups()
        correlation_id = given[1:-1].decode() if given[:1] == b'"' else int(given)
        if isinstance(correlation_id, int) and correlation_id > LARGEST_UNSIGNED:
            return header, None
        flags = SEQUENCE_START * (start == b"true") | SEQUENCE_END * (end == b"true")
        kept += (header[at : placed.start()], _NOWHERE)
        at = placed.end()
    if not kept:
        return header, None
    kept.append(header[at:])
    return b"".join(kept), RequestIdentity(request_id, correlation_id, flags)
