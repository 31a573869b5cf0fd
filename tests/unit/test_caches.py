"""Every cache of the package is in one list, bounded, and emptied by ``clear_caches``."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import dilated_attention_pytorch
from dilated_attention_pytorch import Dilated, attention, clear_caches
from dilated_attention_pytorch.caches import CACHES
from dilated_attention_pytorch.plan.tiles import compile_plan

ROOT = Path(dilated_attention_pytorch.__file__).parent


def _decorated(path: Path) -> list[tuple[str, str]]:
    """Names of cached functions and their decorators."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                for decorator in map(ast.unparse, child.decorator_list):
                    if decorator.startswith(("lru_cache", "cache", "functools.")) and "cached_property" not in decorator:
                        found.append((prefix + child.name, decorator))

    visit(ast.parse(path.read_text()), "")
    return found


def test_every_cached_function_is_listed_and_bounded():
    listed = {(cache.module, cache.name) for cache in CACHES}
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name, decorator in _decorated(path):
            assert (module, name) in listed, f"{module}.{name} is not in caches.CACHES"
            assert "maxsize=" in decorator or decorator == "cache", decorator
            assert "None" not in decorator


def test_clear_caches_empties_them_and_results_stay():
    q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
    before = attention(q, k, v, Dilated([16, 64], [1, 2]))
    assert compile_plan.cache_info().currsize > 0
    clear_caches()
    assert compile_plan.cache_info().currsize == 0
    assert attention(q, k, v, Dilated([16, 64], [1, 2])).equal(before)
