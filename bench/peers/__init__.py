"""A comparison with other Python model servers: the same two models in each, under the same load.

The load generator is bench/load/closed_loop.py.

measure       `python -m bench peers`: installs, starts, loads and prints
servers       one program for each server, run in the server's own environment
"""
