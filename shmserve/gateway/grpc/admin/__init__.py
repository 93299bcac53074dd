"""The RPCs beside inference: metadata, repository, shared memory, logging."""
