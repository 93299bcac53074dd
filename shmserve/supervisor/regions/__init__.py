"""The registry of clients' shared memory regions, and its quotas."""
