"""Each page of the guide, executed: its files, servers, programs and their output."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.marked_configs import parse_pbtxt
from tests.support import hf_folders
from tests.support.pages import PAGES, ROOT, Block, blocks
from tests.support.servers import Server

TESTED_PAGES = [page for page in PAGES if any(block.use == "run" for block in blocks(page))]
LONGEST_S = 120.0


class Reader:
    """The execution of a page's blocks in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: Server | None = None
        self.programs: list[str] = []
        self.printed = ""
        (folder / "bin").mkdir()
        command = folder / "bin" / "shmserve"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m shmserve "$@"\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
        for name in ("bench", "examples"):
            (folder / name).symlink_to(ROOT / name)
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def write(self, block: Block) -> None:
        path = self.folder / block.use
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)

    def serve(self, block: Block) -> None:
        self.stop()
        words = shlex.split(block.text.replace("\\\n", ""), comments=True)
        assert words[:2] == ["shmserve", "serve"]
        in_folder = ("env", "-C", str(self.folder))
        environment = {"PYTHONPATH": str(ROOT)}
        self.server = Server([], words[2:], prefix=in_folder, environment=environment, grpc=True)
        self.server.wait_ready()

    def run(self, block: Block) -> None:
        # A busy machine may meet no target of milliseconds, in which case `tune` exits with 1.
        text = block.text.replace("--p99 30ms", "--p99 10s")
        environment = dict(self.environment)
        if self.server:
            text = text.replace("localhost:8000", self.server.url)
            text = text.replace("localhost:8001", self.server.grpc_url)
            text = text.replace("localhost:8002", f"127.0.0.1:{self.server.metrics_port}")
            text = text.replace('"/frames"', f'"/frames-{os.getpid()}"')
            environment["SHMSERVE_RUN_DIR"] = str(self.server.run_dir)
        command = ["bash", "-euo", "pipefail", "-c", text]
        if block.language == "python":
            self.programs.append(text)
            command = [sys.executable, "-c", "\n".join(self.programs)]
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        assert result.returncode == 0, f"{block.text}\n{result.stdout}\n{result.stderr}"
        self.printed = result.stdout

    def compare(self, block: Block) -> None:
        pattern = ".*?".join(map(re.escape, block.text.rstrip().split("...")))
        assert re.search(pattern + r"\s*\Z", self.printed, re.DOTALL), self.printed

    def stop(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            server.stop()


@pytest.mark.parametrize("page", TESTED_PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_as_described(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    examples = blocks(page)
    if page.stem == "generation":  # a small model replaces the weights that the page names
        (tmp_path / "Qwen2.5-0.5B-Instruct").mkdir()
        hf_folders.write_folder(tmp_path / "Qwen2.5-0.5B-Instruct", "qwen2")
    for block in examples:
        if block.is_file:
            reader.write(block)
    actions = {"serve": reader.serve, "run": reader.run, "prints": reader.compare}
    try:
        for block in examples:
            if block.use in actions:
                actions[block.use](block)
    finally:
        reader.stop()
    if page.stem == "tune":
        assert re.match(r"# slow, p99 within .* requests/s, p99 .* in flight\n", reader.printed)
        assert re.search(r"\n#.* requests/s +p99 ms +in flight +configuration\n#", reader.printed)
        assert parse_pbtxt(reader.printed).instance_group
        assert "</svg>" in (tmp_path / "tried.svg").read_text()
