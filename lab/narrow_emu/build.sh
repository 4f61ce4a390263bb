mk() { sed -e 's/^ *asm("mul.rn.f32.*$/c = a * b;/' $1 > $2; }
mk old.cu old_e.cu; mk /work/wt-narrow/kernels/split_limbs.cu new_e.cu
F="-std=c++20 -O2 -w -fPIC -shared -pthread -I. -I/usr/local/cuda-13.0/include"
b() { g++ $F "-DSOURCE=\"$1\"" $2 main.cpp -o $3 2>&1 | head -20; }
[ "$1" = old ] && { b old_e.cu -DROW_WARPS=1 old1.so; b old_e.cu -DROW_WARPS=8 old8.so; }
for w in 64 128 256 512 1024 8192; do b new_e.cu -DWIDTH=$w new$w.so; done; ls *.so
