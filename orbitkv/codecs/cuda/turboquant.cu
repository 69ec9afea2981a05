// TurboQuant: docs/codecs.md for a GPU, byte for byte what codecs/cpu.py writes and reads.
//
// Compiled for each pair of BITS (4, 3) and HEAD_DIM (32, 64, 128, 256), which are macros. Whether
// segments hold K, V or both follows from the lengths of their rows and payloads: one launch takes
// them all.
//
// HEAD_DIM / 16 lanes hold a vector. It has four quarters, and of each of them a lane holds four
// neighbours: value[quarter][i] is element quarter * HEAD_DIM / 4 + 4 * lane + i. So halving needs
// other lanes only inside a quarter, and elements whose codes share a byte share a lane. A lane
// works on two vectors at once, to have something to do while it waits. What is done once a vector,
// square roots and divisions, the lower half of its lanes do for the first of the two and the upper
// half for the second: their own.
#include "common.cuh"
#include "pages.cuh"

static_assert(BITS == 4 || BITS == 3);
static_assert(HEAD_DIM == 32 || HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256);

constexpr unsigned THREADS = 128, BLOCKS = 5; // of a block and of a multiprocessor: 96 registers
constexpr unsigned LANES = HEAD_DIM / 16;     // of a vector
constexpr unsigned PAIR = 2;
constexpr unsigned STEP_ROWS = PAIR * WARP / LANES;
constexpr unsigned VECTOR_NBYTES = 2 * HEAD_DIM, QUARTER_NBYTES = VECTOR_NBYTES / 4;
constexpr unsigned CODES_NBYTES = HEAD_DIM * BITS / 8;
constexpr unsigned INFINITE_F16 = 0x7c00, INFINITE_BF16 = 0x7f80;
constexpr float MOST_CODE = (1 << BITS) - 1;
constexpr float SMALLEST_SCALE = 5.9604644775390625e-8f; // 2^-24
constexpr float INTEGER = 12582912; // 1.5 * 2^23: added to a small number, it leaves an integer

// As in tables.py, which a test compares: FP32 patterns of the positive halves.
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
// GUESS times an edge, rounded, is the edge's number counted from zero; the outermost may be more.
// So rounding GUESS * z gives the number of an edge next to z, and one comparison settles the code.

using Address = unsigned long long;
// Of two vectors, this lane's elements, the words of two elements that they come in, and codes, one
// a byte.
using Values = float[PAIR][4][4];
using Words = unsigned[PAIR][4][2];
using Codes = unsigned[PAIR][4];

// Instructions. Conversions round to nearest even, with subnormals.

__device__ __forceinline__ float float_of_f16(unsigned word) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)(word)));
    return value;
}

__device__ __forceinline__ unsigned f16_of(float value) {
    unsigned short word;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(word) : "f"(value));
    return word;
}

__device__ __forceinline__ unsigned two_bf16(float low, float high) {
    unsigned words;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words) : "f"(high), "f"(low));
    return words;
}

__device__ __forceinline__ unsigned two_f16(float low, float high) {
    unsigned words;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words) : "f"(high), "f"(low));
    return words;
}

// Of each of two elements. NaN if one is NaN; -0 is less than +0.
template <bool IS_HALF>
__device__ __forceinline__ unsigned least(unsigned a, unsigned b) {
    unsigned words;
    if constexpr (IS_HALF) {
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(words) : "r"(a), "r"(b));
    } else {
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(words) : "r"(a), "r"(b));
    }
    return words;
}

template <bool IS_HALF>
__device__ __forceinline__ unsigned greatest(unsigned a, unsigned b) {
    unsigned words;
    if constexpr (IS_HALF) {
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(words) : "r"(a), "r"(b));
    } else {
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(words) : "r"(a), "r"(b));
    }
    return words;
}

__device__ __forceinline__ float about_reciprocal(float value) {
    float reciprocal;
    asm("rcp.approx.f32 %0, %1;" : "=f"(reciprocal) : "f"(value));
    return reciprocal;
}

