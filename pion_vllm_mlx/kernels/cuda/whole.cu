// How a block that sees all keys ends. Part of a kernel's header, behind warps.cu.

// Joins what the warps found, as the only part of the keys.
template <int WARPS, int R, int D, int STRIDE, typename Own>
__device__ inline void finish_whole(const float* acc, const float* tops, const float* sums,
                                    Own own, float* out, float* lse, int index) {
  __syncthreads();
  for (int i = index; i < R * (D / 4); i += WARPS * 32) {
    const int r = i / (D / 4);
    const int d = i % (D / 4) * 4;
    const int row = own.row(r);
    if (row < 0) continue;
    const Joined all = join_warps<WARPS, R, STRIDE>(acc, tops, sums, r, d);
    store4(out + Row(row) * D + d, all.values, all.sum);
    if (d == 0) lse[row] = all.sum == 0.0f ? -infinity() : (all.top + log2f(all.sum)) * kLn2;
  }
}
