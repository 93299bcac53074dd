"""`shmserve systemd`: installs, shows and removes a host's systemd units.

units.py             the files, their texts and purposes (pure)
*.conf config.yaml   the texts
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

from shmserve.cli.systemd import units
from shmserve.cli.systemd.units import File, Installation
from shmserve.config import command_line
from shmserve.errors import InvalidArgument, refused

_RUN = Path("/run/shmserve")
_HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("verb", choices=("install", "show", "remove"))
    parser.add_argument("--user", action="store_true", help="for this user's service manager")
    parser.add_argument("--root", type=Path, help="for the system image in this folder")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.add_argument(
        "--force", action="store_true", help="overwrite or remove edited files, too"
    )
    parser.add_argument("--program", help="the shmserve to start (default: this one)")
    parser.add_argument(
        "--device", choices=units.DEVICES, help="default: nvidia where /dev/nvidiactl is"
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command.

    Returns:
        The exit status; 1 if a modified file was left in place.

    Raises:
        InvalidArgument: The arguments are invalid, or a file cannot be read or written.
    """
    if arguments.user and arguments.root:
        raise InvalidArgument("--root: an image has no user's manager; leave out --user")
    root = arguments.root or Path("/")
    host = _host(arguments, root)
    if arguments.verb == "show":
        for file in units.files(host):
            if file.text is not None:
                print(f"## {file.path}: {file.purpose}\n{file.text}")
        return 0
    with refused(f"systemd {arguments.verb}: cannot change the files"):
        return _Change(host, root, arguments).run(arguments.verb)


def _host(arguments: argparse.Namespace, root: Path) -> Installation:
    home = None
    if arguments.user:
        config, data = (
            Path(os.environ.get(f"XDG_{name}_HOME") or Path.home() / usual)
            for name, usual in (("CONFIG", ".config"), ("DATA", ".local/share"))
        )
        home = (config, data)
    has_gpu = (root / "dev/nvidiactl").exists()
    installation = Installation((), home)
    if arguments.verb == "remove":  # must succeed even if the installation is broken
        return installation
    return Installation(
        program=_program(arguments),
        home=home,
        device=arguments.device or ("nvidia" if has_gpu else "cpu"),
        token=_below(root, installation.settings / "token").exists(),
        version=_version(root),
        exit_timeout_s=_exit_timeout_s(_below(root, installation.settings / "shmserve.yaml")),
    )


def _program(arguments: argparse.Namespace) -> tuple[str, ...]:
    script = Path(sys.executable).with_name("shmserve")
    program = (str(script),) if script.exists() else (sys.executable, "-m", "shmserve")
    if arguments.program:
        program = (arguments.program,)
    if not Path(program[0]).is_absolute():
        raise InvalidArgument(f"--program: '{program[0]}' is not an absolute path")
    real = () if arguments.program else (Path(sys.executable).resolve(),)
    for path in (Path(program[0]), *real):
        if not arguments.user and any(path.is_relative_to(folder) for folder in _HIDDEN):
            raise InvalidArgument(
                f"--program: '{path}' cannot be seen by the unit, from which /home, /root and /tmp "
                "are hidden; install shmserve elsewhere (python3 -m venv /opt/shmserve)"
            )
    return program


def _version(root: Path) -> int:
    """Return the system's systemd version, from the name of its library; 0 if unknown."""
    found = [
        re.search(r"-shared-(\d+)", path.name)
        for folder in ("lib", "lib64", "lib/*-linux-*")
        for path in root.glob(f"usr/{folder}/systemd/libsystemd-shared-*")
    ]
    return max((int(match[1]) for match in found if match), default=0)


def _exit_timeout_s(file: Path) -> int:
    values = command_line.read(str(file)).values if file.exists() else {}
    return int(values.get("exit-timeout-secs", 30))


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


