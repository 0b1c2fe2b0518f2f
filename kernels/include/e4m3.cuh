// fp8 e4m3 ("e4m3fn"): sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f and 0xff are NaN, there
// is no infinity, the largest number is 448. Every value is exact in fp16, bf16 and fp32.
#pragma once

#include "device.cuh"

// Two neighbouring values, the low byte first, rounded to T (which changes none of them).
template <class T>
__device__ __forceinline__ uint32 pack2_e4m3(uint32 low, uint32 high) {
    auto value = [](uint32 code) {
        const uint32 magnitude = code & 0x7fu;
        // As fp32 bits the exponent is short of the bias by 127 - 7: a product with 2^120 puts it
        // right, subnormal numbers included, and is exact.
        const float scaled = bits_float(magnitude << 20) * bits_float((120u + 127u) << 23);
        const uint32 bits = magnitude == 0x7fu ? 0x7fc00000u : float_bits(scaled);
        return bits_float(bits | (code & 0x80u) << 24);
    };
    return pack2<T>(value(low), value(high));
}

// Eight neighbouring values, of the lower or the upper half of sixteen codes, rounded to T likewise.
template <class T>
__device__ __forceinline__ Vec16 eight_e4m3(const Vec16& codes, int half) {
    Vec16 values;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        const uint32 pair = codes[2 * half + word / 2] >> 16 * (word % 2);
        values[word] = pack2_e4m3<T>(pair & 0xffu, pair >> 8 & 0xffu);
    }
    return values;
}
