"""What calls launch, on a GPU made of paper: grids, addresses and cooperation, for any shape and option, anywhere."""

from __future__ import annotations

from collections import Counter

import paper
import pytest


@pytest.mark.parametrize("device", [paper.HOPPER, paper.AMPERE], ids=["Hopper", "Ampere"])
def test_every_launch_is_as_promised(device: paper._plan.Device) -> None:
    """At most `sms` CTAs, and so SMs; addresses of this call's arrays alone; CTAs that wait only where they must."""
    seen: Counter[str] = Counter()
    for seed in range(400):
        call = paper.draw(seed)
        with paper.gpu(device) as (kind, log):
            if (refusal := call.make()) is not None:
                assert refusal.startswith("gemm: ")
                continue
            arrays = [a for a in (*call.arrays.values(), call.dy, *kind.made) if a is not None]
        known = {a.pointer >> 32 for a in arrays} | {0}
        sms = call.options["sms"]
        most = sms if sms is not None and sms < device.sms else 2**31 - 1
        for launch in log:
            seen[launch.name] += 1
            if launch.name in ("memset", "gemm_ex"):
                continue
            prepares = launch.name == "split_limbs" and launch.words[0] == 0  # the weight alone: it has no `sms`
            assert 1 <= launch.grid <= (2**31 - 1 if prepares else most), (seed, launch)
            # strides of copy_matrix may be negative numbers of 64 bits
            words = [w for w in launch.words if w < 2**63 and launch.name != "copy_matrix"]
            assert {word >> 32 for word in words} <= known, (seed, launch)
            if launch.cooperative:
                assert launch.name == "forward_sm90" and call.options["training"]
                assert len(call.arrays["x"].shape) == 2
                assert call.arrays["x"].shape[0] > 32 or call.options["momentum"] is None
    hopper = {"forward_sm90", "split_limbs"}
    assert set(seen) >= {"gemm_tiled", "scale_stats", "normalize", "running_affine", "copy_matrix", "gemm_ex"}
    assert set(seen) >= {"backward_sums", "backward_dg", "backward_fused"}
    assert hopper <= set(seen) if device == paper.HOPPER else not hopper & set(seen)


def test_a_call_launches_the_same_every_time() -> None:
    assert list(paper.lines(30)) == list(paper.lines(30))
