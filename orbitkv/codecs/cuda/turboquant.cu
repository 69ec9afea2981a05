// TurboQuant: docs/codecs.md for a GPU, byte for byte what codecs/cpu.py writes and reads.
//
// Compiled once for each pair of BITS (4, 3) and HEAD_DIM (32, 64, 128, 256), which are macros.
// Whether segments hold K, V or both follows from the lengths of their rows and payloads, so that
// one launch takes any of them.
//
// HEAD_DIM / 16 lanes hold a vector. It has four quarters, and in each of them a lane holds four
// neighbours: value[quarter][i] is element quarter * HEAD_DIM / 4 + 4 * lane + i. Halving then
// needs the lanes' help only between neighbours of one quarter, and the elements whose codes share
// a byte are all in one lane. Each lane works on two vectors at once, for the sake of latency.
// What is done once a vector (square roots, divisions), the lower half of its lanes does for one of
// the two, its own, and the upper half for the other.
#include "common.cuh"

static_assert(BITS == 4 || BITS == 3);
static_assert(HEAD_DIM == 32 || HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256);

constexpr unsigned LANES = HEAD_DIM / 16;     // of a vector
constexpr unsigned PAIR = 2;                  // vectors at once
constexpr unsigned STEP_ROWS = PAIR * (WARP / LANES);
constexpr unsigned VECTOR_NBYTES = HEAD_DIM * 2;
constexpr unsigned QUARTER_NBYTES = VECTOR_NBYTES / 4;
constexpr unsigned CODES_NBYTES = HEAD_DIM * BITS / 8;
constexpr unsigned INFINITE_F16 = 0x7c00, INFINITE_BF16 = 0x7f80;
constexpr float LEVELS = (1 << BITS) - 1;
constexpr float SMALLEST_SCALE = 5.9604644775390625e-8f;  // 2^-24
constexpr float INTEGER = 12582912.0f;  // added to a small number, rounds it to its lowest bits

// As in tables.py: FP32 patterns of the positive halves. A test compares them.
#if BITS == 4
__device__ const unsigned CENTROIDS[] = {0x3e038342, 0x3ec6bb0c, 0x3f282a1d, 0x3f71455e,
                                         0x3fa0cdac, 0x3fcf1769, 0x400461c3, 0x402ec7b7};
__device__ const unsigned EDGES[] = {0x3e843e56, 0x3f05c3d2, 0x3f4cb7be, 0x3f8cb82e,
                                     0x3fb7f28a, 0x3febed78, 0x401994bd};
constexpr float GUESS = 3.35f;
#else
__device__ const unsigned CENTROIDS[] = {0x3e7add6e, 0x3f41724a, 0x3fabed88, 0x40099f6e};
__device__ const unsigned EDGES[] = {0x3f0014d3, 0x3f865356, 0x3fdf9632};
constexpr float GUESS = 1.9f;
#endif

// Elements of two vectors, and their words: two elements in each, two words in a quarter.
using Values = float[PAIR][4][4];
using Words = unsigned[PAIR][4][2];
// Codes of two vectors, one a byte.
using Codes = unsigned[PAIR][4];

// Instructions. Conversions round to nearest even, with subnormals.

__device__ inline float float_of_f16(unsigned word) {
    float value;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(value) : "r"(word));
    return value;
}

__device__ inline unsigned f16_of(float value) {
    unsigned short word;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(word) : "f"(value));
    return word;
}

__device__ inline unsigned two_bf16(float low, float high) {
    unsigned words;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words) : "f"(high), "f"(low));
    return words;
}

__device__ inline unsigned two_f16(float low, float high) {
    unsigned words;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words) : "f"(high), "f"(low));
    return words;
}

// Of each of two elements; NaN if one is NaN, and -0 is less than +0.
template <bool IS_HALF>
__device__ inline unsigned least(unsigned a, unsigned b) {
    unsigned words;
    if constexpr (IS_HALF) {
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(words) : "r"(a), "r"(b));
    } else {
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(words) : "r"(a), "r"(b));
    }
    return words;
}

