// How the warps of a block come to one softmax. Part of a kernel's header, behind rows.cu.

// One softmax of what the warps of a block found of a row: the sums of four dimensions and of the
// weights, by a greatest score. acc [WARPS, R, STRIDE], tops and sums [WARPS, R] in shared memory.
struct Joined {
  float values[4];
  float top;
  float sum;
};

template <int WARPS, int R, int STRIDE>
__device__ inline Joined join_warps(const float* acc, const float* tops, const float* sums, int r,
                                    int d) {
  Joined all{{0.0f, 0.0f, 0.0f, 0.0f}, kLowest, 0.0f};
#pragma unroll
  for (int w = 0; w < WARPS; ++w) all.top = fmaxf(all.top, tops[w * R + r]);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float weight = exp2f(tops[w * R + r] - all.top);
    all.sum += sums[w * R + r] * weight;
    float four[4];
    Loader<float, 4>::expand(*reinterpret_cast<const float4*>(acc + (w * R + r) * STRIDE + d),
                             four);
#pragma unroll
    for (int e = 0; e < 4; ++e) all.values[e] += four[e] * weight;
  }
  return all;
}

__device__ inline void store4(float* p, const float* values, float divisor) {
  const bool none = divisor == 0.0f;
  *reinterpret_cast<float4*>(p) =
      float4{none ? 0.0f : values[0] / divisor, none ? 0.0f : values[1] / divisor,
             none ? 0.0f : values[2] / divisor, none ? 0.0f : values[3] / divisor};
}
