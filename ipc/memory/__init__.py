"""Memory that processes share. Start with arena.py.

arena.py        sealed memfds for the tensors of their owner, with an allocator
lent.py         reference-counted blocks that one process owns and other processes read
mappings.py     memory of other processes, mapped at its first use
posix_shm.py    POSIX shared memory objects of clients
cuda_ipc.py     device memory, exported and opened by CUDA IPC handles
"""
