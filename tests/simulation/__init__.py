"""Deterministic simulation of the cores: one process, one thread, a virtual clock, one seed."""
