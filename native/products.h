// Products of rows and packed weights, over the vectors of `Isa`.
//
// A sum takes its inputs one after the other, in ascending order (tiles.h has the one exception). Of few rows, a tile takes
// a panel's inputs in one go. Of many, a panel is taken in chunks that stay in the first cache while all rows go by, and
// the sums rest in memory between the chunks: the same sums in the same order, so the same bits.
#pragma once

#include <type_traits>
#include <utility>

#include "outliers.h"

namespace {

// What a tile reads: some rows, and some inputs of a panel or of several in a row.
struct Operands {
  const char* rows;  // the first input of the first row
  ptrdiff_t row_stride;
  const GroupScale* scales;  // of integers: of the same input and row
  const char* weights;
  ptrdiff_t panel_stride;
  int inputs;
  int group;  // of words and kE4m3Groups: inputs that share a scale
  // Of kE4m3Groups:
  const float* column_scales;  // [groups][kPanel], from the group of the first input on
  ptrdiff_t scale_stride;      // floats from a panel's to the next one's
  int phase;                   // inputs of that group before the first one

  const GroupScale& scale(int row, int number) const {
    return ((const GroupScale*)((const char*)scales + row * row_stride))[number];
  }
};

template <int R, int P>
using Sums = F[R][P * kVectors];

template <int R, int P>
inline void load_sums(const float* from, Sums<R, P>& sums) {
  for (int r = 0; r < R; r++)
    for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::load(from + r * P * kPanel + v * kLanes);
}

template <int R, int P>
inline void store_sums(const Sums<R, P>& sums, float* to) {
  for (int r = 0; r < R; r++)
    for (int v = 0; v < P * kVectors; v++) Isa::store(to + r * P * kPanel + v * kLanes, sums[r][v]);
}

constexpr int kLine = 64;     // bytes of a line of the caches
constexpr int kAhead = 4096;  // how many bytes of a panel the loads are ahead of the products
// With at most this many tiles, a tile prefetches so much of the next chunk that it spreads that over its products.
constexpr int kFewTiles = 3;

// Has the processor load what follows kAhead bytes after `bytes` of P panels. Its own guess is good enough for a tile of one
// row, which does little else than read.
template <int R, int P>
inline void fetch_ahead(const char* weights, ptrdiff_t panel_stride, ptrdiff_t bytes) {
  for (int p = 0; R > 1 && p < P; p++)
    for (ptrdiff_t at = kAhead; at < kAhead + bytes; at += kLine)
      __builtin_prefetch(weights + p * panel_stride + at);
}

// Prefetches memory while other operands are multiplied.
inline void fetch(const void* from, ptrdiff_t bytes) {
  for (ptrdiff_t at = 0; at < bytes; at += kLine) __builtin_prefetch((const char*)from + at);
}

// Each kind of operands adds products to `sums`, floats [R][P * kPanel]. `FromMemory`: its weights are not in a cache yet.

struct FloatProducts {
  static constexpr int kTileRows = kRows;
  template <int R, int P, bool FromMemory = false>
  static void add(const Operands& in, float* to) {
    Sums<R, P> sums;
    load_sums<R, P>(to, sums);
    const char* weights = in.weights;
    for (int k = 0; k < in.inputs; k++, weights += kPanel * sizeof(float)) {
      // Several panels of floats are read as fast as memory allows, without being told.
      if (FromMemory && P == 1) fetch_ahead<R, P>(weights, in.panel_stride, kPanel * sizeof(float));
      add_input<R, P>(in, k, sums, [&](int panel, int vector) {
        return Isa::load((const float*)(weights + panel * in.panel_stride) + vector * kLanes);
      });
    }
    store_sums<R, P>(sums, to);
  }

  // The same, and prefetches `bytes` from `next` on: half of them in front of each half of its inputs.
  template <int R>
  static void add_fetching(Operands in, float* to, const char* next, ptrdiff_t bytes) {
    const int inputs = in.inputs, half = (inputs + 1) / 2;
    for (int k = 0; k < inputs; k += half, next += bytes / 2) {
      fetch(next, bytes / 2);
      in.inputs = std::min(half, inputs - k);
      add<R, 1>(in, to);
      in.weights += half * kPanel * sizeof(float);
      in.rows += half * sizeof(float);
    }
  }

