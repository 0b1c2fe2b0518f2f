// fp32, fp64, fp16 and bf16; comparisons; conversions; the special function unit.
#pragma once

#include "formats.hpp"
#include "integer.hpp"

constexpr u32 NAN32 = 0x7fffffff;

inline void put_floats(Warp& w, const Operand& o, float* x, bool flush, bool saturate = false) {
    u32 out[LANES];
    for (int l = 0; l < LANES; l++) {
        float y = flush ? flushed(x[l]) : x[l];
        if (saturate) y = y > 0 ? (y < 1 ? y : 1.0f) : 0.0f;
        out[l] = y != y ? NAN32 : as_bits(y);
    }
    put(w, o, out);
}

inline void floats_in(const Warp& w, const Operand& o, float* out, bool flush) {
    u32 s[LANES];
    memcpy(out, floats(w, o, s), 4 * LANES);
    if (flush)
        for (int l = 0; l < LANES; l++) out[l] = flushed(out[l]);
}

// FADD, FMUL, FFMA: mod[0] .FTZ, mod[1] rounding, mod[2] .SAT.
inline void fadd(Warp& w, const Instruction& i) {
    float a[LANES], b[LANES], x[LANES];
    floats_in(w, i.o[A], a, i.mod[0]);
    floats_in(w, i.o[B], b, i.mod[0]);
    for (int l = 0; l < LANES; l++) {
        if (i.mod[1] == NEAREST) {
            x[l] = a[l] + b[l];
            continue;
        }
        double s = double(a[l]) + b[l];
        x[l] = narrow(s, sum_error(a[l], b[l], s), i.mod[1]);
        if (s == 0 && a[l] == -b[l] && a[l] != 0) x[l] = i.mod[1] == DOWN ? -0.0f : 0.0f;
    }
    put_floats(w, i.o[DST], x, i.mod[0], i.mod[2]);
}

inline void fmul(Warp& w, const Instruction& i) {
    float a[LANES], b[LANES], x[LANES];
    floats_in(w, i.o[A], a, i.mod[0]);
    floats_in(w, i.o[B], b, i.mod[0]);
    for (int l = 0; l < LANES; l++)
        x[l] = i.mod[1] == NEAREST ? a[l] * b[l] : narrow(double(a[l]) * b[l], 0, i.mod[1]);
    put_floats(w, i.o[DST], x, i.mod[0], i.mod[2]);
}

inline void ffma(Warp& w, const Instruction& i) {
    float a[LANES], b[LANES], c[LANES], x[LANES];
    floats_in(w, i.o[A], a, i.mod[0]);
    floats_in(w, i.o[B], b, i.mod[0]);
    floats_in(w, i.o[C], c, i.mod[0]);
    if (i.mod[1] == NEAREST) {
        for (int l = 0; l < LANES; l++) x[l] = fmaf(a[l], b[l], c[l]);
    } else {
        for (int l = 0; l < LANES; l++) {
            double p = double(a[l]) * b[l], s = p + c[l];
            x[l] = narrow(s, sum_error(p, c[l], s), i.mod[1]);
            if (s == 0 && p == -double(c[l]) && p != 0) x[l] = i.mod[1] == DOWN ? -0.0f : 0.0f;
        }
    }
    put_floats(w, i.o[DST], x, i.mod[0], i.mod[2]);
}

template <typename T>
inline T least_or_most(T a, T b, bool least, bool keeps_nan) {
    if (a != a || b != b) {
        if (keeps_nan || (a != a && b != b)) return T(NAN);
        return a != a ? b : a;
    }
    if (a == b) return std::signbit(a) == least ? a : b;
    return (a < b) == least ? a : b;
}

// FMNMX: mod[0] .FTZ, mod[1] .NAN. A predicate that holds asks for the minimum.
inline void fmnmx(Warp& w, const Instruction& i) {
    float a[LANES], b[LANES], x[LANES];
    floats_in(w, i.o[A], a, i.mod[0]);
    floats_in(w, i.o[B], b, i.mod[0]);
    u32 p = predicate(w, i.o[IN0]);
    for (int l = 0; l < LANES; l++) x[l] = least_or_most(a[l], b[l], lane_on(p, l), i.mod[1]);
    put_floats(w, i.o[DST], x, i.mod[0]);
}

