// AVX-512: sixteen floats in a vector. Compiled without more; with products of bytes and of words
// (AVX512_VNNI); with those of bfloat16 beside them (AVX512_BF16, whose processors all have VNNI); and with the tiles of
// AMX beside both.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Isa {
#ifdef INFLIGHT_TILES
  static constexpr const char* kName = "amx";
#elif defined(__AVX512BF16__)
  static constexpr const char* kName = "avx512_bf16";
#elif defined(__AVX512VNNI__)
  static constexpr const char* kName = "avx512_vnni";
#else
  static constexpr const char* kName = "avx512";
#endif
#ifdef __AVX512BF16__
  static constexpr bool kDotsBf16 = true;
#else
  static constexpr bool kDotsBf16 = false;
#endif
#ifdef INFLIGHT_TILES
  static constexpr bool kTiles = true;
#else
  static constexpr bool kTiles = false;
#endif
  static constexpr int kLanes = 16;
  static constexpr int kVectors = 4;  // of a panel
  static constexpr int kRows = 6;     // of a tile: 24 sums, 4 weights, 1 input of 32 registers
  static constexpr int kPanelsOfFewRows = 2;
  static constexpr int kIntegerRows = 6;
  static constexpr int kFloatChunk = 32;  // inputs of a panel of floats: 128, 32 KiB, would fill the first cache
  static constexpr int kBlockRows = 48;  // of a block, whose sums stay in the first cache
#ifdef __AVX512VNNI__
  // Integers: bytes are multiplied by fours. The instruction takes weights without a sign, so they have an offset.
  using Input = int8_t;
  static constexpr int kGroup = 32;       // inputs that share a scale
  static constexpr int kUnit = 4;         // that a lane adds up
  static constexpr int kWeightBytes = 1;  // of a weight, as add_products takes it
  static constexpr int kOffset = 128;     // that stored weights have
  static constexpr float kLargestInput = 127.0f;
  static constexpr bool kSplitsWords = true;
#else
  // Without such instructions words are multiplied, by pairs. So inputs keep 16 bits.
  using Input = int16_t;
  static constexpr int kGroup = 64;
  static constexpr int kUnit = 2;
  static constexpr int kWeightBytes = 2;
  static constexpr int kOffset = 0;
  static constexpr float kLargestInput = 32767.0f;
  static constexpr bool kSplitsWords = false;
