// What every kernel is given. The same layouts stand in tasks.py as numpy dtypes; a test compares them.
#pragma once

// One slot of a registration: where its segments lie in the engine's pages.
struct Slot {
    unsigned long long base;       // address of page 0's segment
    long long page_stride;         // bytes between neighbouring pages
    long long outer_stride;        // bytes between neighbours along the first axis of a segment
    long long inner_stride;        // bytes between neighbours along the second axis
    unsigned outer;                // length of the first axis: tokens or heads
    unsigned inner;                // length of the second axis
    unsigned row_nbytes;           // bytes of one row along dim, which is one run
    unsigned access_nbytes;        // 16, 8, 4, 2 or 1: divides base, every stride, and row_nbytes
};

// One segment of a batch.
struct Task {
    unsigned slot;                 // index into the slots
    unsigned page;                 // page index
    unsigned long long payload;    // address of its stored bytes in the arena, a multiple of 512
    unsigned stored_nbytes;        // their number
    unsigned unit_first;           // the tasks that stand or fall with it when it is decoded:
    unsigned unit_count;           //   [unit_first, unit_first + unit_count)
    unsigned reserved;
};

// Bits of a task's fault, as in codecs/cpu.py.
enum Fault : unsigned { NONFINITE = 1, OUT_OF_RANGE = 2, SCALAR_OVERFLOW = 4, UNDECODABLE = 8 };

constexpr unsigned WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
