// The part of CUDA C++ that the kernels use, in C++17.
#pragma once
#include "runtime.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

template <typename To, typename From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

struct __half {
  std::uint16_t bits;
};
struct __nv_bfloat16 {
  std::uint16_t bits;
};
inline float __half2float(__half value) { return float(same_bits<_Float16>(value.bits)); }
inline __half __ushort_as_half(unsigned short bits) { return __half{bits}; }
inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(unsigned(value.bits) << 16);
}

inline __half __float2half_rn(float value) { return {same_bits<std::uint16_t>(_Float16(value))}; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const unsigned word = same_bits<unsigned>(value);
  if (std::isnan(value)) return {0x7fff};
  return {std::uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct Dim {
  unsigned x, y, z;
};

template <typename T>
inline T __ldg(const T* p) {
  return *p;
}
template <typename T>
inline T __ldcg(const T* p) {
  return *p;
}
using std::min;

// Not a kernel's accesses, and so not watched.
#define UNWATCHED __attribute__((no_sanitize_thread)) inline
UNWATCHED Dim thread_place() {
  const unsigned* at = emulation::emulation_thread()->position;
  return Dim{at[0], at[1], at[2]};
}
UNWATCHED Dim block_place() {
  const unsigned* at = emulation::emulation_thread()->group;
  return Dim{at[0], at[1], at[2]};
}
UNWATCHED unsigned this_lane() { return emulation::emulation_thread()->index % 32; }
// Threadgroups run one after the other: what one wrote the next sees.
inline void __threadfence() { emulation::emulation_fence(); }
inline unsigned atomicInc(unsigned* at, unsigned most) {
  return emulation::emulation_count(at, most);
}
#define threadIdx (thread_place())
#define blockIdx (block_place())

// The caller's place, taken where the default argument is evaluated.
#define PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(PLACE) { emulation::emulation_barrier(file, line); }
inline void __syncwarp(PLACE) { emulation::emulation_simd_barrier(file, line); }

template <typename T>
inline T __shfl_sync(unsigned, T value, int lane, PLACE) {
  std::uint64_t values[32];
  emulation::emulation_exchange(file, line, same_bits<unsigned>(value), values);
  return same_bits<T>(unsigned(values[lane & 31]));
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask, PLACE) {
  std::uint64_t values[32];
  emulation::emulation_exchange(file, line, same_bits<unsigned>(value), values);
  return same_bits<T>(unsigned(values[(this_lane() ^ mask) & 31]));
}
inline unsigned __reduce_max_sync(unsigned, unsigned value, PLACE) {
  std::uint64_t values[32];
  emulation::emulation_exchange(file, line, value, values);
  return unsigned(*std::max_element(values, values + 32));
}
inline int __reduce_min_sync(unsigned, int value, PLACE) {
  std::uint64_t values[32];
  emulation::emulation_exchange(file, line, std::uint64_t(value), values);
  return int(*std::min_element(values, values + 32));  // of what is not negative
}
inline int __any_sync(unsigned, int value, PLACE) {
  std::uint64_t values[32];
  emulation::emulation_exchange(file, line, value != 0, values);
  return std::any_of(values, values + 32, [](std::uint64_t one) { return one != 0; });
}

inline float widened(std::uint16_t bits, const __half*) { return __half2float({bits}); }
inline float widened(std::uint16_t bits, const __nv_bfloat16*) { return __bfloat162float({bits}); }

// mma.m16n8k16: lane 4 g + t holds of a rows g and g + 8 and columns 2 t, 2 t + 1 and those + 8, of
// b the same columns as rows and column g, of c rows g and g + 8 and columns 2 t, 2 t + 1.
template <typename T>
UNWATCHED void emulated_mma(float* c, const unsigned* a, unsigned b0, unsigned b1, const T* kind,
                            PLACE) {
  std::uint64_t words[3][32];
  const std::uint64_t mine[3] = {a[0] | std::uint64_t(a[1]) << 32, a[2] | std::uint64_t(a[3]) << 32,
                                 b0 | std::uint64_t(b1) << 32};
  for (int i = 0; i < 3; ++i) emulation::emulation_exchange(file, line, mine[i], words[i]);
  const auto half = [&](std::uint64_t word, int which) {
    return widened(std::uint16_t(word >> (16 * which)), kind);
  };
  for (int e = 0; e < 4; ++e) {
    const int row = int(this_lane()) / 4 + e / 2 * 8;
    const int column = int(this_lane()) % 4 * 2 + e % 2;
    float sum = c[e];
    for (int k = 0; k < 16; ++k) {
      const int pair = k % 8 / 2;
      const float left = half(words[k / 8][row % 8 * 4 + pair], row / 8 * 2 + k % 2);
      sum += left * half(words[2][column * 4 + pair], k / 8 * 2 + k % 2);
    }
    c[e] = sum;
  }
}
#undef PLACE

#define __device__
#define __shared__ static
