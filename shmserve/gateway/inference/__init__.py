"""Inference requests of every protocol, between the decoders and encoders of HTTP and gRPC.

The objects that represent one request, in order (paths as in architecture.md):

    HttpRequest        gateway/http/messages.py          the head and the body (gRPC: a message)
    InferRequest       gateway/inference/request.py      decoded: inputs, outputs, parameters
    BuiltRequest       gateway/inference/prepare.py      checked, with packed tensors
    Submit             ipc/messages/inference.py         the message to the scheduler
    UnaryInference, StreamingInference
                       gateway/inference/inference.py    in flight, until the last response
    ScheduledRequest   scheduler/requests/request.py     in the scheduler, from arrival to response
    Work               ipc/messages/inference.py         a part of the message `Execute` to a worker
    WorkerRequest      workers/links.py                  in the worker: cancellation, flow control
    Request            workers/batch/request.py          what a backend executes

Its response:

    Finished, Responded, Failed
                       ipc/messages/inference.py         the message to the gateway
    Inferred           ipc/tensors/inference.py          unpacked outputs
    HttpResponse       gateway/http/messages.py          the head and the body (gRPC: a message)
"""
