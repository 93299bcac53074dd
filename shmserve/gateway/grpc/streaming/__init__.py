"""ModelStreamInfer: call.py has the call, responses.py what comes of decoupled models."""
