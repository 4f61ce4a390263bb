"""One batch on several ranks: every rank has some of the rows, and normalises with the statistics of all.

    mpiexec -n 2 python examples/mpi_sync.py

Needs mpi4py and an MPI: pip install mpi4py mpich. The arrays are CuPy's where there is a GPU, and NumPy's where there
is none; if there are fewer GPUs than ranks, ranks share them. The layer is trained for some steps, once on all ranks
together and once on each rank with the whole batch, and both must come to the same.
"""

import sys

import numpy as np

try:
    from mpi4py import MPI
except ModuleNotFoundError:
    sys.exit("mpi_sync: needs mpi4py: pip install mpi4py mpich")

import gsbn

ROWS, I, O = 192, 64, 32
STEPS, RATE = 10, 0.05
TOLERANCE = 1e-4  # absolute and relative: the order in which float32 numbers are added up is another
comm = MPI.COMM_WORLD


def arrays_module():
    """CuPy, on this rank's GPU, if it sees one; else NumPy."""
    try:
        import cupy

        cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
        return cupy
    except Exception:  # no CuPy, no driver or no GPU
        return np


def on_host(array):
    return array.get() if hasattr(array, "get") else array


def draw(xp):
    """A batch, what is to be learnt of it, and a layer: the same on every rank."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, I), dtype="f4")
    x += np.linspace(-3, 3, ROWS, dtype="f4")[:, None]  # no rank's rows have the mean of all
    layer = {
        "weight": rng.standard_normal((O, I), dtype="f4") / np.float32(np.sqrt(I)),
        "scale": np.ones(O, "f4"),
        "gamma": np.ones(O, "f4"),
        "beta": np.zeros(O, "f4"),
    }
    statistics = {"running_mean": np.zeros(O, "f4"), "running_var": np.ones(O, "f4")}
    layer, statistics = ({name: xp.asarray(a) for name, a in arrays.items()} for arrays in (layer, statistics))
    return xp.asarray(x), xp.asarray(np.tanh(x[:, :O])), layer, statistics


def train(xp, rows, group):
    """Some steps of gradient descent with these rows of the batch; what has become of y and of the layer."""
    x, target, layer, statistics = draw(xp)
    x, target = x[rows], target[rows]
    for _ in range(STEPS):
        y, saved = gsbn.forward(x, **layer, **statistics, training=True, return_saved=True, group=group)
        dy = 2 * (y - target) / np.float32(ROWS)  # the loss is a mean over all rows, whosoever they are
        gradients = gsbn.backward(dy, saved, needs=tuple(layer))
        for name, parameter in layer.items():
            gradient = on_host(getattr(gradients, name))  # of this rank's rows
            if group is not None:
                gradient = np.ascontiguousarray(gradient)
                comm.Allreduce(MPI.IN_PLACE, gradient)  # the sum over ranks is the whole batch's
            parameter -= np.float32(RATE) * xp.asarray(gradient)
    return {name: on_host(a) for name, a in {"y": y, **layer, **statistics}.items()}


def main():
    xp = arrays_module()
    ends = [ROWS * (rank + 1) ** 2 // comm.size**2 for rank in range(-1, comm.size)]  # later ranks have more rows
    mine = slice(ends[comm.rank], ends[comm.rank + 1])
    with gsbn.group(comm, timeout=120) as group:
        together = train(xp, mine, group)
    alone = train(xp, slice(None), None)
    alone["y"] = alone["y"][mine]

    good = True
    for name, ours in together.items():
        furthest = comm.allreduce(float(np.abs(ours - alone[name]).max()), MPI.MAX)
        good &= comm.allreduce(np.allclose(ours, alone[name], rtol=TOLERANCE, atol=TOLERANCE), MPI.LAND)
        if comm.rank == 0:
            print(f"{name:<14} max difference {furthest:.1e}")
    statistics = together["running_mean"].tobytes() + together["running_var"].tobytes()
    good &= len(set(comm.allgather(statistics))) == 1  # not one bit differs
    if comm.rank == 0:
        ending = "agree" if good else "DO NOT AGREE"
        print(f"{comm.size} ranks with {xp.__name__} arrays, and one rank with the whole batch, {ending}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
