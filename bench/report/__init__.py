"""The results: as JSON, as text, and as a picture."""
