// What drawing a token takes from all logits of a row: the largest, and every token's weight.
#pragma once

#include <cfloat>

#include "numbers.h"

namespace {

using Doubles = double __attribute__((vector_size(kLanes * 4)));
using Integers = int64_t __attribute__((vector_size(kLanes * 4)));
using Floats = float __attribute__((vector_size(kLanes * 2)));
constexpr int kDoubles = kLanes / 2;

// exp of numbers from -700 to 0, to about one last digit: 2^n times a Taylor series of the remainder, which is at most
// half of log 2.
inline Doubles exp(Doubles x) {
  const double shift = 6755399441055744.0;  // 1.5 * 2^52: a number plus it is rounded to a whole one, in the last bits
  const Doubles shifted = x * 1.4426950408889634 + shift, n = shifted - shift;
  const Doubles r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
  Doubles sum = r * (1.0 / 479001600) + 1.0 / 39916800;
  constexpr double terms[] = {1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                              1.0 / 24,      1.0 / 6,      0.5,         1.0,        1.0};
  for (double term : terms) sum = sum * r + term;
  return sum * (Doubles)(((Integers)shifted + 1023) << 52);
}

int argmax(const float* row, int size) {
  F largest = Isa::set(kNegative), nothing = Isa::zero();
  const F lowest = Isa::set(-FLT_MAX);
  int k = 0;
  for (; k + kLanes <= size; k += kLanes) {
    const F x = Isa::load(row + k), shown = Isa::max(lowest, x);  // NaN stays, minus infinity becomes finite
    largest = Isa::max(largest, x);
    nothing = Isa::add(nothing, Isa::sub(shown, shown));  // NaN where there is NaN or infinity
  }
  float most = Isa::largest(largest);
  bool odd = Isa::sum(nothing) != 0.0f;
  for (; k < size; k++) {
    most = row[k] > most ? row[k] : most;
    odd |= row[k] != row[k] || row[k] > FLT_MAX;
  }
  if (odd) {  // NaN is larger than all
    most = kNegative;
    for (k = 0; k < size; k++) {
      if (row[k] != row[k]) return k;
      most = row[k] > most ? row[k] : most;
    }
  }
  for (k = 0; k < size; k++)
    if (row[k] == most) return k;
  return 0;
}

// A token that is banned, by a logit of minus infinity, weighs nothing; its bucket is `buckets`, one behind all others.
void weigh_all(const float* row, int size, double largest, double temperature, double per_bucket, int buckets,
               double* weights, uint16_t* bucket) {
  for (int k = 0; k < size; k += kDoubles) {
    float some[kDoubles];
    for (int i = 0; i < kDoubles; i++) {
      const float x = k + i < size ? row[k + i] : kNegative;
      some[i] = x < FLT_MAX ? x : FLT_MAX;
    }
    Floats part;
    memcpy(&part, some, sizeof part);
    const Doubles logits = __builtin_convertvector(part, Doubles);
    const Integers banned = logits == (Doubles){} + (double)kNegative;
    Doubles x = (logits - largest) / temperature;
    const Integers far = x < -700.0;
    x = far ? (Doubles){} - 700.0 : x;
    Doubles weight = exp(x);
    weight = far ? (Doubles){} : weight;
    Doubles place = x * -per_bucket;
    place = place < (double)(buckets - 1) ? place : (Doubles){} + (double)(buckets - 1);
    Integers number = __builtin_convertvector(place, Integers);
    number = banned ? (Integers){} + buckets : number;
    for (int i = 0; i < kDoubles && k + i < size; i++) {
      weights[k + i] = weight[i];
      bucket[k + i] = (uint16_t)number[i];
    }
  }
}

}  // namespace