// fl(a * b + c), clamped to 0 ... 1.
__device__ __forceinline__ float clamped_fma(float a, float b, float c) {
    float value;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(value) : "f"(a), "f"(b), "f"(c));
    return value;
}

// End of instructions.

template <bool IS_HALF>
__device__ __forceinline__ float low_of(unsigned words) {
    return IS_HALF ? float_of_f16(words) : __uint_as_float(words << 16);
}

template <bool IS_HALF>
__device__ __forceinline__ float high_of(unsigned words) {
    return IS_HALF ? float_of_f16(words >> 16) : __uint_as_float(words & 0xffff0000);
}

// Two elements. Clamping FP16 to its finite range after rounding does what it does before.
template <bool IS_HALF>
__device__ __forceinline__ unsigned words_of(float low, float high) {
    if constexpr (IS_HALF) {
        return greatest<true>(least<true>(two_f16(low, high), 0x7bff7bff), 0xfbfffbff);
    } else {
        return two_bf16(low, high);
    }
}

// One segment: where its rows and the parts of its payload lie.
struct Segment {
    bool known; // whether the payload's length is right, and the rest may be used
    bool has_k, has_v;
    unsigned rows, inner, inner_inverse, access_nbytes;
    Address start, codes;
    long long outer_stride, inner_stride;

    __device__ __forceinline__ Segment(const Slot& slot, const Task& task) {
        start = slot.base + (long long)task.page * slot.page_stride;
        outer_stride = slot.outer_stride;
        inner_stride = slot.inner_stride;
        inner = slot.inner;
        inner_inverse = ~0u / inner;
        access_nbytes = slot.access_nbytes;
        rows = slot.outer * inner;
        codes = task.payload;
        const bool both = slot.row_nbytes == 2 * VECTOR_NBYTES;
        has_k = both || task.stored_nbytes == rows * (CODES_NBYTES + 2);
        has_v = both || !has_k;
        const unsigned payload_row_nbytes =
            (has_k ? CODES_NBYTES + 2 : 0) + (has_v ? CODES_NBYTES + 4 : 0);
        known = task.stored_nbytes == rows * payload_row_nbytes &&
                slot.row_nbytes == (both ? 2 : 1) * VECTOR_NBYTES;
    }

    __device__ __forceinline__ bool both() const {
        return has_k && has_v;
    }

    __device__ __forceinline__ unsigned steps() const {
        return (rows + STEP_ROWS - 1) / STEP_ROWS << both();
    }

    // Of the first row. Its minimum is scales_nbytes() behind its scale.
    __device__ __forceinline__ Address norms() const {
        return codes + (rows * CODES_NBYTES << both());
    }

    __device__ __forceinline__ Address scales() const {
        return norms() + (has_k ? 2 * rows : 0);
    }

    __device__ __forceinline__ unsigned scales_nbytes() const {
        return 2 * rows;
    }
};

// Two vectors of a segment, both K or both V, and this lane's place in them.
struct Step {
    bool is_value;
    bool is_upper;       // the second vector is the lane's own
    unsigned lane;       // of the vector's
    unsigned rows[PAIR]; // the segment's last one instead of any beyond it
    bool inside[PAIR];

    __device__ __forceinline__ Step(const Segment& segment, unsigned number) {
        is_value = segment.both() ? number & 1 : segment.has_v;
        lane = threadIdx.x % LANES;
        is_upper = lane >= LANES / 2;
#pragma unroll
        for (unsigned v = 0; v < PAIR; ++v) {
            const unsigned row = (number >> segment.both()) * STEP_ROWS + v * (WARP / LANES) +
                                 threadIdx.x % WARP / LANES;
            inside[v] = row < segment.rows;
            rows[v] = inside[v] ? row : segment.rows - 1;
        }
    }

    __device__ __forceinline__ unsigned own_row() const {
        return is_upper ? rows[1] : rows[0];
    }

    // Whether this lane is the one that stores its own vector's scalars.
    __device__ __forceinline__ bool stores_scalars() const {
        return lane % (LANES / 2) == 0 && (is_upper ? inside[1] : inside[0]);
    }

