import sys, math, torch; sys.path.insert(0, ".")
import gsbn
from gsbn._forward import forward_within
from gsbn._plan import Limits
m, k, n = 802816 // 4, 128, 128
x = torch.randn(m, k, device="cuda"); w = torch.randn(n, k, device="cuda") / math.sqrt(k); y = torch.empty(m, n, device="cuda")
g = torch.rand(n, device="cuda")
for i in range(3): forward_within(Limits(narrow=True), x, w, gamma=g, training=True, gemm="tiled", out=y)
torch.cuda.synchronize()
