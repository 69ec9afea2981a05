// CRC-32 of IEEE 802.3, in parts: each warp adds what its share contributes.
//
// crc_tables.py says what the tables hold. A warp takes lines of 512 bytes. Each lane keeps four
// sums, one for each of its words of a line, which a line multiplies by x^4096 before it adds its
// own. In the end the words of all lanes come together, and what follows the share is accounted
// for.
#pragma once
#include "common.cuh"

constexpr unsigned CRC_POLYNOMIAL = 0xedb88320u;
constexpr unsigned CRC_MAPS = 8;
constexpr unsigned CRC_FIELDS = 7;
constexpr unsigned CRC_NEAR = 128, CRC_MIDDLE = 256, CRC_FAR = 256;

// Multiplications by x^(32 * 2^k). A field of five bits selects one of 32 neighbouring words, which
// lie in as many banks of the shared memory: lanes never wait for one another.
struct alignas(16) CrcMaps {
    unsigned of[CRC_MAPS][CRC_FIELDS][WARP];
};

constexpr unsigned CRC_NEAR_AT = sizeof(CrcMaps) / 4;
constexpr unsigned CRC_MIDDLE_AT = CRC_NEAR_AT + CRC_NEAR * WARP;
constexpr unsigned CRC_FAR_AT = CRC_MIDDLE_AT + CRC_MIDDLE * WARP;
constexpr unsigned CRC_TAILS_AT = CRC_FAR_AT + CRC_FAR * WARP;

// Brings the maps into shared memory. All threads of the block must come.
__device__ __forceinline__ void load_maps(CrcMaps& maps, const unsigned* crc_tables) {
    const uint4* source = reinterpret_cast<const uint4*>(crc_tables);
    uint4* target = reinterpret_cast<uint4*>(&maps);
    for (unsigned i = threadIdx.x; i < sizeof(CrcMaps) / sizeof(uint4); i += blockDim.x) {
        target[i] = source[i];
    }
    __syncthreads();
}

// word * x^(32 * 2^MAP)
template <unsigned MAP>
__device__ __forceinline__ unsigned mapped(const CrcMaps& maps, unsigned word) {
    const unsigned (&fields)[CRC_FIELDS][WARP] = maps.of[MAP];
    return fields[0][word & 3] ^ fields[1][word >> 2 & 31] ^ fields[2][word >> 7 & 31] ^
           fields[3][word >> 12 & 31] ^ fields[4][word >> 17 & 31] ^ fields[5][word >> 22 & 31] ^
           fields[6][word >> 27];
}

// One lane's sums, of its words of a line.
struct CrcSums {
    unsigned words[4] = {0, 0, 0, 0};

    // Adds the next line.
    __device__ __forceinline__ void add(const CrcMaps& maps, uint4 line) {
        words[0] = mapped<7>(maps, words[0]) ^ line.x;
        words[1] = mapped<7>(maps, words[1]) ^ line.y;
        words[2] = mapped<7>(maps, words[2]) ^ line.z;
        words[3] = mapped<7>(maps, words[3]) ^ line.w;
    }
};

// The same with the map from line to line in registers: lane i holds entry i of each field. To ask
// a lane for its entry takes no address, so a third fewer instructions, but seven more registers.
struct CrcSumsInRegisters {
    unsigned words[4] = {0, 0, 0, 0};
    unsigned entries[CRC_FIELDS];

    __device__ __forceinline__ explicit CrcSumsInRegisters(const CrcMaps& maps) {
#pragma unroll
        for (unsigned field = 0; field < CRC_FIELDS; ++field) {
            entries[field] = maps.of[7][field][threadIdx.x % WARP];
        }
    }

    // Adds the next line. All lanes must come.
    __device__ __forceinline__ void add(uint4 line) {
        words[0] = mapped_by_lanes(words[0]) ^ line.x;
        words[1] = mapped_by_lanes(words[1]) ^ line.y;
        words[2] = mapped_by_lanes(words[2]) ^ line.z;
        words[3] = mapped_by_lanes(words[3]) ^ line.w;
    }

    __device__ __forceinline__ unsigned mapped_by_lanes(unsigned word) const {
        unsigned found = 0;
#pragma unroll
        for (unsigned field = 0; field < CRC_FIELDS; ++field) {
            // Of a lane's number only the lowest five bits count.
            const unsigned lane = field ? word >> (5 * field - 3) : word;
            found ^= __shfl_sync(ALL_LANES, entries[field], int(lane));
        }
        return found;
    }
};

