"""The gateways: started on the supervisor's listening sockets, told everything, started again when
they die."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shmserve.children import Child
from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.gateway.peers import is_loopback
from shmserve.host import Host
from shmserve.ipc import messages as m
from shmserve.trust import NO_GROUP

logger = logging.getLogger(__name__)

_GRPC = "grpc"
# Of the addresses that a name has, those of a family that this host does without.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_PAUSES_S = (0.0, 0.0, 0.1, 0.3, 0.6, 1.0)


def resolve(address: str, port: int, flag: str, guarded: bool) -> list[Any]:
    """Where `address` means, as getaddrinfo says it.

    Raises InvalidArgument naming `flag` when nobody knows it, or when other hosts reach it and it
    is not `guarded`.
    """
    try:
        found = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:  # a name that no host can have is no OSError
        reason = getattr(error, "strerror", None) or "not a host's name"
        raise InvalidArgument(f"{flag}: cannot resolve '{address}': {reason}") from None
    if not guarded and not all(is_loopback(str(where[0])) for *_, where in found):
        raise InvalidArgument(
            f"{flag}: other hosts reach '{address}', so clients must show a token "
            "(--auth-token-file FILE), or everybody may do everything (--insecure)"
        )
    return found


def listen(address: str, port: int, flag: str, guarded: bool) -> list[socket.socket]:
    """Listening TCP sockets on every address that `address` names; port 0 picks one.

    Raises InvalidArgument naming `flag` when the address cannot be had, or other hosts reach it and
    it is not `guarded`.
    """
    return _bound(address, port, flag, guarded, backlog=1024)


def hold(address: str, port: int, flag: str, guarded: bool) -> list[socket.socket]:
    """Like `listen`, but the sockets are only bound: they keep the port for one that listens.

    gRPC takes no listening socket, it makes its own. Linux lets it bind to the same address as long
    as the holder does not listen (both with SO_REUSEADDR), and when it dies with its gateway the
    port is still held for the next one. A port where somebody listens cannot be held.
    """
    return _bound(address, port, flag, guarded, backlog=None)


def _bound(
    address: str, port: int, flag: str, guarded: bool, backlog: int | None
) -> list[socket.socket]:
    made: list[socket.socket] = []
    missing: OSError | None = None
    for family, _, _, _, where in resolve(address, port, flag, guarded):
        try:
            made.append(_bound_to(family, where, backlog))
        except OSError as error:
            missing = error
            if error.errno not in _NOT_HERE:
                break
    if missing is not None and (not made or missing.errno not in _NOT_HERE):
        for opened in made:
            opened.close()
        named = flag if missing.errno in _NOT_HERE else flag.replace("-address", "-port")
        raise InvalidArgument(
            f"{named}: cannot listen on {address}:{port}: {missing.strerror}"
        ) from None
    return made


def _bound_to(family: int, where: Any, backlog: int | None) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(where)
        if backlog is not None:
            sock.listen(backlog)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def listen_unix(path: Path, group: int, flag: str) -> socket.socket:
    """A listening unix socket at `path` for this process's user, and for `group` if there is one.

    What a server that was killed left at `path` is removed. Raises InvalidArgument naming `flag`
    when the path cannot be had.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            path.unlink()
        mask = os.umask(0o177)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(mask)
        if group != NO_GROUP:
            os.chown(path, -1, group)
            path.chmod(0o660)
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise InvalidArgument(f"{flag}: cannot listen on '{path}': {reason}") from None
    return sock


