"""A model's instances: their states, the dispatch of requests to them, and the results."""
