# Few rows, weight from memory: what a stage more, more CTAs or fewer features change. PYTHONPATH=. python lab/stream.py
import statistics, torch
import gsbn
from gsbn import _forward, _tma
from gsbn._forward import forward_within
from gsbn._plan import Limits, variants

stages = variants.stages
flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))

def us(call, rounds=25):
    for _ in range(3): call()
    found = []
    for _ in range(rounds):
        flush.fill_(1)
        torch.cuda._sleep(200_000)
        a.record(); call(); b.record(); b.synchronize()
        found.append(1e3 * a.elapsed_time(b))
    return statistics.median(found)

def row(m, k, n, dtype, training, tiles):
    x = torch.randn(m, k, device="cuda").to(dtype); w = (torch.randn(n, k, device="cuda") / k**.5).to(dtype)
    s = torch.rand(n, device="cuda") + .5; rm, rv = torch.zeros(n, device="cuda"), torch.ones(n, device="cuda")
    cells = []
    for tile, whole in tiles:
        for st in (4, 6, 8, 9, 10):
            variants.stages = lambda element, rows, st=st: (st if rows == 32 else stages("bfloat16", rows)) // (2 if variants.by_limbs(element) else 1)
            _forward._calls.clear(); _tma.tensor_maps.cache_clear()
            lim = Limits(sm90=tile, whole=whole, split=len(tile) > 2)
            try:
                t = us(lambda: forward_within(lim, x, w, s, running_mean=rm, running_var=rv, training=training, gemm="sm90"))
                cells.append(f"{'x'.join(map(str, tile))}{' whole' if whole else ''} {st}: {t:.1f}")
            except Exception as e: cells.append(f"{tile} {st}: {str(e)[:40]}")
    variants.stages = stages
    lin = us(lambda: torch.nn.functional.linear(x, w))
    mb = n * k * x.element_size() / 1e6
    print((m, k, n), str(dtype)[6:], "training" if training else "inference", f"weight {mb:.0f} MB, at 4.3 TB/s {mb/4.3:.1f}, linear {lin:.1f} |", " | ".join(cells), flush=True)

with torch.no_grad():
    for n in (4096, 8192, 8448, 11008, 16896):
        row(8, 4096, n, torch.bfloat16, False, [((32, 1), False)])
    row(8, 4096, 11008, torch.bfloat16, True, [((32, 1), True)])
    row(32, 4096, 11008, torch.bfloat16, False, [((32, 1), False)])
    row(8, 8192, 8192, torch.bfloat16, False, [((32, 1), False), ((16, 1, 2), False)])
    row(32, 8192, 8192, torch.bfloat16, True, [((32, 1), True), ((16, 1, 2), True)])
    row(64, 8192, 8192, torch.bfloat16, True, [((32, 2), True), ((32, 1, 2), True)])
