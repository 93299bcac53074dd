"""shmserve: a model server for one host whose clients pass tensors through shared memory.

One HTTP request, by room (file by file, and gRPC, in gateway/__init__.py):

    gateway/http          bytes -> route -> handler; a body -> the tensors of a request, and back
    gateway/inference     the request is built, its memory found, admitted
    gateway/links         to the model's scheduler, until it has responded
    scheduler             hosting/ -> front.py -> batching.py: receive, decide, send
      requests/           it waits (queue.py)
      batchers/           what runs next (dispatch.py)
      instances/          and where (pool.py); given to a worker (executions.py)
    workers               instance.py: wait, execute, report
      batch/              execute.py orders: unpack.py -> backends/ call the model -> scatter.py;
                          backends that compute whole batches make them with runner.py

A local client's request: client/session.py finds the server and client/connection.py talks to it
(supervisor/local_clients/server.py at the other end); client/request/prepare.py places the tensors
in shared memory, client/inflight/ submits; scheduler/hosting/local_clients.py checks it.

A model's load: supervisor/models/manager.py takes the request and executes what lifecycle.py
decides, which has the orders of each model; orders.py has the steps of a load. load_planner.py
reads folder and configuration, model_version.py starts scheduler_process.py and
instance_processes.py.

A worker's death: supervisor/processes/table.py notices, instance_processes.py tells its scheduler
and starts another one with a backoff; scheduler/instances/results.py decides which of its requests
run again, alone, and which fail. A scheduler's: model_version.py.

The control plane, beside it: cli and config; supervisor owns the process tree (processes/, host/),
what is loaded (models/), whose memory is registered (regions/), programs on this host
(local_clients/), and tells what happens (events/). What all rooms share is in common; the words
between processes, and the memory that they share, are in ipc.
"""

__version__ = "0.1.0"
