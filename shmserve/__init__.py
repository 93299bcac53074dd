"""shmserve: a model server for one host whose clients pass tensors through shared memory."""

__version__ = "0.1.0"
