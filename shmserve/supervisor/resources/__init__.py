"""What the models of the server share: the response cache's bytes, workspaces."""
