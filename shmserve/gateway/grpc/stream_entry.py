"""The responses to one request of a decoupled model, encoded as messages of a stream."""

from __future__ import annotations

from shmserve.errors import ShmserveError
from shmserve.gateway.grpc.infer import Inferences
from shmserve.gateway.grpc.wire.response import (
    StreamedTemplate,
    streamed,
    streamed_end,
    streamed_error,
)
from shmserve.gateway.inference.streaming_request import Message, StreamingRequest, is_last
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.tensors.template_cache import TemplateCache

_MOST_TEMPLATES = 8


class StreamEntry:
    """A decoupled model's request in a stream, and the encoder of its responses, from templates
    where their form has come before; `size` is its part of the stream's window.

    Every one must be left when its last response is sent, or nobody waits for it."""

    __slots__ = ("_inferences", "_left", "_plain", "_templates", "request", "size")

    def __init__(self, inferences: Inferences, request: StreamingRequest, size: int) -> None:
        self._inferences = inferences
        self._left = not inferences.came()
        self.request = request
        self.size = size
        self._templates: TemplateCache[StreamedTemplate] = TemplateCache(_MOST_TEMPLATES)
        # Whether a response has all that a worker gave, as it gave it.
        outputs = request.infer_request.outputs
        self._plain = not any(output.place or output.classes for output in outputs)

    def encode(self, message: Message, *, strict: bool) -> tuple[bytes | None, Inferred | None]:
        """The message for a response, None where there is none for it; and the outputs that it was
        encoded from, whose memory is in use.

        Raises the error that the response is, if the stream is `strict`.
        """
        final = is_last(message)
        body = b"" if isinstance(message, m.Failed) or final else message.body
        if (found := self._templates.find(body)) is not None:
            template, contents = found
            return template.fill(contents), None
        request, asked = self.request, self.request.infer_request
        inferred: Inferred | None = None
        try:
            inferred = request.outputs(message)
            if inferred is None:
                end = streamed_end(request.model.name, asked.version, asked.id)
                return end if asked.empty_final else None, None
            response = self._inferences.encode(request.model, asked, inferred)
        except ShmserveError as error:
            if strict:
                raise
            name = request.model.name
            return streamed_error(error.message, asked.id, name, final=final), inferred
        if body and self._plain and all(type(t.data) is bytes for t in inferred.outputs):
            encoder = self._inferences.encoder
            template = encoder.streamed_template(request.model, asked.id, inferred)
            self._templates.learn(body, inferred, template)
        return streamed(response, final=final), inferred

    def leave(self) -> None:
        """Nothing is left to be done for it."""
        if not self._left:
            self._left = True
            self._inferences.left()
