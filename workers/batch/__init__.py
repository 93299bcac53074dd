"""The execution of a batch.

execute.py           the executor: unpack, call the backend, write outputs, reply, retry
backend_request.py   requests as backends receive them, unpacked from the scheduler's messages
runner.py            inputs gathered, and outputs split, for backends native, onnx and pytorch
ragged.py            padding, and inputs of ragged batches
scatter.py           outputs written to their destinations; the schema and data of responses
response_stream.py   the responses of decoupled models, and metrics of the model
"""
