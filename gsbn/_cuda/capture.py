"""Keep the memory of a captured call as long as the graph lives, through CUDA user objects of the driver API."""

from __future__ import annotations

import ctypes
import threading
import time
from functools import cache
from typing import Any, NamedTuple

from .driver import check, driver

_SEM_T_BYTES = 64  # sizeof(sem_t) is 32 on Linux; the rest is room for other libcs


class _Held(NamedTuple):
    released: int  # the address of a semaphore that CUDA posts when the graph is gone
    owners: list[Any]


_held: dict[int, _Held] = {}  # the keys are the numbers of captures
_lock = threading.Lock()


@cache
class _Libc:
    """The semaphores of libc, made once. CUDA may call sem_post on a thread of its own."""

    def __init__(self) -> None:
        self.lib = lib = ctypes.CDLL(None)
        lib.malloc.restype = ctypes.c_void_p
        lib.malloc.argtypes = (ctypes.c_size_t,)
        for function in (lib.free, lib.sem_trywait, lib.sem_wait):
            function.argtypes = (ctypes.c_void_p,)
        lib.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        self.post = ctypes.cast(lib.sem_post, ctypes.c_void_p)
        self.any = self.semaphore()  # CUDA posts it for every graph
        threading.Thread(target=_let_go, args=(lib, self.any), name="gsbn-graphs", daemon=True).start()

    def semaphore(self) -> int:
        semaphore: int = self.lib.malloc(_SEM_T_BYTES)
        self.lib.sem_init(semaphore, 0, 0)
        return semaphore


def _capture_of(stream: int) -> tuple[int, int]:
    """Return the unique number of a stream's capture, and the graph."""
    status, identity, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, count = ctypes.c_void_p(), ctypes.c_size_t()
    refs = map(ctypes.byref, (status, identity, graph, nodes, count))
    check(driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *refs), "capturing")
    return identity.value, graph.value or 0


def keep_alive(kind: Any, stream: int, owners: tuple[Any, ...], prepared: Any = None) -> None:
    """Hold what a call allocated until the graph that `stream` is capturing, and all instances of it, are destroyed.

    If the library's allocator keeps the memory for the graph, this function does not hold it, so that later calls can
    reuse it. A prepared weight belongs to gsbn and is always held.

    CUDA calls a user object's destructor on a thread of its own, which may call neither Python nor CUDA. gsbn's
    destructors call libc's sem_post, on a semaphore of the graph and on one that all graphs share. A Python thread
    waits for the shared one, then finds out which graphs are gone.
    """
    identity, graph = _capture_of(stream)
    owners = tuple(owner for owner in owners if owner is not None)
    if kind.graph_keeps(owners, identity):
        owners = ()
    if prepared is not None:
        owners += (prepared,)
    if not owners:
        return
    with _lock:
        if identity in _held:
            _held[identity].owners.extend(owners)
            return
        libc = _Libc()
        held = _held[identity] = _Held(libc.semaphore(), list(owners))
    for semaphore in (held.released, libc.any):
        user_object = ctypes.c_void_p()
        no_destructor_sync, move = ctypes.c_uint(1), ctypes.c_uint(1)
        created = driver().cuUserObjectCreate(
            ctypes.byref(user_object), ctypes.c_void_p(semaphore), libc.post, ctypes.c_uint(1), no_destructor_sync
        )
        check(created, "capturing")
        retained = driver().cuGraphRetainUserObject(ctypes.c_void_p(graph), user_object, ctypes.c_uint(1), move)
        check(retained, "capturing")


def _let_go(lib: ctypes.CDLL, any_graph: int) -> None:
    posted = released = 0
    while True:
        if lib.sem_wait(any_graph) == 0:  # waiting releases the GIL; a signal may interrupt it
            posted += 1
        while released < posted:  # a graph's two posts come one right after the other, in either order
            found = _release(lib)
            released += found
            if not found:
                time.sleep(0.001)


def _release(lib: ctypes.CDLL) -> int:
    with _lock:
        gone = [identity for identity, held in _held.items() if lib.sem_trywait(held.released) == 0]
        found = [_held.pop(identity) for identity in gone]
    for held in found:
        lib.free(held.released)
    return len(found)
