// Tensor arguments on the host: each is copied into a slot of its own, 64 GiB from the next, so
// that an address names its tensor whatever the index arithmetic did, and so that memory outside
// the arguments cannot be touched. A kernel is given addresses in a range without memory; the
// copies lie DATA_DISTANCE further on.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "clocks.hpp"
#include "interface.hpp"

namespace host {

constexpr int DIMENSIONS = 4;

enum Access { ACCESS_R = 0, ACCESS_W = 1, ACCESS_RW = 2, ACCESS_ATOMIC = 3 };

// As the launcher passes it (backend.py holds the same layout).
struct TensorArgument {
    std::uint64_t pointer;
    std::int64_t shape[DIMENSIONS];   // leading dimensions of 1 where there are fewer
    std::int64_t stride[DIMENSIONS];  // elements
    std::int32_t itemsize;
    std::int32_t access;
    std::int32_t parameter;  // which kernel parameter
    std::int32_t reserved;
    std::uint8_t* initialised;  // scratch: per element from element 0; null: all are
    std::uint64_t bytes[3];     // out: read, written, atomically added
};

// Who accessed an element of a tensor that the launch writes: a block above a stamp of that block.
// Bits: block + 1 (30), kind of reader (2), stamp (32). 0 is nobody.
using GlobalStamp = std::uint64_t;
enum Readers : std::uint64_t { ONE_THREAD = 0, ONE_WARP = 1, WARPS = 2 };
constexpr std::uint64_t MANY_BLOCKS = (1u << 30) - 1;

inline GlobalStamp make_global(std::uint64_t block, Readers kind, Stamp stamp) {
    return (block + 1) << 34 | static_cast<std::uint64_t>(kind) << 32 | stamp;
}
inline std::uint64_t global_block(GlobalStamp s) { return (s >> 34) - 1; }
inline Readers global_kind(GlobalStamp s) { return static_cast<Readers>(s >> 32 & 3); }
inline Stamp global_stamp(GlobalStamp s) { return static_cast<Stamp>(s); }

struct Tensor {
    char* base = nullptr;  // as the kernel sees it; the elements are at data(base)
    std::int64_t extent = 0;  // bytes to the end of the last element
    int itemsize = 0, item_shift = 0;
    Access access = ACCESS_R;
    TensorArgument* argument = nullptr;

    // The view as rows of `row_bytes` contiguous bytes, outer dimensions of decreasing stride.
    std::int64_t row_bytes = 0;
    int outer = 0;
    std::int64_t outer_size[DIMENSIONS] = {}, outer_stride[DIMENSIONS] = {};  // strides in bytes
    bool overlapping = false;  // elements share memory: only the extent can be checked

    // Per element, for tensors that the launch writes; from anonymous memory, so zero.
    std::atomic<GlobalStamp>* writes = nullptr;
    std::atomic<GlobalStamp>* reads = nullptr;

    std::int64_t elements() const { return extent / itemsize; }

    void set_view(TensorArgument& a) {
        argument = &a;
        itemsize = a.itemsize;
        item_shift = __builtin_ctz(static_cast<unsigned>(itemsize));
        access = static_cast<Access>(a.access);
        struct Dimension {
            std::int64_t size, stride;
        };
        std::vector<Dimension> dims;
        extent = itemsize;
        for (int i = 0; i < DIMENSIONS; ++i) {
            if (a.shape[i] == 0) {
                extent = 0;
                row_bytes = 0;
                return;
            }
            if (a.shape[i] == 1) continue;
            extent += (a.shape[i] - 1) * a.stride[i] * itemsize;
            if (a.stride[i] == 0)
                overlapping = true;  // an expanded dimension: no new addresses
            else
                dims.push_back({a.shape[i], a.stride[i] * itemsize});
        }
        std::sort(dims.begin(), dims.end(),
                  [](const Dimension& x, const Dimension& y) { return x.stride > y.stride; });
        bool nested = true;
        row_bytes = itemsize;
        std::int64_t inner = itemsize;  // extent of the dimensions inside
        for (std::size_t i = dims.size(); i-- > 0;) {
            if (dims[i].stride < inner) nested = false;
            if (outer == 0 && dims[i].stride == row_bytes) {
                row_bytes *= dims[i].size;  // continues the row
            } else {
                // Outermost first at the end; collected innermost first here.
                outer_size[outer] = dims[i].size;
                outer_stride[outer] = dims[i].stride;
                ++outer;
            }
            inner += (dims[i].size - 1) * dims[i].stride;
        }
        std::reverse(outer_size, outer_size + outer);
        std::reverse(outer_stride, outer_stride + outer);
        if (!nested) {
            overlapping = true;
            row_bytes = extent;
            outer = 0;
        }
    }

