"""The state that threads share on the host: kinds of arrays, and memory imported from DLPack producers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from gsbn._cuda import device as _device
from tests.support import ROOT

FIRST_CALLS = """
import os, sys, threading
import torch
import gsbn
torch.set_num_threads(1)
w, x = torch.nn.Parameter(torch.randn(8, 16)), torch.randn(4, 16)

def first_calls():  # Tensor and Parameter are learnt by eight threads at once
    sys.setswitchinterval(1e-5)
    together, errors = threading.Barrier(8), []

    def call():
        together.wait()
        try:
            with torch.no_grad():
                gsbn.forward(x, w, training=True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        gsbn.forward(x[:3], w, training=True)  # later, alone, of another shape
    return bool(errors)

failed = 0
for _ in range(60):
    if (child := os.fork()) == 0:
        code = 1
        try:
            code = int(first_calls())
        finally:
            os._exit(code)
    failed += os.waitpid(child, 0)[1] != 0
sys.exit(f"{failed} of 60 processes failed" if failed else 0)
"""


@pytest.mark.skipif(not hasattr(sys, "getswitchinterval") or sys.platform == "win32", reason="os.fork")
def test_first_calls_in_threads_learn_one_kind() -> None:
    """Without a lock every later call failed in a third of these processes."""
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_lent_memory_stays_until_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may see that the same first event is done: each frees only what it took off the list."""
    pending: deque[Any] = deque()
    early, failed, here = [], [], threading.local()

    class Event:
        def __init__(self, **_: object) -> None:
            self.done = False
            here.lent.event = self
            pending.append(self)

        def record(self, stream: object) -> None:
            pass

    class Lent:
        event: Event

        def __del__(self) -> None:
            if not self.event.done:
                early.append(self)

    stream = SimpleNamespace(ptr=0)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream, Event=Event))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(_device, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(_device, "_lent", deque())
    ended = threading.Event()

    def gpu() -> None:  # completes events in order, in bursts
        while not ended.wait(0.0005):
            for _ in range(len(pending) - 2):
                pending.popleft().done = True

    def work() -> None:
        for _ in range(20_000):
            here.lent = Lent()
            try:
                _device.hold_until_done(here.lent, 0)
            except IndexError as error:
                failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        watcher = threading.Thread(target=gpu)
        watcher.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended.set()
        watcher.join()
    finally:
        sys.setswitchinterval(interval)
    count = len(early)
    for event in [*pending, *(event for event, _ in _device._lent)]:
        event.done = True
    assert not count and not failed
