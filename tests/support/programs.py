"""Python programs, each in a process of its own, without the seconds that an import of PyTorch takes.

    result = programs.run("print(1)", folder=tmp_path)      result.returncode, result.stdout, result.stderr

One process imports PyTorch, and by default nothing of this package. It forks a child for each program. The child runs the
program as ``__main__`` and ends like every interpreter: with its exit code, its traceback, its handlers of atexit. Only
objects of the modules that were imported before are not collected at the end.
A program that must run before PyTorch is imported needs ``subprocess`` instead.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
# For programs that import torch._dynamo, as the sharded calls of this package do: another 3 seconds.
WITH_DYNAMO = ("torch", "torch._dynamo")
# For programs that use models of transformers: another 4 seconds.
WITH_TRANSFORMERS = (*WITH_DYNAMO, "transformers.trainer", "transformers.models.llama.modeling_llama")
# For programs of which nobody tests the import of this package: another second, and another for the command.
WITH_COMMAND = (*WITH_DYNAMO, "dilated_attention_pytorch.cli.app", "matplotlib.figure")
LIMIT_S = 300  # a program that takes longer ends with SIGALRM

# Ctrl-C has its usual handler even if the tests run in the background, where a shell lets processes ignore it.
WITH_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"

# The first argument is a file, which runs with the others.
FILE = """
import os, runpy, sys
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""

_SERVER = """
import gc, importlib, json, os, sys, types
for name in sys.argv[1:]:
    importlib.import_module(name)
gc.freeze()  # the last collection of a child skips these objects, which saves a second

def next_program():
    while line := sys.stdin.readline():
        children = []
        for program in json.loads(line):
            child = os.fork()
            if child == 0:
                return program
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.write(1, (json.dumps(codes) + "\\n").encode())
    os._exit(0)

program = next_program()
signal.alarm(program["limit_s"])
for number, path in enumerate([os.devnull, program["stdout"], program["stderr"]]):
    file = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
    os.dup2(file, number)
    os.close(file)
os.chdir(program["folder"])
os.environ.clear()
os.environ.update(program["environment"])
sys.argv = program["arguments"]
sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(program["code"], sys.argv[0], "exec"), sys.modules["__main__"].__dict__)
"""


@cache
def _server(modules: tuple[str, ...]) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", WITH_CTRL_C + _SERVER, *modules],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    atexit.register(server.communicate)  # it ends when nobody can ask it any more
    return server


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="programs")


_numbers = itertools.count()


def run_together(
    code: str,
    *arguments: object,
    folder: Path,
    environments: Sequence[Mapping[str, str]],
    modules: tuple[str, ...] = ("torch",),
    stdout: str | None = None,
    stderr: str | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """The program once for each environment, all at the same time, in processes that have imported the modules before.

    ``stdout`` and ``stderr`` are files to write to.
    """
    programs = []
    for environment in environments:
        paths = [Path(_folder().name, str(next(_numbers))) for _ in range(2)]
        for path in paths:
            path.touch()
        programs.append(
            {
                "code": code,
                "arguments": ["-c", *map(str, arguments)],
                "folder": str(folder),
                "environment": dict(environment),
                "stdout": stdout or str(paths[0]),
                "stderr": stderr or str(paths[1]),
                "limit_s": LIMIT_S,
            }
        )
    server = _server(modules)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(programs) + "\n")
    server.stdin.flush()
    codes = json.loads(server.stdout.readline())
    results = []
    for exit_code, program in zip(codes, programs, strict=True):
        texts = ["" if program[x].startswith("/dev/") else Path(program[x]).read_text() for x in ("stdout", "stderr")]
        # Frozen objects live on at the end. Triton's bindings report them as leaks, after everything else.
        texts[1] = texts[1].partition("nanobind: leaked")[0]
        results.append(subprocess.CompletedProcess(program["arguments"], exit_code, *texts))
    return results


def run(code: str, *arguments: object, folder: Path, **streams: str) -> subprocess.CompletedProcess[str]:
    """The program in the environment of the tests."""
    (result,) = run_together(code, *arguments, folder=folder, environments=[os.environ], **streams)
    return result


def of_ranks(world: int) -> list[dict[str, str]]:
    """What torchrun sets for each rank, without the process that it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]
