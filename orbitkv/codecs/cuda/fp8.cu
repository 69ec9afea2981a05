// FP8: segments of 16-bit words into payloads of E4M3FN, and back.
#include "common.cuh"
#include "crc32.cuh"
#include "fp8.cuh"
#include "pages.cuh"

// A piece of a segment is 8 words, and becomes 8 bytes of the payload.
constexpr unsigned PIECE_CODES = 8;

// A line of the payload is 64 pieces here: each lane has one of its first half and one of its
// second, so that lanes read and write neighbouring bytes.
using EncodeShare = Share<PIECE_CODES, 2 * WARP>;
#if __CUDA_ARCH__ >= 890
constexpr unsigned ENCODE_BATCH_LINES = 4; // with eight loads of a lane under way
#else
constexpr unsigned ENCODE_BATCH_LINES = 2; // registers are needed for converting by hand
#endif

// No CRC here, so a line is what the lanes load at once: 256 bytes of the payload.
constexpr unsigned DECODE_BATCH_LINES = 8;
using DecodeShare = Share<PIECE_CODES, WARP>;

// Address of a payload's piece first + 32 * index. Only then to be used when there is such a piece.
__device__ __forceinline__ unsigned long long codes_at(unsigned long long payload, int first,
                                                       unsigned index) {
    return payload + (long long)first * PIECE_CODES +
           index * (unsigned long long)(WARP * PIECE_CODES);
}

template <bool IS_HALF>
__device__ __forceinline__ uint2 encoded(uint4 words, unsigned& most) {
    most = most_of<IS_HALF>(most, words.x);
    most = most_of<IS_HALF>(most, words.y);
    most = most_of<IS_HALF>(most, words.z);
    most = most_of<IS_HALF>(most, words.w);
    return make_uint2(codes_of<IS_HALF>(words.x, words.y), codes_of<IS_HALF>(words.z, words.w));
}

template <bool IS_HALF, Reach REACH>
__device__ __forceinline__ void encode_lines(const EncodeShare& share, const Place& place,
                                             const CrcMaps& maps, CrcSums& sums, unsigned& most) {
    constexpr unsigned LINES = REACH == NARROW ? 1 : ENCODE_BATCH_LINES;
#pragma unroll 1
    for (int first = share.first; first < share.end; first += 2 * LINES * WARP) {
        uint4 pieces[2 * LINES];
        load_pieces<REACH>(place, first, pieces);
#pragma unroll
        for (unsigned i = 0; i < 2 * LINES; i += 2) {
            const uint2 codes[2] = {encoded<IS_HALF>(pieces[i], most),
                                    encoded<IS_HALF>(pieces[i + 1], most)};
#pragma unroll
            for (unsigned half = 0; half < 2; ++half) {
                if (first + int((i + half) * WARP) >= 0) {
                    store_8(codes_at(share.task.payload, first, i + half), codes[half]);
                }
            }
            sums.add(maps, make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y));
        }
    }
}

// Encodes segments, adds to the CRCs of their payloads, and tells what E4M3FN cannot hold.
template <bool IS_HALF>
__device__ __forceinline__ void encode_segments(const Launch& launch) {
    __shared__ CrcMaps maps;
    const EncodeShare share(launch, ENCODE_BATCH_LINES);
    Place place = {};
    if (share.any) {
        place = place_of(launch.slots[share.task.slot], share.task.page);
    }
    load_maps(maps, launch.crc_tables);
    if (!share.any) {
        return;
    }
    CrcSums sums;
    unsigned most = 0;
    if (place.reach == RUN) {
        encode_lines<IS_HALF, RUN>(share, place, maps, sums, most);
    } else if (place.reach == ROWS) {
        encode_lines<IS_HALF, ROWS>(share, place, maps, sums, most);
    } else {
        encode_lines<IS_HALF, NARROW>(share, place, maps, sums, most);
    }
    unsigned code = 0;
    const unsigned lane = threadIdx.x % WARP;
    if (lane < share.own_tail_nbytes()) {
        const unsigned element = PIECE_CODES * share.pieces() + lane;
        const unsigned word = load_1(place.at(2 * element)) | load_1(place.at(2 * element + 1))
                                                                  << 8;
        most = most_of<IS_HALF>(most, word);
        code = code_of<IS_HALF>(word) & 0xff;
        store_1(share.task.payload + element, code);
    }
    const unsigned fault =
        fault_of<IS_HALF>(__reduce_max_sync(ALL_LANES, max(most & 0xffff, most >> 16)));
    if (fault && lane == 0) {
        atomicOr(&launch.faults[share.number], fault);
    }
    add_to_crc(&launch.crcs[share.number], launch.crc_tables, sum_of_split_lines(maps, sums.words),
               share.lines_after(), sum_of_tail(code, share.own_tail_nbytes()),
               share.tail_nbytes());
}

