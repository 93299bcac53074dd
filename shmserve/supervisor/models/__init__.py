"""What is loaded: from a model folder to a version that serves, and back."""
