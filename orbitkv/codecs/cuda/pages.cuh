// What a warp of a launch works on, and where the bytes of its segment lie in the engine's pages.
#pragma once
#include "common.cuh"

constexpr unsigned BLOCK_WARPS = 8; // as in kernels.py
constexpr unsigned BLOCK_THREADS = BLOCK_WARPS * WARP;
constexpr unsigned SM_BLOCKS = 4;     // at once on a multiprocessor, which leaves 64 registers
constexpr unsigned PIECE_NBYTES = 16; // of a segment's bytes, that one lane moves at once

// What every kernel is launched with. A launch covers the tasks order[first] to
// order[first + count - 1], or those of these numbers where there is no order.
struct Launch {
    const Slot* slots;
    const Task* tasks;
    const unsigned* order;
    unsigned first, count;
    unsigned shares;            // warps of a task, as many as the longest one needs
    unsigned *crcs, *faults;    // one a task
    const unsigned* crc_tables; // crc_tables.device_tables()
    unsigned lines;             // of a share: a multiple of every batch of lines
};

#define LAUNCH_PARAMETERS                                                                        \
    const Slot *slots, const Task *tasks, const unsigned *order, unsigned first, unsigned count, \
        unsigned shares, unsigned *crcs, unsigned *faults, const unsigned *crc_tables,           \
        unsigned lines
#define LAUNCH                                                                     \
    Launch {                                                                       \
        slots, tasks, order, first, count, shares, crcs, faults, crc_tables, lines \
    }

// One warp's part of a payload: some lines of LINE_PIECES pieces, each of which is STORED_NBYTES of
// the payload. Shares are laid from the end of the whole pieces backwards, so that what follows one
// is a multiple of it. So the first share may begin before the first piece: nothing is there, which
// counts as zero.
template <unsigned STORED_NBYTES, unsigned LINE_PIECES>
struct Share {
    bool any = false; // whether there is one for this warp
    unsigned number;  // of the task
    Task task;
    int first; // this lane's pieces are first, first + 32, ..., before end
    int end;

    __device__ __forceinline__ Share(const Launch& launch, unsigned batch_lines) {
        const unsigned warp = blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP;
        if (warp >= launch.count * launch.shares) {
            return;
        }
        const unsigned index = warp % launch.shares;
        number = launch.first + warp / launch.shares;
        if (launch.order) {
            number = launch.order[number];
        }
        task = launch.tasks[number];
        const unsigned share_pieces = launch.lines * LINE_PIECES;
        const unsigned shares = task.stored_nbytes < STORED_NBYTES
                                    ? task.stored_nbytes > 0
                                    : (pieces() + share_pieces - 1) / share_pieces;
        if (index >= shares) {
            return;
        }
        any = true;
        end = int(pieces() - (shares - 1 - index) * share_pieces);
        first = end - int(share_pieces);
        if (first < 0) { // leave out batches that are all zero
            const unsigned batch_pieces = batch_lines * LINE_PIECES;
            first += int(unsigned(-first) / batch_pieces * batch_pieces);
        }
        first += int(threadIdx.x % WARP);
        end += int(threadIdx.x % WARP);
    }

    // Whole pieces of the payload.
    __device__ __forceinline__ unsigned pieces() const {
        return task.stored_nbytes / STORED_NBYTES;
    }

    // Lines between the share and the tail. Not kept, as registers are short.
    __device__ __forceinline__ unsigned lines_after() const {
        return (pieces() + threadIdx.x % WARP - unsigned(end)) / LINE_PIECES;
    }

    // Bytes of the payload behind its whole pieces.
    __device__ __forceinline__ unsigned tail_nbytes() const {
        return task.stored_nbytes % STORED_NBYTES;
    }

    // Of these, the ones that fall to this share: all to the last one.
    __device__ __forceinline__ unsigned own_tail_nbytes() const {
        return lines_after() ? 0 : tail_nbytes();
    }
};

