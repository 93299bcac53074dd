"""The model: its folder, its weights, its keys and values."""