// FSETP: mod[0] comparison, mod[1] combination, mod[2] .FTZ. FSET the same into a register;
// mod[3] .BF: 1.0 instead of ones.
inline void fsetp(Warp& w, const Instruction& i, bool to_register) {
    float a[LANES], b[LANES];
    floats_in(w, i.o[A], a, i.mod[2]);
    floats_in(w, i.o[B], b, i.mod[2]);
    u32 found = lanes_where([&](int l) { return compares(i.mod[0], a[l], b[l]); });
    u32 in = predicate(w, i.o[IN0]);
    if (!to_register) {
        put_comparison(w, i, found, i.mod[1], in);
        return;
    }
    u32 both = i.mod[1] == 0 ? found & in : i.mod[1] == 1 ? found | in : found ^ in, out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = lane_on(both, l) ? (i.mod[3] ? 0x3f800000 : ~0u) : 0;
    put(w, i.o[DST], out);
}

// FCHK: whether a quotient needs the slow way; both ways give the same result, so this errs to it.
inline void fchk(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES];
    const u32 *a = floats(w, i.o[A], sa), *b = floats(w, i.o[B], sb);
    u32 found = lanes_where([&](int l) {
        int ea = a[l] >> 23 & 255, eb = b[l] >> 23 & 255;
        return ea == 255 || eb == 255 || eb == 0 || ea < 26 || eb > 252 || ea - eb > 125 ||
               ea - eb < -124;
    });
    put_predicate(w, i.o[OUT0], found);
}

// DADD, DMUL, DFMA: mod[1] rounding.
inline void double_operation(Warp& w, const Instruction& i, int which) {
    double a[LANES], b[LANES], c[LANES], x[LANES];
    doubles(w, i.o[A], a);
    doubles(w, i.o[B], b);
    doubles(w, i.o[C], c);
    static const int modes[4] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
    int before = fegetround();
    if (i.mod[1]) fesetround(modes[i.mod[1]]);
    for (int l = 0; l < LANES; l++) {
        volatile double p = a[l], q = b[l], r = c[l], y;
        if (which == 0)
            y = p + q;
        else if (which == 1)
            y = p * q;
        else
            y = fma(p, q, r);
        x[l] = y;
    }
    if (i.mod[1]) fesetround(before);
    put_doubles(w, i.o[DST], x);
}

inline void dsetp(Warp& w, const Instruction& i) {
    double a[LANES], b[LANES];
    doubles(w, i.o[A], a);
    doubles(w, i.o[B], b);
    if (i.mod[2]) {  // .MIN, .MAX: whether a is chosen, and whether both are NaN
        u32 chosen = lanes_where([&](int l) {
            return std::isnan(b[l]) || (i.mod[2] == 1 ? a[l] <= b[l] : a[l] >= b[l]);
        });
        put_predicate(w, i.o[OUT0], chosen);
        put_predicate(w, i.o[OUT1], lanes_where([&](int l) {
                          return std::isnan(a[l]) && std::isnan(b[l]);
                      }));
        return;
    }
    u32 found = lanes_where([&](int l) { return compares(i.mod[0], a[l], b[l]); });
    put_comparison(w, i, found, i.mod[1], predicate(w, i.o[IN0]));
}

enum { COSINE, SINE, EX2, LG2, RCP, RSQ, RCP64H, RSQ64H, SQUARE_ROOT, TANH };

