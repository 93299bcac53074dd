"""Shared memory: arenas, mappings of regions, POSIX objects, CUDA IPC handles."""
