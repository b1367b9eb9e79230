// Attention of some queries to one sequence's keys, in cuts of fixed positions.
#pragma once

#include <type_traits>

#include "products.h"

namespace {

// What keys, values and their weights are multiplied in: bfloat16 where the processor multiplies it, else float32. A
// cache in float32 is always multiplied in float32.
template <bool Half>
struct Operand;
template <>
struct Operand<false> {
  using Type = float;
  static constexpr int kBytes = 4;
  static constexpr int kUnit = 1;  // elements of a sum that lie together
};
template <>
struct Operand<true> {
  using Type = uint16_t;
  static constexpr int kBytes = 2;
  static constexpr int kUnit = 2;
};

template <class T>
inline void put(T* to, F x) {
  if constexpr (sizeof(T) == 4)
    Isa::store(to, x);
  else
    Isa::to_bf16(to, x);
}

// A vector of stored elements.
inline F widen(Type type, const void* from) {
  switch (type) {
    case inflight::kFloat32: return Isa::load((const float*)from);
    case inflight::kBfloat16: return Isa::from_bf16((const uint16_t*)from);
    case inflight::kE4m3: return Isa::from_e4m3((const uint8_t*)from);
    default: return Isa::from_int8((const int8_t*)from);
  }
}

// A row of the cache in the type that it is multiplied in, padded with zeros to whole vectors.
template <class T>
inline void load_row(Type type, const void* cache, ptrdiff_t slot, int dim, T* to) {
  const int size = inflight::bytes_of(type);
  const char* from = (const char*)cache + slot * dim * size;
  for (int k = 0; k < dim; k += kLanes) {
    char last[kLanes * 4] = {};
    const char* part = from + k * size;
    if (k + kLanes > dim) part = (const char*)memcpy(last, part, (dim - k) * size);
    if (sizeof(T) == 2 && type == inflight::kBfloat16)
      memcpy(to + k, part, kLanes * 2);
    else
      put(to + k, widen(type, part));
  }
}

// sums [R][kPanel] = rows * a panel, in the operands' type.
template <bool Half, int R>
inline void dot(const typename Operand<Half>::Type* rows, ptrdiff_t stride, const typename Operand<Half>::Type* weight,
                int inputs, float* sums) {
  memset(sums, 0, R * kPanel * sizeof(float));
  const Operands in{(const char*)rows, stride * Operand<Half>::kBytes, nullptr, (const char*)weight, 0, inputs};
  std::conditional_t<Half, HalfProducts, FloatProducts>::template add<R, 1>(in, sums);
}

// Hands out parts of the scratch memory, each on a cache line of its own.
struct Scratch {
  char* at;
  template <class T>
  T* take(size_t count) {
    T* part = (T*)at;
    at += (count * sizeof(T) + 63) / 64 * 64;
    return part;
  }
};

size_t attend_scratch(int rows, int dim) {
  const size_t wide = round_up(dim, kPanel), row = rows + kLanes;
  return 4 * (row * wide + row * kCut * 2 + row * wide + 2 * wide * kCut + 2 * kCut) + 1024;
}

// One cut of a task: what its tokens attend to.
template <bool Half>
struct Cut {
  using T = typename Operand<Half>::Type;
  const AttendTask& task;
  Type type;
  int rows, wide;
  T* queries;      // [rows][wide]
  T* key_panels;   // [kCut / kPanel][wide][kPanel], by units
  T* value_panels; // [wide / kPanel][kCut][kPanel], by units
  T* stored;       // [kLanes][wide]: rows of the cache
  T* weights;      // [rows][kCut]
  float* scores;   // [rows][kCut]
  float* sums;     // [rows][wide]
  float* key_factors;    // [kCut], kInt8
  float* value_factors;  // [kCut], kInt8