def _is_left_behind(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                return probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED
    return False


def remove_unix(path: Path | None) -> None:
    """Remove the socket that `listen_unix` made."""
    if path is not None:
        path.unlink(missing_ok=True)


class Doors:
    """The set of gateways. `snapshot()` gives what a new one must know; `on_message(pid, message)`
    takes requests from them."""

    def __init__(
        self,
        host: Host,
        http: list[socket.socket],
        metrics: list[socket.socket],
        grpc: list[socket.socket],
        snapshot: Callable[[], Iterable[Any]],
        on_message: Callable[[int, Any], None],
    ) -> None:
        self._host = host
        self._http = http
        self._metrics = metrics
        self._grpc = grpc
        self._snapshot = snapshot
        self._on_message = on_message
        self._children: dict[str, Child] = {}  # by name: "0", "1", ..., "grpc"
        self._deaths = 0
        self._drained: dict[int, asyncio.Future[None]] = {}
        self.stopping = False

    async def start(self) -> None:
        """Start every gateway."""
        names = [str(index) for index in range(self._host.config.gateways)]
        if self._grpc:
            names.append(_GRPC)
        await asyncio.gather(*map(self._start, names))

    async def _start(self, name: str) -> None:
        entry, own, sockets = self._grpc_entry() if name == _GRPC else self._http_entry(name)
        config = self._host.config
        common = {
            "run_dir": str(self._host.run_dir),
            "settings": config.gateway_settings(),
            "log": asdict(self._host.log),
        }
        child = await self._host.front.spawn(
            f"gateway {name}", entry, {**common, **own}, [sock.fileno() for sock in sockets]
        )
        self._children[name] = child
        self._host.enrol(child.pid, "gateway", lambda message: self._from_gateway(child, message))

    def _http_entry(self, name: str) -> tuple[str, dict[str, Any], list[socket.socket]]:
        own = {"index": int(name), "http_count": len(self._http)}
        return "shmserve.gateway.main:run", own, [*self._http, *self._metrics]

    def _grpc_entry(self) -> tuple[str, dict[str, Any], list[socket.socket]]:
        config = self._host.config.grpc
        assert config is not None
        addresses = [sock.getsockname()[:2] for sock in self._grpc]
        own = {"addresses": addresses, "grpc": config.gateway_settings()}
        return "shmserve.gateway.grpc.main:run", own, []

    def _from_gateway(self, child: Child, message: Any) -> None:
        match message:
            case m.GatewayReady():
                for item in self._snapshot():
                    self._host.control.send(child.pid, item)
            case m.Acknowledged(number):
                self._host.acknowledgements.acknowledged(child.pid, number)
            case m.Drained():
                drained = self._drained.get(child.pid)
                if drained is not None and not drained.done():
                    drained.set_result(None)
            case _:
                self._on_message(child.pid, message)

    def pids(self) -> list[int]:
        """The gateways that have made contact."""
        return self._host.role_pids("gateway")

    async def publish(self, make: Callable[[int], Any]) -> None:
        """Send what `make(number)` gives to every gateway; returns once it holds in each that
        lives."""
        pids = self.pids()
        number, done = self._host.acknowledgements.begin(set(pids))
        message = make(number)
        for pid in pids:
            self._host.control.send(pid, message)
        await done

    def tell(self, message: Any) -> None:
        """Send news of models, or of the server's health, to every gateway and guest."""
        self._host.broadcast(message, "gateway", "guest")

    async def publish_model(self, make: Callable[[int], Any]) -> None:
        """`publish`, to guests as well; one that is stopped is not waited for."""
        guests = self._host.guests
        told = [self.publish(make), *([guests.publish(make)] if guests else [])]
        await asyncio.gather(*told)

    def process_exited(self, child: Child) -> None:
        """Start a gateway again if `child` was one; the listening sockets are here, so no
        connection is refused."""
        for name, known in self._children.items():
            if known is child and not self.stopping:
                logger.error("%s ended (%s); starting it again", child.title, child.exited.result())
                self._host.background(self._restart(name))

    async def _restart(self, name: str) -> None:
        pause = _PAUSES_S[min(self._deaths, len(_PAUSES_S) - 1)]
        self._deaths += 1
        asyncio.get_running_loop().call_later(30.0, self._forgive)
        await asyncio.sleep(pause)
        if not self.stopping:
            try:
                await self._start(name)
            except (ShmserveError, OSError) as error:  # of no descriptor or memory left, too
                logger.error("gateway %s could not be started: %s", name, error)
                self._host.background(self._restart(name))

    def _forgive(self) -> None:
        self._deaths -= 1

    async def drain(self) -> None:
        """Have every gateway finish what is in flight; returns when all are done or gone."""
        self.stopping = True
        loop = asyncio.get_running_loop()
        waits: list[asyncio.Future[Any]] = []
        for child in self._children.values():
            if child.alive and self._host.control.connected(child.pid):
                drained = self._drained[child.pid] = loop.create_future()
                self._host.control.send(child.pid, m.Drain())
                waits.append(asyncio.ensure_future(self._host.either(drained, child.exited)))
        if waits:
            await asyncio.wait(waits)

    async def stop(self) -> None:
        """End every gateway and close the sockets."""
        self.stopping = True
        for sock in (*self._http, *self._metrics, *self._grpc):
            sock.close()
        for child in self._children.values():
            self._host.control.send(child.pid, m.Stop())
        await asyncio.gather(*(self._host.end(child, 2.0) for child in self._children.values()))
