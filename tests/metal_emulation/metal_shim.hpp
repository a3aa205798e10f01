// The part of the Metal shading language that the kernels use, in C++17.
#pragma once
#include "runtime.hpp"

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;
using half = _Float16;
using float16_t = half;

template <typename To, typename From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// bfloat: the upper half of a float, rounded to nearest even.
struct bfloat16_t {
  std::uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float value) {
    const uint word = as_type<uint>(value);
    bits = std::isnan(value) ? 0x7fc0 : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  }
  operator float() const { return as_type<float>(uint(bits) << 16); }
};

namespace metal {

template <typename T, int N>
struct vec;
template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  vec(T v) : x(v), y(v) {}
  vec(T a, T b) : x(a), y(b) {}
  template <typename U>
  explicit vec(const vec<U, 2>& o) : x(T(o.x)), y(T(o.y)) {}
};
template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  vec(T a, T b, T c) : x(a), y(b), z(c) {}
};
template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  vec(T v) : x(v), y(v), z(v), w(v) {}
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  template <typename U>
  explicit vec(const vec<U, 4>& o) : x(T(o.x)), y(T(o.y)), z(T(o.z)), w(T(o.w)) {}
};

#define VECTOR_OPERATOR(op)                                                        \
  template <typename T>                                                            \
  inline vec<T, 4> operator op(const vec<T, 4>& a, const vec<T, 4>& b) {           \
    return {a.x op b.x, a.y op b.y, a.z op b.z, a.w op b.w};                       \
  }                                                                                \
  template <typename T>                                                            \
  inline vec<T, 4> operator op(const vec<T, 4>& a, T b) {                          \
    return {a.x op b, a.y op b, a.z op b, a.w op b};                               \
  }                                                                                \
  template <typename T>                                                            \
  inline vec<T, 4> operator op(T a, const vec<T, 4>& b) {                          \
    return {a op b.x, a op b.y, a op b.z, a op b.w};                               \
  }                                                                                \
  template <typename T, typename U>                                                \
  inline vec<T, 4>& operator op##=(vec<T, 4>& a, const U& b) {                     \
    return a = a op b;                                                             \
  }
VECTOR_OPERATOR(+)
VECTOR_OPERATOR(-)
VECTOR_OPERATOR(*)
VECTOR_OPERATOR(/)
#undef VECTOR_OPERATOR

inline float exp2(float x) { return ::exp2f(x); }
inline float exp(float x) { return ::expf(x); }
inline float log2(float x) { return ::log2f(x); }
inline float log(float x) { return ::logf(x); }
inline float rsqrt(float x) { return 1.0f / ::sqrtf(x); }
inline float sqrt(float x) { return ::sqrtf(x); }
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
inline bool isfinite(float x) { return std::isfinite(x); }
inline bool isnan(float x) { return std::isnan(x); }
// Of a number and a NaN fmax and fmin give the number; of max and min nothing is promised.
inline float fmax(float a, float b) { return ::fmaxf(a, b); }
inline float fmin(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return a < b ? b : a; }
inline float min(float a, float b) { return b < a ? b : a; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline uint min(uint a, uint b) { return a < b ? a : b; }
inline vec<float, 4> fmax(const vec<float, 4>& a, const vec<float, 4>& b) {
  return {fmax(a.x, b.x), fmax(a.y, b.y), fmax(a.z, b.z), fmax(a.w, b.w)};
}
inline vec<float, 4> fmin(const vec<float, 4>& a, const vec<float, 4>& b) {
  return {fmin(a.x, b.x), fmin(a.y, b.y), fmin(a.z, b.z), fmin(a.w, b.w)};
}
inline float dot(const vec<float, 4>& a, const vec<float, 4>& b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

// The caller's place, taken where the default argument is evaluated.
#define PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void threadgroup_barrier(mem_flags flags, PLACE) {
  // Without the flag the barrier orders no threadgroup memory; no kernel here wants that.
  static_cast<void>(flags);
  emulation::emulation_barrier(file, line);
}
inline void simdgroup_barrier(mem_flags, PLACE) { emulation::emulation_simd_barrier(file, line); }

template <typename T>
struct Lanes {
  T at[32];
  Lanes(T mine, const char* file, int line) {
    static_assert(sizeof(T) == 4, "lanes exchange words");
    std::uint64_t values[32];
    emulation::emulation_exchange(file, line, as_type<uint>(mine), values);
    for (int i = 0; i < 32; ++i) at[i] = as_type<T>(uint(values[i]));
  }
};
// Not a kernel's access, and so not watched.
__attribute__((no_sanitize_thread)) inline unsigned this_lane() {
  return emulation::emulation_thread()->index % 32;
}

template <typename T>
inline T simd_shuffle_xor(T value, ushort mask, PLACE) {
  return Lanes<T>(value, file, line).at[(this_lane() ^ mask) & 31];
}
template <typename T>
inline T simd_shuffle(T value, ushort lane, PLACE) {
  return Lanes<T>(value, file, line).at[lane & 31];
}
template <typename T>
inline T simd_shuffle_down(T value, ushort delta, PLACE) {
  const unsigned from = this_lane() + delta;
  return Lanes<T>(value, file, line).at[from < 32 ? from : this_lane()];
}
template <typename T>
inline T simd_broadcast_first(T value, PLACE) {
  return Lanes<T>(value, file, line).at[0];
}
template <typename T>
inline T simd_sum(T value, PLACE) {
  const Lanes<T> lanes(value, file, line);
  T sums[32];
  for (int i = 0; i < 32; ++i) sums[i] = lanes.at[i];
  for (int width = 16; width; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}
template <typename T>
inline T simd_max(T value, PLACE) {
  const Lanes<T> lanes(value, file, line);
  T best = lanes.at[0];
  for (int i = 1; i < 32; ++i) best = max(best, lanes.at[i]);
  return best;
}
template <typename T>
inline T simd_min(T value, PLACE) {
  const Lanes<T> lanes(value, file, line);
  T best = lanes.at[0];
  for (int i = 1; i < 32; ++i) best = min(best, lanes.at[i]);
  return best;
}
#undef PLACE

}  // namespace metal

using namespace metal;
using float2 = vec<float, 2>;
using float4 = vec<float, 4>;
using half2 = vec<half, 2>;
using half4 = vec<half, 4>;
using int4 = vec<int, 4>;
using uint2 = vec<uint, 2>;
using uint3 = vec<uint, 3>;
using uint4 = vec<uint, 4>;

#define device
#define constant
#define thread
#define threadgroup static
