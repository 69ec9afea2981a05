// CRC-32 of payloads.
#include "common.cuh"
#include "crc32.cuh"
#include "pages.cuh"

constexpr unsigned BATCH_LINES = 8; // loads of a lane that are under way at once
constexpr unsigned CRC_BLOCKS = 3;  // at once on a multiprocessor, which leaves 80 registers
using WideShare = Share<PIECE_NBYTES, WARP>;

template <Reach REACH>
__device__ __forceinline__ void sum_lines(const WideShare& share, const Place& payload,
                                          CrcSumsInRegisters& sums) {
    constexpr unsigned COUNT = REACH == NARROW ? 1 : BATCH_LINES;
#pragma unroll 1
    for (int first = share.first; first < share.end; first += COUNT * WARP) {
        uint4 pieces[COUNT];
        load_pieces<REACH>(payload, first, pieces);
#pragma unroll
        for (unsigned i = 0; i < COUNT; ++i) {
            sums.add(pieces[i]);
        }
    }
}

extern "C" {

// Adds to the CRCs of payloads, which may begin anywhere.
__global__ void __launch_bounds__(BLOCK_THREADS, CRC_BLOCKS) crc32(LAUNCH_PARAMETERS) {
    __shared__ CrcMaps maps;
    const Launch launch = LAUNCH;
    const WideShare share(launch, BATCH_LINES);
    load_maps(maps, crc_tables);
    if (!share.any) {
        return;
    }
    const Place payload = place_of_run(share.task.payload);
    CrcSumsInRegisters sums(maps);
    if (payload.reach == NARROW) {
        sum_lines<NARROW>(share, payload, sums);
    } else {
        sum_lines<RUN>(share, payload, sums);
    }
    unsigned byte = 0;
    if (threadIdx.x % WARP < share.own_tail_nbytes()) {
        byte = load_1(payload.start + PIECE_NBYTES * share.pieces() + threadIdx.x % WARP);
    }
    add_to_crc(&crcs[share.number], crc_tables, sum_of_wide_lines(maps, sums.words),
               share.lines_after(), sum_of_tail(byte, share.own_tail_nbytes()),
               share.tail_nbytes());
}
}
