// What some queries attend to in one cut of a sequence's keys.
#pragma once

#include <cfloat>
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
template <Type type>
inline F widen(const void* from) {
  if constexpr (type == inflight::kFloat32) return Isa::load((const float*)from);
  if constexpr (type == inflight::kBfloat16) return Isa::from_bf16((const uint16_t*)from);
  if constexpr (type == inflight::kE4m3) return Isa::from_e4m3((const uint8_t*)from);
  if constexpr (type == inflight::kInt8) return Isa::from_int8((const int8_t*)from);
}

// A row of the cache in the type that it is multiplied in, padded with zeros to whole vectors.
template <Type type, class T>
inline void load_row(const void* cache, ptrdiff_t slot, int dim, T* to) {
  constexpr int size = inflight::bytes_of(type);
  const char* from = (const char*)cache + slot * dim * size;
  for (int k = 0; k < dim; k += kLanes) {
    char last[kLanes * 4] = {};
    const char* part = from + k * size;
    if (k + kLanes > dim) part = (const char*)memcpy(last, part, (dim - k) * size);
    if (sizeof(T) == 2 && type == inflight::kBfloat16)
      memcpy(to + k, part, kLanes * 2);
    else
      put(to + k, widen<type>(part));
  }
}

// sums [R][kPanel] = rows * a panel, in the operands' type.
template <bool Half, int R>
inline void dot(const typename Operand<Half>::Type* rows, ptrdiff_t stride, const typename Operand<Half>::Type* weight,
                int inputs, float* sums) {
  memset(sums, 0, R * kPanel * sizeof(float));
  const Operands in{(const char*)rows, stride * Operand<Half>::kBytes, nullptr, (const char*)weight, 0, inputs, 0};
  std::conditional_t<Half, HalfProducts, FloatProducts>::template add<R, 1>(in, sums);
}

constexpr int kFetched = 16;  // keys ahead, whose values are loaded meanwhile

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
  const size_t wide = round_up(dim, kPanel);
  return 4 * (rows * (2 * wide + 2 * kCut + 1) + wide * (kCut + kPanel + 2) + 2 * kCut) + 1024;
}

// One cut of a task: what its tokens attend to.
template <bool Half, Type type>
struct Cut {
  using T = typename Operand<Half>::Type;
  static constexpr bool kIntegers = type == inflight::kInt8;
  // Keys in bfloat16 are transposed by pairs and widened after that, which halves the shuffles.
  static constexpr bool kPairs = !Half && type == inflight::kBfloat16;
  // The elements in each lane of a transposed vector, and the vectors of the panel that it becomes.
  static constexpr int kLaneElements = kIntegers ? 4 : kPairs ? 2 : Operand<Half>::kUnit;
  static constexpr int kLaneVectors = kIntegers || kPairs ? 2 : 1;
  using Query = std::conditional_t<kIntegers, int16_t, T>;
  const AttendTask& task;
  int rows, wide;
  Query* queries;        // [rows][wide]
  float* query_factors;  // [rows], kInt8: what the integers are multiples of
  T* key_panel;          // [wide][kPanel], by units; kInt8: words [dim / 2][kPanel][2], a pair of elements k and k + 2
  T* value_panels;       // [wide / kPanel][kCut][kPanel], by units
  T* stored;             // [2][wide]: rows of the cache
  T* weights;            // [rows][kCut]
  float* scores;         // [rows][kCut]
  float* sums;           // [rows][wide]
  float* key_factors;    // [kCut], kInt8
  float* value_factors;  // [kCut], kInt8

  Cut(const AttendTask& task, void* memory)
      : task(task), rows(task.tokens * task.group), wide(round_up(task.dim, kPanel)) {
    Scratch scratch{(char*)memory};
    queries = scratch.take<Query>((size_t)rows * wide);
    query_factors = scratch.take<float>(rows);
    key_panel = scratch.take<T>((size_t)kPanel * wide);
    value_panels = scratch.take<T>((size_t)kCut * wide);
    stored = scratch.take<T>((size_t)2 * wide);
    weights = scratch.take<T>((size_t)rows * kCut);
    scores = scratch.take<float>((size_t)rows * kCut);
    sums = scratch.take<float>((size_t)rows * wide);
    key_factors = scratch.take<float>(kCut);
    value_factors = scratch.take<float>(kCut);
    memset(queries, 0, (size_t)rows * wide * sizeof(Query));
    memset(stored, 0, (size_t)2 * wide * sizeof(T));
    for (int row = 0; row < rows; row++) load_query(row);
  }

  // The place of element k in a query of integers: elements k and k + 2 form a pair, as in `key_panel`.
  static int place_of(int k) { return (k & ~3) + (k % 2) * 2 + k % 4 / 2; }

