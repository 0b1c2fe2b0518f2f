// Pipelines that are right (BUG 0), and the same with one thing wrong. By 128 threads.
//
//   copies_N   cp.async in two stages; each thread sums what others have copied       (any card)
//   products_N TMA in two stages, wgmma 64 x 64 x 64 a stage, TMA store               (sm_90a)
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

template <int BUG>
__device__ __forceinline__ void copies(const float* x, float* y, int tiles) {
    __shared__ alignas(16) float stage[2][512];
    int t = threadIdx.x;
    float sum = 0;
    auto fetch = [&](int i) {
        int place = BUG == 6 ? 0 : i & 1;
        int from = BUG == 7 ? i + 1 : i;
        if (i < tiles)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(&stage[place][4 * t])),
                         "l"(__cvta_generic_to_global(x + 512 * (from % tiles) + 4 * t)) : "memory");
        if (BUG != 3) asm volatile("cp.async.commit_group;" ::: "memory");
    };
    fetch(0);
    for (int i = 0; i < tiles; i++) {
        if (BUG == 8) {
            if (i + 1 < tiles) fetch(i + 1);  // the last wait lets the last copy run on
        } else {
            fetch(i + 1);
        }
        if (BUG == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
        else if (BUG != 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
        if (BUG != 4) __syncthreads();
        for (int k = 0; k < 4; k++) sum += stage[i & 1][(4 * t + 257 * k + 130) % 512] * (k + 1);
        if (BUG != 5) __syncthreads();
    }
    y[t] = sum;
}
#define COPIES(N) \
    extern "C" __global__ void copies_##N(const float* x, float* y, int tiles) { copies<N>(x, y, tiles); }
COPIES(0) COPIES(1) COPIES(2) COPIES(3) COPIES(4) COPIES(5) COPIES(6) COPIES(7) COPIES(8)

#ifdef HOPPER
struct alignas(64) Map { u64 words[16]; };

__device__ __forceinline__ void wait(u32 barrier, int parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra over;\n"
                 "bra again;\nover:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(u32 to, const Map* map, u32 barrier, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1) : "memory");
}

// C (64 x 64) = A (64 x K) B (K x 64), fp16; A K-major, B N-major. Warp 4 loads, warps 0 to 3 multiply.
template <int BUG>
__device__ __forceinline__ void products(const Map* a, const Map* b, const Map* c, int tiles) {
    extern __shared__ unsigned char memory[];
    u32 base = (shared_address(memory) + 1023) & ~1023u;
    u32 left = base, right = base + 2 * 8192, out = base + 4 * 8192, bars = base + 5 * 8192;
    int t = threadIdx.x;
    if (t == 0) {
        for (int s = 0; s < 2; s++) {
            if (BUG != 17) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bars + 8 * s), "r"(BUG == 16 ? 2 : 1) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bars + 16 + 8 * s), "r"(128) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (t >= 128) {
        if (t == 128)
            for (int i = 0; i < tiles; i++) {
                u32 full = bars + 8 * (i & 1), empty = bars + 16 + 8 * (i & 1);
                if (BUG != 3) wait(empty, BUG == 4 ? (i >> 1) & 1 : ((i >> 1) & 1) ^ 1);
                u32 bytes = BUG == 5 ? 8192 : BUG == 6 ? 16384 + 16 : 16384;
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
                load(left + 8192 * (i & 1), a, full, 64 * (BUG == 14 ? i ^ 1 : i), 0);
                load(right + 8192 * (BUG == 15 ? 0 : i & 1), b, full, 0, 64 * i);
            }
    } else {
        float d[32];
        for (int k = 0; k < 32; k++) d[k] = 0;
        for (int i = 0; i < tiles; i++) {
            u32 full = bars + 8 * (i & 1), empty = bars + 16 + 8 * (i & 1);
            if (BUG != 1) wait(full, BUG == 2 ? ((i >> 1) & 1) ^ 1 : (i >> 1) & 1);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            for (int k = 0; k < 4; k++) {
                u64 mode = BUG == 10 ? 2ull << 62 : 1ull << 62;
                u64 da = ((left + 8192 * (i & 1) + 32 * (BUG == 13 ? 0 : k)) & 0x3ffff) >> 4 | 1ull << 16 |
                         (u64)((BUG == 11 ? 512 : 1024) >> 4) << 32 | mode;
                u64 db = ((right + 8192 * (i & 1) + 2048 * k) & 0x3ffff) >> 4 | 512ull << 16 |
                         (u64)((BUG == 12 ? 2048 : 1024) >> 4) << 32 | 1ull << 62;
                asm volatile(
                    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
                    "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, %34;"
                    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                      "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                      "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                    : "l"(da), "l"(db), "n"(BUG == 9 ? 0 : 1));
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (BUG == 7) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty) : "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (BUG != 7 && BUG != 8) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty) : "memory");
        }
        int row = 16 * (t / 32) + t % 32 / 4;
        for (int k = 0; k < 32; k++) {
            int r = row + 8 * (k / 2 % 2), column = 8 * (k / 4) + 2 * (t % 4) + k % 2;
            unsigned short half;
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(d[k]));
            asm volatile("st.shared.b16 [%0], %1;" ::"r"(out + 128 * r + 2 * column), "h"(half) : "memory");
        }
        if (BUG != 18) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        if (BUG != 19) asm volatile("bar.sync 1, 128;" ::: "memory");
        if (t == (BUG == 19 ? 96 : 0)) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%1, {%2, %3}], [%0];" ::"r"(out), "l"(c),
                         "r"(BUG == 20 ? 8 : 0), "r"(0) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            if (BUG != 21) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        }
        if (BUG == 22) asm volatile("bar.sync 2, 160;" ::: "memory");
        asm volatile("bar.sync 1, 128;" ::: "memory");
        if (t < 64) asm volatile("st.shared.b32 [%0], %1;" ::"r"(out + 4 * t), "r"(0) : "memory");
    }
}
#define PRODUCTS(N)                                                                                          \
    extern "C" __global__ void __launch_bounds__(160) products_##N(                                          \
        const __grid_constant__ Map a, const __grid_constant__ Map b, const __grid_constant__ Map c, int n) { \
        products<N>(&a, &b, &c, n);                                                                          \
    }
PRODUCTS(0) PRODUCTS(1) PRODUCTS(2) PRODUCTS(3) PRODUCTS(4) PRODUCTS(5) PRODUCTS(6) PRODUCTS(7) PRODUCTS(8)
PRODUCTS(9) PRODUCTS(10) PRODUCTS(11) PRODUCTS(12) PRODUCTS(13) PRODUCTS(14) PRODUCTS(15) PRODUCTS(16)
PRODUCTS(17) PRODUCTS(18) PRODUCTS(19) PRODUCTS(20) PRODUCTS(21) PRODUCTS(22)
#endif