template <bool IS_HALF>
__device__ inline unsigned greatest(unsigned a, unsigned b) {
    unsigned words;
    if constexpr (IS_HALF) {
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(words) : "r"(a), "r"(b));
    } else {
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(words) : "r"(a), "r"(b));
    }
    return words;
}

__device__ inline float about_reciprocal(float value) {
    float reciprocal;
    asm("rcp.approx.f32 %0, %1;" : "=f"(reciprocal) : "f"(value));
    return reciprocal;
}

// fl(a * b + c), clamped to 0 ... 1.
__device__ inline float clamped_fma(float a, float b, float c) {
    float value;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(value) : "f"(a), "f"(b), "f"(c));
    return value;
}

// End of instructions.

template <bool IS_HALF>
__device__ inline float low_of(unsigned words) {
    if constexpr (IS_HALF) {
        return float_of_f16(words & 0xffff);
    } else {
        return __uint_as_float(words << 16);
    }
}

template <bool IS_HALF>
__device__ inline float high_of(unsigned words) {
    if constexpr (IS_HALF) {
        return float_of_f16(words >> 16);
    } else {
        return __uint_as_float(words & 0xffff0000);
    }
}

// FP16 is clamped to its finite range. Rounding first gives the same.
template <bool IS_HALF>
__device__ inline unsigned words_of(float low, float high) {
    if constexpr (IS_HALF) {
        return greatest<true>(least<true>(two_f16(low, high), 0x7bff7bff), 0xfbfffbff);
    } else {
        return two_bf16(low, high);
    }
}

__device__ inline bool is_upper(unsigned lane) {
    return lane & LANES / 2;
}

// Give the other half of the lanes what it lacks of its own vector; get what this one lacks.
template <typename T>
__device__ inline T exchanged(const T& first, const T& second, unsigned lane) {
    return __shfl_xor_sync(ALL_LANES, is_upper(lane) ? first : second, LANES / 2);
}

// What the lanes have for vector v as their own.
template <typename T>
__device__ inline T of_vector(const T& own, unsigned v) {
    return __shfl_sync(ALL_LANES, own, v * (LANES / 2), LANES);
}

// One segment: where its rows and the parts of its payload lie.
struct Segment {
    char* base;
    long long outer_stride, inner_stride;
    unsigned rows, inner, access_nbytes;
    bool flat;                     // rows lie at equal distances
    bool has_k, has_v;
    unsigned char* codes;

    // Returns false, and is not to be used, if the task's length is not that of a payload.
    __device__ bool open(const Slot& slot, const Task& task) {
        base = reinterpret_cast<char*>(slot.base + task.page * slot.page_stride);
        outer_stride = slot.outer_stride;
        inner_stride = slot.inner_stride;
        inner = slot.inner;
        access_nbytes = slot.access_nbytes;
        rows = slot.outer * inner;
        flat = outer_stride == inner_stride * inner;
        codes = reinterpret_cast<unsigned char*>(task.payload);
        if (slot.row_nbytes == 2 * VECTOR_NBYTES) {
            has_k = has_v = true;
        } else {
            has_k = task.stored_nbytes == rows * (CODES_NBYTES + 2);
            has_v = !has_k;
        }
        return slot.row_nbytes == VECTOR_NBYTES * (has_k + has_v)
            && task.stored_nbytes == rows * ((CODES_NBYTES + 2) * has_k + (CODES_NBYTES + 4) * has_v);
    }

    // Norms, else scales; after norms there are scales, and after scales minima.
    __device__ unsigned short* scalars() const {
        return reinterpret_cast<unsigned short*>(codes + rows * CODES_NBYTES * (has_k + has_v));
    }

    __device__ unsigned short* scales() const { return scalars() + (has_k ? rows : 0); }

    __device__ unsigned steps() const {
        return (rows + STEP_ROWS - 1) / STEP_ROWS * (has_k + has_v);
    }
};

// Two vectors of a segment, and this lane's place in them.
struct Place {
    unsigned lane;                 // within a vector
    unsigned row[PAIR];            // the segment's last one instead of any beyond it
    bool inside[PAIR];
    bool is_value;                 // V

