// Segments as they are: from pages into payloads and back.
#include "common.cuh"
#include "crc32.cuh"
#include "pages.cuh"

constexpr unsigned BATCH_LINES = 8; // loads of a lane that are under way at once
using WideShare = Share<PIECE_NBYTES, WARP>;

template <Reach REACH, bool SUMS>
__device__ __forceinline__ void gather_lines(const WideShare& share, const Place& place,
                                             const CrcMaps& maps, CrcSums& sums) {
    constexpr unsigned COUNT = REACH == NARROW ? 1 : BATCH_LINES;
    const Place payload = place_of_run(share.task.payload);
#pragma unroll 1
    for (int first = share.first; first < share.end; first += COUNT * WARP) {
        uint4 pieces[COUNT];
        load_pieces<REACH>(place, first, pieces);
#pragma unroll
        for (unsigned i = 0; i < COUNT; ++i) {
            store_piece<RUN>(payload, first, i, pieces[i]);
            if (SUMS) {
                sums.add(maps, pieces[i]);
            }
        }
    }
}

// Copies segments into their payloads, and adds to their CRCs if that is asked for.
template <bool SUMS>
__device__ __forceinline__ void gather_segments(const Launch& launch) {
    __shared__ CrcMaps maps;
    const WideShare share(launch, BATCH_LINES);
    Place place = {};
    if (share.any) {
        place = place_of(launch.slots[share.task.slot], share.task.page);
    }
    if (SUMS) {
        load_maps(maps, launch.crc_tables);
    }
    if (!share.any) {
        return;
    }
    CrcSums sums;
    if (place.reach == RUN) {
        gather_lines<RUN, SUMS>(share, place, maps, sums);
    } else if (place.reach == ROWS) {
        gather_lines<ROWS, SUMS>(share, place, maps, sums);
    } else {
        gather_lines<NARROW, SUMS>(share, place, maps, sums);
    }
    unsigned byte = 0;
    const unsigned lane = threadIdx.x % WARP;
    if (lane < share.own_tail_nbytes()) {
        const unsigned offset = PIECE_NBYTES * share.pieces() + lane;
        byte = load_1(place.at(offset));
        store_1(share.task.payload + offset, byte);
    }
    if (SUMS) {
        const unsigned tail = sum_of_tail(byte, share.own_tail_nbytes());
        add_to_crc(&launch.crcs[share.number], launch.crc_tables,
                   sum_of_wide_lines(maps, sums.words), share.lines_after(), tail,
                   share.tail_nbytes());
    }
}

// Stores the first batch, which has been loaded, and copies the others.
template <Reach REACH>
__device__ __forceinline__ void scatter_lines(const WideShare& share, const Place& payload,
                                              const Place& place, uint4 (&pieces)[BATCH_LINES]) {
    int first = share.first;
#pragma unroll 1
    while (first < share.end) {
#pragma unroll
        for (unsigned i = 0; i < BATCH_LINES; ++i) {
            store_piece<REACH>(place, first, i, pieces[i]);
        }
        first += BATCH_LINES * WARP;
        if (first < share.end) {
            load_pieces<RUN>(payload, first, pieces);
        }
    }
}

// Copies payloads into their segments, in units without a fault.
__device__ __forceinline__ void scatter_segments(const Launch& launch) {
    const WideShare share(launch, BATCH_LINES);
    if (!share.any) {
        return;
    }
    const Place payload = place_of_run(share.task.payload);
    uint4 pieces[BATCH_LINES];
    if (share.first < share.end) {
        load_pieces<RUN>(payload, share.first, pieces);
    }
    // After the first loads, so that both are waited for at once.
    if (!unit_is_good(launch, share.task)) {
        return;
    }
    const Place place = place_of(launch.slots[share.task.slot], share.task.page);
    if (place.reach == RUN) {
        scatter_lines<RUN>(share, payload, place, pieces);
    } else if (place.reach == ROWS) {
        scatter_lines<ROWS>(share, payload, place, pieces);
    } else {
        for (int piece = share.first; piece < share.end; piece += WARP) {
            if (piece >= 0) {
                store_piece<NARROW>(place, piece, 0, load_piece<RUN>(payload, piece, 0));
            }
        }
    }
    const unsigned lane = threadIdx.x % WARP;
    if (lane < share.own_tail_nbytes()) {
        const unsigned offset = PIECE_NBYTES * share.pieces() + lane;
        store_1(place.at(offset), load_1(share.task.payload + offset));
    }
}

extern "C" {

__global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) gather_raw(LAUNCH_PARAMETERS) {
    gather_segments<true>(LAUNCH);
}

__global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) gather(LAUNCH_PARAMETERS) {
    gather_segments<false>(LAUNCH);
}

__global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) scatter_raw(LAUNCH_PARAMETERS) {
    scatter_segments(LAUNCH);
}
}
