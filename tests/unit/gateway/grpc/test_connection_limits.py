"""R15: which of gRPC's connections make room."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shmserve.common.fd_limits import share_of
from shmserve.gateway.grpc.core.connection_limits import Seen, leaving
from shmserve.gateway.grpc.core.sockets import GrpcConnection


def seen(peer: str | None, silent_ms: int, busy: bool) -> Seen:
    address = (peer or "127.0.0.1", 1)
    return Seen(GrpcConnection(0, 0, address, address), peer, silent_ms, busy)


SEEN = st.builds(seen, st.sampled_from([None, "a", "b"]), st.integers(0, 9), st.booleans())


@given(st.lists(SEEN, max_size=40), st.integers(1, 40))
def test_who_makes_room(crowd: list[Seen], most: int) -> None:
    ended = leaving(crowd, most)
    left = Counter(map(id, crowd)) - Counter(map(id, ended))
    assert len(left) == len(crowd) - len(ended)  # each of them once, and none that is not here
    stay = [one for one in crowd if id(one) in left]
    of = Counter(one.peer for one in stay if one.peer is not None)
    assert all(count <= share_of(most) for count in of.values())
    crowded = {p for p, n in Counter(one.peer for one in crowd).items() if p and n > share_of(most)}
    for one in ended:
        like = [other for other in stay if other.peer == one.peer or not crowded]
        if one.busy:  # only of a peer that has too many, and nothing idle
            assert one.peer in crowded and all(other.busy for other in like)
        else:
            assert all(other.busy or other.silent_ms <= one.silent_ms for other in like)
    if len(crowd) < most and not crowded:
        assert not ended
    if len(crowd) >= most and not all(one.busy for one in crowd):
        assert ended
