// Keys and values, rounded to the types that the cache stores.
#pragma once

#include <cmath>

#include "numbers.h"

namespace {

inline uint8_t e4m3_of(float x) {  // to the nearest, ties to even; saturates; NaN stays NaN
  if (x != x) return 0x7f;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::fabs(x) < 448.0f ? std::fabs(x) : 448.0f;
  if (size < 0.015625f) return sign | (uint8_t)std::nearbyint(size * 512.0f);  // below 2^-6: multiples of 2^-9
  uint32_t bits;
  memcpy(&bits, &size, 4);
  bits += 0x7ffff + (bits >> 20 & 1);
  return sign | (uint8_t)((bits >> 20) - (120 << 3));
}

void store(Type type, const float* row, float scale, void* to, uint16_t* scale_to, int dim) {
  if (type == inflight::kFloat32) {
    memcpy(to, row, dim * 4);
  } else if (type == inflight::kBfloat16) {
    for (int k = 0; k < dim; k++) ((uint16_t*)to)[k] = bf16_of(row[k]);
  } else if (type == inflight::kE4m3) {
    for (int k = 0; k < dim; k++) ((uint8_t*)to)[k] = e4m3_of(row[k] / scale);
  } else {
    float largest = 0.0f, nothing = 0.0f;
    for (int k = 0; k < dim; k++) {
      if (std::fabs(row[k]) > largest) largest = std::fabs(row[k]);
      nothing += row[k] * 0.0f;  // NaN where the row has NaN or infinity
    }
    *scale_to = bf16_of(largest / 127.0f + nothing);
    const float unit = float_of(*scale_to);
    for (int k = 0; k < dim; k++) {
      const float steps = unit > 0.0f ? std::nearbyint(row[k] / unit) : 0.0f;
      ((int8_t*)to)[k] = (int8_t)(steps > 127.0f ? 127.0f : steps < -127.0f ? -127.0f : steps);
    }
  }
}

}  // namespace
