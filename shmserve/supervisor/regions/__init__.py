"""The registry of clients' shared memory regions, their lifetimes, and quotas."""
