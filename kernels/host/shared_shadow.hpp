// What is known about each byte of a block's shared memory: who wrote it, who read it since.
//
// One cell describes a line of 16 bytes as long as all accesses are of whole lines (ldmatrix,
// cp_async, 16-byte vectors). The first smaller access splits a line into words of 4 bytes, or into
// bytes if it is smaller than that; the next 16-byte write makes the line whole again.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "clocks.hpp"

namespace host {

enum class Fault { NONE, UNINITIALISED, RACE_WITH_WRITE, RACE_WITH_READ, RACE_WITH_COPY };

struct Cell {
    Stamp write = 0;
    Stamp read = 0;           // the latest read since the write
    std::uint32_t warps = 0;  // the reading warps when there were several readers, else 0
};

class SharedShadow {
   public:
    void reset(std::size_t bytes) {
        lines_.assign((bytes + 15) / 16, Line{});
        if (parts_.size() < lines_.size()) parts_.resize(lines_.size());
        read_times_.clear();
        each_reader_ = false;
    }
    void tell_readers_apart() { each_reader_ = true; }

    // The common cases of access(): lines and words, ordered by barriers. False: ask access(),
    // which may find some of its cells updated already.
    bool quick_access(std::size_t offset, unsigned bytes, bool write, const Clock& clock,
                      Stamp now) {
        Line& line = lines_[offset / 16];
        if (line.granule == WHOLE) return bytes == 16 && quick_touch(line.whole, write, clock, now);
        if (line.granule != WORDS || bytes < 4 || (write && bytes == 16)) return false;
        Cell* const first = &parts_[offset / 16].cells[offset % 16 / 4];
        for (Cell* c = first; c != first + bytes / 4; ++c)
            if (!quick_touch(*c, write, clock, now)) return false;
        return true;
    }

    // Checks and records a read or write of `bytes` at `offset` (aligned, inside). On a fault
    // `other` is the stamp of the access it collides with.
    Fault access(std::size_t offset, unsigned bytes, bool write, const Clock& clock, int thread,
                 Stamp& other) {
        Line& line = lines_[offset / 16];
        const Stamp now = make_stamp(clock.time, thread);
        const unsigned wanted = bytes == 16 ? WHOLE : bytes >= 4 ? WORDS : BYTES;
        if (wanted < line.granule) split(line, parts_[offset / 16], wanted);
        if (line.granule == WHOLE) return touch(line.whole, write, clock, now, other);
        Cell* const cells = parts_[offset / 16].cells;
        const unsigned first = offset % 16 >> line.granule;
        const unsigned last = (offset % 16 + bytes - 1) >> line.granule;
        for (unsigned i = first; i <= last; ++i)
            if (Fault f = touch(cells[i], write, clock, now, other); f != Fault::NONE) return f;
        if (write && bytes == 16) line = {{now, 0, 0}, WHOLE};
        return Fault::NONE;
    }

    // A cp_async into the line at `offset` begins: nobody may touch it until its thread has waited.
    Fault begin_copy(std::size_t offset, const Clock& clock, int thread, Stamp& other) {
        const Fault f = access(offset, 16, true, clock, thread, other);
        lines_[offset / 16].whole.write = make_stamp(IN_FLIGHT, thread);
        return f;
    }
    // Its thread waited: from now on it is an ordinary write by that thread.
    void end_copy(std::size_t offset, const Clock& clock, int thread) {
        lines_[offset / 16].whole.write = make_stamp(clock.time, thread);
    }

    // A latest write of some bytes of the line at `offset` that has a property; 0 if there is none.
    template <class Property>
    Stamp find_write(std::size_t offset, Property property) const {
        const Line& line = lines_[offset / 16];
        auto found = [&](const Cell& c) { return c.write && property(c.write); };
        if (line.granule == WHOLE) return found(line.whole) ? line.whole.write : 0;
        for (unsigned i = 0; i < 16u >> line.granule; ++i)
            if (const Cell& c = parts_[offset / 16].cells[i]; found(c)) return c.write;
        return 0;
    }

