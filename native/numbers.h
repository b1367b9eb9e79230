// Numbers, in the vectors of an instruction set: `Isa` is defined by the file that includes this one first.
//
// Everything is in an anonymous namespace: the linker would otherwise keep one instruction set's copy for all.
#pragma once

#include <cmath>
#include <limits>

#include "kernels.h"

namespace {

using inflight::AttendTask;
using inflight::Ending;
using inflight::InputRows;
using inflight::kCut;
using inflight::PackedWeight;
using inflight::PackSource;
using inflight::scale_groups;
using inflight::Partial;
using inflight::Type;

using F = Isa::F;
using I = Isa::I;
constexpr int kLanes = Isa::kLanes, kVectors = Isa::kVectors, kRows = Isa::kRows;
constexpr int kPanel = kLanes * kVectors;
constexpr int kMaxRows = 128;  // of a task of attention
constexpr float kNegative = -std::numeric_limits<float>::infinity();

inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

inline float float_of(uint16_t bf16) {
  uint32_t bits = (uint32_t)bf16 << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint16_t bf16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// exp, to about two last digits: the remainder of a power of two by a polynomial of the sixth degree (Cephes' expf).
inline F exp(F x) {
  const F low = Isa::set(-87.0f), high = Isa::set(88.0f);
  F in = Isa::min(high, Isa::max(low, x));
  F n = Isa::round(Isa::mul(in, Isa::set(1.44269504088896341f)));
  F r = Isa::fma(n, Isa::set(-0.693359375f), in);
  r = Isa::fma(n, Isa::set(2.12194440e-4f), r);
  F p = Isa::set(1.9875691500e-4f);
  p = Isa::fma(p, r, Isa::set(1.3981999507e-3f));
  p = Isa::fma(p, r, Isa::set(8.3334519073e-3f));
  p = Isa::fma(p, r, Isa::set(4.1665795894e-2f));
  p = Isa::fma(p, r, Isa::set(1.6666665459e-1f));
  p = Isa::fma(p, r, Isa::set(5.0000001201e-1f));
  p = Isa::fma(p, Isa::mul(r, r), Isa::add(r, Isa::set(1.0f)));
  return Isa::keep_from(x, low, Isa::scale_by_power(p, n));
}

inline F silu(F x) { return Isa::div(x, Isa::add(Isa::set(1.0f), exp(Isa::sub(Isa::zero(), x)))); }

// limit * tanh(x / limit)
inline F squeezed(F x, F limit) {
  const F power = exp(Isa::div(Isa::add(x, x), limit)), one = Isa::set(1.0f);
  return Isa::mul(limit, Isa::sub(one, Isa::div(Isa::set(2.0f), Isa::add(power, one))));
}

// gpt-oss' activation: of a gate and what it is multiplied with, both clamped.
inline F clamped(F gate, F up, F limit, F slope) {
  gate = Isa::min(limit, gate);
  up = Isa::min(limit, Isa::max(Isa::sub(Isa::zero(), limit), up));
  const F sigmoid = Isa::add(Isa::set(1.0f), exp(Isa::sub(Isa::zero(), Isa::mul(gate, slope))));
  return Isa::mul(Isa::div(gate, sigmoid), Isa::add(up, Isa::set(1.0f)));
}

inline F gelu(F x) {  // by tanh: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
  F cube = Isa::mul(Isa::mul(x, x), x);
  F inner = Isa::mul(Isa::set(1.5957691216057308f), Isa::fma(Isa::set(0.044715f), cube, x));
  return Isa::div(x, Isa::add(Isa::set(1.0f), exp(Isa::sub(Isa::zero(), inner))));
}

}  // namespace