    // Of the lane's elements of the first quarter.
    __device__ __forceinline__ Address elements(const Segment& segment, unsigned v) const {
        const unsigned outer = quotient(rows[v], segment.inner, segment.inner_inverse);
        const unsigned inner = rows[v] - outer * segment.inner;
        return segment.start + outer * segment.outer_stride + inner * segment.inner_stride +
               (segment.both() && is_value ? VECTOR_NBYTES : 0) + 8 * lane;
    }

    // Of the vector's codes.
    __device__ __forceinline__ Address codes(const Segment& segment, unsigned v) const {
        const unsigned vector = segment.both() ? 2 * rows[v] + is_value : rows[v];
        return segment.codes + vector * CODES_NBYTES;
    }

    // One of two values by vector: this lane's part of its own vector's, with the other half's
    // part.
    template <typename T>
    __device__ __forceinline__ T own(const T (&values)[PAIR]) const {
        return is_upper ? values[1] : values[0];
    }

    template <typename T>
    __device__ __forceinline__ T exchanged(const T (&values)[PAIR]) const {
        return __shfl_xor_sync(ALL_LANES, is_upper ? values[0] : values[1], LANES / 2);
    }
};

// What the lanes have for vector v as their own.
template <typename T>
__device__ __forceinline__ T of_vector(T own, unsigned v) {
    return __shfl_sync(ALL_LANES, own, v * (LANES / 2), LANES);
}

__device__ __forceinline__ void load(Words& words, const Segment& segment, const Step& step) {
    const Address from[PAIR] = {step.elements(segment, 0), step.elements(segment, 1)};
    if (segment.access_nbytes >= 8) {
#pragma unroll
        for (unsigned n = 0; n < 4 * PAIR; ++n) {
            const unsigned v = n / 4, quarter = n % 4;
            const uint2 two = load_8(from[v] + quarter * QUARTER_NBYTES);
            words[v][quarter][0] = two.x;
            words[v][quarter][1] = two.y;
        }
        return;
    }
#pragma unroll
    for (unsigned n = 0; n < 4 * PAIR; ++n) {
        const unsigned v = n / 4, quarter = n % 4;
        unsigned long long found = 0;
#pragma unroll 1
        for (unsigned i = 0; i < 8; i += segment.access_nbytes) {
            const Address at = from[v] + quarter * QUARTER_NBYTES + i;
            found |= load_word(at, segment.access_nbytes) << (8 * i);
        }
        words[v][quarter][0] = unsigned(found);
        words[v][quarter][1] = unsigned(found >> 32);
    }
}

__device__ __forceinline__ void store(const Words& words, const Segment& segment,
                                      const Step& step) {
#pragma unroll
    for (unsigned v = 0; v < PAIR; ++v) {
        const Address to = step.elements(segment, v);
        if (!step.inside[v]) {
            continue;
        }
        if (segment.access_nbytes >= 8) {
#pragma unroll
            for (unsigned quarter = 0; quarter < 4; ++quarter) {
                const uint2 two = make_uint2(words[v][quarter][0], words[v][quarter][1]);
                store_8(to + quarter * QUARTER_NBYTES, two);
            }
            continue;
        }
#pragma unroll
        for (unsigned quarter = 0; quarter < 4; ++quarter) {
            const unsigned long long found = joined(words[v][quarter][0], words[v][quarter][1]);
#pragma unroll 1
            for (unsigned i = 0; i < 8; i += segment.access_nbytes) {
                const Address at = to + quarter * QUARTER_NBYTES + i;
                store_word(at, segment.access_nbytes, found >> (8 * i));
            }
        }
    }
}

