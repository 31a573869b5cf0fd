"""The package is a stack of layers: every file imports only from its own layer and the layers above it in the list."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import dilated_attention_pytorch

PACKAGE = "dilated_attention_pytorch"
ROOT = Path(dilated_attention_pytorch.__file__).parent
# Each line may import from itself and from the lines above it. Inside a package, `ORDER` has further lines.
LAYERS = (
    ("hardware",),
    ("batching", "dtypes", "integers", "dispatch", "measure", "shards", "lengths", "jagged"),
    ("patterns",),
    ("orders",),
    ("plan",),
    ("values", "checks", "call"),
    ("execute",),
    ("backends",),
    ("operators", "cache_operators"),
    ("distributed",),
    ("known_calls", "api", "explain", "warm_up", "caches", "cache_checks", "cache"),
    ("streaming_rows", "streaming_check", "streaming"),
    ("nn",),
    ("models",),
    ("training", "integrations"),
    ("workbench",),
    ("cli", "compat"),
)
# Files of the patterns, plans and schedules that are plain integers.
WITHOUT_TORCH = (
    "patterns/dilated.py",
    "plan/tiles.py",
    "plan/held.py",
    "plan/sequences.py",
    "plan/dropout.py",
    "integers.py",
    "shards.py",
    "hardware.py",
    "distributed/schedules.py",
)
BACKENDS = ("reference", "eager", "sdpa", "triton", "hopper")
OPTIONAL = ("triton", "torch.distributed", "matplotlib", "rich", "typer")
FILES = sorted(ROOT.rglob("*.py"))


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether inside a function; type-checking blocks do not run."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                own = f"{node.module}.{alias.name}"
                found.append((own if _is_module(own) else node.module, inside))
        for child in ast.iter_child_nodes(node):
            visit(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(_tree(path), False)
    return found


@cache
def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split(".")[1:])
    return name.startswith(f"{PACKAGE}.") and (path.is_dir() or path.with_suffix(".py").exists())


def _layer(module: str) -> int:
    first = module.removeprefix(f"{PACKAGE}.").partition(".")[0]
    return next(i for i, names in enumerate(LAYERS) if first in names)


@pytest.mark.parametrize("path", [p for p in FILES if _name(p)], ids=_name)
def test_a_file_imports_only_from_its_layer_and_those_above(path):
    name = _name(path)
    if name.startswith("block_sparse_ring"):  # module paths of long names: they only re-export
        name = "compat"
    for module, _ in _imports(path):
        if module == PACKAGE or not module.startswith(f"{PACKAGE}."):
            continue
        assert _layer(module) <= _layer(f"{PACKAGE}.{name}"), f"{name} imports {module}, which is in a later layer"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_inside_functions_are_of_optional_packages(path):
    """A function may import triton, torch.distributed or a plotting package, or a module of ours that imports one."""
    for module, inside in _imports(path):
        if inside and module.startswith(f"{PACKAGE}."):
            assert _needs_optional(module, set()), f"{_name(path)} imports {module} in a function without need"


def _needs_optional(module: str, seen: set[str]) -> bool:
    if module.startswith(OPTIONAL) or module in OPTIONAL or "flex_attention" in module:
        return True
    if not _is_module(module) or module in seen:
        return False
    seen.add(module)
    path = ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    parent = module.rpartition(".")[0]  # its __init__ runs first
    others = [other for other, inside in _imports(path) if not inside] + [parent] * (parent != PACKAGE)
    return any(_needs_optional(other, seen) for other in others)


def _all_imports(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, also in functions and for type checkers only."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if _is_module(name)} or {node.module}
    return {name for name in found if name.startswith(f"{PACKAGE}.")}


def test_no_import_circle():
    graph = {}
    for path in FILES:
        own = f"{PACKAGE}.{_name(path)}".rstrip(".")
        graph[own] = _all_imports(path) - {own}
    state: dict[str, int] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert state.get(module) != 1, f"circle: {' > '.join((*path, module))}"
        if module in state or module not in graph:
            return
        state[module] = 1
        for other in graph[module]:
            visit(other, (*path, module))
        state[module] = 2

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_plans_of_integers_do_not_import_torch(name):
    modules = [module for module, _ in _imports(ROOT / name)]
    assert not any(m == "torch" or m.startswith("torch.") for m in modules)


@pytest.mark.parametrize("path", [p for p in FILES if _name(p).startswith("backends.")], ids=_name)
def test_backends_do_not_import_one_another(path):
    own = _name(path).split(".")[1]
    for module, _ in _imports(path):
        other = module.removeprefix(f"{PACKAGE}.backends.").partition(".")[0]
        if module.startswith(f"{PACKAGE}.backends.") and other in BACKENDS:
            assert other == own, f"{_name(path)} imports the backend {other}"


def test_a_class_name_exists_once():
    names = [n.name for path in FILES for n in ast.walk(_tree(path)) if isinstance(n, ast.ClassDef)]
    assert sorted(names) == sorted(set(names))


def test_no_function_outside_kernels_takes_more_than_eight_parameters():
    """Operators have flat schemas, and public functions and modules list their keywords; everything else has values."""
    public = {"attention", "dilated_attention", "attention_weights", "explain", "simulate_ring", "__init__", "forward"}
    too_long = []
    for path in FILES:
        if "kernels" in path.parts or path.name == "operators.py":
            continue
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.FunctionDef) or node.name in public:
                continue
            args = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if len([a for a in args if a not in ("self", "cls", "ctx")]) > 8:
                too_long.append(f"{path.name}:{node.name}")
    assert not too_long
