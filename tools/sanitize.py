"""Every variant of every kernel once, on small ragged shapes, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python tools/sanitize.py [--clear] [words of the names of those to run]

CuPy's memory pool is off: inside a pool's blocks an access out of bounds goes unseen. The planner is told of a GPU of
four SMs: forward_sm90 runs on two clusters of two, or four of one, which have several tiles each and so park them.
Results are held to the reference, coarsely: the bounds are the tests' job.

Two of the tools report what is right, as tools/sanitizer_limits.py shows on kernels of ten lines:
initcheck does not see what the copy engine stores: to it, all of forward_sm90's y is uninitialised. And forward_sm90
    looks at words of its workspace before anyone has written them; the launch's number in a word tells whether it was
    this launch. --clear clears that y and that workspace beforehand, and nothing else.
racecheck does not know that a release and an acquire on a counter in shared memory order what lies around them. What it
    reports of forward_sm90 is `constants` (inference) and `coef` (training), which such counters guard.
"""

import dataclasses
import sys
from itertools import product
from pathlib import Path

import cupy as cp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import gsbn
from gsbn import _backward, _forward, _interop, _kernels, _plan, _sm90, bench, reference
from gsbn.bench import bounds, peers

CLEAR = "--clear" in sys.argv
NAME = ""  # of the variant that runs
_options = _kernels._options
_kernels._options = lambda kernel: (*_options(kernel), "-lineinfo")  # a report then names the line


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


def forward(shape, dtype, gemm, training, precision="highest", keeps=False):
    host, native = operands(shape, dtype)
    y = gsbn.forward(**native, training=training, precision=precision, gemm=gemm, return_saved=keeps)
    want = reference.forward(**host, training=training)
    if keeps:
        y, saved = y
        g = host["x"].astype("f8") @ host["weight"].astype("f8").T
        agree(saved.deviations[:, : shape[2]].astype("f8") * saved.vectors[4], g - g.mean(0))
    agree(y, want.y)


def tiled(dtype, g_type, tile):
    before, _plan.TILES = _plan.TILES, {g_type: (tile,)}
    for training in (True, False):
        forward((300, 40, 45), dtype, "tiled", training)  # with scale_stats in three splits, running_affine, normalize
    _plan.TILES = before


def backward(dtype, g_type, tile, gemm, precision="highest"):
    before, _plan.TILES = _plan.TILES, {g_type: (tile,)}
    fused_rows = _plan.FUSED_ROWS
    host, native = operands((300, 40, 45), dtype)
    dy = bounds.draw_dy(np, bounds.make_operands(np, 300, 40, 45, dtype))
    for training in (True,) if gemm == "sm90" else (False, True):  # training last: it moves the running statistics
        options = {"training": training, "gemm": gemm, "precision": precision}
        _, saved = gsbn.forward(**native, **options, return_saved=True)
        taken = {name: a for name, a in host.items() if name not in ("beta", "num_batches_tracked")}
        want = reference.backward(dy, **taken, training=training)
        for _plan.FUSED_ROWS in (0, fused_rows):  # two launches, and one
            _backward._calls.clear()
            got = gsbn.backward(cp.asarray(dy), saved)
            for name in ("x", "weight", "gamma", "beta"):
                agree(getattr(got, name), getattr(want, name))
    _plan.TILES = before


def fold(dtype):
    host, native = operands((8, 41, 37), dtype)
    frozen = ("weight", "scale", "running_mean", "running_var", "bias", "gamma", "beta")
    w, _ = gsbn.fold(**{name: native[name] for name in frozen})
    agree(w, reference.fold(**{name: host[name] for name in frozen})[0])


def sm90(element, mode, block_m, cluster, keeps=False):
    dtype, precision = {"tf32": ("float32", "high"), "limbs": ("float32", "highest")}.get(element, (element, "highest"))
    _plan.BLOCKS_M, _plan.CLUSTERS = (block_m,), (cluster,)
    shape = 2 * block_m - 5, 136, 4 * _plan.SM90_BLOCK_N + 40  # the last rows and the last features fill no tile
    if mode != "gemm":
        return forward(shape, dtype, "sm90", mode == "training", precision, keeps)
    o = bounds.make_operands(np, *shape, dtype)
    x, weight = cp.asarray(o.x), cp.asarray(o.weight)
    case = bench.Case(*shape, dtype, precision)
    g, _, _ = peers.make("gsbn-gemm", case, dataclasses.replace(o, x=x, weight=weight), cp).outputs()
    return agree(g, o.x.astype("f8") @ o.weight.astype("f8").T)


