// Inputs that are rounded to 16 bits: to multiples of their group's largest. Those of a row that stand out are kept apart,
// each with a scale of its own, since the others of their group would be multiples of it.
#pragma once

#include <cfloat>

#include "weights.h"

namespace {

// An input stands out whose square is more than this share of the sum of the squares of all groups' largest. What rounding
// costs a row grows with that sum.
constexpr float kOutlierShare = 0.5f;

// Rounds a group to integers: to the nearest multiple of its largest divided by `most`. Where it has NaN or infinity, its
// scale is NaN. `offset` is what the packed weights have added.
template <class Integer>
inline GroupScale round_group(const float* group, int size, float most, int offset, Integer* to) {
  F largest = Isa::zero(), nothing = Isa::zero();
  for (int k = 0; k < size; k += kLanes) {
    const F x = Isa::load(group + k);
    largest = Isa::max(largest, Isa::max(x, Isa::sub(Isa::zero(), x)));
    nothing = Isa::fma(x, Isa::zero(), nothing);
  }
  const float top = Isa::largest(largest);
  const F by = Isa::set(top > 0.0f ? std::min(most / top, FLT_MAX) : 0.0f);
  for (int k = 0; k < size; k += kLanes) Isa::to_integers(to + k, Isa::mul(Isa::load(group + k), by));
  int32_t sum = 0;
  for (int k = 0; k < size && offset; k++) sum += to[k];
  return {top / most + Isa::sum(nothing), -offset * sum};
}

// The squares of all groups' scales: whether the largest stands out.
struct Squares {
  float sum = 0.0f, largest = 0.0f;
  void add(float scale) {
    sum += scale * scale;
    largest = std::max(largest, scale * scale);
  }
  // False where the row has NaN or infinity.
  bool one_stands_out() const { return largest > kOutlierShare * sum && largest < FLT_MAX; }
};

// Rounds a row by groups. `input(k)` is a vector of the row, which is padded with zeros to whole groups.
template <class Integer, class Input>
inline Squares round_to_integers(Input input, const PackedWeight& weight, float most, int offset, Integer* to,
                                 GroupScale* scales) {
  alignas(64) float group[inflight::kLongestGroup];
  Squares squares;
  const int size = group_of(weight);
  for (int first = 0; first < weight.inputs; first += size, to += size, scales++) {
    for (int k = 0; k < size; k += kLanes) Isa::store(group + k, input(first + k));
    *scales = round_group(group, size, most, offset, to);
    squares.add(scales->scale);
  }
  return squares;
}

// Rounds a group again without its largest input, which is set apart.
template <class Input>
inline void set_apart(Input input, const PackedWeight& weight, int offset, int16_t* to, int number, GroupScale& scale,
                      Outliers& outliers) {
  alignas(64) float group[inflight::kLongestGroup];
  const int size = group_of(weight), first = number * size;
  for (int k = 0; k < size; k += kLanes) Isa::store(group + k, input(first + k));
  for (const Outlier *one = outliers.of, *end = one + outliers.count; one < end; one++)
    if (one->number == number) group[one->first + (one->pair[0] == 0)] = 0.0f;
  int k = 0;
  while (std::abs(to[first + k]) != (int)kLargestWord) k++;
  Outlier& one = outliers.of[outliers.count++];
  one = {(int32_t)offset_in_panel(weight, first), number, k / 2 * 2, {}, {scale.scale, -offset * to[first + k]}};
  one.pair[k % 2] = to[first + k];
  group[k] = 0.0f;
  scale = round_group(group, size, kLargestWord, offset, to + first);
}

// Rounds a row to 16 bits, and sets those inputs apart that stand out.
template <class Input>
inline void round_to_words(Input input, const PackedWeight& weight, int offset, char* row) {
  int16_t* to = (int16_t*)row;
  GroupScale* scales = (GroupScale*)(row + scales_offset(weight));
  Outliers& outliers = ((Outliers*)scales)[-1];
  outliers.count = 0;
  Squares squares = round_to_integers(input, weight, kLargestWord, offset, to, scales);
  while (squares.one_stands_out() && outliers.count < Outliers::kMost) {
    int number = 0;
    while (scales[number].scale * scales[number].scale != squares.largest) number++;
    set_apart(input, weight, offset, to, number, scales[number], outliers);
    squares = {};
    for (int first = 0; first < weight.inputs; first += group_of(weight)) squares.add(scales[first / group_of(weight)].scale);
  }
}

}  // namespace
