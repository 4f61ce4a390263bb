# survey.py: prints shapes of a survey, B,I,O, from a seed
import random, sys, math
r = random.Random(int(sys.argv[1]))
def lg(a, b, m=8): 
    v = math.exp(r.uniform(math.log(a), math.log(b)))
    return max(a, round(v / m) * m) if r.random() < .6 else max(a, 2 ** round(math.log2(v)))
out = []
for n, f in ((14, lambda: (lg(8, 512), lg(256, 16384), lg(256, 16384))), (10, lambda: (round(math.exp(r.uniform(math.log(1e4), math.log(1e6)))), lg(16, 1024), lg(16, 1024))),
             (8, lambda: (lg(512, 16384), lg(128, 8192), lg(128, 8192))), (8, lambda: (round(math.exp(r.uniform(math.log(64), math.log(16384)))), lg(64, 4200) | 1, lg(64, 4200) | 1))):
    k = 0
    while k < n:
        s = f()
        if s[0] * max(s[1:]) < 2**28 and 2 * s[0] * s[1] * s[2] < 6e11 and s not in out: out.append(s); k += 1
for s in out: print(",".join(map(str, s)))
