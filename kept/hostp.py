import sys, time; sys.path.insert(0,'/work/main/tests'); sys.path.insert(0,'/work/main')
import paper, gsbn
x=paper.Array((128,1024),"bfloat16"); w=paper.Array((512,1024),"bfloat16"); y=paper.Array((128,512),"bfloat16")
v={n: paper.Array((512,),"float32") for n in ("scale","bias","gamma","beta","running_mean","running_var")}
with paper.gpu(paper.HOPPER) as (kind, log):
    f=lambda: gsbn.forward(x,w,v["scale"],bias=v["bias"],gamma=v["gamma"],beta=v["beta"],running_mean=v["running_mean"],running_var=v["running_var"],training=True,out=y)
    for _ in range(200): f()
    best=1e9
    for _ in range(7):
        t=time.perf_counter()
        for _ in range(2000): f()
        best=min(best,(time.perf_counter()-t)/2000)
    print("us", best*1e6)
    if len(sys.argv)>1:
        import cProfile,pstats
        p=cProfile.Profile(); p.enable()
        for _ in range(3000): f()
        p.disable(); pstats.Stats(p).sort_stats('tottime').print_stats(22)
