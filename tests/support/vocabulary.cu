// Kernels that show one function of the device vocabulary each, on the host and on a GPU.
#include "device.cuh"

// Conversions: every 16-bit pattern to float, and any float to 16 bits and back in pairs.
extern "C" __global__ void convert(Tensor1<const io_t> in, Tensor1<float> widened,
                                   Tensor1<const float> floats, Tensor1<io_t> narrowed,
                                   Tensor1<uint32> packed, Tensor1<float> unpacked, int count,
                                   int float_count) {
    const int stride = gridDim.x * blockDim.x;
    const int first = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = first; i < count; i += stride)
        st_global(widened.data + i, to_float(ld_global(in.data + i)));
    for (int i = first; i < float_count / 2; i += stride) {
        const float lo = ld_global(floats.data + 2 * i), hi = ld_global(floats.data + 2 * i + 1);
        st_global(narrowed.data + 2 * i, from_float<io_t>(lo));
        st_global(narrowed.data + 2 * i + 1, from_float<io_t>(hi));
        const uint32 both = pack2<io_t>(lo, hi);
        st_global(packed.data + i, both);
        float a, b;
        unpack2<io_t>(both, a, b);
        st_global(unpacked.data + 2 * i, a);
        st_global(unpacked.data + 2 * i + 1, b);
    }
}

// d (16 x 8) += a (16 x 16) b (8 x 16, one row a column of B), fragments filled by hand.
extern "C" __global__ void multiply(Tensor4<const io_t> a, Tensor4<const io_t> b,
                                    Tensor4<float> d) {
    const int lane = threadIdx.x, g = lane / 4, q = lane % 4;
    auto pair = [](const io_t* p) { return ld_global(reinterpret_cast<const uint32*>(p)); };
    const int64 m = blockIdx.x;
    const uint32 fa[4] = {pair(a.row(m, 0, g) + 2 * q), pair(a.row(m, 0, g + 8) + 2 * q),
                          pair(a.row(m, 0, g) + 2 * q + 8), pair(a.row(m, 0, g + 8) + 2 * q + 8)};
    const uint32 fb[2] = {pair(b.row(m, 0, g) + 2 * q), pair(b.row(m, 0, g) + 2 * q + 8)};
    float fd[4];
    float* const upper = d.row(m, 0, g) + 2 * q;
    float* const lower = d.row(m, 0, g + 8) + 2 * q;
    for (int i = 0; i < 2; ++i) {
        fd[i] = ld_global(upper + i);
        fd[i + 2] = ld_global(lower + i);
    }
    mma_16816(fd, fa, fb, io_t{});
    for (int i = 0; i < 2; ++i) {
        st_global(upper + i, fd[i]);
        st_global(lower + i, fd[i + 2]);
    }
}

// Two warps load four 8 x 8 matrices each from scattered rows.
extern "C" __global__ void matrices(Tensor1<const uint16> in, Tensor1<const int> rows,
                                    Tensor1<uint32> plain, Tensor1<uint32> transposed) {
    const int t = threadIdx.x;
    uint16* const shared = reinterpret_cast<uint16*>(shared_memory());
    // 64 rows of 8 values, 48 bytes apart, zeros between them.
    for (int c = 0; c < 3; ++c)
        cp_async_16(shared + 24 * t + 8 * c, in.data + 8 * t, c == 0);
    cp_async_commit();
    cp_async_wait<0>();
    block_sync();
    const uint16* const row = shared + 24 * ld_global(rows.data + t);
    uint32 r[4];
    ldmatrix_x4(r, row);
    for (int i = 0; i < 4; ++i) st_global(plain.data + 4 * t + i, r[i]);
    ldmatrix_x4_trans(r, row);
    for (int i = 0; i < 4; ++i) st_global(transposed.data + 4 * t + i, r[i]);
}

extern "C" __global__ void lanes(Tensor1<int> by_xor, Tensor1<float> from_lane, Tensor1<int> who) {
    const int t = threadIdx.x;
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int i = block * blockDim.x + t;
    for (int bit = 0; bit < 5; ++bit)
        st_global(by_xor.data + 5 * i + bit, shfl_xor(t * t, 1 << bit));
    // A different source in every lane, and values of a type other than int.
    st_global(from_lane.data + i, shfl(0.5f * t, (7 * t + 3) % 32));
    const int numbers[] = {t, int(blockIdx.x), int(blockIdx.y), int(blockIdx.z), int(blockDim.x),
                           int(gridDim.x), int(gridDim.y), int(gridDim.z)};
    for (int k = 0; k < 8; ++k) st_global(who.data + 8 * i + k, numbers[k]);
}

extern "C" __global__ void functions(Tensor1<const float> x, Tensor1<float> powers,
                                     Tensor1<float> logs, Tensor1<float> reciprocals,
                                     Tensor1<float> tangents, Tensor1<float> larger,
                                     Tensor1<uint32> bits, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const float v = ld_global(x.data + i);
        st_global(powers.data + i, exp2_approx(v));
        st_global(logs.data + i, log2_approx(v));
        st_global(reciprocals.data + i, reciprocal_approx(v));
        st_global(tangents.data + i, tanh_approx(v));
        st_global(larger.data + i, fmaxf(v, 1.f));
        st_global(bits.data + i, float_bits(v));
    }
    if (bits_float(0xff800000u) != neg_infinity()) st_global(powers.data, 0.f / 0.f);
}

// Every width of a load and store, through global and shared memory.
template <class T>
__device__ void move(const unsigned char* in, unsigned char* out, int bytes) {
    for (int i = threadIdx.x; i < bytes / int(sizeof(T)); i += blockDim.x) {
        T* const slot = reinterpret_cast<T*>(shared_memory()) + i;
        st_shared(slot, ld_global(reinterpret_cast<const T*>(in) + i));
        st_global(reinterpret_cast<T*>(out) + i, ld_shared(slot));
    }
    block_sync();
}
extern "C" __global__ void widths(Tensor3<const unsigned char> in, Tensor3<unsigned char> out) {
    move<unsigned char>(in.at(0, 0, 0), out.at(0, 0, 0), 96);
    move<uint16>(in.at(0, 1, 0), out.at(0, 1, 0), 96);
    move<float>(in.at(1, 0, 0), out.at(1, 0, 0), 96);
    move<Vec8>(in.at(1, 1, 0), out.at(1, 1, 0), 96);
    move<Vec<uint16, 8>>(in.at(2, 0, 0), out.at(2, 0, 0), 96);
    move<Vec16>(in.at(2, 1, 0), out.at(2, 1, 0), 96);
}
