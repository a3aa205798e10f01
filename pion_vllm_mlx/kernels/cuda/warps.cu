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

// Joins what the warps found of the rows of a tile: store(row, d, joined) for every four of its
// dimensions.
template <int WARPS, int R, int D, int STRIDE, typename Own, typename Store>
__device__ inline void join_rows(const float* acc, const float* tops, const float* sums, Own own,
                                 int index, Store store) {
  __syncthreads();
  for (int i = index; i < R * (D / 4); i += WARPS * 32) {
    const int r = i / (D / 4);
    const int d = i % (D / 4) * 4;
    const int row = own.row(r);
    if (row >= 0) store(row, d, join_warps<WARPS, R, STRIDE>(acc, tops, sums, r, d));
  }
}

// The lse of weights that add up to `sum`, by a greatest score in units of log 2.
__device__ inline float lse_of(float top, float sum) {
  return sum == 0.0f ? -infinity() : (top + log2f(sum)) * kLn2;
}