// A function's value and how far the unit may be off: relative (PTX ISA's bounds), or absolute.
inline double special(int f, double x, double* relative, double* absolute) {
    constexpr double ULP = 1.0 / (1 << 23);
    *relative = 0;
    *absolute = 0;
    switch (f) {
        case COSINE: *absolute = 5e-7; return cos(6.283185307179586476925 * (x - std::floor(x)));
        case SINE: *absolute = 5e-7; return sin(6.283185307179586476925 * (x - std::trunc(x)));
        case EX2: *relative = 2 * ULP; return exp2(x);
        case LG2: *absolute = 1.0 / (1 << 22); return log2(x);
        case RCP: *relative = ULP; return 1 / x;
        case RSQ: *relative = 2 * ULP; return 1 / sqrt(x);
        case SQUARE_ROOT: *relative = 2 * ULP; return sqrt(x);
        default: *relative = 1.0 / (1 << 11); return tanh(x);
    }
}

// MUFU: mod[0] function. Subnormal numbers count as zero, going in and coming out.
inline void mufu(Warp& w, const Instruction& i) {
    u32 s[LANES], out[LANES];
    const u32* a = floats(w, i.o[A], s);
    int f = i.mod[0], mode = w.block->machine->launch->mufu;
    for (int l = 0; l < LANES; l++) {
        if (f == RCP64H || f == RSQ64H) {
            u64 bits = u64(a[l]) << 32;
            double x;
            memcpy(&x, &bits, 8);
            double y = f == RCP64H ? 1 / x : 1 / sqrt(x);
            memcpy(&bits, &y, 8);
            out[l] = std::isnan(y) ? 0xfff80000 : u32(bits >> 32);
            continue;
        }
        float x = flushed(as_float(a[l]));
        double relative, absolute, y = special(f, x, &relative, &absolute);
        if (mode && std::isfinite(y) && y != 0 && !(f == LG2 && x == 1)) {
            double off = std::fabs(y) * relative + absolute;
            y += mode == 1 ? off : -off;
        }
        float z = flushed(float(y));
        out[l] = z != z ? NAN32 : as_bits(z);
    }
    put(w, i.o[DST], out);
}

inline double rounded(double x, int mode) {  // to whole numbers: nearest even, down, up, to zero
    switch (mode) {
        case NEAREST: return std::nearbyint(x);
        case DOWN: return std::floor(x);
        case UP: return std::ceil(x);
        default: return std::trunc(x);
    }
}

enum { TYPE_F32, TYPE_F64, TYPE_F16, TYPE_BF16 };

inline void numbers_in(const Warp& w, const Operand& o, int type, bool flush, double* out) {
    if (type == TYPE_F64) {
        doubles(w, o, out);
        return;
    }
    u32 s[LANES];
    const u32* a = raw(w, o, s);
    for (int l = 0; l < LANES; l++) {
        u32 part = o.part == P_H1 || o.part == P_H1_H1 ? a[l] >> 16 : a[l] & 0xffff;
        float x = type == TYPE_F32 ? as_float(a[l]) : type == TYPE_F16 ? from_half(part) : from_bf16(part);
        if (flush) x = flushed(x);
        if (o.flags & F_ABSOLUTE) x = std::fabs(x);
        if (o.flags & F_NEGATED) x = -x;
        out[l] = x;
    }
}

inline void numbers_out(Warp& w, const Operand& o, int type, int mode, bool flush, const double* x) {
    if (type == TYPE_F64) {
        put_doubles(w, o, x);
        return;
    }
    u32 out[LANES];
    for (int l = 0; l < LANES; l++) {
        if (type == TYPE_F32) {
            float y = narrow(x[l], 0, mode);
            if (flush) y = flushed(y);
            out[l] = y != y ? NAN32 : as_bits(y);
        } else {
            out[l] = type == TYPE_F16 ? to_half(x[l], 0, mode) : to_bf16(x[l], 0, mode);
        }
    }
    put(w, o, out);
}

// F2F: mod[0] from, mod[1] to, mod[2] rounding, mod[3] .FTZ. FRND: mod[0] type, to whole numbers.
inline void f2f(Warp& w, const Instruction& i, bool whole) {
    double x[LANES];
    numbers_in(w, i.o[A], i.mod[0], i.mod[3], x);
    if (whole)
        for (int l = 0; l < LANES; l++) x[l] = std::copysign(rounded(x[l], i.mod[2]), x[l]);
    numbers_out(w, i.o[DST], whole ? i.mod[0] : i.mod[1], whole ? int(NEAREST) : i.mod[2], i.mod[3], x);
}

