"""The target: a conversation, played to all; where they differ without a reason it fails."""

from collections import Counter

import ngh2
from h2.exceptions import H2Error

from tests.fuzz.http2.conversations import Conversation
from tests.fuzz.http2.differences import difference, explained, written
from tests.fuzz.http2.sides import H2, Ngh2, Ours, Side

# The number of times that each entry of the table occurred, for the analysis of a long run.
MET: Counter[str] = Counter()


def http2(data: bytes) -> None:
    """Play a conversation against one of the other engines.

    `ngh2` plays half of them and `h2`, which is slower, one of sixteen. The rest is played with the
    bytes split in another way.
    """
    kind, rest = data[:1], data[1:]
    other_sides: dict[str, Side] = {}
    number = kind[0] if kind else 0
    if number % 16 == 0:
        other_sides["h2"] = H2()
    if number % 2 == 0:
        other_sides["ngh2"] = Ngh2()
    else:
        other_sides["cut"] = Ours(1 + number // 16)
    ours = Ours()
    for step in Conversation(rest).steps():
        for side in (ours, *other_sides.values()):
            side.seen.fresh = None
        behind_reset, begun = step.of in ours.early, step.of in ours.seen.requests
        if step.what == "send":
            ours.take(step.sent)
        elif ours.is_open(step.stream):
            _do(ours, step.what, step.stream)
        else:
            continue
        for name, other in list(other_sides.items()):
            if step.what == "send":
                other.take(step.sent)
            else:
                try:
                    _do(other, step.what, step.stream)
                except (H2Error, ngh2.NGH2Error) as error:
                    other.seen.over = f"{type(error).__name__} {error}"
            found_difference = "" if ours.in_block else difference(ours.seen, other.seen)
            if found_difference:
                found_difference = f"{step.name} {found_difference}"
                if behind_reset and "STREAM_CLOSED" in found_difference:
                    found_difference += " behind a reset"
                if begun and "resets: -" in found_difference:
                    found_difference += f" with trailers {written(ours.decoded)}"
                known = explained(name, found_difference)
                assert known is not None, f"{name}: {found_difference}"
                MET[f"{name}: {known.why}"] += 1
                del other_sides[name]
        if ours.seen.over or not other_sides:
            return


def _do(side: Side, what: str, stream: int) -> None:
    if what == "answer":
        side.answer(stream)
    else:
        side.reset(stream)