// The quiet NaN in place of what words_of makes of a NaN code.
template <bool IS_HALF>
__device__ __forceinline__ unsigned with_nans(unsigned words, unsigned codes) {
    if ((codes & 0x7f00) == 0x7f00) {
        words = (words & 0xffff8000) | Fp8<IS_HALF>::QUIET_NAN;
    }
    if ((codes & 0x7f000000) == 0x7f000000) {
        words = (words & 0x8000ffff) | Fp8<IS_HALF>::QUIET_NAN << 16;
    }
    return words;
}

template <bool IS_HALF>
__device__ __forceinline__ uint4 decoded(uint2 codes) {
    // A code in the upper byte of each half.
    const unsigned pairs[4] = {__byte_perm(codes.x, 0, 0x1404), __byte_perm(codes.x, 0, 0x3424),
                               __byte_perm(codes.y, 0, 0x1404), __byte_perm(codes.y, 0, 0x3424)};
    unsigned words[4];
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
        words[i] = words_of<IS_HALF>(pairs[i]);
    }
    if ((((codes.x & 0x7f7f7f7f) + 0x01010101) | ((codes.y & 0x7f7f7f7f) + 0x01010101)) &
        0x80808080) {
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
            words[i] = with_nans<IS_HALF>(words[i], pairs[i]);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <unsigned COUNT>
__device__ __forceinline__ void load_codes(unsigned long long payload, int first,
                                           uint2 (&found)[COUNT]) {
#pragma unroll
    for (unsigned i = 0; i < COUNT; ++i) {
        found[i] = make_uint2(0, 0);
        if (first + int(i * WARP) >= 0) {
            found[i] = load_8(codes_at(payload, first, i));
        }
    }
}

// Decodes the first batch, which has been loaded, and then the others.
template <bool IS_HALF, Reach REACH>
__device__ __forceinline__ void decode_lines(const DecodeShare& share, const Place& place,
                                             uint2 (&codes)[DECODE_BATCH_LINES]) {
    int first = share.first;
#pragma unroll 1
    while (first < share.end) {
#pragma unroll
        for (unsigned i = 0; i < DECODE_BATCH_LINES; ++i) {
            store_piece<REACH>(place, first, i, decoded<IS_HALF>(codes[i]));
        }
        first += DECODE_BATCH_LINES * WARP;
        if (first < share.end) {
            load_codes(share.task.payload, first, codes);
        }
    }
}

// Decodes payloads into segments, in units without a fault.
template <bool IS_HALF>
__device__ __forceinline__ void decode_segments(const Launch& launch) {
    const DecodeShare share(launch, DECODE_BATCH_LINES);
    if (!share.any) {
        return;
    }
    uint2 codes[DECODE_BATCH_LINES];
    if (share.first < share.end) {
        load_codes(share.task.payload, share.first, codes);
    }
    // After the first loads, so that all are waited for at once.
    const Slot slot = launch.slots[share.task.slot];
    if (!unit_is_good(launch, share.task)) {
        return;
    }
    const Place place = place_of(slot, share.task.page);
    if (place.reach == RUN) {
        decode_lines<IS_HALF, RUN>(share, place, codes);
    } else if (place.reach == ROWS) {
        decode_lines<IS_HALF, ROWS>(share, place, codes);
    } else {
        for (int piece = share.first; piece < share.end; piece += WARP) {
            uint2 one[1];
            load_codes(share.task.payload, piece, one);
            store_piece<NARROW>(place, piece, 0, decoded<IS_HALF>(one[0]));
        }
    }
    const unsigned lane = threadIdx.x % WARP;
    if (lane < share.own_tail_nbytes()) {
        const unsigned element = PIECE_CODES * share.pieces() + lane;
        const unsigned code = load_1(share.task.payload + element) << 8;
        const unsigned word = with_nans<IS_HALF>(words_of<IS_HALF>(code), code);
        store_1(place.at(2 * element), word & 0xff);
        store_1(place.at(2 * element + 1), word >> 8 & 0xff);
    }
}

extern "C" {

__global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) encode_fp8_bf16(LAUNCH_PARAMETERS) {
    encode_segments<false>(LAUNCH);
}

__global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) encode_fp8_f16(LAUNCH_PARAMETERS) {
    encode_segments<true>(LAUNCH);
}

__global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) decode_fp8_bf16(LAUNCH_PARAMETERS) {
    decode_segments<false>(LAUNCH);
}

__global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) decode_fp8_f16(LAUNCH_PARAMETERS) {
    decode_segments<true>(LAUNCH);
}
}
