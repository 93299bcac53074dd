"""The generated protobuf code is that of the schemas beside it."""

from pathlib import Path

import pytest

import shmserve.proto
from shmserve.proto.compile import generate

_FOLDER = Path(shmserve.proto.__file__).parent
_SCHEMAS = sorted(path.stem for path in _FOLDER.glob("*.proto"))


@pytest.mark.parametrize("name", _SCHEMAS)
def test_the_generated_code_is_current(name: str) -> None:
    module_text = generate(_FOLDER / f"{name}.proto")
    for file in (f"{name}.binpb", f"{name}_pb2.py"):
        assert module_text[file] == (_FOLDER / file).read_bytes()
