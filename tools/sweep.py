"""Measure all choices of the planner over shapes of all sizes, and what its own choices lose.

python tools/sweep.py measure [seconds [skip [dtype ...]]]   on a Hopper GPU with PyTorch: a line of JSON per problem
python tools/sweep.py judge FILE [bandwidth]                 anywhere: what this version's planner loses on those times
python tools/sweep.py fit FILE [rounds]                      anywhere: fits gsbn/_plan/h200.py to those times

A problem is a shape, a dtype (bfloat16, tf32, or float32 for "highest") and a mode. Its choices are the tiles of
forward_sm90, named BLOCK_MxCLUSTER, with +CLUSTER_M if that is not 1, xSPLIT for split-k, "rs" if limbs of the weight
are made in registers, and "recompute" or "cluster batch" for these ways to train; the skinny kernels; and the portable
path on cuBLAS. PyTorch eager is measured, too. Times are device times of calls in a row, after a kernel that keeps the
device busy while the host enqueues; the result of each choice is compared with cuBLAS's.
docs/results/sweep.jsonl has the times of `measure`, and of 534 problems of other shapes: 278, most of them random, 136
with many rows and 24 to 128 features, and 120 whose rows of y start on any element.
docs/results/sweep_h100.jsonl has those of 199 inferences on an H100, whose `Device.bandwidth` is 0.68, in CUDA graphs;
beside them is PyTorch's addmm on folded weights, not its modules. products_h100.jsonl and training_h200.jsonl, of
single products and of training, name tiles in the same way; nothing here reads them.
"""

import json
import math
import statistics
import sys
import time
from functools import partial
from itertools import islice, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gsbn import _plan, warm_up
from gsbn._forward import forward_within
from gsbn._plan import Limits
from gsbn._plan.cost import copies_us, cublas_us
from gsbn._plan.forward_path import after_product
from gsbn._plan.gemm import LEAST_TERMS, for_cublas, for_sm90
from gsbn._plan.h200 import H200
from gsbn._plan.skinny import serves_skinny, skinny_forward
from gsbn._plan.sm90_tiles import candidates, tile_of
from gsbn._plan.sm90_variants import MODES as KERNEL_MODES

DTYPES = {
    "bfloat16": ("bfloat16", "high"),
    "tf32": ("float32", "high"),
    "float32": ("float32", "highest"),
}
MODES = ("training", "inference")
PEERS = ("eager", "addmm")  # times of PyTorch
WAYS = {"recompute": " recompute", "cluster_batch": " cluster batch"}  # ways to train: the ends of the names of choices
RS = " rs"
NAMED = [
    (1024, 8192, 8192), (16384, 4096, 4096), (4096, 1024, 1024), (128, 1024, 512), (256, 2048, 2048),
    (4096, 4096, 4096), (1024, 1024, 1024), (512, 512, 512), (64, 512, 512), (128, 8192, 8192), (32, 4096, 4096),
    (50, 4096, 4096), (65536, 256, 512), (100000, 64, 64), (8192, 256, 256), (32768, 1024, 1024), (333, 1000, 6216),
    (512, 4096, 1024), (1536, 1536, 6144), (32, 32, 32), (16384, 32, 32), (32, 16384, 32), (32, 32, 16384),
    (2048, 16384, 128), (512, 16384, 1024), (64, 16384, 1024), (8, 4096, 11008), (32, 2048, 8192), (64, 8192, 8192),
    (256, 2048, 8192), (256, 256, 256), (512, 512, 128), (777, 1111, 2222), (2048, 2047, 2047), (5000, 999, 1001),
    (65536, 1024, 1024), (100000, 512, 512), (802816, 128, 128), (200704, 384, 768), (1000000, 32, 32),
    (50000, 64, 1024), (131071, 96, 200),
]  # fmt: skip
FAMILIES = [  # rows; features in and out, and their common divisor
    ((8, 512), (256, 16384), 8),
    ((10_000, 1_000_000), (16, 1024), 8),
    ((32, 16384), (32, 16384), 8),
    ((64, 16384), (64, 4200), 1),
]
FEW_FEATURES = ((4_000, 2_000_000), (8, 128), 8)
SHORT = ((1_000, 100_000), (8, 256), 8)