__device__ __forceinline__ void store_codes(const Codes& codes, const Segment& segment,
                                            const Step& step) {
#pragma unroll
    for (unsigned v = 0; v < PAIR; ++v) {
        const unsigned (&q)[4] = codes[v];
        const Address to = step.codes(segment, v) + 4 * step.lane;
#if BITS == 4
        if (step.inside[v]) {
            store_4(to, q[0] | q[2] << 4);
            store_4(to + HEAD_DIM / 4, q[1] | q[3] << 4);
        }
#else
        const unsigned low = (q[0] & 0x03030303) | (q[1] & 0x03030303) << 2 |
                             (q[2] & 0x03030303) << 4 | (q[3] & 0x03030303) << 6;
        const unsigned high = (q[0] & 0x04040404) >> 2 | (q[1] & 0x04040404) >> 1 |
                              (q[2] & 0x04040404) | (q[3] & 0x04040404) << 1;
        const unsigned upper = __shfl_xor_sync(ALL_LANES, high, LANES / 2);
        if (step.inside[v]) {
            store_4(to, low);
            if (!step.is_upper) {
                store_4(to + HEAD_DIM / 4, high | upper << 4);
            }
        }
#endif
    }
}

__device__ __forceinline__ void load_codes(Codes& codes, const Segment& segment, const Step& step) {
#pragma unroll
    for (unsigned v = 0; v < PAIR; ++v) {
        unsigned (&q)[4] = codes[v];
        const Address from = step.codes(segment, v);
        const unsigned low = load_4(from + 4 * step.lane);
#if BITS == 4
        const unsigned high = load_4(from + HEAD_DIM / 4 + 4 * step.lane);
        q[0] = low & 0x0f0f0f0f;
        q[1] = high & 0x0f0f0f0f;
        q[2] = low >> 4 & 0x0f0f0f0f;
        q[3] = high >> 4 & 0x0f0f0f0f;
#else
        const unsigned both = load_4(from + HEAD_DIM / 4 + 4 * (step.lane % (LANES / 2)));
        const unsigned high = step.is_upper ? both >> 4 : both;
        q[0] = (low & 0x03030303) | (high << 2 & 0x04040404);
        q[1] = (low >> 2 & 0x03030303) | (high << 1 & 0x04040404);
        q[2] = (low >> 4 & 0x03030303) | (high & 0x04040404);
        q[3] = (low >> 6 & 0x03030303) | (high >> 1 & 0x04040404);
#endif
    }
}

// Rounds for h = HEAD_DIM / 2, ..., 1: elements i and i + h become their sum and their difference.
__device__ __forceinline__ void transform(Values& a, const Step& step) {
#pragma unroll
    for (unsigned h = 2; h; h /= 2) {
#pragma unroll
        for (unsigned n = 0; n < 16 * PAIR; ++n) {
            const unsigned v = n / 16, quarter = n / 4 % 4, i = n % 4;
            if (!(quarter & h)) {
                const float first = a[v][quarter][i], second = a[v][quarter + h][i];
                a[v][quarter][i] = __fadd_rn(first, second);
                a[v][quarter + h][i] = __fsub_rn(first, second);
            }
        }
    }
#pragma unroll
    for (unsigned h = LANES / 2; h; h /= 2) {
        const float sign = step.lane & h ? -1 : 1;
#pragma unroll
        for (unsigned n = 0; n < 16 * PAIR; ++n) {
            float& value = a[n / 16][n / 4 % 4][n % 4];
            const float other = __shfl_xor_sync(ALL_LANES, value, h);
            value = __fmaf_rn(value, sign, other); // rounds once, as the product is exact
        }
    }
#pragma unroll
    for (unsigned h = 2; h; h /= 2) {
#pragma unroll
        for (unsigned n = 0; n < 16 * PAIR; ++n) {
            const unsigned v = n / 16, quarter = n / 4 % 4, i = n % 4;
            if (!(i & h)) {
                const float first = a[v][quarter][i], second = a[v][quarter][i + h];
                a[v][quarter][i] = __fadd_rn(first, second);
                a[v][quarter][i + h] = __fsub_rn(first, second);
            }
        }
    }
}

__device__ __forceinline__ float sum_of_four(float a, float b, float c, float d) {
    return __fadd_rn(__fadd_rn(a, c), __fadd_rn(b, d));
}

