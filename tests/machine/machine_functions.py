"""Small functions, each compiled alone, and the same on the host with exact arithmetic.

A function takes three 32-bit words a, b, c (``A``, ``B`` the same as floats, ``X``, ``Y``, ``Z``
as 64-bit words ``b:a``, ``c:b``, ``a:c``) and gives one 64-bit word.
"""

# ruff: noqa: E501 (a function and its reference side by side)
from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np

Reference = Callable[[int, int, int], int]
M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF

_BEGIN = """
typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
__device__ __forceinline__ u64 bits(float x) { return (u64)__float_as_uint(x); }
__device__ __forceinline__ u64 bits(double x) { return (u64)__double_as_longlong(x); }
"""
_FUNCTION = """
extern "C" __global__ void NAME(const u32* in, u64* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u32 a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
  float A = __uint_as_float(a), B = __uint_as_float(b), C = __uint_as_float(c);
  u64 X = (u64)b << 32 | a, Y = (u64)c << 32 | b, Z = (u64)a << 32 | c;
  double DX = __longlong_as_double(X), DY = __longlong_as_double(Y), DZ = __longlong_as_double(Z);
  u64 r;
  u32 q = 0;
  BODY
  out[i] = r;
}
"""


def source() -> str:
    """All functions, an entry point each."""
    entries = [_FUNCTION.replace("NAME", name).replace("BODY", body) for name, (body, _) in FUNCTIONS.items()]
    return _BEGIN + "".join(entries)


def signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


def f32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits & M32))[0])


def f64(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits & M64))[0])


def f16(bits: int) -> float:
    return float(np.uint16(bits & 0xFFFF).view(np.float16))


def bf16(bits: int) -> float:
    return f32((bits & 0xFFFF) << 16)


