"""The self-test of examples/ring.py: it passes on CPU ranks, and wrong results, wrong names and hangs fail it."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import programs

EXAMPLES = Path(__file__).parents[2] / "examples"


def ring_check():
    """The module beside the script."""
    spec = importlib.util.spec_from_file_location("ring_check", EXAMPLES / "ring_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["ring_check"] = module
    spec.loader.exec_module(module)
    return module


# The example with a shorter sequence: a branch is still longer than another, and both than a message.
SHORTER = "import sys; sys.path.insert(0, sys.argv[1].rpartition('/')[0]); import ring_check; ring_check.TOKENS = 192\n"


@pytest.mark.parametrize("world", [2])
def test_report(world, tmp_path):
    pytest.importorskip("typer")  # ring.py imports the command line's package
    # As in processes of torchrun, where the process that started them holds the store.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    environments = [os.environ | rank | agent for rank in programs.of_ranks(world)]
    arguments = (SHORTER + programs.FILE, EXAMPLES / "ring.py", "--check")
    done, *others = programs.run_together(
        *arguments, folder=tmp_path, environments=environments, modules=programs.WITH_DYNAMO
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [other.returncode for other in others] == [0] * (world - 1), others
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    results = {name.removeprefix("| "): (result, ok.strip(" |")) for name, result, ok in rows}
    assert f"{world} ranks on 1 machine(s)" in done.stdout
    for transport in ("ring", "allgather", "ulysses"):
        assert results[f"dense, {transport}, float64"][1] == "ok"
    for name in ("known shards, uneven", "known shards, second call", "padded", "packed", "dropout", "adaptive blocks"):
        assert results[f"{name}, ring, float64"][1] == "ok"
    for rank in range(world - 1):
        result, ok = results[f"rank {world - 1} is killed: rank {rank}"]
        assert (f"and named rank {world - 1}" in result, ok) == (True, "ok")
    assert "GB/s" in results["link"][0]
    assert all(ok in ("ok", "") for _, ok in results.values())


def check_wrong_results(group) -> None:
    module = ring_check()
    plain = module.attention

    def inexact(*args, group=None, **options):
        out, lse = plain(*args, group=group, **options)
        rank = -1 if group is None else dist.get_rank(group.group)
        return out + (1e-6 if rank == 1 else 0.0), lse

    with pytest.MonkeyPatch.context() as patch:
        check = module.Check(group, torch.device("cpu"), "gloo")
        setting = next(iter(module.settings(2)))
        check.exact(setting, torch.float64)
        assert check.report.failed == 0
        patch.setattr(module, "attention", inexact)
        check.exact(setting, torch.float64)
        assert check.report.failed == 1  # on both ranks
        assert str(check.report).splitlines()[-1].endswith("| **WRONG** |")
        patch.setattr(module.Check, "run", lambda self: self.report.add("a check", "a result", False))
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, name, lambda *args, **options: None)
        assert module.check("gloo") == 1


def test_wrong_results(on_ranks):
    """A rank that is off by a millionth fails the check on every rank, and with it the exit status."""
    on_ranks(2, check_wrong_results)


def check_judgement(group) -> None:
    module = ring_check()
    gloo, nccl = (module.Check(group, torch.device("cpu"), backend) for backend in ("gloo", "cpu:gloo,cuda:nccl"))
    right = {"error": "rank 0 could not send: rank 1 has ended", "seconds": 0.5, "code": 0, "last": ""}
    assert gloo.judged(right) == ("raised after 0.5 s, and named rank 1", True)
    assert gloo.judged(right | {"seconds": 9.0})[1] is False
    assert gloo.judged(right | {"error": "rank 0 could not send to rank 10"}) == (
        "raised after 0.5 s, without naming rank 1",
        False,
    )
    assert gloo.judged({"hangs": 90.0, "code": -9}) == ("hangs for 90 s", False)
    ended = {"code": -signal.SIGABRT, "last": "Watchdog caught collective operation timeout"}
    assert gloo.judged(ended)[1] is False
    # With NCCL the watchdog may do so: the report has it as it is.
    assert nccl.judged(ended) == ("its process ended with code -6: Watchdog caught collective operation timeout", None)
    assert nccl.judged({"code": 1, "last": "ImportError"})[1] is False
    assert nccl.judged({"hangs": 90.0, "code": -9})[1] is False
    assert nccl.judged(right)[1] is True


def test_judgement_of_a_killed_rank(on_ranks):
    on_ranks(2, check_judgement)