    __device__ Place(const Segment& segment, unsigned step) {
        bool both = segment.has_k && segment.has_v;
        is_value = both ? step & 1 : segment.has_v;
        unsigned first = (both ? step >> 1 : step) * STEP_ROWS;
        lane = threadIdx.x % LANES;
        #pragma unroll
        for (unsigned v = 0; v < PAIR; v++) {
            unsigned wanted = first + v * (WARP / LANES) + threadIdx.x % WARP / LANES;
            inside[v] = wanted < segment.rows;
            row[v] = inside[v] ? wanted : segment.rows - 1;
        }
    }

    // The lane's part of the first quarter.
    __device__ char* elements(const Segment& segment, unsigned v) const {
        long long offset;
        if (segment.flat) {
            offset = row[v] * segment.inner_stride;
        } else {
            unsigned outer = row[v] / segment.inner;
            offset = outer * segment.outer_stride + (row[v] - outer * segment.inner) * segment.inner_stride;
        }
        unsigned vector_nbytes = segment.has_k && is_value ? VECTOR_NBYTES : 0;
        return segment.base + offset + vector_nbytes + 8 * lane;
    }

    // The vector's first byte of codes.
    __device__ unsigned char* codes(const Segment& segment, unsigned v) const {
        bool both = segment.has_k && segment.has_v;
        unsigned vector = both ? 2 * row[v] + is_value : row[v];
        return segment.codes + vector * CODES_NBYTES;
    }

    __device__ unsigned own_row() const { return is_upper(lane) ? row[1] : row[0]; }

    // One lane does for each vector.
    __device__ bool stores_own() const {
        return lane % (LANES / 2) == 0 && (is_upper(lane) ? inside[1] : inside[0]);
    }
};

__device__ inline void load(Words& words, const Segment& segment, const Place& place) {
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        const char* from = place.elements(segment, v);
        if (segment.access_nbytes >= 8) {
            #pragma unroll
            for (unsigned quarter = 0; quarter < 4; quarter++) {
                uint2 two = __ldcs(reinterpret_cast<const uint2*>(from + quarter * QUARTER_NBYTES));
                words[v][quarter][0] = two.x;
                words[v][quarter][1] = two.y;
            }
            continue;
        }
        #pragma unroll
        for (unsigned quarter = 0; quarter < 4; quarter++) {
            #pragma unroll
            for (unsigned i = 0; i < 2; i++) {
                const char* at = from + quarter * QUARTER_NBYTES + 4 * i;
                if (segment.access_nbytes >= 2) {
                    const unsigned short* halves = reinterpret_cast<const unsigned short*>(at);
                    words[v][quarter][i] = halves[0] | halves[1] << 16;
                } else {
                    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(at);
                    words[v][quarter][i] = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24;
                }
            }
        }
    }
}

__device__ inline void store(const Words& words, const Segment& segment, const Place& place) {
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        if (!place.inside[v]) {
            continue;
        }
        char* to = place.elements(segment, v);
        if (segment.access_nbytes >= 8) {
            #pragma unroll
            for (unsigned quarter = 0; quarter < 4; quarter++) {
                *reinterpret_cast<uint2*>(to + quarter * QUARTER_NBYTES) =
                    make_uint2(words[v][quarter][0], words[v][quarter][1]);
            }
            continue;
        }
        #pragma unroll
        for (unsigned quarter = 0; quarter < 4; quarter++) {
            #pragma unroll
            for (unsigned i = 0; i < 2; i++) {
                char* at = to + quarter * QUARTER_NBYTES + 4 * i;
                unsigned word = words[v][quarter][i];
                if (segment.access_nbytes >= 2) {
                    unsigned short* halves = reinterpret_cast<unsigned short*>(at);
                    halves[0] = word;
                    halves[1] = word >> 16;
                } else {
                    unsigned char* bytes = reinterpret_cast<unsigned char*>(at);
                    bytes[0] = word;
                    bytes[1] = word >> 8;
                    bytes[2] = word >> 16;
                    bytes[3] = word >> 24;
                }
            }
        }
    }
}

