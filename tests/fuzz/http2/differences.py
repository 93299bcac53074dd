"""The explained differences between the engines; any other difference is a finding."""

import re
from typing import NamedTuple

from shmserve.gateway.http2.header_blocks import Fields
from tests.fuzz.http2.sides import EngineView


class Known(NamedTuple):
    """An explained difference: its engine as `difference` writes it, and the explanation."""

    whose: str
    pattern: str
    why: str


def difference(own_view: EngineView, peer_view: EngineView) -> str:
    """Return the difference of two engines after a step, as "field: ours | theirs"; "" if equal.

    `over` is the reason why a connection has ended, or else the resets of its engine. `resets` are
    the codes of streams that only one engine has reset, and the requests of the other.
    """
    if own_view.end_reason or peer_view.end_reason:
        if own_view.end_reason and peer_view.end_reason:
            return ""
        reasons = [view.end_reason or _describe_fresh_reset(view) for view in (own_view, peer_view)]
        return f"over: {' | '.join(reasons)}"
    if own_view.resets != peer_view.resets:
        return f"resets: {_resets(own_view, peer_view)} | {_resets(peer_view, own_view)}"
    if own_view.requests != peer_view.requests:
        return f"requests: {_requests(own_view, peer_view)} | {_requests(peer_view, own_view)}"
    if own_view.answers != peer_view.answers:
        return f"answers: {own_view.answers} | {peer_view.answers}"
    return ""


def _describe_fresh_reset(view: EngineView) -> str:
    return "-" if view.last_reset is None else f"resets {view.last_reset}"


def _resets(view: EngineView, other_view: EngineView) -> str:
    resets = []
    for number, code in view.resets.items():
        if other_view.resets.get(number) != code:
            r = other_view.requests.get(number)
            resets.append(f"{code} of {format_fields(r.fields if r is not None else ())}")
    return ", ".join(resets) or "-"


def format_fields(fields: Fields) -> str:
    return repr(b" ".join(b"=".join(pair) for pair in fields))


def _requests(view: EngineView, other: EngineView) -> str:
    return str({n: r for n, r in view.requests.items() if other.requests.get(n) != r})


