"""The pages of the guide: their blocks of code, by what the first line of each says of it.

```python blur.py        a file, which is written into the page's folder before all else
```pbtxt models/m/config.pbtxt
```sh serve              a server is started by this command; one that runs is stopped
```sh run                a program of the shell, asked of that server; exit status 0
```python run            the same in Python, with the names of those before it on the page
```text prints           the end of what the block before prints; `...` stands for anything
```sh, ```python, ...    to read; flags of `shmserve` are checked all the same
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "shmserve" / "guide"
PAGES = (ROOT / "README.md", *sorted(GUIDE.glob("*.md")))
_FENCE = re.compile(r"^```(\w*) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code. `use` is the rest of its first line after the language."""

    language: str
    use: str
    text: str

    @property
    def is_file(self) -> bool:
        return "." in self.use


def blocks(page: Path) -> list[Block]:
    return [Block(*fields) for fields in _FENCE.findall(page.read_text())]