  // Adds the products of one input, whose weights `load` returns.
  template <int R, int P, class Load>
  static void add_input(const Operands& in, int k, Sums<R, P>& sums, Load load) {
    F w[P * kVectors];
    for (int v = 0; v < P * kVectors; v++) w[v] = load(v / kVectors, v % kVectors);
    for (int r = 0; r < R; r++) {
      const F x = Isa::set(((const float*)in.rows)[r * in.row_stride / (int)sizeof(float) + k]);
      for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::fma(w[v], x, sums[r][v]);
    }
  }
};

// Weights in bfloat16, by pairs of inputs, and rows in float32.
struct WidenedProducts {
  static constexpr int kTileRows = kRows;
  template <int R, int P, bool FromMemory = false>
  static void add(const Operands& in, float* to) {
    Sums<R, P> sums;
    load_sums<R, P>(to, sums);
    const char* weights = in.weights;
    auto add_input = [&](auto widen, const char* from, int k) {
      FloatProducts::add_input<R, P>(in, k, sums, [&](int panel, int vector) {
        return widen((const uint16_t*)(from + panel * in.panel_stride) + vector * 2 * kLanes);
      });
    };
    for (int k = 0; k < in.inputs; k += 2, weights += 2 * kPanel * sizeof(uint16_t)) {
      if (FromMemory) fetch_ahead<R, P>(weights, in.panel_stride, 2 * kPanel * sizeof(uint16_t));
      add_input([](const uint16_t* pairs) { return Isa::first_of_pairs(pairs); }, weights, k);
      // Loaded again: the registers have no room for both halves, and a compiler that cannot know spills the sums.
      const char* again = weights;
      asm("" : "+r"(again));
      add_input([](const uint16_t* pairs) { return Isa::second_of_pairs(pairs); }, again, k + 1);
    }
    store_sums<R, P>(sums, to);
  }
};

// Weights and rows in bfloat16, by pairs of inputs.
struct HalfProducts {
  static constexpr int kTileRows = kRows;
  template <int R, int P, bool FromMemory = false>
  static void add(const Operands& in, float* to) {
    if constexpr (Isa::kDotsBf16) {
      Sums<R, P> sums;
      load_sums<R, P>(to, sums);
      const char* weights = in.weights;
      for (int k = 0; k < in.inputs; k += 2, weights += 2 * kPanel * sizeof(uint16_t)) {
        if (FromMemory) fetch_ahead<R, P>(weights, in.panel_stride, 2 * kPanel * sizeof(uint16_t));
        I w[P * kVectors];
        for (int v = 0; v < P * kVectors; v++)
          w[v] = Isa::load_int((const int32_t*)(weights + v / kVectors * in.panel_stride) + v % kVectors * kLanes);
        for (int r = 0; r < R; r++) {
          const I x = Isa::spread(in.rows + r * in.row_stride + k * sizeof(uint16_t));
          for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::dot_bf16(sums[r][v], w[v], x);
        }
      }
      store_sums<R, P>(sums, to);
    }
  }
};

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls `body` with the numbers below N, as types: a compiler might not unroll the loop.
template <int N, class Body>
inline void repeat(Body body) {
  [&]<int... number>(std::integer_sequence<int, number...>) {
    (body(Count<number>()), ...);
  }(std::make_integer_sequence<int, N>());
}

// The scales of a group's columns, where they are floats.
struct FloatScales {
  static constexpr ptrdiff_t kScaleBytes = sizeof(float);
  static F scale(const char* scales, int vector) { return Isa::load((const float*)scales + vector * kLanes); }
};

// The same in bfloat16.
struct HalfScales {
  static constexpr ptrdiff_t kScaleBytes = sizeof(uint16_t);
  static F scale(const char* scales, int vector) { return Isa::from_bf16((const uint16_t*)scales + vector * kLanes); }
};

// The integers of kInt8. `Stored`: as packed weights have them, else as Isa::add_products takes them.
template <bool Stored>
struct Bytes : std::conditional_t<Stored, HalfScales, FloatScales> {
  static constexpr bool kMinimums = false, kOutliers = false;
  static constexpr int kUnit = Isa::kUnit;  // inputs whose products a lane adds up at once
  static constexpr int kStep = kUnit;       // inputs of a turn of the loop
  static constexpr int kInputBytes = sizeof(Isa::Input);
  static constexpr int group(const Operands&) { return Isa::kGroup; }
  static constexpr ptrdiff_t bytes(int inputs) { return (ptrdiff_t)kPanel * inputs * (Stored ? 1 : Isa::kWeightBytes); }
  static I load(const char* weights, int k, int vector) {
    const char* from = weights + bytes(k) + bytes(kUnit) / kVectors * vector;
    return Stored ? Isa::load_weights((const int8_t*)from) : Isa::load_int((const int32_t*)from);
  }
  static I add(I sums, I weights, I inputs) { return Isa::add_products(sums, weights, inputs); }
};

// Integers that are multiplied by inputs of 16 bits, in pairs of inputs. `Stored`: they are bytes, else words.
template <bool Stored>
struct Words : FloatScales {
  static constexpr bool kMinimums = false, kOutliers = true;
  static constexpr int kUnit = 2, kStep = kUnit, kInputBytes = sizeof(int16_t);
  static int group(const Operands& in) { return in.group; }
  static constexpr ptrdiff_t bytes(int inputs) { return (ptrdiff_t)kPanel * inputs * (Stored ? 1 : sizeof(int16_t)); }
  static I load(const char* weights, int k, int vector) {
    const char* from = weights + bytes(k) + bytes(kUnit) / kVectors * vector;
    return Stored ? Isa::words((const int8_t*)from) : Isa::load_int((const int32_t*)from);
  }
  static I add(I sums, I weights, I inputs) { return Isa::add_word_products(sums, weights, inputs); }
};

// The same with minimums, which are multiplied by the sum of a group's inputs; rows have that, times an offset.
template <class Form>
struct WithMinimums : Form {
  static constexpr bool kMinimums = true;
};

// Integers by groups of inputs, whose products add up exactly: a panel has the scales of a group before its integers.
template <class Form>
struct IntegerProducts {
  using Integers = Form;
  static constexpr int kTileRows = Isa::kIntegerRows;
  // Before the integers: scales, and maybe minimums.
  static constexpr ptrdiff_t kHeader = kPanel * (Form::kScaleBytes + (Form::kMinimums ? sizeof(float) : 0));
  static constexpr ptrdiff_t group_bytes(int group) { return kHeader + Form::bytes(group); }

