"""Programs with a process table, which adopts orphans and kills unknown processes."""

import subprocess
import textwrap

from tests.support.servers import run_python

_PROGRAM = """
import asyncio, logging, os, select, signal, sys, time
from pathlib import Path
from shmserve.ipc import processes
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.processes import children as table
from shmserve.supervisor.processes.children import ProcessTable
from shmserve.supervisor.processes.zygote import Zygote

async def main():
{body}

asyncio.run(main())
"""


def run_table_program(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the body of a coroutine in a process of its own, with `arguments` in sys.argv."""
    program = _PROGRAM.replace("{body}", textwrap.indent(body, "    "))
    return run_python("-c", program, *arguments)
