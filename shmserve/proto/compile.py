"""`python -m shmserve.proto.compile`: the generated files of each .proto (needs grpcio-tools).

NAME.binpb       the schema, as a serialized FileDescriptorProto
NAME_pb2.py      the module that loads it
NAME_pb2.pyi     the types of the module
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2

_HERE = Path(__file__).resolve().parent

_MODULE = '''"""Generated from {name}.proto by `python -m shmserve.proto.compile`."""

from pathlib import Path

from shmserve.proto import load

globals().update(load(Path(__file__).with_name("{name}.binpb")))
'''
_STUB_HEAD = """# Generated from {name}.proto by `python -m shmserve.proto.compile`.
# ruff: noqa
# mypy: ignore-errors
# fmt: off
"""


def generate(proto: Path) -> dict[str, bytes]:
    """Return the generated files of a .proto file: {file name: bytes}.

    Raises:
        subprocess.CalledProcessError: protoc rejects the file; its message is on stderr.
    """
    with tempfile.TemporaryDirectory() as scratch:
        descriptors = Path(scratch, "set.bin")
        arguments = [f"-I{proto.parent}", f"--pyi_out={scratch}"]
        arguments += [f"--descriptor_set_out={descriptors}", proto.name]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes())
        stub = Path(scratch, f"{proto.stem}_pb2.pyi").read_text()
    # protoc writes imports as if this folder were on sys.path.
    stub = re.sub(r"(?m)^import (\w+_pb2) as", r"from shmserve.proto import \1 as", stub)
    return {
        f"{proto.stem}.binpb": files.file[0].SerializeToString(deterministic=True),
        f"{proto.stem}_pb2.py": _MODULE.format(name=proto.stem).encode(),
        f"{proto.stem}_pb2.pyi": (_STUB_HEAD.format(name=proto.stem) + stub).encode(),
    }


def main() -> None:
    """Regenerate the modules and stubs of all .proto files in this folder."""
    for proto in sorted(_HERE.glob("*.proto")):
        for name, content in generate(proto).items():
            (_HERE / name).write_bytes(content)
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
