"""The authors' code: checkouts at pinned commits, and pieces of their files, compiled alone.

A file is read and parsed, not imported: what it imports may need a GPU, or a model of its own. Of
the function that is wanted nothing is changed, but decorators are left out.
"""

from __future__ import annotations
import __future__

import ast
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Protocol, cast

import numpy as np
import torch

from cxlkv.errors import BadArgumentError

COMMITS = {
    "HugoZHL/PQCache": "0b74e125207dc3f24da3bbaaf84e8a5f1d3b1828",
    "Infini-AI-Lab/MagicPIG": "ac9aa36c866330ca6ad2ce342a7848d7df6f49bb",
    "Js-Hwang1/locks-kv": "3777a577e6bd1e3ce7b22c0c8be010bf856e6e0e",
    "ModelEngine-Group/unified-cache-management": "cdd4406794808e1f387e11a5f8893dc738247e61",
    "MoonshotAI/MoBA": "61e456bc956c5a25fd9c84e5496b661329cb1b72",
    "bytedance/ShadowKV": "a21f5a9ebd7956fe3510b0f29cf13c4fe07ca3b1",
    "graphcore-research/llm-inference-research": "ead9b6a70e3304e4666ae887cd2c6f506525fea2",
    "hpcgroup/loki": "005913bc0b64c3b54d0d96871f4e51e799d7b17b",
    "microsoft/RetrievalAttention": "6b1228c346836769da0ed525dadf05bb7010e96b",
    "mit-han-lab/Quest": "01c1623bf9395009520874e989e29f683203b357",
    "pku-liang/ArkVale": "0c3b45ebe7ecc8c81ff4bc0f9c68c04a0866de88",
    "pzs19/TokenSelect": "8e1e97f03e4e37f38f3dd15d1987fa59e80cdb43",
    "sjtu-zhao-lab/ClusterKV": "cb66a2291c660dbc4f38de26514af7c4d54e8f31",
    "xAlg-ai/sparse-attention-hub": "1a048c9314b6b2cb7e8a7553f744c478b8abfef0",
}
"""Repositories on github.com, and what was compared of each."""
GIVEN = {
    "F": torch.nn.functional,
    "Tensor": torch.Tensor,
    "math": math,
    "nn": torch.nn,
    "np": np,
    "torch": torch,
}
"""Names that most of their files import."""
KEPT = ("classmethod", "property", "staticmethod")


@dataclass(frozen=True)
class Checkouts:
    """A folder with a checkout of each repository, called OWNER+NAME."""

    folder: Path

    def check(self) -> None:
        """Raises BadArgumentError where one is missing or at another commit."""
        for repository, commit in COMMITS.items():
            path = self.path(repository)
            if not (path / ".git").exists():
                raise BadArgumentError(
                    f"{path}: no checkout: git clone https://github.com/{repository} {path}"
                )
            at = git(path, "rev-parse", "HEAD").strip()
            if at != commit:
                raise BadArgumentError(f"{path} is at {at}: git -C {path} checkout {commit}")

    def path(self, repository: str) -> Path:
        return self.folder / repository.replace("/", "+")

    def pieces(
        self, repository: str, file: str, names: Sequence[str], /, **given: object
    ) -> SimpleNamespace:
        """Functions, classes and constants of a file by their names, methods as Class.method;
        `given` are the names that they need of elsewhere."""
        tree = parsed(self.path(repository), file)
        wanted = [bare(found(tree, name)) for name in names]
        space: dict[str, object] = {**GIVEN, **given, "__name__": file}
        execute(wanted, file, space)
        return SimpleNamespace(
            **{name.split(".")[-1]: space[name.split(".")[-1]] for name in names}
        )

    def module(self, repository: str, file: str) -> ModuleType:
        """A whole file, imported: of Triton kernels, which its interpreter runs."""
        path = self.path(repository)
        parsed(path, file)
        spec = spec_from_file_location(Path(file).stem, path / file)
        assert spec
        assert spec.loader
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def run(
        self, repository: str, file: str, function: str, span: tuple[str, str], /, **given: object
    ) -> SimpleNamespace:
        """The statements of a function from the first that assigns span[0] to the next one of the
        same block that assigns span[1]; returns all names that there are then. "name 2" is the
        second that does."""
        begin, (end, _, nth) = span[0], span[1].partition(" ")
        body = block_of(found(parsed(self.path(repository), file), function), begin)
        first = next(at for at, one in enumerate(body) if begin in assigned(one))
        ends = [at for at, one in enumerate(body) if end in assigned(one) and at >= first]
        last = ends[int(nth or 1) - 1]
        space: dict[str, object] = {**GIVEN, **given, "__name__": file}
        execute(body[first : last + 1], file, space)
        return SimpleNamespace(**{name: space[name] for name in space if name.isidentifier()})


def git(path: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(path), *words], capture_output=True, text=True)
    if done.returncode:
        raise BadArgumentError(f"{path}: git {words[0]}: {done.stderr.strip()}")
    return done.stdout


@cache
def parsed(path: Path, file: str) -> ast.Module:
    """Raises BadArgumentError for a file that was changed or is missing."""
    if git(path, "status", "--porcelain", "--", file):
        raise BadArgumentError(f"{path / file} was changed, or is missing")
    return ast.parse((path / file).read_text(encoding="utf-8"), file)


def found(tree: ast.AST, name: str) -> ast.stmt:
    """What a dotted name says, from the outermost class or function in."""
    outer, _, inner = name.partition(".")
    for node in ast.walk(tree):
        is_named = isinstance(node, ast.stmt) and node is not tree and outer in named(node)
        if is_named and isinstance(node, ast.stmt):
            return found(node, inner) if inner else node
    raise BadArgumentError(f"their code has no {name}")


def named(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    return assigned(node)


def assigned(node: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = [one for target in node.targets for one in flat(target)]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def flat(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple) else [target]


def bare(node: ast.stmt) -> ast.stmt:
    """Without decorators; what a class has inside keeps those of Python itself."""
    for one in ast.walk(node):
        if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
            named = [each for each in one.decorator_list if isinstance(each, ast.Name)]
            kept = [each for each in named if each.id in KEPT]
            one.decorator_list = [] if one is node else list(kept)
    return node


def block_of(function: ast.stmt, name: str) -> list[ast.stmt]:
    """The first list of statements in a function, at any depth, that assigns a name."""
    for node in ast.walk(function):
        for part in ("body", "orelse"):
            body = getattr(node, part, None)
            if isinstance(body, list) and any(name in assigned(one) for one in body):
                return body
    raise BadArgumentError(f"their function does not assign {name}")


def execute(statements: list[ast.stmt], file: str, space: dict[str, object]) -> None:
    module = ast.Module(body=statements, type_ignores=[])
    flags = __future__.annotations.compiler_flag  # their types are not imported
    exec(compile(module, file, "exec", flags, dont_inherit=True), space)


class Foreign(Protocol):
    def __call__(self, *arguments: object, **named: object) -> torch.Tensor: ...


def call(function: object, *arguments: object, **named: object) -> torch.Tensor:
    """One of theirs that returns a tensor."""
    return cast("Foreign", function)(*arguments, **named)
