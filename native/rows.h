// What is done to single rows between products: norms, rotations, and the types that products take.
#pragma once

#include <cmath>

#include "outliers.h"

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

// The largest of some inputs, divided by `most`: what they are multiples of. Zeros are multiples of one.
template <class Input>
inline float scale_of(Input input, int first, int last, float most) {
  F largest = Isa::zero();
  for (int k = first; k < last; k += kLanes) {
    const F x = input(k);
    largest = Isa::max(largest, Isa::max(x, Isa::sub(Isa::zero(), x)));
  }
  const float scale = Isa::largest(largest) / most;
  return scale > 0.0f ? scale : 1.0f;
}

// Rounds a row to INT8: to the nearest, ties to even; saturates. The checkpoint has a scale for it, or it is rounded by its
// own largest. The scale that is left for sums also says whether the row has a NaN, which integers cannot.
template <class Input>
inline void round_to_int8(Input input, const PackedWeight& weight, Isa::Input* to, GroupScale* scale) {
  F nothing = Isa::zero();
  const bool own = weight.input_group > 0;
  const float by = own ? scale_of(input, 0, weight.inputs, 127.5f) : weight.input_scale;
  for (int k = 0; k < weight.inputs; k += kLanes) {
    F steps = Isa::div(input(k), Isa::set(by));
    steps = Isa::min(Isa::set(127.0f), Isa::max(Isa::set(-128.0f), steps));
    nothing = Isa::fma(steps, Isa::zero(), nothing);
    Isa::to_integers(to + k, steps);
  }
  int32_t sum = 0;
  for (int k = 0; k < round_up(weight.inputs, Isa::kUnit); k++) sum += to[k];
  *scale = {(own ? by : 1.0f) + Isa::sum(nothing), -Isa::kOffset * sum};
}

// Rounds to E4M3: to the nearest, ties to even; saturates, and NaN stays NaN. A sum with a number so large that its last
// bit is the unit of x in E4M3 rounds x to that.
inline F round_to_e4m3(F x) {
  x = Isa::min(Isa::set(448.0f), Isa::max(Isa::set(-448.0f), x));
  const F power = Isa::max(Isa::set(0x1p-6f), Isa::power_below(x)), large = Isa::mul(power, Isa::set(1.5f * 0x1p20f));
  return Isa::sub(Isa::add(x, large), large);
}

// Rounds a row to E4M3: to multiples of a scale that is left for sums, or group by group to those of its own largest.
template <class Input>
inline void round_to_floats(Input input, const PackedWeight& weight, float* to) {
  const int size = weight.input_group ? weight.input_group : weight.inputs;
  for (int first = 0; first < weight.inputs; first += size) {
    const int last = std::min(first + size, weight.inputs);
    const F by = Isa::set(weight.input_group ? scale_of(input, first, last, 448.0f) : weight.input_scale);
    for (int k = first; k < last; k += kLanes) {
      const F rounded = round_to_e4m3(Isa::div(input(k), by));
      Isa::store(to + k, weight.input_group ? Isa::mul(rounded, by) : rounded);
    }
  }
}

void prepare(const PackedWeight& weight, const float* row, const float* gain, float eps, float factor,
             const InputRows& to, int index) {
  const int size = weight.inputs;
  char* out = (char*)to.data + to.stride * index;
  const F by = Isa::set(gain ? inverse_rms(row, eps, size) * factor : factor);
  auto input = [&](int k) {
    F x = Isa::mul(Isa::load(row + k), by);
    if (gain) x = Isa::mul(x, Isa::load(gain + k));
    return weight.smooth ? Isa::mul(x, Isa::load(weight.smooth + k)) : x;
  };
  GroupScale* scales = (GroupScale*)(out + scales_offset(weight));
  if (weight.type == inflight::kInt8) {
    round_to_integers(input, weight, Isa::kLargestInput, Isa::kOffset, (Isa::Input*)out, scales);
  } else if (in_groups(weight.type)) {
    const int offset = weight.type == inflight::kInt8Columns ? 0
                       : weight.type == inflight::kMxfp4     ? inflight::kMxfp4Offset
                                                             : inflight::kNibbleOffset;
    round_to_words(input, weight, offset, out);
  } else if (weight.type == inflight::kInt8Sums) {
    round_to_int8(input, weight, (Isa::Input*)out, scales);
  } else if (is_e4m3(weight.type) && (weight.input_group || weight.input_scale > 0.0f)) {
    round_to_floats(input, weight, (float*)out);
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

void add_scaled(float* row, const float* other, float by, int size) {
  for (int k = 0; k < size; k += kLanes)
    Isa::store(row + k, Isa::fma(Isa::load(other + k), Isa::set(by), Isa::load(row + k)));
}

void normalize(float* row, const float* gain, float eps, int size) {
  F squares = Isa::zero();
  int k = 0;
  for (; k + kLanes <= size; k += kLanes) squares = Isa::fma(Isa::load(row + k), Isa::load(row + k), squares);
  float sum = Isa::sum(squares);
  for (; k < size; k++) sum = std::fma(row[k], row[k], sum);
  const float inverse = 1.0f / std::sqrt(sum / size + eps);
  for (k = 0; k < size; k++) row[k] = row[k] * inverse * gain[k];
}

void rotate(float* head, const float* cos, const float* sin, int half, bool interleaved) {
  auto turn = [&](int k, float& first, float& second) {
    const float low = first, high = second;
    first = std::fma(low, cos[k], -(high * sin[k]));
    second = std::fma(high, cos[k], low * sin[k]);
  };
  if (interleaved)
    for (int k = 0; k < half; k++) turn(k, head[2 * k], head[2 * k + 1]);
  else
    for (int k = 0; k < half; k++) turn(k, head[k], head[k + half]);
}

void squeeze(float* row, float limit, int size) {
  for (int k = 0; k < size; k += kLanes) Isa::store(row + k, squeezed(Isa::load(row + k), Isa::set(limit)));
}

}  // namespace
