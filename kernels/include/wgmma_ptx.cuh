// wgmma m64nNk16 with fp32 accumulators (PTX ISA, "Asynchronous warpgroup level matrix
// multiply-accumulate"). fp16 or bf16 by the macro DTYPE.
//
//   Wgmma<N>::ss<TA, TB>(d, a, b)         d += A B, both in shared memory, by descriptor
//   Wgmma<N>::ss_first<TA, TB>(d, a, b)   d  = A B
//   Wgmma<N>::rs<TB>(d, a, b)             d += A B, A in registers
//
// TA, TB = 1: the operand's M (or N) dimension is the contiguous one. d has N / 2 registers:
// register 4 j + e of thread t holds row 16 w + g + 8 (e / 2), column 8 j + 2 (t % 4) + e % 2, with
// w = t / 32 % 4 and g = t / 4 % 8. A in registers is the warp's m16n8k16 fragment.
//
// ss_first names d as an output only. With "+f" and scale-d 0 instead, the old values would stay
// live through the softmax, and ptxas would serialise the whole pipeline for want of registers.
//
// An asm statement must spell out its operands; the macros do that once for each N. Included by
// device_sm90.cuh.
#pragma once

template <int N>
struct Wgmma;

#if DTYPE == 0
#define WGMMA_TYPES "f32.f16.f16"
#else
#define WGMMA_TYPES "f32.bf16.bf16"
#endif