// Sum of the squares of the lane's own vector, in halving order.
__device__ __forceinline__ float sum_of_squares(const Values& a, const Step& step) {
    float sums[4];
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
        float parts[PAIR];
#pragma unroll
        for (unsigned v = 0; v < PAIR; ++v) {
            float squares[4];
#pragma unroll
            for (unsigned quarter = 0; quarter < 4; ++quarter) {
                squares[quarter] = __fmul_rn(a[v][quarter][i], a[v][quarter][i]);
            }
            parts[v] = sum_of_four(squares[0], squares[1], squares[2], squares[3]);
        }
        sums[i] = __fadd_rn(step.own(parts), step.exchanged(parts));
    }
#pragma unroll
    for (unsigned h = LANES / 4; h; h /= 2) {
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
            sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(ALL_LANES, sums[i], h));
        }
    }
    return sum_of_four(sums[0], sums[1], sums[2], sums[3]);
}

// Each lane holds one entry of a table, by the lowest bits of its number: the edge below a code,
// with its sign flipped (for code 0: nothing), or a code's centroid.
__device__ __forceinline__ float edge_of_lane() {
    constexpr unsigned middle = 1 << (BITS - 1);
    const unsigned code = threadIdx.x % (2 * middle);
    if (code == 0 || code == middle) {
        return 0; // added to -0 it gives 0
    }
    return code < middle ? __uint_as_float(EDGES[middle - code - 1])
                         : -__uint_as_float(EDGES[code - middle - 1]);
}

__device__ __forceinline__ float centroid_of_lane() {
    constexpr unsigned middle = 1 << (BITS - 1);
    const unsigned code = threadIdx.x % (2 * middle);
    return code < middle ? -__uint_as_float(CENTROIDS[middle - 1 - code])
                         : __uint_as_float(CENTROIDS[code - middle]);
}

// The lowest byte is a code: INTEGER + guess holds it, unless the distance from the edge below that
// is negative. Then it is one less. Guesses are at least 1.
__device__ __forceinline__ unsigned settled(float guess, float distance) {
    return __float_as_uint(guess) + unsigned(__float_as_int(distance) >> 31);
}

__device__ __forceinline__ unsigned lowest_bytes(const unsigned (&words)[4]) {
    return __byte_perm(__byte_perm(words[0], words[1], 0x0040),
                       __byte_perm(words[2], words[3], 0x0040), 0x5410);
}

// Whether an element of the lane's own vector is NaN or infinite.
__device__ __forceinline__ bool has_nonfinite(const Values& a, const Step& step) {
    const unsigned first_lane = threadIdx.x % WARP - step.lane;
    bool found[PAIR];
#pragma unroll
    for (unsigned v = 0; v < PAIR; ++v) {
        bool here = false;
#pragma unroll
        for (unsigned n = 0; n < 16; ++n) {
            here |= (__float_as_uint(a[v][n / 4][n % 4]) & 0x7f800000) == 0x7f800000;
        }
        found[v] = __ballot_sync(ALL_LANES, here) >> first_lane & ((1u << LANES) - 1);
    }
    return step.own(found);
}

// Encodes two K vectors and stores their norms. Returns faults of the lane's own.
template <bool IS_HALF>
__device__ __forceinline__ unsigned encode_keys(const Words& words, Codes& codes,
                                                const Segment& segment, const Step& step,
                                                const unsigned (&flips)[4][2], float edges) {
    Values a;
#pragma unroll
    for (unsigned n = 0; n < 8 * PAIR; ++n) {
        const unsigned v = n / 8, quarter = n / 2 % 4, i = n % 2;
        const unsigned two = words[v][quarter][i] ^ flips[quarter][i];
        a[v][quarter][2 * i] = low_of<IS_HALF>(two);
        a[v][quarter][2 * i + 1] = high_of<IS_HALF>(two);
    }
    const unsigned own_norm = f16_of(__fsqrt_rn(sum_of_squares(a, step)));
    unsigned fault = 0;
    // Whatever makes a segment raw shows in a norm that is infinite or NaN.
    if (__any_sync(ALL_LANES, own_norm >= INFINITE_F16)) {
        const bool nonfinite = has_nonfinite(a, step);
        fault = own_norm < INFINITE_F16 ? 0 : nonfinite ? NONFINITE : SCALAR_OVERFLOW;
    }
    if (step.stores_scalars()) {
        store_2(segment.norms() + 2 * step.own_row(), own_norm);
    }
    const float own_inverse = own_norm ? __frcp_rn(float_of_f16(own_norm)) : 0;
    transform(a, step);
#pragma unroll
    for (unsigned v = 0; v < PAIR; ++v) {
        const float inverse = of_vector(own_inverse, v);
        const float guessing = __fmul_rn(inverse, GUESS / (MOST_CODE - 1));
#pragma unroll
        for (unsigned quarter = 0; quarter < 4; ++quarter) {
            unsigned found[4];
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) {
                const float u = a[v][quarter][i];
                const float part = clamped_fma(u, guessing, 0.5f); // of the way from 1 to MOST_CODE
                const float guess = __fmaf_rn(part, MOST_CODE - 1, INTEGER + 1);
                const float edge = __shfl_sync(ALL_LANES, edges, __float_as_int(guess));
                found[i] = settled(guess, __fadd_rn(__fmul_rn(u, inverse), edge));
            }
            codes[v][quarter] = lowest_bytes(found);
        }
    }
    return fault;
}

