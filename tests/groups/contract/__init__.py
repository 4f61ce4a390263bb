"""The contract of groups, as functions that every rank runs."""

from tests.groups.contract import whole_batch, misuse, absent, gpus  # noqa: F401, I001  each enters its functions
