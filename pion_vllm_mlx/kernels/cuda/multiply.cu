// Values of 16 bits and tensor cores: what is not exact in 16 bits is a sum of two such values.
// Part of a kernel's header, behind rows.cu.

template <typename A, typename B>
struct Same {
  static constexpr bool value = false;
};
template <typename A>
struct Same<A, A> {
  static constexpr bool value = true;
};

__device__ inline unsigned bits_of(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }
__device__ inline unsigned bits_of(__half value) { return __half_as_ushort(value); }
__device__ inline __nv_bfloat16 narrow(float value, const __nv_bfloat16*) {
  return __float2bfloat16_rn(value);
}
__device__ inline __half narrow(float value, const __half*) { return __float2half_rn(value); }

// Two values as a word of two T, and what the word leaves of them.
template <typename T>
__device__ inline unsigned pack(float& first, float& second) {
  const T* kind = nullptr;
  const T low = narrow(first, kind);
  const T high = narrow(second, kind);
  first -= as_float(low);
  second -= as_float(high);
  return bits_of(low) | bits_of(high) << 16;
}

// c[16 x 8] += a[16 x 16] * b[16 x 8], spread over the warp as mma.m16n8k16 has it; TYPE in its name.
#ifdef __CUDACC__
#define MULTIPLY(TYPE)                                                                     \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "              \
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#else
#define MULTIPLY(TYPE) emulated_mma(c, a, b0, b1, kind)
#endif
__device__ inline void multiply(float* c, const unsigned* a, unsigned b0, unsigned b1,
                                const __nv_bfloat16* kind) {
  MULTIPLY("bf16");
}
__device__ inline void multiply(float* c, const unsigned* a, unsigned b0, unsigned b1,
                                const __half* kind) {
  MULTIPLY("f16");
}
#undef MULTIPLY