class _Change:
    """A change of a host's files, with its report."""

    def __init__(self, host: Installation, root: Path, arguments: argparse.Namespace) -> None:
        self._host = host
        self._root = root
        self._dry = arguments.dry_run
        self._force = arguments.force
        self._manager = ("systemctl", "--user") if arguments.user else ("systemctl",)
        running = Path(os.environ.get("XDG_RUNTIME_DIR", "/") if arguments.user else "/run")
        self._live = arguments.root is None and (running / "systemd/private").exists()
        self._kept: list[File] = []
        self._failed = False

    def run(self, verb: str) -> int:
        files = units.files(self._host)
        if verb == "install":
            for file in files:
                self._install(file)
        else:
            if any(_below(self._root, file.path).exists() for file in files):
                self._command(*self._manager, "stop", *_STOPPED, may_fail=True)
            for file in files:
                self._remove(file)
            self._remove_links()
            self._remove_folders()
        blocked = any(verb == "remove" or not file.own for file in self._kept)
        if blocked:
            kept = "would be" if self._dry else "were"
            print(f"Changed files {kept} kept; --force overwrites or removes them.")
        self._finish(verb)
        return int(blocked or self._failed)

    def _install(self, file: File) -> None:
        path = _below(self._root, file.path)
        there = _text(path)
        if file.text is None:
            if there is not None:
                self._remove(file)
        elif there == file.text:
            print(f"unchanged  {path}: {file.purpose}")
        elif there is not None and not (units.untouched(there) or (self._force and not file.own)):
            self._keep(file, path)
            self._show_difference(path, there, file.text)
        else:
            self._report("written" if there is None else "updated", f"{path}: {file.purpose}")
            self._show_difference(path, there, file.text)
            self._write(path, file.text)

    def _report(self, done: str, what: str) -> None:
        """Print a change; with --dry-run, what it would be."""
        verb = {"written": "write", "updated": "update", "removed": "remove", "run": "run"}[done]
        print(f"{f'would {verb}' if self._dry else done:<10} {what}", flush=True)

    def _write(self, path: Path, text: str) -> None:
        if not self._dry:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            new = path.with_name(f"{path.name}.new")
            new.write_text(text, encoding="utf-8")
            new.chmod(0o644)
            new.replace(path)

    def _show_difference(self, path: Path, old: str | None, new: str) -> None:
        if old is not None:
            lines = (old.splitlines(), new.splitlines())
            for line in difflib.unified_diff(*lines, str(path), "installed", lineterm=""):
                print(f"    {line}")

    def _keep(self, file: File, path: Path) -> None:
        self._kept.append(file)
        kept = "would keep" if self._dry else "kept"
        print(f"{kept:<10} {path}: changed since it was written")

    def _remove(self, file: File) -> None:
        path = _below(self._root, file.path)
        there = _text(path)
        if there is None:
            return
        if not (units.untouched(there) or self._force):
            self._keep(file, path)
            return
        self._report("removed", str(path))
        if not self._dry:
            path.unlink()
            if "shmserve" in path.parent.name and not any(path.parent.iterdir()):
                path.parent.rmdir()

    def _remove_links(self) -> None:
        # Links made by `systemctl enable`, including those of shmserve@NAME.
        for link in sorted(_below(self._root, self._host.units).glob("*.wants/shmserve[.@-]*")):
            if link.is_symlink():
                self._report("removed", str(link))
                if not self._dry:
                    link.unlink()

    def _remove_folders(self) -> None:
        # The empty folders created by tmpfiles.d.
        models = self._host.models
        for folder in (models, models.parent, *(() if self._host.home else (_RUN,))):
            path = _below(self._root, folder)
            if not self._dry and path.is_dir() and not any(path.iterdir()):
                self._report("removed", str(path))
                path.rmdir()

    def _finish(self, verb: str) -> None:
        if verb == "remove":
            print("Not removed: models, tokens, other drop-ins, the user and the group.")
        elif self._host.home is None:
            self._command("systemd-sysusers", str(units.SYSUSERS))
            self._command("systemd-tmpfiles", "--create", str(self._host.tmpfiles))
        else:
            self._command("systemd-tmpfiles", "--user", "--create", str(self._host.tmpfiles))
        self._command(*self._manager, "daemon-reload")
        if verb == "install" and not self._dry:
            manager = " ".join(self._manager)
            print(
                f"Models go to {self._host.models}. Then: {manager} enable --now shmserve.service"
            )
            if not self._host.token:
                token = self._host.settings / "token"
                print(
                    f"No {token}: any client that reaches the sockets is served. "
                    "Write the file and install again."
                )

    def _command(self, *words: str, may_fail: bool = False) -> None:
        # Without a running manager, as in an image, the next boot applies the change.
        if self._live:
            self._report("run", " ".join(words))
            if not self._dry and subprocess.run(words, check=False).returncode and not may_fail:
                self._failed = True


_STOPPED = (*(unit for unit in units.UNITS if "@" not in unit), "shmserve*@*")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
