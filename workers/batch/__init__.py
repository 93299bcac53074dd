"""The execution of a batch. Start with execute.py.

execute.py              the executor: unpack, run, scatter; retries
request.py              requests and responses of backends, and the unpacking of messages
runner.py ragged.py     whole batches for backends: gathered, padded or flat inputs, split outputs
scatter.py              outputs written to their destinations
response_stream.py      responses of decoupled models, and reports of a model's own metrics
"""
