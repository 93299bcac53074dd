"""Messages of text generation between the scheduler of a generative model and its workers.

    scheduler                                        worker
    Prepare ───────────────> tokenizes a prompt, in parallel to the steps
            <── Prepared
    Step ──────────────────> computes all rows in one pass, and samples a token of each
            <── Stepped
            <── ResponseSent, StopStringFound

The scheduler identifies sequences by numbers, and decides when tokens are computed and which blocks
contain their keys and values. The worker stores the texts: it samples, detects the end of
sequences, and responds to clients by `ExecutionResponded`.
"""

from __future__ import annotations

from dataclasses import field

from shmserve.ipc.messages.inference import Work
from shmserve.ipc.transport.frames import Message, Record


class Resumed(Record):
    """The state of a sample that another instance had generated in part.

    Attributes:
        sample: The number of the sample.
        tokens: The generated tokens (int32, little endian).
        sent_characters: The number of characters of text already sent to the client.
        finish_reason: The reason why the sample has ended, or "".
        is_end_sent: Whether the end was already sent to the client.
        sent_tokens: The number of tokens already sent to the client.
    """

    sample: int  # number of the sample
    tokens: bytes  # int32, little endian
    sent_characters: int  # number of characters sent to the client
    finish_reason: str = ""
    is_end_sent: bool = False  # whether the client has received the end
    sent_tokens: int = 0  # number of tokens sent to the client


class Prepare(Message):
    """Sent by the scheduler to a worker to tokenize the prompt of the only request in `requests`.

    The worker tokenizes in parallel to its steps. The reply is `Prepared`, or `ExecutionResponded`
    if the request has ended. If the request's earlier instance was lost, `resumed` has the state of
    each sample.
    """

    requests: list[Work]
    resumed: list[Resumed] = field(default_factory=list)  # samples that another instance has begun


class BeamSearch(Record):
    """The parameters of a request's beam search.

    Attributes:
        width: The number of hypotheses.
        length_penalty: A score is the sum of log probabilities over length ** `length_penalty`.
        early_stopping: "true", "false" or "never", as in transformers.
        end_tokens: The tokens that end a hypothesis.
    """

    width: int  # number of hypotheses
    length_penalty: float
    early_stopping: str
    end_tokens: list[int]  # tokens that end a hypothesis


class Prepared(Message):
    """Sent by a worker to the scheduler when a request is ready to run.

    Attributes:
        key: The key of the request.
        prompt: The tokens of the prompt (int32, little endian).
        max_tokens: The maximum number of tokens of each sample.
        samples: The number of samples.
        priority: The priority; lower values run first.
        needs_whole_prompt: Whether the whole prompt is computed even if a prefix is cached.
        allows_drafts: Whether draft tokens may be proposed.
        beams: The beam search, if any.
        replays_tokens: Whether a resumed request computes its earlier tokens again, because their
            log probabilities are requested.
    """

    key: int  # of the request
    prompt: bytes  # tokens, int32
    max_tokens: int  # of each sample
    samples: int = 1  # number of samples
    priority: int = 0  # lower values run first
    needs_whole_prompt: bool = False  # even if a prefix is cached
    allows_drafts: bool = True
    beams: list[BeamSearch] = field(default_factory=list)
    replays_tokens: bool = False  # whether earlier tokens are computed again


class NewSequence(Record):
    """A sequence to start in a step: sample `sample` of request `key`.

    With a `parent`, the sequence is a copy of that sequence before this step, followed by `token`
    unless that is -1.
    """

    sequence: int  # number of the new sequence
    key: int  # of the request
    sample: int  # number of the sample
    parent: int = 0  # sequence to copy; 0: none
    token: int = -1  # follows the parent's tokens; -1: none


