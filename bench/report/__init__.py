"""What was found: as JSON, as text, as a picture."""
