"""Code that several rooms share: access control, counters, limits, names."""