def shapes(count=200, skinny=40, more=160):
    """The named shapes, then a low-discrepancy sequence on a log scale, over four families in turn.

    The families are few rows, many rows, and all sizes alike, with rows on 16 bytes; and rows that are not. Then come
    many rows of few features; last, more of the four families, and a smaller number of short rows.
    """
    found = list(NAMED)
    steps = (0.8191725133961645, 0.6710436067037893, 0.5497004779019703)  # of the R3 sequence
    for index in range(1, count + skinny + more + 1):
        families = FAMILIES if index <= count else [FEW_FEATURES] if index <= count + skinny else [*FAMILIES, SHORT]
        (few, many), (least, most), multiple = families[index % len(families)]
        b, i, o = ((0.5 + index * step) % 1 for step in steps)
        b, i, o = few * (many / few) ** b, *(least * (most / least) ** n for n in (i, o))
        i, o = (max(least, round(n / multiple) * multiple) | (multiple == 1) for n in (i, o))
        if index % 3 == 0 and multiple > 1:  # powers of two
            b, i, o = (2 ** round(math.log2(n)) for n in (b, i, o))
        shape = round(b), i, o
        if 2 * math.prod(shape) < 1.2e12 and max(b * i, b * o, i * o) < 2**28 and shape not in found:
            found.append(shape)
    return found


