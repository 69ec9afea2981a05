// E4M3FN from and to 16-bit words, FP16 or bfloat16: docs/codecs.md says what is computed.
//
// Words and codes come as memory holds them, several in a register. Codes are right where every
// magnitude is at most 448; Most tells whether that is so.
#pragma once
#include "common.cuh"

template <bool IS_HALF>
struct Fp8 {
    static constexpr unsigned MOST = IS_HALF ? 0x5f00 : 0x43e0; // 448
    static constexpr unsigned INFINITE = IS_HALF ? 0x7c00 : 0x7f80;
    static constexpr unsigned QUIET_NAN = IS_HALF ? 0x7e00 : 0x7fc0;
    static constexpr unsigned MANTISSA_BITS = IS_HALF ? 10 : 7;
    static constexpr unsigned REBIAS = IS_HALF ? 8 : 120; // exponent of a word over that of a code
};

// The code of one word, in integer arithmetic.
template <bool IS_HALF>
__device__ __forceinline__ unsigned code_of(unsigned word) {
    using F = Fp8<IS_HALF>;
    constexpr unsigned ONE = 1u << F::MANTISSA_BITS; // the significand's first bit
    const unsigned magnitude = word & 0x7fff;
    const unsigned exponent = magnitude >> F::MANTISSA_BITS;
    unsigned lost = F::MANTISSA_BITS - 3, wide = magnitude - F::REBIAS * ONE;
    if (exponent <= F::REBIAS) { // below 2^-6, where codes are multiples of 2^-9
        lost = min(lost + F::REBIAS + 1 - exponent, 31u);
        wide = magnitude % ONE | ONE;
    }
    const unsigned odd = wide >> lost & 1;
    return (wide + (1u << (lost - 1)) - 1 + odd) >> lost | (word >> 8 & 0x80);
}

// The codes of four words.
template <bool IS_HALF>
__device__ __forceinline__ unsigned codes_of(unsigned first, unsigned second) {
    unsigned codes;
#if __CUDA_ARCH__ >= 890
    if (IS_HALF) {
        asm("{\n\t.reg .b16 low, high;\n\t"
            "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n\t"
            "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n\t"
            "mov.b32 %0, {low, high};\n\t}"
            : "=r"(codes)
            : "r"(first), "r"(second));
    } else {
        asm("{\n\t.reg .b16 low, high;\n\t"
            "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
            "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
            "mov.b32 %0, {low, high};\n\t}"
            : "=r"(codes)
            : "r"(first << 16), "r"(first & 0xffff0000), "r"(second << 16),
              "r"(second & 0xffff0000));
    }
#else
    codes = code_of<IS_HALF>(first & 0xffff) | code_of<IS_HALF>(first >> 16) << 8 |
            code_of<IS_HALF>(second & 0xffff) << 16 | code_of<IS_HALF>(second >> 16) << 24;
#endif
    return codes;
}

// The larger magnitude of each of two pairs of words, a NaN being larger than all.
template <bool IS_HALF>
__device__ __forceinline__ unsigned most_of(unsigned most, unsigned words) {
    if (IS_HALF) {
        asm("{\n\t.reg .b32 magnitudes;\n\tabs.f16x2 magnitudes, %1;\n\t"
            "max.NaN.f16x2 %0, %0, magnitudes;\n\t}"
            : "+r"(most)
            : "r"(words));
    } else {
        asm("{\n\t.reg .b32 magnitudes;\n\tabs.bf16x2 magnitudes, %1;\n\t"
            "max.NaN.bf16x2 %0, %0, magnitudes;\n\t}"
            : "+r"(most)
            : "r"(words));
    }
    return most;
}

// The fault of a segment that holds this magnitude, or zero.
template <bool IS_HALF>
__device__ __forceinline__ unsigned fault_of(unsigned magnitude) {
    using F = Fp8<IS_HALF>;
    return magnitude >= F::INFINITE ? NONFINITE : magnitude > F::MOST ? OUT_OF_RANGE : 0;
}

// Two words times 2^REBIAS: exact, also from a subnormal word.
template <bool IS_HALF>
__device__ __forceinline__ unsigned rebiased(unsigned words) {
    unsigned product;
    if (IS_HALF) {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(words), "r"(0x5c005c00));
    } else {
#if __CUDA_ARCH__ >= 900
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(words), "r"(0x7b807b80));
#else // minus zero, which changes no product
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(product)
            : "r"(words), "r"(0x7b807b80), "r"(0x80008000));
#endif
    }
    return product;
}

// Two words, of the codes in the upper bytes of each half. A NaN code becomes 480.
template <bool IS_HALF>
__device__ __forceinline__ unsigned words_of(unsigned codes) {
    // As if the code's exponent and mantissa were the word's: too small by 2^REBIAS.
    const unsigned magnitudes = (codes & 0x7f007f00) >> (11 - Fp8<IS_HALF>::MANTISSA_BITS);
    return rebiased<IS_HALF>(magnitudes) | (codes & 0x80008000);
}
