# y, dx and dw in pieces: tests of all paths that write ragged rows, then beside lab/other (main), then sanitizers. kc.tar.xz of this tree, kc_main of main
mkdir -p ~/.cupy/kernel_cache; for f in lab/kc*.tar.xz; do tar xf $f -C ~/.cupy/kernel_cache; done; export PYTHONPATH=.
timeout 200 python -m pytest -m gpu -q --tb=short -n 16 -p no:cacheprovider --dist=worksteal tests/test_forward_gpu.py tests/test_forward_sm90.py tests/test_backward_gpu.py tests/test_fuzz.py tests/test_neighbours.py tests/test_whole_batch.py tests/test_split_k.py 2>&1 | tail -12 | cut -c1-300
R="(2048,2047,2047),(777,1111,2222),(5000,999,1001),(100,201,301),(4096,1001,1000),(1000,4097,4099),(64,1023,1025)"
A="(128,1024,512),(1024,8192,8192),(4096,1024,1024),(64,16384,1024),(512,16384,1024),(256,256,256),(8,4096,11008),(65536,256,512),(16384,4096,4096)"
timeout 120 python lab/vs.py lab/other "[$R,$A]" bfloat16 8
timeout 60 python lab/vs.py lab/other "[$R]" float32 6
for w in "gemm" "inference" "whole" "training"; do (timeout -s KILL 60 compute-sanitizer --tool memcheck --print-limit 2 python tools/sanitize.py sm90 bfloat16 $w 2>&1 | tail -2 | cut -c1-160 | sed "s/^/$w: /") & done; wait