  template <int R, int P, bool FromMemory = false>
  static void add(const Operands& in, float* to) {
    add_groups<R, P>(in, to, [&](const char* weights) {
      if (FromMemory) fetch_ahead<R, P>(weights, in.panel_stride, Form::bytes(Form::kStep));
    });
  }

  // The same, and prefetches `bytes` from `next` on: a few lines in front of each turn of the loop.
  template <int R>
  static void add_fetching(const Operands& in, float* to, const char* next, ptrdiff_t bytes) {
    const int turns = round_up(in.inputs, Form::group(in)) / Form::kStep;
    const ptrdiff_t each = (bytes + turns - 1) / turns;
    const char* due = next;
    add_groups<R, 1>(in, to, [&](const char*) {
      for (due += each; next < due; next += kLine) __builtin_prefetch(next);
    });
  }

  // Adds the products group by group. Calls `before_turn` with the weights of each turn before they are multiplied.
  template <int R, int P, class Turn>
  static void add_groups(const Operands& in, float* to, Turn before_turn) {
    const int size = Form::group(in);
    const char *scales = in.weights, *rows = in.rows;
    for (int group = 0; group * size < in.inputs; group++) {
      const char* weights = scales + kHeader;
      I sums[R][P * kVectors];
      for (int r = 0; r < R; r++)
        for (int v = 0; v < P * kVectors; v++) sums[r][v] = Isa::set_int(in.scale(r, group).start);
      for (int k = 0; k < size; k += Form::kStep) {
        before_turn(weights + Form::bytes(k));
        repeat<Form::kStep / Form::kUnit>([&](auto number) {
          add_unit<R, P>(in, weights, rows, k + number.value * Form::kUnit, sums);
        });
      }
      add_group<R, P>(in, scales, group, sums, to);
      scales += group_bytes(size);
      rows += size * Form::kInputBytes;
    }
  }

  // Adds the products of a group, which are whole numbers, to the sums.
  template <int R, int P>
  static void add_group(const Operands& in, const char* scales, int group, const I (&sums)[R][P * kVectors], float* to) {
    for (int v = 0; v < P * kVectors; v++) {
      const char* from = scales + v / kVectors * in.panel_stride;
      const F scale = Form::scale(from, v % kVectors);
      for (int r = 0; r < R; r++) {
        float* sum = to + r * P * kPanel + v * kLanes;
        const GroupScale& of_row = in.scale(r, group);
        const F by = Isa::mul(scale, Isa::set(of_row.scale));
        F total = Isa::fma(Isa::to_float(sums[r][v]), by, Isa::load(sum));
        if (Form::kMinimums) {
          const float inputs = of_row.scale * ((float)of_row.start / -inflight::kNibbleOffset);
          total = Isa::fma(Isa::load((const float*)from + kPanel + v % kVectors * kLanes), Isa::set(inputs), total);
        }
        Isa::store(sum, total);
      }
    }
  }

