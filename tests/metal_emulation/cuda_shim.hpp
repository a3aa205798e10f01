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
inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(unsigned(value.bits) << 16);
}

struct alignas(8) uint2 {
  unsigned x, y;
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
inline int __any_sync(unsigned, int value, PLACE) {
  std::uint64_t values[32];
  emulation::emulation_exchange(file, line, value != 0, values);
  return std::any_of(values, values + 32, [](std::uint64_t one) { return one != 0; });
}
#undef PLACE

#define __device__
#define __shared__ static
