"""What a captured call allocated lives as long as the graph: CUDA user objects, through the driver API."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

from ._driver import check, driver

__all__ = ["keep_alive"]

_SEM_T_BYTES = 64  # sizeof(sem_t) is 32 on Linux; room for other libcs
_held: list[tuple[int, Any]] = []
_lock = threading.Lock()


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    for function in (libc.free, libc.sem_trywait):
        function.argtypes = (ctypes.c_void_p,)
    libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    return libc


def keep_alive(stream: int, owners: Any) -> None:
    """Hold `owners` until the graph that `stream` is capturing, and all that is instantiated from it, is destroyed.

    CUDA calls a user object's destructor on a thread of its own, where neither Python nor CUDA may be entered: ours is
    libc's sem_post. A later capture looks which semaphores were posted and lets their owners go.
    """
    cuda, libc = driver(), _libc()
    with _lock:
        _held[:] = [(semaphore, held) for semaphore, held in _held if not _released(libc, semaphore)]
        semaphore = libc.malloc(_SEM_T_BYTES)
        libc.sem_init(semaphore, 0, 0)
        _held.append((semaphore, owners))

    status, identity, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, count = ctypes.c_void_p(), ctypes.c_size_t()
    refs = map(ctypes.byref, (status, identity, graph, nodes, count))
    check(cuda.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *refs), "capturing")
    post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
    user_object = ctypes.c_void_p()
    no_destructor_sync, move = ctypes.c_uint(1), ctypes.c_uint(1)
    created = cuda.cuUserObjectCreate(
        ctypes.byref(user_object), ctypes.c_void_p(semaphore), post, ctypes.c_uint(1), no_destructor_sync
    )
    check(created, "capturing")
    check(cuda.cuGraphRetainUserObject(graph, user_object, ctypes.c_uint(1), move), "capturing")


def _released(libc: ctypes.CDLL, semaphore: int) -> bool:
    if libc.sem_trywait(semaphore) != 0:
        return False
    libc.free(semaphore)
    return True
