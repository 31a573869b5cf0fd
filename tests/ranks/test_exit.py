"""A process whose thread is inside of the store of a group when the interpreter ends, ends with code 0."""

from __future__ import annotations

import os

import programs

SCRIPT = """\
from datetime import timedelta

import torch.distributed as dist

from dilated_attention_pytorch.distributed.watch import Watch, watch_of

def look(self):
    try:
        self._store.wait(["never"], timedelta(milliseconds=20))
    except RuntimeError:
        pass

Watch.look, Watch.next_report = look, lambda self: None
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
watch = watch_of(dist.group.WORLD)
watch.world = 2  # a group of one rank has no thread
watch.begin("a turn")
print("the end", flush=True)
"""


def test_threads_end_before_the_interpreter(tmp_path):
    (done,) = programs.run_together(SCRIPT, folder=tmp_path, environments=[os.environ], modules=programs.WITH_DYNAMO)
    assert (done.stdout, done.returncode) == ("the end\n", 0), done.stderr
