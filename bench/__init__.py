"""The benchmark: shmserve and a real Triton on one machine, under Triton's own load generator."""
