"""shmserve: a model server for one host whose clients pass tensors through shared memory.

One HTTP request, by room (gRPC comes in by gateway/grpc, a program on this host by client):

    gateway/http          bytes -> route -> handler; a body -> the tensors of a request, and back
    gateway/inference     the request is built, its memory found, admitted, answered
    gateway/links         to the model's scheduler, until it has answered
    scheduler             requests/ wait, batchers/ choose what runs next, instances/ run it
    workers               batch/ gathers, backends/ call the model, batch/ scatters

The control plane, beside it: cli and config; supervisor owns the process tree (processes/, host/),
what is loaded (models/), whose memory is registered (regions/), programs on this host
(local_clients/), and tells what happens (events/). What all rooms share is in common; the words
between processes, and the memory that they share, are in ipc.
"""

__version__ = "0.1.0"
