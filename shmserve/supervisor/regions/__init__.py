"""Clients' shared memory: the registry of regions, their life, and quotas."""