def product_of(name, dtype, block_m, cluster):
    """dx = dg w or dw = dgᵀ x, by forward_sm90 reading operands across what is summed over."""
    _plan.BLOCKS_M, _plan.CLUSTERS = (block_m,), (cluster,)
    m, n, k = 2 * block_m - 8, 4 * _plan.SM90_BLOCK_N + 40, 136  # the last rows, features and k fill no tile
    o = bounds.make_operands(np, m, k, n, dtype)
    across = name == "dw"
    a, b = (cp.ascontiguousarray(cp.asarray(at)) for at in (o.x.T if across else o.x, o.weight.T))
    c, (a_at, b_at) = cp.empty((m, n), a.dtype), (_plan.Matrix((at.shape[1], 1), True) for at in (a, b))
    device = cp.cuda.Device().id
    a_at = a_at.T if across else a_at
    p = _plan.Matmul(m, n, k, dtype, _kernels.gpu(device), a_at, b_at.T, _plan.Matrix((n, 1), True))
    multiply = _sm90.Sm90Gemm(p, _plan.one_launch(p, "gemm", "highest"), device)
    multiply(a.data.ptr, b.data.ptr, c.data.ptr, cp.cuda.get_current_stream().ptr)
    agree(c, o.x.astype("f8") @ o.weight.astype("f8").T)


def variants():
    """Names, and what runs them."""
    for dtype, g_type in ((d, "double" if d == "float64" else "float") for d in _plan.C_TYPE):
        yield f"fold {dtype}", fold, (dtype,)
        for tile in _plan.TILES[g_type]:
            yield f"tiled {dtype} {tile[0]}", tiled, (dtype, g_type, tile)
            yield f"backward {dtype} {tile[0]}", backward, (dtype, g_type, tile, "tiled")
    yield "backward limbs", backward, ("float32", "float", _plan.TILES["float"][0], "sm90")
    yield "backward tf32", backward, ("float32", "float", _plan.TILES["float"][0], "cublas", "high")
    known = set(_kernels.all_kernels("sm_90a"))
    for choice in tuple(product(_plan.ELEMENTS, _plan.MODES, _plan.BLOCKS_M, _plan.CLUSTERS, (False, True))):
        if _plan.forward_sm90(*choice) in known and choice[:2] != ("limbs", "gemm"):  # which the backward runs
            yield "sm90 {} {} {}x{}".format(*choice) + " keeps" * choice[-1], sm90, choice
    for choice in product(("dx", "dw"), ("float16", "bfloat16"), _plan.BLOCKS_M, _plan.CLUSTERS):
        name, dtype, *tile = choice
        if _plan.forward_sm90(dtype, "gemm", *tile, x_across=name == "dw", w_across=True) in known:
            yield "sm90 {} {} {}x{}".format(*choice), product_of, choice


def main():
    global NAME
    words = {word for word in sys.argv[1:] if not word.startswith("--")}
    cp.cuda.set_allocator(None)
    gpu = _kernels.gpu(cp.cuda.Device().id)
    _kernels.gpu = lambda device: gpu._replace(sms=4, pairs=2)
    kind = _interop._Cupy
    scratch, maker, new = kind.scratch, kind.maker, cp.empty

    def clear_scratch(self, nbytes, like):
        memory, at = scratch(self, nbytes, like)
        memory.memset(0, nbytes)
        return memory, at

    def clear_maker(self, shape, like, dtype=None):
        def make():
            y = maker(self, shape, like, dtype)()
            y.data.memset(0, y.nbytes)
            return y

        return make

    hopper = _kernels.gpu(cp.cuda.Device().id).capability == (9, 0)
    count = 0
    for name, run, choice in tuple(variants()):
        of_hopper = name.startswith("sm90") or "limbs" in name
        if words <= set(name.split()) and (hopper or not of_hopper):
            clear = CLEAR and of_hopper
            cp.empty = cp.zeros if clear else new
            kind.scratch, kind.maker = (clear_scratch, clear_maker) if clear else (scratch, maker)
            _plan.plan.cache_clear()
            _forward._calls.clear()
            _backward._calls.clear()
            NAME = name
            run(*choice)
            count += 1
    print(f"{count} variants agree with the reference")


if __name__ == "__main__":
    main()