   private:
    // Logarithms of the bytes that a cell describes.
    static constexpr unsigned WHOLE = 4, WORDS = 2, BYTES = 0;

    struct Line {
        Cell whole;
        std::uint32_t granule = WHOLE;  // else its parts are in use
    };
    struct Parts {
        Cell cells[16];
    };

    static void split(Line& line, Parts& parts, unsigned granule) {
        if (line.granule == WHOLE)
            for (unsigned i = 0; i < 16u >> granule; ++i) parts.cells[i] = line.whole;
        else  // words into bytes
            for (unsigned i = 16; i-- > 0;) parts.cells[i] = parts.cells[i / 4];
        line.granule = granule;
    }

    bool quick_touch(Cell& c, bool write, const Clock& clock, Stamp now) {
        if (c.write >= clock.limit) return false;
        if (write) {
            if (c.read >= clock.limit) return false;
            c = {now, 0, 0};
            return true;
        }
        if (c.write == 0) return false;
        if (c.read < clock.limit) {
            c.read = now;
            c.warps = 0;
            return true;
        }
        // A further read by a warp that has read it already.
        if (c.read == now) return true;
        if (each_reader_ || !(c.warps & 1u << stamp_thread(now) / 32)) return false;
        if (now > c.read) c.read = now;
        return true;
    }

    Fault touch(Cell& c, bool write, const Clock& clock, Stamp now, Stamp& other) {
        const int thread = stamp_thread(now);
        if (c.write >= clock.limit && !clock.ordered(c.write, thread)) {
            other = c.write;
            return stamp_time(c.write) == IN_FLIGHT ? Fault::RACE_WITH_COPY
                                                    : Fault::RACE_WITH_WRITE;
        }
        if (write) {
            if (c.read >= clock.limit &&
                !(c.warps ? ordered_after_readers(c, clock) : clock.ordered(c.read, thread))) {
                other = c.read;
                return Fault::RACE_WITH_READ;
            }
            c = {now, 0, 0};
            return Fault::NONE;
        }
        if (c.write == 0) return Fault::UNINITIALISED;
        if (c.read < clock.limit) {
            // Earlier reads happen before this one, so a writer ordered after this is after them.
            c.read = now;
            c.warps = 0;
        } else if (c.read != now) {
            merge_reader(c, clock, now);
        }
        return Fault::NONE;
    }

    void merge_reader(Cell& c, const Clock& clock, Stamp now) {
        const int thread = stamp_thread(now);
        if (!c.warps) {
            if (clock.ordered(c.read, thread)) {
                c.read = now;
                return;
            }
            const int before = stamp_thread(c.read) / 32;
            c.warps = 1u << before;
            if (each_reader_) read_times_[&c][before] = stamp_time(c.read);
        }
        c.warps |= 1u << thread / 32;
        if (each_reader_) read_times_[&c][thread / 32] = stamp_time(now);
        if (now > c.read) c.read = now;
    }

    bool ordered_after_readers(const Cell& c, const Clock& clock) {
        if (!each_reader_) return clock.ordered_after_warps(c.warps, stamp_time(c.read));
        const auto& times = read_times_[&c];
        for (std::uint32_t mask = c.warps; mask; mask &= mask - 1) {
            const int w = __builtin_ctz(mask);
            if (times[w] > clock.seen[w]) return false;
        }
        return true;
    }

    std::vector<Line> lines_;
    std::vector<Parts> parts_;
    // Warps that meet only at block barriers read in common epochs, and the latest time of all
    // speaks for each. Warps that meet at mbarriers come at their own times: then each counts.
    bool each_reader_ = false;
    std::unordered_map<const Cell*, std::array<std::uint32_t, MAX_WARPS>> read_times_;
};

}  // namespace host
