"""Requests that are ready to be submitted, and templates of them for requests with the same header,
as prepared statements are for a database.

Programs send the same header again and again with other numbers behind it. A header that came
before needs no parsing, checking and placing: only the tensors' bytes are new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shmserve.gateway.inference.request import InferRequest, RequestIdentity
from shmserve.gateway.region_table import GatewayRegion, Uses
from shmserve.gateway.tracing.request_trace import RequestTrace
from shmserve.ipc.tensors.inference import Inference, PackedTemplate
from shmserve.ipc.tensors.signature import BatchFit
from shmserve.ipc.tensors.template_cache import BoundedCache, TemplateCache

_MOST_TEMPLATES = 8  # of responses to requests with one header


def nothing() -> None:
    """The release of a request without resources."""


class ResponseTemplates(TemplateCache[Any]):
    """The templates of responses to requests with one header; in `placed` those of responses whose
    tensors have places, by all else that these say."""

    __slots__ = ("placed",)

    def __init__(self) -> None:
        super().__init__(_MOST_TEMPLATES)
        self.placed: BoundedCache[Any, Any] = BoundedCache(_MOST_TEMPLATES)


@dataclass(slots=True, eq=False)
class BuiltRequest:
    """A request with its tensors in place, admitted to its model.

    `work` is its packed `Inference`; `release` frees its resources, which may be
    references to `regions`. `templates` are of responses, shared by all requests with its header.
    It has a `trace` once it is submitted, if its times are wanted.
    """

    infer_request: InferRequest
    fit: BatchFit
    work: bytes
    release: Callable[[], None]
    regions: Sequence[GatewayRegion] = ()
    templates: ResponseTemplates | None = None
    trace: RequestTrace | None = None

    def identify(self, identity: RequestIdentity) -> None:
        """Give it its own id and place in a sequence. What else it says it has from an earlier
        request, whose header was the same but for these."""
        if not identity.is_of(self.infer_request):
            self.infer_request = self.infer_request.identified(identity)


class PreparedRequest:
    """The template of the requests with one header, of small tensors and of places in regions."""

    __slots__ = ("_fit", "_request", "_template", "_templates", "_uses")

    def __init__(self, built: BuiltRequest, inference: Inference, uses: Uses | None) -> None:
        self._request = built.infer_request
        self._fit = built.fit
        self._template = PackedTemplate(inference)
        self._uses = uses.pattern() if uses is not None else None
        self._templates = ResponseTemplates()

    def fill(self, body: bytes, at: int) -> BuiltRequest | None:
        """The request whose inline tensors are in `body` from `at`, one behind the other; as
        `of`."""
        return self.of(self._template.cut(body, at))

    def of(self, datas: Iterable[bytes]) -> BuiltRequest | None:
        """The request with these bytes of its inline tensors; None: its regions have changed.

        Raises AlreadyExists when an output overlaps another one in flight and may not.
        """
        work = self._template.fill(datas)
        if self._uses is None:
            return BuiltRequest(self._request, self._fit, work, nothing, (), self._templates)
        uses = self._uses.again()
        if uses is None:
            return None
        return BuiltRequest(
            self._request, self._fit, work, uses.release, uses.regions, self._templates
        )
