// Number formats: rounding an exact value to fp32, fp16, bf16, e4m3, e5m2, tf32, and back.
#pragma once

#include <cfenv>

#include "operands.hpp"

enum Rounding { NEAREST, DOWN, UP, TO_ZERO };

// hi + err is the exact value; hi is the double nearest to it.
inline float narrow(double hi, double err, int mode) {
    float near = float(hi);
    if (std::isnan(near)) return near;
    if (mode == NEAREST) {
        // A tie of hi that err breaks.
        if (err != 0 && std::isfinite(near)) {
            double rest = hi - double(near);
            float other = nextafterf(near, rest > 0 ? INFINITY : -INFINITY);
            if (rest != 0 && std::isfinite(other)) {
                double half = (double(other) - double(near)) / 2;
                if (rest == half && (err > 0) == (rest > 0)) return other;
            }
        }
        return near;
    }
    if (std::isinf(hi)) return near;
    double rest = std::isinf(near) ? (near > 0 ? -1.0 : 1.0) : hi - double(near);
    if (rest == 0) rest = err;
    bool down = mode == DOWN || (mode == TO_ZERO && hi > 0);
    bool up = mode == UP || (mode == TO_ZERO && hi < 0);
    if (down && rest < 0) return nextafterf(near, -INFINITY);
    if (up && rest > 0) return nextafterf(near, INFINITY);
    return near;
}

// The error of a + b rounded to the double s.
inline double sum_error(double a, double b, double s) {
    if (!std::isfinite(s)) return 0;
    double t = s - a;
    return (a - (s - t)) + (b - t);
}

inline float flushed(float x) {
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

// To a small format with `mantissa` bits behind the point; nearest even or toward zero.
// infinite: the format has an infinity, else what is too large becomes NaN or the largest.
inline u32 pack_small(double x, double err, int mantissa, int exponent_bits, bool saturate,
                      bool infinite, int mode = NEAREST) {
    int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
    u32 sign = u32(std::signbit(x)) << (mantissa + exponent_bits);
    u32 nan = u32(top) << mantissa | (infinite ? (2u << (mantissa - 1)) - 1 : (1u << mantissa) - 1);
    if (std::isnan(x)) return nan;
    double a = std::fabs(x);
    if (std::signbit(x)) err = -err;
    u32 largest = infinite ? (u32(top) << mantissa) - 1 : nan - 1;
    u32 beyond = saturate ? largest : infinite ? u32(top) << mantissa : nan;
    if (std::isinf(a)) return sign | (saturate ? largest : infinite ? u32(top) << mantissa : nan);
    if (a == 0) return sign;
    int e;
    frexp(a, &e);
    e -= 1;
    int least = 1 - bias;
    if (e < least) e = least;
    double scaled = ldexp(a, mantissa - e);
    double whole = std::floor(scaled), rest = scaled - whole;
    bool more;
    if (mode == TO_ZERO || (mode == DOWN && !sign) || (mode == UP && sign))
        more = false;
    else if (mode == NEAREST)
        more = rest > 0.5 || (rest == 0.5 && (err > 0 || (err == 0 && std::fmod(whole, 2) != 0)));
    else
        more = rest > 0 || err > 0;
    if (mode != NEAREST && rest == 0 && err < 0 && !more) whole -= 1;
    u64 bits = u64(whole) + more;
    u64 packed = (u64(e - least) << mantissa) + bits;  // a carry moves into the exponent
    if (packed > largest) return sign | (mode == TO_ZERO ? largest : beyond);
    return sign | u32(packed);
}

inline u32 to_half(double x, double err = 0, int mode = NEAREST) {
    return pack_small(x, err, 10, 5, false, true, mode);
}

inline u32 to_bf16(double x, double err = 0, int mode = NEAREST) {
    return pack_small(x, err, 7, 8, false, true, mode);
}

// Nearest even of fp32, the usual case.
inline u32 half_of(float x) {
    u32 b = as_bits(x), sign = b >> 16 & 0x8000, a = b & 0x7fffffff;
    if (a > 0x7f800000) return 0x7fff;
    if (a >= 0x477ff000) return sign | 0x7c00;
    if (a < 0x38800000) return to_half(x);
    return sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13);
}

inline u32 bf16_of(float x) {
    u32 b = as_bits(x);
    if ((b & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}

inline float from_half(u32 h) {
    u32 sign = (h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31) return as_float(m ? 0x7fffffff : sign | 0x7f800000);
    if (e) return as_float(sign | (e + 112) << 23 | m << 13);
    float x = float(m) * 5.9604644775390625e-08f;
    return sign ? -x : x;
}

inline float from_bf16(u32 h) { return as_float(h << 16); }

inline float from_e4m3(u32 b) {
    u32 e = b >> 3 & 15, m = b & 7;
    if (e == 15 && m == 7) return as_float(0x7fffffff);
    float x = e ? ldexpf(float(8 + m), int(e) - 10) : ldexpf(float(m), -9);
    return b & 128 ? -x : x;
}

inline float from_e5m2(u32 b) { return from_half((b & 255) << 8); }
