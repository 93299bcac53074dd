"""The source of a class that `shmserve.serve` sends to its server."""

import importlib.util
import linecache
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shmserve import class_file
from shmserve.errors import InvalidArgument

SCRIPT = '''\
"""A script."""
import numpy as np, json
from math import *
try:
    import not_installed
except ImportError:
    not_installed = None
import shmserve
from shmserve.model import FP32

LABELS, unused = ["a"], 1; OTHER = 2
LABELS += ["b"]
FACTOR = 1
with open(__file__) as file:
    TEXT = file.read()


def outer(x: "np.ndarray"):
    return later(x) * OTHER

result = json.loads("1")  # not the local variable of `predict`


@staticmethod
def decorated(): ...


class Model:
    """Its text says json."""

    scale = len(LABELS)
    FACTOR = FACTOR

    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
        result = {"unused": x}
        decorated
        return outer(result["unused"]) * sqrt(4) if not_installed is None else TEXT


def later(x): return x


def test(z):
    class Local:
        def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
            return later(x)

    class Closure:
        def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
            return x * z
    return Local, Closure


if __name__ == "__main__":
    OTHER = shmserve.serve(Model)
'''


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Yield a function that imports a text as a module that the server cannot import."""

    def execute(text: str) -> ModuleType:
        path = tmp_path / "a_script.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("a_script", path)
        assert spec and spec.loader
        module = sys.modules["a_script"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield execute
    sys.modules.pop("a_script", None)


def test_a_class_is_sent_with_definitions_that_it_uses(load: Callable[[str], ModuleType]) -> None:
    module = load(SCRIPT)
    text, file = class_file.source_of(module.Model), module.__file__
    script, sent = SCRIPT.splitlines(), text.splitlines()
    for line in sent:
        assert not line or line in script or line in ("OTHER = 2", f"__file__ = {file!r}")
    assert script.index("class Model:") == sent.index("class Model:")
    assert script.index("def later(x): return x") == sent.index("def later(x): return x")
    for unused in ("shmserve.serve", "result = json", "Local"):
        assert unused not in text
    namespace = {"__name__": "model", "__file__": __file__}
    exec(compile(text, "model.py", "exec"), namespace)
    assert namespace["Model"]().predict(3) == 12  # type: ignore[operator]


def test_a_class_finds_the_arguments_of_its_script(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["a_script.py", "--k=3"])
    module = load("import sys\nK = sys.argv[1]\nclass M:\n    def predict(self): return K\n")
    first, second, *_ = class_file.source_of(module.M).splitlines()
    assert "sys.argv = ['a_script.py', '--k=3']; import sys" in first
    assert second == "K = sys.argv[1]"


def test_classes_of_a_function_use_none_of_its_variables(load: Callable[[str], ModuleType]) -> None:
    local, closure = load(SCRIPT).test(5)
    text = class_file.source_of(local)
    assert text.splitlines().index("    class Local:") == SCRIPT.splitlines().index(
        "    class Local:"
    )
    with pytest.raises(InvalidArgument, match=r"'Closure' uses names .* not define: z; define"):
        class_file.source_of(closure)


OBJECTS = """
import argparse, contextlib, random
with contextlib.suppress(ImportError):
    from math import *

parser = argparse.ArgumentParser()
parser.add_argument("--k", type=int, default=5)
arguments = parser.parse_args([])
labels = []
for label in "ab":
    labels.append(label)
labels[1] = "c"
with contextlib.suppress(KeyError):
    labels.append("d")
labels.copy().append("e")
generator = random.Random()
generator.seed(3)
random.shuffle(unrelated := [floor(1)])
match (1, total := 2):
    case (one, 2):
        pass

class M:
    def predict(self):
        return arguments.k, "".join(labels), generator.random(), one + total, M.factor

