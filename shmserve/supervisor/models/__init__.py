"""Model management: from a folder of the repository to a version that serves, and back."""
