"""The target: a conversation, played to all; where they differ without a reason it fails."""

from collections import Counter

import ngh2
from h2.exceptions import H2Error

from tests.fuzz.http2.conversations import Conversation
from tests.fuzz.http2.differences import difference, find_known_difference, format_fields
from tests.fuzz.http2.sides import H2, Ngh2, OwnSide, Side

# The number of times that each entry of the table occurred, for the analysis of a long run.
DIFFERENCE_COUNTS: Counter[str] = Counter()


def http2(data: bytes) -> None:
    """Play a conversation against one of the other engines.

    `ngh2` plays half of them and `h2`, which is slower, one of sixteen. The rest is played with the
    bytes split in another way.
    """
    kind, conversation = data[:1], data[1:]
    other_sides: dict[str, Side] = {}
    number = kind[0] if kind else 0
    if number % 16 == 0:
        other_sides["h2"] = H2()
    if number % 2 == 0:
        other_sides["ngh2"] = Ngh2()
    else:
        other_sides["cut"] = OwnSide(1 + number // 16)
    own_side = OwnSide()
    for step in Conversation(conversation).steps():
        for side in (own_side, *other_sides.values()):
            side.view.last_reset = None
        behind_reset, has_begun = (
            step.of in own_side.early_resets,
            step.of in own_side.view.requests,
        )
        if step.action == "send":
            own_side.take(step.data)
        elif own_side.is_open(step.stream):
            _perform(own_side, step.action, step.stream)
        else:
            continue
        for name, peer in list(other_sides.items()):
            if step.action == "send":
                peer.take(step.data)
            else:
                try:
                    _perform(peer, step.action, step.stream)
                except (H2Error, ngh2.NGH2Error) as error:
                    peer.view.end_reason = f"{type(error).__name__} {error}"
            found_difference = "" if own_side.in_block else difference(own_side.view, peer.view)
            if found_difference:
                found_difference = f"{step.name} {found_difference}"
                if behind_reset and "STREAM_CLOSED" in found_difference:
                    found_difference += " behind a reset"
                if has_begun and "resets: -" in found_difference:
                    found_difference += f" with trailers {format_fields(own_side.decoded)}"
                known_difference = find_known_difference(name, found_difference)
                assert known_difference is not None, f"{name}: {found_difference}"
                DIFFERENCE_COUNTS[f"{name}: {known_difference.why}"] += 1
                del other_sides[name]
        if own_side.view.end_reason or not other_sides:
            return


def _perform(side: Side, action: str, stream: int) -> None:
    if action == "answer":
        side.answer(stream)
    else:
        side.reset(stream)