  void load_query(int row) {
    const float* query = task.queries + row / task.group * task.token_stride + row % task.group * task.dim;
    Query* to = queries + (size_t)row * wide;
    if constexpr (kIntegers) {
      float largest = 0.0f, nothing = 0.0f;
      for (int k = 0; k < task.dim; k++) {
        largest = std::max(largest, std::fabs(query[k]));
        nothing += query[k] * 0.0f;  // NaN where the query has NaN or infinity
      }
      query_factors[row] = largest / 32767.0f + nothing;
      const bool finite = nothing == 0.0f;  // a NaN cannot be converted to an integer; the factor has it
      const float by = largest > 0.0f && finite ? std::min(32767.0f / largest, FLT_MAX) : 0.0f;
      for (int k = 0; k < task.dim; k++)
        to[place_of(k)] = finite ? (int16_t)std::clamp(std::nearbyint(query[k] * by), -32767.0f, 32767.0f) : 0;
    } else {
      int k = 0;
      for (; k + kLanes <= task.dim; k += kLanes) put(to + k, Isa::load(query + k));
      float last[kLanes] = {};
      memcpy(last, query + k, (task.dim - k) * 4);
      if (k < task.dim) put(to + k, Isa::load(last));
    }
  }

  // A vector of a stored row: units in the type that it is multiplied in, or elements as they are stored.
  static I units(const char* from) {
    if constexpr (type == inflight::kBfloat16 || kIntegers) return Isa::load_int((const int32_t*)from);
    if constexpr (!Half) return Isa::bits(widen<type>(from));
    alignas(64) T both[2 * kLanes];
    put(both, widen<type>(from));
    put(both + kLanes, widen<type>(from + kLanes * inflight::bytes_of(type)));
    return Isa::load_int((const int32_t*)both);
  }

  // Turns vectors of kLanes keys into a part of their panel.
  static void store_columns(I (&part)[kLanes], int32_t* to) {
    Isa::transpose(part);
    for (int i = 0; i < kLanes; i++) {
      if constexpr (kIntegers) {
        I first, second;
        Isa::split_bytes(part[i], first, second);
        Isa::store_int(to + 2 * i * kPanel, first);
        Isa::store_int(to + (2 * i + 1) * kPanel, second);
      } else if constexpr (kPairs) {
        F first, second;
        Isa::split_pairs(part[i], first, second);
        Isa::store((float*)to + 2 * i * kPanel, first);
        Isa::store((float*)to + (2 * i + 1) * kPanel, second);
      } else {
        Isa::store_int(to + i * kPanel, part[i]);
      }
    }
  }

  // A panel of the keys from `begin` on; those from `last` on stand for the one before, since `weigh` leaves them out.
  void pack_keys(int begin, int last) {
    constexpr int step = kLanes * kLaneElements, size = inflight::bytes_of(type);
    // Both sides are rounded up from the same dimension: to whole steps what is written, to whole panels the memory.
    static_assert(!kIntegers || step * sizeof(Query) <= kPanel * sizeof(T));
    const char* keys = (const char*)task.cache.keys;
    const int32_t* slots = task.slots;
    const int dim = task.dim, whole = dim / step * step;
    for (int at = 0; at < kPanel; at += kLanes) {
      const char* from[kLanes];
      for (int i = 0; i < kLanes; i++) {
        from[i] = keys + (ptrdiff_t)slots[std::min(begin + at + i, last - 1)] * dim * size;
        fetch(keys + (ptrdiff_t)slots[std::min(begin + at + i + kPanel, last - 1)] * dim * size, dim * size);
      }
      int32_t* to = (int32_t*)key_panel + at;
      for (int k = 0; k < whole; k += step, to += kLanes * kPanel * kLaneVectors) {
        I part[kLanes];
        for (int i = 0; i < kLanes; i++) part[i] = units(from[i] + k * size);
        store_columns(part, to);
      }
      if (whole == dim) continue;
      I part[kLanes];
      for (int i = 0; i < kLanes; i++) {
        char padded[step * size] = {};
        part[i] = units((const char*)memcpy(padded, from[i] + whole * size, (dim - whole) * size));
      }
      store_columns(part, to);
    }
  }

