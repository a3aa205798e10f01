// How blocks that see parts of the keys end: the last one of a tile merges the parts. Part of a
// kernel's header, behind warps.cu.

// Whether this block is the last of `blocks` to come here; what those before wrote can be read
// then. The counter is 0 before and after.
__device__ inline bool comes_last(const int* counter, int blocks, int* told, int index) {
  __threadfence();
  __syncthreads();
  if (index == 0) {
    unsigned* count = reinterpret_cast<unsigned*>(const_cast<int*>(counter));
    *told = atomicInc(count, unsigned(blocks) - 1u) == unsigned(blocks) - 1u;
    __threadfence();
  }
  __syncthreads();
  return *told != 0;
}

// One softmax from the parts of a tile's rows: parts f32 [rows, splits, D + 4], the dimensions,
// then the lse in units of log 2. `weights` in shared memory has room for R * splits.
template <int THREADS, int R, int D, typename Own>
__device__ inline void merge_parts(const float* parts, float* weights, Own own, int splits,
                                   float* out, float* lse, int index) {
  constexpr int PART = D + 4;
  for (int i = index; i < R * splits; i += THREADS) {
    const int row = own.row(i / splits);
    const float* part = parts + (Row(row < 0 ? 0 : row) * splits + i % splits) * PART;
    weights[i] = row < 0 ? 0.0f : __ldcg(part + D);
  }
  __syncthreads();
  for (int i = index; i < R * (D / 4); i += THREADS) {
    const int r = i / (D / 4);
    const int d = i % (D / 4) * 4;
    const int row = own.row(r);
    if (row < 0) continue;
    const float* mine = weights + r * splits;
    const float* part = parts + Row(row) * splits * PART + d;
    float top = kLowest;
    for (int s = 0; s < splits; ++s) top = fmaxf(top, mine[s]);
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float sum = 0.0f;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) {
      float four[4];
      Loader<float, 4>::expand(__ldcg(reinterpret_cast<const float4*>(part + s * PART)), four);
      const float weight = exp2f(mine[s] - top);
      sum += weight;
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] += weight * four[e];
    }
    store4(out + Row(row) * D + d, acc, sum);
    if (d == 0) lse[row] = lse_of(top, sum);
  }
}

// Joins what the warps found, as one of `splits` parts; the last block of a tile merges the parts.
template <int WARPS, int R, int D, int STRIDE, typename Own>
__device__ inline void finish_part(float* acc, const float* tops, const float* sums, Own own,
                                   int split, int splits, float* parts, const int* counter,
                                   float* out, float* lse, int* told, int index) {
  join_rows<WARPS, R, D, STRIDE>(acc, tops, sums, own, index, [=](int row, int d, Joined all) {
    float* part = parts + (Row(row) * splits + split) * (D + 4);
    store4(part + d, all.values, all.sum);
    if (d == 0) part[D] = all.sum == 0.0f ? -infinity() : all.top + log2f(all.sum);
  });
  if (comes_last(counter, splits, told, index)) {
    merge_parts<WARPS * 32, R, D>(parts, acc, own, splits, out, lse, index);
  }
}
