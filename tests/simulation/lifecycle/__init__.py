"""Deterministic simulation of the lifecycle's core: orders, processes and gateways that one seed
draws."""
