// CRC-32 of payloads.
#include "common.cuh"
#include "crc32.cuh"
#include "pages.cuh"

constexpr unsigned BATCH_LINES = 8; // loads of a lane that are under way at once
using WideShare = Share<PIECE_NBYTES, WARP>;

template <Reach REACH>
__device__ __forceinline__ void sum_lines(const WideShare &share,
                                          const Place &payload, const CrcMaps &maps, CrcSums &sums) {
    constexpr unsigned COUNT = REACH == NARROW ? 1 : BATCH_LINES;
#pragma unroll 1
    for (int first = share.first; first < share.end; first += COUNT * WARP) {
        uint4 pieces[COUNT];
        load_pieces<REACH>(payload, first, pieces);
#pragma unroll
        for (unsigned i = 0; i < COUNT; ++i) {
            sums.add(maps, pieces[i]);
        }
    }
}

extern "C" {

// Adds to the CRCs of payloads, which may begin anywhere.
__global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) crc32(LAUNCH_PARAMETERS) {
    __shared__ CrcMaps maps;
    const Launch launch = LAUNCH;
    const WideShare share(launch, BATCH_LINES);
    load_maps(maps, crc_tables);
    if (!share.any) {
        return;
    }
    const Place payload = place_of_run(share.task.payload);
    CrcSums sums;
    if (payload.reach == NARROW) {
        sum_lines<NARROW>(share, payload, maps, sums);
    } else {
        sum_lines<RUN>(share, payload, maps, sums);
    }
    unsigned byte = 0;
    if (threadIdx.x % WARP < share.own_tail_nbytes()) {
        byte = load_1(payload.start + PIECE_NBYTES * share.pieces() + threadIdx.x % WARP);
    }
    add_to_crc(&crcs[share.number], crc_tables, sum_of_wide_lines(maps, sums), share.shares_after * lines,
               sum_of_tail(byte, share.own_tail_nbytes()), share.tail_nbytes());
}
}
