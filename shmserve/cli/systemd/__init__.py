"""`shmserve systemd`: installs, shows and removes a host's systemd units.

files()              the files with their texts and purposes
*.conf config.yaml   the texts
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shmserve.config import command_line
from shmserve.errors import InvalidArgument

SERVICES = ("shmserve.service", "shmserve@.service")
DEVICES = ("cpu", "nvidia")
# Socket unit -> its name in the server, its port (0: none), its unix socket ("": none).
_SOCKETS = {
    "shmserve.socket": ("http", 8000, "http.sock"),
    "shmserve-grpc.socket": ("grpc", 8001, "grpc.sock"),
    "shmserve-metrics.socket": ("metrics", 8002, ""),
    "shmserve-local.socket": ("local", 0, "local.sock"),
}
_LOCAL_SOCKET = "local.sock"  # the socket of local clients (shmserve.client)
# The template units of further servers, by the units of the first server.
_TEMPLATES = {unit: unit.replace(".", "@.") for unit in _SOCKETS}
UNITS = (*SERVICES, *_SOCKETS, *_TEMPLATES.values(), "shmserve.slice")
_STOP_MARGIN_S = 10
_MIN_RELOAD_VERSION = 253  # since this version `systemctl reload` waits for completion
_TYPE_RELOAD = "Type=notify-reload"  # the service type from systemd 253 on
_TYPE_SIGNAL = "Type=notify\nExecReload=/bin/sh -c 'kill -HUP $MAINPID'"
_STAMP = re.compile(r"# Written by `shmserve systemd install` \(sha256 ([0-9a-f]{64})\)")


@dataclass(frozen=True, slots=True)
class Installation:
    """The parameters of an installation for the system's manager or a user's manager.

    Attributes:
        program: The command line that starts shmserve.
        xdg_dirs: The folders of the user's configuration and data; None: the system's manager.
        device: An entry of DEVICES, whose device files the units permit.
        has_token: Whether clients need a token.
        exit_timeout_s: The server's exit timeout.
        systemd_version: The version of systemd; 0: unknown.
    """

    program: tuple[str, ...]
    xdg_dirs: tuple[Path, Path] | None = None
    device: str = "cpu"
    has_token: bool = False
    exit_timeout_s: int = 30
    systemd_version: int = 0

    @property
    def units(self) -> Path:
        """Return the folder of units."""
        return self.xdg_dirs[0] / "systemd/user" if self.xdg_dirs else Path("/etc/systemd/system")

    @property
    def settings(self) -> Path:
        """Return the folder of the configuration file and of tokens."""
        return self.xdg_dirs[0] / "shmserve" if self.xdg_dirs else Path("/etc/shmserve")

    @property
    def models(self) -> Path:
        """Return the model repository of a new configuration file."""
        data_dir = self.xdg_dirs[1] if self.xdg_dirs else Path("/var/lib")
        return data_dir / "shmserve/models"

    @property
    def tmpfiles(self) -> Path:
        """Return the tmpfiles.d file that creates the required folders."""
        folder = self.xdg_dirs[0] / "user-tmpfiles.d" if self.xdg_dirs else Path("/etc/tmpfiles.d")
        return folder / "shmserve.conf"


SYSUSERS = Path("/etc/sysusers.d/shmserve.conf")


@dataclass(frozen=True, slots=True)
class File:
    """A file that `install` writes.

    Attributes:
        path: The path.
        purpose: What the file is for, as shown to the operator.
        text: The content; None: this host does not need the file.
        is_editable: Whether the operator may edit the file in place.
    """

    path: Path
    purpose: str
    text: str | None
    is_editable: bool = False


def files(installation: Installation) -> list[File]:
    """Return all files that may be installed, in the order of writing."""
    settings_file = installation.settings / "shmserve.yaml"
    files = []
    for path, purpose, unstamped_text in _file_contents(installation):
        is_settings = path == settings_file
        file_text = None if unstamped_text is None else stamp(unstamped_text, is_settings)
        files.append(File(path, purpose, file_text, is_settings))
    return files


def _file_contents(installation: Installation) -> Iterator[tuple[Path, str, str | None]]:
    is_user = installation.xdg_dirs is not None
    models = json.dumps(str(installation.models), ensure_ascii=False)
    group_line = (
        "" if is_user else "# Its members may share memory with the server.\nshm-group: shmclients"
    )
    config = _render("config.yaml", models=models, group=group_line)
    yield installation.settings / "shmserve.yaml", "the server's flags", config
    yield installation.units / SERVICES[0], "the server", _service(installation, is_template=False)
    purpose = f"further servers: shmserve@NAME has the flags of {installation.settings}/NAME.yaml"
    yield installation.units / SERVICES[1], purpose, _service(installation, is_template=True)
    for unit, (name, port, path) in _SOCKETS.items():
        listen = _listen_lines(f"127.0.0.1:{port}" if port else "", path, is_user)
        yield installation.units / unit, f"the {name} listener", _socket(name, listen, "")
        purpose = f"the {name} listener of shmserve@NAME, if it is enabled; a drop-in adds ports"
        listen = _listen_lines("", f"%i-{name}.sock", is_user)
        yield installation.units / _TEMPLATES[unit], purpose, _socket(name, listen, "@%i")
    slice_purpose = "the resource limits of all servers together"
    yield installation.units / UNITS[-1], slice_purpose, _render("slice.conf")
    for service in SERVICES:
        folder = installation.units / f"{service}.d"
        for device in DEVICES:
            text = None if is_user or device != installation.device else _render(f"{device}.conf")
            yield folder / f"10-{device}.conf", f"the devices of a host ({device})", text
        has_token = installation.has_token
        text = _render("token.conf", credential=_credential_lines(is_user)) if has_token else None
        yield folder / "20-token.conf", "the tokens that clients must send", text
    if is_user:
        text = _render("user-tmpfiles.conf", models=quote(str(installation.models)))
    else:
        text = _render("tmpfiles.conf")
        yield SYSUSERS, "the user shmserve, the group shmclients", _render("sysusers.conf")
    yield installation.tmpfiles, "the required folders", text


def _service(installation: Installation, is_template: bool) -> str:
    is_user = installation.xdg_dirs is not None
    socket_units = " ".join(_SOCKETS)
    name = "shmserve" if is_user else "shmserve/server"
    return _render(
        "service.conf",
        title=" %i" if is_template else "",
        type=_TYPE_RELOAD if installation.systemd_version >= _MIN_RELOAD_VERSION else _TYPE_SIGNAL,
        program=" ".join(map(quote, installation.program)),
        config="%i" if is_template else "shmserve",
        run_dir=f"{name}-%i" if is_template else name,
        stop_timeout_s=installation.exit_timeout_s + _STOP_MARGIN_S,
        system="" if is_user else _render("system.conf"),
        sockets="" if is_template else f"Sockets={socket_units}\n",
        target="default.target" if is_user else "multi-user.target",
        also="" if is_template else f"Also={socket_units}",
    )


def _listen_lines(address: str, path: str, is_user: bool) -> list[str]:
    lines = [f"ListenStream={address}"] if address else []
    directive = "ListenSequentialPacket" if path.endswith(_LOCAL_SOCKET) else "ListenStream"
    if path and is_user:
        lines += [f"{directive}=%t/shmserve-{path}", "SocketMode=0600"]
    elif path:
        lines += [f"{directive}=%t/shmserve/{path}", "SocketMode=0660", "SocketGroup=shmclients"]
    if not is_user:
        lines += ["IPAddressDeny=any", "IPAddressAllow=localhost"]
    return lines


def _socket(name: str, listen: list[str], instance_suffix: str) -> str:
    fields = {"name": name, "title": instance_suffix.replace("@", " "), "instance": instance_suffix}
    return _render("socket.conf", listen="\n".join(listen), **fields)


def _credential_lines(is_user: bool) -> str:
    token_path = "%E/shmserve/token"
    if is_user:  # only the user's own systemd manager reads the file
        return f"Environment=SHMSERVE_FLAGS=--auth-token-file={token_path}"
    flags = "Environment=SHMSERVE_FLAGS=--auth-token-file=%d/token"
    return f"LoadCredential=token:{token_path}\n{flags}"


def _render(template: str, /, **fields: object) -> str:
    text = resources.files(__package__).joinpath(template).read_text(encoding="utf-8")
    return re.sub(r"\n{3,}", "\n\n", text.format_map(fields)).rstrip("\n") + "\n"


def quote(word: str) -> str:
    """Return a word quoted for a systemd command line."""
    word = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w%$@:=,./+-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def stamp(body: str, is_editable: bool) -> str:
    """Return `body` after a line with its origin and its hash, by which edits are detected."""
    digest = hashlib.sha256(body.encode()).hexdigest()
    advice = "edit it as needed" if is_editable else "change it by drop-ins, systemctl edit"
    return f"# Written by `shmserve systemd install` (sha256 {digest}); {advice}.\n{body}"


def is_untouched(text: str) -> bool:
    """Check whether a text is unchanged since `install` wrote it."""
    first_line, _, body = text.partition("\n")
    match = _STAMP.match(first_line)
    return match is not None and match[1] == hashlib.sha256(body.encode()).hexdigest()


_RUN_ROOT = Path("/run/shmserve")
_HIDDEN_FOLDERS = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("verb", choices=("install", "show", "remove"))


def run(arguments: argparse.Namespace) -> int:
    """Install, show or remove the units, as the verb on the command line requires.

    Returns:
        The exit status; 1 if a modified file was left in place.

    Raises:
        InvalidArgument: The arguments are invalid, or a file cannot be read or written.
    """
    if arguments.user and arguments.root:
        raise InvalidArgument("--root: an image has no service manager of a user; omit --user")
    root = Path(arguments.root or "/")
    installation = _select_installation(arguments, root)
    if arguments.verb == "show":
        for file in files(installation):
            if file.text is not None:
                print(f"## {file.path}: {file.purpose}\n{file.text}")
        return 0
    try:
        return _Change(installation, root, arguments).run(arguments.verb)
    except BrokenPipeError:  # the reader of the standard output has closed it, as `head` does
        raise
    except OSError as error:
        text = f"systemd {arguments.verb}: cannot change '{error.filename or root}'"
        raise InvalidArgument(f"{text}: {error.strerror}") from None


def _select_installation(arguments: argparse.Namespace, root: Path) -> Installation:
    xdg_dirs = None
    if arguments.user:
        xdg_dirs = (_xdg_dir("CONFIG", ".config"), _xdg_dir("DATA", ".local/share"))
    installation = Installation((), xdg_dirs)
    if arguments.verb == "remove":  # removal must succeed even if the installation is broken
        return installation
    return Installation(
        program=_select_program(arguments, arguments.verb == "show" or arguments.dry_run),
        xdg_dirs=xdg_dirs,
        device=arguments.device or ("nvidia" if (root / "dev/nvidiactl").exists() else "cpu"),
        has_token=_path_in(root, installation.settings / "token").exists(),
        systemd_version=_systemd_version(root),
        exit_timeout_s=_exit_timeout_s(_path_in(root, installation.settings / "shmserve.yaml")),
    )


def _xdg_dir(name: str, default: str) -> Path:
    path = Path(os.environ.get(f"XDG_{name}_HOME", ""))
    return path if path.is_absolute() else Path.home() / default  # as the specification requires


def _select_program(arguments: argparse.Namespace, is_preview: bool) -> tuple[str, ...]:
    """Return the server's command line.

    If the units cannot run it, a preview prints a warning, and an installation fails.
    """
    script = Path(sys.executable).with_name("shmserve")
    program = (str(script),) if script.exists() else (sys.executable, "-m", "shmserve")
    if arguments.program:
        program = (arguments.program,)
    if not Path(program[0]).is_absolute():
        raise InvalidArgument(f"--program: '{program[0]}' is not an absolute path")
    interpreter = () if arguments.program else (Path(sys.executable).resolve(),)
    for path in (Path(program[0]), *interpreter):
        problem_text = ""
        if not arguments.user and any(path.is_relative_to(folder) for folder in _HIDDEN_FOLDERS):
            problem_text = (
                f"--program: the units cannot read '{path}', because /home, /root and /tmp are "
                "hidden from them; install shmserve elsewhere, with a Python that is elsewhere, "
                "too (/usr/bin/python3 -m venv /opt/shmserve)"
            )
        elif arguments.root is None and not path.exists():
            problem_text = f"--program: '{path}' does not exist"
        if problem_text and not is_preview:
            raise InvalidArgument(problem_text)
        if problem_text:
            print(f"warning: {problem_text}", file=sys.stderr)
            break
    return program


def _systemd_version(root: Path) -> int:
    """Return the system's systemd version, from the name of its library; 0 if unknown."""
    versions = [
        re.search(r"-shared-(\d+)", path.name)
        for folder in ("lib", "lib64", "lib/*-linux-*")
        for path in root.glob(f"usr/{folder}/systemd/libsystemd-shared-*")
    ]
    return max((int(match[1]) for match in versions if match), default=0)


