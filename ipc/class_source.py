"""Classes in the text of a model's file, which is read and not executed.

The supervisor finds the class to serve and its Python environment in the text. Error messages about
a class contain the line and the column of the attribute in question.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from shmserve.errors import InvalidArgument


def source_positions(source: str | bytes, class_name: str) -> dict[str, str]:
    """Find the positions of attributes, methods and arguments in the class that declares a model.

    Args:
        source: The content of a Python file.
        class_name: The name of a class at the top level of the file.

    Returns:
        `LINE:COLUMN`, both from 1, by name: "" for the class itself, "predict" for an attribute or
        method, "predict.image" for an argument. Attributes inherited from classes in the same file
        are included. Empty if the file is not valid Python.
    """
    positions: dict[str, str] = {}
    for class_node in _classes(source, class_name):
        positions = {"": _position(class_node), **dict(_members(class_node)), **positions}
    return positions


_TRITON_CLASS_NAME, DEFAULT_CLASS_NAME = "TritonPythonModel", "Model"
# Base classes of data, interfaces and exceptions. A class with only these is not a model.
_NON_MODEL_BASES = {"NamedTuple", "TypedDict", "Protocol", "ABC", "Enum", "Exception", "BaseModel"}


def served_class(source: str | bytes) -> str:
    """Return the name of the class to serve, given the text of a model's file.

    The candidates are the classes with a method `predict` that no class of the file extends or
    uses. The result is the only candidate; else the class `Model`; else the only unused class with
    a base class, such as `nn.Module`; else "". A file with a `TritonPythonModel` has no class to
    serve: the result is "".

    Raises:
        InvalidArgument: Several classes have the method, and none of them is called `Model`.
    """
    tree = _parsed(source)
    names = set(map(_bound_name, ast.walk(tree)))
    if _TRITON_CLASS_NAME in names:
        return ""
    classes = _top_classes(tree)
    used_names = {name for class_node in classes.values() for name in _used_names(class_node)}
    unused_classes = [name for name in classes if name not in used_names]
    candidates = [name for name in unused_classes if _defines_predict(source, name)]
    if len(candidates) > 1 and DEFAULT_CLASS_NAME not in candidates:
        raise InvalidArgument(
            f"the classes {', '.join(candidates)} have a method 'predict': name one in "
            "config.pbtxt, "
            f'parameters {{ key: "class" value {{ string_value: "{candidates[0]}" }} }}'
        )
    if len(candidates) != 1 and DEFAULT_CLASS_NAME in names:
        return DEFAULT_CLASS_NAME
    # With `from ... import *`, the model may be an imported TritonPythonModel: no class is guessed.
    if not candidates and "*" not in names:
        candidates = [name for name in unused_classes if _bases(classes[name]) - _NON_MODEL_BASES]
    return candidates[0] if len(candidates) == 1 else ""


def _bound_name(node: ast.AST) -> str:
    """Return the name that a definition, an import or an assignment binds, or ""."""
    match node:
        case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.alias(name=name, asname=local_name):
            return local_name or name
    return ""


def _used_names(class_node: ast.ClassDef) -> set[str]:
    """Return the names in the text of a class, except its own name."""
    names = {node.id for node in ast.walk(class_node) if isinstance(node, ast.Name)}
    return names - {class_node.name}


def _bases(class_node: ast.ClassDef) -> set[str]:
    """Return the names of the base classes, without modules and type arguments."""
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in class_node.bases}


def _defines_predict(source: str | bytes, name: str) -> bool:
    return any("predict" in dict(_members(class_node)) for class_node in _classes(source, name))


def class_attribute(source: str | bytes, class_name: str, attribute: str) -> Any:
    """Return the value of a class's attribute in the text of a file, which is not executed.

    The attribute may be inherited from a class in the same file. The result is None if the class
    does not have it.

    Raises:
        InvalidArgument: The value is not a literal.
    """
    for class_node in _classes(source, class_name):
        for node in reversed(class_node.body):
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ) if name == attribute:
                    try:
                        return ast.literal_eval(value)
                    except ValueError:
                        raise InvalidArgument(
                            f"{_position(node)}: '{class_name}.{attribute}' must be a literal, "
                            "because it is read before the file is executed"
                        ) from None
    return None


def _parsed(source: str | bytes) -> ast.Module:
    """Return the tree of a Python file; it is empty if the file is not valid Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the worker reports the error
        return ast.Module([], [])


def _top_classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _classes(source: str | bytes, class_name: str) -> Iterator[ast.ClassDef]:
    """Yield a class and its bases in the text of a Python file, approximately in lookup order."""
    unvisited_classes, pending_names = _top_classes(_parsed(source)), [class_name]
    while pending_names:
        class_node = unvisited_classes.pop(pending_names.pop(0), None)
        if class_node is not None:
            yield class_node
            pending_names += [base.id for base in class_node.bases if isinstance(base, ast.Name)]


def _members(class_node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the name and the position of each attribute, method and argument of a class."""
    for node in class_node.body:
        match node:
            case (
                ast.FunctionDef(name=name, args=arguments)
                | ast.AsyncFunctionDef(name=name, args=arguments)
            ):
                yield name, _position(node)
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    yield f"{name}.{argument.arg}", _position(argument)
            case ast.Assign(targets=targets):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                yield from ((name, _position(node)) for name in names)
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, _position(node)


def _position(node: ast.stmt | ast.arg) -> str:
    """Return the position `LINE:COLUMN` of a node, both from 1."""
    return f"{node.lineno}:{node.col_offset + 1}"
