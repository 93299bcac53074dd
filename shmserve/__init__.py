"""shmserve: a model server for one host whose clients pass tensors through shared memory.

    shmserve.serve(Blur)      run a server in a `with` block, from a script, a test or a notebook
    shmserve.model            tensor annotations of a class with `predict`, and its context
    shmserve.client           connect() to a server of this host, for threads
    shmserve.client.aio       connect() for asyncio
    shmserve.errors           the errors of servers and clients
    shmserve.testing          a fixture of pytest
    shmserve.workers.backends the interface of backends

    with shmserve.serve(Blur) as server:
        blurred = server.infer("blur", image=x)["output"]

`shmserve serve`, `shmserve client` and the other commands have `--help`; `shmserve guide` shows the
guide.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmserve.serving import serve

__all__ = ["__version__", "serve"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "serve":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    # Imported on first use: it imports numpy, which the server's processes need only later.
    from shmserve.serving import serve

    return serve


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])  # so that help() shows `serve`