struct Integer {  // a whole type: S32, U32, S64, U64, S16, U16, S8, U8
    int bits;
    bool is_signed;
};
constexpr Integer INTEGERS[8] = {{32, true}, {32, false}, {64, true}, {64, false},
                                 {16, true}, {16, false}, {8, true},  {8, false}};

// F2I: mod[0] whole type, mod[1] from, mod[2] rounding, mod[3] .NTZ, mod[4] .FTZ.
// Values beyond the type become its nearest; NaN becomes 0 with .NTZ, otherwise 0x80….
inline void f2i(Warp& w, const Instruction& i) {
    double x[LANES];
    u64 out[LANES];
    numbers_in(w, i.o[A], i.mod[1], i.mod[4], x);
    Integer type = INTEGERS[i.mod[0]];
    for (int l = 0; l < LANES; l++) {
        double y = rounded(x[l], i.mod[2]), most = ldexp(1, type.bits - type.is_signed);
        u64 all = type.bits == 64 ? ~0ull : (1ull << type.bits) - 1;
        if (y != y)
            out[l] = i.mod[3] ? 0 : 1ull << (type.bits - 1);
        else if (type.is_signed)
            out[l] = y >= most ? all >> 1 : y < -most ? 1ull << (type.bits - 1) : u64(i64(y));
        else
            out[l] = y >= most ? all : y <= 0 ? 0 : u64(y);
        if (type.bits < 32 && type.is_signed && y == y) out[l] = u64(i64(out[l] << (64 - type.bits)) >> (64 - type.bits));
    }
    if (type.bits == 64) {
        put_wide(w, i.o[DST], out);
        return;
    }
    u32 low[LANES];
    for (int l = 0; l < LANES; l++) low[l] = u32(out[l]);
    put(w, i.o[DST], low);
}

// I2F: mod[0] whole type, mod[1] to, mod[2] rounding.
inline void i2f(Warp& w, const Instruction& i) {
    Integer type = INTEGERS[i.mod[0]];
    u64 x[LANES];
    u32 s[LANES];
    if (type.bits == 64) {
        wide(w, i.o[A], x);
    } else {
        const u32* a = integers(w, i.o[A], s);
        int part = i.o[A].part;
        int by = part >= P_B0 && part <= P_B3 ? 8 * (part - P_B0) : part == P_H1 || part == P_H1_H1 ? 16 : 0;
        for (int l = 0; l < LANES; l++) {
            u64 y = u64(a[l]) >> by << (64 - type.bits);
            x[l] = type.is_signed ? u64(i64(y) >> (64 - type.bits)) : y >> (64 - type.bits);
        }
    }
    if (i.mod[1] == TYPE_F32 || i.mod[1] == TYPE_F16) {
        u32 out[LANES];
        for (int l = 0; l < LANES; l++) {
            double hi, err;
            if (type.is_signed) {
                hi = double(i64(x[l]));
                err = hi >= 9.3e18 ? -1 : double(i64(x[l]) - (hi >= 9223372036854775808.0 ? INT64_MAX : i64(hi)));
                if (hi >= 9223372036854775808.0) err -= 1;
            } else {
                hi = double(x[l]);
                err = hi >= 18446744073709551616.0 ? double(i64(x[l])) : double(i64(x[l] - u64(hi)));
            }
            out[l] = i.mod[1] == TYPE_F16 ? to_half(hi, err, i.mod[2]) : as_bits(narrow(hi, err, i.mod[2]));
        }
        put(w, i.o[DST], out);
        return;
    }
    if (i.mod[2] != NEAREST) fail("a conversion to fp64 that does not round to nearest");
    double out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = type.is_signed ? double(i64(x[l])) : double(x[l]);
    put_doubles(w, i.o[DST], out);
}
