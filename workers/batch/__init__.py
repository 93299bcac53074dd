"""The execution of a batch.

execute.py           the executor: unpack, call the backend, write, reply; failures
request.py           a request as the backend receives it; `Unpacker`
runner.py            one batch of tensors for the model, for native, onnx and pytorch
ragged.py            padding, and inputs of ragged batches
scatter.py           outputs to their memory, and responses as messages
response_stream.py   the responses of decoupled models, and metrics of the model
"""
