"""The load generators, each a process of its own, which send the same load to both servers."""