  Cut(const AttendTask& task, Type type, void* memory)
      : task(task), type(type), rows(task.tokens * task.group), wide(round_up(task.dim, kPanel)) {
    Scratch scratch{(char*)memory};
    queries = scratch.take<T>((size_t)rows * wide);
    key_panels = scratch.take<T>((size_t)kCut * wide);
    value_panels = scratch.take<T>((size_t)kCut * wide);
    stored = scratch.take<T>((size_t)kLanes * wide);
    weights = scratch.take<T>((size_t)rows * kCut);
    scores = scratch.take<float>((size_t)rows * kCut);
    sums = scratch.take<float>((size_t)rows * wide);
    key_factors = scratch.take<float>(kCut);
    value_factors = scratch.take<float>(kCut);
    memset(queries, 0, (size_t)rows * wide * sizeof(T));
    memset(stored, 0, (size_t)kLanes * wide * sizeof(T));
    for (int row = 0; row < rows; row++) {
      const float* query = task.queries + row / task.group * task.token_stride + row % task.group * task.dim;
      int k = 0;
      for (; k + kLanes <= task.dim; k += kLanes) put(queries + (size_t)row * wide + k, Isa::load(query + k));
      float last[kLanes] = {};
      memcpy(last, query + k, (task.dim - k) * 4);
      if (k < task.dim) put(queries + (size_t)row * wide + k, Isa::load(last));
    }
  }

  // Keys from `begin` to `end`, whole panels, where those from `last` on are zero.
  void pack_keys(int begin, int end, int last) {
    constexpr int unit = Operand<Half>::kUnit;
    const int units = round_up((task.dim + unit - 1) / unit, kLanes);
    for (int key = begin; key < end; key += kLanes) {
      const uint32_t* from[kLanes];
      for (int i = 0; i < kLanes; i++) {
        T* row = stored + (size_t)i * wide;
        if (key + i < last)
          load_row(type, task.cache.keys, task.slots[key + i], task.dim, row);
        else
          memset(row, 0, wide * sizeof(T));
        from[i] = (const uint32_t*)row;
      }
      const int at = key % kCut;
      uint32_t* to = (uint32_t*)(key_panels + (size_t)at / kPanel * kPanel * wide) + at % kPanel;
      for (int u = 0; u < units; u += kLanes) Isa::transpose(from, u, to + (size_t)u * kPanel, kPanel);
    }
  }

  // Values from `begin` to `end`, an even number, where those before `first` and from `last` on are zero.
  void pack_values(int begin, int end, int first, int last) {
    constexpr int unit = Operand<Half>::kUnit;
    for (int key = begin; key < end; key += unit) {
      for (int i = 0; i < unit; i++) {
        T* row = stored + (size_t)i * wide;
        if (key + i >= first && key + i < last)
          load_row(type, task.cache.values, task.slots[key + i], task.dim, row);
        else
          memset(row, 0, wide * sizeof(T));
      }
      for (int d = 0; d < wide; d += kPanel) {
        T* to = value_panels + (size_t)d * kCut + (size_t)(key % kCut) * kPanel;
        if constexpr (Half)
          Isa::interleave((const uint16_t*)stored + d, (const uint16_t*)stored + wide + d, (uint16_t*)to);
        else
          memcpy(to, stored + d, kPanel * sizeof(T));
      }
    }
  }

  // What stored keys and values are multiples of; zero from `last` on.
  void load_factors(int begin, int end, int last) {
    for (int key = begin; key < end; key++) {
      const bool real = key < last;
      key_factors[key % kCut] = real ? task.scale * float_of(task.cache.key_scales[task.slots[key]]) : 0.0f;
      value_factors[key % kCut] = real ? float_of(task.cache.value_scales[task.slots[key]]) : 0.0f;
    }
  }

  // Scores of the keys of whole panels.
  void score(int begin, int end) {
    const F scale = Isa::set(task.scale * (type == inflight::kE4m3 ? task.cache.key_scale : 1.0f));
    for (int at = begin; at < end; at += kPanel) {
      const T* panel = key_panels + (size_t)at * wide;
      for_tiles<kRows>(rows, [&](auto size, int row) {
        constexpr int R = decltype(size)::value;
        alignas(64) float products[R * kPanel];
        dot<Half, R>(queries + (size_t)row * wide, wide, panel, task.dim, products);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < kVectors; v++) {
            const F by = type == inflight::kInt8 ? Isa::load(key_factors + at + v * kLanes) : scale;
            Isa::store(scores + (size_t)(row + r) * kCut + at + v * kLanes,
                       Isa::mul(Isa::load(products + r * kPanel + v * kLanes), by));
          }
      });
    }
  }

