"""The data plane: worker processes, which run models and map clients' regions.

main.py             the process: it loads one instance of one model, and serves it in a loop
context.py          start parameters and resources of an instance, and the errors of its model
environment.py      the model's own Python environment: unpack, check and enter it
links.py            links to the scheduler and to the supervisor, and the wait of the loop
batch/execute.py    the executor of a batch: unpack, run, scatter; retries
  backend_request.py
                    requests and responses of backends, and the unpacking of messages
  runner.py         whole batches for backends: gathered, padded or flat (ragged.py) inputs
  scatter.py        outputs written to their destinations
  response_stream.py
                    responses of decoupled models, and reports of a model's own metrics
tensor_specs.py     descriptions of a file's inputs and outputs, and of generated ones
sequences.py        control inputs and states of sequences, and the executor of their batches
backends/           the interface of a backend, and the built-in backends
bls/                business logic scripting: a model's calls of other models
memory/             outputs in the arena, device memory, leases of workspaces, memory plans
device.py           compute devices: the CPU or an accelerator; torch preloaded by a zygote
user_code.py        code of models: files imported for backends, its event loop, its errors as text
"""
