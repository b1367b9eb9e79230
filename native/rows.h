// What is done to single rows between products: norms, rotations, and the types that products take.
#pragma once

#include <cfloat>
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

// Rounds a row to integers by groups: to the nearest multiple of the group's largest divided by `most`. A group with NaN or
// infinity has NaN as its scale. `input(k)` is a vector of the row, which is padded with zeros to whole groups; `offset`
// is what the packed weights have added.
template <class Integer, class Input>
inline void round_to_integers(Input input, const PackedWeight& weight, float most, int offset, Integer* to,
                              GroupScale* scales) {
  const int size = group_of(weight);
  for (int first = 0; first < weight.inputs; first += size, to += size, scales++) {
    F largest = Isa::zero(), nothing = Isa::zero();
    for (int k = 0; k < size; k += kLanes) {
      const F x = input(first + k);
      largest = Isa::max(largest, Isa::max(x, Isa::sub(Isa::zero(), x)));
      nothing = Isa::fma(x, Isa::zero(), nothing);
    }
    const float top = Isa::largest(largest);
    const F by = Isa::set(top > 0.0f ? std::min(most / top, FLT_MAX) : 0.0f);
    for (int k = 0; k < size; k += kLanes) Isa::to_integers(to + k, Isa::mul(input(first + k), by));
    int32_t sum = 0;
    for (int k = 0; k < size && offset; k++) sum += to[k];
    *scales = {top / most + Isa::sum(nothing), -offset * sum};
  }
}

// Rounds a row that a quantized checkpoint has scales for to INT8: to the nearest, ties to even; saturates. The one scale
// says whether the row has a NaN, which integers cannot.
template <class Input>
inline void round_to_int8(Input input, const PackedWeight& weight, Isa::Input* to, GroupScale* scale) {
  F nothing = Isa::zero();
  for (int k = 0; k < weight.inputs; k += kLanes) {
    F steps = Isa::div(input(k), Isa::set(weight.input_scale));
    steps = Isa::min(Isa::set(127.0f), Isa::max(Isa::set(-128.0f), steps));
    nothing = Isa::fma(steps, Isa::zero(), nothing);
    Isa::to_integers(to + k, steps);
  }
  int32_t sum = 0;
  for (int k = 0; k < round_up(weight.inputs, Isa::kUnit); k++) sum += to[k];
  *scale = {1.0f + Isa::sum(nothing), -Isa::kOffset * sum};
}

// Rounds to E4M3: to the nearest, ties to even; saturates, and NaN stays NaN. A sum with a number so large that its last
// bit is the unit of x in E4M3 rounds x to that.
inline F round_to_e4m3(F x) {
  x = Isa::min(Isa::set(448.0f), Isa::max(Isa::set(-448.0f), x));
  const F power = Isa::max(Isa::set(0x1p-6f), Isa::power_below(x)), large = Isa::mul(power, Isa::set(1.5f * 0x1p20f));
  return Isa::sub(Isa::add(x, large), large);
}

void prepare(const PackedWeight& weight, const float* row, const float* gain, float eps, const InputRows& to,
             int index) {
  const int size = weight.inputs;
  char* out = (char*)to.data + to.stride * index;
  const F inverse = Isa::set(gain ? inverse_rms(row, eps, size) : 1.0f);
  auto input = [&](int k) {
    F x = Isa::load(row + k);
    if (gain) x = Isa::mul(Isa::mul(x, inverse), Isa::load(gain + k));
    return weight.smooth ? Isa::mul(x, Isa::load(weight.smooth + k)) : x;
  };
  GroupScale* scales = (GroupScale*)(out + scales_offset(weight));
  if (weight.type == inflight::kInt8) {
    round_to_integers(input, weight, Isa::kLargestInput, Isa::kOffset, (Isa::Input*)out, scales);
  } else if (in_groups(weight.type)) {
    const int offset = weight.type == inflight::kInt8Columns ? 0 : inflight::kNibbleOffset;
    round_to_integers(input, weight, 32767.0f, offset, (int16_t*)out, scales);
  } else if (weight.type == inflight::kInt8Sums) {
    round_to_int8(input, weight, (Isa::Input*)out, scales);
  } else if (weight.type == inflight::kE4m3) {
    const F scale = Isa::set(weight.input_scale);
    for (int k = 0; k < size; k += kLanes) Isa::store((float*)out + k, round_to_e4m3(Isa::div(input(k), scale)));
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
