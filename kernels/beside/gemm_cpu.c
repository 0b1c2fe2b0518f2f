// C = C + A B on a CPU, N x N row-major floats: as three plain loops, and in square blocks.
//
// Study note 002, section 1.2. The program runs both once, under cachegrind or on its own; the two
// functions are kept out of line so that a profiler reports them separately.
//
//   gemm_cpu N BLOCK [naive | tiled]      one form alone, for counters that count a whole program
//
// The sum of a result stays in a register over the innermost loop, so the data references are
//   naive   2 N³ + 2 N²                 (A, B; C once in and once out)
//   tiled   2 N³ + 2 N² ceil(N / BLOCK)

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 512

// Whole pages, so that every array starts at the same place of every cache.
static float a[MOST * MOST] __attribute__((aligned(4096)));
static float b[MOST * MOST] __attribute__((aligned(4096)));
static float c[MOST * MOST] __attribute__((aligned(4096)));

__attribute__((noinline)) void naive_gemm(int n) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            float sum = c[i * n + j];
            for (int k = 0; k < n; k++) sum += a[i * n + k] * b[k * n + j];
            c[i * n + j] = sum;
        }
}

static int least(int x, int y) { return x < y ? x : y; }

__attribute__((noinline)) void tiled_gemm(int n, int block) {
    for (int ii = 0; ii < n; ii += block)
        for (int jj = 0; jj < n; jj += block)
            for (int kk = 0; kk < n; kk += block) {
                const int i_end = least(ii + block, n), j_end = least(jj + block, n);
                const int k_end = least(kk + block, n);
                for (int i = ii; i < i_end; i++)
                    for (int j = jj; j < j_end; j++) {
                        float sum = c[i * n + j];
                        for (int k = kk; k < k_end; k++) sum += a[i * n + k] * b[k * n + j];
                        c[i * n + j] = sum;
                    }
            }
}

int main(int count, char** words) {
    const int n = count > 1 ? atoi(words[1]) : 0, block = count > 2 ? atoi(words[2]) : 0;
    if (n < 1 || n > MOST || block < 1) {
        fprintf(stderr, "usage: gemm_cpu N BLOCK [naive | tiled], 1 <= N <= %d, BLOCK >= 1\n", MOST);
        return 2;
    }
    for (int i = 0; i < n * n; i++) {
        a[i] = (float)(i % 7 - 3);
        b[i] = (float)(i % 5 - 2);
    }
    if (count > 3) {
        if (strcmp(words[3], "naive") == 0)
            naive_gemm(n);
        else
            tiled_gemm(n, block);
        return 0;
    }
    naive_gemm(n);
    for (int i = 0; i < n * n; i++) c[i] = -c[i];
    tiled_gemm(n, block);  // small integers: both sums are exact, so they cancel
    for (int i = 0; i < n * n; i++)
        if (c[i] != 0.0f) {
            fprintf(stderr, "naive and tiled disagree at %d\n", i);
            return 1;
        }
    return 0;
}
