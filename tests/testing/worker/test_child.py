"""The worker's file runs where there is only an old Python with NumPy."""

import ast
import sys

from npattn.testing.worker.connect import CHILD

SOURCE = CHILD.read_text()


def find_imports(tree, everywhere):
    """Return the packages that a module imports when it is loaded, or everywhere in it."""
    nodes, found = [tree], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module.split(".")[0])
        if everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)
    return found


def beyond(packages):
    return packages - {"__future__", *sys.stdlib_module_names}


def test_file_is_python_3_9():
    ast.parse(SOURCE, feature_version=(3, 9))


def test_file_needs_numpy_alone():
    assert beyond(find_imports(ast.parse(SOURCE), everywhere=False)) == {"numpy"}


def test_file_imports_nothing_of_npattn():
    known = {"numpy", "torch", "jax", "ml_dtypes"}
    assert beyond(find_imports(ast.parse(SOURCE), everywhere=True)) <= known


def test_imports_are_found():
    source = "class A:\n    import torch\ndef f():\n    from npattn import x\nfrom . import y"
    assert beyond(find_imports(ast.parse(source), everywhere=False)) == {"torch", "."}
    assert beyond(find_imports(ast.parse(source), everywhere=True)) == {"torch", ".", "npattn"}