// Whether all that was found so far about a task's unit is good, so that its pages may be written.
__device__ __forceinline__ bool unit_is_good(const Launch& launch, const Task& task) {
    constexpr unsigned AT_ONCE = 4;
    unsigned bad = 0;
#pragma unroll 1
    for (unsigned first = threadIdx.x % WARP; first < task.unit_count; first += AT_ONCE * WARP) {
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; ++i) {
            if (first + i * WARP < task.unit_count) {
                const unsigned number = task.unit_first + first + i * WARP;
                bad |= launch.crcs[number] | (launch.faults[number] & UNDECODABLE);
            }
        }
    }
    return !__any_sync(ALL_LANES, bad);
}

// n / divisor, with inverse = (2^32 - 1) / divisor. The guess is right or one too low.
__device__ __forceinline__ unsigned quotient(unsigned n, unsigned divisor, unsigned inverse) {
    const unsigned guess = __umulhi(n, inverse);
    return n - guess * divisor >= divisor ? guess + 1 : guess;
}

// How a segment's pieces can be reached.
enum Reach {
    RUN,   // the segment is one run of bytes, on a boundary of 16
    ROWS,  // every piece is on such a boundary, in one row
    NARROW // neither
};

// Where a segment's bytes lie.
struct Place {
    Reach reach;
    unsigned long long start; // address of its first byte
    long long outer_stride, inner_stride;
    unsigned inner, inner_inverse;
    unsigned row_nbytes, row_inverse;
    unsigned access_nbytes;

    __device__ __forceinline__ unsigned long long at(unsigned offset) const {
        const unsigned row = quotient(offset, row_nbytes, row_inverse);
        const unsigned outer_index = quotient(row, inner, inner_inverse);
        return start + (long long)outer_index * outer_stride +
               (long long)(row - outer_index * inner) * inner_stride + (offset - row * row_nbytes);
    }
};

__device__ __forceinline__ Place place_of(const Slot& slot, unsigned page) {
    Place place;
    place.start = slot.base + (long long)page * slot.page_stride;
    place.outer_stride = slot.outer_stride;
    place.inner_stride = slot.inner_stride;
    place.inner = slot.inner;
    place.row_nbytes = slot.row_nbytes;
    place.access_nbytes = slot.access_nbytes;
    place.inner_inverse = ~0u / slot.inner;
    place.row_inverse = ~0u / slot.row_nbytes;
    const bool run = slot.inner_stride == slot.row_nbytes &&
                     slot.outer_stride == (long long)slot.inner * slot.row_nbytes;
    place.reach = run && place.start % PIECE_NBYTES == 0 ? RUN
                  : slot.access_nbytes == PIECE_NBYTES   ? ROWS
                                                         : NARROW;
    return place;
}

// A run of bytes anywhere, as a place.
__device__ __forceinline__ Place place_of_run(unsigned long long start) {
    Place place;
    place.start = start;
    place.outer_stride = place.inner_stride = 0;
    place.inner = 1;
    place.inner_inverse = ~0u;
    place.row_nbytes = ~0u;
    place.row_inverse = 1;
    place.access_nbytes = start % 8 == 0 ? 8 : start % 4 == 0 ? 4 : start % 2 == 0 ? 2 : 1;
    place.reach = start % PIECE_NBYTES == 0 ? RUN : NARROW;
    return place;
}

// Accesses to device memory. What is loaded here no warp of the launch writes, and it is read once,
// so that the L1 need not keep it.

__device__ __forceinline__ uint4 load_16(unsigned long long address) {
    uint4 found;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
        : "l"(address));
    return found;
}

__device__ __forceinline__ uint2 load_8(unsigned long long address) {
    uint2 found;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
        : "=r"(found.x), "=r"(found.y)
        : "l"(address));
    return found;
}

__device__ __forceinline__ unsigned load_4(unsigned long long address) {
    unsigned found;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(found) : "l"(address));
    return found;
}

__device__ __forceinline__ unsigned load_2(unsigned long long address) {
    unsigned short found;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(found) : "l"(address));
    return found;
}

__device__ __forceinline__ unsigned load_1(unsigned long long address) {
    unsigned short found;
    asm("ld.global.nc.u8 %0, [%1];" : "=h"(found) : "l"(address));
    return found;
}

__device__ __forceinline__ void store_16(unsigned long long address, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w));
}

__device__ __forceinline__ void store_8(unsigned long long address, uint2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(value.x), "r"(value.y));
}

__device__ __forceinline__ void store_4(unsigned long long address, unsigned value) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(value));
}

