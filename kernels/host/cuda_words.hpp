// Words of CUDA for own kernels on the host (counted.cuh lists them).
#pragma once

// A macro, so that each place has its own number: two barriers of one line are two barriers.
#define __syncthreads() block_sync(::host::Site{__FILE__, __LINE__, __COUNTER__ + 1})

// ---- lanes of a mask ---------------------------------------------------------------------------

namespace host {

__attribute__((always_inline)) inline Brought bring(Word word, unsigned mask,
                                                    unsigned long long value, Site site) {
    Brought all;
    go(host_runtime->exchange(word, mask, value, &all, site));
    return all;
}

// `source`: the lane to take from, of the running lane's segment of `width` lanes, or its own.
template <class T, class Source>
inline T shuffle(Word word, unsigned mask, T v, int width, Source source, Site site) {
    static_assert(sizeof(T) <= 8, "shuffles move 8 bytes at most");
    if (width < 1 || width > 32 || (width & (width - 1))) __trap();
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &v, sizeof(T));
    const Brought all = bring(word, mask, bits, site);
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const int first = lane & ~(width - 1);
    const int from = source(lane, first);
    __builtin_memcpy(&v, &all.values[from & 31], sizeof(T));
    return v;
}

}  // namespace host

inline void __syncwarp(unsigned mask = ~0u, HOST_SITE) {
    host::bring(host::Word::SYNCWARP, mask, 0, site);
}
template <class T>
inline T __shfl_sync(unsigned mask, T v, int from, int width = 32, HOST_SITE) {
    const auto source = [=](int, int first) { return first + (from & (width - 1)); };
    return host::shuffle(host::Word::SHUFFLE, mask, v, width, source, site);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, HOST_SITE) {
    const auto source = [=](int lane, int first) {
        return delta <= static_cast<unsigned>(lane - first) ? lane - static_cast<int>(delta) : lane;
    };
    return host::shuffle(host::Word::SHUFFLE_UP, mask, v, width, source, site);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, HOST_SITE) {
    const auto source = [=](int lane, int first) {
        const unsigned beyond = static_cast<unsigned>(first + width - lane);
        return delta < beyond ? lane + static_cast<int>(delta) : lane;
    };
    return host::shuffle(host::Word::SHUFFLE_DOWN, mask, v, width, source, site);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32, HOST_SITE) {
    // Lanes of earlier segments may be taken from, those of later ones may not.
    const auto source = [=](int lane, int first) {
        const int other = lane ^ lane_mask;
        return other < first + width ? other : lane;
    };
    return host::shuffle(host::Word::SHUFFLE_XOR, mask, v, width, source, site);
}

namespace host {
inline unsigned lanes_that_hold(const Brought& all) {
    unsigned lanes = 0;
    for (unsigned l = 0; l < 32; ++l)
        if (all.lanes >> l & 1u && all.values[l]) lanes |= 1u << l;
    return lanes;
}
}  // namespace host

inline int __all_sync(unsigned mask, int predicate, HOST_SITE) {
    const host::Brought all = host::bring(host::Word::ALL, mask, predicate != 0, site);
    return host::lanes_that_hold(all) == all.lanes;
}
inline int __any_sync(unsigned mask, int predicate, HOST_SITE) {
    return host::lanes_that_hold(host::bring(host::Word::ANY, mask, predicate != 0, site)) != 0;
}
inline unsigned __ballot_sync(unsigned mask, int predicate, HOST_SITE) {
    return host::lanes_that_hold(host::bring(host::Word::BALLOT, mask, predicate != 0, site));
}

// ---- atomics -----------------------------------------------------------------------------------

namespace host {

template <class T, class U>
constexpr bool same = false;
template <class T>
constexpr bool same<T, T> = true;
template <class T, class... Listed>
constexpr bool one_of = (same<T, Listed> || ...);

template <int BYTES>
struct Bits {
    using type = uint32;
};
template <>
struct Bits<8> {
    using type = uint64;
};

// Puts change(old) in the place of the old value, which it gives.
template <class T, class Change>
inline T update(T* p, Change change, Site site) {
    using Image = typename Bits<sizeof(T)>::type;
    host_runtime->global_access(p, sizeof(T), ATOMIC, site);
    auto* const at = reinterpret_cast<Image*>(data(p));
    Image before = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (true) {
        T old;
        __builtin_memcpy(&old, &before, sizeof(T));
        const T changed = change(old);
        Image after;
        __builtin_memcpy(&after, &changed, sizeof(T));
        if (__atomic_compare_exchange_n(at, &before, after, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
            return old;
    }
}

}  // namespace host

// `changed` is what comes in the place of `old`; v is what the caller gave.
#define HOST_ATOMIC(name, changed, words, ...)                                                \
    template <class T, bool SHARED>                                                           \
    inline T name(host::Counted<T, SHARED> p, typename host::Same<T>::type v, HOST_SITE) {    \
        static_assert(!SHARED, #name " on shared memory is not done on the host");            \
        static_assert(host::one_of<T, __VA_ARGS__>, #name " takes " words);                   \
        return host::update(p.p, [=](T old) -> T { return changed; }, site);                  \
    }
#define HOST_INTEGERS "int, unsigned and 64-bit integers"
HOST_ATOMIC(atomicAdd, old + v, "int, unsigned, unsigned long long, float and double", int, uint32,
            uint64, float, double)
HOST_ATOMIC(atomicSub, old - v, "int and unsigned", int, uint32)
HOST_ATOMIC(atomicExch, v, "int, unsigned, unsigned long long and float", int, uint32, uint64,
            float)
HOST_ATOMIC(atomicMin, v < old ? v : old, HOST_INTEGERS, int, uint32, int64, uint64)
HOST_ATOMIC(atomicMax, old < v ? v : old, HOST_INTEGERS, int, uint32, int64, uint64)
HOST_ATOMIC(atomicAnd, old & v, "int, unsigned and unsigned long long", int, uint32, uint64)
HOST_ATOMIC(atomicOr, old | v, "int, unsigned and unsigned long long", int, uint32, uint64)
HOST_ATOMIC(atomicXor, old ^ v, "int, unsigned and unsigned long long", int, uint32, uint64)
HOST_ATOMIC(atomicInc, old >= v ? 0 : old + 1, "unsigned", uint32)
HOST_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1, "unsigned", uint32)
#undef HOST_INTEGERS
#undef HOST_ATOMIC

template <class T, bool SHARED>
inline T atomicCAS(host::Counted<T, SHARED> p, typename host::Same<T>::type expected,
                   typename host::Same<T>::type v, HOST_SITE) {
    static_assert(!SHARED, "atomicCAS on shared memory is not done on the host");
    static_assert(host::one_of<T, int, uint32, uint64>,
                  "atomicCAS takes int, unsigned and unsigned long long");
    return host::update(p.p, [=](T old) -> T { return old == expected ? v : old; }, site);
}

// ---- single threads ----------------------------------------------------------------------------

template <class T>
inline typename host::Plain<T>::type __ldg(Global<T> p, HOST_SITE) {
    return ld_global(p.p, site);
}
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
