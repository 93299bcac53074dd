"""A comparison with other Python model servers: the same two models in each, under the same load.

measure       `python -m bench peers`: installs, starts, loads and prints
load          the load generator: requests over HTTP at a fixed concurrency
servers       one program for each server, run in the server's own environment
"""
