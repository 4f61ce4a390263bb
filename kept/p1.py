import sys, math, torch
sys.path.insert(0, ".")
import gsbn
for m,k,n in eval(sys.argv[1]):
    x = torch.randn(m, k, device="cuda").bfloat16(); w = (torch.randn(n, k, device="cuda") / math.sqrt(k)).bfloat16(); dy = torch.randn(m, n, device="cuda").bfloat16()
    s = torch.rand(n, device="cuda")
    y, saved = gsbn.forward(x, w, s, training=True, return_saved=True)
    gsbn.backward(dy, saved)
    torch.cuda.synchronize()