M.factor = 7
result = [3]
loop = range(1 // len(result))
"""


def test_objects_are_sent_with_the_calls_that_change_them(
    load: Callable[[str], ModuleType],
) -> None:
    module = load(OBJECTS)
    namespace: dict[str, Any] = {"__name__": "model"}
    text = class_file.source_of(module.M)
    exec(text, namespace)
    generator = random.Random(3)
    assert namespace["M"]().predict() == (5, "acd", generator.random(), 3, 7)
    assert "unrelated" not in text and "loop" not in text


@pytest.mark.parametrize(
    "change",
    ["M.factor += 1", "M.other: int = 1", "for i in range(3): M.other = i", "M.setup()"],
)
def test_changes_of_attributes_follow_the_class(
    change: str, load: Callable[[str], ModuleType]
) -> None:
    script = "class M:\n    other = 0\n    @classmethod\n    def setup(cls): cls.other = 1\n"
    module = load(f"{script}M.factor = 7\n{change}\n")
    exec(class_file.source_of(module.M), namespace := {"__name__": "model"})
    sent_class: Any = namespace["M"]
    assert (sent_class.factor, sent_class.other) == (module.M.factor, module.M.other)


def test_a_class_is_sent_from_code_that_runs_in_its_module(
    load: Callable[[str], ModuleType],
) -> None:
    module = load("k = 1\nclass M:\n    def predict(self): return k\n")
    exec("from shmserve import class_file; text = class_file.source_of(M)", vars(module))
    assert "k = 1\nclass M" in module.text


def test_a_class_is_sent_as_it_was_reloaded(tmp_path: Path) -> None:
    file = tmp_path / "reloaded.py"
    file.write_text("class M: n = 1\n")
    spec = importlib.util.spec_from_file_location("reloaded", file)
    assert spec is not None and spec.loader is not None
    sys.modules["reloaded"] = module = importlib.util.module_from_spec(spec)
    try:
        for text in ("class M: n = 1\n", "m = 22\nclass M: n = m\n"):
            file.write_text(text)
            exec(compile(text, str(file), "exec"), vars(module))
            assert class_file.source_of(module.M).endswith(text)
    finally:
        del sys.modules["reloaded"]


@pytest.mark.parametrize("separator", ["\f\n", "# a\x85b\n", "TEXT = 'a\u2028b'\n", "\r\n"])
def test_separators_inside_a_line_end_no_line(
    separator: str, load: Callable[[str], ModuleType]
) -> None:
    script = "def one():\n    return 1\nclass M:\n    def predict(self): return one()\n"
    text = class_file.source_of(load(separator + script).M)
    exec(text, namespace := {"__name__": "model"})
    assert namespace["M"]().predict() == 1  # type: ignore[operator]


@pytest.mark.parametrize(
    "script",
    [
        "class M: n = 1\nclass M: n = 2\n",
        "if K := 1:\n    class M:\n        n = 2\n        def predict(self): return K\n"
        "else:\n    class M:\n        def predict(self): return 1\n",
    ],
)
def test_the_definition_that_was_executed_is_sent(
    script: str, load: Callable[[str], ModuleType]
) -> None:
    exec(class_file.source_of(load(script).M), namespace := {"__name__": "model"})
    assert namespace["M"].n == 2  # type: ignore[attr-defined]


def test_strings_of_an_indented_class_keep_their_lines(load: Callable[[str], ModuleType]) -> None:
    script = 'def f():\n    class M:\n        text = """\n    a\n b\nc"""\n    return M\nM = f()\n'
    exec(class_file.source_of(load(script).M), namespace := {"__name__": "model"})
    assert namespace["M"].text == "\n    a\n b\nc"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "script",
    [
        "if __name__:\n    k = 1\nclass M:\n    def predict(self): return k\n",
        "def f(): globals()['k'] = 1\nf()\nclass M:\n    def predict(self): return k\n",
        "k = 1\ndef f(k):\n    class M:\n        def predict(self): return k\n    return M\n"
        "M = f(2)\n",
    ],
)
def test_variables_that_are_not_sent_are_refused(
    script: str, load: Callable[[str], ModuleType]
) -> None:
    with pytest.raises(InvalidArgument, match=r"'M' uses names .* not define: k; define"):
        class_file.source_of(load(script).M)


def test_statements_after_the_call_of_serve_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from shmserve import class_file\nvalues = [1]\n"
        "class M:\n    def predict(self): return values\n"
        "print(class_file.source_of(M))\nvalues.clear()\nvalues = []\n"
    )
    command = [sys.executable, str(tmp_path / "script.py")]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    exec(printed.stdout, namespace := {"__name__": "model"})
    assert namespace["M"]().predict() == [1]  # type: ignore[operator]


def test_lines_are_a_scripts_with_a_future_import(load: Callable[[str], ModuleType]) -> None:
    script = "from __future__ import annotations\n" + SCRIPT.replace('"""A script."""\n', "")
    text = class_file.source_of(load(script).Model)
    assert text.startswith("from __future__ import annotations; __file__ = ")
    assert text.splitlines().index("class Model:") == script.splitlines().index("class Model:")


def test_a_class_of_a_notebook_is_found_in_the_last_cell_that_defines_it() -> None:
    cells = [
        "",
        "from shmserve.model import FP32\nimport numpy as np",
        "class Scaled:\n    factor = 1",
        "import shmserve\nif 0:\n  with shmserve.serve(Scaled): FACTOR = 5",
        "%matplotlib inline\nimport math\nfiles = !ls\n  !echo $x\nmath?\nFACTOR = math.floor(3.5)",
        "%%bash\nFACTOR=9",
        "%%time\n!pip list\ndef decorated(cls): return cls\n\n@decorated\nclass Scaled:\n"
        "    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:\n"
        "        return x * FACTOR",
    ]
    notebook = ModuleType("a_notebook")  # a kernel's __main__ has no file
    sys.modules["a_notebook"] = notebook
    try:
        for cell in cells:
            exec(re.sub("(?m)^ *[%!].*|.*[!?].*", "", cell), vars(notebook))
        notebook.In = cells  # type: ignore[attr-defined]
        text = class_file.source_of(notebook.Scaled)
    finally:
        del sys.modules["a_notebook"]
    assert "factor = 1" not in text
    namespace = {"__name__": "model"}
    exec(text, namespace)
    assert namespace["Scaled"]().predict(3) == 9  # type: ignore[operator]


@pytest.mark.parametrize(
    ("pattern", "file"),
    [("<python-input-{}>", None), ("/tmp/marimo_1/__marimo__cell_{}_.py", "/tmp/notebook.py")],
)
def test_a_class_of_a_cell_is_found_in_linecache(
    pattern: str, file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = ["from shmserve.model import FP32", "FACTOR = 3", "class Scaled:\n    n = 1"]
    cells += ["class Base:\n    def predict(self, x): return x * FACTOR"]
    cells += ["class Scaled(Base): factor = 1", "unused = 1"]
    notebook = ModuleType("a_notebook")
    if file is not None:
        notebook.__file__ = file
    monkeypatch.setitem(sys.modules, "a_notebook", notebook)
    monkeypatch.setitem(linecache.cache, "<attrs generated>", (1, None, ["FACTOR = 9"], ""))
    for index, text in enumerate(cells):
        name = pattern.format(index)
        lines = text.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, name, (len(text), None, lines, name))
        exec(compile(text, name, "exec"), vars(notebook))
    source = class_file.source_of(notebook.Scaled)
    assert "n = 1" not in source and "unused" not in source
    namespace = {"__name__": "model"}
    exec(source, namespace)
    assert namespace["Scaled"]().predict(3) == 9  # type: ignore[operator]


def test_relative_imports_of_a_class_know_their_package(load: Callable[[str], ModuleType]) -> None:
    script = "from __future__ import annotations\n" + SCRIPT
    module = load(script.replace('"""A script."""\n', ""))
    module.__package__ = "collections"
    source = class_file.source_of(module.Model) + "from .abc import Sized\n"
    namespace = {"__name__": "model", "__file__": __file__}
    exec(source, namespace)
    assert "Sized" in namespace


def test_a_class_without_a_class_statement_is_refused(tmp_path: Path) -> None:
    made = type("Made", (), {})
    with pytest.raises(
        InvalidArgument, match=r"module 'tests\.unit\.test_class_file' has no .* 'Made'"
    ):
        class_file.write_class_file(made, tmp_path, {})


@pytest.mark.parametrize("name", ["json.a_script", "json.tool", "json"])
def test_the_source_of_a_module_that_its_name_does_not_import_is_sent(
    name: str, load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load("class M:\n    n = 3\n")
    monkeypatch.setitem(sys.modules, name, module)
    module.M.__module__ = name
    assert "n = 3" in class_file.write_class_file(module.M, tmp_path, {}).read_text()


def test_the_source_of_a_program_in_a_folder_is_sent(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text(
        "import pathlib\nfrom shmserve import class_file\nclass M: n = 3\n"
        "print(class_file.write_class_file(M, pathlib.Path(__file__).parent, {}).read_text())\n"
    )
    command = [sys.executable, str(tmp_path)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert "class M: n = 3" in printed.stdout
