"""Minimal programs with real clients (`make clients` installs them): chats, tools, Responses."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import clients
from tests.support.scripted_llm import ANSWER, ANSWERS, CALL, CALLED, write_scripted
from tests.support.servers import Server, running

PROGRAMS_FOLDER = Path(__file__).with_name("clients")
# Program -> the package that it needs, and the folder of that package ("": the tests' packages).
PYTHON = {
    "openai_client.py": ("openai", ""),
    "agents_client.py": ("agents", "python"),
    "pydantic_ai_client.py": ("pydantic_ai", "python"),
    "litellm_client.py": ("litellm", "python"),
    "langchain_client.py": ("langchain_openai", "python"),
    "instructor_client.py": ("instructor", "instructor"),
    "agent_framework_client.py": ("agent_framework", "python"),
}
NODE = {"openai_client.mjs": "openai", "ai_client.mjs": "ai"}
# Without a network, litellm would try to download its price list for a long time.
QUIET_ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of two models that call a tool, one of which generates text before."""
    repository = tmp_path_factory.mktemp("scripted") / "models"
    write_scripted(repository / "scripted" / "1", {CALLED: CALL, ANSWERS: ANSWER})
    write_scripted(repository / "direct" / "1", {CALLED: (*CALL[:5], *CALL[6:])})
    with running(repository) as server:
        yield address(server)


def address(server: Server) -> str:
    return f"http://{server.url}/v1"


@pytest.mark.parametrize("program", PYTHON)
def test_clients_in_python(url: str, program: str) -> None:
    package, folder = PYTHON[program]
    path = clients.FOLDER / folder
    if folder and not (path / package).exists():
        pytest.skip(f"there is no {package} here (make clients)")
    environment = {**QUIET_ENVIRONMENT, **({"PYTHONPATH": str(path)} if folder else {})}
    command = [sys.executable, str(PROGRAMS_FOLDER / program), url]
    assert clients.run(command, environment).endswith("all is right\n")


@pytest.mark.parametrize("program", NODE)
def test_clients_in_node(url: str, program: str) -> None:
    node = shutil.which("node")
    if node is None or not (clients.FOLDER / "node_modules" / NODE[program]).exists():
        pytest.skip(f"there is no Node here with {NODE[program]} (make clients)")
    command = [node, str(PROGRAMS_FOLDER / program), url, str(clients.FOLDER)]
    assert clients.run(command).endswith("all is right\n")