def _exit_timeout_s(file: Path) -> int:
    flags = command_line.read(str(file)).values if file.exists() else {}
    timeout_s = flags.get("exit-timeout-secs")
    return timeout_s if isinstance(timeout_s, int) else 30


def _path_in(root: Path, absolute_path: Path) -> Path:
    return root / absolute_path.relative_to("/")


class _Change:
    """An installation or a removal of the units, which prints a line for each file."""

    def __init__(self, installation: Installation, root: Path, options: argparse.Namespace) -> None:
        self._installation = installation
        self._units = _path_in(root, installation.units)
        self._root = root
        self._dry_run = options.dry_run
        self._force = options.force
        self._manager = ("systemctl", "--user") if options.user else ("systemctl",)
        runtime_dir = Path(os.environ.get("XDG_RUNTIME_DIR", "/") if options.user else "/run")
        self._has_manager = options.root is None and (runtime_dir / "systemd/private").exists()
        self._kept_files: list[File] = []
        self._has_failed = False

    def run(self, verb: str) -> int:
        all_files = files(self._installation)
        if verb == "install":
            for file in all_files:
                self._install(file)
        else:
            if not any(_path_in(self._root, file.path).exists() for file in all_files):
                print(f"No units are installed in {self._units}.")
            else:
                self._command(*self._manager, "stop", *_STOPPED_UNITS, may_fail=True)
            for file in all_files:
                self._remove(file)
            self._remove_links()
            self._remove_folders()
        is_blocked = any(verb == "remove" or not file.is_editable for file in self._kept_files)
        if is_blocked:
            verb_form = "would be" if self._dry_run else "were"
            print(f"Changed files {verb_form} kept; --force overwrites or removes them.")
        self._finish(verb)
        return int(is_blocked or self._has_failed)

    def _install(self, file: File) -> None:
        path = _path_in(self._root, file.path)
        old_text = _read_text(path)
        if file.text is None:
            if old_text is not None:
                self._remove(file)
        elif old_text == file.text:
            print(f"unchanged  {path}: {file.purpose}")
        elif old_text is not None and not (
            is_untouched(old_text) or (self._force and not file.is_editable)
        ):
            self._report_kept(file, path)
            self._show_difference(path, old_text, file.text)
        else:
            self._report("written" if old_text is None else "updated", f"{path}: {file.purpose}")
            self._show_difference(path, old_text, file.text)
            self._write(path, file.text)

    def _report(self, outcome: str, subject: str) -> None:
        """Print a change that was made or, with --dry-run, would be made."""
        verb = {"written": "write", "updated": "update", "removed": "remove", "run": "run"}[outcome]
        print(f"{f'would {verb}' if self._dry_run else outcome:<10} {subject}", flush=True)

    def _write(self, path: Path, text: str) -> None:
        if not self._dry_run:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            new_path = path.with_name(f"{path.name}.new")
            new_path.write_text(text, encoding="utf-8")
            new_path.chmod(0o644)
            new_path.replace(path)

    def _show_difference(self, path: Path, old_text: str | None, new_text: str) -> None:
        if old_text is not None:
            lines = (old_text.splitlines(), new_text.splitlines())
            for line in difflib.unified_diff(*lines, str(path), "installed", lineterm=""):
                print(f"    {line}")

    def _report_kept(self, file: File, path: Path) -> None:
        self._kept_files.append(file)
        verb = "would keep" if self._dry_run else "kept"
        print(f"{verb:<10} {path}: changed since it was written")

    def _remove(self, file: File) -> None:
        path = _path_in(self._root, file.path)
        current_text = _read_text(path)
        if current_text is None:
            return
        if not (is_untouched(current_text) or self._force):
            self._report_kept(file, path)
            return
        self._report("removed", str(path))
        if not self._dry_run:
            path.unlink()
            if "shmserve" in path.parent.name and not any(path.parent.iterdir()):
                path.parent.rmdir()

    def _remove_links(self) -> None:
        # Links made by `systemctl enable`, including those of shmserve@NAME.
        for link in sorted(self._units.glob("*.wants/shmserve[.@-]*")):
            if link.is_symlink():
                self._report("removed", str(link))
                if not self._dry_run:
                    link.unlink()

    def _remove_folders(self) -> None:
        # The empty folders created by tmpfiles.d.
        models = self._installation.models
        run_root = () if self._installation.xdg_dirs else (_RUN_ROOT,)
        for folder in (models, models.parent, *run_root):
            path = _path_in(self._root, folder)
            if not self._dry_run and path.is_dir() and not any(path.iterdir()):
                self._report("removed", str(path))
                path.rmdir()

    def _finish(self, verb: str) -> None:
        if verb == "remove":
            print("Not removed: models, tokens, other drop-ins, the user and the group.")
        else:
            if self._installation.xdg_dirs is None:
                self._command("systemd-sysusers", str(SYSUSERS))
            scope = ("--user",) if self._installation.xdg_dirs else ()
            self._command("systemd-tmpfiles", *scope, "--create", str(self._installation.tmpfiles))
        self._command(*self._manager, "daemon-reload")
        if verb == "install" and not self._dry_run:
            manager = " ".join(self._manager)
            command = f"{manager} enable --now shmserve.service"
            print(f"Models go to {self._installation.models}. Then: {command}")
            if not self._installation.has_token:
                token = self._installation.settings / "token"
                print(
                    f"No {token}: any client that reaches the sockets is served. "
                    "Write the file and install again."
                )

    def _command(self, *words: str, may_fail: bool = False) -> None:
        # Without a running manager, as in a system image, the change takes effect at the next boot.
        if self._has_manager:
            self._report("run", " ".join(words))
            if not self._dry_run and subprocess.run(words, check=False).returncode and not may_fail:
                self._has_failed = True


_STOPPED_UNITS = (*(unit for unit in UNITS if "@" not in unit), "shmserve*@*")


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