// The sum over a warp, in lane 0. Words 0 to 3 of a lane are neighbours: 16 bytes of a line.
__device__ __forceinline__ unsigned sum_of_wide_lines(const CrcMaps& maps,
                                                      const unsigned (&words)[4]) {
    unsigned sum = mapped<0>(maps, words[0]) ^ words[1];
    sum = mapped<0>(maps, sum) ^ words[2];
    sum = mapped<0>(maps, sum) ^ words[3];
    sum = mapped<2>(maps, sum) ^ __shfl_down_sync(ALL_LANES, sum, 1);
    sum = mapped<3>(maps, sum) ^ __shfl_down_sync(ALL_LANES, sum, 2);
    sum = mapped<4>(maps, sum) ^ __shfl_down_sync(ALL_LANES, sum, 4);
    sum = mapped<5>(maps, sum) ^ __shfl_down_sync(ALL_LANES, sum, 8);
    return mapped<6>(maps, sum) ^ __shfl_down_sync(ALL_LANES, sum, 16);
}

// The same where words 0 and 1 of a lane are 8 bytes of a line's first half, 2 and 3 of its second.
__device__ __forceinline__ unsigned sum_of_split_lines(const CrcMaps& maps,
                                                       const unsigned (&words)[4]) {
    const unsigned first = mapped<0>(maps, words[0]) ^ words[1];
    const unsigned second = mapped<0>(maps, words[2]) ^ words[3];
    unsigned sum = mapped<6>(maps, first) ^ second;
    sum = mapped<1>(maps, sum) ^ __shfl_down_sync(ALL_LANES, sum, 1);
    sum = mapped<2>(maps, sum) ^ __shfl_down_sync(ALL_LANES, sum, 2);
    sum = mapped<3>(maps, sum) ^ __shfl_down_sync(ALL_LANES, sum, 4);
    sum = mapped<4>(maps, sum) ^ __shfl_down_sync(ALL_LANES, sum, 8);
    return mapped<5>(maps, sum) ^ __shfl_down_sync(ALL_LANES, sum, 16);
}

// What a tail of fewer than 32 bytes contributes. Lane i holds byte i.
__device__ __forceinline__ unsigned sum_of_tail(unsigned byte, unsigned nbytes) {
    unsigned sum = 0;
#pragma unroll 1
    for (unsigned i = 0; i < nbytes; ++i) {
        sum ^= __shfl_sync(ALL_LANES, byte, i);
#pragma unroll
        for (unsigned bit = 0; bit < 8; ++bit) {
            sum = sum >> 1 ^ (sum & 1 ? CRC_POLYNOMIAL : 0);
        }
    }
    return sum;
}

// sum * matrix, for every lane; lane i holds the matrix's word i.
__device__ __forceinline__ unsigned times_matrix(unsigned sum, unsigned word) {
    return __reduce_xor_sync(ALL_LANES, sum >> (threadIdx.x % WARP) & 1 ? word : 0);
}

// Adds to a CRC what a share contributes, and what sum_of_tail gave for its own part of the tail.
//
// sum: of the share's lines, in lane 0. Behind them come lines_after lines and tail_nbytes < 16.
__device__ __forceinline__ void add_to_crc(unsigned* crc, const unsigned* crc_tables, unsigned sum,
                                           unsigned lines_after, unsigned tail,
                                           unsigned tail_nbytes) {
    const unsigned lane = threadIdx.x % WARP;
    const unsigned near = lines_after % CRC_NEAR;
    const unsigned middle = lines_after / CRC_NEAR % CRC_MIDDLE;
    const unsigned far = lines_after / (CRC_NEAR * CRC_MIDDLE);
    sum = __shfl_sync(ALL_LANES, sum, 0);
    sum = times_matrix(sum, crc_tables[CRC_NEAR_AT + near * WARP + lane]);
    if (middle) {
        sum = times_matrix(sum, crc_tables[CRC_MIDDLE_AT + middle * WARP + lane]);
    }
    if (far) {
        sum = times_matrix(sum, crc_tables[CRC_FAR_AT + far * WARP + lane]);
    }
    if (tail_nbytes) {
        sum = times_matrix(sum, crc_tables[CRC_TAILS_AT + tail_nbytes * WARP + lane]) ^ tail;
    }
    if (lane == 0) {
        atomicXor(crc, sum);
    }
}
