"""The file that `shmserve.serve` generates from a class for the process of its server.

The file of an importable class imports it. For a class of a script or a notebook, the file has the
source of the class, and of the statements of its module that the class uses.

write_class_file   generate the file
source_of          the selection of the statements
_statements        the statements of a script or a notebook that the program has completed
_used_names        the names that a statement uses; _bound_names, _changed_names: those it changes
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import os
import re
import symtable
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from operator import attrgetter, itemgetter
from pathlib import Path
from types import CodeType

from shmserve.errors import InvalidArgument

Sources = dict[Path, Path]  # generated file -> the user's file with the class

# Variables that Python sets in each module.
_MODULE_NAMES = ("__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__")


def write_class_file(cls: type, folder: Path, sources: Sources) -> Path:
    """Generate a file that imports a class, or has a copy of a script's class; return its path.

    Args:
        cls: The class of a model.
        folder: The folder in which a folder of the file is made.
        sources: Receives the path of the user's file if the generated file has a copy of the class.

    Raises:
        InvalidArgument: The source cannot be found or is incomplete, or a file of this name exists.
    """
    package = cls.__module__.partition(".")[0]
    path = folder / f"class_{cls.__name__}" / f"{cls.__name__.lower()}.py"
    if _is_importable(cls.__module__) and "<locals>" not in cls.__qualname__:
        try:
            attrgetter(cls.__qualname__)(sys.modules[cls.__module__])
        except AttributeError:
            raise InvalidArgument(
                f"module '{cls.__module__}' has no class '{cls.__qualname__}': define it by a "
                "class statement in a file"
            ) from None
        text = f"__file__ = {_user_file(cls)!r}\n"
        text += f"from {cls.__module__} import {cls.__qualname__.partition('.')[0]}\n"
        if "." in cls.__qualname__:
            text += f"{cls.__name__} = {cls.__qualname__}\n"
        if package == path.stem:  # the generated file has the module's name, and is found first
            parent_dir = str(path.resolve().parent)
            text = f"import sys\nsys.path.remove({parent_dir!r})\ndel sys.modules[__name__]\n{text}"
    else:
        text = source_of(cls)
        sources[path] = _source_file(cls) or path
    if path.parent.exists():
        raise InvalidArgument(f"two classes have the name '{cls.__name__}': rename one of them")
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    return path


def _is_importable(module: str) -> bool:
    """Check whether another process can import the file of a module by the module's name.

    pytest's import mode `importlib` names a module after its folders, which need not be on the
    path.
    """
    if module == "__main__":  # another process has its own, also if a file `__main__.py` is found
        return False
    names, path, origin = module.split("."), None, None
    for count in range(1, len(names) + 1):
        spec = PathFinder.find_spec(".".join(names[:count]), path)
        if spec is None:
            return False
        path, origin = spec.submodule_search_locations or [], spec.origin
    file = getattr(sys.modules[module], "__file__", None)
    return file is not None and os.path.realpath(file) == os.path.realpath(origin or "")


def source_of(cls: type) -> str:
    """Return the source of a class, and of the definitions of its module that the class uses.

    Each line has the number that it has in the user's file, unless the file is a notebook.

    Raises:
        InvalidArgument: The source cannot be found, or uses a name that is not at the top level.
    """
    try:
        class_line, class_text = _read_class_source(cls)
        class_tree = ast.parse(class_text)
    except (OSError, TypeError, SyntaxError) as error:
        message = (
            f"the source of class '{cls.__name__}' cannot be found: define it in a file, or in a "
            "cell without %%"
        )
        raise InvalidArgument(message) from error
    statements = list(_statements(cls))
    used_names = {"*", cls.__name__, *_used_names(class_tree), *_annotation_names(class_tree)}
    # In a class, `scale = scale` reads the module's value.
    for node in ast.walk(class_tree):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            values = [part.value for part in node.body if isinstance(part, ast.Assign)]
            used_names = used_names.union(*map(_used_names, values))
    names_of = {node: _bound_names(node) for node, _ in statements}
    # `model.eval()` changes an object of the script, `plt.show()` is a call of a module.
    objects = set().union(*(names_of[node] for node in names_of if not _is_definition(node)))
    for node in names_of:
        names_of[node] |= objects & _changed_names(node)
    used_statements: list[ast.stmt] = []
    while True:
        definitions = [
            node
            for node, names in names_of.items()
            if node not in used_statements and not used_names.isdisjoint(names)
        ]
        if not definitions:
            break
        used_statements += definitions
        used_names |= {name for node in definitions for name in _used_names(node)}
        used_names |= {name for node in definitions for name in _annotation_names(node)}
    module_names = vars(sys.modules[cls.__module__]).keys()
    known_names = {*vars(builtins), *_MODULE_NAMES, cls.__name__}.union(
        *map(names_of.__getitem__, used_statements)
    )
    if "*" in known_names:
        known_names |= module_names
    unknown_names = (_used_names(class_tree) | (used_names & module_names)) - known_names
    if unknown_names := unknown_names | _variables_of_functions(cls):
        raise InvalidArgument(
            f"class '{cls.__name__}' uses names that its module does not define: "
            f"{', '.join(sorted(unknown_names))}; define them at the top level or in the class"
        )
    sources: list[tuple[int, str]] = []
    changes: list[tuple[int, str]] = []  # of attributes, after the class
    for node, lines in statements:
        if cls.__name__ in _assigned_names(node):
            changes.clear()
        elif cls.__name__ in names_of[node]:
            changes.append(_statement_source(node, lines))
        elif node in used_statements:
            sources.append(_statement_source(node, lines))
    sources += [(class_line, class_text), *changes]
    if "<locals>" not in cls.__qualname__ and _cells(cls) is None:
        sources.sort(key=itemgetter(0))
    is_future = any("__future__" in ast.unparse(node) for node, _ in statements)
    header = ["from __future__ import annotations"] if is_future else []
    header.append(f"__file__ = {_user_file(cls)!r}")  # the class may open files beside its own
    if any("argparse" in source or "argv" in source for _, source in sources):
        header.append(f"import sys; sys.argv = {sys.argv!r}")
    if package := sys.modules[cls.__module__].__package__:  # relative imports need it
        header.append(f"__package__ = {package!r}")
    is_first_line_free = sources[0][0] > 1 or not sources[0][1].startswith(("import ", "from "))
    text = "; ".join(header) + ("\n" if is_first_line_free else "; ")
    for line, source in sources:
        text += "\n" * (line - 1 - text.count("\n")) + source.rstrip("\n") + "\n"
    return text


def _read_class_source(cls: type) -> tuple[int, str]:
    """Return the number of the first line of a class in its file or cell, and its lines.

    The lines of an indented class begin with `if True:`. Dedenting would change long strings.

    Raises:
        OSError: The class is neither in a file nor in a cell.
    """
    method_lines = [code.co_firstlineno for code in _codes(cls)]
    for text in reversed(_texts(cls)):  # a class may be defined again in a later cell
        tree, lines = _parse(text)
        classes = [
            (node.lineno <= line <= (node.end_lineno or 0), node.lineno, node)
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__
            for line in method_lines or [0]
        ]
        if classes:
            line, source = _statement_source(max(classes, key=itemgetter(0, 1))[2], lines)
            return (line - 1, f"if True:\n{source}") if source[:1].isspace() else (line, source)
    raise OSError(f"no class {cls.__name__}")


def _codes(cls: type) -> list[CodeType]:
    """Return the code of the methods in the text of a class."""
    methods = [inspect.unwrap(value) for value in vars(cls).values() if callable(value)]
    codes = [method.__code__ for method in methods if inspect.isfunction(method)]
    return [code for code in codes if code.co_qualname.startswith(f"{cls.__qualname__}.")]


def _variables_of_functions(cls: type) -> set[str]:
    """Return the variables of enclosing functions that the methods of a class use."""
    is_local = "<locals>" in cls.__qualname__
    return {name for code in _codes(cls) for name in code.co_freevars if is_local} - {"__class__"}


def _user_file(cls: type) -> str:
    """Return the path of the file that defines a class; for a notebook, a path in its folder."""
    return os.path.abspath(_source_file(cls) or "notebook.py")


def _source_file(cls: type) -> Path | None:
    """Return the file that defines a class, or None for a class of a notebook."""
    file = getattr(sys.modules[cls.__module__], "__file__", None)
    return None if file is None else Path(file)


def _cells(cls: type) -> list[str] | None:
    """Return the cells of the notebook in which a class is defined, or None.

    Jupyter lists them. Marimo, and the prompt of Python 3.13, store each cell in `linecache` as a
    file that does not exist.
    """
    cells = vars(sys.modules[cls.__module__]).get("In")
    if isinstance(cells, list):
        return cells
    owners = [base for base in cls.__mro__ if base.__module__ == cls.__module__]
    codes = [getattr(value, "__code__", None) for base in owners for value in vars(base).values()]
    cell_file = next((code.co_filename for code in codes if code), "")
    prefix = re.match(r".*/|<[a-z-]+", cell_file)
    if prefix is None or cell_file == str(_source_file(cls)) or cell_file not in linecache.cache:
        return None
    files = [
        file
        for file, entry in linecache.cache.items()
        if file.startswith(prefix[0]) and len(entry) > 1 and entry[1] is None and file != cell_file
    ]
    return ["".join(linecache.getlines(file)) for file in [*files, cell_file]]


def _texts(cls: type) -> list[str]:
    """Return the text of the file of a class, or the texts of a notebook's cells."""
    if cells := _cells(cls):
        return cells
    file = str(_source_file(cls))
    linecache.checkcache(file)  # the module may have been changed and reloaded
    return ["".join(linecache.getlines(file))]