def problems(dtypes):
    """The named shapes in all dtypes, each other shape in one dtype."""
    for index, shape in enumerate(shapes()):
        of_shape = dtypes if shape in NAMED else [dtypes[index // len(FAMILIES) % len(dtypes)]]
        yield from product([shape], of_shape, MODES)


# An H200: its SMs, and how many clusters of 2, 4, 8 and 16 CTAs, with one CTA per SM, run at the same time.
DEVICE = _plan.Device((9, 0), 132, pairs=66, fours=30, eights=15, sixteens=7)


def problem(shape, dtype, bandwidth=1.0):
    """The problem for the planner, with contiguous x, weight and y."""
    b, i, o = shape
    at = [_plan.Matrix((columns, 1), True) for columns in (i, i, o)]
    return _plan.Matmul(b, o, i, DTYPES[dtype][0], DEVICE._replace(bandwidth=bandwidth), *at)


def planned(shape, dtype, mode, among, bandwidth=1.0):
    """The choice of "auto" among these names."""
    recompute, cluster_batch = (any(name.endswith(how) for name in among) for how in WAYS.values())
    split = any(name.count("x") == 2 for name in among)
    allowed = {"recompute": recompute, "cluster_batch": cluster_batch, "split": split, "skinny": "skinny" in among}
    allowed["limbs_rs"] = any(RS in name for name in among)
    p = problem(shape, dtype, bandwidth)._replace(
        limits=Limits(**{name: None if yes else False for name, yes in allowed.items()})
    )
    program = _plan.plan_forward(p, training=mode == "training", precision=DTYPES[dtype][1])
    for launch in program.launches("forward_sm90"):
        of_kernel = next(name for name, value in KERNEL_MODES.items() if value == dict(launch.kernel.defines)["MODE"])
        if of_kernel != "gemm":
            return name_of(launch.made_of[0], of_kernel)
    return "skinny" if program.launch("skinny_normalize") else program.path


def name_of(tile, mode):
    end = RS * (tile.element == "limbs_rs") + WAYS.get(mode, "")
    cluster = f"{tile.cluster}" + f"+{tile.cluster_m}" * (tile.cluster_m > 1)
    return f"{tile.block_m}x{cluster}" + f"x{tile.split}" * (tile.split > 1) + end


def tiles(shape, dtype, mode):
    """The tiles of forward_sm90 for this problem, by name."""
    element = _plan.element_for(*DTYPES[dtype])
    p = for_sm90(problem(shape, dtype), element)
    return {name_of(tile, tile.mode): tile for tile in candidates(p, mode, element)}


def measure(limit, skip, dtypes):
    began = time.monotonic()
    import torch

    warm_up()
    print(f"compiled after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    cycles = 2_000_000  # a millisecond, in which the host enqueues
    noise = torch.randn(1 << 28, device="cuda")
    pools = {"float32": noise, "tf32": noise, "bfloat16": noise.to(torch.bfloat16)}
    vectors = torch.randn(4, 1 << 14, device="cuda")
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(run, calls):
        nonlocal cycles
        while True:
            torch.cuda._sleep(cycles)
            start.record()
            for _ in range(calls):
                run()
            full = not start.query()
            stop.record()
            stop.synchronize()
            if full:
                return start.elapsed_time(stop) / calls * 1e-3
            cycles = min(2 * cycles, 20_000_000)

    def forced(call, gemm, tile=None):
        """The same call on this path, with this tile as the only choice."""
        ways = {way: tile.mode == way for way in WAYS} if tile is not None else {}
        if tile is not None:
            ways["limbs_rs"] = tile.element == "limbs_rs"
        run = partial(call, Limits(tile and tile.shape, **ways), gemm)
        run()
        return run

    for shape, dtype, mode in islice(problems(dtypes), skip, None):
        if time.monotonic() - began > limit:
            print("out of time", file=sys.stderr)
            break
        b, i, o = shape
        pool, precision, training = pools[dtype], DTYPES[dtype][1], mode == "training"
        torch.set_float32_matmul_precision(precision)
        x, w = pool[: b * i].view(b, i), pool[-o * i :].view(o, i)
        scale, bias, gamma, beta = vectors[:, :o].to(x.dtype)
        mean, var = torch.zeros(o, device="cuda"), torch.full((o,), float(i), device="cuda")
        options = dict(bias=bias, gamma=gamma, beta=beta, running_mean=mean, running_var=var, training=training)
        y = torch.empty(b, o, device="cuda", dtype=x.dtype)

        def ours(limits, gemm, x=x, w=w, scale=scale, options=options, y=y, precision=precision):
            return forward_within(limits, x, w, scale, precision=precision, gemm=gemm, out=y, **options)

        running = [a.to(x.dtype) for a in (mean, var)]

        def eager(x=x, w=w, s=scale, b=bias, gamma=gamma, beta=beta, running=running, training=training):
            z = torch.nn.functional.linear(x, w, b) * s
            return torch.nn.functional.batch_norm(z, *running, gamma, beta, training, 0.1, 1e-5)

        with torch.no_grad():
            runs = {"cublas": forced(ours, "cublas")}
            truth = y.clone()
            error = 0.0
            for name, tile in tiles(shape, dtype, mode).items():
                y.fill_(float("nan"))
                runs[name] = forced(ours, "sm90", tile)
                error = max(error, float(torch.linalg.norm((y - truth).float()) / torch.linalg.norm(truth.float())))
            if serves_skinny(problem(shape, dtype), precision, training, False):
                runs["skinny"] = partial(ours, Limits(skinny=True), "auto")
                y.fill_(float("nan"))
                runs["skinny"]()
                error = max(error, float(torch.linalg.norm((y - truth).float()) / torch.linalg.norm(truth.float())))
            runs["eager"] = eager
            eager()
            samples = {name: [seconds(run, 3)] for name, run in runs.items()}
            quickest = min(s[0] for s in samples.values())
            calls = max(1, min(10, int(1.5e-3 / quickest)))
            near = {name: run for name, run in runs.items() if samples[name][0] < 1.6 * quickest or name == "eager"}
            for name in near:
                samples[name].clear()
            for turn in range(5 if quickest < 1e-3 else 3):
                for name in sorted(near, reverse=turn % 2 == 1):
                    samples[name].append(seconds(near[name], calls))
        us = {name: round(1e6 * statistics.median(s), 2) for name, s in samples.items()}
        line = {"shape": shape, "dtype": dtype, "mode": mode, "us": us}
        if not error < 2e-2:  # two roundings of bfloat16, two GEMMs in TF32
            line["wrong"] = error
        print(json.dumps(line, separators=(",", ":")), flush=True)


def choices(line):
    """The choices that "auto" may take: limbs of few terms are fast, but not accurate enough."""
    few = line["dtype"] == "float32" and line["shape"][1] < LEAST_TERMS
    return [name for name in line["us"] if name in ("cublas", "skinny") or (name not in PEERS and not few)]


def judged(file, bandwidth=1.0):
    """The problems of a file, with the choice of the planner, on a GPU with this `Device.bandwidth`, and its loss."""
    lines = [json.loads(line) for line in Path(file).read_text().splitlines() if line.startswith('{"shape"')]
    for line in lines:
        us = line["us"]
        own = planned(line["shape"], line["dtype"], line["mode"], us, float(bandwidth))
        if own not in us:  # a tile that was not offered when the file was measured
            model = expected(line, H200)
            own = min(model, key=model.get)
        line["best"] = min(choices(line), key=us.get)
        line["own"], line["regret"] = own, us[own] / us[line["best"]] - 1
        line["of peer"], line["of cublas"] = us[own] / us[next(filter(us.get, PEERS))], us[own] / us["cublas"]
    return lines


def expected(line, rates):
    """The times that the model expects of all measured choices."""
    p, precision = problem(line["shape"], line["dtype"]), DTYPES[line["dtype"]][1]
    element, mode = _plan.element_for(p.dtype, precision), line["mode"]
    q, after = for_cublas(p, element), after_product(p, mode == "training")
    found = {"cublas": cublas_us(q, element, after, saves=False, rates=rates) + copies_us(q, rates=rates)}
    if "skinny" in line["us"]:
        found["skinny"] = skinny_forward(p, precision, training=mode == "training", saves=False, rates=rates).us
    q = for_sm90(p, element)
    for name, tile in tiles(line["shape"], line["dtype"], mode).items():
        if name in line["us"]:
            again = tile_of(q, tile.mode, tile.element, *tile.sizes, rates=rates)
            found[name] = again.us + copies_us(q, rates=rates)
    return found


def loss(lines, rates):
    """The error of the model for the times that matter, those near the best of a problem, plus the loss of its choices.

    Named shapes, which other benchmarks use, too, count five times.
    """
    total = 0.0
    for line in lines:
        us, model = line["us"], expected(line, rates)
        among = choices(line)
        best = min(us[name] for name in among)
        off = sum(math.log(t / us[name]) ** 2 for name, t in model.items() if us[name] < 1.6 * best) / len(model)
        weight = 5 if tuple(line["shape"]) in NAMED else 1
        total += weight * (off + 4 * math.log(us[min(among, key=model.get)] / best))
    return total / len(lines)


# Rates that the sweep cannot fit: of calls that follow each other for longer, of larger products, and of backwards.
NOT_OF_THE_SWEEP = ("held_flops", "cublas_flops", "remat_us")


def scalars(rates):
    """Every number of the rates that is fitted: the field, the key in it (None for a number), the value."""
    for field, value in rates._asdict().items():
        if field in NOT_OF_THE_SWEEP:
            continue
        if isinstance(value, dict):
            yield from ((field, key, v) for key, v in value.items() if v)
        elif isinstance(value, tuple):
            yield from ((field, key, v) for key, v in enumerate(value))
        else:
            yield field, None, value


def with_value(rates, field, key, value):
    old = getattr(rates, field)
    if isinstance(old, dict):
        value = {**old, key: value}
    elif isinstance(old, tuple):
        value = (*old[:key], value, *old[key + 1 :])
    return rates._replace(**{field: value})


def fit(file, rounds=3):
    """Change one number after the other by a few per cent, up and down, as long as the loss shrinks."""
    lines = [json.loads(line) for line in Path(file).read_text().splitlines() if line.startswith('{"shape"')]
    rates, least = H200, loss(lines, H200)
    print(f"loss {least:.5f}")
    for turn in range(int(rounds)):
        for field, key, value in list(scalars(rates)):
            for factor in (1 + 0.08 / (turn + 1), 1 / (1 + 0.08 / (turn + 1))):
                trial = with_value(rates, field, key, float(f"{value * factor:.3g}"))
                if (of_trial := loss(lines, trial)) < least:
                    rates, least = trial, of_trial
        print(f"loss {least:.5f} after round {turn + 1}", flush=True)
    path = Path(__file__).resolve().parents[1] / "gsbn" / "_plan" / "h200.py"
    head = path.read_text().partition("H200 = ")[0]
    fields = "".join(f"    {name}={value!r},\n" for name, value in rates._asdict().items())
    path.write_text(f"{head}H200 = Rates(\n{fields})\n")


def judge(file, bandwidth=1.0, most=15):
    lines = judged(file, bandwidth)
    print(f"{len(lines)} problems over {len({tuple(line['shape']) for line in lines})} shapes")
    for line in lines:
        if "wrong" in line:
            print("wrong:", line)
    for key, limit in (("regret", 0.05), ("of peer", 1.0), ("of cublas", 1.0)):
        over = sorted((line for line in lines if line[key] > limit), key=lambda line: -line[key])
        middle = statistics.median(line[key] for line in lines)
        print(f"\n{key} over {limit}: {len(over)} of {len(lines)}; median {middle:.3f}")
        for line in over[:most]:
            times = " ".join(f"{name} {t}" for name, t in sorted(line["us"].items(), key=lambda item: item[1])[:5])
            print(f"  {line[key]:6.3f} {line['shape']} {line['dtype']} {line['mode']}: {line['own']}; {times}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        limit, skip = float((*sys.argv[2:3], 110)[0]), int((*sys.argv[3:4], 0)[0])
        measure(limit, skip, sys.argv[4:] or list(DTYPES))
    elif sys.argv[1:2] == ["judge"]:
        judge(*sys.argv[2:4])
    elif sys.argv[1:2] == ["fit"]:
        fit(*sys.argv[2:4])
    else:
        sys.exit(__doc__)
