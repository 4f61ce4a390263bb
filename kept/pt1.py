
import sys
sys.argv=[sys.argv[0],sys.argv[1],'/dev/null',sys.argv[2]]
keep=sys.argv[2] if False else None
src=open('/work/main/lab/precompile.py').read().split('if __name__ == "__main__"')[0].replace('shutil.rmtree(cache, ignore_errors=True); cache.mkdir()','cache.mkdir(exist_ok=True)').replace('/tmp/kcache','/tmp/kcache_trees')
exec(src)
n=0
for k in {(k.file,k.defines):k for k in K.usable((9,0))}.values():
    d=dict(k.defines)
    if k.name=="forward_sm90" and int(d["ELEMENT"])==0 and int(d["MODE"])==2 and int(d["KEEP"])==0 and int(d["RANKS"])==0 and "ACTIVATION" not in d and (int(d["BLOCK_M"]),int(d["CLUSTER"])) in ((256,1),(256,2),(64,2)) and int(d["SPLIT"])==1: K.compiled(k,(9,0)); n+=1
print(n)