  // Adds the products of an input that stands out to a row's sums; `panel` are the weights of all inputs.
  template <int P>
  static void add_outlier(Operands panel, const Outlier& outlier, float* to) {
    panel.weights += outlier.group;
    panel.scales = &outlier.scale;
    I sums[1][P * kVectors];
    for (I& sum : sums[0]) sum = Isa::set_int(outlier.scale.start);
    // The place of the group whose input outlier.first is the pair; nothing else of it is read.
    const uintptr_t group = (uintptr_t)outlier.pair - outlier.first * sizeof(int16_t);
    add_unit<1, P>(panel, panel.weights + kHeader, (const char*)group, outlier.first, sums);
    add_group<1, P>(panel, panel.weights, 0, sums, to);
  }

  // Adds the products of the inputs of a lane from input k of `rows` and `weights` on.
  template <int R, int P>
  static void add_unit(const Operands& in, const char* weights, const char* rows, int k, I (&sums)[R][P * kVectors]) {
    I x[R];
    for (int r = 0; r < R; r++) x[r] = Isa::spread(rows + r * in.row_stride + k * Form::kInputBytes);
    for (int v = 0; v < P * kVectors; v++) {
      const I w = Isa::kept(Form::load(weights + v / kVectors * in.panel_stride, k, v % kVectors));
      for (int r = 0; r < R; r++) sums[r][v] = Form::add(sums[r][v], w, x[r]);
    }
  }
};

// Calls `body` with tiles of at most `Most` rows, as even as can be: with the number of rows as a type, and the first.
template <int Most, class Body>
inline void for_tiles(int rows, Body body) {
  const int tiles = (rows + Most - 1) / Most;
  for (int t = 0, row = 0; t < tiles; t++) {
    const int size = (rows - row + tiles - t - 1) / (tiles - t);
    switch (size) {
      case 1: body(Count<1>(), row); break;
      case 2: body(Count<2>(), row); break;
      case 3: body(Count<3>(), row); break;
      case 4: body(Count<4>(), row); break;
      case 5:
        if constexpr (Most >= 5) body(Count<5>(), row);
        break;
      case 6:
        if constexpr (Most >= 6) body(Count<6>(), row);
        break;
      default:
        if constexpr (Most > 6)
          repeat<Most - 6>([&](auto more) {
            if (size == 7 + more.value) body(Count<7 + more.value>(), row);
          });
    }
    row += size;
  }
}

// One call of `multiply`.
struct Product {
  const PackedWeight& weight;
  const InputRows& rows;
  Ending ending;
  float* outputs;
  ptrdiff_t output_stride;

  Operands operands(int row, int panel, int input, int inputs) const {
    const char* first = (const char*)rows.data + rows.stride * row;
    const ptrdiff_t bytes = panel_bytes(weight);
    return {first + input * input_bytes(weight.type), rows.stride,
            (const GroupScale*)(first + scales_offset(weight)) + input / group_of(weight),
            (const char*)weight.panels + bytes * panel + offset_in_panel(weight, input), bytes, inputs, weight.group,
            column_scales(panel, input), (ptrdiff_t)scale_groups(weight) * kPanel,
            weight.type == inflight::kE4m3Groups ? input % weight.group : 0};
  }

  const float* column_scales(int panel, int input) const {
    if (weight.type != inflight::kE4m3Groups) return nullptr;
    return weight.scales + ((ptrdiff_t)panel * scale_groups(weight) + input / weight.group) * kPanel;
  }

  // Whole pairs: few rows and many compute the padding alike, so that their bits are the same.
  int inputs() const { return round_up(weight.inputs, 2); }

  // Writes the outputs of some rows and panels, whose sums are `[rows][panels * kPanel]`.
  void finish(float* sums, int row, int count, int panel, int panels) const {
    for (int r = 0; r < count; r++)
      for (int p = 0; p < panels; p++, sums += kPanel) finish_one(sums, row + r, panel + p);
  }

