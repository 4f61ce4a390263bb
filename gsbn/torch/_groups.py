"""Define `group`, and keep the one `gsbn.Group` per ProcessGroup that all layers share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import distributed

from .._ranks.group import Group, leave
from .._ranks.group import group as make_group
from .._values import shown

_groups: WeakKeyDictionary[Any, Group] = WeakKeyDictionary()


def world() -> Any:
    """Return the ProcessGroup of all ranks, or None without torch.distributed."""
    return distributed.group.WORLD if distributed.is_available() else None


def name_of(process_group: Any) -> str | None:
    """Return torch's name of the ProcessGroup, for recorded programs, or None if the ProcessGroup has no other rank."""
    return process_group.group_name if _has_others(process_group) else None


def group_named(device: Any, name: str | None = None) -> Group | None:
    """Return `group_of` for the ProcessGroup with this name, or None without a name."""
    return None if name is None else group_of(distributed.distributed_c10d._resolve_process_group(name), device)


def group_of(process_group: Any, device: torch.device | None = None) -> Group | None:
    """Return the group of a ProcessGroup for tensors on a device, or None if the ProcessGroup has no other rank.

    The first call makes the group, so all ranks must make this call.
    """
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
    """Set up the exchange of statistics over a ProcessGroup, with these options, before the first call of its layers.

    The call is collective: every rank of the ProcessGroup makes it once. All layers that use the ProcessGroup share the
    result. Without this call, the first call of a layer sets up the exchange.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The `process_group` of the layers. None means the group of all ranks.
    timeout : float, optional
        The longest time that a call waits for the other ranks, in seconds. None means the timeout of the ProcessGroup.
    peer_memory : bool
        As in `gsbn.group`: whether GPUs may write to each other's memory.
    device : torch.device, optional
        The device of the layers' inputs. None means the device that the ProcessGroup is bound to, or the current one.

    Returns
    -------
    gsbn.Group or None
        None if the ProcessGroup has no other rank.

    Raises
    ------
    TypeError, ValueError
        As for `gsbn.group`, and if `process_group` is not a ProcessGroup.
    RuntimeError
        The ProcessGroup has a group already, or a rank does not make the call before the timeout.

    Examples
    --------
    >>> import gsbn.torch
    >>> gsbn.torch.group(timeout=60.0) is None  # a single process
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
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # the device for NCCL's messages
        found = _groups[process_group] = make_group(process_group, timeout=timeout, peer_memory=peer_memory)
    finalize(process_group, leave, found).atexit = False  # not at exit, when all memory is freed anyway
    return found


def _timeout_of(process_group: Any, device: torch.device) -> float:
    """Return the timeout of the ProcessGroup in seconds, or torch's default if it has none."""
    for kind in (device, torch.device("cpu"), torch.device("cuda")):
        try:
            return float(process_group._get_backend(kind).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):  # no backend for this device, or one without options
            continue
    return float(distributed.default_pg_timeout.total_seconds())


def _has_others(process_group: Any) -> bool:
    """Return whether the ProcessGroup has other ranks.

    As in nn.SyncBatchNorm, a rank that is not a member uses only its own rows.
    """
    check_group(process_group)
    if process_group is None or _is_no_member(process_group) or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size(process_group) > 1)


def check_group(process_group: Any) -> None:
    """Raise TypeError if the argument is neither a ProcessGroup nor None."""
    if process_group is None or _is_no_member(process_group):
        return
    if not distributed.is_available() or not isinstance(process_group, distributed.ProcessGroup):
        raise TypeError(f"process_group: expected a torch.distributed ProcessGroup or None, got {shown(process_group)}")


def _is_no_member(process_group: Any) -> bool:
    """Return whether the argument is the object that torch returns to ranks that are not in a new group."""
    return distributed.is_available() and process_group is distributed.GroupMember.NON_GROUP_MEMBER
