"""The handlers of the routes beside inference: gateway/api over HTTP."""
