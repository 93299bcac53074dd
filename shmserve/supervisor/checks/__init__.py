"""What a server needs of its host, as a table of small checks. `shmserve doctor` prints all of it;
the start of a server looks at what may differ from one start to the next.

table.py      the checks in their order, and how they are run
software.py   packages, the HTTP parser, systemd's units
memory.py     /dev/shm, what is left in it, limits of memory
limits.py     descriptors, processes, processors, the user, the clock
devices.py    accelerators; cuda_probe.py: two processes that share memory on one
places.py     run directory, ports, model repositories
peer.py       whether another process can share memory with the server

A check is two functions: one gathers facts and judges nothing, the other is pure.
"""
