"""Run every variant of every kernel once, on small ragged shapes, under compute-sanitizer.

compute-sanitizer --tool memcheck python tools/sanitize.py [--clear] [words of the names of those to run]

CuPy's memory pool is off, because compute-sanitizer cannot detect an access out of bounds inside the blocks of a pool.
The planner gets a GPU with four SMs: forward_sm90 then runs on two clusters of two CTAs, or four of one, each of which
has several tiles, defers their epilogue and, in training, merges their statistics. Where a cluster has all rows there
are 16 SMs, so at least two clusters. A group has one rank, and leaves four of eight SMs free. With split-k there are 32
SMs, and each CTA has one tile. The results are compared with the reference only coarsely; the tests check the bounds.

Two of the tools report errors that are none, as tools/sanitizer_limits.py shows on kernels of ten lines:
initcheck does not track stores by TMA, so it reports all of forward_sm90's y as uninitialised. forward_sm90
    also reads words of its workspace before they are written; the number of the launch in a word tells whether this
    launch wrote it. --clear gives zeroed memory to the variants that need Hopper.
racecheck does not know that a release and an acquire of a counter in shared memory order other accesses, nor that the
    arrival of one lane at a barrier stands for its warp. In forward_sm90 it reports `constants` (inference), which such
    counters guard; in tall_product the data that the makers leave for the warps that multiply.
"""

import sys
from functools import cache
from itertools import product
from pathlib import Path

import cupy as cp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import gsbn
from gsbn import _plan, reference
from gsbn._backward import backward_within
from gsbn._cuda import kernels as _kernels
from gsbn._forward import forward_within
from gsbn._host.call import bare_gemm
from gsbn._plan import Limits
from gsbn._plan.sm90_variants import (
    ARCH,
    BLOCKS_M,
    CLUSTER_BATCH_TILES,
    CLUSTERS,
    ELEMENTS,
    FEW_ROWS_TILES,
    GEMM_TILES,
    LIMBS_RS_TILES,
    MODES,
    SHARING_TILES,
    SPLIT_K_TILES,
    SPLIT_K_TILES_BY_MODE,
    sizes_of,
)
from gsbn._plan.sources import with_activation
from gsbn._plan.variants import (
    DUAL_CLUSTERS,
    DUAL_ROWS,
    SKINNY_BACKWARD,
    SKINNY_CHUNKS,
    TILES,
    remat_sizes,
    skinny_backward_sizes,
    skinny_features,
)
from gsbn._ranks.group import Group, meet
from gsbn.bench import bounds

CLEAR = "--clear" in sys.argv
NAME = ""  # the name of the variant that runs
ANY = Limits()
_options = _kernels._options
_kernels._options = lambda kernel: (*_options(kernel), "-lineinfo")  # so that reports name the line


def cleared(nbytes):
    """Allocate zeroed memory."""
    memory = cp.cuda.MemoryPointer(cp.cuda.Memory(nbytes), 0)
    memory.memset(0, nbytes)
    return memory