 private:
  // A vector of sums, of columns from `column` on, as the checkpoint's scales make it.
  F scaled(const float* sums, int row, int column) const {
    if (!weight.scales || weight.type == inflight::kE4m3Groups) return Isa::load(sums);
    const F by = Isa::load(weight.scales + column);
    if (weight.type != inflight::kInt8Sums) return Isa::mul(Isa::load(sums), by);
    const char* inputs = (const char*)rows.data + rows.stride * row;
    const GroupScale& of_row = *(const GroupScale*)(inputs + scales_offset(weight));
    const I whole = Isa::add_int(Isa::load_int((const int32_t*)sums), Isa::set_int(of_row.start));
    return Isa::mul(Isa::to_float(whole), Isa::mul(by, Isa::set(of_row.scale)));
  }

  void finish_one(const float* sums, int row, int panel) const {
    F all[kVectors];
    for (int v = 0; v < kVectors; v++) {
      all[v] = scaled(sums + v * kLanes, row, panel * kPanel + v * kLanes);
      if (weight.bias) all[v] = Isa::add(all[v], Isa::load(weight.bias + panel * kPanel + v * kLanes));
    }
    float* out = outputs + row * output_stride;
    if (ending == inflight::kStore || ending == inflight::kAdd) {
      out += panel * kPanel;
      for (int v = 0; v < kVectors; v++, out += kLanes)
        Isa::store(out, ending == inflight::kAdd ? Isa::add(Isa::load(out), all[v]) : all[v]);
    } else {
      out += panel * (kPanel / 2);
      for (int v = 0; v < kVectors / 2; v++, out += kLanes) {
        const F gate = all[v], up = all[v + kVectors / 2];
        if (ending == inflight::kClamped)
          Isa::store(out, clamped(gate, up, Isa::set(weight.limit), Isa::set(weight.slope)));
        else
          Isa::store(out, Isa::mul(ending == inflight::kSilu ? silu(gate) : gelu(gate), up));
      }
    }
  }
};

template <class Kind>
concept TakesOutliers = Kind::Integers::kOutliers;

// Adds the products of what stands out in some rows to the sums of panels; `in` has all inputs.
template <class Kind, int P>
void add_outliers(const Operands& in, int rows, float* sums) {
  if constexpr (TakesOutliers<Kind>) {
    const char* scales = (const char*)in.scales;
    for (int r = 0; r < rows; r++, scales += in.row_stride, sums += P * kPanel) {
      const Outliers& outliers = ((const Outliers*)scales)[-1];
      for (int i = 0; i < outliers.count; i++) Kind::template add_outlier<P>(in, outliers.of[i], sums);
    }
  }
}

// The same for a block of rows. Inline it would slow the loops around it.
template <class Kind>
[[gnu::noinline]] void add_outliers_of_many(const Operands& in, int rows, float* sums) {
  add_outliers<Kind, 1>(in, rows, sums);
}

// A tile of all inputs.
template <class Kind, int R, int P>
void multiply_tile(const Product& product, int row, int panel) {
  alignas(64) float sums[R * P * kPanel] = {};
  const Operands in = product.operands(row, panel, 0, product.inputs());
  Kind::template add<R, P, true>(in, sums);
  add_outliers<Kind, P>(in, R, sums);
  product.finish(sums, row, R, panel, P);
}

// Few rows have too few sums to keep the multipliers busy, so they take several panels at once.
template <class Kind, int R, int P>
int multiply_few(const Product& product, int first, int last) {
  for (; first + P <= last; first += P) multiply_tile<Kind, R, P>(product, 0, first);
  return first;
}

// Many rows, in blocks that stay in the second cache while the panels go by.
template <class Kind>
void multiply_many(const Product& product, int count, int first, int last) {
  alignas(64) float sums[kBlockRows * kPanel];
  alignas(64) char decoded[(kChunk + kChunk / inflight::kNibbles) * kPanel * sizeof(float)];  // with scales of groups
  constexpr int kInputs = std::is_same_v<typename Kind::Decoded, FloatProducts> ? Isa::kFloatChunk : kChunk;
  const int blocks = (count + kBlockRows - 1) / kBlockRows, inputs = product.inputs();
  for (int block = 0, row = 0; block < blocks; block++) {
    const int size = (count - row + blocks - block - 1) / (blocks - block);
    const int tiles = (size + Kind::Decoded::kTileRows - 1) / Kind::Decoded::kTileRows;
    for (int panel = first; panel < last; panel++) {
      memset(sums, 0, (size_t)size * kPanel * sizeof(float));
      const Operands all = product.operands(row, panel, 0, inputs);
      for (int input = 0; input < inputs; input += kInputs) {
        Operands in = product.operands(row, panel, input, std::min(kInputs, inputs - input));
        // Each tile prefetches a part of the next chunk. If the first one prefetched all of it, its products would wait for
        // memory, which would idle during those of the others.
        const ptrdiff_t part = (offset_in_panel(product.weight, kInputs) / tiles + kLine - 1) / kLine * kLine;
        const char* next = in.weights + offset_in_panel(product.weight, kInputs);
        if (Kind::kDecodes) {
          Kind::decode(in, decoded);
          in.weights = decoded;
        }
        for_tiles<Kind::Decoded::kTileRows>(size, [&](auto some, int at) {
          Operands tile = in;
          tile.rows += at * in.row_stride;
          tile.scales = (const GroupScale*)((const char*)in.scales + at * in.row_stride);
          constexpr int R = decltype(some)::value;
          const char* loaded = std::exchange(next, next + part);
          if constexpr (Kind::kSpreadsFetches)
            if (tiles <= kFewTiles)
              return Kind::Decoded::template add_fetching<R>(tile, sums + at * kPanel, loaded, part);
          fetch(loaded, part);
          Kind::Decoded::template add<R, 1>(tile, sums + at * kPanel);
        });
      }
      add_outliers_of_many<typename Kind::Stored>(all, size, sums);
      product.finish(sums, row, size, panel, 1);
    }
    row += size;
  }
}

template <class Kind>
void multiply_as(const Product& product, int count, int first, int last) {
  using Few = typename Kind::Stored;
  switch (count) {
    case 1: first = multiply_few<Few, 1, Isa::kPanelsOfFewRows>(product, first, last); break;
    case 2: first = multiply_few<Few, 2, 2>(product, first, last); break;
    case 3: first = multiply_few<Few, 3, Few::kTileRows / 3>(product, first, last); break;
  }
  if (count > Kind::kFewRows) return multiply_many<Kind>(product, count, first, last);
  for (; first < last; first++)
    for_tiles<Few::kTileRows>(
        count, [&](auto some, int row) { multiply_tile<Few, decltype(some)::value, 1>(product, row, first); });
}

// What a weight's panels are multiplied as: as they are stored where rows are few, and decoded chunk by chunk where
// they are many.
struct AsFloats {
  using Stored = FloatProducts;
  using Decoded = FloatProducts;
  static constexpr int kFewRows = kRows;
  static constexpr bool kDecodes = false;
  static constexpr bool kSpreadsFetches = false;  // whether few tiles spread their prefetches over their products
  static void decode(const Operands&, char*) {}
};

struct AsHalves : AsFloats {
  using Stored = HalfProducts;
  using Decoded = HalfProducts;
};

struct AsWidened {
  using Stored = WidenedProducts;
  using Decoded = FloatProducts;
  static constexpr int kFewRows = kRows;
  static constexpr bool kDecodes = true, kSpreadsFetches = true;
  static void decode(const Operands& in, char* to) {
    const uint16_t* from = (const uint16_t*)in.weights;
    float* out = (float*)to;
    for (int k = 0; k < in.inputs; k += 2, from += 2 * kPanel, out += 2 * kPanel)
      for (int v = 0; v < kVectors; v++) {
        F first, second;
        Isa::split_pairs(Isa::load_int((const int32_t*)from + v * kLanes), first, second);
        Isa::store(out + v * kLanes, first);
        Isa::store(out + kPanel + v * kLanes, second);
      }
  }
};

template <class Form, class DecodedForm>
struct AsIntegers {
  using Stored = IntegerProducts<Form>;
  using Decoded = IntegerProducts<DecodedForm>;
  static constexpr int kFewRows = kRows;
  static constexpr bool kDecodes = !std::is_same_v<Form, DecodedForm>, kSpreadsFetches = true;
  static void decode(const Operands& in, char* to) {
    const int size = Form::group(in);
    const char* from = in.weights;
    for (int first = 0; first < in.inputs; first += size, from += Stored::group_bytes(size)) {
      for (int v = 0; v < kVectors; v++, to += sizeof(F)) Isa::store((float*)to, Form::scale(from, v));
      if (Form::kMinimums) memcpy(to, from + kPanel * sizeof(float), kPanel * sizeof(float));
      if (Form::kMinimums) to += kPanel * sizeof(float);
      for (int k = 0; k < size; k += Form::kUnit)
        for (int v = 0; v < kVectors; v++, to += sizeof(I))
          Isa::store_int((int32_t*)to, Form::load(from + Stored::kHeader, k, v));
    }
  }
};

}  // namespace