// D: the asm text between the instruction's name and what follows d. C: one constraint a register.
// A0.. A5: the numbers of the operands behind d's.
#define WGMMA_FOR(N, D, C, A0, A1, A2, A3, A4, A5)                                               \
    template <>                                                                                  \
    struct Wgmma<N> {                                                                            \
        template <int TA, int TB>                                                                \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64 a, uint64 b) {       \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" D "}, "  \
                         A0 ", " A1 ", 1, 1, 1, " A2 ", " A3 ";"                                 \
                         : C("+f")                                                               \
                         : "l"(a), "l"(b), "n"(TA), "n"(TB));                                    \
        }                                                                                        \
        template <int TA, int TB>                                                                \
        static __device__ __forceinline__ void ss_first(float (&d)[N / 2], uint64 a, uint64 b) { \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" D "}, "  \
                         A0 ", " A1 ", 0, 1, 1, " A2 ", " A3 ";"                                 \
                         : C("=f")                                                               \
                         : "l"(a), "l"(b), "n"(TA), "n"(TB));                                    \
        }                                                                                        \
        template <int TB>                                                                        \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32 (&a)[4],       \
                                                  uint64 b) {                                    \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" D "}, "  \
                         "{" A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", 1, 1, 1, " A5 ";"            \
                         : C("+f")                                                               \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TB));         \
        }                                                                                        \
    };

#define WGMMA_D64                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "           \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_C64(X)                                                                             \
    X(d[0]), X(d[1]), X(d[2]), X(d[3]), X(d[4]), X(d[5]), X(d[6]), X(d[7]), X(d[8]),             \
    X(d[9]), X(d[10]), X(d[11]), X(d[12]), X(d[13]), X(d[14]), X(d[15]), X(d[16]),               \
    X(d[17]), X(d[18]), X(d[19]), X(d[20]), X(d[21]), X(d[22]), X(d[23]), X(d[24]),              \
    X(d[25]), X(d[26]), X(d[27]), X(d[28]), X(d[29]), X(d[30]), X(d[31])
WGMMA_FOR(64, WGMMA_D64, WGMMA_C64, "%32", "%33", "%34", "%35", "%36", "%37")

#define WGMMA_D80                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "           \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "           \
    "%34, %35, %36, %37, %38, %39"
#define WGMMA_C80(X)                                                                             \
    X(d[0]), X(d[1]), X(d[2]), X(d[3]), X(d[4]), X(d[5]), X(d[6]), X(d[7]), X(d[8]),             \
    X(d[9]), X(d[10]), X(d[11]), X(d[12]), X(d[13]), X(d[14]), X(d[15]), X(d[16]),               \
    X(d[17]), X(d[18]), X(d[19]), X(d[20]), X(d[21]), X(d[22]), X(d[23]), X(d[24]),              \
    X(d[25]), X(d[26]), X(d[27]), X(d[28]), X(d[29]), X(d[30]), X(d[31]), X(d[32]),              \
    X(d[33]), X(d[34]), X(d[35]), X(d[36]), X(d[37]), X(d[38]), X(d[39])
WGMMA_FOR(80, WGMMA_D80, WGMMA_C80, "%40", "%41", "%42", "%43", "%44", "%45")

#define WGMMA_D128                                                                               \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "           \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "           \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "           \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_C128(X)                                                                            \
    X(d[0]), X(d[1]), X(d[2]), X(d[3]), X(d[4]), X(d[5]), X(d[6]), X(d[7]), X(d[8]),             \
    X(d[9]), X(d[10]), X(d[11]), X(d[12]), X(d[13]), X(d[14]), X(d[15]), X(d[16]),               \
    X(d[17]), X(d[18]), X(d[19]), X(d[20]), X(d[21]), X(d[22]), X(d[23]), X(d[24]),              \
    X(d[25]), X(d[26]), X(d[27]), X(d[28]), X(d[29]), X(d[30]), X(d[31]), X(d[32]),              \
    X(d[33]), X(d[34]), X(d[35]), X(d[36]), X(d[37]), X(d[38]), X(d[39]), X(d[40]),              \
    X(d[41]), X(d[42]), X(d[43]), X(d[44]), X(d[45]), X(d[46]), X(d[47]), X(d[48]),              \
    X(d[49]), X(d[50]), X(d[51]), X(d[52]), X(d[53]), X(d[54]), X(d[55]), X(d[56]),              \
    X(d[57]), X(d[58]), X(d[59]), X(d[60]), X(d[61]), X(d[62]), X(d[63])
WGMMA_FOR(128, WGMMA_D128, WGMMA_C128, "%64", "%65", "%66", "%67", "%68", "%69")

#define WGMMA_D176                                                                               \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "           \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "           \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "           \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "           \
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "           \
    "%82, %83, %84, %85, %86, %87"
#define WGMMA_C176(X)                                                                            \
    X(d[0]), X(d[1]), X(d[2]), X(d[3]), X(d[4]), X(d[5]), X(d[6]), X(d[7]), X(d[8]),             \
    X(d[9]), X(d[10]), X(d[11]), X(d[12]), X(d[13]), X(d[14]), X(d[15]), X(d[16]),               \
    X(d[17]), X(d[18]), X(d[19]), X(d[20]), X(d[21]), X(d[22]), X(d[23]), X(d[24]),              \
    X(d[25]), X(d[26]), X(d[27]), X(d[28]), X(d[29]), X(d[30]), X(d[31]), X(d[32]),              \
    X(d[33]), X(d[34]), X(d[35]), X(d[36]), X(d[37]), X(d[38]), X(d[39]), X(d[40]),              \
    X(d[41]), X(d[42]), X(d[43]), X(d[44]), X(d[45]), X(d[46]), X(d[47]), X(d[48]),              \
    X(d[49]), X(d[50]), X(d[51]), X(d[52]), X(d[53]), X(d[54]), X(d[55]), X(d[56]),              \
    X(d[57]), X(d[58]), X(d[59]), X(d[60]), X(d[61]), X(d[62]), X(d[63]), X(d[64]),              \
    X(d[65]), X(d[66]), X(d[67]), X(d[68]), X(d[69]), X(d[70]), X(d[71]), X(d[72]),              \
    X(d[73]), X(d[74]), X(d[75]), X(d[76]), X(d[77]), X(d[78]), X(d[79]), X(d[80]),              \
    X(d[81]), X(d[82]), X(d[83]), X(d[84]), X(d[85]), X(d[86]), X(d[87])
WGMMA_FOR(176, WGMMA_D176, WGMMA_C176, "%88", "%89", "%90", "%91", "%92", "%93")

#define WGMMA_D256                                                                               \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "           \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "           \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "           \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "           \
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "           \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "           \
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "               \
    "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "             \
    "%124, %125, %126, %127"
#define WGMMA_C256(X)                                                                            \
    X(d[0]), X(d[1]), X(d[2]), X(d[3]), X(d[4]), X(d[5]), X(d[6]), X(d[7]), X(d[8]),             \
    X(d[9]), X(d[10]), X(d[11]), X(d[12]), X(d[13]), X(d[14]), X(d[15]), X(d[16]),               \
    X(d[17]), X(d[18]), X(d[19]), X(d[20]), X(d[21]), X(d[22]), X(d[23]), X(d[24]),              \
    X(d[25]), X(d[26]), X(d[27]), X(d[28]), X(d[29]), X(d[30]), X(d[31]), X(d[32]),              \
    X(d[33]), X(d[34]), X(d[35]), X(d[36]), X(d[37]), X(d[38]), X(d[39]), X(d[40]),              \
    X(d[41]), X(d[42]), X(d[43]), X(d[44]), X(d[45]), X(d[46]), X(d[47]), X(d[48]),              \
    X(d[49]), X(d[50]), X(d[51]), X(d[52]), X(d[53]), X(d[54]), X(d[55]), X(d[56]),              \
    X(d[57]), X(d[58]), X(d[59]), X(d[60]), X(d[61]), X(d[62]), X(d[63]), X(d[64]),              \
    X(d[65]), X(d[66]), X(d[67]), X(d[68]), X(d[69]), X(d[70]), X(d[71]), X(d[72]),              \
    X(d[73]), X(d[74]), X(d[75]), X(d[76]), X(d[77]), X(d[78]), X(d[79]), X(d[80]),              \
    X(d[81]), X(d[82]), X(d[83]), X(d[84]), X(d[85]), X(d[86]), X(d[87]), X(d[88]),              \
    X(d[89]), X(d[90]), X(d[91]), X(d[92]), X(d[93]), X(d[94]), X(d[95]), X(d[96]),              \
    X(d[97]), X(d[98]), X(d[99]), X(d[100]), X(d[101]), X(d[102]), X(d[103]),                    \
    X(d[104]), X(d[105]), X(d[106]), X(d[107]), X(d[108]), X(d[109]), X(d[110]),                 \
    X(d[111]), X(d[112]), X(d[113]), X(d[114]), X(d[115]), X(d[116]), X(d[117]),                 \
    X(d[118]), X(d[119]), X(d[120]), X(d[121]), X(d[122]), X(d[123]), X(d[124]),                 \
    X(d[125]), X(d[126]), X(d[127])
WGMMA_FOR(256, WGMMA_D256, WGMMA_C256, "%128", "%129", "%130", "%131", "%132", "%133")
