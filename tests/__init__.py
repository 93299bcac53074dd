"""The tests: unit (pure), integration (a real server and real clients), faults (crimes against a
real server).
"""
