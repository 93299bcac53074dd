"""The files of `shmserve systemd`: their paths, texts and purposes (pure)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

SERVICES = ("shmserve.service", "shmserve@.service")
DEVICES = ("cpu", "nvidia")
# Each socket unit: the server's name for it, its port, and its unix socket's name.
_SOCKETS = {
    "shmserve.socket": ("http", 8000, "http.sock"),
    "shmserve-grpc.socket": ("grpc", 8001, "grpc.sock"),
    "shmserve-metrics.socket": ("metrics", 8002, ""),
    "shmserve-local.socket": ("local", 0, "local.sock"),
}
_PACKETS = "local.sock"  # of local clients (shmserve.client)
# The template units of further servers, by the units of the first server.
_TEMPLATES = {unit: unit.replace(".", "@.") for unit in _SOCKETS}
UNITS = (*SERVICES, *_SOCKETS, *_TEMPLATES.values(), "shmserve.slice")
_STOP_MARGIN_S = 10
_KNOWS_RELOADS = 253  # since this version `systemctl reload` waits for completion
_RELOADS = "Type=notify-reload"
_IS_SIGNALLED = "Type=notify\nExecReload=/bin/sh -c 'kill -HUP $MAINPID'"
_MARK = re.compile(r"# Written by `shmserve systemd install` \(sha256 ([0-9a-f]{64})\)")


@dataclass(frozen=True, slots=True)
class Installation:
    """The target of the units: the system's manager, or a user's.

    Attributes:
        program: The command line that starts shmserve.
        home: The folders of the user's configuration and data; None: the system's manager.
        device: The accelerator of the units.
        token: Whether clients need a token.
        exit_timeout_s: The server's exit timeout.
        version: The version of systemd; 0: unknown.
    """

    program: tuple[str, ...]
    home: tuple[Path, Path] | None = None
    device: str = "cpu"
    token: bool = False
    exit_timeout_s: int = 30
    version: int = 0  # of systemd; 0: unknown

    @property
    def units(self) -> Path:
        """Return the folder of units."""
        return self.home[0] / "systemd/user" if self.home else Path("/etc/systemd/system")

    @property
    def settings(self) -> Path:
        """Return the folder of the configuration file and of tokens."""
        return self.home[0] / "shmserve" if self.home else Path("/etc/shmserve")

    @property
    def models(self) -> Path:
        """Return the model repository of a new configuration file."""
        data = self.home[1] if self.home else Path("/var/lib")
        return data / "shmserve/models"

    @property
    def tmpfiles(self) -> Path:
        """Return the tmpfiles.d file that creates the required folders."""
        folder = self.home[0] / "user-tmpfiles.d" if self.home else Path("/etc/tmpfiles.d")
        return folder / "shmserve.conf"


SYSUSERS = Path("/etc/sysusers.d/shmserve.conf")


@dataclass(frozen=True, slots=True)
class File:
    """An installed file.

    Attributes:
        path: Its path.
        purpose: Its purpose.
        text: Its text; None: not installed on this host.
        own: Whether the operator edits the file in place.
    """

    path: Path
    purpose: str
    text: str | None
    own: bool = False


def files(host: Installation) -> list[File]:
    """Return all files that may be installed, in the order of writing."""
    return [
        File(path, purpose, None if body is None else stamped(body, own), own)
        for path, purpose, body, own in _bodies(host)
    ]


def _bodies(host: Installation) -> Iterator[tuple[Path, str, str | None, bool]]:
    user = host.home is not None
    models = json.dumps(str(host.models), ensure_ascii=False)
    group = "" if user else "# Its members may share memory with the server.\nshm-group: shmclients"
    yield (
        host.settings / "shmserve.yaml",
        "the server's flags",
        _filled("config.yaml", models=models, group=group),
        True,
    )
    yield host.units / SERVICES[0], "the server", _service(host, instance=False), False
    yield (
        host.units / SERVICES[1],
        f"further servers: shmserve@NAME has the flags of {host.settings}/NAME.yaml",
        _service(host, instance=True),
        False,
    )
    for unit, (name, port, path) in _SOCKETS.items():
        listen = _listen(f"127.0.0.1:{port}" if port else "", path, user)
        yield host.units / unit, f"where {name} listens", _socket(name, listen, ""), False
        yield (
            host.units / _TEMPLATES[unit],
            f"where {name} of shmserve@NAME listens, if it is enabled; with ports by a drop-in",
            _socket(name, _listen("", f"%i-{name}.sock", user), "@%i"),
            False,
        )
    yield (
        host.units / UNITS[-1],
        "the resource limits of all servers together",
        _filled("slice.conf"),
        False,
    )
    for service in SERVICES:
        folder = host.units / f"{service}.d"
        for device in DEVICES:
            text = None if user or device != host.device else _filled(f"{device}.conf")
            yield folder / f"10-{device}.conf", f"the devices of a host ({device})", text, False
        text = _filled("token.conf", credential=_credential(user)) if host.token else None
        yield folder / "20-token.conf", "the tokens that clients must send", text, False
    if user:
        text = _filled("user-tmpfiles.conf", models=quoted(str(host.models)))
    else:
        text = _filled("tmpfiles.conf")
        yield SYSUSERS, "the user shmserve, the group shmclients", _filled("sysusers.conf"), False
    yield host.tmpfiles, "the required folders", text, False


def _service(host: Installation, instance: bool) -> str:
    user = host.home is not None
    sockets = " ".join(_SOCKETS)
    name = "shmserve" if user else "shmserve/server"
    return _filled(
        "service.conf",
        title=" %i" if instance else "",
        type=_RELOADS if host.version >= _KNOWS_RELOADS else _IS_SIGNALLED,
        program=" ".join(map(quoted, host.program)),
        config="%i" if instance else "shmserve",
        run_dir=f"{name}-%i" if instance else name,
        stop_timeout_s=host.exit_timeout_s + _STOP_MARGIN_S,
        system="" if user else _filled("system.conf"),
        sockets="" if instance else f"Sockets={sockets}\n",
        target="default.target" if user else "multi-user.target",
        also="" if instance else f"Also={sockets}",
    )


def _listen(address: str, path: str, user: bool) -> list[str]:
    lines = [f"ListenStream={address}"] if address else []
    kind = "ListenSequentialPacket" if path.endswith(_PACKETS) else "ListenStream"
    if path and user:
        lines += [f"{kind}=%t/shmserve-{path}", "SocketMode=0600"]
    elif path:
        lines += [f"{kind}=%t/shmserve/{path}", "SocketMode=0660", "SocketGroup=shmclients"]
    if not user:
        lines += ["IPAddressDeny=any", "IPAddressAllow=localhost"]
    return lines


def _socket(name: str, listen: list[str], instance: str) -> str:
    title = instance.replace("@", " ")
    words = {"name": name, "title": title, "instance": instance}
    return _filled("socket.conf", listen="\n".join(listen), **words)


def _credential(user: bool) -> str:
    file = "%E/shmserve/token"
    if user:  # only its own manager reads the file
        return f"Environment=SHMSERVE_FLAGS=--auth-token-file={file}"
    flags = "Environment=SHMSERVE_FLAGS=--auth-token-file=%d/token"
    return f"LoadCredential=token:{file}\n{flags}"


def _filled(template: str, /, **words: object) -> str:
    text = resources.files(__package__).joinpath(template).read_text(encoding="utf-8")
    filled = text.format_map(words)
    return re.sub(r"\n{3,}", "\n\n", filled).rstrip("\n") + "\n"


def quoted(word: str) -> str:
    """Return a word quoted for a systemd command line."""
    word = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w%$@:=,./+-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def stamped(body: str, own: bool) -> str:
    """Return a file's text: `body` after a line with its origin and its hash, to detect changes."""
    digest = hashlib.sha256(body.encode()).hexdigest()
    advice = "edit it as needed" if own else "change it by drop-ins, systemctl edit"
    return f"# Written by `shmserve systemd install` (sha256 {digest}); {advice}.\n{body}"


def untouched(text: str) -> bool:
    """Check whether a text is unchanged since `install` wrote it."""
    head, _, body = text.partition("\n")
    found = _MARK.match(head)
    return found is not None and found[1] == hashlib.sha256(body.encode()).hexdigest()
