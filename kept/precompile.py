"""precompile.py TREE OUT.tar.xz: the cubins of a tree for sm_90, under the names its cache will ask for. Run with vk13."""
import hashlib, os, re, sys, tarfile, shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
tree = Path(sys.argv[1]).resolve(); sys.path.insert(0, str(tree))
store = Path("/tmp/kstore"); store.mkdir(exist_ok=True)
cache = Path("/tmp/kcache"); shutil.rmtree(cache, ignore_errors=True); cache.mkdir()
os.environ["CUPY_CACHE_DIR"] = str(cache)
import gsbn._kernels as K
def closure(name, seen=None):
    seen = {} if seen is None else seen
    if name in seen: return seen
    text = (tree / "kernels" / name).read_text(); seen[name] = text
    for inc in re.findall(r'#include "([^"]+)"', text): closure(inc, seen)
    return seen
def plain(text):
    text = re.sub(r"//[^\n]*", "", text)
    lines, out = text.split("\n"), []
    for line in lines:
        out.append(line.rstrip().rstrip("\\").strip() if not line.lstrip().startswith("#") else line.strip())
    return re.sub(r"\s+", "", "\n".join(out))
_cl, _old = {}, {}
def old_key(kernel):
    if kernel.file not in _old:
        _old[kernel.file] = repr(sorted(closure(kernel.file + ".cu").items()))
    return hashlib.sha256((_old[kernel.file] + repr(K._options(kernel)) + str(kernel.arch)).encode()).hexdigest()[:32]
def key(kernel):
    if kernel.file not in _cl:
        _cl[kernel.file] = repr(sorted((n, plain(x)) for n, x in closure(kernel.file + ".cu").items()))
    return hashlib.sha256((_cl[kernel.file] + repr(K._options(kernel)) + str(kernel.arch)).encode()).hexdigest()[:32]
real = K._compile
def stored(kernel, arch):
    f = store / key(kernel)
    if not f.exists():
        code = real(kernel, arch); t = f.with_suffix(f".{os.getpid()}"); t.write_bytes(code); os.replace(t, f)
    return f.read_bytes()
K._compile = stored
def job(kernel): return K.compiled(kernel, (9, 0)).name
if __name__ == "__main__":
    seen = {(k.file, k.defines): k for k in K.usable((9, 0))}
    moved = 0
    for k in seen.values():
        if (store / old_key(k)).exists() and not (store / key(k)).exists():
            os.link(store / old_key(k), store / key(k)); moved += 1
    print("moved", moved)
    if len(sys.argv) > 3: sys.exit()
    todo = sorted(seen.values(), key=lambda k: (store / key(k)).exists())
    new = sum(not (store / key(k)).exists() for k in todo)
    print(len(todo), "variants,", new, "new", flush=True)
    with ProcessPoolExecutor(2) as pool: names = list(pool.map(job, todo, chunksize=1))
    os.system(f"cd {cache} && tar cf - *.cubin | xz -1 -T2 > {os.path.abspath(sys.argv[2])}")
    print(os.path.getsize(sys.argv[2]) >> 10, "KiB", K.digest())
