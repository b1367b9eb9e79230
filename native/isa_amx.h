// AMX: the vectors of AVX-512 with products of bfloat16 and of bytes, and tiles beside them.
#pragma once

#define INFLIGHT_TILES  // the compilers' own macros have different names
#include <stddef.h>

#include "isa_avx512.h"

namespace {

// The tiles of a core: up to 16 rows of up to 64 bytes. The numbers of tiles are parts of the instructions, so they are
// template arguments.
struct Tiles {
  static constexpr int kSums = 4;     // tiles 0 to 3 have sums
  static constexpr int kInputs = 4;   // this tile has rows of inputs
  static constexpr int kWeights = 5;  // this tile and the next have weights, in turns

  // Sets the sizes for `rows` rows of inputs, of which `bytes` are multiplied at a time.
  static void set(int rows, int bytes) {
    struct Sizes {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } sizes;
    static_assert(sizeof(Sizes) == 64 && offsetof(Sizes, bytes) == 16 && offsetof(Sizes, rows) == 48);
    for (int tile = 0; tile < kInputs; tile++) {
      sizes.rows[tile] = (uint8_t)rows;
      sizes.bytes[tile] = 64;
    }
    sizes.rows[kInputs] = (uint8_t)rows;
    sizes.bytes[kInputs] = (uint16_t)bytes;
    for (int tile = kWeights; tile < kWeights + 2; tile++) {
      sizes.rows[tile] = (uint8_t)(bytes / 4);
      sizes.bytes[tile] = 64;
    }
    asm volatile("ldtilecfg %0" ::"m"(sizes));
  }
  // Gives the tiles back, so that the system need not save them with the thread.
  static void release() { asm volatile("tilerelease"); }

  template <int tile>
  static void load(const void* from, ptrdiff_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
  }
  template <int tile>
  static void store(void* to, ptrdiff_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
  }
  // sums += inputs * weights: bfloat16 by pairs (TDPBF16PS), or bytes by fours, of which the weights have no sign
  // (TDPBSUD).
  template <bool bytes, int sums, int weights>
  static void add() {
    if constexpr (bytes)
      asm volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(weights), "i"(kInputs), "i"(sums));
    else
      asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(weights), "i"(kInputs), "i"(sums));
  }
};

}  // namespace
