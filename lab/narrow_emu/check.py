"""Old and new split_limbs on the CPU, threads for threads: bits equal each other's and NumPy's; guards around all."""
import ctypes, sys, numpy as np
sys.path.insert(0, "/work/wt-narrow")
from gsbn._plan import split_limbs, split_grid, Device
from gsbn._plan.variants import split_rows_at_once
libs = {n: ctypes.CDLL(f"./{n}.so") for n in ("old1","old8","new64","new128","new256","new512","new1024","new8192")}
H = Device((9,0),132)
def P(a): return ctypes.c_void_p(0 if a is None else a.ctypes.data)
def ref(a):
    m, k = a.shape
    mag = np.where(np.isfinite(a), np.abs(a), 0).astype(np.float64)
    top = mag.max(1) if k else np.zeros(m)
    e = np.where(top > 0, np.frexp(top)[1] - 1 - 14, 0)
    with np.errstate(all="ignore"):
        v = np.ldexp(a.astype(np.float64), -e[:, None]).astype(np.float32)
        hi = v.astype(np.float16)
        lo = np.where(np.isfinite(v), v - hi.astype(np.float32), 0).astype(np.float16)
    pad = -(-k // 64) * 64
    out = np.zeros((m, pad // 64, 2, 64), np.float16)
    for l, limb in enumerate((hi, lo)):
        full = np.zeros((m, pad), np.float16); full[:, :k] = limb
        out[:, :, l] = full.reshape(m, pad // 64, 64)
    return out.reshape(m, 2 * pad), e.astype(np.int32)
def bits(a):  # NaN payloads alike
    u = a.view(np.uint16).copy(); u[np.isnan(a)] = 0x7E00; return u
rng = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
def matrix(rows, k, pad, off):
    buf = np.full(rows * (k + pad) + off + 8, np.nan, np.float32)
    start = (-(buf.ctypes.data // 4) % 4 + off)
    a = np.lib.stride_tricks.as_strided(buf[start:], (rows, k), (4 * (k + pad), 4))
    a[...] = rng.standard_normal((rows, k)) * np.exp2(rng.integers(-140, 120, (rows, 1))) * np.exp2(rng.integers(-20, 1, (rows, k)))
    z = rng.random((rows, k)); a[z < .02] = 0; a[(z > .02) & (z < .025)] = np.inf; a[(z > .03) & (z < .035)] = np.nan
    if rows > 2: a[1] = 0
    if rows > 3: a[2] = np.nan
    return buf, a, (k + pad) % 4 == 0 and off == 0
G = 64
for trial in range(int(sys.argv[2]) if len(sys.argv) > 2 else 40):
    k = int(rng.choice([1,3,7,8,9,31,32,33,63,64,65,77,96,100,127,128,129,200,255,256,257,300,511,512,513,1000,1023,1024,1025,2050,8191,8192,8193,9000,17000]))
    at = split_rows_at_once(k)
    m, n = (int(rng.choice([0,1,2,at-1,at,at+1,2*at+3,at//2+1])) for _ in range(2))
    if m + n == 0: m = 5
    pads = rng.choice([0,0,1,3,4,8], 2); offs = rng.choice([0,0,0,1,2], 2)
    (bx, x, vx), (bw, w, vw) = matrix(m, k, pads[0], offs[0]), matrix(n, k, pads[1], offs[1])
    has = [m > 0, n > 0]
    pad = -(-k // 64) * 64
    p = (ctypes.c_longlong * 6)(m, n, k, k + int(pads[0]), k + int(pads[1]), (1 if vx else 0) | (2 if vw else 0))
    width = dict(split_limbs(k).defines)["WIDTH"]
    full = split_grid((m, n), k, H); part = max(1, full // 2)
    results = []
    for lib, grid in ((libs["old8" if k > 1024 else "old1"], -(-(m+n) // (1 if k > 1024 else 8))), (libs["new" + width], full), (libs["new" + width], part)):
        out = []
        args = []
        for a, count, there in ((x, m, has[0]), (w, n, has[1])):
            limbs = np.full(2 * pad * count + 2 * G, 7.125, np.float16)
            s = (-(limbs.ctypes.data // 2)) % 8 + 8   # 16-byte aligned
            exps = np.full(count + 2 * G, -77777, np.int32)
            args += [ctypes.c_void_p(a.ctypes.data), ctypes.c_void_p(limbs.ctypes.data + 2 * s if there else 0), ctypes.c_void_p(exps.ctypes.data + 4 * G if there else 0)]
            out.append((limbs, s, exps))
        lib.run(ctypes.c_uint(grid), p, *args)
        got = []
        for (limbs, s, exps), a, count, there in zip(out, (x, w), (m, n), has):
            if not there: continue
            body = limbs[s:s + 2 * pad * count].reshape(count, 2 * pad)
            assert (limbs[:s] == 7.125).all() and (limbs[s + 2 * pad * count:] == 7.125).all(), "guard"
            e = exps[G:G + count]
            assert (exps[:G] == -77777).all() and (exps[G + count:] == -77777).all(), "guard"
            r, re = ref(a)
            assert (e == re).all(), (k, m, n)
            got.append((bits(body), e)); 
            bad = bits(body) != bits(r)
            # float16 of a float32 subnormal: flushed or not both 0
            assert not bad.any(), (k, m, n, np.argwhere(bad)[:5], body[bad][:5], r[bad][:5])
        results.append(got)
    for other in results[1:]:
        for a, b in zip(results[0], other): assert (a[0] == b[0]).all() and (a[1] == b[1]).all()
    print("ok", k, m, n, width, grid, flush=True)
