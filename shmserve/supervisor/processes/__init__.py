"""Child processes, the zygotes that fork them, and the control socket."""
