// For kernels written elsewhere: pointers that are used like plain ones and counted on the host.
//
//   Global<T> x            in place of T* x, a parameter or a variable: x[i], *x, x + n, &x[i]
//   Shared<T> s            the same for shared memory
//   dynamic_shared<T>(b)   dynamic shared memory from byte b on; in place of extern __shared__ and
//                          of __shared__ arrays
//   as<U>(x)               in place of reinterpret_cast<U*>(x)
//
// On a GPU Global<T> and Shared<T> are T*, so nothing changes there. On the host an access through
// them is ld_global, st_global, ld_shared or st_shared: counted, checked, its line named. An access
// through any other pointer into a tensor or shared memory is an error.
//
// Words of CUDA that an ordinary kernel uses are given on the host as well, with CUDA's rules:
//
//   __syncthreads          every thread of the block that has not ended comes to the same one
//   __syncwarp, __shfl_sync, __shfl_up_sync, __shfl_down_sync, __shfl_xor_sync, __all_sync,
//   __any_sync, __ballot_sync
//                          wait for the lanes of their mask and for no others. What a shuffle takes
//                          from a lane that did not come has all bits set.
//   atomicAdd, Sub, Exch, Min, Max, And, Or, Xor, Inc, Dec, CAS
//                          on Global<T>, of the types that CUDA has them for; give the old value
//   __ldg, __expf, rsqrtf, INFINITY
#pragma once

#include "device.cuh"

#ifndef INFINITY  // neither NVRTC nor the host includes the headers that have it
#define INFINITY (-neg_infinity())
#endif

#ifndef KERNELS_HOST

template <class T>
using Global = T*;
template <class T>
using Shared = T*;
template <class T>
__device__ __forceinline__ Shared<T> dynamic_shared(int first_byte = 0) {
    return reinterpret_cast<T*>(shared_memory() + first_byte);
}
template <class U, class T>
__device__ __forceinline__ U* as(T* p) {
    return reinterpret_cast<U*>(p);
}

#else

namespace host {

template <class T>
struct Plain {
    using type = T;
};
template <class T>
struct Plain<const T> {
    using type = T;
};

// An index that knows the line it stands on: the conversion happens there.
struct Index {
    int64 value;
    Site site;
    template <class I>
    Index(I i, const char* file = __builtin_FILE(), int line = __builtin_LINE())
        : value(static_cast<int64>(i)), site{file, line} {}
};

template <class T, bool SHARED>
struct Counted;

// What x[i] is: reading and writing it is counted.
template <class T, bool SHARED>
struct Element {
    using Value = typename Plain<T>::type;
    T* p;
    Site site;

    operator Value() const {
        if constexpr (SHARED)
            return ld_shared(p, site);
        else
            return ld_global(p, site);
    }
    // Assignments give the value that was written, which a GPU has in a register.
    Value operator=(Value v) const {
        if constexpr (SHARED)
            st_shared(p, v, site);
        else
            st_global(p, v, site);
        return v;
    }
    Value operator=(const Element& other) const { return *this = Value(other); }
    template <bool OTHER>
    Value operator=(const Element<T, OTHER>& other) const {
        return *this = Value(other);
    }
    Value operator+=(Value v) const { return *this = Value(*this) + v; }
    Value operator-=(Value v) const { return *this = Value(*this) - v; }
    Value operator*=(Value v) const { return *this = Value(*this) * v; }
    Value operator/=(Value v) const { return *this = Value(*this) / v; }
    Counted<T, SHARED> operator&() const { return Counted<T, SHARED>(p); }
};

template <class T, bool SHARED>
struct Counted {
    T* p;

    Counted() = default;
    explicit Counted(T* pointer) : p(pointer) {}
    operator Counted<const T, SHARED>() const { return Counted<const T, SHARED>(p); }

    Element<T, SHARED> operator[](Index i) const { return {p + i.value, i.site}; }
    Element<T, SHARED> operator*() const { return {p, {"dereference", 0}}; }
    Counted operator+(int64 n) const { return Counted(p + n); }
    Counted operator-(int64 n) const { return Counted(p - n); }
    int64 operator-(Counted other) const { return p - other.p; }
    Counted& operator+=(int64 n) { return p += n, *this; }
    Counted& operator-=(int64 n) { return p -= n, *this; }
    Counted& operator++() { return ++p, *this; }
    bool operator==(Counted other) const { return p == other.p; }
    bool operator!=(Counted other) const { return p != other.p; }
    bool operator<(Counted other) const { return p < other.p; }
};

}  // namespace host

template <class T>
using Global = host::Counted<T, false>;
template <class T>
using Shared = host::Counted<T, true>;
template <class T>
inline Shared<T> dynamic_shared(int first_byte = 0) {
    return Shared<T>(reinterpret_cast<T*>(shared_memory() + first_byte));
}
template <class U, class T, bool SHARED>
inline host::Counted<U, SHARED> as(host::Counted<T, SHARED> x) {
    return host::Counted<U, SHARED>(reinterpret_cast<U*>(x.p));
}

#include "../host/cuda_words.hpp"

#endif