__device__ inline void store_codes(const Codes& codes, const Segment& segment, const Place& place) {
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        const unsigned (&q)[4] = codes[v];
        unsigned* to = reinterpret_cast<unsigned*>(place.codes(segment, v)) + place.lane;
#if BITS == 4
        if (place.inside[v]) {
            to[0] = q[0] | q[2] << 4;
            to[LANES] = q[1] | q[3] << 4;
        }
#else
        unsigned low = (q[0] & 0x03030303) | (q[1] & 0x03030303) << 2 | (q[2] & 0x03030303) << 4
                     | (q[3] & 0x03030303) << 6;
        unsigned high = (q[0] & 0x04040404) >> 2 | (q[1] & 0x04040404) >> 1 | (q[2] & 0x04040404)
                      | (q[3] & 0x04040404) << 1;
        high |= __shfl_xor_sync(ALL_LANES, high, LANES / 2) << 4;
        if (place.inside[v]) {
            to[0] = low;
            if (place.lane < LANES / 2) {
                to[LANES] = high;
            }
        }
#endif
    }
}

__device__ inline void load_codes(Codes& codes, const Segment& segment, const Place& place) {
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        unsigned (&q)[4] = codes[v];
        const unsigned* from = reinterpret_cast<const unsigned*>(place.codes(segment, v));
#if BITS == 4
        unsigned a = from[place.lane], b = from[LANES + place.lane];
        q[0] = a & 0x0f0f0f0f;
        q[1] = b & 0x0f0f0f0f;
        q[2] = a >> 4 & 0x0f0f0f0f;
        q[3] = b >> 4 & 0x0f0f0f0f;
#else
        unsigned low = from[place.lane];
        unsigned high = from[LANES + place.lane % (LANES / 2)] >> (place.lane < LANES / 2 ? 0 : 4);
        q[0] = (low & 0x03030303) | (high << 2 & 0x04040404);
        q[1] = (low >> 2 & 0x03030303) | (high << 1 & 0x04040404);
        q[2] = (low >> 4 & 0x03030303) | (high & 0x04040404);
        q[3] = (low >> 6 & 0x03030303) | (high >> 1 & 0x04040404);
#endif
    }
}

// Rounds for h = HEAD_DIM / 2 ... 1: elements i and i + h become their sum and their difference.
__device__ inline void transform(Values& a, unsigned lane) {
    #pragma unroll
    for (unsigned h = 2; h; h >>= 1) {
        #pragma unroll
        for (unsigned v = 0; v < PAIR; v++) {
            #pragma unroll
            for (unsigned n = 0; n < 16; n++) {
                unsigned quarter = n >> 2, i = n & 3;
                if (!(quarter & h)) {
                    float first = a[v][quarter][i], second = a[v][quarter + h][i];
                    a[v][quarter][i] = __fadd_rn(first, second);
                    a[v][quarter + h][i] = __fsub_rn(first, second);
                }
            }
        }
    }
    #pragma unroll
    for (unsigned h = LANES / 2; h; h >>= 1) {
        float sign = lane & h ? -1.0f : 1.0f;
        #pragma unroll
        for (unsigned v = 0; v < PAIR; v++) {
            #pragma unroll
            for (unsigned n = 0; n < 16; n++) {
                float& own = a[v][n >> 2][n & 3];
                float other = __shfl_xor_sync(ALL_LANES, own, h);
                own = __fmaf_rn(own, sign, other);  // the product is exact
            }
        }
    }
    #pragma unroll
    for (unsigned h = 2; h; h >>= 1) {
        #pragma unroll
        for (unsigned v = 0; v < PAIR; v++) {
            #pragma unroll
            for (unsigned n = 0; n < 16; n++) {
                unsigned quarter = n >> 2, i = n & 3;
                if (!(i & h)) {
                    float first = a[v][quarter][i], second = a[v][quarter][i + h];
                    a[v][quarter][i] = __fadd_rn(first, second);
                    a[v][quarter][i + h] = __fsub_rn(first, second);
                }
            }
        }
    }
}

