"""Calls that do not match, wrong arguments, and groups that can no longer be used."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import numpy as np

import gsbn
from tests.groups.contract.rank import SECONDS, SHORT, Ranks, call, raises, together


def assert_out_of_use(at: Ranks, group: gsbn.Group, *words: str) -> None:
    """Every further call raises at once; the communicator can be used for another group."""
    start = time.monotonic()
    with raises(RuntimeError, "group: ", "cannot be used any more", *words):
        call(at, group)
    assert time.monotonic() - start < SHORT and all(word in repr(group) for word in words)
    with gsbn.group(at.comm, timeout=SECONDS) as another:
        call(at, another)


@together
def another_number_of_features(at: Ranks) -> None:
    with raises(RuntimeError, "forward of 4 features, float32", "forward of 7 features, float32"):
        call(at, features=7 if at.rank == 1 else 4)
    assert_out_of_use(at, at.group, "7 features")


@together
def another_dtype(at: Ranks) -> None:
    with raises(RuntimeError, "forward of 4 features, float32", "forward of 4 features, float16"):
        call(at, dtype="float16" if at.rank == 0 else "float32")
    assert_out_of_use(at, at.group, "float16")


@together
def another_option(at: Ranks) -> None:
    first, second = ("eps 0.5, ", "eps 1e-05, ") if at.rank == 0 else ("eps 1e-05, ", "eps 0.5, ")
    with raises(RuntimeError, first, second):
        call(at, eps=0.5 if at.rank == 0 else 1e-5)
    assert_out_of_use(at, at.group, "eps 0.5")


@together
def another_layer(at: Ranks) -> None:
    """Two layers with the same number of features are called in another order on one rank."""
    x, weight = np.ones((3, 6), np.float32), np.ones((4, 6), np.float32)
    with raises(RuntimeError, "; 5 input features, ", "; 6 input features, "):
        if at.rank == 0:
            gsbn.forward(**at.natives({"x": x, "weight": weight}), training=True, group=at.group)
        else:
            call(at)
    assert_out_of_use(at, at.group, "6 input features")


@together
def another_count_of_batches(at: Ranks) -> None:
    """On the CPU, where the host reads the count."""
    count = at.natives({"num_batches_tracked": np.array(7 + at.rank)})
    with raises(RuntimeError, "after 7 batches", "after 8 batches"):
        call(at, momentum=None, **count)
    assert_out_of_use(at, at.group, "batches")


@together
def another_order(at: Ranks) -> None:
    y, saved = call(at, return_saved=True)
    with raises(RuntimeError, "forward of 4 features", "backward of 4 features"):
        call(at) if at.rank == 0 else gsbn.backward(y, saved)
    assert_out_of_use(at, at.group, "backward")


@together
def another_number_of_calls(at: Ranks) -> None:
    """A rank that skips a call has another call number at the next; MPI and gloo do not detect this themselves."""
    at.group._calls += at.rank == 1  # as if the engine had lost one
    with raises(RuntimeError, "call 1 of", "call 2 of"):
        call(at)
    assert_out_of_use(at, at.group, "call 2")


@together
def another_group(at: Ranks) -> None:
    """Calls of two groups of one communicator, with the same call number, are detected as different."""
    if at.engine == "mpi":
        return  # each group has its own communicator, so they only time out, as in `comes_late`
    with gsbn.group(at.comm, timeout=SECONDS) as other, raises(RuntimeError, "call 1 of group"):
        call(at, other if at.rank == 1 else at.group)
    assert_out_of_use(at, other if at.rank == 1 else at.group, "call 1 of group")


@together
def a_group_is_made_elsewhere(at: Ranks) -> None:
    if at.engine == "mpi":
        return  # as above
    with raises(RuntimeError, "gsbn.group", "call 1 of group"):
        if at.rank == 0:
            gsbn.group(at.comm, timeout=SECONDS)
        else:
            call(at)
    with gsbn.group(at.comm, timeout=SECONDS) as another:
        call(at, another)


# ---- arguments


@together
def closed(at: Ranks) -> None:
    at.group.close()
    at.group.close()
    assert_out_of_use(at, at.group, "it is closed")
    with gsbn.group(at.comm, timeout=SECONDS) as group:
        _, saved = call(at, group, return_saved=True)
    with raises(RuntimeError, "it is closed"):
        gsbn.backward(saved.deviations, saved)


@together
def groups_are_freed(at: Ranks) -> None:
    """MPICH has 2048 communicators, and each group takes one for its copy."""
    for _ in range(2100 if at.engine == "mpi" else 20):
        gsbn.group(at.comm, timeout=SECONDS).close()


@together
def pickled_and_copied(at: Ranks) -> None:
    _, saved = call(at, return_saved=True)
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with raises(TypeError, "group: expected to stay in its process"):
            make(at.group)
    with raises(TypeError, "group: expected to stay in its process"):
        pickle.dumps(saved)
    assert copy.copy(saved).group is at.group


@together
def wrong_arguments(at: Ranks) -> None:
    """These errors are raised before anything is sent: the group and the communicator still work."""
    for wrong in (None, 3, "gloo", object(), at.group):
        with raises(TypeError, "comm: expected a torch.distributed ProcessGroup"):
            gsbn.group(wrong)
    for seconds in (0, -1.0, float("nan"), float("inf"), "3", None, True):
        with raises(TypeError if isinstance(seconds, (str, bool)) or seconds is None else ValueError, "timeout: "):
            gsbn.group(at.comm, timeout=seconds)
    with raises(TypeError, "peer_memory: expected a bool, got 'no'"):
        gsbn.group(at.comm, peer_memory="no")
    with raises(ValueError, "group: expected None in inference"):
        call(at, training=False)
    with raises(TypeError, "group: expected what gsbn.group(comm) returned"):
        call(at, at.comm)
    alone = of_rank_0(at)
    if at.rank == 0:
        gsbn.group(alone, timeout=SECONDS).close()
    else:
        with raises(ValueError, "comm: expected a", "that this process is a member of"):
            gsbn.group(alone)
    call(at)


def of_rank_0(at: Ranks) -> Any:
    """The object that a rank gets for a communicator of rank 0 alone."""
    if at.engine == "mpi":
        from mpi4py import MPI

        return at.comm.Split(MPI.UNDEFINED if at.rank else 0)
    import torch.distributed as dist

    return dist.new_group([0])


@together
def beside_the_users_messages(at: Ranks) -> None:
    """A collective of the user on the same MPI communicator starts before the call and ends after it."""
    if at.engine != "mpi":
        return  # gsbn does not copy a ProcessGroup: its collectives must be in the same order
    before = at.comm.Ibarrier() if at.rank == 0 else None
    call(at)
    (before or at.comm.Ibarrier()).Wait()
