"""Whether a call is one of several ranks, and the one `gsbn.Group` of a ProcessGroup for all layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import distributed

from .._ranks.group import Group
from .._ranks.group import group as make_group
from .._values import shown

_groups: WeakKeyDictionary[Any, Group] = WeakKeyDictionary()


def world() -> Any:
    """The ProcessGroup of all ranks; None where there are no others."""
    return distributed.group.WORLD if distributed.is_available() else None


def name_of(process_group: Any) -> str | None:
    """What torch knows the ProcessGroup by, for whoever records a program; None if it has no other rank."""
    return process_group.group_name if _has_others(process_group) else None


def group_named(device: Any, name: str | None = None) -> Group | None:
    """`group_of` the ProcessGroup of this name."""
    return None if name is None else group_of(distributed.distributed_c10d._resolve_process_group(name), device)


def group_of(process_group: Any, device: torch.device | None = None) -> Group | None:
    """The group of a ProcessGroup, for tensors on a device; None if it has no other rank. The first call of all ranks
    makes it."""
    if not _has_others(process_group):
        return None
    found = _groups.get(process_group)
    return _make(process_group, device or torch.device("cpu"), None, True) if found is None else found


def group(
    process_group: Any = None,
    *,
    timeout: float | None = None,
    peer_memory: bool = True,
    device: torch.device | str | int | None = None,
) -> Group | None:
    """Set up how layers over a ProcessGroup exchange their statistics, before the first call that would do so itself.

    Collective: every rank of the ProcessGroup calls it, once. All layers over the ProcessGroup share what it makes.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The layers' `process_group`; None is the group of all ranks.
    timeout : float, optional
        Seconds that a call waits for the other ranks at most; None is the ProcessGroup's own timeout.
    peer_memory : bool
        As in `gsbn.group`: whether GPUs may write into each other's memory.
    device : torch.device, optional
        Where the layers' inputs lie; None is the device that the ProcessGroup is bound to, or the current one.

    Returns
    -------
    gsbn.Group or None
        None if the ProcessGroup has no other rank.

    Raises
    ------
    TypeError, ValueError
        As `gsbn.group`; a `process_group` that is none.
    RuntimeError
        If the ProcessGroup has a group already, or a rank does not come.

    Examples
    --------
    >>> import gsbn.torch
    >>> gsbn.torch.group(timeout=60.0) is None  # a process alone has nobody to wait for
    True
    """
    process_group = world() if process_group is None else process_group
    if not _has_others(process_group):
        return None
    if process_group in _groups:
        raise RuntimeError(
            "process_group: expected one whose layers have not been called yet, got one that has its group already"
        )
    if device is None and torch.cuda.is_available():
        device = getattr(process_group, "bound_device_id", None) or torch.device("cuda", torch.cuda.current_device())
    return _make(process_group, torch.device("cpu" if device is None else device), timeout, peer_memory)


def _make(process_group: Any, device: torch.device, timeout: float | None, peer_memory: bool) -> Group:
    if timeout is None:
        timeout = _timeout_of(process_group, device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where NCCL's messages travel
        found = _groups[process_group] = make_group(process_group, timeout=timeout, peer_memory=peer_memory)
    finalize(process_group, found.leave).atexit = False  # when the program ends, all memory goes anyway
    return found


def _timeout_of(process_group: Any, device: torch.device) -> float:
    """Seconds that the ProcessGroup itself waits; torch's default where it does not tell."""
    for kind in (device, torch.device("cpu"), torch.device("cuda")):
        try:
            return float(process_group._get_backend(kind).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):  # no backend for this device, or one without options
            continue
    return float(distributed.default_pg_timeout.total_seconds())


def _has_others(process_group: Any) -> bool:
    """As nn.SyncBatchNorm asks: a rank that is not a member has its own rows alone."""
    check_group(process_group)
    if process_group is None or _is_no_member(process_group) or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size(process_group) > 1)


def check_group(process_group: Any) -> None:
    """Raise TypeError for what is no ProcessGroup."""
    if process_group is None or _is_no_member(process_group):
        return
    if not distributed.is_available() or not isinstance(process_group, distributed.ProcessGroup):
        raise TypeError(f"process_group: expected a torch.distributed ProcessGroup or None, got {shown(process_group)}")


def _is_no_member(process_group: Any) -> bool:
    """Whether it is what torch gives a rank that is not in the group which it makes."""
    return distributed.is_available() and process_group is distributed.GroupMember.NON_GROUP_MEMBER
