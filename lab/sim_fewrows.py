# index arithmetic of MODE WHOLE, in plain Python
import itertools, random, numpy as np
BN=128
def at(i,rank,rows,cols,panel,C):
    grouped=(cols-1)//panel*panel; first=i//(rows*panel)*panel; width=min(panel,cols-first)
    i-=first*rows; r=i//width; c=first+i%width
    return r*C+rank,c
rng=np.random.default_rng(0)
for C,BM in itertools.product((1,2,4,8),(32,64,128,256)):
  for m in sorted({2,3,BM-1,BM,BM+1,C*BM-1,C*BM,random.randint(2,C*BM)}):
    if not 2<=m<=C*BM: continue
    for n in (8,128,136,520,1000):
        blocks=-(-n//BN); rows=-(-m//(BM*C)); assert rows==1; cols=blocks; clusters=blocks
        seen=np.zeros((m,n),int); run=np.zeros(n,int)
        count=-(-m//BM); share=-(-BN//count)
        for q in range(clusters):
            tiles=(rows*cols-1-q)//clusters+1; assert tiles==1
            for rank in range(C):
                r,b=at(q,rank,rows,cols,1,C); assert b==q and r==rank
                seen[r*BM:(r+1)*BM, b*BN:(b+1)*BN]+=1
                if r*share>=BN: continue
                for base in [w*32+96*j for w in range(3) for j in range(2) if w*32+96*j<share]:
                    for lane in range(32):
                        c=r*share+base+lane; f=b*BN+c
                        if base+lane<share and c<BN and f<n: run[f]+=1
        assert (seen==1).all() and (run==1).all(),(C,BM,m,n)
    # ranks with rows exactly those below count
    g=rng.standard_normal(m)+1000; parts=[]
    for r in range(C):
        x=g[r*BM:(r+1)*BM]; parts.append((np.float32(x.mean()),np.float32(((x-x.mean())**2).sum())) if len(x) else (np.nan,0.))
    pivot=parts[0][0]; s=np.float32(0)
    for t in range(count): s+=np.float32(min(m-t*BM,BM))*(parts[t][0]-pivot)
    shift=s/np.float32(m); m2=np.float32(0)
    for t in range(count):
        d=parts[t][0]-pivot-shift; m2+=np.float32(min(m-t*BM,BM))*d*d+parts[t][1]
    assert abs(pivot+shift-g.mean())<1e-3 and abs(m2/m-g.var())<=1e-4*g.var()+1e-7,(C,BM,m)
  # every destination gets every (rank, feature) once; bytes
  for half in range(2):
    got={}
    for rank,warp,lane in itertools.product(range(C),range(4),range(32)):
        within=64*half+16*warp+lane//4; mine=within+8*(lane&1)
        for cta in range((lane&2)//2,C,2): got[(cta,rank,mine)]=got.get((cta,rank,mine),0)+1
    assert all(v==1 for v in got.values()) and len(got)==C*C*64
    assert all(sum(8 for k in got if k[0]==cta)==C*64*8 for cta in range(C))
  # w's parts cover a stage
  for M in (1,2):
    w=np.zeros(M*BN*128,int); limbs=range(M if C>1 else 1)
    for rank in range(C):
        first=rank*(BN//C) if C>1 else 0
        for limb in limbs:
            o=(limb*BN+first)*128; size=(BN//C)*128*(1 if C>1 else M); w[o:o+size]+=1; assert o%1024==0
    assert (w==1).all()
print('ok')
