// How many products a processor does at the most: of registers alone, so that nothing but its multipliers limits them.
#pragma once

#include <algorithm>
#include <chrono>

#include "numbers.h"

namespace {

constexpr int kSums = 12;      // so many that none waits for another, in 16 registers
constexpr int kRounds = 4096;  // between two looks at the clock

// Hides from the compiler what a register holds: it must not compute anything once for all.
template <class V>
inline void hide(V& x) {
  asm volatile("" : "+v"(x));
}

// So many sums, each a variable of its own: the compiler may keep an array of them in memory.
template <class V, int kCount>
struct Running {
  V first;
  Running<V, kCount - 1> rest;

  template <class Add>
  void turn(Add& add) {
    first = add(first);
    hide(first);
    rest.turn(add);
  }
};

template <class V>
struct Running<V, 0> {
  template <class Add>
  void turn(Add&) {}
};

// Takes turns of `add`, which adds a product to a sum, and returns their number. The sums begin at zero.
template <class V, class Add>
double take_turns(Add add) {
  Running<V, kSums> sums{};
  for (int round = 0; round < kRounds; round++) sums.turn(add);
  return (double)kRounds * kSums;
}

double float_products() {
  F w = Isa::set(1.0f), x = Isa::set(1e-9f);
  return kLanes * take_turns<F>([&](F sum) {
           hide(w);
           return Isa::fma(w, x, sum);
         });
}

double bf16_products() {
  if constexpr (Isa::kDotsBf16) {
    I w = Isa::set_int(0x3f803f80), x = Isa::set_int(0x30803080);
    return 2 * kLanes * take_turns<F>([&](F sum) {
             hide(w);
             return Isa::dot_bf16(sum, w, x);
           });
  }
  return 0.0;
}

// Multiply-adds of bfloat16 for each of float32 in the same time; 0: there are no such instructions. Takes a millisecond.
double bf16_gain() {
  using Clock = std::chrono::steady_clock;
  if constexpr (!Isa::kDotsBf16) return 0.0;
  double floats = 0.0, halves = 0.0;  // the highest rates: whatever else runs makes them lower
  for (int turn = 0; turn < 20; turn++) {
    const auto begun = Clock::now();
    const double of_floats = float_products();
    const auto between = Clock::now();
    const double of_halves = bf16_products();
    const auto ended = Clock::now();
    floats = std::max(floats, of_floats / std::chrono::duration<double>(between - begun).count());
    halves = std::max(halves, of_halves / std::chrono::duration<double>(ended - between).count());
  }
  return halves / floats;
}

}  // namespace
