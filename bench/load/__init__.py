"""Who asks: each a process of its own, the same for both servers."""