// Sum of squares of the lane's own vector, in halving order.
__device__ inline float sum_of_squares(const Values& a, unsigned lane) {
    float sums[PAIR][4];
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        #pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            float squares[4];
            #pragma unroll
            for (unsigned quarter = 0; quarter < 4; quarter++) {
                squares[quarter] = __fmul_rn(a[v][quarter][i], a[v][quarter][i]);
            }
            sums[v][i] = __fadd_rn(__fadd_rn(squares[0], squares[2]), __fadd_rn(squares[1], squares[3]));
        }
    }
    float own[4];
    #pragma unroll
    for (unsigned i = 0; i < 4; i++) {
        float other = exchanged(sums[0][i], sums[1][i], lane);
        own[i] = __fadd_rn(is_upper(lane) ? sums[1][i] : sums[0][i], other);
    }
    #pragma unroll
    for (unsigned h = LANES / 4; h; h >>= 1) {
        #pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            own[i] = __fadd_rn(own[i], __shfl_xor_sync(ALL_LANES, own[i], h));
        }
    }
    return __fadd_rn(__fadd_rn(own[0], own[2]), __fadd_rn(own[1], own[3]));
}

// For every code above 0, the edge below it with its sign flipped: what a lane gives by shuffle.
__device__ inline float edge_of(unsigned code) {
    constexpr unsigned middle = 1 << (BITS - 1);
    code %= 2 * middle;
    if (code > middle) {
        return -__uint_as_float(EDGES[code - middle - 1]);
    }
    return code == middle || code == 0 ? 0.0f : __uint_as_float(EDGES[middle - code - 1]);
}

__device__ inline float centroid_of(unsigned code) {
    constexpr unsigned middle = 1 << (BITS - 1);
    code %= 2 * middle;
    return code < middle ? -__uint_as_float(CENTROIDS[middle - 1 - code])
                         : __uint_as_float(CENTROIDS[code - middle]);
}

// A number whose lowest bits are a guess of a code, 1 ... LEVELS, and one that is negative if the
// code is one less: gives the code, below bits of no meaning.
__device__ inline unsigned settled(float guess, float distance) {
    return __float_as_uint(guess) + (__float_as_int(distance) >> 31);
}

__device__ inline unsigned four_bytes(const unsigned (&words)[4]) {
    return __byte_perm(__byte_perm(words[0], words[1], 0x0040), __byte_perm(words[2], words[3], 0x0040), 0x5410);
}

// Whether any element of the lane's own vector is NaN or infinite.
__device__ inline bool has_nonfinite(const Values& a, unsigned lane) {
    bool found[PAIR];
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        bool mine = false;
        #pragma unroll
        for (unsigned n = 0; n < 16; n++) {
            mine |= (__float_as_uint(a[v][n >> 2][n & 3]) & 0x7f800000) == 0x7f800000;
        }
        unsigned shift = threadIdx.x % WARP - lane;
        found[v] = __ballot_sync(ALL_LANES, mine) >> shift & ((1u << LANES) - 1);
    }
    return is_upper(lane) ? found[1] : found[0];
}

// Encode two K vectors. Returns faults of the lane's own.
template <bool IS_HALF>
__device__ inline unsigned encode_keys(
    const Words& words, Codes& codes, const Segment& segment, const Place& place,
    const unsigned (&flips)[4][2], float edges
) {
    Values a;
    #pragma unroll
    for (unsigned n = 0; n < 8 * PAIR; n++) {
        unsigned v = n >> 3, quarter = n >> 1 & 3, i = n & 1;
        unsigned word = words[v][quarter][i] ^ flips[quarter][i];
        a[v][quarter][2 * i] = low_of<IS_HALF>(word);
        a[v][quarter][2 * i + 1] = high_of<IS_HALF>(word);
    }
    unsigned norm = f16_of(__fsqrt_rn(sum_of_squares(a, place.lane)));
    unsigned fault = 0;
    // NaN and infinity, and what is too long for FP16, all show in the norm.
    if (__any_sync(ALL_LANES, norm >= INFINITE_F16)) {
        bool nonfinite = has_nonfinite(a, place.lane);
        fault = norm < INFINITE_F16 ? 0 : nonfinite ? NONFINITE : SCALAR_OVERFLOW;
    }
    if (place.stores_own()) {
        segment.scalars()[place.own_row()] = norm;
    }
    float own_inverse = norm ? __frcp_rn(float_of_f16(norm)) : 0.0f;
    transform(a, place.lane);
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        float inverse = of_vector(own_inverse, v);
        float guess_inverse = __fmul_rn(inverse, GUESS / (LEVELS - 1));
        #pragma unroll
        for (unsigned quarter = 0; quarter < 4; quarter++) {
            unsigned found[4];
            #pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                float u = a[v][quarter][i];
                float part = clamped_fma(u, guess_inverse, 0.5f);
                float guess = __fmaf_rn(part, LEVELS - 1, INTEGER + 1);
                float edge = __shfl_sync(ALL_LANES, edges, __float_as_int(guess));
                found[i] = settled(guess, __fadd_rn(__fmul_rn(u, inverse), edge));
            }
            codes[v][quarter] = four_bytes(found);
        }
    }
    return fault;
}