__device__ __forceinline__ void store_2(unsigned long long address, unsigned value) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"((unsigned short)(value)));
}

__device__ __forceinline__ void store_1(unsigned long long address, unsigned value) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "h"((unsigned short)(value)));
}

__device__ __forceinline__ unsigned long long joined(unsigned low, unsigned high) {
    return low | (unsigned long long)high << 32;
}

__device__ __forceinline__ unsigned long long load_word(unsigned long long address,
                                                        unsigned nbytes) {
    if (nbytes == 8) {
        const uint2 found = load_8(address);
        return joined(found.x, found.y);
    }
    return nbytes == 4 ? load_4(address) : nbytes == 2 ? load_2(address) : load_1(address);
}

__device__ __forceinline__ void store_word(unsigned long long address, unsigned nbytes,
                                           unsigned long long word) {
    if (nbytes == 8) {
        store_8(address, make_uint2(unsigned(word), unsigned(word >> 32)));
    } else if (nbytes == 4) {
        store_4(address, unsigned(word));
    } else if (nbytes == 2) {
        store_2(address, unsigned(word));
    } else {
        store_1(address, unsigned(word));
    }
}

__device__ __forceinline__ uint4 load_narrow(const Place& place, unsigned offset) {
    unsigned long long low = 0, high = 0;
#pragma unroll 1
    for (unsigned i = 0; i < PIECE_NBYTES; i += place.access_nbytes) {
        const unsigned long long word = load_word(place.at(offset + i), place.access_nbytes);
        if (i < 8) {
            low |= word << (8 * i);
        } else {
            high |= word << (8 * i - 64);
        }
    }
    return make_uint4(unsigned(low), unsigned(low >> 32), unsigned(high), unsigned(high >> 32));
}

__device__ __forceinline__ void store_narrow(const Place& place, unsigned offset, uint4 piece) {
    const unsigned long long low = joined(piece.x, piece.y), high = joined(piece.z, piece.w);
#pragma unroll 1
    for (unsigned i = 0; i < PIECE_NBYTES; i += place.access_nbytes) {
        const unsigned long long word = i < 8 ? low >> (8 * i) : high >> (8 * i - 64);
        store_word(place.at(offset + i), place.access_nbytes, word);
    }
}

// Address of piece first + 32 * index. Only then to be used when there is such a piece.
template <Reach REACH>
__device__ __forceinline__ unsigned long long address_of(const Place& place, int first,
                                                         unsigned index) {
    return REACH == RUN ? place.start + (long long)first * PIECE_NBYTES +
                              index * (unsigned long long)(WARP * PIECE_NBYTES)
                        : place.at(PIECE_NBYTES * unsigned(first + int(index * WARP)));
}

template <Reach REACH>
__device__ __forceinline__ uint4 load_piece(const Place& place, int first, unsigned index) {
    return REACH == NARROW ? load_narrow(place, PIECE_NBYTES * unsigned(first + int(index * WARP)))
                           : load_16(address_of<REACH>(place, first, index));
}

// Loads pieces first, first + 32, ... of a segment, for one lane; zero where the number is
// negative. Lanes have neighbouring pieces. All loads are under way before the first of them is
// needed.
template <Reach REACH, unsigned COUNT>
__device__ __forceinline__ void load_pieces(const Place& place, int first, uint4 (&found)[COUNT]) {
    if (first >= 0) {
#pragma unroll
        for (unsigned i = 0; i < COUNT; ++i) {
            found[i] = load_piece<REACH>(place, first, i);
        }
        return;
    }
#pragma unroll
    for (unsigned i = 0; i < COUNT; ++i) {
        found[i] = make_uint4(0, 0, 0, 0);
        if (first + int(i * WARP) >= 0) {
            found[i] = load_piece<REACH>(place, first, i);
        }
    }
}

// Stores piece first + 32 * index, unless that is negative.
template <Reach REACH>
__device__ __forceinline__ void store_piece(const Place& place, int first, unsigned index,
                                            uint4 value) {
    const int piece = first + int(index * WARP);
    if (piece >= 0) {
        if (REACH == NARROW) {
            store_narrow(place, PIECE_NBYTES * unsigned(piece), value);
        } else {
            store_16(address_of<REACH>(place, first, index), value);
        }
    }
}
