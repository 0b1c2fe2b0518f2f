// What is known about each byte of a block's shared memory: who wrote it, who read it since.
//
// One cell describes a line of 16 bytes as long as all accesses are of whole lines (ldmatrix,
// cp_async, 16-byte vectors); the first smaller access splits a line into cells of 2 bytes, and the
// next 16-byte write makes it whole again. Accesses of 1 byte count as 2.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "clocks.hpp"

namespace host {

enum class Fault { NONE, UNINITIALISED, RACE_WITH_WRITE, RACE_WITH_READ, RACE_WITH_COPY };

struct Cell {
    Stamp write = 0;
    Stamp read = 0;          // the latest read since the write
    std::uint32_t warps = 0;  // the reading warps when there were several readers, else 0
};

class SharedShadow {
  public:
    void reset(std::size_t bytes) {
        lines_.assign((bytes + 15) / 16, Line{});
        if (parts_.size() < lines_.size()) parts_.resize(lines_.size());
    }

    // Checks and records a read or write of `bytes` at `offset` (aligned, inside). On a fault
    // `other` is the stamp of the access it collides with.
    Fault access(std::size_t offset, unsigned bytes, bool write, const Clock& clock, int thread,
                 Stamp& other) {
        Line& line = lines_[offset / 16];
        const Stamp now = make_stamp(clock.time, thread);
        if (bytes == 16) {
            if (!line.split) return touch(line.whole, write, clock, now, other);
            for (Cell& cell : parts_[offset / 16].cells)
                if (Fault f = touch(cell, write, clock, now, other); f != Fault::NONE) return f;
            if (write) {
                line.split = 0;
                line.whole = {now, 0, 0};
            }
            return Fault::NONE;
        }
        Parts& parts = parts_[offset / 16];
        if (!line.split) {
            for (Cell& cell : parts.cells) cell = line.whole;
            line.split = 1;
        }
        const unsigned first = offset % 16 / 2;
        const unsigned last = (offset % 16 + bytes - 1) / 2;
        for (unsigned i = first; i <= last; ++i)
            if (Fault f = touch(parts.cells[i], write, clock, now, other); f != Fault::NONE)
                return f;
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

  private:
    struct Line {
        Cell whole;
        std::uint32_t split = 0;
    };
    struct Parts {
        Cell cells[8];
    };

    static Fault touch(Cell& c, bool write, const Clock& clock, Stamp now, Stamp& other) {
        const int thread = stamp_thread(now);
        if (c.write >= clock.limit && !clock.ordered(c.write, thread)) {
            other = c.write;
            return stamp_time(c.write) == IN_FLIGHT ? Fault::RACE_WITH_COPY
                                                    : Fault::RACE_WITH_WRITE;
        }
        if (write) {
            if (c.read >= clock.limit &&
                !(c.warps ? clock.ordered_after_warps(c.warps, stamp_time(c.read))
                          : clock.ordered(c.read, thread))) {
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

    static void merge_reader(Cell& c, const Clock& clock, Stamp now) {
        const int thread = stamp_thread(now);
        if (!c.warps) {
            if (clock.ordered(c.read, thread)) {
                c.read = now;
                return;
            }
            c.warps = 1u << stamp_thread(c.read) / 32;
        }
        c.warps |= 1u << thread / 32;
        if (now > c.read) c.read = now;
    }

    std::vector<Line> lines_;
    std::vector<Parts> parts_;
};

}  // namespace host