#endif
  using F = __m512;
  using I = __m512i;

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // Where one of them is NaN, the second one is the result.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a where x >= bound or x is NaN, else zero
  static F keep_from(F x, F bound, F a) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), a); }
  // x in lanes from `from` to `to`, else y
  static F select(int from, int to, F x, F y) {
    from = from < 0 ? 0 : from > 16 ? 16 : from;
    to = to < from ? from : to > 16 ? 16 : to;
    return _mm512_mask_mov_ps(y, (__mmask16)(((1u << to) - 1) & ~((1u << from) - 1)), x);
  }
  static F scale_by_power(F x, F n) { return _mm512_scalef_ps(x, n); }
  static float sum(F x) { return _mm512_reduce_add_ps(x); }
  static float largest(F x) { return _mm512_reduce_max_ps(x); }

  static F from_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
  }
  static void to_bf16(uint16_t* p, F x) {  // to the nearest, ties to even; NaN stays NaN
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    I bits = _mm512_castps_si512(x);
    I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    I words = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    I quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    words = _mm512_mask_mov_epi32(words, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(words));
#endif
  }
  static F from_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  static F from_e4m3(const uint8_t* p) {
    const F value = from_finite_e4m3(p);
    const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_abs_ps(value), _mm512_set1_ps(448.0f), _CMP_GT_OQ);
    return _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(__builtin_nanf("")));
  }
  // Bytes that are no NaN, by way of float16, whose exponents have another bias. Shifted straight into float32, small
  // values would be subnormal, and multiplying those takes Intel's processors a hundred cycles.
  static F from_finite_e4m3(const uint8_t* p) {
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16((int16_t)0xbf80));
    return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
  }
  // The largest power of two that is not above |x|; zero where x is subnormal, infinity where it is not finite.
  static F power_below(F x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7f800000)));
  }
  // Pairs of bfloat16 to the floats of their first and of their second halves.
  static F first_of_pairs(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
  }
  static F second_of_pairs(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_srli_epi32(_mm512_loadu_si512(p), 16), 16));
  }
  static void split_pairs(I pairs, F& first, F& second) {
    first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int32_t)0xffff0000)));
  }
  static I set_int(int32_t x) { return _mm512_set1_epi32(x); }
  static I load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store_int(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
  static I shift_right(I x, int bits) { return _mm512_srli_epi32(x, bits); }
  static I shift_left(I x, int bits) { return _mm512_slli_epi32(x, bits); }
  static I and_int(I a, I b) { return _mm512_and_si512(a, b); }
  // Bytes that are places among the values of E2M1 to twice these values, with kMxfp4Offset. The first of the table is
  // zero, so that the upper bytes of words stay zero.
  static I e2m1(I places) {
    const __m128i values = _mm_setr_epi8(0, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 24);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), places);
  }
  // Bytes that are exponents of two plus 127 to these powers; zero becomes zero, and 255 infinity.
  static F power_of_two(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23));
  }
  static I add_int(I sum, I x) {
    asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(x));  // in place: GCC would copy each sum in each turn of a loop
    return sum;
  }
  static I mul_int(I a, I b) { return _mm512_mullo_epi32(a, b); }
  // Sign-extends bytes to words.
  static I words(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  // Sign-extends bytes to words: `first` gets the bytes at even places, `second` those at odd places.
  static void split_bytes(I bytes, I& first, I& second) {
    first = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8);
    second = _mm512_srai_epi16(bytes, 8);
  }
  static I bits(F x) { return _mm512_castps_si512(x); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static I spread(const void* p) {  // four bytes to all lanes
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
  }
#ifdef __AVX512VNNI__
  // Integers as they are stored to what add_products takes.
  static I load_weights(const int8_t* p) { return _mm512_loadu_si512(p); }
  static I add_products(I sums, I weights, I inputs) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(inputs));  // in place, as in add_int
    return sums;
  }
  // Adds the products of pairs of words.
  static I add_word_products(I sums, I weights, I inputs) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(inputs));  // in place, as in add_int
    return sums;
  }
  // Splits words of at most kLargestWord into bytes with a sign, word = 256 * upper + lower. Of eight inputs there are the
  // lower and the upper bytes of 0, 4, 1 and 5, and those of 2, 6, 3 and 7: the order of the four bits of a lane.
  static void split_words(const int16_t* words, int count, int8_t* to) {
    const __m128i order = _mm_setr_epi8(0, 8, 2, 10, 1, 9, 3, 11, 4, 12, 6, 14, 5, 13, 7, 15);
    for (int k = 0; k < count; k += 8, to += 16) {
      // The upper byte of the sum is rounded to the nearest; its lower one has 128 too many.
      const __m128i sums = _mm_add_epi16(_mm_loadu_si128((const __m128i*)(words + k)), _mm_set1_epi16(128));
      const __m128i bytes = _mm_xor_si128(sums, _mm_set1_epi16(128));
      _mm_store_si128((__m128i*)to, _mm_shuffle_epi8(bytes, order));
    }
  }
#else
  // Declared only: bytes are not multiplied.
  static void split_words(const int16_t*, int, int8_t*);
  static I load_weights(const int8_t* p) { return words(p); }
  static I add_products(I sums, I weights, I inputs) { return add_word_products(sums, weights, inputs); }
  // Adds the products of pairs of words.
  static I add_word_products(I sums, I weights, I inputs) {
    return add_int(sums, _mm512_madd_epi16(weights, inputs));
  }
#endif
  static void to_integers(int8_t* p, F steps) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(steps)));
  }
  static void to_integers(int16_t* p, F steps) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(steps)));
  }
  // Keeps a vector in a register, where the compiler would read memory again for each use.
  static I kept(I x) {
    asm("" : "+v"(x));
    return x;
  }
#ifdef __AVX512BF16__
  static F dot_bf16(F sums, I weights, I inputs) { return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)inputs); }
  // Two rows of a panel's columns, element by element.
  static void interleave(const uint16_t* one, const uint16_t* other, uint16_t* to) {
    alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const I low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int k = 0; k < kLanes * kVectors; k += 32) {
      const I a = _mm512_loadu_si512(one + k), b = _mm512_loadu_si512(other + k);
      _mm512_storeu_si512(to + 2 * k, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(to + 2 * k + 32, _mm512_permutex2var_epi16(a, high, b));
    }
  }
#else
  // Declared only: there are no products of bfloat16.
  static F dot_bf16(F, I, I);
  static void interleave(const uint16_t*, const uint16_t*, uint16_t*);
#endif

  // Turns the rows of 16 by 16 units of 4 bytes into columns.
  static void transpose(I (&rows)[16]) {
    I r[16], s[16];
    for (int i = 0; i < 16; i += 2) {
      s[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
      s[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // r[i + c]: rows i to i + 3 of column 4 * lane + c
      r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
      const I a = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x88), b = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xdd);
      const I d = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x88), e = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xdd);
      rows[c] = _mm512_shuffle_i32x4(a, d, 0x88);
      rows[c + 4] = _mm512_shuffle_i32x4(b, e, 0x88);
      rows[c + 8] = _mm512_shuffle_i32x4(a, d, 0xdd);
      rows[c + 12] = _mm512_shuffle_i32x4(b, e, 0xdd);
    }
  }
};

}  // namespace
