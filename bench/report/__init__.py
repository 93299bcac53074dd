"""The results of the benchmark: as JSON, as text, and as a picture."""
