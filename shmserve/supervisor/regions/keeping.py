"""Registrations that outlive the server: each is kept by somebody else as two descriptors, of the
object and of a sealed memfd that says what it is registered as.

The service manager keeps them (FDSTORE, sd_pid_notify_with_fds(3)), and gives them to the next
server, also after a kill. Of two servers, one of which takes over from the other, each tells the
other of them while both run. Memory on a device cannot be kept: its handles are of processes. Nor
need be what ends with its client: that shares it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from shmserve.common.peers import Ownership
from shmserve.errors import ShmserveError
from shmserve.supervisor.regions.opener import RegionOpener
from shmserve.supervisor.regions.region import OpenRegion

logger = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_LONGEST = 1 << 20  # bytes of a description


KEEP, DROP = "keep", "drop"


class Keeper(Protocol):
    """Who has copies of descriptors by a name, also when this process has ended."""

    def keep(self, name: str, fds: list[int]) -> None:
        """Have some."""

    def drop(self, name: str) -> None:
        """Forget them."""

    async def heard(self) -> None:
        """Return once it has all that it was told."""


class OtherServer(Protocol):
    """One that has the same regions, as the handover link reaches it."""

    def ask(self, verb: str, name: str, fds: Sequence[int] = ()) -> object:
        """Have it keep, or drop, a region."""

    async def settled(self) -> None:
        """Return once it has done all that it was asked."""


class KeptRegions:
    """What is registered, as its `keeper` has it, and another server, the `other`, while there is
    one."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.other: OtherServer | None = None

    def add(self, region: OpenRegion) -> None:
        """Have a region kept that was registered."""
        if region.shared is None or region.lessor:
            return
        region.kept_as = secrets.token_hex(8)
        with described(region) as description:
            self._keeper.keep(region.kept_as, [region.shared.fd, description])
        self.tell(region)

    def tell(self, region: OpenRegion) -> None:
        """Tell the other server of a region."""
        if self.other is not None and region.shared is not None and region.kept_as:
            with described(region) as description:
                self.other.ask(KEEP, region.kept_as, [region.shared.fd, description])

    def remove(self, region: OpenRegion) -> None:
        """Forget a region that is not registered any more."""
        if region.kept_as:
            self._keeper.drop(region.kept_as)
            if self.other is not None:
                self.other.ask(DROP, region.kept_as)
            region.kept_as = ""

    async def told(self) -> None:
        """Return once the keeper, and the other server, if there is one, know as much as we."""
        await self._keeper.heard()
        if self.other is not None:
            await self.other.settled()

    def restore(self, given: dict[str, list[int]], opener: RegionOpener) -> Iterator[OpenRegion]:
        """The regions that were kept, open; what cannot be one any more is dropped."""
        for name, fds in given.items():
            try:
                region = _opened(fds, opener)
            except (ShmserveError, OSError, ValueError, TypeError, KeyError) as error:
                logger.warning("a registration of the server before is lost: %s", error)
                for fd in fds:
                    os.close(fd)
                self._keeper.drop(name)
            else:
                region.kept_as = name
                yield region


@contextlib.contextmanager
def described(region: OpenRegion) -> Iterator[int]:
    """The description of a region, as a descriptor."""
    fd = os.memfd_create("region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        said: dict[str, Any] = {name: getattr(region, name) for name in _SAID}
        os.write(fd, json.dumps({**said, "owner": asdict(region.owner)}).encode())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        yield fd
    finally:
        os.close(fd)


_SAID = ("name", "key", "offset", "byte_size", "pinned")


def _opened(fds: list[int], opener: RegionOpener) -> OpenRegion:
    sealed = [fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _SEALS for fd in fds]
    if sorted(sealed) != [False, True]:
        raise ValueError("not an object and its description")
    description, shared = fds[sealed.index(True)], fds[sealed.index(False)]
    said = json.loads(os.pread(description, _LONGEST, 0))
    region = opener.reopen(shared, Ownership(**said.pop("owner")), **said)
    os.close(description)
    return region