class Row(Record):
    """The tokens of a sequence to compute in a step.

    Attributes:
        sequence: The number of the sequence.
        start: The position of the first token.
        count: The number of tokens.
        kept_blocks: The number of leading entries of the block table that remain.
        blocks: The new entries of the block table, which follow the kept ones.
        draft_count: The number of draft tokens to propose and verify after the computed tokens.
        samples_next: Whether the next token is sampled. This is the case if no token of the
            sequence follows the tokens of the row.
    """

    sequence: int  # number of the sequence
    start: int  # position of the first token
    count: int  # number of tokens
    kept_blocks: int  # number of leading blocks of the table that remain
    blocks: list[int]  # new blocks, which follow the kept ones
    draft_count: int = 0  # number of draft tokens to propose
    samples_next: bool = True  # whether the next token is sampled


class Step(Message):
    """Sent by the scheduler to a worker to execute one forward pass of the model.

    The worker copies blocks, begins sequences, computes the rows, and releases the sequences
    `ended`, in this order. Blocks are first copied to the host pool (`swap_out`), then from it
    (`swap_in`), then inside the pool (`copies`, copy-on-write). The three lists alternate between
    source and destination.
    """

    step: int  # number of the step
    rows: list[Row]
    new_sequences: list[NewSequence] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # sequences to release
    swap_out: list[int] = field(default_factory=list)  # block pairs: device, host
    swap_in: list[int] = field(default_factory=list)  # block pairs: host, device
    copies: list[int] = field(default_factory=list)  # block pairs: source, target


class RowResult(Record):
    """The result of a row whose `Row.samples_next` is set.

    Attributes:
        sequence: The number of the sequence.
        tokens: The new tokens; all but the last are accepted drafts. Empty for beams.
        finish_reason: The reason why the sequence has ended ("stop", "length"), or "".
        draft_count: The number of proposed tokens.
        candidates: For a beam, the best tokens, best first.
        scores: The log probabilities of the candidates.
    """

    sequence: int  # number of the sequence
    tokens: list[int]  # the new tokens
    finish_reason: str = ""
    draft_count: int = 0
    candidates: list[int] = field(default_factory=list)  # the best tokens of a beam
    scores: list[float] = field(default_factory=list)  # log probabilities of the candidates


class Stepped(Message):
    """Sent by a worker to the scheduler when a step is complete.

    Attributes:
        step: The number of the step.
        results: The result of each row whose `samples_next` is set; not of `skipped` sequences.
        gather_ns: The time for block tables and copies.
        forward_ns: The time of the forward pass.
        sample_ns: The time of sampling.
        draft_ns: The part of these times spent on drafts.
        text_ns: The time of text processing in parallel since the last step.
        skipped: Sequences that were not computed, because their requests have ended.
    """

    step: int  # number of the step
    results: list[RowResult]
    gather_ns: int
    forward_ns: int
    sample_ns: int
    draft_ns: int = 0
    text_ns: int = 0
    skipped: list[int] = field(default_factory=list)  # sequences whose requests have ended


class ResponseSent(Message):
    """Sent by a worker to the scheduler when a response was sent to the client.

    Attributes:
        key: The key of the request.
        sample: The number of the sample.
        sent_characters: The number of characters of its text sent so far.
        is_end_sent: Whether its end was sent.
        sent_tokens: The number of its tokens sent so far.
    """

    key: int  # of the request
    sample: int  # number of the sample
    sent_characters: int  # number of characters sent to the client
    is_end_sent: bool = False
    sent_tokens: int = 0  # number of tokens sent to the client


class StopStringFound(Message):
    """Sent by a worker to the scheduler when a stop string has ended a sequence.

    The scheduler plans no more tokens for the sequence.
    """

    sequence: int  # number of the sequence


class Hypothesis(Record):
    """A finished hypothesis of a beam search.

    Attributes:
        tokens: Its tokens after the prompt (int32, little endian).
        finish_reason: The reason why it ended.
        score: Its score.
    """

    tokens: bytes
    finish_reason: str
    score: float  # of the tokens


class Choose(Message):
    """Sent by the scheduler to a worker when the beam search of request `key` is complete.

    The worker responds to the client with these hypotheses, best first.
    """

    key: int  # of the request
    hypotheses: list[Hypothesis]
