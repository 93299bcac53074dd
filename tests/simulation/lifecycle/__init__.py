"""Deterministic simulation of the lifecycle's core: a seed draws orders, processes and gateways."""