// Encodes two V vectors and stores their scalars. Returns faults of the lane's own.
template <bool IS_HALF>
__device__ __forceinline__ unsigned encode_values(const Words& words, Codes& codes,
                                                  const Segment& segment, const Step& step) {
    unsigned bounds[PAIR]; // the least, and in the upper half the greatest with its sign flipped
#pragma unroll
    for (unsigned v = 0; v < PAIR; ++v) {
        unsigned low = words[v][0][0], high = low;
#pragma unroll
        for (unsigned n = 1; n < 8; ++n) {
            low = least<IS_HALF>(low, words[v][n / 2][n % 2]);
            high = greatest<IS_HALF>(high, words[v][n / 2][n % 2]);
        }
        high ^= 0x80008000;
        bounds[v] = least<IS_HALF>(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    }
    unsigned own = least<IS_HALF>(step.own(bounds), step.exchanged(bounds));
#pragma unroll
    for (unsigned h = LANES / 4; h; h /= 2) {
        own = least<IS_HALF>(own, __shfl_xor_sync(ALL_LANES, own, h));
    }
    const float lowest = __fadd_rn(low_of<IS_HALF>(own), 0);
    const float range = __fsub_rn(-high_of<IS_HALF>(own), lowest);
    // The second step makes it the correctly rounded quotient. Of an infinite range it makes NaN.
    constexpr float reciprocal = 1 / MOST_CODE;
    const float about = __fmul_rn(range, reciprocal);
    const float scale = __fmaf_rn(__fmaf_rn(-MOST_CODE, about, range), reciprocal, about);
    const unsigned own_scale = f16_of(scale <= SMALLEST_SCALE ? SMALLEST_SCALE : scale);
    const unsigned own_minimum = f16_of(lowest);
    if (step.stores_scalars()) {
        const Address scale_at = segment.scales() + 2 * step.own_row();
        store_2(scale_at, own_scale);
        store_2(scale_at + segment.scales_nbytes(), own_minimum);
    }
#pragma unroll
    for (unsigned v = 0; v < PAIR; ++v) {
        const unsigned scalars = of_vector(own_scale | own_minimum << 16, v);
        const float scale = float_of_f16(scalars), minimum = float_of_f16(scalars >> 16);
        const float guessing = __fmul_rn(about_reciprocal(scale), 1 / (MOST_CODE - 1));
#pragma unroll
        for (unsigned quarter = 0; quarter < 4; ++quarter) {
            unsigned found[4];
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) {
                const unsigned two = words[v][quarter][i / 2];
                const float value = i % 2 ? high_of<IS_HALF>(two) : low_of<IS_HALF>(two);
                const float above = __fsub_rn(value, minimum);
                const float part = clamped_fma(above, guessing, -0.5f / (MOST_CODE - 1));
                const float guess = __fmaf_rn(part, MOST_CODE - 1, INTEGER + 1);
                const float edge = __fsub_rn(__fsub_rn(guess, INTEGER), 0.5f); // in scales
                found[i] = settled(guess, __fmaf_rn(-edge, scale, above));     // its sign is exact
            }
            codes[v][quarter] = lowest_bytes(found);
        }
    }
    if (own_scale < INFINITE_F16 && (own_minimum & 0x7fff) < INFINITE_F16) {
        return 0;
    }
    constexpr unsigned infinite = IS_HALF ? INFINITE_F16 : INFINITE_BF16;
    const bool nonfinite = (own & 0x7fff) >= infinite || (own >> 16 & 0x7fff) >= infinite;
    return nonfinite ? NONFINITE : SCALAR_OVERFLOW;
}

