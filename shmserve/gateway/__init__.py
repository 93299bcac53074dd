"""The gateways: a request comes in, an answer goes out. HTTP lives here, gRPC in grpc.

process.py, main.py                a gateway's process, and the HTTP one
crowds.py, connections.py          who may connect; requests one after the other
requests.py, bodies.py, replies.py, compression.py        HTTP as handlers see it
app.py                             the route table: authorise, handle, errors to answers
infer.py                           the hot path: submit, wait, encode
  intake.py, plans.py              a body as far as it is read; what is like one before
  codec.py, values.py, jsonnames.py, jsonfaults.py        the JSON of a request, checked
  jsontensors.py, bigjson.py       tensors as JSON
  assembly.py                      its tensors, placed, and admitted to the model
  answers.py                       the response
control.py, repository.py, memory.py, cuda_memory.py, log_settings.py, metrics.py
                                   the other APIs
absent.py                          and those that Triton has and this server does not
state.py                           what one gateway holds, for every listener:
  models.py, regions.py            what may be called, and where tensors may lie
  dispatch.py, supervisor.py, links.py                    schedulers, the supervisor, sockets
  settings.py                      what it was told at its start
callers.py, peers.py, sock_diag.py, authorisation.py      who asks, and what it may
trim.py, procfs.py                 memory given back; what /proc says
"""
