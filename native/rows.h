// What is done to single rows between products: norms, rotations, and the types that products take.
#pragma once

#include <cmath>

#include "weights.h"

namespace {

// 1 / the root of the mean of squares of a row, whose tail up to a whole vector is zero.
inline float inverse_rms(const float* row, float eps, int size) {
  F squares = Isa::zero();
  for (int k = 0; k < size; k += kLanes) {
    F x = Isa::load(row + k);
    squares = Isa::fma(x, x, squares);
  }
  return 1.0f / std::sqrt(Isa::sum(squares) / size + eps);
}

// Rounds a row to integers by groups, to the nearest multiple of the largest's part. A group with NaN or infinity has
// NaN as its scale. `input(k)` is a vector of the row, which is padded with zeros to whole groups.
template <class Input>
inline void round_to_integers(Input input, int size, Isa::Input* to, GroupScale* scales) {
  constexpr int vectors = Isa::kGroup / kLanes;
  for (int first = 0; first < size; first += Isa::kGroup, to += Isa::kGroup, scales++) {
    F group[vectors], largest = Isa::zero(), nothing = Isa::zero();
    for (int v = 0; v < vectors; v++) {
      group[v] = input(first + v * kLanes);
      largest = Isa::max(largest, Isa::max(group[v], Isa::sub(Isa::zero(), group[v])));
      nothing = Isa::fma(group[v], Isa::zero(), nothing);
    }
    const float most = Isa::largest(largest);
    const F by = Isa::set(most > 0.0f ? Isa::kLargestInput / most : 0.0f);
    for (int v = 0; v < vectors; v++) Isa::to_inputs(to + v * kLanes, Isa::mul(group[v], by));
    int32_t sum = 0;
    if (Isa::kOffset)
      for (int k = 0; k < Isa::kGroup; k++) sum += to[k];
    *scales = {most / Isa::kLargestInput + Isa::sum(nothing), -Isa::kOffset * sum};
  }
}

void prepare(const PackedWeight& weight, const float* row, const float* gain, float eps, const InputRows& to,
             int index) {
  const int size = weight.inputs;
  char* out = (char*)to.data + to.stride * index;
  const F inverse = Isa::set(gain ? inverse_rms(row, eps, size) : 1.0f);
  auto input = [&](int k) {
    F x = Isa::load(row + k);
    return gain ? Isa::mul(Isa::mul(x, inverse), Isa::load(gain + k)) : x;
  };
  if (weight.type == inflight::kInt8) {
    round_to_integers(input, size, (Isa::Input*)out, (GroupScale*)(out + scales_offset(size)));
  } else if (weight.type == inflight::kBfloat16 && Isa::kDotsBf16) {
    for (int k = 0; k < size; k += kLanes) Isa::to_bf16((uint16_t*)out + k, input(k));
  } else {
    for (int k = 0; k < size; k += kLanes) Isa::store((float*)out + k, input(k));
  }
}

void add_normalized(float* row, const float* other, const float* gain, float eps, int size) {
  const F inverse = Isa::set(inverse_rms(other, eps, size));
  for (int k = 0; k < size; k += kLanes)
    Isa::store(row + k, Isa::fma(Isa::mul(Isa::load(other + k), inverse), Isa::load(gain + k), Isa::load(row + k)));
}

void rotate(float* head, const float* gain, float eps, const float* cos, const float* sin, int half, int dim) {
  if (gain) {
    F squares = Isa::zero();
    int k = 0;
    for (; k + kLanes <= dim; k += kLanes) squares = Isa::fma(Isa::load(head + k), Isa::load(head + k), squares);
    float sum = Isa::sum(squares);
    for (; k < dim; k++) sum = std::fma(head[k], head[k], sum);
    const float inverse = 1.0f / std::sqrt(sum / dim + eps);
    for (k = 0; k < dim; k++) head[k] = head[k] * inverse * gain[k];
  }
  for (int k = 0; k < half; k++) {
    const float low = head[k], high = head[k + half];
    head[k] = std::fma(low, cos[k], -(high * sin[k]));
    head[k + half] = std::fma(high, cos[k], low * sin[k]);
  }
}

}  // namespace