def _parse(text: str) -> tuple[ast.Module, list[str]]:
    """Return the tree and the lines of a file or cell, without IPython's magic commands.

    The tree of a cell that is not Python is empty.
    """
    lines = re.sub(r"\A%%(time|capture)\b.*", "", text).split("\n")
    while True:
        try:
            return ast.parse("\n".join(lines)), lines
        except SyntaxError as error:
            index = (error.lineno or 1) - 1
            is_magic = index < len(lines) and re.match(
                r"\s*([\w, ]+= *)?[%!?](?!%)|.*\?\s*$", lines[index]
            )
            if not is_magic:
                return ast.Module([], []), lines
            lines[index] = ""


def _statements(cls: type) -> Iterator[tuple[ast.stmt, list[str]]]:
    """Yield the top-level statements of the module of a class, or of a notebook's cells.

    Statements that the program has not completed are omitted, and so are statements that start a
    server, and `if __name__ == "__main__":`.

    Yields:
        A statement, and the lines of its file or cell.
    """
    variables, running_line = vars(sys.modules[cls.__module__]), sys.maxsize
    texts, is_file = _texts(cls), _cells(cls) is None
    for frame, file, line, *_ in inspect.stack(0):
        is_source = os.path.abspath(file) == _user_file(cls) if is_file else "In" in variables
        if is_source and frame.f_globals is frame.f_locals is variables:  # not of `exec`
            running_line = line
    for text in texts:
        tree, lines = _parse(text)
        for node in tree.body:
            is_completed = text is not texts[-1] or (node.end_lineno or 0) < running_line
            is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            calls = (part.func for part in _nodes(node) if isinstance(part, ast.Call))
            if is_completed and not is_main and "serve" not in map(_last_name, calls):
                yield node, lines


