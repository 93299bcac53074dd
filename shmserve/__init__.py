"""shmserve: a model server for one host whose clients pass tensors through shared memory.

The path of an HTTP request through the packages (gateway/__init__.py has the files, and gRPC):

    gateway/http          bytes -> route -> handler; a body -> the tensors of a request, and back
    gateway/inference     build and admit the request, and place its tensors
    gateway/links         submit it to the model's scheduler, until the response
    scheduler             hosting/ -> front.py -> batching.py: receive, decide, send
      requests/           queue it (queue.py)
      batchers/           form batches (dispatch.py)
      instances/          select an instance (pool.py); send the batch to it (executions.py)
    workers               instance.py: wait, execute, report
      batch/              execute.py calls unpack.py -> backends/ (the model) -> scatter.py;
                          backends that compute whole batches use runner.py

A local client's request: client/session.py finds the server. client/connection.py connects to
supervisor/local_clients/server.py. client/request/prepare.py places the tensors in shared memory,
client/request/ submits the request, and scheduler/hosting/local_clients.py validates it.

A load: supervisor/models/manager.py receives the request and executes the decisions of
lifecycle.py, which has the orders of each model. orders.py has the steps of a load. load_planner.py
reads folder and configuration. model_version.py starts scheduler_process.py and
instance_processes.py.

Recovery: supervisor/processes/table.py detects the exit of a worker. instance_processes.py notifies
its scheduler and restarts the worker with backoff. scheduler/instances/results.py decides which of
its requests are retried, one by one, and which fail. model_version.py handles the exit of a
scheduler.

The control plane: cli and config; supervisor, which owns the process tree (processes/, host/), the
models (models/), the registered memory (regions/) and the local clients (local_clients/), and
publishes events (events/). Code shared by several packages is in common. The messages and the
memory that processes share are in ipc.
"""

__version__ = "0.1.0"
