"""Business logic scripting: a model that calls other models is a client of their schedulers."""
