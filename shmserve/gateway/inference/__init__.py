"""Inference requests of every protocol, between the decoders and encoders of HTTP and gRPC.

The objects that represent one request, in order (paths as in architecture.md):

    HttpRequest        gateway/http/messages.py          the head and the body (gRPC: a message)
    InferRequest       gateway/inference/infer_request.py
                                                     decoded: inputs, outputs, parameters
    BuiltRequest       gateway/inference/prepare.py      checked, with packed tensors
    Submit             ipc/messages/inference.py         the message to the scheduler
    UnaryInference, StreamingInference
                       gateway/inference/in_flight.py    in flight, until the last response
    ScheduledRequest   scheduler/requests/scheduled.py   in the scheduler, from arrival to response
    Work               ipc/messages/inference.py         a part of the message `Execute` to a worker
    WorkerRequest      workers/links.py                  in the worker: cancellation, flow control
    Request            workers/batch/backend_request.py  what a backend executes

Its response:

    Finished, Responded, Failed
                       ipc/messages/inference.py         the message to the gateway
    Inferred           ipc/tensors/schemas.py            unpacked outputs
    HttpResponse       gateway/http/messages.py          the head and the body (gRPC: a message)
"""
