"""shmserve: a model server for one host whose clients pass tensors through shared memory.

One HTTP request, by file (gRPC and programs on this host come in through gateway/grpc and client):

    gateway/connections.py, app.py, infer.py    bytes -> route -> handler, and back to bytes
    gateway/intake.py, codec.py, assembly.py    body -> the tensors of a request, admitted
    gateway/dispatch.py                         to the model's scheduler, until that answers
    scheduler/loop.py, core.py                  receive, decide, send
    scheduler/backlog.py, dynamic.py, pool.py   wait, form a batch, choose an instance
    workers/loop.py, batch.py                   tensors -> one batch -> the model -> outputs
    gateway/answers.py, replies.py              an answer -> a response

The control plane, beside it: cli.py, flags.py and config.py; supervisor.py owns the process tree
(children.py, zygote.py, listening.py, gateways.py, local clients.py), models.py what is loaded
(repository.py, planning.py, deployment.py), regions.py whose memory is registered (trust.py,
region_ledger.py). ipc has the words and the memory that processes share.
"""

__version__ = "0.1.0"
