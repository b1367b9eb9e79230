// Products of the weights of quantized checkpoints. Few rows are multiplied with weights as they are stored; for many rows
// weights are decoded first, to floats or to what integers are multiplied as. A scale that holds for all inputs of a column
// is applied to the column's sum.
#pragma once

#include "tiles.h"

namespace {

// E4M3, input by input, and rows in float32.
struct E4m3Products {
  static constexpr int kTileRows = kRows;
  template <int R, int P, bool FromMemory = false>
  static void add(const Operands& in, float* to) {
    Sums<R, P> sums;
    load_sums<R, P>(to, sums);
    const char* weights = in.weights;
    for (int k = 0; k < in.inputs; k++, weights += kPanel) {
      if (FromMemory) fetch_ahead<R, P>(weights, in.panel_stride, kPanel);
      FloatProducts::add_input<R, P>(in, k, sums, [&](int panel, int vector) {
        return Isa::from_finite_e4m3((const uint8_t*)weights + panel * in.panel_stride + vector * kLanes);
      });
    }
    store_sums<R, P>(sums, to);
  }
};

struct AsE4m3 : AsFloats {
  using Stored = E4m3Products;
  static constexpr bool kDecodes = true, kSpreadsFetches = true;
  static void decode(const Operands& in, char* to) {
    for (int at = 0; at < in.inputs * kPanel; at += kLanes)
      Isa::store((float*)to + at, Isa::from_finite_e4m3((const uint8_t*)in.weights + at));
  }
};

// The same, where groups of a column's inputs have scales of their own: weights are multiplied by them first.
struct E4m3GroupProducts {
  static constexpr int kTileRows = kRows;
  template <int R, int P, bool FromMemory = false>
  static void add(const Operands& in, float* to) {
    Sums<R, P> sums;
    load_sums<R, P>(to, sums);
    const char* weights = in.weights;
    each_input(in, [&](int k, const float* scales) {
      if (FromMemory) fetch_ahead<R, P>(weights, in.panel_stride, kPanel);
      FloatProducts::add_input<R, P>(in, k, sums, [&](int panel, int vector) {
        return scaled(weights + panel * in.panel_stride, scales + panel * in.scale_stride, vector);
      });
      weights += kPanel;
    });
    store_sums<R, P>(sums, to);
  }

  // Calls `body` with each input and the scales of its group, in the first panel.
  template <class Body>
  static void each_input(const Operands& in, Body body) {
    const float* scales = in.column_scales;
    for (int k = 0, left = in.group - in.phase; k < in.inputs; left = in.group, scales += kPanel)
      for (const int last = std::min(k + left, in.inputs); k < last; k++) body(k, scales);
  }

  static F scaled(const char* weights, const float* scales, int vector) {
    const F weight = Isa::from_finite_e4m3((const uint8_t*)weights + vector * kLanes);
    return Isa::mul(weight, Isa::load(scales + vector * kLanes));
  }
};

struct AsE4m3Groups : AsFloats {
  using Stored = E4m3GroupProducts;
  static constexpr bool kDecodes = true, kSpreadsFetches = true;
  static void decode(const Operands& in, char* to) {
    Stored::each_input(in, [&](int k, const float* scales) {
      for (int v = 0; v < kVectors; v++)
        Isa::store((float*)to + k * kPanel + v * kLanes, Stored::scaled(in.weights + (ptrdiff_t)k * kPanel, scales, v));
    });
  }
};

// INT4: a lane has four pairs of inputs.
struct Nibbles : Words<true> {
  static constexpr int kStep = inflight::kNibbles;
  static constexpr ptrdiff_t bytes(int inputs) { return (ptrdiff_t)kPanel * inputs / 2; }
  static I load(const char* weights, int k, int vector) {
    const I lanes = Isa::load_int((const int32_t*)(weights + bytes(k / kStep * kStep)) + vector * kLanes);
    return Isa::and_int(Isa::shift_right(lanes, k % kStep * 2), Isa::set_int(0x000f000f));
  }
  // What four bits become as bytes.
  static I bytes_of(I nibbles) { return nibbles; }
};

// MXFP4: as INT4, but that four bits are the place of a weight among all values, and scales are powers of two.
struct Mxfp4 : Nibbles {
  static constexpr ptrdiff_t kScaleBytes = 1;
  // Half of it, since weights are twice their values.
  static F scale(const char* scales, int vector) {
    return Isa::mul(Isa::power_of_two((const uint8_t*)scales + vector * kLanes), Isa::set(0.5f));
  }
  static I load(const char* weights, int k, int vector) { return bytes_of(Nibbles::load(weights, k, vector)); }
  static I bytes_of(I nibbles) { return Isa::e2m1(nibbles); }
};

// Weights of four bits. The words of a single row are split into bytes, where bytes are multiplied by fours: a word is 256
// times its upper byte plus its lower one, both with a sign. So weights need not become words, which takes longer than to
// read them; the whole numbers that come out are the same.
template <class Form>
struct NibbleProducts : IntegerProducts<Form> {
  using ByWords = IntegerProducts<Form>;

  template <int R, int P, bool FromMemory = false>
  static void add(const Operands& in, float* to) {
    if constexpr (R == 1 && Isa::kSplitsWords)
      add_split<P>(in, to);
    else
      ByWords::template add<R, P, FromMemory>(in, to);
  }

