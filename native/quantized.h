// Products of the weights of quantized checkpoints: as they are stored where rows are few, decoded to floats, or to what
// integers are multiplied as, where they are many. Scales of columns come in when a product is finished.
#pragma once

#include "products.h"

namespace {

struct Int8Bytes {
  static F widen(const char* p) { return Isa::from_int8((const int8_t*)p); }
};

struct E4m3Bytes {
  static F widen(const char* p) { return Isa::from_finite_e4m3((const uint8_t*)p); }
};

// Weights of a byte, input by input, and rows in float32.
template <class Bytes>
struct ByteProducts {
  static constexpr int kTileRows = kRows;
  template <int R, int P>
  static void add(const Operands& in, float* to) {
    Sums<R, P> sums;
    load_sums<R, P>(to, sums);
    const float* rows = (const float*)in.rows;
    const char* weights = in.weights;
    for (int k = 0; k < in.inputs; k++, weights += kPanel) {
      F w[P * kVectors];
      for (int v = 0; v < P * kVectors; v++)
        w[v] = Bytes::widen(weights + v / kVectors * in.panel_stride + v % kVectors * kLanes);
      for (int r = 0; r < R; r++) {
        const F x = Isa::set(rows[r * in.row_stride / (int)sizeof(float) + k]);
        for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::fma(w[v], x, sums[r][v]);
      }
    }
    store_sums<R, P>(sums, to);
  }
};

template <class Bytes>
struct AsBytes : AsFloats {
  using Stored = ByteProducts<Bytes>;
  static constexpr bool kDecodes = true;
  static void decode(const Operands& in, char* to) {
    for (int at = 0; at < in.inputs * kPanel; at += kLanes) Isa::store((float*)to + at, Bytes::widen(in.weights + at));
  }
};

// INT4 of a lane, as floats. Masked out, the one at `place` counts 16^place; so inputs are divided by that.
inline F nibbles(const char* lanes, int place) {
  static constexpr float kOffsets[] = {0x1p3f, 0x1p7f, 0x1p11f, 0x1p15f, 0x1p19f, 0x1p23f, 0x1p27f, 0.0f};
  const I all = Isa::load_int((const int32_t*)lanes), mask = Isa::set_int((int32_t)(15u << 4 * place));
  return Isa::sub(Isa::to_float(Isa::and_int(all, mask)), Isa::set(kOffsets[place]));
}

// Weights by groups of inputs, whose sums are multiplied by the group's scales. `Stored`: INT4; else floats.
template <bool Stored>
struct GroupedProducts {
  static constexpr int kTileRows = kRows;
  template <int R, int P>
  static void add(const Operands& in, float* to) {
    const ptrdiff_t bytes = Stored ? nibble_group_bytes(in.group) : decoded_bytes(in.group);
    const char* weights = in.weights;
    for (int first = 0; first < in.inputs; first += in.group, weights += bytes) {
      Sums<R, P> sums;
      for (int r = 0; r < R; r++)
        for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::zero();
      add_group<R, P>(in, first, weights + kPanel * sizeof(float), sums);
      for (int v = 0; v < P * kVectors; v++) {
        const F scale = Isa::load((const float*)(weights + v / kVectors * in.panel_stride) + v % kVectors * kLanes);
        for (int r = 0; r < R; r++) {
          float* sum = to + r * P * kPanel + v * kLanes;
          Isa::store(sum, Isa::fma(sums[r][v], scale, Isa::load(sum)));
        }
      }
    }
  }

  static constexpr ptrdiff_t decoded_bytes(int group) { return (1 + group) * kPanel * (ptrdiff_t)sizeof(float); }

 private:
  template <int R, int P>
  static void add_group(const Operands& in, int first, const char* weights, Sums<R, P>& sums) {
    constexpr int places = inflight::kNibbles, lane = Stored ? (int)sizeof(uint32_t) : places * (int)sizeof(float);
    const float* rows = (const float*)in.rows + first;
    for (int k = 0; k < in.group; k += places, weights += kPanel * lane)
      for (int place = 0; place < places; place++) {
        F w[P * kVectors];
        for (int v = 0; v < P * kVectors; v++)
          w[v] = load(weights + v / kVectors * in.panel_stride, place, v % kVectors * kLanes);
        for (int r = 0; r < R; r++) {
          const F x = Isa::set(rows[r * in.row_stride / (int)sizeof(float) + k + place]);
          for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::fma(w[v], x, sums[r][v]);
        }
      }
  }