    // The row that would hold the byte at `offset`, and whether it does.
    bool find_row(std::int64_t offset, std::int64_t& begin) const {
        std::int64_t rest = offset;
        for (int i = 0; i < outer; ++i)
            rest -= std::min(rest / outer_stride[i], outer_size[i] - 1) * outer_stride[i];
        begin = offset - rest;
        return rest < row_bytes;
    }

    // Calls f(offset) for the first byte of every row.
    template <class F>
    void each_row(F f) const {
        if (extent == 0) return;
        std::int64_t index[DIMENSIONS] = {};
        std::int64_t offset = 0;
        for (;;) {
            f(offset);
            int i = outer - 1;
            for (; i >= 0; --i) {
                offset += outer_stride[i];
                if (++index[i] < outer_size[i]) break;
                offset -= outer_size[i] * outer_stride[i];
                index[i] = 0;
            }
            if (i < 0) return;
        }
    }
};

class Slots {
   public:
    // Reserves the address range once per process. False: no address space.
    bool reserve() {
        if (region_) return true;
        const std::size_t bytes = 2 * DATA_DISTANCE + (std::size_t{1} << SLOT_BITS);
        void* p =
            mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return false;
        const std::uintptr_t slot = std::uintptr_t{1} << SLOT_BITS;
        region_ = (reinterpret_cast<std::uintptr_t>(p) + slot - 1) & ~(slot - 1);
        return true;
    }

    std::uintptr_t region() const { return region_; }

    // Memory for a block's shared memory, one for each OS thread; as the kernel sees it. Null: none.
    unsigned char* shared(int i, std::size_t bytes) {
        if (bytes > SHARED_BYTES || i >= MOST_WORKERS) return nullptr;
        auto* p = reinterpret_cast<unsigned char*>(region_) + (std::uintptr_t{SLOTS} << SLOT_BITS) +
                  i * SHARED_BYTES;
        return mprotect(data(p), bytes, PROT_READ | PROT_WRITE) == 0 ? p : nullptr;
    }

    // Memory for `extent` bytes in the middle of slot `i`, aligned as the user's; its address as
    // the kernel sees it. Null: none left.
    char* commit(int i, std::uint64_t user_pointer, std::int64_t extent) {
        const std::size_t page = 65536;
        char* middle = reinterpret_cast<char*>(region_) + (std::uintptr_t(i) << SLOT_BITS) +
                       (std::uintptr_t{1} << (SLOT_BITS - 1));
        const std::size_t need = (extent + 16 + page - 1) / page * page;
        if (need > (std::size_t{1} << (SLOT_BITS - 1))) return nullptr;
        if (need > committed_[i]) {
            if (mprotect(data(middle), need, PROT_READ | PROT_WRITE) != 0) return nullptr;
            committed_[i] = need;
        }
        return middle + user_pointer % 16;
    }

    // Gives large memory back to the system after a launch.
    void release() {
        for (int i = 0; i < SLOTS; ++i)
            if (committed_[i] > (std::size_t{8} << 20)) {
                char* middle = reinterpret_cast<char*>(region_) + (std::uintptr_t(i) << SLOT_BITS) +
                               (std::uintptr_t{1} << (SLOT_BITS - 1));
                madvise(data(middle), committed_[i], MADV_DONTNEED);
            }
    }

   private:
    static constexpr std::size_t SHARED_BYTES = std::size_t{1} << 20;
    static constexpr int MOST_WORKERS = 1 << (SLOT_BITS - 20);
    std::uintptr_t region_ = 0;
    std::size_t committed_[SLOTS] = {};
};

// Zeroed memory for the duration of a launch.
class ZeroedMemory {
   public:
    ZeroedMemory() = default;
    ZeroedMemory(const ZeroedMemory&) = delete;
    ZeroedMemory& operator=(const ZeroedMemory&) = delete;
    ~ZeroedMemory() {
        for (auto& [p, bytes] : pieces_) munmap(p, bytes);
    }
    void* take(std::size_t bytes) {
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return nullptr;
        pieces_.emplace_back(p, bytes);
        return p;
    }

   private:
    std::vector<std::pair<void*, std::size_t>> pieces_;
};

}  // namespace host
