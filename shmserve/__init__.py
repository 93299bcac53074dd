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
    # Imported late: it imports numpy, which the server's processes import later.
    from shmserve.serving import serve

    return serve


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])  # so that help() shows `serve`


# The path of an HTTP request through the packages (gateway/__init__.py has the files, and gRPC):
#
#     gateway/http          bytes -> route -> handler; a body -> the tensors of a request, and back
#     gateway/inference     build and admit the request, and place its tensors
#     gateway/links         submit it to the model's scheduler, until the response
#     scheduler             hosting/ -> front.py -> batching.py: receive, decide, send
#       requests/           queue it (queue.py)
#       batchers/           form batches (dispatch.py)
#       instances/          select an instance (pool.py); send the batch to it (executions.py)
#     workers               main.py: wait, execute, report
#       batch/              execute.py calls request.py -> backends/ (the model) -> scatter.py;
#                           backends that compute whole batches use runner.py
#
# A local client's request: client/session.py finds the server. client/connection.py connects to
# supervisor/local_clients/server.py. client/request/prepare.py places the tensors in shared
# memory, client/request/ submits the request, and scheduler/hosting/local_clients.py validates it.
#
# A load: gateway/api/management.py sends the request to supervisor/models/manager.py, which
# executes the decisions of lifecycle.py, the state machine of the orders of each model. orders.py
# has the steps of a load. load_planner.py reads folder and configuration. model_version.py starts
# scheduler_process.py and instance_processes.py.
#
# Recovery: supervisor/processes/children.py detects the exit of a worker. supervisor.py notifies
# its scheduler, and instance_processes.py restarts the worker with backoff. In the scheduler,
# instances/results.py decides which of its requests are retried, one by one, and which fail.
# model_version.py handles the exit of a scheduler.
#
# The control plane: cli and config; supervisor, which owns the process tree (processes/, host/),
# the models (models/), the registered memory (regions/) and the local clients (local_clients/),
# and publishes events (events/). Code shared by several packages is in common. The messages and
# the memory that processes share are in ipc.
