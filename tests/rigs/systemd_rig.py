"""A real systemd in namespaces of its own.

It is process 1 of a system with this one's files, a writable /etc, and an empty /run, /tmp,
/dev/shm and /var/lib.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import ROOT
from tests.support.waiting import until

_SYSTEMD = "/lib/systemd/systemd"
_EMPTY_FOLDERS = ("/run/", "/tmp/", "/var/tmp/", "/dev/shm/", "/var/lib/")
# The manager must not clean or change anything of this system: its mounts are in its own
# namespaces, and it knows only the units installed there and empty targets.
_INNER_SCRIPT = f"""
set -e
mount --make-rprivate /
mount --make-rshared /
for folder in {" ".join(_EMPTY_FOLDERS)}; do mount -t tmpfs tmpfs $folder; done
mkdir /run/layers
mount -t tmpfs tmpfs /run/layers
mkdir /run/layers/upper /run/layers/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/layers/upper,workdir=/run/layers/work /etc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
echo 0123456789abcdef0123456789abcdef >/etc/machine-id
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up
rm -rf /etc/systemd/system
mkdir -p /etc/systemd/system /etc/targets
for name in sysinit basic shutdown sockets multi-user network umount start; do
    printf '[Unit]\\nDefaultDependencies=no\\n' >/etc/targets/$name.target
done
export container=test SYSTEMD_UNIT_PATH=/etc/systemd/system:/etc/targets
exec {_SYSTEMD} --system --unit=start.target --log-target=console
"""


class Unavailable(Exception):
    """The reason why no systemd can run here."""


class Systemd:
    """The manager; `pid` is its number here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def run(self, *words: str | Path, user: int = 0, groups: str = "") -> str:
        """Return a command's output without last newlines, and "status N" if it failed."""
        start = ["nsenter", f"--target={self.pid}", "--all"]
        if user:
            groups_of = f"--groups={groups}" if groups else "--clear-groups"
            start += ["setpriv", f"--reuid={user}", f"--regid={user}", groups_of]
        completed = subprocess.run(
            [*start, *words], cwd="/", env=_ENVIRONMENT, capture_output=True, text=True, check=False
        )
        status = f"\nstatus {completed.returncode}" if completed.returncode else ""
        return (completed.stdout + completed.stderr).strip() + status

    def path(self, inner_path: str) -> Path:
        return Path(f"/proc/{self.pid}/root{inner_path}")

    def show(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", f"--property={name}", "--value", unit)


_ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def booted() -> Iterator[Systemd]:
    """Return a started manager; raise Unavailable if there can be none."""
    _check()
    group = _control_group()
    into_group = ("bash", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "bash")
    unshare = (
        *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount"),
        *("--ipc", "--uts", "--net", "--cgroup", "bash", "-c", _INNER_SCRIPT),
    )
    with tempfile.TemporaryFile("w+") as log:
        init = subprocess.Popen(
            [*into_group, *unshare], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        children = Path(f"/proc/{init.pid}/task/{init.pid}/children")
        try:
            until("process 1", lambda: init.poll() is not None or children.read_text())
            systemd = Systemd(int(children.read_text()) if init.poll() is None else 0)

            def has_started() -> bool:
                if init.poll() is not None:
                    log.seek(0)
                    raise Unavailable(f"systemd does not start: {log.read().strip()[-200:]}")
                return systemd.run("systemctl", "is-active", "start.target") == "active"

            until("systemd", has_started)
            yield systemd
        finally:
            # All processes of the namespace exit with the manager before it can be awaited.
            if init.poll() is None:
                for pid in map(int, children.read_text().split()):
                    os.kill(pid, signal.SIGKILL)
            init.wait()
            _remove(group)


def _check() -> None:
    if os.geteuid() != 0:
        raise Unavailable("namespaces with a systemd are for root to make")
    if not Path(_SYSTEMD).exists() or not all(map(shutil.which, _TOOLS)):
        raise Unavailable(f"there is no {_SYSTEMD} here, or not all of {', '.join(_TOOLS)}")
    if hidden := [path for path in (ROOT, sys.executable) if str(path).startswith(_EMPTY_FOLDERS)]:
        raise Unavailable(f"{hidden[0]} is in a folder that is empty there")
    try:
        subprocess.run(
            [sys.executable, "-c", "import shmserve"],
            cwd="/",
            env=_ENVIRONMENT,
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = "a user of the system could not read this checkout, or not run its Python"
        raise Unavailable(reason) from error


_TOOLS = ("unshare", "nsenter", "setpriv", "ip", "curl", "systemctl", "systemd-sysusers")


def _control_group() -> Path:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    top = next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)
    own_group = Path("/proc/self/cgroup").read_text().partition("0::")[2].split("\n")[0]
    try:
        if top is None:
            raise Unavailable("there are no control groups of version 2 here")
        group = top / own_group.lstrip("/") / f"shmserve-test-{os.getpid()}"
        group.mkdir()
    except OSError as error:
        raise Unavailable(f"no control group can be made: {error}") from None
    return group


def _remove(group: Path) -> None:
    for path, _, _ in os.walk(group, topdown=False):
        os.rmdir(path)
