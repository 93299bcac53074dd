"""The handlers of the routes beside inference: HTTP around what gateway/api does."""
