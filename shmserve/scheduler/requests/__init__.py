"""Requests inside a scheduler: their states, the queue, and one response each."""