def limits(sms=4, **choice):
    few = {"sms": sms, "pairs": sms // 2, "fours": sms // 4, "eights": sms // 8, "sixteens": sms // 16}
    return Limits(gpu=_kernels.gpu(cp.cuda.Device().id)._replace(**few), **choice)


class OneRank:
    """The engine of a group with one rank: it gathers what it sends."""

    rank, size, on_host = 0, 1, False

    def gather(self, data, timeout):
        return [data]

    def close(self):
        pass


@cache
def alone():
    group = Group(OneRank(), 60.0, peer_memory=True)
    meet(group)
    return group


def operands(shape, dtype):
    """The arguments of a forward by name, on the host and on the GPU."""
    o = bounds.make_operands(np, *shape, dtype)
    host = {"x": o.x, "weight": o.weight, "scale": o.scale, **o.affine} | o.fresh_statistics(np)
    return host, {name: cp.asarray(a) for name, a in host.items()}


def agree(got, want):
    got = cp.asnumpy(got).astype("f8")
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    if not error < 2e-2:  # a few roundings of bfloat16
        raise SystemExit(f"wrong: {error} ({NAME})")


def forward(
    within, shape, dtype, gemm, training, precision="highest", saves=False, activation=None, group=None, adds=False
):
    host, native = operands(shape, dtype)
    if adds:
        host["residual"] = host["x"][:, :1] * host["weight"][:, 0]
        native["residual"] = cp.asarray(host["residual"])
    options = {"training": training, "precision": precision, "gemm": gemm, "return_saved": saves, "group": group}
    y = forward_within(within, **native, **options, activation=activation)
    want = reference.forward(**host, training=training, activation=activation)
    if saves:
        y, saved = y
        assert saved.residual == adds
        g = host["x"].astype("f8") @ host["weight"].astype("f8").T
        unit, of_mean = saved.vectors[4], saved.vectors[6]  # in 16 bits deviations may be about 0, not about the mean
        agree(saved.deviations[:, : shape[2]].astype("f8") * unit - of_mean, g - g.mean(0))
    agree(y, want.y)


def tiled(dtype, tile, activation=None):
    for training, fused in ((True, False), (True, True), (False, None)):  # scale_stats with three splits, or not used
        forward(limits(tiled=tile, fused=fused), (300, 40, 45), dtype, "tiled", training, activation=activation)


def backward(dtype, tile, gemm, precision="highest", activation=None, group=None):
    host, native = operands((300, 40, 45), dtype)
    if activation:  # also a scale of one element, whose gradient is a sum over features
        host["scale"], native["scale"] = host["scale"][:1], native["scale"][:1]
    dy = bounds.draw_dy(np, bounds.make_operands(np, 300, 40, 45, dtype))
    sms, only = (4, gemm == "sm90") if group is None else (8, True)
    for training in (True,) if only else (False, True):  # training last: it changes the running statistics
        options = {"training": training, "gemm": gemm, "precision": precision, "group": group}
        y, saved = forward_within(
            limits(sms, tiled=tile), **native, **options, activation=activation, return_saved=True
        )
        taken = {name: a for name, a in host.items() if name not in ("beta", "num_batches_tracked")}
        before = bounds.masked(np, dy.astype("f8"), cp.asnumpy(y), activation)  # as in gsbn.bench.bounds
        want = reference.backward(before, **taken, training=training)
        # two launches; one launch, with a CTA or with a cluster for all rows of some columns
        for fused, cluster in ((False, 1), (True, 1), (True, 4)):
            within = limits(8 if cluster > 1 else sms, tiled=tile, fused=fused, cluster=cluster)
            got = backward_within(within, cp.asarray(dy), saved)
            for name in ("x", "weight", "gamma", "beta"):
                agree(getattr(got, name), getattr(want, name))


def few_rows(dtype, tile, activation):
    block_m, split = tile
    within = limits(sms=32, sm90=(block_m, 1, split)[: 2 + (split > 1)], split=split > 1)
    for features in (168, 165):  # rows of y on 16 bytes, and not
        shape = 11, split * 8 * 64 + 8, features
        forward(within, shape, dtype, "sm90", True, saves=True, activation=activation)


def limbs_of_dg(block_m, cluster, split):
    """dx = dg w, with w MN-major and its limbs made in registers; and dw = dgᵀ x."""
    within = limits(sms=32 if split > 1 else 4, sm90=(block_m, cluster, split)[: 2 + (split > 1)], limbs_rs=True)
    shape = (split + 1) * block_m - 5, 136, split * 8 * 64 + 8  # the last tiles are partial
    host, native = operands(shape, "float32")
    dy = bounds.draw_dy(np, bounds.make_operands(np, *shape, "float32"))
    _, saved = forward_within(within, **native, training=True, gemm="sm90", return_saved=True)
    taken = {name: a for name, a in host.items() if name not in ("beta", "num_batches_tracked")}
    want, got = reference.backward(dy, **taken, training=True), backward_within(within, cp.asarray(dy), saved)
    for name in ("x", "weight"):
        agree(getattr(got, name), getattr(want, name))


def skinny_backward(dtype, features, inputs, cluster, activation):
    """dg and both products in one kernel; the last tile of rows and the last chunk are partial."""
    training_backward(limits(skinny=True), (2055, inputs - 8, features * cluster - 8), dtype, activation)


def remat(dtype, features, inputs, cluster, activation):
    """A forward that stores no deviations, and the backward that computes g again."""
    within = limits(8, remat=True)
    training_backward(within, (2055, inputs - 8, features * cluster - 8), dtype, activation, within)


def skinny_product(features):
    """dx = dg w, with limbs of dg made in registers, and dw. Fewer columns than a CTA's features, on words or not."""
    for columns in (features - 4, features - 3):
        training_backward(limits(skinny=True), (2055, columns, 200), "float32")


def tall(inputs):
    """dw = dgᵀ x with two by two blocks; the last chunk of rows and the last block of columns are partial."""
    training_backward(limits(skinny=False, tall=True), (2055, inputs, 200), "float32")


def dual(dtype, rows, cluster):
    """dx and dw from one reading of the weight; the last step of features and the last block of inputs are partial."""
    blocks = {1: 4, 2: 2, 4: 1, 8: 1}[cluster]  # of which larger clusters do not fit on so many SMs
    training_backward(limits(max(4, cluster), dual=True), (rows - 3, 128 * blocks - 24, 128 * cluster + 8), dtype)


def training_backward(within, shape, dtype, activation=None, forward_limits=ANY):
    """A training forward, and its backward within these limits, against the reference."""
    host, native = operands(shape, dtype)
    dy = bounds.draw_dy(np, bounds.make_operands(np, *shape, dtype))
    options = {"training": True, "activation": activation, "return_saved": True}
    y, saved = forward_within(forward_limits, **native, **options)
    taken = {name: a for name, a in host.items() if name not in ("beta", "num_batches_tracked")}
    before = bounds.masked(np, dy.astype("f8"), cp.asnumpy(y), activation)
    want = reference.backward(before, **taken, training=True)
    got = backward_within(within, cp.asarray(dy), saved)
    for name in ("x", "weight", "gamma", "beta"):
        agree(getattr(got, name), getattr(want, name))


def ghosts(dtype, groups, fused, activation):
    """Ghost batches, in passes that know them; the last block of columns belongs to a part of the last one."""
    host, native = operands((48, 40, 45), dtype)
    dy = bounds.draw_dy(np, bounds.make_operands(np, 48, 40, 45, dtype))
    options = {"training": True, "groups": groups, "activation": activation}
    y, saved = forward_within(limits(fused=fused, by_runs=False), **native, **options, return_saved=True)
    truth = reference.forward(**host, **options)
    agree(y, truth.y)
    agree(native["running_var"], truth.running_var)
    taken = {name: a for name, a in host.items() if name not in ("beta", "num_batches_tracked")}
    before = bounds.masked(np, dy.astype("f8"), cp.asnumpy(y), activation)
    want = reference.backward(before, **taken, training=True, groups=groups)
    for cluster in (1, 2) if fused else (1,):
        got = backward_within(limits(16, fused=fused, cluster=cluster), cp.asarray(dy), saved)
        for name in ("x", "weight", "scale", "gamma", "beta"):
            agree(getattr(got, name), getattr(want, name))


def activate(dtype):
    """y of the u that is kept, in whole words and, into rows with a gap, element by element."""
    host, native = operands((300, 40, 45), dtype)
    given = {name: native[name] for name in ("x", "weight", "bias")}
    known = {name: host[name] for name in given} | {"running_mean": np.zeros(45), "running_var": np.ones(45)}
    want = reference.forward(**known, eps=0.0, activation="silu")
    for out in (None, cp.empty((300, 46), native["x"].dtype)[:, :45]):
        y, _ = gsbn.linear(**given, activation="silu", out=out, return_saved=True)
        agree(y, want.y)


def residual(dtype, activation):
    """y of a sum that is kept or not, and its gradient: in whole words, and from and into rows with a gap."""
    host, native = operands((300, 40, 45), dtype)
    h = host["x"][:, :1] * host["weight"][:, 0]
    dy = bounds.draw_dy(np, bounds.make_operands(np, 300, 40, 45, dtype))
    options = {"training": True, "activation": activation}
    want = reference.forward(**host, **options, residual=h)
    for columns in (45, 46):
        added, out, of_y = (cp.zeros((300, columns), native["x"].dtype)[:, :45] for _ in range(3))
        added[...], of_y[...] = cp.asarray(h), cp.asarray(dy)
        agree(gsbn.forward(**native, **options, residual=added, out=out), want.y)
        y, saved = gsbn.forward(**native, **options, residual=added, out=out, return_saved=True)
        agree(y, want.y)
        point = cp.asnumpy(y if saved.kept is None else saved.kept).astype("f8")
        before = bounds.activations.before(np, dy.astype("f8"), point, point > 0, activation)
        agree(gsbn.backward(of_y, saved).residual, before)


def fold(dtype):
    host, native = operands((8, 41, 37), dtype)
    frozen = ("weight", "scale", "running_mean", "running_var", "bias", "gamma", "beta")
    w, _ = gsbn.fold(**{name: native[name] for name in frozen})
    agree(w, reference.fold(**{name: host[name] for name in frozen})[0])


def sm90(element, mode, block_m, cluster, saves=False, activation=None, ranks=False, split=1, cluster_m=1):
    dtype = element if element in ("float16", "bfloat16") else "float32"
    precision = "high" if element == "tf32" else "highest"
    again, whole, of_x = mode == "recompute", mode == "cluster_batch", element == "limbs_rs"
    sms, ways = 16 if whole else 8 if ranks else 4, {"recompute": again, "cluster_batch": whole, "limbs_rs": of_x}
    within = limits(sms, sm90=(block_m, cluster), **ways)
    rows, blocks = (cluster, 1) if whole else (7, 1) if again else (7, 2) if mode == "training" else (2, 4)
    shape = rows * block_m - 5, 136, blocks * _plan.SM90_BLOCK_N  # the last tiles are partial
    if split > 1:  # two by two clusters; those of the second row have one tile of rows
        within = limits(sms=32, sm90=(block_m, cluster, split), split=True, cluster_batch=whole, limbs_rs=of_x)
        shape = (split + (not whole)) * block_m - 5, split * 8 * 64 + 8, cluster * _plan.SM90_BLOCK_N
    if cluster_m > 1:  # two by two clusters, of which the last have some tiles only
        within = limits(sms=32, sm90=(block_m, cluster, split, cluster_m))
        shape = (2 * cluster_m - 1) * block_m - 5, 136, (2 * cluster - 1) * _plan.SM90_BLOCK_N
    for last in (40, 37):  # rows of y on 16 bytes, and not
        last_shape = *shape[:2], shape[2] + last
        if mode == "gemm":
            multiply(within, last_shape, dtype, precision)
        else:
            group = alone() if ranks else None
            training, may_add = mode != "inference", precision == "highest" and dtype != "float32" and last == 40
            for adds in (False, True) if may_add and group is None and saves == training else (False,):
                forward(within, last_shape, dtype, "sm90", training, precision, saves, activation, group, adds)


def skinny(element, features, chunks, activation):
    """The kernels that compute g twice: inference, training, and training that saves; rows of y on words or not."""
    dtype = element if element in ("float16", "bfloat16") else "float32"
    size = 2 if dtype != "float32" else 4
    k = 200 if element == "limbs" else (64 * chunks - 16) // size
    for (training, saved), absent in product(((False, False), (True, False), (True, True)), (3, 8)):
        shape, precision = (2055, k, features - absent), "high" if element == "tf32" else "highest"
        forward(limits(skinny=True), shape, dtype, "tiled", training, precision, saved, activation)


def product_of(name, dtype, *tile):
    """dx = dg w or dw = dgᵀ x by forward_sm90, with MN-major operands."""
    block_m, cluster, split, cluster_m = sizes_of(tile)
    # The last tiles of rows, k and features are partial. Where CTAs share all, two clusters have tiles side by side.
    rows, k, columns = 2 * block_m * split * cluster_m - 8, split * 8 * 64 + 8, cluster * _plan.SM90_BLOCK_N + 40
    if len(tile) == 2:
        k, columns = 136, 4 * _plan.SM90_BLOCK_N + 40
    within = limits(4 if len(tile) == 2 else 32, sm90=tile)
    multiply(within, (rows, k, columns), dtype, "highest", x_mn_major=name == "dw", w_mn_major=True)


def multiply(within, shape, dtype, precision, *, x_mn_major=False, w_mn_major=False):
    """forward_sm90's GEMM alone."""
    m, k, n = shape
    o = bounds.make_operands(np, *shape, dtype)
    a, b = (
        cp.ascontiguousarray(cp.asarray(at.T if t else at)) for at, t in ((o.x, x_mn_major), (o.weight, w_mn_major))
    )
    c, (a_at, b_at) = cp.empty((m, n), a.dtype), (_plan.Matrix((at.shape[1], 1), True) for at in (a, b))
    device = cp.cuda.Device().id
    a_at, b_at = a_at.T if x_mn_major else a_at, b_at.T if w_mn_major else b_at
    p = _plan.Matmul(m, n, k, dtype, within.gpu, a_at, b_at, _plan.Matrix((n, 1), True), within)
    launch = bare_gemm(p, _plan.one_launch(p, "gemm", precision), device)
    launch((a.data.ptr, b.data.ptr, c.data.ptr), cp.cuda.get_current_stream().ptr)
    agree(c, o.x.astype("f8") @ o.weight.astype("f8").T)


def variants():
    """Yield the name of each variant, and the function and arguments that run it."""
    for dtype in _plan.C_TYPE:
        yield f"fold {dtype}", fold, (dtype,)
        yield f"activate {dtype}", activate, (dtype,)
        for of_sum in (None, "relu", "silu"):
            yield f"residual {dtype}{f' {of_sum}' if of_sum else ''}", residual, (dtype, of_sum)
        for tile in TILES["double" if dtype == "float64" else "float"]:
            for activation in (None, "relu"):
                end = f" {activation}" if activation else ""
                yield f"tiled {dtype} {tile[0]}{end}", tiled, (dtype, tile, activation)
                yield f"backward {dtype} {tile[0]}{end}", backward, (dtype, tile, "tiled", "highest", activation)
    for dtype, groups, fused, activation in product(_plan.C_TYPE, (2, 12), (False, True), (None, "relu")):
        end = f" {activation}" if activation else ""
        yield f"ghosts {dtype} {groups}{' fused' * fused}{end}", ghosts, (dtype, groups, fused, activation)
    for dtype in _plan.C_TYPE:  # two launches with merge_statistics and merge_sums between them, and one launch
        yield f"backward {dtype} ranks", lambda of: backward(of, None, "cublas", group=alone()), (dtype,)
    for element in SKINNY_CHUNKS:
        for features, chunks, activation in product(skinny_features(element), SKINNY_CHUNKS[element], (None, "relu")):
            end = f" {activation}" if activation else ""
            yield f"skinny {element} {features}x{chunks}{end}", skinny, (element, features, chunks, activation)
    for dtype in SKINNY_BACKWARD:
        for sizes, activation in product(skinny_backward_sizes(dtype), (None, "relu")):
            end = f" {activation}" if activation else ""
            name = "skinny backward {} {}x{}x{}".format(dtype, *sizes) + end
            yield name, skinny_backward, (dtype, *sizes, activation)
        for sizes, activation in product(remat_sizes(dtype), (None, "relu")):
            end = f" {activation}" if activation else ""
            yield "remat {} {}x{}x{}".format(dtype, *sizes) + end, remat, (dtype, *sizes, activation)
    for features in skinny_features("limbs"):
        yield f"skinny product {features}", skinny_product, (features,)
    for inputs in (160, 131):  # rows on 16 bytes, and not; the second block is narrow
        yield f"tall {inputs}", tall, (inputs,)
    for choice in product(("float16", "bfloat16"), DUAL_ROWS, DUAL_CLUSTERS):
        yield "dual {} {}x{}".format(*choice), dual, choice
    yield "backward limbs", backward, ("float32", None, "sm90")
    yield "backward tf32", backward, ("float32", None, "cublas", "high")
    known = set(_kernels.all_kernels(ARCH))
    yes_or_no, of_y = (False, True), (None, "relu")
    clusters = (*CLUSTERS, *(cluster for _, cluster in CLUSTER_BATCH_TILES))
    for choice in dict.fromkeys(product(ELEMENTS, MODES, BLOCKS_M, clusters, yes_or_no, of_y, yes_or_no)):
        *tile, saves, activation, ranks = choice
        kernel = with_activation(_plan.forward_sm90(*tile, saves, ranks=ranks), activation)
        if kernel in known and choice[:2] != ("limbs", "gemm"):  # only the backward runs these
            end = " saves" * saves + (f" {activation}" if activation else "") + " ranks" * ranks
            yield "sm90 {} {} {}x{}".format(*tile) + end, sm90, choice
    whole = tuple((block_m, 1, split) for block_m, split in SPLIT_K_TILES)
    splits = [(of, mode, tile) for of in ELEMENTS for mode, tiles in SPLIT_K_TILES_BY_MODE.items() for tile in tiles]
    splits += [(of, "cluster_batch", tile) for of in ELEMENTS for tile in whole]
    for (element, mode, tile), saves, activation in product(splits, yes_or_no, of_y):
        kernel = with_activation(_plan.forward_sm90(element, mode, *tile[:2], saves, split=tile[2]), activation)
        if kernel in known:
            name = "sm90 {} {} {}x{}x{}".format(element, mode, *tile)
            end = " saves" * saves + (f" {activation}" if activation else "")
            yield name + end, sm90, (element, mode, *tile[:2], saves, activation, False, tile[2])
    for element, tile, activation in product(("float16", "bfloat16"), SHARING_TILES, of_y):
        name = f"sm90 {element} inference " + "x".join(map(str, tile))
        choice = (element, "inference", *tile[:2], False, activation, False, *tile[2:])
        yield name + (f" {activation}" if activation else ""), sm90, choice
    for element, tile, activation in product(("float16", "bfloat16"), FEW_ROWS_TILES, of_y):
        name = "sm90 {} few_rows {}x{}".format(element, *tile)
        yield name + (f" {activation}" if activation else ""), few_rows, (element, tile, activation)
    for tile in LIMBS_RS_TILES:
        yield "sm90 limbs_rs gemm {}x{}x{}".format(*tile), limbs_of_dg, tile
    for x_mn_major, dtype in product(GEMM_TILES, ("float16", "bfloat16")):
        for tile in (*product(BLOCKS_M, CLUSTERS), *GEMM_TILES[x_mn_major]):
            block_m, cluster, split, cluster_m = sizes_of(tile)
            of = {"x_mn_major": x_mn_major, "w_mn_major": True, "split": split, "cluster_m": cluster_m}
            if _plan.forward_sm90(dtype, "gemm", block_m, cluster, **of) in known:
                name = "dw" if x_mn_major else "dx"
                yield f"sm90 {name} {dtype} " + "x".join(map(str, tile)), product_of, (name, dtype, *tile)


def main():
    global NAME
    words = {word for word in sys.argv[1:] if not word.startswith("--")}
    cp.cuda.set_allocator(None)
    hopper = _kernels.gpu(cp.cuda.Device().id).capability == (9, 0)
    count = 0
    for name, run, choice in tuple(variants()):
        of_hopper = name.startswith(("sm90", "skinny", "tall", "dual")) or "limbs" in name
        if words <= set(name.split()) and (hopper or not of_hopper):
            NAME = name
            with cp.cuda.using_allocator(cleared if CLEAR and of_hopper else None):
                run(*choice)
            count += 1
    print(f"{count} variants agree with the reference")


if __name__ == "__main__":
    main()
