// Measures the peak rate of products. Operands stay in registers, so that only the multipliers limit it.
#pragma once

#include <algorithm>
#include <chrono>

#include "numbers.h"

namespace {

constexpr int kRunning = 12;   // sums: so many that none waits for another, in 16 registers
constexpr int kRounds = 4096;  // between two looks at the clock

// Hides from the compiler what a register holds: it must not compute anything outside the loop.
template <class V>
inline void hide(V& x) {
  asm volatile("" : "+v"(x));
}

// Sums, each a variable of its own, because the compiler may keep an array of them in memory.
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
  Running<V, kRunning> sums{};
  for (int round = 0; round < kRounds; round++) sums.turn(add);
  return (double)kRounds * kRunning;
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

// Measures what `inflight_bf16_gain` returns, which takes a millisecond.
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
