import sys, math, torch
sys.path.insert(0, ".")
import gsbn
from gsbn._backward import backward_within
from gsbn._plan import Limits
DT = {"bf16": (torch.bfloat16, "high"), "f32": (torch.float32, "highest"), "tf32": (torch.float32, "high")}
for a in sys.argv[1:]:
    name, m, k, n = a.split(","); m, k, n = int(m), int(k), int(n)
    dt, prec = DT[name]
    x = torch.randn(m, k, device="cuda").to(dt); w = (torch.randn(n, k, device="cuda") / math.sqrt(k)).to(dt); dy = torch.randn(m, n, device="cuda").to(dt)
    g = torch.rand(n, device="cuda").to(dt)
    with torch.no_grad():
        y, saved = gsbn.forward(x, w, g, gamma=g, beta=g, training=True, return_saved=True, precision=prec)
        backward_within(Limits(narrow=True), dy, saved, needs=("x", "weight", "scale", "gamma", "beta"))
    torch.cuda.synchronize()
