"""The resources of a process on its host, with limits of control groups."""

from pathlib import Path

import pytest

from shmserve.common import host

GIB = 2**30


def set_control_group(monkeypatch: pytest.MonkeyPatch, root: Path, line: str) -> None:
    """Set the line in /proc/self/cgroup, and the root of the control groups."""
    monkeypatch.setattr(host, "_CGROUPS", root)
    monkeypatch.setattr(host, "memory_bytes", lambda: (8 * GIB, 5 * GIB))
    original_read = Path.read_text
    text = f"9:name=systemd:/\n{line}\n"
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path: text if str(path) == "/proc/self/cgroup" else original_read(path),
    )


def write(folder: Path, **files: str) -> None:
    """Write the files of a control group; `_` in a name stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def test_available_memory_is_that_of_the_nearest_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_control_group(monkeypatch, tmp_path, "0::/slice/server")
    assert host.available_memory() == 3 * GIB  # the memory of the host
    server, parent = tmp_path / "slice" / "server", tmp_path / "slice"
    write(server, memory_max="max\n", memory_current=f"{GIB}\n", memory_stat="inactive_file 7\n")
    assert host.available_memory() == 3 * GIB
    write(parent, memory_max=f"{2 * GIB}\n", memory_current=f"{GIB}\n", memory_stat="anon 3\n")
    assert host.available_memory() == GIB
    write(parent, memory_stat="inactive_anon 1\ninactive_file 4096\n")
    assert host.available_memory() == GIB + 4096
    write(server, memory_max=f"{GIB}\n")
    assert host.available_memory() == 7
    assert host.cgroup_limit("memory", "memory.max", "older") == GIB


def test_the_memory_of_a_controller_with_its_own_hierarchy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_control_group(monkeypatch, tmp_path, "4:memory:/server")
    folder = tmp_path / "memory" / "server"
    write(folder, memory_limit_in_bytes=str(GIB), memory_usage_in_bytes=str(2 * GIB))
    write(folder, memory_stat="inactive_file 1\ntotal_inactive_file 2\n")
    assert host.available_memory() == 0
    write(folder, memory_usage_in_bytes=str(GIB // 2))
    assert host.available_memory() == GIB // 2 + 1


@pytest.mark.parametrize(
    ("line", "folder", "file"),
    [("0::/server", "server", "memory_events"), ("4:memory:/x", "memory", "memory_oom_control")],
)
def test_processes_that_the_kernel_has_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, folder: str, file: str
) -> None:
    """In a container, the group's own folder is the root of cgroup v1."""
    set_control_group(monkeypatch, tmp_path, line)
    assert host.oom_kills() == 0
    write(tmp_path / folder, **{file: "oom 9\nunder_oom 1\noom_kill 3\noom_group_kill 0\n"})
    assert host.oom_kills() == 3


def test_processors_are_limited_by_a_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_control_group(monkeypatch, tmp_path, "0::/server")
    count, quota = host.processors()
    assert count >= 1 and quota is None
    write(tmp_path / "server", cpu_max="150000 100000\n")
    assert host.processors() == (count, 1.5)
