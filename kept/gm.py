import json,math,sys,collections
for f in sys.argv[1:]:
    d=json.load(open(f)); cells=collections.OrderedDict()
    for r in d["results"]:
        cells.setdefault((r["batch"],r["in_features"],r["out_features"],r["dtype"],r["precision"]),{})[r["candidate"]]=r
    print(f, d["date"], d["interrupted"]); g=collections.defaultdict(list)
    for k,v in cells.items():
        t={c:r["time_us"] for c,r in v.items() if r.get("time_us")}
        ours=t.get("gsbn"); peers={c:u for c,u in t.items() if c in("pytorch","compile")}
        if not ours or not peers: print(k,"missing",t); continue
        q=min(peers.values())/ours; g[k[3]].append(q)
        print(k[:4], {c:round(u,1) for c,u in t.items()}, "best peer/gsbn %.2f"%q, "floor share %.2f"%v["gsbn"].get("floor_share",0), v["gsbn"].get("path"))
    for dt,qs in g.items(): print(dt, "geomean %.3f worst %.2f n %d"%(math.exp(sum(map(math.log,qs))/len(qs)),min(qs),len(qs)))