  static F load(const char* weights, int place, int column) {
    if constexpr (Stored)
      return nibbles(weights + column * sizeof(uint32_t), place);
    else
      return Isa::load((const float*)weights + place * kPanel + column);
  }
};

struct AsNibbles : AsFloats {
  using Stored = GroupedProducts<true>;
  using Decoded = GroupedProducts<false>;
  static constexpr bool kDecodes = true;
  static void decode(const Operands& in, char* to) {
    const char* from = in.weights;
    for (int first = 0; first < in.inputs; first += in.group, from += nibble_group_bytes(in.group)) {
      memcpy(to, from, kPanel * sizeof(float));
      float* out = (float*)to + kPanel;
      for (int k = 0; k < in.group; k++, out += kPanel) {
        const char* lanes = from + kPanel * sizeof(float) * (1 + k / inflight::kNibbles);
        for (int v = 0; v < kVectors; v++)
          Isa::store(out + v * kLanes, nibbles(lanes + v * kLanes * sizeof(float), k % inflight::kNibbles));
      }
      to += Decoded::decoded_bytes(in.group);
    }
  }
};

// INT8 with inputs in INT8: `to` has sums of 32 bits, which are exact. `Stored` as of IntegerProducts.
template <bool Stored>
struct WholeProducts {
  static constexpr int kTileRows = Isa::kIntegerRows;
  template <int R, int P>
  static void add(const Operands& in, float* to) {
    constexpr int bytes = Stored ? 1 : Isa::kWeightBytes;
    I sums[R][P * kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::load_int((int32_t*)to + r * P * kPanel + v * kLanes);
    const char* weights = in.weights;
    for (int k = 0; k < in.inputs; k += Isa::kUnit, weights += kPanel * Isa::kUnit * bytes) {
      I w[P * kVectors];
      for (int v = 0; v < P * kVectors; v++) {
        const char* from = weights + v / kVectors * in.panel_stride + v % kVectors * kLanes * Isa::kUnit * bytes;
        w[v] = Isa::kept(Stored ? Isa::load_weights((const int8_t*)from) : Isa::load_int((const int32_t*)from));
      }
      for (int r = 0; r < R; r++) {
        const I x = Isa::spread(in.rows + r * in.row_stride + k * sizeof(Isa::Input));
        for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::add_products(sums[r][v], w[v], x);
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < P * kVectors; v++) Isa::store_int((int32_t*)to + r * P * kPanel + v * kLanes, sums[r][v]);
  }
};

struct AsWhole : AsFloats {
  using Stored = WholeProducts<true>;
  using Decoded = WholeProducts<Isa::kWeightBytes == 1>;
  static constexpr bool kDecodes = Isa::kWeightBytes != 1;
  static void decode(const Operands& in, char* to) {
    constexpr int step = kLanes * Isa::kUnit;
    for (int at = 0; at < round_up(in.inputs, Isa::kUnit) * kPanel; at += step, to += step * Isa::kWeightBytes)
      Isa::store_int((int32_t*)to, Isa::load_weights((const int8_t*)in.weights + at));
  }
};

void multiply(const PackedWeight& weight, const InputRows& rows, int count, int first, int last, Ending ending,
              float* outputs, ptrdiff_t stride) {
  const Product product{weight, rows, ending, outputs, stride};
  switch (weight.type) {
    case inflight::kFloat32: return multiply_as<AsFloats>(product, count, first, last);
    case inflight::kInt8: return multiply_as<AsIntegers>(product, count, first, last);
    case inflight::kE4m3: return multiply_as<AsBytes<E4m3Bytes>>(product, count, first, last);
    case inflight::kInt4: return multiply_as<AsNibbles>(product, count, first, last);
    case inflight::kInt8Columns: return multiply_as<AsBytes<Int8Bytes>>(product, count, first, last);
    case inflight::kInt8Sums: return multiply_as<AsWhole>(product, count, first, last);
    default:
      if constexpr (Isa::kDotsBf16)
        return multiply_as<AsHalves>(product, count, first, last);
      else
        return multiply_as<AsWidened>(product, count, first, last);
  }
}

}  // namespace
