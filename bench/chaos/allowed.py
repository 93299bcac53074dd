"""The errors that a client may receive under each fault.

Any other error is a failure. For example, no request of a batched model may fail because a worker
dies.

An error is a text: "CODE: message" is an error of the server, "lost: ..." a connection that ended
before the response, and "wrong: ..." is a wrong response. A wrong response is allowed only if the
client has changed its own memory.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Rule(NamedTuple):
    """An allowed error, and the reason.

    The regular expressions match the beginning of a fault's name, the beginning of a load's name,
    and a part of the error.
    """

    fault: str
    load: str
    error: str
    why: str


_KILL = r"(kill|stop|crash)\S* "
_LOST = r"^lost: "

ALLOWED = (
    Rule(_KILL + "gateway http", "http", _LOST, "its own connections end with a gateway"),
    Rule(_KILL + "gateway grpc", "grpc", _LOST, "its own connections end with a gateway"),
    Rule(
        _KILL + "worker sums",
        ".*sequence",
        r"(the state of sequence .* is lost with it|was lost when the model's worker died)",
        "the state of a sequence is its worker's",
    ),
    Rule(
        _KILL + "scheduler sums",
        ".*sequence",
        "must specify the START flag on the first request",
        "the sequences that a scheduler knew are gone with it",
    ),
    Rule(
        _KILL + "(scheduler|worker) repeat",
        ".*stream",
        r"(worker died before this request's last response|scheduler was lost after the request's"
        " first response)",
        "a stream of which responses have left cannot begin again",
    ),
    Rule(
        _KILL + "scheduler tiny",
        "http-text-stream",
        "scheduler was lost after the request's first response",
        "a stream of which responses have left cannot begin again",
    ),
    Rule("region", "http-cut-region", r"^(INVALID|wrong|[45]0)", "it has cut its region"),
    Rule("unload", ".*swap", r"^(404|400|503|NOT_FOUND|UNAVAILABLE|INVALID)", "it is unloaded"),
    Rule("descriptors", "(http|grpc)", _LOST, "who idles makes room, who comes is not let in"),
)


def is_allowed(fault: str, load: str, error: str) -> str:
    """Why an error may come under a fault; empty where it may not."""
    for rule in ALLOWED:
        concerned = re.match(rule.fault, fault) and re.match(rule.load, load)
        if concerned and re.search(rule.error, error):
            return rule.why
    return ""