// Encode two V vectors. Returns faults of the lane's own.
template <bool IS_HALF>
__device__ inline unsigned encode_values(
    const Words& words, Codes& codes, const Segment& segment, const Place& place
) {
    unsigned bounds[PAIR];  // the minimum, and above it the maximum with its sign flipped
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        unsigned low = words[v][0][0], high = low;
        #pragma unroll
        for (unsigned n = 1; n < 8; n++) {
            low = least<IS_HALF>(low, words[v][n >> 1][n & 1]);
            high = greatest<IS_HALF>(high, words[v][n >> 1][n & 1]);
        }
        high ^= 0x80008000;
        bounds[v] = least<IS_HALF>(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    }
    unsigned other = exchanged(bounds[0], bounds[1], place.lane);
    unsigned own = least<IS_HALF>(is_upper(place.lane) ? bounds[1] : bounds[0], other);
    #pragma unroll
    for (unsigned h = LANES / 4; h; h >>= 1) {
        own = least<IS_HALF>(own, __shfl_xor_sync(ALL_LANES, own, h));
    }
    float lowest = __fadd_rn(low_of<IS_HALF>(own), 0.0f);
    float range = __fsub_rn(-high_of<IS_HALF>(own), lowest);
    // Division by a constant: a second step makes it correctly rounded, or NaN of infinity.
    constexpr float reciprocal = 1.0f / LEVELS;
    float about = __fmul_rn(range, reciprocal);
    float step = __fmaf_rn(__fmaf_rn(-LEVELS, about, range), reciprocal, about);
    unsigned own_scale = f16_of(step <= SMALLEST_SCALE ? SMALLEST_SCALE : step);
    unsigned own_minimum = f16_of(lowest);
    if (place.stores_own()) {
        unsigned short* scale_at = segment.scales() + place.own_row();
        scale_at[0] = own_scale;
        scale_at[segment.rows] = own_minimum;
    }
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        unsigned scalars = of_vector(own_scale | own_minimum << 16, v);
        float scale = float_of_f16(scalars & 0xffff), minimum = float_of_f16(scalars >> 16);
        float guess_inverse = __fmul_rn(about_reciprocal(scale), 1.0f / (LEVELS - 1));
        #pragma unroll
        for (unsigned quarter = 0; quarter < 4; quarter++) {
            unsigned found[4];
            #pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                unsigned word = words[v][quarter][i >> 1];
                float value = i & 1 ? high_of<IS_HALF>(word) : low_of<IS_HALF>(word);
                float above = __fsub_rn(value, minimum);
                float part = clamped_fma(above, guess_inverse, -0.5f / (LEVELS - 1));
                float guess = __fmaf_rn(part, LEVELS - 1, INTEGER + 1);
                float middle = __fsub_rn(__fsub_rn(guess, INTEGER), 0.5f);
                found[i] = settled(guess, __fmaf_rn(-middle, scale, above));  // of exact sign
            }
            codes[v][quarter] = four_bytes(found);
        }
    }
    if (own_scale < INFINITE_F16 && (own_minimum & 0x7fff) < INFINITE_F16) {
        return 0;
    }
    constexpr unsigned infinite = IS_HALF ? INFINITE_F16 : INFINITE_BF16;
    bool nonfinite = (own & 0x7fff) >= infinite || (own >> 16 & 0x7fff) >= infinite;
    return nonfinite ? NONFINITE : SCALAR_OVERFLOW;
}

