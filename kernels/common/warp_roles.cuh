// For kernels whose warps have different roles (Hopper): the number of registers of each role, barriers in the shared
// memory of this CTA and of other CTAs of the cluster, and stores to other CTAs. No kernels.
#pragma once

__device__ __forceinline__ unsigned smem(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// Changes the number of registers of each thread of a warpgroup; all warps of the warpgroup call this.
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void mbar_init(unsigned long long* bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem(bar)), "r"(count));
}

// Makes initialised barriers visible to the other CTAs of the cluster and to TMA.
__device__ __forceinline__ void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbar_expect(unsigned long long* bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem(bar)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbar_arrive(unsigned long long* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem(bar)) : "memory");
}

__device__ __forceinline__ void mbar_wait(unsigned long long* bar, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(smem(bar)),
        "r"(phase)
        : "memory");
}

// Returns whether mbar_wait would return at once.
__device__ __forceinline__ bool mbar_test(unsigned long long* bar, int phase) {
    unsigned done;
    asm volatile(
        "{\n.reg .pred is_done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 is_done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, is_done;\n}"
        : "=r"(done)
        : "r"(smem(bar)), "r"(phase)
        : "memory");
    return done;
}

// mbar_wait for data that other CTAs of the cluster wrote and that the barrier counts.
__device__ __forceinline__ void mbar_wait_sent(unsigned long long* bar, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(smem(bar)),
        "r"(phase)
        : "memory");
}

// All threads of a cluster arrive, and later wait for each other. The arrival is relaxed: of another CTA's writes, a
// thread then sees only those that were fenced for the cluster, such as initialised barriers.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Arrives at another CTA's barrier. This is relaxed: it only says that this CTA has read some memory, which is now
// free. A release would cost a fence.
__device__ __forceinline__ void mbar_arrive_at(unsigned long long* bar, int cta) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(smem(bar)),
        "r"(cta)
        : "memory");
}

// Stores 16 bytes to the same address in another CTA of the cluster, and counts them at its barrier.
__device__ __forceinline__ void send(void* to, float a, float b, float c, float d, unsigned long long* bar, int cta) {
    asm volatile(
        "{\n.reg .b32 place, there;\nmapa.shared::cluster.u32 place, %0, %6;\nmapa.shared::cluster.u32 there, %5, %6;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%1, %2, %3, %4}, [there];\n}" ::"r"(
            smem(to)),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(smem(bar)), "r"(cta)
        : "memory");
}
__device__ __forceinline__ void send(void* to, double a, double b, unsigned long long* bar, int cta) {
    asm volatile(
        "{\n.reg .b32 place, there;\nmapa.shared::cluster.u32 place, %0, %4;\nmapa.shared::cluster.u32 there, %3, %4;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [place], {%1, %2}, [there];\n}" ::"r"(smem(to)),
        "d"(a), "d"(b), "r"(smem(bar)), "r"(cta)
        : "memory");
}

// The same for 8 bytes.
__device__ __forceinline__ void send(void* to, float a, float b, unsigned long long* bar, int cta) {
    asm volatile(
        "{\n.reg .b32 place, there;\nmapa.shared::cluster.u32 place, %0, %4;\nmapa.shared::cluster.u32 there, %3, %4;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [place], {%1, %2}, [there];\n}" ::"r"(smem(to)),
        "f"(a), "f"(b), "r"(smem(bar)), "r"(cta)
        : "memory");
}
