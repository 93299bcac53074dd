"""Memory that processes share: arenas, mappings of regions, CUDA handles."""
