"""The gateways: processes in which the clients' requests come in, over HTTP or over gRPC.

An HTTP request, file by file:

    http/connection/protocol.py     bytes -> requests, one after the other
    http/routes.py                  the route table: authorise, handle, errors to responses
    http/infer.py                   inference; streaming/ for many responses to a request
    http/infer_body.py, body.py     as much of the body as is wanted, when it is wanted
    http/json/fingerprint.py        a header that came before: what follows is known, else
    http/json/infer_request.py      JSON -> inference/request.py, checked
    inference/builder.py            its tensors placed, admitted to its model (resources.py)
    inference/pipeline.py           whose regions they are; the message to the scheduler
    links/dispatcher.py             submitted, until the scheduler has responded
    http/json/infer_response.py     the response as JSON and binary tensors
    http/response.py                written

A gRPC request:

    grpc/core/direct_unary.py       a call and its message, without a task; stream.py: many in one
    grpc/service.py                 the table of RPCs: authorise, handle, errors to a status
    grpc/infer.py                   to its scheduler and back
    grpc/wire/fingerprint.py        a head that came before, else
    grpc/wire/request.py            protobuf -> inference/request.py, checked
    inference/ and links/           as above
    grpc/wire/response.py           the response as protobuf

    process.py, settings.py         a gateway's process, and what it is told at its start
    context.py                      what it holds (model_table.py, region_table.py)
    client_identity.py              who asks, and what it may
    inference/, api/                inference and the other APIs, for any protocol
    http/handlers/, grpc/admin/     what HTTP and gRPC make of these
"""