def bits64(x: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", x))[0])


NAN = object()
"""Any NaN will do; a result of this stands for one."""


def to_format(x: Fraction, mantissa: int, exponent: int, mode: str, negative_zero: bool) -> int:
    """The bits of an exact value, rounded to a format with infinities."""
    bias, width = (1 << (exponent - 1)) - 1, mantissa + exponent
    sign = (1 << width) if x < 0 or (x == 0 and negative_zero) else 0
    x = abs(x)
    if x == 0:
        return sign
    e = x.numerator.bit_length() - x.denominator.bit_length()
    while Fraction(2) ** (e + 1) <= x:
        e += 1
    while Fraction(2) ** e > x:
        e -= 1
    e = max(e, 1 - bias)
    scaled = x * Fraction(2) ** (mantissa - e)
    whole, rest = (scaled.numerator // scaled.denominator, scaled - scaled.numerator // scaled.denominator)
    up = {"rz": False, "rm": bool(sign) and rest > 0, "rp": not sign and rest > 0}.get(
        mode, rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    )
    packed = ((e - 1 + bias) << mantissa) + whole + up
    top = ((1 << exponent) - 1) << mantissa
    if packed >= top:
        toward = mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign)
        packed = top - 1 if toward else top
    return sign | packed


def arithmetic(
    op: str, values: list[float], shape: tuple[int, int], mode: str = "rn", ftz: bool = False
) -> int | object:
    """a + b, a * b, a * b + c, a / b or sqrt(a) in IEEE arithmetic."""
    mantissa, exponent = shape
    values = values[: {"sqrt": 1, "fma": 3}.get(op, 2)]
    least = 2.0 ** (2 - (1 << (exponent - 1)))
    if ftz:
        values = [math.copysign(0.0, v) if 0 < abs(v) < least else v for v in values]
    with np.errstate(all="ignore"):
        d = [np.float64(v) for v in values]
        plain = {
            "add": lambda: d[0] + d[1],
            "mul": lambda: d[0] * d[1],
            "fma": lambda: d[0] * d[1] + d[2],
            "div": lambda: d[0] / d[1],
            "sqrt": lambda: np.sqrt(d[0]),
        }[op]()
    width = mantissa + exponent
    if not all(map(math.isfinite, values)) or (op == "div" and values[1] == 0):
        if op == "fma" and not math.isnan(plain):
            infinite = [v for v in values if math.isinf(v)]
            product_sign = math.copysign(1, values[0]) * math.copysign(1, values[1])
            if infinite:
                sign = math.copysign(1, values[2]) if math.isinf(values[2]) else product_sign
                plain = np.float64(sign * math.inf)
        if math.isnan(plain):
            return NAN
        if plain == 0:
            return (1 << width) if math.copysign(1, plain) < 0 else 0
        return ((1 << width) if plain < 0 else 0) | ((1 << exponent) - 1) << mantissa
    f = [Fraction(v) for v in values]
    if op == "sqrt":
        if f[0] < 0:
            return NAN
        if f[0] == 0:
            return bits_of_zero(values[0], width)
        bits = 1200  # enough of the root's that what is cut off breaks no tie
        root = math.isqrt((f[0].numerator << 2 * bits) // f[0].denominator)
        exact = Fraction(root, 1 << bits)
        if exact * exact != f[0]:
            exact += Fraction(1, 1 << (bits + 1))
        x, negative_zero = exact, False
    elif op == "add":
        x = f[0] + f[1]
        negative_zero = sum_sign(values[0], values[1], mode)
    elif op == "mul":
        x = f[0] * f[1]
        negative_zero = math.copysign(1, values[0]) * math.copysign(1, values[1]) < 0
    elif op == "div":
        x = f[0] / f[1]
        negative_zero = math.copysign(1, values[0]) * math.copysign(1, values[1]) < 0
    else:
        x = f[0] * f[1] + f[2]
        product = math.copysign(0.0 if f[0] * f[1] == 0 else 1.0, values[0]) * math.copysign(1, values[1])
        negative_zero = sum_sign(product, values[2], mode)
    result = to_format(x, mantissa, exponent, mode, negative_zero)
    if ftz and result & ((1 << exponent) - 1) << mantissa == 0:
        result &= 1 << width
    return result


def bits_of_zero(x: float, width: int) -> int:
    return (1 << width) if math.copysign(1, x) < 0 else 0


def sum_sign(x: float, y: float, mode: str) -> bool:
    """Whether a sum that is exactly zero is -0."""
    negative = [math.copysign(1, v) < 0 for v in (x, y)]
    if x == 0 and y == 0 and negative[0] == negative[1]:
        return negative[0]
    return mode == "rm"


SINGLE, DOUBLE, HALF, BF16 = (23, 8), (52, 11), (10, 5), (7, 8)


def whole(x: float, mode: str, bits: int, is_signed: bool) -> int | object:
    """cvt from a float to a whole type: saturated; NaN apart."""
    if math.isnan(x):
        return NAN
    if math.isinf(x):
        y = 1 << 80 if x > 0 else -(1 << 80)
    else:
        y = {
            "rni": lambda: int(np.rint(x)) if abs(x) < 2**52 else int(x),
            "rzi": lambda: math.trunc(x),
            "rmi": lambda: math.floor(x),
            "rpi": lambda: math.ceil(x),
        }[mode]()
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    return min(max(y, low), high) & ((1 << bits) - 1)


def funnel(low: int, high: int, by: int, right: bool) -> int:
    both = high << 32 | low
    return (both >> by if right else both << by >> 32) & M32


def permute(a: int, b: int, selector: int) -> int:
    found = 0
    for k in range(4):
        nibble = selector >> 4 * k & 15
        byte = (b << 32 | a) >> 8 * (nibble & 7) & 255
        found |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * k
    return found


def divided(x: int, y: int) -> tuple[int, int]:
    if y == 0:
        return 0, 0
    q = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    return q, x - q * y


def _pair(name: str, form: tuple[int, int], value: Callable[[int], float]) -> Reference:
    def reference(a: int, b: int, c: int) -> int | object:  # type: ignore[return]
        halves = []
        for by in (0, 16):
            x = [value(w >> by) for w in (a, b, c)]
            halves.append(arithmetic(name, x, form))
        if NAN in halves:
            return NAN
        return int(halves[0]) | int(halves[1]) << 16  # type: ignore[call-overload]

    return reference  # type: ignore[return-value]


def _functions() -> dict[str, tuple[str, Reference]]:
    s = signed
    found: dict[str, tuple[str, Reference]] = {
        "add": ("r = a + b;", lambda a, b, c: (a + b) & M32),
        "sub3": ("r = a - b - c;", lambda a, b, c: (a - b - c) & M32),
        "mad": ("r = a * b + c;", lambda a, b, c: (a * b + c) & M32),
        "mul_wide_u": ("r = (u64)a * b;", lambda a, b, c: a * b),
        "mul_wide_s": ("r = (i64)(int)a * (int)b;", lambda a, b, c: s(a) * s(b) & M64),
        "mul_hi_u": ("r = __umulhi(a, b) + c;", lambda a, b, c: ((a * b >> 32) + c) & M32),
        "mul_hi_s": ("r = (u32)__mulhi((int)a, (int)b);", lambda a, b, c: s(a) * s(b) >> 32 & M32),
        "add64": ("r = X + Y;", lambda a, b, c: ((b << 32 | a) + (c << 32 | b)) & M64),
        "sub64": ("r = X - Y;", lambda a, b, c: ((b << 32 | a) - (c << 32 | b)) & M64),
        "sub64_zero": ("r = X - ((u64)c << 32);", lambda a, b, c: ((b << 32 | a) - (c << 32)) & M64),
        "mul64": ("r = X * Y + Z;", lambda a, b, c: ((b << 32 | a) * (c << 32 | b) + (a << 32 | c)) & M64),
        "mul_hi64": ("r = __umul64hi(X, Y);", lambda a, b, c: (b << 32 | a) * (c << 32 | b) >> 64),
        "mul_hi64_s": ("r = __mul64hi(X, Y);", lambda a, b, c: s(b << 32 | a, 64) * s(c << 32 | b, 64) >> 64 & M64),
        "div_u": ("r = b ? a / b : 0;", lambda a, b, c: a // b if b else 0),
        "rem_s": (
            "r = (u32)((int)b && (int)b != -1 ? (int)a % (int)b : 0);",
            lambda a, b, c: divided(s(a), s(b))[1] & M32 if s(b) not in (0, -1) else 0,
        ),
        "div_s": (
            "r = (u32)((int)b && (int)b != -1 ? (int)a / (int)b : 0);",
            lambda a, b, c: divided(s(a), s(b))[0] & M32 if s(b) not in (0, -1) else 0,
        ),
        "div64_u": ("r = Y ? X / Y : 0;", lambda a, b, c: (b << 32 | a) // (c << 32 | b) if c << 32 | b else 0),
        "rem64_u": ("r = b ? X % b : 0;", lambda a, b, c: (b << 32 | a) % b if b else 0),
        "div64_s": (
            "r = (i64)Y && (i64)Y != -1 ? (i64)X / (i64)Y : 0;",
            lambda a, b, c: (
                divided(s(b << 32 | a, 64), s(c << 32 | b, 64))[0] & M64 if (c << 32 | b) not in (0, M64) else 0
            ),
        ),
        "shl_clamp": (
            'asm("shl.b32 %0, %1, %2;" : "=r"(q) : "r"(a), "r"(b & 63)); r = q;',
            lambda a, b, c: a << (b & 63) & M32,
        ),
        "shl_any": (
            'asm("shl.b32 %0, %1, %2;" : "=r"(q) : "r"(a), "r"(b)); r = q;',
            lambda a, b, c: a << b & M32 if b < 32 else 0,
        ),
        "shr_u": ('asm("shr.u32 %0, %1, %2;" : "=r"(q) : "r"(a), "r"(b)); r = q;', lambda a, b, c: a >> min(b, 32)),
        "shr_s": (
            'asm("shr.s32 %0, %1, %2;" : "=r"(q) : "r"(a), "r"(b)); r = q;',
            lambda a, b, c: s(a) >> min(b, 32) & M32,
        ),
        "shl64": (
            'asm("shl.b64 %0, %1, %2;" : "=l"(r) : "l"(X), "r"(c & 127));',
            lambda a, b, c: (b << 32 | a) << (c & 127) & M64,
        ),
        "shr64_u": (
            'asm("shr.u64 %0, %1, %2;" : "=l"(r) : "l"(X), "r"(c & 127));',
            lambda a, b, c: (b << 32 | a) >> (c & 127),
        ),
        "shr64_s": (
            'asm("shr.s64 %0, %1, %2;" : "=l"(r) : "l"(X), "r"(c & 127));',
            lambda a, b, c: s(b << 32 | a, 64) >> (c & 127) & M64,
        ),
        "funnel_l_wrap": ("r = __funnelshift_l(a, b, c);", lambda a, b, c: funnel(a, b, c & 31, False)),
        "funnel_r_wrap": ("r = __funnelshift_r(a, b, c);", lambda a, b, c: funnel(a, b, c & 31, True)),
        "funnel_l_clamp": ("r = __funnelshift_lc(a, b, c);", lambda a, b, c: funnel(a, b, min(c, 32), False)),
        "funnel_r_clamp": ("r = __funnelshift_rc(a, b, c);", lambda a, b, c: funnel(a, b, min(c, 32), True)),
        "logic": ("r = (a & ~b) ^ (b | c);", lambda a, b, c: (a & ~b) ^ (b | c)),
        "logic_test": ("r = (a & b & 0xff) ? c : ~c;", lambda a, b, c: c if a & b & 0xFF else ~c & M32),
        "popc": ("r = __popc(a) + __popcll(Y);", lambda a, b, c: a.bit_count() + b.bit_count() + c.bit_count()),
        "clz": (
            "r = __clz(a) * 100 + __clzll(Y >> (a & 63));",
            lambda a, b, c: (32 - a.bit_length()) * 100 + 64 - ((c << 32 | b) >> (a & 63)).bit_length(),
        ),
        "ffs": ("r = __ffs(a & b & c);", lambda a, b, c: ((x := a & b & c) & -x).bit_length()),
        "brev": ("r = __brev(a);", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
        "bfind_s": (
            'asm("bfind.s32 %0, %1;" : "=r"(q) : "r"(a)); r = q;',
            lambda a, b, c: ((~a & M32 if a >> 31 else a).bit_length() - 1) & M32,
        ),
        "bfe_u": (
            'asm("bfe.u32 %0, %1, %2, %3;" : "=r"(q) : "r"(a), "r"(b & 31), "r"(c & 31)); r = q;',
            lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1),
        ),
        "bfi": (
            'asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(q) : "r"(a), "r"(b), "r"(c & 31), "r"(b & 31)); r = q;',
            lambda a, b, c: (b & ~(m := ((1 << (b & 31)) - 1) << (c & 31) & M32)) | (a << (c & 31) & m),
        ),
        "prmt": ("r = __byte_perm(a, b, c & 0xffff);", lambda a, b, c: permute(a, b, c & 0x7777)),
        "prmt_sign": (
            'asm("prmt.b32 %0, %1, %2, %3;" : "=r"(q) : "r"(a), "r"(b), "r"(c)); r = q;',
            lambda a, b, c: permute(a, b, c & 0xFFFF),
        ),
        "min_max": (
            "r = (u64)min((int)a, (int)b) << 32 | (u32)max(b, c);",
            lambda a, b, c: (min(s(a), s(b)) & M32) << 32 | max(b, c),
        ),
        "min64": ("r = X < Y ? X : Y;", lambda a, b, c: min(b << 32 | a, c << 32 | b)),
        "max64_s": (
            "r = (i64)X > (i64)Y ? X : Y;",
            lambda a, b, c: max((b << 32 | a, c << 32 | b), key=lambda x: s(x, 64)),
        ),
        "compare": (
            "r = (X == Y) | (X != Z) << 1 | (X <= Y) << 2 | ((i64)X >= (i64)Z) << 3 | (a < b) << 4 | ((int)a <= (int)c) << 5;",
            lambda a, b, c: (
                ((b << 32 | a) == (c << 32 | b))
                | ((b << 32 | a) != (a << 32 | c)) << 1
                | ((b << 32 | a) <= (c << 32 | b)) << 2
                | (s(b << 32 | a, 64) >= s(a << 32 | c, 64)) << 3
                | (a < b) << 4
                | (s(a) <= s(c)) << 5
            ),
        ),
        "absolute": ("r = (u32)abs((int)a);", lambda a, b, c: abs(s(a)) & M32),
        "dp4a": (
            "r = (u32)__dp4a((int)a, (int)b, (int)c);",
            lambda a, b, c: (s(c) + sum(s(a >> k & 255, 8) * s(b >> k & 255, 8) for k in (0, 8, 16, 24))) & M32,
        ),
        "dp4a_u": (
            "r = __dp4a(a, b, c);",
            lambda a, b, c: (c + sum((a >> k & 255) * (b >> k & 255) for k in (0, 8, 16, 24))) & M32,
        ),
        "avg": (
            "r = (u32)((int)((short)a) + (int)((signed char)(b >> 8)) + (unsigned char)(c >> 16));",
            lambda a, b, c: (s(a & 0xFFFF, 16) + s(b >> 8 & 255, 8) + (c >> 16 & 255)) & M32,
        ),
    }
    for op, name, count in (("fadd", "add", 2), ("fmul", "mul", 2), ("fmaf", "fma", 3), ("fdiv", "div", 2)):
        for mode in ("rn", "rz", "rd", "ru"):
            arguments = ", ".join("ABC"[:count])
            host = {"rd": "rm", "ru": "rp"}.get(mode, mode)
            found[f"f32_{name}_{mode}"] = (
                f"r = bits(__{op}_{mode}({arguments}));",
                lambda a, b, c, name=name, host=host: arithmetic(name, [f32(a), f32(b), f32(c)], SINGLE, host),
            )
    for name, text in (
        ("add", "add.ftz.f32 %0, %1, %2;"),
        ("mul", "mul.ftz.f32 %0, %1, %2;"),
        ("fma", "fma.rn.ftz.f32 %0, %1, %2, %3;"),
    ):
        found[f"f32_{name}_ftz"] = (
            f'float x; asm("{text}" : "=f"(x) : "f"(A), "f"(B), "f"(C)); r = bits(x);',
            lambda a, b, c, name=name: arithmetic(name, [f32(a), f32(b), f32(c)], SINGLE, ftz=True),
        )
    found["f32_sqrt"] = ("r = bits(__fsqrt_rn(A));", lambda a, b, c: arithmetic("sqrt", [f32(a)], SINGLE))
    found["f32_rcp"] = ("r = bits(__frcp_rn(A));", lambda a, b, c: arithmetic("div", [1.0, f32(a)], SINGLE))
    for op, name, count in (("dadd", "add", 2), ("dmul", "mul", 2), ("fma", "fma", 3), ("ddiv", "div", 2)):
        for mode in ("rn", "rz", "rd", "ru") if name != "div" else ("rn",):
            arguments = ", ".join(("DX", "DY", "DZ")[:count])
            host = {"rd": "rm", "ru": "rp"}.get(mode, mode)
            found[f"f64_{name}_{mode}"] = (
                f"r = bits(__{op}_{mode}({arguments}));",
                lambda a, b, c, name=name, host=host: arithmetic(
                    name, [f64(b << 32 | a), f64(c << 32 | b), f64(a << 32 | c)], DOUBLE, host
                ),
            )
    found["f64_sqrt"] = ("r = bits(__dsqrt_rn(DX));", lambda a, b, c: arithmetic("sqrt", [f64(b << 32 | a)], DOUBLE))
    for form, value, shape in (("f16", f16, HALF), ("bf16", bf16, BF16)):
        text = f"fma.rn.{form}x2 %0, %1, %2, %3;"
        found[f"{form}x2_fma"] = (
            f'asm("{text}" : "=r"(q) : "r"(a), "r"(b), "r"(c)); r = q;',
            _pair("fma", shape, value),
        )
        if form == "f16":
            for name in ("add", "mul"):
                found[f"f16x2_{name}"] = (
                    f'asm("{name}.rn.f16x2 %0, %1, %2;" : "=r"(q) : "r"(a), "r"(b)); r = q;',
                    _pair(name, shape, value),
                )
    for form, shape in (("f16", HALF), ("bf16", BF16)):
        for mode in ("rn", "rz"):
            found[f"cvt_{form}x2_{mode}"] = (
                f'asm("cvt.{mode}.{form}x2.f32 %0, %1, %2;" : "=r"(q) : "f"(A), "f"(B)); r = q;',
                lambda a, b, c, shape=shape, mode=mode: _packed(a, b, shape, mode),
            )
    for mode, name in (("rni", "rn"), ("rzi", "rz"), ("rmi", "rd"), ("rpi", "ru")):
        for target, bits, is_signed in (("int", 32, True), ("uint", 32, False), ("ll", 64, True), ("ull", 64, False)):
            found[f"cvt_{target}_{mode}"] = (
                f"r = {'(u32)' if bits == 32 else '(u64)'}__float2{target}_{name}(A);",
                lambda a, b, c, mode=mode, bits=bits, is_signed=is_signed: whole(f32(a), mode, bits, is_signed),
            )
            found[f"cvt_d_{target}_{mode}"] = (
                f"r = {'(u32)' if bits == 32 else '(u64)'}__double2{target}_{name}(DX);",
                lambda a, b, c, mode=mode, bits=bits, is_signed=is_signed: whole(
                    f64(b << 32 | a), mode, bits, is_signed
                ),
            )
            source = {"int": "(int)a", "uint": "a", "ll": "(i64)X", "ull": "X"}[target]
            found[f"cvt_from_{target}_{name}"] = (
                f"r = bits(__{target}2float_{name}({source}));",
                lambda a, b, c, name=name, bits=bits, is_signed=is_signed: to_format(
                    Fraction(s(x, bits) if is_signed else x) if (x := a if bits == 32 else b << 32 | a) or True else 0,
                    23,
                    8,
                    {"rd": "rm", "ru": "rp"}.get(name, name),
                    False,
                ),
            )
    found["cvt_f32_f64"] = ("r = bits((double)A);", lambda a, b, c: NAN if math.isnan(f32(a)) else bits64(f32(a)))
    found["cvt_f64_f32"] = ("r = bits((float)DX);", lambda a, b, c: arithmetic("mul", [f64(b << 32 | a), 1.0], SINGLE))
    found["floor_ceil"] = (
        "r = bits(floorf(A)) << 32 | bits(ceilf(B));",
        lambda a, b, c: _rounded(f32(a), math.floor, a) << 32 | _rounded(f32(b), math.ceil, b),
    )
    found["fmin_fmax"] = (
        "r = bits(fminf(A, B)) << 32 | bits(fmaxf(B, C));",
        lambda a, b, c: _least(a, b, True) << 32 | _least(b, c, False),
    )
    found["f32_compare"] = (
        "r = (A < B) | (A <= B) << 1 | (A == C) << 2 | (A != B) << 3 | !(A >= C) << 4 | (A > B) << 5;",
        lambda a, b, c: (
            (x := f32(a), y := f32(b), z := f32(c))
            and (x < y) | (x <= y) << 1 | (x == z) << 2 | (x != y) << 3 | (not x >= z) << 4 | (x > y) << 5
        ),
    )
    return found


def _packed(a: int, b: int, shape: tuple[int, int], mode: str) -> int | object:
    high, low = (arithmetic("mul", [f32(x), 1.0], shape, mode) for x in (a, b))
    return NAN if NAN in (high, low) else int(high) << 16 | int(low)  # type: ignore[call-overload]


def _rounded(x: float, how: Callable[[float], int], bits: int) -> int:
    if math.isnan(x):
        return 0x7FFFFFFF
    if math.isinf(x):
        return bits
    y = math.copysign(float(how(x)), x)
    return int(struct.unpack("<I", struct.pack("<f", y))[0])


def _least(a: int, b: int, least: bool) -> int:
    x, y = f32(a), f32(b)
    if math.isnan(x) and math.isnan(y):
        return 0x7FFFFFFF
    if math.isnan(x) or math.isnan(y):
        return b if math.isnan(x) else a
    if x == y:
        return a if (a >> 31 == 1) == least else b
    return a if (x < y) == least else b


FUNCTIONS = _functions()


def inputs(seed: int, count: int) -> np.ndarray:
    """Words (count, 3): special floats and numbers, and random ones of many magnitudes."""
    special = [
        0,
        1,
        2,
        31,
        32,
        33,
        63,
        64,
        0x7FFFFFFF,
        0x80000000,
        M32,
        M32 - 1,
        0x3F800000,
        0xBF800000,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x00000001,
        0x807FFFFF,
        0x00800000,
        0x7F7FFFFF,
        0x4F000000,
        0xCF000000,
        0x5F000000,
        0x3F000000,
        0x40200000,
        0x3C003C00,
        0x7C000001,
        0x00010400,
        0x0000FFFF,
        0x477FF000,
        0x33800000,
    ]
    draw = np.random.default_rng(seed)
    words = draw.integers(0, 1 << 32, (count, 3), dtype=np.uint64)
    # Floats of like magnitude, so that sums cancel and round.
    near = draw.integers(0x3E000000, 0x42000000, (count, 3), dtype=np.uint64)
    sign = draw.integers(0, 2, (count, 3), dtype=np.uint64) << np.uint64(31)
    kind = draw.integers(0, 4, (count, 3))
    words = np.where(kind == 0, near | sign, words)
    words = np.where(kind == 1, np.array(special, np.uint64)[draw.integers(0, len(special), (count, 3))], words)
    words = np.where(kind == 2, words >> draw.integers(0, 32, (count, 3), dtype=np.uint64), words)
    return words.astype(np.uint32)
