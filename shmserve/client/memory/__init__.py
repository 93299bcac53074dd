"""The client's own memory: segments, regions, views, CUDA, DLPack."""
