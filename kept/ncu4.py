import torch, gsbn
from gsbn._backward import backward_within
from gsbn._plan import Limits
m, k, n = 95000, 768, 512
x = torch.randn(m, k, device="cuda"); w = torch.randn(n, k, device="cuda") / 20; dy = torch.randn(m, n, device="cuda")
_, saved = gsbn.forward(x, w, training=True, return_saved=True)
for i in range(2): backward_within(Limits(tall=True, narrow=False), dy, saved, needs=("weight",))
torch.cuda.synchronize()