// Decodes two K vectors. Returns whether the lane's own has a norm that an encoder writes.
template <bool IS_HALF>
__device__ __forceinline__ bool decode_keys(const Codes& codes, Words& words,
                                            const Segment& segment, const Step& step,
                                            const float (&signs)[4][4], float centroids) {
    const unsigned own_norm = load_2(segment.norms() + 2 * step.own_row());
    Values c;
#pragma unroll
    for (unsigned n = 0; n < 16 * PAIR; ++n) {
        const unsigned v = n / 16, quarter = n / 4 % 4, i = n % 4;
        c[v][quarter][i] = __shfl_sync(ALL_LANES, centroids, int(codes[v][quarter] >> (8 * i)));
    }
    const float length = __fsqrt_rn(__fmul_rn(HEAD_DIM, sum_of_squares(c, step)));
    const float own_factor = __fdiv_rn(float_of_f16(own_norm), length);
    transform(c, step);
#pragma unroll
    for (unsigned v = 0; v < PAIR; ++v) {
        const float factor = of_vector(own_factor, v);
#pragma unroll
        for (unsigned quarter = 0; quarter < 4; ++quarter) {
            float k[4];
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) {
                const float scaled = __fmul_rn(c[v][quarter][i], factor);
                k[i] = __fmaf_rn(scaled, signs[quarter][i], 0); // never -0, and exact
            }
            words[v][quarter][0] = words_of<IS_HALF>(k[0], k[1]);
            words[v][quarter][1] = words_of<IS_HALF>(k[2], k[3]);
        }
    }
    return own_norm < INFINITE_F16;
}

// Decodes two V vectors. Returns whether the lane's own has scalars that an encoder writes.
template <bool IS_HALF>
__device__ __forceinline__ bool decode_values(const Codes& codes, Words& words,
                                              const Segment& segment, const Step& step) {
    const Address scale_at = segment.scales() + 2 * step.own_row();
    const unsigned own_scale = load_2(scale_at);
    const unsigned own_minimum = load_2(scale_at + segment.scales_nbytes());
#pragma unroll
    for (unsigned v = 0; v < PAIR; ++v) {
        const unsigned scalars = of_vector(own_scale | own_minimum << 16, v);
        const float scale = float_of_f16(scalars), minimum = float_of_f16(scalars >> 16);
#pragma unroll
        for (unsigned quarter = 0; quarter < 4; ++quarter) {
            float values[4];
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) {
                // A code as the lowest byte of 2^23 is 2^23 + code.
                const unsigned code = __byte_perm(codes[v][quarter], 0x4b000000, 0x7440 + i);
                const float steps = __fsub_rn(__uint_as_float(code), 8388608);
                values[i] =
                    __fmaf_rn(steps, scale, minimum); // rounds once, as the product is exact
            }
            words[v][quarter][0] = words_of<IS_HALF>(values[0], values[1]);
            words[v][quarter][1] = words_of<IS_HALF>(values[2], values[3]);
        }
    }
    const bool positive = own_scale > 0 && own_scale < INFINITE_F16;
    return positive && (own_minimum & 0x7fff) < INFINITE_F16;
}

// This lane's part of the signs, uint16[HEAD_DIM]: words that flip the signs of two elements.
__device__ __forceinline__ void load_flips(unsigned (&flips)[4][2], Address signs) {
#pragma unroll
    for (unsigned quarter = 0; quarter < 4; ++quarter) {
        const uint2 two = load_8(signs + quarter * QUARTER_NBYTES + 8 * (threadIdx.x % LANES));
        flips[quarter][0] = two.x;
        flips[quarter][1] = two.y;
    }
}

