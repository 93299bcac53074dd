"""A model's instances: which are free, what each one runs, and the results."""
