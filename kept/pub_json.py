import sys,json,dataclasses
from pathlib import Path
from gsbn.bench.report import Report,Result,Settings
from gsbn.bench.rates import Rates
from gsbn.bench.case import Case
from gsbn.bench.clock import Measurement
from gsbn.bench import publish as P
print(Measurement.__doc__, [f.name for f in dataclasses.fields(Measurement)], [f.name for f in dataclasses.fields(Rates)])
for name in sys.argv[2:]:
    d=json.load(open(f"{sys.argv[1]}/{name}.json"))
    res=[]
    for r in d["results"]:
        case=Case(**{f.name:r[f.name] for f in dataclasses.fields(Case)})
        m=lambda n: None if r.get(n+"_us") is None else Measurement(*(x*1e-6 for x in (r[n+"_us"],r[n+"_low_us"],r[n+"_high_us"])), samples=0, confidence=0.95)
        res.append(Result(case,r["candidate"],r["path"],r["method"],r["calls"],m("time"),m("host"),r["extra_bytes"],r["error"],r["failure"]))
    rep=Report(d["environment"],Settings(**d["settings"]),Rates(**d["rates"]),tuple(res),d["interrupted"],d["date"])
    print(P.publish(rep,Path("."),name))
    back=json.load(open(f"docs/results/{name}.json")); 
    bad=sum(abs((a.get(k) or 0)-(b.get(k) or 0))>1e-6*abs(b.get(k) or 0)+1e-12 for a,b in zip(back["results"],d["results"]) for k in b if isinstance(b[k],float)); print(name,len(back["results"]),len(d["results"]),"differences",bad)