KNOWN_DIFFERENCES = [
    # --- streams
    Known("", r"\w+ over: STREAM_CLOSED a frame on closed stream \d+ \| (-|resets 5)",
        "5.1: a frame of a closed stream may end the connection"),
    Known("h2", r"(DATA|HEADERS|CONTINUATION) resets: [0-9] of b'' \| 5 of b''",
        "5.1: it resets a stream again that is reset; a frame that crosses a reset is ignored"),
    Known("h2", r"(RST_STREAM|WINDOW_UPDATE) over: PROTOCOL_ERROR .* on idle stream \d+ \| -",
        "5.1.1: it does not look at frames of a server's streams"),
    Known("h2",
        r"(HEADERS|PUSH_PROMISE) over: PROTOCOL_ERROR (HEADERS on|PUSH_|padding longer).* \| -",
        "4.3: it waits for the whole block"),
    Known("h2", r"CONTINUATION over: PROTOCOL_ERROR CONTINUATION without .* \| resets 5",
        "6.10: to it the state of the stream comes first"),
    Known("h2", r"WINDOW_UPDATE over: - \| ProtocolError Received frame with non-compliant data",
        "6.9: it takes the reserved bit for a part of the number"),
    Known("ngh2", r"(PRIORITY|HEADERS) over: PROTOCOL_ERROR (PRIORITY on stream 0"
        r"|a malformed frame on idle stream \d+) \| (-|resets 1)",
        "5.3: it does not look at priorities, which are deprecated"),
    Known("", r"(PRIORITY|HEADERS) over: - \| (ProtocolError Stream \d+ may not"
        r"|PROTOCOL_ERROR request HEADERS:) depend on itself",
        "5.3: priorities are not looked at, as in gRPC's core"),
    Known("h2", r"\w+ over: resets [136] \| \w+Error .*",
        "5.4.1: it ends the connection where a stream is broken"),
    Known("ngh2",
        r"\w+ over: resets [136] \| (PROTOCOL_ERROR|FRAME_SIZE_ERROR|FLOW_CONTROL_ERROR)\b.*",
        "5.4.1: it ends the connection where a stream is broken"),
    # --- frames
    Known("h2", r"(ALTSVC|ORIGIN) over: - \| \w+Error .*",
        "5.5: it knows the extension, and that a client does not send it"),
    Known("h2", r"HEADERS over: - \| ProtocolError Received frame with invalid padding\.",
        "6.2: it takes no empty block in front of padding, as empty trailers are"),
    Known("ngh2",
        r"DATA over: (PROTOCOL_ERROR padding longer than the frame|FRAME_SIZE_ERROR .*) \| -",
        "6.1: it does not look at DATA of a stream that it has reset"),
    Known("", r"SETTINGS over: \w+_ERROR SETTINGS_\w+ out of range: \d+ \(allowed: .*\) \| -",
        "6.5.3: of a value that is given twice it looks at the last only"),
    Known("ngh2", r"SETTINGS over: - \| PROTOCOL_ERROR SETTINGS: unexpected ACK",
        "6.5.3: we count an acknowledgement of nothing with all that is of no use"),
    Known("ngh2",
        r"SETTINGS over: - \| PROTOCOL_ERROR SETTINGS: .*SETTINGS_NO_RFC7540_PRIORITIES.*",
        "RFC 9218, 2.1: a setting that we do not know"),
    Known("ngh2", r"GOAWAY over: - \| PROTOCOL_ERROR GOAWAY: invalid last_stream_id",
        "6.8: we begin no streams, of which a GOAWAY could speak"),
    Known("ngh2", r"\w+ over: (-|resets \d+) \| ConnectionStateError Connection is terminating",
        "6.8: it ends when a client that has said GOAWAY has no streams"),
    Known("h2",
        r"\w+ over: (-|resets \d+) \| ProtocolError Invalid input .* ConnectionState.CLOSED",
        "6.8: to it a connection is over once its client has said GOAWAY"),
    # --- requests
    Known("", r"\w+ over: COMPRESSION_ERROR (a malformed|.* updates in a) header block \| .*",
        "RFC 7541, 4.2: it takes more than two updates of the table's size"),
    Known("ngh2", r"\w+ resets: - \| 1 of b.(?!.*(:authority|host)=).*",
        "8.3.1: gRPC lets its clients leave out the authority"),
    Known("h2",
        r"\w+ over: - \| ProtocolError Request header block (does not have an :auth|has mismatched"
        r" :auth|has multiple Host).*",
        "8.3.1: the authority is not looked at, nor need there be one"),
    Known("ngh2",
        r"\w+ resets: - \| 1 of .*(:authority|host)=([^ ']*[^\w.: '-].*|[ '].*|.* host=.*)",
        "8.3.1: the authority is not looked at"),
    Known("ngh2", r"\w+ resets: - \| 1 of .*:path=[^/].*",
        "8.3.1: a path that is none is one that there is not"),
    Known("ngh2", r"\w+ resets: - \| 1 of .* with trailers .*(content-length=|\\x([01].|7f)).*",
        "8.1: what trailers say does not matter, nor control characters in them"),
    Known("", r"\w+ resets: 1 of .*:method=CONNECT.* \| -", "8.5: there is no CONNECT"),
    Known("ngh2", r"\w+ resets: - \| 1 of .*(content-length=\d) .*\1.*",
        "RFC 9110, 8.6: the same length may be said again"),
    Known("h2", r"\w+ resets: 1 of .*content-length=[^0]* \| -",
        "8.1.1: it does not miss the data of a request that ends in its head"),
    Known("h2", r"\w+ resets: 1 of .* [^ =]*([^-\w!#$%&'*+.^`|~=: ][^ =]*=|=[^ =]+=).* \| -",
        "8.2.1: it takes names that are none by RFC 9110, 5.1"),
    Known("", r"\w+ (resets: - \| 1 of .*(connection|keep-alive|transfer-encoding|upgrade)=.*"
        r"|over: - \| ProtocolError Connection-specific.*)",
        "8.2.2: fields of a connection are dropped, as in gRPC's core"),
    Known("",
        r"\w+ (over: - \| ProtocolError Received header (name|value) surrounded by whitespace.*"
        r"|resets: - \| 1 of .*(= |=\\t|  | '|\\t[ ']).*)",
        "8.2.1: white space around a value is removed, as in gRPC's core"),
    Known("ngh2", r"\w+ resets: - \| 1 of .*\\x([01].|7f).*",
        "8.2.1: it takes no control characters"),
]  # fmt: skip


def find_known_difference(peer: str, text: str) -> Known | None:
    """Return the entry of the table for a difference; None if it is a finding."""
    for known in KNOWN_DIFFERENCES:
        if known.whose in (peer, "") and re.fullmatch(known.pattern, text, re.DOTALL):
            return known
    return None