// Decode two K vectors. Returns whether the lane's own has a norm that an encoder writes.
template <bool IS_HALF>
__device__ inline bool decode_keys(
    const Codes& codes, unsigned norm, Words& words, const Place& place,
    const float (&signs)[4][4], float centroids
) {
    Values c;
    #pragma unroll
    for (unsigned n = 0; n < 16 * PAIR; n++) {
        unsigned v = n >> 4, quarter = n >> 2 & 3, i = n & 3;
        c[v][quarter][i] = __shfl_sync(ALL_LANES, centroids, codes[v][quarter] >> 8 * i);
    }
    float length = __fsqrt_rn(__fmul_rn(HEAD_DIM, sum_of_squares(c, place.lane)));
    float own_factor = __fdiv_rn(float_of_f16(norm), length);
    transform(c, place.lane);
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        float factor = of_vector(own_factor, v);
        #pragma unroll
        for (unsigned n = 0; n < 8; n++) {
            unsigned quarter = n >> 1, i = 2 * (n & 1);
            float low = __fmul_rn(c[v][quarter][i], factor), high = __fmul_rn(c[v][quarter][i + 1], factor);
            // The products are exact; adding zero turns -0 into 0.
            low = __fmaf_rn(low, signs[quarter][i], 0.0f);
            high = __fmaf_rn(high, signs[quarter][i + 1], 0.0f);
            words[v][quarter][n & 1] = words_of<IS_HALF>(low, high);
        }
    }
    return norm < INFINITE_F16;
}

// Decode two V vectors. Returns whether the lane's own has scalars that an encoder writes.
template <bool IS_HALF>
__device__ inline bool decode_values(
    const Codes& codes, unsigned own_scale, unsigned own_minimum, Words& words
) {
    #pragma unroll
    for (unsigned v = 0; v < PAIR; v++) {
        unsigned scalars = of_vector(own_scale | own_minimum << 16, v);
        float scale = float_of_f16(scalars & 0xffff), minimum = float_of_f16(scalars >> 16);
        #pragma unroll
        for (unsigned quarter = 0; quarter < 4; quarter++) {
            float values[4];
            #pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                // 2^23 + code
                float code = __uint_as_float(__byte_perm(codes[v][quarter], 0x4b000000, 0x7440 + i));
                values[i] = __fmaf_rn(__fsub_rn(code, 8388608.0f), scale, minimum);  // the product is exact
            }
            words[v][quarter][0] = words_of<IS_HALF>(values[0], values[1]);
            words[v][quarter][1] = words_of<IS_HALF>(values[2], values[3]);
        }
    }
    return own_scale - 1 < INFINITE_F16 - 1 && (own_minimum & 0x7fff) < INFINITE_F16;
}

// The lane's part of the signs, as words of elements of which only the sign is set.
__device__ inline void load_signs(unsigned (&flips)[4][2], const unsigned short* signs) {
    const uint2* quarters = reinterpret_cast<const uint2*>(signs) + threadIdx.x % LANES;
    #pragma unroll
    for (unsigned quarter = 0; quarter < 4; quarter++) {
        uint2 two = quarters[quarter * LANES];
        flips[quarter][0] = two.x;
        flips[quarter][1] = two.y;
    }
}

template <bool IS_HALF>
__device__ void encode(
    const Slot* slots, const Task* tasks, const unsigned* order, unsigned first, unsigned count,
    unsigned parts, unsigned* faults, const unsigned short* signs
) {
    unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (warp / parts >= count) {
        return;
    }
    unsigned flips[4][2];
    load_signs(flips, signs);
    float edges = edge_of(threadIdx.x % WARP);
    unsigned index = order[first + warp / parts];
    Segment segment;
    if (!segment.open(slots[tasks[index].slot], tasks[index])) {
        return;
    }
    unsigned fault = 0, steps = segment.steps();
    for (unsigned step = warp % parts; step < steps; step += parts) {
        Place place(segment, step);
        Words words;
        Codes codes;
        load(words, segment, place);
        if (place.is_value) {
            fault |= encode_values<IS_HALF>(words, codes, segment, place);
        } else {
            fault |= encode_keys<IS_HALF>(words, codes, segment, place, flips, edges);
        }
        store_codes(codes, segment, place);
    }
    if (fault) {
        atomicOr(faults + index, fault);
    }
}