def _statement_source(node: ast.stmt, lines: list[str]) -> tuple[int, str]:
    """Return the number of the first line of a statement, and its text.

    Both include the decorators.
    """
    decorators = getattr(node, "decorator_list", [])
    first_line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    if lines[node.lineno - 1][: node.col_offset].strip():
        return first_line, ast.unparse(node)  # another statement precedes it on its line
    return first_line, "\n".join(lines[first_line - 1 : node.end_lineno])


def _used_names(tree: ast.AST) -> set[str]:
    """Return the global names that a statement uses."""
    names: set[str] = set()
    tables = [symtable.symtable(ast.unparse(tree), "<definition>", "exec")]
    for table in tables:
        tables += table.get_children()
        is_module = table.get_type() == "module"
        used_symbols = (symbol for symbol in table.get_symbols() if symbol.is_referenced())
        names |= {symbol.get_name() for symbol in used_symbols if is_module or symbol.is_global()}
    return names


def _annotation_names(tree: ast.AST) -> set[str]:
    """Return the identifiers in all annotations, including annotations that are strings."""
    annotations = [
        annotation
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if annotation is not None
    ]
    return {word for node in annotations for word in re.findall(r"[^\W\d]\w*", ast.unparse(node))}


def _bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds, and the names of objects whose parts it assigns."""
    bound_names = _assigned_names(statement)
    for node in _nodes(statement):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            bound_names.add(_root_name(node))
        elif isinstance(node, ast.alias) and node.name == "*":
            bound_names.add("*")
    return bound_names


def _assigned_names(statement: ast.stmt) -> set[str]:
    symbols = symtable.symtable(ast.unparse(statement), "<definition>", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _is_definition(statement: ast.stmt) -> bool:
    """Check whether a statement defines functions, classes or modules rather than objects."""
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return isinstance(statement, kinds)


def _changed_names(statement: ast.stmt) -> set[str]:
    """Return the names of objects whose methods a statement calls for their effect."""
    calls = [node.value for node in _nodes(statement) if isinstance(node, ast.Expr)]
    return {_root_name(call) for call in calls if isinstance(call, ast.Call)}


def _nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that it executes itself: not those of function bodies."""
    yield statement
    if not isinstance(
        statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    ):
        for node in ast.iter_child_nodes(statement):
            yield from _nodes(node)


def _last_name(node: ast.AST) -> str:
    """Return the name in `name`, or in `module.name`."""
    return node.attr if isinstance(node, ast.Attribute) else _root_name(node)


def _root_name(node: ast.AST) -> str:
    """Return the name in `name.method(x).attribute[index]`, or "" for another expression."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
