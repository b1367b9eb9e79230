// What a processor can do at the most: products by the kernels' own instructions, and reads of memory.
//
// Compiled with the vectors of an instruction set included first, as the kernels are; `probe.py` builds and calls it.
#include <chrono>
#include <thread>
#include <vector>

#include "tiles.h"
#include "turns.h"

namespace {

constexpr int kStreams = 4;    // that a thread reads at once, each fetched ahead: one alone leaves bandwidth unused
constexpr int64_t kPiece = 512, kDistance = 1024;

// By a row of tiles, whose sums do not wait for each other.
template <class Hardware>
double tile_products() {
  Hardware::set(16, 64);
  for (int round = 0; round < kRounds; round++) {
    Hardware::template add<false, 0, Hardware::kWeights>();
    Hardware::template add<false, 1, Hardware::kWeights>();
    Hardware::template add<false, 2, Hardware::kWeights>();
    Hardware::template add<false, 3, Hardware::kWeights>();
  }
  Hardware::release();
  return 4.0 * kRounds * 16 * 16 * 32;
}

template <class Hardware>
double half_products() {
  if constexpr (Isa::kTiles) return tile_products<Hardware>();
  return bf16_products();
}

double integer_products() {
  I w = Isa::set_int(0x00010001), x = Isa::set_int(0x00010001);
  return kLanes * Isa::kUnit * take_turns<I>([&](I sum) {
           hide(w);
           return Isa::add_products(sum, w, x);
         });
}

// The units per second of all threads; `work(thread)` does a piece and returns its units.
template <class Work>
double rate(int threads, double seconds, Work work) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> rates(threads);
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; thread++)
    all.emplace_back([&, thread] {
      const auto begun = Clock::now();
      double units = 0.0, spent = 0.0;
      while (spent < seconds) {
        units += work(thread);
        spent = std::chrono::duration<double>(Clock::now() - begun).count();
      }
      rates[thread] = units / spent;
    });
  double sum = 0.0;
  for (int thread = 0; thread < threads; thread++) {
    all[thread].join();
    sum += rates[thread];
  }
  return sum;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Multiply-adds per second of float32 (type 0), bfloat16 (1) or integers (2); 0: there are no such instructions.
double probe_products(int type, int threads, double seconds) {
  if (type == inflight::kBfloat16 && !Isa::kDotsBf16) return 0.0;
  double (*const work[])() = {float_products, half_products<Tiles>, integer_products};
  return rate(threads, seconds, [&](int) { return work[type](); });
}

// Bytes per second, of memory that the threads read again and again, each a part of its own.
double probe_reads(const char* memory, int64_t bytes, int threads, double seconds) {
  const int64_t part = bytes / threads / kStreams / kPiece * kPiece;
  return rate(threads, seconds, [&](int thread) {
    for (int64_t at = 0; at < part; at += kPiece)
      for (int stream = 0; stream < kStreams; stream++) {
        const char* from = memory + (thread * kStreams + stream) * part + at;
        for (int64_t line = 0; line < kPiece; line += kLine) _mm_prefetch(from + line + kDistance, _MM_HINT_T0);
        for (int64_t vector = 0; vector < kPiece; vector += sizeof(F)) {
          F x = Isa::load((const float*)(from + vector));
          hide(x);
        }
      }
    return (double)part * kStreams;
  });
}

// The bytes of a packed weight.
int64_t probe_packed_bytes(int type, int inputs, int outputs) {
  inflight::PackedWeight weight;
  weight.type = (Type)type;
  weight.inputs = inputs;
  weight.columns = round_up(outputs, kPanel);
  return packed_bytes(weight);
}
}