// One warp of `launch.shares` takes every so-manieth step of a task.
struct Work {
    bool any; // whether there is a task for this warp
    unsigned first_step;
    unsigned number; // of the task

    __device__ __forceinline__ explicit Work(const Launch& launch) {
        const unsigned warp = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
        any = warp < launch.count * launch.shares;
        first_step = warp % launch.shares;
        number = launch.first + warp / launch.shares;
        if (any && launch.order) {
            number = launch.order[number];
        }
    }
};

// Encodes segments, and tells what makes them raw. CRCs are left.
template <bool IS_HALF>
__device__ __forceinline__ void encode_segments(const Launch& launch, Address signs) {
    const Work work(launch);
    if (!work.any) {
        return;
    }
    unsigned flips[4][2];
    load_flips(flips, signs);
    const float edges = edge_of_lane();
    const Task task = launch.tasks[work.number];
    const Segment segment(launch.slots[task.slot], task);
    unsigned fault = 0;
    const unsigned steps = segment.known ? segment.steps() : 0;
#pragma unroll 1
    for (unsigned number = work.first_step; number < steps; number += launch.shares) {
        const Step step(segment, number);
        Words words;
        load(words, segment, step);
        Codes codes;
        if (step.is_value) {
            fault |= encode_values<IS_HALF>(words, codes, segment, step);
        } else {
            fault |= encode_keys<IS_HALF>(words, codes, segment, step, flips, edges);
        }
        store_codes(codes, segment, step);
    }
    if (fault) {
        atomicOr(launch.faults + work.number, fault);
    }
}

// Decodes payloads in units without a fault, and tells which ones no encoder writes.
template <bool IS_HALF>
__device__ __forceinline__ void decode_segments(const Launch& launch, Address signs) {
    const Work work(launch);
    if (!work.any) {
        return;
    }
    unsigned flips[4][2];
    load_flips(flips, signs);
    const float centroids = centroid_of_lane();
    const Task task = launch.tasks[work.number];
    const Segment segment(launch.slots[task.slot], task);
    if (!unit_is_good(launch, task)) {
        return;
    }
    float turns[4][4]; // 1 or -1
#pragma unroll
    for (unsigned n = 0; n < 8; ++n) {
        const unsigned two = flips[n / 2][n % 2];
        turns[n / 2][2 * (n % 2)] = __uint_as_float(0x3f800000 | two << 16);
        turns[n / 2][2 * (n % 2) + 1] = __uint_as_float(0x3f800000 | (two & 0xffff0000));
    }
    bool good = segment.known;
    const unsigned steps = segment.known ? segment.steps() : 0;
#pragma unroll 1
    for (unsigned number = work.first_step; number < steps; number += launch.shares) {
        const Step step(segment, number);
        Codes codes;
        load_codes(codes, segment, step);
        Words words;
        if (step.is_value) {
            good &= decode_values<IS_HALF>(codes, words, segment, step);
        } else {
            good &= decode_keys<IS_HALF>(codes, words, segment, step, turns, centroids);
        }
        store(words, segment, step);
    }
    if (!good) {
        atomicOr(launch.faults + work.number, UNDECODABLE);
    }
}

// Args:
//     signs: uint16[HEAD_DIM] of 0 or 0x8000, on a boundary of 8.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    encode_turboquant_bf16(LAUNCH_PARAMETERS, Address signs) {
    encode_segments<false>(LAUNCH, signs);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    encode_turboquant_f16(LAUNCH_PARAMETERS, Address signs) {
    encode_segments<true>(LAUNCH, signs);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    decode_turboquant_bf16(LAUNCH_PARAMETERS, Address signs) {
    decode_segments<false>(LAUNCH, signs);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    decode_turboquant_f16(LAUNCH_PARAMETERS, Address signs) {
    decode_segments<true>(LAUNCH, signs);
}
