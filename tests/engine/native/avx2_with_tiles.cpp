// The kernels for AMX, without a processor that has it: AVX2's vectors in panels as wide as AVX-512's, with products of
// bfloat16 and of bytes and with tiles that plain C++ computes as Intel documents them. `test_native_tiles.py` builds the
// library with this file in place of `avx2.cpp`.
//
// A processor raises an exception where tiles are used that were not configured, or whose sizes do not fit: so does this.
// What it multiplied is written to the file that TILES_USED names when the process ends.
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#define INFLIGHT_TILES
#define Isa Avx2
#include "isa_avx2.h"
#undef Isa

namespace {

struct Isa : Avx2 {
  static constexpr int kVectors = 8;
  static constexpr bool kDotsBf16 = true, kTiles = true;
  using Input = int8_t;
  static constexpr int kGroup = 32, kUnit = 4, kWeightBytes = 1, kOffset = 128;
  static constexpr int kBlockRows = 48, kPanelsOfFewRows = 2;
  static constexpr float kLargestInput = 127.0f;

  static float first_half(int32_t pair) { return flushed(as_float((uint32_t)pair << 16)); }
  static float second_half(int32_t pair) { return flushed(as_float((uint32_t)pair & 0xffff0000u)); }
  // These instructions take subnormal numbers as zeros, and make none.
  static float flushed(float x) { return std::fabs(x) < FLT_MIN ? 0.0f : x; }
  static float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }

  static F dot_bf16(F sums, I weights, I inputs) {
    float sum[8];
    int32_t a[8], b[8];
    store(sum, sums);
    store_int(a, weights);
    store_int(b, inputs);
    for (int i = 0; i < 8; i++) {
      sum[i] = flushed(std::fma(second_half(a[i]), second_half(b[i]), flushed(sum[i])));
      sum[i] = flushed(std::fma(first_half(a[i]), first_half(b[i]), sum[i]));
    }
    return load(sum);
  }
  static void interleave(const uint16_t* one, const uint16_t* other, uint16_t* to) {
    for (int k = 0; k < kLanes * kVectors; k++) {
      to[2 * k] = one[k];
      to[2 * k + 1] = other[k];
    }
  }
  static I load_weights(const int8_t* p) { return load_int((const int32_t*)p); }
  static I add_products(I sums, I weights, I inputs) {
    int32_t sum[8];
    uint8_t a[32];
    int8_t b[32];
    store_int(sum, sums);
    store_int((int32_t*)a, weights);
    store_int((int32_t*)b, inputs);
    for (int i = 0; i < 32; i++) sum[i / 4] += a[i] * b[i];
    return load_int(sum);
  }
  using Avx2::to_integers;
  static void to_integers(int8_t* p, F steps) {
    float from[8];
    store(from, steps);
    for (int i = 0; i < 8; i++) p[i] = (int8_t)std::nearbyint(from[i]);
  }
};

struct Used {
  std::atomic<long> halves{0}, bytes{0};
  ~Used() {
    const char* name = getenv("TILES_USED");
    FILE* file = name ? fopen(name, "w") : nullptr;
    if (!file) return;
    fprintf(file, "%ld %ld\n", halves.load(), bytes.load());
    fclose(file);
  }
} used;

struct Tiles {
  static constexpr int kSums = 4, kInputs = 4, kWeights = 5, kCount = 7;

  static void set(int rows, int bytes) {
    if (rows < 1 || rows > 16 || bytes < 4 || bytes > 64 || bytes % 4) fault("a size");
    configured.now = true;
    for (Tile& tile : tiles) tile = {rows, 64, {}};
    tiles[kInputs].bytes = bytes;
    tiles[kWeights].rows = tiles[kWeights + 1].rows = bytes / 4;
  }
  static void release() { configured.now = false; }

  template <int tile>
  static void load(const void* from, ptrdiff_t stride) {
    Tile& to = at(tile);
    memset(to.data, 0, sizeof to.data);
    for (int row = 0; row < to.rows; row++) memcpy(to.data[row], (const char*)from + row * stride, to.bytes);
  }
  template <int tile>
  static void store(void* to, ptrdiff_t stride) {
    const Tile& from = at(tile);
    for (int row = 0; row < from.rows; row++) memcpy((char*)to + row * stride, from.data[row], from.bytes);
  }
  template <bool bytes, int sums, int weights>
  static void add() {
    Tile &to = at(sums), &a = at(kInputs), &b = at(weights);
    if (to.rows != a.rows || to.bytes != b.bytes || a.bytes / 4 != b.rows) fault("the sizes of tiles that are multiplied");
    (bytes ? used.bytes : used.halves)++;
    for (int row = 0; row < a.rows; row++)
      for (int column = 0; column < b.bytes / 4; column++)
        bytes ? add_bytes(a, b, row, column, to) : add_halves(a, b, row, column, to);
  }

 private:
  struct Tile {
    int rows, bytes;
    int32_t data[16][16];
  };

  static void add_halves(const Tile& a, const Tile& b, int row, int column, Tile& to) {
    float first = 0.0f, second = 0.0f, sum;
    for (int k = 0; k < b.rows; k++) {
      const int32_t x = a.data[row][k], y = b.data[k][column];
      first = Isa::flushed(std::fma(Isa::first_half(x), Isa::first_half(y), first));
      second = Isa::flushed(std::fma(Isa::second_half(x), Isa::second_half(y), second));
    }
    memcpy(&sum, &to.data[row][column], 4);
    sum = Isa::flushed(Isa::flushed(sum) + Isa::flushed(first + second));
    memcpy(&to.data[row][column], &sum, 4);
  }
  static void add_bytes(const Tile& a, const Tile& b, int row, int column, Tile& to) {
    for (int k = 0; k < b.rows; k++)
      for (int i = 0; i < 4; i++)
        to.data[row][column] += (int8_t)(a.data[row][k] >> 8 * i) * (uint8_t)(b.data[k][column] >> 8 * i);
  }

  [[noreturn]] static void fault(const char* what) {
    fprintf(stderr, "a fault of tiles: %s\n", what);
    abort();
  }
  static Tile& at(int tile) {
    if (!configured.now) fault("they are not configured");
    return tiles[tile];
  }

  // A thread that ends must have given its tiles back.
  struct Configured {
    bool now = false;
    ~Configured() {
      if (now) fault("they were not released");
    }
  };

  static thread_local Configured configured;
  static thread_local Tile tiles[kCount];
};

thread_local Tiles::Configured Tiles::configured;
thread_local Tiles::Tile Tiles::tiles[Tiles::kCount];

}  // namespace

#include "table.h"

const inflight::Kernels* inflight::avx2_kernels() { return &kTable; }
