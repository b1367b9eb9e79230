// Attention of some queries to one sequence's keys, in cuts of fixed positions.
#pragma once

#include "cut.h"

namespace {

void merge(float* outputs, Partial* own, const float* others, const Partial& other, int dim) {
  const int wide = round_up(dim, kPanel);
  if (own->sum == 0.0f) {
    memcpy(outputs, others, wide * 4);
    *own = other;
    return;
  }
  float differences[kLanes] = {}, factors[kLanes];
  const float largest = own->largest > other.largest ? own->largest : other.largest;
  differences[0] = own->largest - largest;
  differences[1] = other.largest - largest;
  Isa::store(factors, exp(Isa::load(differences)));
  const F mine = Isa::set(factors[0]), theirs = Isa::set(factors[1]);
  for (int k = 0; k < wide; k += kLanes)
    Isa::store(outputs + k, Isa::fma(Isa::load(others + k), theirs, Isa::mul(Isa::load(outputs + k), mine)));
  own->sum = std::fma(other.sum, factors[1], own->sum * factors[0]);
  own->largest = largest;
}

template <bool Half, Type type>
void attend_in(const AttendTask& task, void* scratch, float* outputs, Partial* partials) {
  Cut<Half, type> cut(task, scratch);
  for (int row = 0; row < cut.rows; row++) partials[row] = {kNegative, 0.0f};
  for (int number = task.cut_begin; number < task.cut_end; number++) {
    const int start = number * kCut;
    int first = start + kCut, last = start;  // of all tokens
    for (int token = 0; token < task.tokens; token++) {
      if (task.first[token] < first) first = task.first[token];
      if (task.last[token] > last) last = task.last[token];
    }
    if (first < start) first = start;
    if (last > start + kCut) last = start + kCut;
    if (first >= last) continue;
    Partial parts[kMaxRows];
    cut.attend(first, last, parts);
    for (int row = 0; row < cut.rows; row++) {
      const int token = row / task.group;
      if (task.first[token] < last && task.last[token] > first)
        merge(outputs + (size_t)row * cut.wide, &partials[row], cut.sums + (size_t)row * cut.wide, parts[row], task.dim);
    }
  }
}

void attend(const AttendTask& task, Type type, void* scratch, float* outputs, Partial* partials) {
  constexpr bool half = Isa::kDotsBf16;
  switch (type) {
    case inflight::kFloat32: return attend_in<false, inflight::kFloat32>(task, scratch, outputs, partials);
    case inflight::kBfloat16: return attend_in<half, inflight::kBfloat16>(task, scratch, outputs, partials);
    case inflight::kInt8: return attend_in<half, inflight::kInt8>(task, scratch, outputs, partials);
    default: return attend_in<half, inflight::kE4m3>(task, scratch, outputs, partials);
  }
}

void finish(const float* outputs, const Partial& own, float value_scale, float* to, int dim) {
  const F by = Isa::set(value_scale / own.sum);
  int k = 0;
  for (; k + kLanes <= dim; k += kLanes) Isa::store(to + k, Isa::mul(Isa::load(outputs + k), by));
  for (; k < dim; k++) to[k] = outputs[k] * (value_scale / own.sum);
}

}  // namespace
