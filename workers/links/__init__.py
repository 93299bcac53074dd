"""The links of a worker to other processes."""
