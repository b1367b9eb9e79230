// AVX2 with FMA: eight floats in a vector. It has no products of bfloat16.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Isa {
  static constexpr const char* kName = "avx2";
  static constexpr int kLanes = 8;
  static constexpr int kVectors = 2;  // of a panel
  static constexpr int kRows = 6;     // of a tile: 12 sums, 2 weights, 1 input of 16 registers
  static constexpr bool kDotsBf16 = false;
  static constexpr bool kTiles = false;
  static constexpr int kPanelsOfFewRows = 4;
  static constexpr int kFloatChunk = 128;  // inputs of a panel of floats, which lie in the first cache
  static constexpr int kBlockRows = 96;  // of a block, whose sums stay in the first cache
  // Integers: without instructions for bytes, words are multiplied, by pairs. So inputs keep 16 bits.
  using Input = int16_t;
  static constexpr int kIntegerRows = 4;  // of a tile: each product needs a register before it is added
  static constexpr int kGroup = 64;       // inputs that share a scale
  static constexpr int kUnit = 2;         // that a lane adds up
  static constexpr int kWeightBytes = 2;  // of a weight, as add_products takes it
  static constexpr int kOffset = 0;       // that stored weights have
  static constexpr float kLargestInput = 32767.0f;
  static constexpr bool kSplitsWords = false;
  using F = __m256;
  using I = __m256i;

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  // Where one of them is NaN, the second one is the result.
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a where x >= bound or x is NaN, else zero
  static F keep_from(F x, F bound, F a) { return _mm256_and_ps(_mm256_cmp_ps(x, bound, _CMP_NLT_UQ), a); }
  // x in lanes from `from` to `to`, else y
  static F select(int from, int to, F x, F y) {
    const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    I in = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(from - 1)),
                            _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane));
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(in));
  }
  // x * 2^n for whole n from -126 to 127
  static F scale_by_power(F x, F n) {
    I exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
  }
  static float sum(F x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
  }

  static float largest(F x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
  }

  static F from_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
  }
  static void to_bf16(uint16_t* p, F x) {  // to the nearest, ties to even; NaN stays NaN
    I bits = _mm256_castps_si256(x);
    I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    I rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    I quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    I nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    I words = _mm256_blendv_epi8(rounded, quiet, nan);
    I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
  }
  static F from_int8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  static F from_e4m3(const uint8_t* p) {
    const F value = from_finite_e4m3(p);
    F size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value);
    return _mm256_or_ps(value, _mm256_cmp_ps(size, _mm256_set1_ps(448.0f), _CMP_GT_OQ));  // all ones are NaN
  }
  // Bytes that are no NaN, by way of float16, whose exponents have another bias. Shifted straight into float32, small
  // values would be subnormal, and multiplying those takes Intel's processors a hundred cycles.
  static F from_finite_e4m3(const uint8_t* p) {
    const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16((int16_t)0xbf80))), _mm256_set1_ps(256.0f));
  }
  // The largest power of two that is not above |x|; zero where x is subnormal, infinity where it is not finite.
  static F power_below(F x) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)));
  }
  // Pairs of bfloat16 to the floats of their first and of their second halves.
  static F first_of_pairs(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const I*)p), 16));
  }
  static F second_of_pairs(const uint16_t* p) {  // shifts need no register for a mask
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(_mm256_loadu_si256((const I*)p), 16), 16));
  }
  static void split_pairs(I pairs, F& first, F& second) {
    first = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    second = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int32_t)0xffff0000)));
  }
  static I set_int(int32_t x) { return _mm256_set1_epi32(x); }
  static I load_int(const int32_t* p) { return _mm256_loadu_si256((const I*)p); }
  static void store_int(int32_t* p, I x) { _mm256_storeu_si256((I*)p, x); }
  static I shift_right(I x, int bits) { return _mm256_srli_epi32(x, bits); }
  static I shift_left(I x, int bits) { return _mm256_slli_epi32(x, bits); }
  static I and_int(I a, I b) { return _mm256_and_si256(a, b); }
  // Bytes that are places among the values of E2M1 to twice these values, with kMxfp4Offset. The first of the table is
  // zero, so that the upper bytes of words stay zero.
  static I e2m1(I places) {
    const __m128i values = _mm_setr_epi8(0, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 24);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), places);
  }
  // Bytes that are exponents of two plus 127 to these powers; zero becomes zero, and 255 infinity.
  static F power_of_two(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23));
  }
  static I add_int(I sum, I x) {
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x));  // in place: GCC would copy each sum in each turn of a loop
    return sum;
  }
  static I mul_int(I a, I b) { return _mm256_mullo_epi32(a, b); }
  // Sign-extends bytes to words.
  static I words(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
  // Sign-extends bytes to words: `first` gets the bytes at even places, `second` those at odd places.
  static void split_bytes(I bytes, I& first, I& second) {
    first = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
    second = _mm256_srai_epi16(bytes, 8);
  }
  static I bits(F x) { return _mm256_castps_si256(x); }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static I spread(const void* p) {  // four bytes to all lanes
    int32_t word;
    memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
  }
  // Declared only: bytes are not multiplied.
  static void split_words(const int16_t*, int, int8_t*);
  // Integers as they are stored to what add_products takes.
  static I load_weights(const int8_t* p) { return words(p); }
  static I add_products(I sums, I weights, I inputs) { return add_word_products(sums, weights, inputs); }
  // Adds the products of pairs of words.
  static I add_word_products(I sums, I weights, I inputs) {
    return add_int(sums, _mm256_madd_epi16(weights, inputs));
  }
  // Keeps a vector in a register, where the compiler would read memory again for each use.
  static I kept(I x) {
    asm("" : "+x"(x));
    return x;
  }
  static void to_integers(int16_t* p, F steps) {
    const I words = _mm256_packs_epi32(_mm256_cvtps_epi32(steps), _mm256_setzero_si256());
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08)));
  }
  // What products of bfloat16 take is declared only: there is none of it.
  static F dot_bf16(F, I, I);
  static void interleave(const uint16_t*, const uint16_t*, uint16_t*);

  // Turns the rows of 8 by 8 units of 4 bytes into columns.
  static void transpose(I (&rows)[8]) {
    __m256 r[8], s[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_castsi256_ps(rows[i]);
    for (int i = 0; i < 8; i += 2) {
      s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
      rows[i] = _mm256_castps_si256(_mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
      rows[i + 4] = _mm256_castps_si256(_mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
  }
};

}  // namespace
