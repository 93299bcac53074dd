"""Generated from model_config.proto by `python -m shmserve.proto.compile`."""

from pathlib import Path

from shmserve.proto import load

globals().update(load(Path(__file__).with_name("model_config.binpb")))
