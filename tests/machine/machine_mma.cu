// One m16n8 product a warp, fragments as they lie in memory: a (4 or 2 words), b, c and d of a thread.
typedef unsigned int u32;
extern "C" __global__ void mma_f16(const u32* a, const u32* b, const u32* c, u32* d) {
    int t = blockIdx.x * 32 + threadIdx.x;
    a += 4 * t, b += 2 * t, c += 4 * t, d += 4 * t;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
          "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
extern "C" __global__ void mma_bf16(const u32* a, const u32* b, const u32* c, u32* d) {
    int t = blockIdx.x * 32 + threadIdx.x;
    a += 4 * t, b += 2 * t, c += 4 * t, d += 4 * t;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
          "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
extern "C" __global__ void mma_tf32(const u32* a, const u32* b, const u32* c, u32* d) {
    int t = blockIdx.x * 32 + threadIdx.x;
    a += 4 * t, b += 2 * t, c += 4 * t, d += 4 * t;
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
          "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