  // Values from `begin` to `end`, an even number, where those before `first` and from `last` on are zero.
  void pack_values(int begin, int end, int first, int last) {
    constexpr int unit = Operand<Half>::kUnit;
    for (int key = begin; key < end; key += unit) {
      for (int i = 0; i < unit; i++) {
        T* row = stored + (size_t)i * wide;
        if (key + i >= first && key + i < last)
          load_row<type>(task.cache.values, task.slots[key + i], task.dim, row);
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

  // The sums of R rows as `add_up` computes them, of values as they are stored: P panels at a time from `d` on. Returns
  // where it ends.
  template <int R, int P>
  int add_up_panels(int first, int last, int d) {
    constexpr int size = inflight::bytes_of(type);
    for (; d + P * kPanel <= wide; d += P * kPanel) {
      const char* values = (const char*)task.cache.values + d * size;
      auto stored_value = [&](int key) { return values + (ptrdiff_t)task.slots[key] * task.dim * size; };
      F totals[P * kVectors][R];
      for (auto& vector : totals)
        for (F& total : vector) total = Isa::zero();
      for (int key = first; key < last; key++) {
        const char* value = stored_value(key);
        fetch(stored_value(std::min(key + kFetched, last - 1)), P * kPanel * size);
        for (int v = 0; v < P * kVectors; v++) {
          const F x = widen<type>(value + v * kLanes * size);
          for (int r = 0; r < R; r++)
            totals[v][r] = Isa::fma(x, Isa::set(((const float*)weights)[r * kCut + key % kCut]), totals[v][r]);
        }
      }
      for (int v = 0; v < P * kVectors; v++)
        for (int r = 0; r < R; r++) Isa::store(sums + (size_t)r * wide + d + v * kLanes, totals[v][r]);
    }
    return d;
  }

  // The same for all dimensions, of the keys from `first` to `last` and no others.
  template <int R>
  void add_up_stored(int first, int last) {
    add_up_panels<R, 1>(first, last, add_up_panels<R, R == 1 ? 4 : R <= 3 ? 2 : 1>(first, last, 0));
  }

  // Scores of the keys from `begin` to `end`, whole panels.
  void score(int begin, int end, int last) {
    const F scale = Isa::set(task.scale * (type == inflight::kE4m3 ? task.cache.key_scale : 1.0f));
    for (int key = begin; key < end; key += kPanel) {
      pack_keys(key, last);
      const int at = key % kCut;
      for_tiles<kRows>(rows, [&](auto size, int row) {
        constexpr int R = decltype(size)::value;
        alignas(64) float products[R * kPanel];
        dot<Half, R>(queries + (size_t)row * wide, wide, key_panel, task.dim, products);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < kPanel; v += kLanes)
            Isa::store(scores + (size_t)(row + r) * kCut + at + v,
                       Isa::mul(Isa::load(products + r * kPanel + v), scale));
      });
    }
  }

  // The same for keys in INT8. Their products are integers, and the sums are exact, so their order does not matter.
  void score_integers(int begin, int end, int last) {
    for (int key = begin; key < end; key += kPanel) {
      pack_keys(key, last);
      const float* factors = key_factors + key % kCut;
      for_tiles<Isa::kIntegerRows>(rows, [&](auto size, int row) {
        constexpr int R = decltype(size)::value;
        const ptrdiff_t stride = wide * sizeof(Query);
        const Operands in{(const char*)queries + row * stride, stride, nullptr, (const char*)key_panel, 0, task.dim, 0};
        I sums[R][kVectors];
        for (auto& of_row : sums)
          for (I& sum : of_row) sum = Isa::set_int(0);
        for (int k = 0; k < round_up(task.dim, kLaneElements); k += Words<false>::kUnit)
          IntegerProducts<Words<false>>::add_unit<R, 1>(in, in.weights, in.rows, k, sums);
        for (int r = 0; r < R; r++) {
          const F factor = Isa::set(query_factors[row + r]);
          for (int v = 0; v < kVectors; v++)
            Isa::store(scores + (size_t)(row + r) * kCut + key % kCut + v * kLanes,
                       Isa::mul(Isa::mul(Isa::to_float(sums[r][v]), factor), Isa::load(factors + v * kLanes)));
        }
      });
    }
  }

  // Turns a row's scores of the keys that its token attends to into weights; all others from `begin` to `end` are zero.
  Partial weigh(int row, int token, int begin, int end) {
    const int start = begin / kCut * kCut, first = task.first[token] - start, last = task.last[token] - start;
    begin -= start, end -= start;
    float* score = scores + (size_t)row * kCut;
    T* weight = weights + (size_t)row * kCut;
    for (int at = begin; at < end && task.softcap > 0.0f; at += kLanes)
      Isa::store(score + at, squeezed(Isa::load(score + at), Isa::set(task.softcap)));
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
      if (kIntegers) x = Isa::mul(x, Isa::load(value_factors + at));
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

  // Attends to the keys from `first` to `last`, of one cut: leaves the sums, and each row's part.
  void attend(int first, int last, Partial* parts) {
    const int begin = first / kPanel * kPanel, end = round_up(last, kPanel);
    if (kIntegers) load_factors(begin, end, last);
    if constexpr (kIntegers)
      score_integers(begin, end, last);
    else
      score(begin, end, last);
    if constexpr (!Half) {
      if (task.tokens == 1 && rows <= kRows && task.dim % kPanel == 0) {  // too few rows to make panels of values for
        for (int row = 0; row < rows; row++) parts[row] = weigh(row, 0, begin, end);
        for_tiles<kRows>(rows, [&](auto all, int) { add_up_stored<decltype(all)::value>(first, last); });
        return;
      }
    }
    const int start = begin / kCut * kCut;
    pack_values(begin, end, first, last);
    for (int row = 0; row < rows; row++) parts[row] = weigh(row, row / task.group, begin, end);
    add_up(begin - start, end - start, 0, rows);
    // A value that is no number must not reach a token that does not attend to it, by way of a weight of zero.
    for (int token = 0; token < task.tokens; token++)
      if (!finite(token)) {
        pack_values(begin, end, task.first[token], task.last[token]);
        add_up(begin - start, end - start, token * task.group, task.group);
      }
  }
};

}  // namespace
