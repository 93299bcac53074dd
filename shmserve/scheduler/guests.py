"""Requests of guests: checked here, because no gateway has.

A gateway is part of the server, and says truly what a request is: a guest's word is not taken.
Its identity must carry its token, the memory it names must be its own, and what the request counts
as in a batch is worked out from the request itself.
"""

from __future__ import annotations

from typing import Any

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.ipc.channels import Router
from shmserve.ipc.guests import Seals
from shmserve.ipc.messages import Failed, Submit
from shmserve.ipc.signature import Signature
from shmserve.ipc.tensors import MalformedMessage, Place, unpack_inference

_MOST_MEMORIES = 4096


class GuestDoor:
    """One scheduler's guests; `link` is the socket they are connected to."""

    def __init__(self, link: Router, seals: Seals, signature: Signature) -> None:
        self.link = link
        self._seals = seals
        self._signature = signature
        self._numbers: dict[bytes, int] = {}
        self._memories: set[tuple[int, Any]] = set()

    def check(self, peer: bytes, message: Any) -> Any:
        """The message as it may be believed, or None: then it is dealt with."""
        number = self._numbers.get(peer) or self._admit(peer)
        if not number:
            return None
        if type(message) is not Submit:
            return message
        try:
            return self._checked(number, message)
        except ShmserveError as error:
            self.link.post(peer, Failed(message.id, error.code, error.message, 0, False))
        except MalformedMessage:
            text = "the request cannot be read: see the protocol's description"
            self.link.post(peer, Failed(message.id, InvalidArgument.code, text, 0, False))
        return None

    def _admit(self, peer: bytes) -> int:
        number = self._seals.guest(peer)
        if number:
            self._numbers[peer] = number
        return number

    def forget(self, number: int) -> None:
        """A guest is gone."""
        for peer in [peer for peer, of in self._numbers.items() if of == number]:
            del self._numbers[peer]
        self._memories = {item for item in self._memories if item[0] != number}

    def knows(self, peer: bytes) -> bool:
        """Whether this address is a guest's."""
        return peer in self._numbers

    def _checked(self, number: int, submit: Submit) -> Submit:
        inference = unpack_inference(submit.work)
        for tensor in inference.inputs:
            if type(tensor.data) is not bytes:
                self._check_owner(number, tensor.data)
        for output in inference.outputs:
            if output.place is not None:
                self._check_owner(number, output.place)
        admission = self._signature.admit(submit.request_id, inference.inputs, inference.outputs)
        return Submit(
            submit.id,
            admission.batch_size,
            admission.shape_key,
            submit.arrived_ns,
            submit.deadline_ns,
            submit.timeout_us,
            submit.priority,
            submit.work,
            submit.request_id,
        )

    def _check_owner(self, number: int, place: Any) -> None:
        assert isinstance(place, Place)
        key = (number, place.memory)
        if key in self._memories:
            return
        if not self._seals.owns(number, place.memory):
            raise InvalidArgument("a tensor lies in memory that this client has not shared")
        if len(self._memories) >= _MOST_MEMORIES:
            self._memories.clear()
        self._memories.add(key)


class Fronts:
    """The scheduler's answers: to gateways and models on one socket, to guests on the other."""

    def __init__(self, clients: Router, door: GuestDoor) -> None:
        self._clients = clients
        self._door = door

    @property
    def malformed(self) -> int:
        """Frames that could not be read."""
        return self._clients.malformed + self._door.link.malformed

    def post(self, peer: bytes, message: Any) -> None:
        """Queue a message for whoever has this address."""
        link = self._door.link if self._door.knows(peer) else self._clients
        link.post(peer, message)