template <bool IS_HALF>
__device__ void decode(
    const Slot* slots, const Task* tasks, const unsigned* order, unsigned first, unsigned count,
    unsigned parts, const unsigned* crcs, unsigned* faults, const unsigned short* signs
) {
    unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (warp / parts >= count) {
        return;
    }
    unsigned flips[4][2];
    load_signs(flips, signs);
    float turns[4][4];
    #pragma unroll
    for (unsigned n = 0; n < 8; n++) {
        unsigned word = flips[n >> 1][n & 1];
        turns[n >> 1][2 * (n & 1)] = __uint_as_float(0x3f800000 | word << 16);
        turns[n >> 1][2 * (n & 1) + 1] = __uint_as_float(0x3f800000 | (word & 0xffff0000));
    }
    float centroids = centroid_of(threadIdx.x % WARP);
    unsigned index = order[first + warp / parts];
    Segment segment;
    bool known = segment.open(slots[tasks[index].slot], tasks[index]);
    bool bad = false;
    unsigned unit_end = tasks[index].unit_first + tasks[index].unit_count;
    for (unsigned j = tasks[index].unit_first + threadIdx.x % WARP; j < unit_end; j += WARP) {
        bad |= crcs[j] || (faults[j] & UNDECODABLE);
    }
    if (__any_sync(ALL_LANES, bad)) {
        return;
    }
    bool decodable = known;
    unsigned steps = known ? segment.steps() : 0;
    for (unsigned step = warp % parts; step < steps; step += parts) {
        Place place(segment, step);
        Codes codes;
        Words words;
        load_codes(codes, segment, place);
        if (place.is_value) {
            const unsigned short* scale_at = segment.scales() + place.own_row();
            unsigned scale = scale_at[0], minimum = scale_at[segment.rows];
            decodable &= decode_values<IS_HALF>(codes, scale, minimum, words);
        } else {
            unsigned norm = segment.scalars()[place.own_row()];
            decodable &= decode_keys<IS_HALF>(codes, norm, words, place, turns, centroids);
        }
        store(words, segment, place);
    }
    if (!decodable) {
        atomicOr(faults + index, UNDECODABLE);
    }
}

extern "C" __global__ void __launch_bounds__(256, 3) encode_turboquant_bf16(
    const Slot* slots, const Task* tasks, const unsigned* order, unsigned first, unsigned count,
    unsigned parts, const unsigned*, unsigned* faults, const unsigned short* signs
) {
    encode<false>(slots, tasks, order, first, count, parts, faults, signs);
}

extern "C" __global__ void __launch_bounds__(256, 3) encode_turboquant_f16(
    const Slot* slots, const Task* tasks, const unsigned* order, unsigned first, unsigned count,
    unsigned parts, const unsigned*, unsigned* faults, const unsigned short* signs
) {
    encode<true>(slots, tasks, order, first, count, parts, faults, signs);
}

extern "C" __global__ void __launch_bounds__(256, 3) decode_turboquant_bf16(
    const Slot* slots, const Task* tasks, const unsigned* order, unsigned first, unsigned count,
    unsigned parts, const unsigned* crcs, unsigned* faults, const unsigned short* signs
) {
    decode<false>(slots, tasks, order, first, count, parts, crcs, faults, signs);
}

extern "C" __global__ void __launch_bounds__(256, 3) decode_turboquant_f16(
    const Slot* slots, const Task* tasks, const unsigned* order, unsigned first, unsigned count,
    unsigned parts, const unsigned* crcs, unsigned* faults, const unsigned short* signs
) {
    decode<true>(slots, tasks, order, first, count, parts, crcs, faults, signs);
}
