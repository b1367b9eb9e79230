// Products of rows and packed weights, over the vectors of `Isa`.
#pragma once

#include "numbers.h"

namespace {

constexpr int kBlockRows = 96;  // that stay in the second cache

template <int R, int P>
using Sums = F[R][P * kVectors];

// Adds `inputs` products to each sum. `panel` is the distance between panels in units of the weight.
template <int R, int P>
inline void dot_float(const float* rows, ptrdiff_t stride, const float* weight, ptrdiff_t panel, int inputs,
                      Sums<R, P>& sums) {
  for (int k = 0; k < inputs; k++, weight += kPanel) {
    F w[P * kVectors];
    for (int v = 0; v < P * kVectors; v++) w[v] = Isa::load(weight + v / kVectors * panel + v % kVectors * kLanes);
    for (int r = 0; r < R; r++) {
      F x = Isa::set(rows[r * stride + k]);
      for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::fma(w[v], x, sums[r][v]);
    }
  }
}

// The same with weights in bfloat16, by pairs of inputs, and rows in float32.
template <int R, int P>
inline void dot_widened(const float* rows, ptrdiff_t stride, const uint16_t* weight, ptrdiff_t panel, int inputs,
                        Sums<R, P>& sums) {
  for (int k = 0; k < inputs; k += 2, weight += 2 * kPanel) {
    F first[P * kVectors], second[P * kVectors];
    for (int v = 0; v < P * kVectors; v++)
      Isa::split_pairs(weight + v / kVectors * panel + v % kVectors * 2 * kLanes, first[v], second[v]);
    for (int r = 0; r < R; r++) {
      F x = Isa::set(rows[r * stride + k]);
      for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::fma(first[v], x, sums[r][v]);
    }
    for (int r = 0; r < R; r++) {
      F x = Isa::set(rows[r * stride + k + 1]);
      for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::fma(second[v], x, sums[r][v]);
    }
  }
}

// The same with weights and rows in bfloat16.
template <int R, int P>
inline void dot_bf16(const uint16_t* rows, ptrdiff_t stride, const uint16_t* weight, ptrdiff_t panel, int inputs,
                     Sums<R, P>& sums) {
  if constexpr (Isa::kDotsBf16) {
    for (int k = 0; k < inputs; k += 2, weight += 2 * kPanel) {
      I w[P * kVectors];
      for (int v = 0; v < P * kVectors; v++)
        w[v] = Isa::load_int((const int32_t*)(weight + v / kVectors * panel + v % kVectors * 2 * kLanes));
      for (int r = 0; r < R; r++) {
        I x = Isa::spread((const int16_t*)(rows + r * stride + k));
        for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::dot_bf16(sums[r][v], w[v], x);
      }
    }
  }
}

template <int R, int P>
inline void zero(Sums<R, P>& sums) {
  for (int r = 0; r < R; r++)
    for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::zero();
}

// The bytes of one panel.
inline size_t panel_bytes(Type type, int inputs) {
  switch (type) {
    case inflight::kFloat32: return (size_t)inputs * kPanel * 4;
    default: return (size_t)round_up(inputs, 2) * kPanel * 2;
  }
}

// R rows times P panels, and the ending.
template <int R, int P>
void tile(const PackedWeight& weight, const InputRows& rows, int row, int panel, Ending ending, float* outputs,
          ptrdiff_t output_stride) {
  Sums<R, P> sums;
  zero<R, P>(sums);
  const size_t bytes = panel_bytes(weight.type, weight.inputs);
  const char* panels = (const char*)weight.panels + bytes * panel;
  const char* first = (const char*)rows.data + rows.stride * row;
  if (weight.type == inflight::kFloat32) {
    dot_float<R, P>((const float*)first, rows.stride / 4, (const float*)panels, bytes / 4, weight.inputs, sums);
  } else if constexpr (Isa::kDotsBf16) {
    dot_bf16<R, P>((const uint16_t*)first, rows.stride / 2, (const uint16_t*)panels, bytes / 2, weight.inputs, sums);
  } else {
    dot_widened<R, P>((const float*)first, rows.stride / 4, (const uint16_t*)panels, bytes / 2, weight.inputs, sums);
  }
  if (weight.bias)
    for (int v = 0; v < P * kVectors; v++) {
      F bias = Isa::load(weight.bias + panel * kPanel + v * kLanes);
      for (int r = 0; r < R; r++) sums[r][v] = Isa::add(sums[r][v], bias);
    }
  for (int r = 0; r < R; r++) {
    float* out = outputs + (row + r) * output_stride;
    if (ending == inflight::kStore || ending == inflight::kAdd) {
      out += panel * kPanel;
      for (int v = 0; v < P * kVectors; v++, out += kLanes)
        Isa::store(out, ending == inflight::kAdd ? Isa::add(Isa::load(out), sums[r][v]) : sums[r][v]);
    } else {
      out += panel * (kPanel / 2);
      for (int p = 0; p < P; p++)
        for (int v = 0; v < kVectors / 2; v++, out += kLanes) {
          F gate = sums[r][p * kVectors + v], up = sums[r][p * kVectors + kVectors / 2 + v];
          Isa::store(out, Isa::mul(ending == inflight::kSilu ? silu(gate) : gelu(gate), up));
        }
    }
  }
}

// Calls `body` with tiles of rows, as even as can be: with the number of rows as a type, and the first.
template <int N>
struct Count {
  static constexpr int value = N;
};

template <class Body>
inline void for_tiles(int rows, Body body) {
  const int tiles = (rows + kRows - 1) / kRows;
  for (int t = 0, row = 0; t < tiles; t++) {
    const int size = (rows - row + tiles - t - 1) / (tiles - t);
    switch (size) {
      case 1: body(Count<1>(), row); break;
      case 2: body(Count<2>(), row); break;
      case 3: body(Count<3>(), row); break;
      case 4: body(Count<4>(), row); break;
      case 5: body(Count<5>(), row); break;
      case 6: body(Count<6>(), row); break;
    }
    row += size;
  }
}

// Few rows have too few sums to keep the multipliers busy, so they take several panels at once.
void multiply(const PackedWeight& weight, const InputRows& rows, int count, int first, int last, Ending ending,
              float* outputs, ptrdiff_t stride) {
  int panel = first;
  constexpr int many = Isa::kPanelsOfFewRows;
  for (; count <= 2 && panel + many <= last; panel += many) {
    if (count == 1)
      tile<1, many>(weight, rows, 0, panel, ending, outputs, stride);
    else
      tile<2, many>(weight, rows, 0, panel, ending, outputs, stride);
  }
  // Many rows are taken in blocks that stay in the second cache while the panels go by.
  const int blocks = (count + kBlockRows - 1) / kBlockRows;
  for (int block = 0, first_row = 0; block < blocks && panel < last; block++) {
    const int size = (count - first_row + blocks - block - 1) / (blocks - block);
    for (int at = panel; at < last; at++)
      for_tiles(size, [&](auto some, int row) {
        tile<decltype(some)::value, 1>(weight, rows, first_row + row, at, ending, outputs, stride);
      });
    first_row += size;
  }
}

size_t packed_bytes(Type type, int inputs, int columns) { return panel_bytes(type, inputs) * (columns / kPanel); }

void pack(const PackedWeight& to, const void* source, const int32_t* order, int first, int last) {
  const int inputs = to.inputs;
  const size_t bytes = panel_bytes(to.type, inputs);
  for (int panel = first; panel < last; panel++) {
    char* out = (char*)to.panels + bytes * panel;
    memset(out, 0, bytes);
    for (int j = 0; j < kPanel; j++) {
      const int column = order[panel * kPanel + j];
      if (column < 0) continue;
      const size_t row = (size_t)column * inputs;
      for (int k = 0; k < inputs; k++) {
        if (to.type == inflight::kFloat32)
          ((float*)out)[(size_t)k * kPanel + j] = ((const float*)source)[row + k];
        else
          ((uint16_t*)out)[((size_t)k / 2 * kPanel + j) * 2 + k % 2] = ((const uint16_t*)source)[row + k];
      }
    }
  }
}

}  // namespace