  // Turns a row's scores from `first` to `last` into weights; all others from `begin` to `end` are zero.
  Partial weigh(int row, int first, int last, int begin, int end) {
    float* score = scores + (size_t)row * kCut;
    T* weight = weights + (size_t)row * kCut;
    F largest = Isa::set(kNegative);
    for (int at = begin; at < end; at += kLanes) {
      F x = Isa::load(score + at);
      if (first > at || last < at + kLanes) x = Isa::select(first - at, last - at, x, Isa::set(kNegative));
      largest = Isa::max(largest, x);
      Isa::store(score + at, x);
    }
    const float most = Isa::largest(largest);
    F sum = Isa::zero();
    for (int at = begin; at < end; at += kLanes) {
      F x = exp(Isa::sub(Isa::load(score + at), Isa::set(most)));
      sum = Isa::add(sum, x);
      if (type == inflight::kInt8) x = Isa::mul(x, Isa::load(value_factors + at));
      // A factor that is no number must not count where the weight is zero.
      if (first > at || last < at + kLanes) x = Isa::select(first - at, last - at, x, Isa::zero());
      put(weight + at, x);
    }
    return {most, Isa::sum(sum)};
  }

  // Weighted sums of the values from `begin` to `end`, for `count` rows from `from` on.
  void add_up(int begin, int end, int from, int count) {
    for (int d = 0; d < wide; d += kPanel) {
      const T* panel = value_panels + (size_t)d * kCut + (size_t)begin * kPanel;
      for_tiles<kRows>(count, [&](auto size, int at) {
        const int row = from + at;
        constexpr int R = decltype(size)::value;
        alignas(64) float products[R * kPanel];
        dot<Half, R>(weights + (size_t)row * kCut + begin, kCut, panel, end - begin, products);
        for (int r = 0; r < R; r++)
          memcpy(sums + (size_t)(row + r) * wide + d, products + r * kPanel, kPanel * sizeof(float));
      });
    }
  }

  // Whether the sums of a token's rows are numbers.
  bool finite(int token) const {
    F nothing = Isa::zero();
    const float* end = sums + (size_t)(token + 1) * task.group * wide;
    for (const float* at = sums + (size_t)token * task.group * wide; at < end; at += kLanes)
      nothing = Isa::fma(Isa::load(at), Isa::zero(), nothing);
    return Isa::sum(nothing) == 0.0f;
  }
};

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

template <bool Half>
void attend_in(const AttendTask& task, Type type, void* scratch, float* outputs, Partial* partials) {
  Cut<Half> cut(task, type, scratch);
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
    const int begin = first / kPanel * kPanel, end = round_up(last, kPanel);
    if (type == inflight::kInt8) cut.load_factors(begin, end, last);
    cut.pack_keys(begin, end, last);
    cut.pack_values(begin, end, first, last);
    cut.score(begin - start, end - start);
    Partial parts[kMaxRows];
    for (int row = 0; row < cut.rows; row++) {
      const int token = row / task.group;
      parts[row] = cut.weigh(row, task.first[token] - start, task.last[token] - start, begin - start, end - start);
    }
    cut.add_up(begin - start, end - start, 0, cut.rows);
    // A value that is no number must not reach a token that does not attend to it, by way of a weight of zero.
    for (int token = 0; token < task.tokens; token++)
      if (!cut.finite(token)) {
        cut.pack_values(begin, end, task.first[token], task.last[token]);
        cut.add_up(begin - start, end - start, token * task.group, task.group);
      }
    for (int row = 0; row < cut.rows; row++) {
      const int token = row / task.group;
      if (task.first[token] < last && task.last[token] > first)
        merge(outputs + (size_t)row * cut.wide, &partials[row], cut.sums + (size_t)row * cut.wide, parts[row], task.dim);
    }
  }
}

void attend(const AttendTask& task, Type type, void* scratch, float* outputs, Partial* partials) {
  if (Isa::kDotsBf16 && type != inflight::kFloat32)
    attend_in<Isa::kDotsBf16>(task, type, scratch, outputs, partials);
  else
    attend_in<false>(task, type, scratch, outputs, partials);
}

void finish(const float* outputs, const Partial& own, float value_scale, float* to, int dim) {
  const F by = Isa::set(value_scale / own.sum);
  int k = 0;
  for (; k + kLanes <= dim; k += kLanes) Isa::store(to + k, Isa::mul(Isa::load(outputs + k), by));
  for (; k < dim; k++) to[k] = outputs[k] * (value_scale / own.sum);
}

}  // namespace
