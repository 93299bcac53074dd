"""The model's instances: who is free, what each one runs, how long that takes."""
