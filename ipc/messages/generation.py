"""Messages of text generation, between the scheduler of a generative model and its workers.

    Prepare ──> tokens of a prompt, made beside the engine ──> Prepared
    Step    ──> one pass over all rows, and a token each   ──> Stepped
    Told    <── a response has left                         Ended <── a stop string was found

The scheduler knows sequences by numbers of its own, and decides which tokens are computed when, and
in which blocks their keys and values are. The worker has their texts: it samples, says which have
ended and why, and responds to clients by `ExecutionResponded`.
"""

from __future__ import annotations

from dataclasses import field

from shmserve.ipc.messages.inference import Work
from shmserve.ipc.transport.frames import message
from shmserve.ipc.transport.records import record


@record
class Resumed:
    """A sample of a request as another instance has left it: the `tokens` that it had generated
    (int32, little endian), how many characters of their text were `told` to the client, and why it
    has ended, if it has; `closed`: that was told, too."""

    sample: int
    tokens: bytes
    told: int
    over: str = ""
    closed: bool = False


@message
class Prepare:
    """Read this request, the only one of `requests`, and make tokens of its prompt, beside the
    steps; the answer is `Prepared`, or its end by `ExecutionResponded`. Of one that an instance has
    lost, `resumed` is what each of its samples had."""

    requests: list[Work]
    resumed: list[Resumed] = field(default_factory=list)


@record
class BeamSearch:
    """A request's beam search: so many hypotheses at a time, their score is the sum of their
    logarithmic probabilities over length ** `length_penalty`. `early_stopping`: "true", "false" or
    "never", as transformers has it. A hypothesis ends with one of the tokens `ends`."""

    width: int
    length_penalty: float
    early_stopping: str
    ends: list[int]


@message
class Prepared:
    """A request is ready to run. `prompt`: its tokens (int32, little endian). Of each of its
    `samples` at most `max_tokens` are generated. `priority`: lower goes first. `whole`: all of the
    prompt is to be computed, whatever is cached. `drafts`: tokens may be proposed for it. `beams`:
    one entry where it is a beam search."""

    key: int
    prompt: bytes
    max_tokens: int
    samples: int = 1
    priority: int = 0
    whole: bool = False
    drafts: bool = True
    beams: list[BeamSearch] = field(default_factory=list)


@record
class Begin:
    """A new sequence: sample `sample` of request `key`. With a `parent` it has the tokens of that
    sequence as it is before this step, and then `token`, if that is not -1."""

    sequence: int
    key: int
    sample: int
    parent: int = 0
    token: int = -1


@record
class Row:
    """Compute the `count` tokens of a sequence that begin at its position `start`. Of its block
    table the first `keep` stay, and `blocks` follow. `draft`: so many more tokens are proposed
    behind them and checked. `samples`: the next token is sampled, since these are its last; else
    there are more to come."""

    sequence: int
    start: int
    count: int
    keep: int
    blocks: list[int]
    draft: int = 0
    samples: bool = True


@message
class Step:
    """One pass, in this order: sequences begin, blocks are copied, the rows are computed, sequences
    are `over` (their tokens are forgotten). Blocks are copied `out` to the host pool, `back` from
    it and `within` the pool (copy on write), as from, to, from, to, ...; all of `out` first.
    """

    step: int
    rows: list[Row]
    begin: list[Begin] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)
    within: list[int] = field(default_factory=list)


@record
class RowResult:
    """The result of a row that samples: its new `tokens`, all but the last of them drafts that were
    accepted, and why the sequence has ended ("stop", "length"), if it has. Of a beam there are no
    tokens but the best `candidates` with their `scores` (logarithms of probabilities), best first.
    `drafted`: tokens that were proposed."""

    sequence: int
    tokens: list[int]
    over: str = ""
    drafted: int = 0
    candidates: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


@message
class Stepped:
    """A step is done, with a result for each row that samples, but for the sequences that are
    `lost`: nothing was computed of these, since their requests have ended. Its time in ns by part:
    tables and copies (`gather`), `forward`, `sample`, and within these what the drafts took
    (`draft`); and what went on beside the steps since the last one (`text`)."""

    step: int
    results: list[RowResult]
    gather_ns: int
    forward_ns: int
    sample_ns: int
    draft_ns: int = 0
    text_ns: int = 0
    lost: list[int] = field(default_factory=list)


@message
class Told:
    """Another response has left: so many characters of this sample's text are told by now, and,
    where it is `closed`, its end."""

    key: int
    sample: int
    characters: int
    closed: bool = False


@message
class Ended:
    """A sequence has ended by what its text says (a stop string), and needs no more tokens."""

    sequence: int


@record
class Hypothesis:
    """A text that beam search has found: its tokens after the prompt (int32, little endian), and
    why it ended."""

    tokens: bytes
    over: str
    score: float


@message
class Choose:
    """The beam search of request `key` has ended with these hypotheses, best first: they are its
    response."""

    key: int
    hypotheses: list[Hypothesis]