  template <int P>
  static void add_split(const Operands& in, float* to) {
    const int size = Form::group(in);
    const I mask = Isa::set_int(0x0f0f0f0f);
    const char *scales = in.weights, *rows = in.rows;
    for (int group = 0; group * size < in.inputs; group++) {
      alignas(64) int8_t row[inflight::kLongestGroup * sizeof(int16_t)];
      Isa::split_words((const int16_t*)rows, size, row);
      I lower[P * kVectors], upper[P * kVectors];
      for (int v = 0; v < P * kVectors; v++) {
        lower[v] = Isa::set_int(in.scale(0, group).start);
        upper[v] = Isa::set_int(0);
      }
      const char* weights = scales + ByWords::kHeader;
      for (int k = 0; k < size; k += Form::kStep, weights += Form::bytes(Form::kStep)) {
        const int8_t* bytes = row + k * sizeof(int16_t);
        const I x[] = {Isa::spread(bytes), Isa::spread(bytes + 4), Isa::spread(bytes + 8), Isa::spread(bytes + 12)};
        for (int v = 0; v < P * kVectors; v++) {
          const char* from = weights + v / kVectors * in.panel_stride;
          const I lanes = Isa::load_int((const int32_t*)from + v % kVectors * kLanes);
          const I even = Form::bytes_of(Isa::and_int(lanes, mask));
          const I odd = Form::bytes_of(Isa::and_int(Isa::shift_right(lanes, 4), mask));
          lower[v] = Isa::add_products(lower[v], even, x[0]);
          upper[v] = Isa::add_products(upper[v], even, x[1]);
          lower[v] = Isa::add_products(lower[v], odd, x[2]);
          upper[v] = Isa::add_products(upper[v], odd, x[3]);
        }
      }
      I sums[1][P * kVectors];
      for (int v = 0; v < P * kVectors; v++) sums[0][v] = Isa::add_int(lower[v], Isa::shift_left(upper[v], 8));
      ByWords::template add_group<1, P>(in, scales, group, sums, to);
      scales += ByWords::group_bytes(size);
      rows += size * Form::kInputBytes;
    }
  }
};

// Few rows of weights of four bits, and many.
template <class Form, class DecodedForm>
struct AsNibbles : AsIntegers<Form, DecodedForm> {
  using Stored = NibbleProducts<Form>;
};

// INT8 with inputs in INT8: `to` has sums of 32 bits, which are exact. `Stored` as of IntegerProducts.
template <bool Stored>
struct WholeProducts {
  static constexpr int kTileRows = Isa::kIntegerRows;
  template <int R, int P, bool FromMemory = false>
  static void add(const Operands& in, float* to) {
    I sums[R][P * kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::load_int((int32_t*)to + r * P * kPanel + v * kLanes);
    for (int k = 0; k < in.inputs; k += Isa::kUnit) {
      if (FromMemory)
        fetch_ahead<R, P>(in.weights + Bytes<Stored>::bytes(k), in.panel_stride, Bytes<Stored>::bytes(Isa::kUnit));
      IntegerProducts<Bytes<Stored>>::template add_unit<R, P>(in, in.weights, in.rows, k, sums);
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
    for (int k = 0; k < in.inputs; k += Isa::kUnit)
      for (int v = 0; v < kVectors; v++, to += sizeof(I))
        Isa::store_int((int32_t*)to, Bytes<true>::load(in.weights, k, v));
  }
};

void multiply(const PackedWeight& weight, const InputRows& rows, int count, int first, int last, Ending ending,
              float* outputs, ptrdiff_t stride) {
  const Product product{weight, rows, ending, outputs, stride};
  using Halves = std::conditional_t<Isa::kDotsBf16, AsHalves, AsWidened>;
  using Int8 = AsIntegers<Bytes<true>, Bytes<Isa::kWeightBytes == 1>>;
  using Int8Columns = AsIntegers<Words<true>, Words<false>>;
  using Int4Minimums = AsNibbles<WithMinimums<Nibbles>, WithMinimums<Words<false>>>;
  using Int8Minimums = AsIntegers<WithMinimums<Words<true>>, WithMinimums<Words<false>>>;
  switch (weight.type) {
    case inflight::kFloat32: multiply_as<AsFloats>(product, count, first, last); break;
    case inflight::kBfloat16: multiply_as<Tiled<false, Halves>>(product, count, first, last); break;
    case inflight::kInt8: multiply_as<Int8>(product, count, first, last); break;
    case inflight::kE4m3: multiply_as<AsE4m3>(product, count, first, last); break;
    case inflight::kE4m3Groups: multiply_as<AsE4m3Groups>(product, count, first, last); break;
    case inflight::kInt4: multiply_as<AsNibbles<Nibbles, Words<false>>>(product, count, first, last); break;
    case inflight::kInt8Columns: multiply_as<Int8Columns>(product, count, first, last); break;
    case inflight::kMxfp4: multiply_as<AsNibbles<Mxfp4, Words<false>>>(product, count, first, last); break;
    case inflight::kInt4Minimums: multiply_as<Int4Minimums>(product, count, first, last); break;
    case inflight::kInt8Minimums: multiply_as<Int8Minimums>(product, count, first, last); break;
    case inflight::kInt8Sums: multiply_as<Tiled<true, AsWhole>>(product, count, first, last); break;
  }
  Tiles::release();
}

}  // namespace
