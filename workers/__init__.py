"""The data plane: the processes that run models and alone touch clients' regions."""
