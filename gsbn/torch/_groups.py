"""Whether a call is one of several ranks, and the one `gsbn.Group` of a ProcessGroup for all layers."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, finalize

from torch import distributed

from .._check import shown
from .._group import Group, group

__all__ = ["check_group", "group_named", "group_of", "name_of", "world"]

_groups: WeakKeyDictionary[Any, Group] = WeakKeyDictionary()


def world() -> Any:
    """The ProcessGroup of all ranks; None where there are no others."""
    return distributed.group.WORLD if distributed.is_available() else None


def name_of(process_group: Any) -> str | None:
    """What torch knows the ProcessGroup by, for whoever records a program; None if it has no other rank."""
    return process_group.group_name if _has_others(process_group) else None


def group_named(name: str | None = None) -> Group | None:
    """`group_of` the ProcessGroup of this name."""
    return None if name is None else group_of(distributed.distributed_c10d._resolve_process_group(name))


def group_of(process_group: Any) -> Group | None:
    """The group of a ProcessGroup; None if it has no other rank. The first call of all ranks makes it."""
    if not _has_others(process_group):
        return None
    found = _groups.get(process_group)
    if found is None:
        found = _groups[process_group] = group(process_group)
        finalize(process_group, found.leave).atexit = False  # when the program ends, all memory goes anyway
    return found


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
