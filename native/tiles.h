// Products by the tiles of a core, where the instruction set has them.
//
// A tile has an order of sums of its own: it adds up the products of the first and of the second halves of 16 pairs, then
// both to the sum. So a weight that is multiplied by tiles is so for any number of rows, and the steps of 64 bytes of a
// row begin at the same inputs whether a panel is taken in one go or in chunks.
#pragma once

#include "products.h"

namespace {

#ifndef INFLIGHT_TILES
// Tiles that are not there.
struct Tiles {
  static void release() {}
};
#endif

// Weights and rows in bfloat16; `Bytes`: in INT8, whose sums of 32 bits are exact. Both lie by units of four bytes.
template <class Hardware, bool Bytes>
struct TileProducts {
  static constexpr int kTileRows = 16;
  static constexpr int kTileBytes = 64;            // of a row, at a time
  static constexpr int kColumns = kTileBytes / 4;  // of a tile of weights, and of sums
  static constexpr int kStride = kPanel * 4;       // bytes from a unit of a panel to the next
  static_assert(kPanel / kColumns <= Hardware::kSums);
  static_assert(kChunk % kTileBytes == 0, "a step of a row must begin at the same inputs in every chunk");

  template <int R, int P, bool = false>
  static void add(const Operands& in, float* to) {
    const int bytes = round_up(in.inputs * (Bytes ? 1 : 2), 4), whole = bytes / kTileBytes * kTileBytes;
    if (whole > 0) add_steps<R, P>(in, 0, whole, kTileBytes, to);
    if (whole < bytes) add_steps<R, P>(in, whole, bytes, bytes - whole, to);
  }

  // Adds the products of the bytes of rows from `first` to `last`, `step` at a time.
  template <int R, int P>
  static void add_steps(const Operands& in, int first, int last, int step, float* to) {
    Hardware::set(R, step);
    for (int p = 0; p < P; p++, to += kPanel) {
      const char* weights = in.weights + p * in.panel_stride;
      repeat<kPanel / kColumns>([&](auto tile) {
        Hardware::template load<tile.value>(to + tile.value * kColumns, P * kStride);
      });
      for (int at = first; at < last; at += step) {
        Hardware::template load<Hardware::kInputs>(in.rows + at, in.row_stride);
        repeat<kPanel / kColumns>([&](auto tile) {
          constexpr int from = Hardware::kWeights + tile.value % 2;
          Hardware::template load<from>(weights + (ptrdiff_t)at * kPanel + tile.value * kTileBytes, kStride);
          Hardware::template add<Bytes, tile.value, from>();
        });
      }
      repeat<kPanel / kColumns>([&](auto tile) {
        Hardware::template store<tile.value>(to + tile.value * kColumns, P * kStride);
      });
    }
  }
};

template <bool Bytes>
struct AsTiles : AsFloats {
  using Stored = TileProducts<Tiles, Bytes>;
  using Decoded = Stored;
  static constexpr int kFewRows = 16;
};

// By tiles where there are some, else as `Other`.
template <bool Bytes, class Other>
using Tiled = std::conditional_t<Isa::kTiles, AsTiles<Bytes>, Other>;

}  // namespace
