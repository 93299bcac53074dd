"""Code that several rooms share: access control, metrics, limits, names."""
