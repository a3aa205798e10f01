// How a block that sees all keys ends. Part of a kernel's header, behind warps.cu.

// Joins what the warps found, as the only part of the keys.
template <int WARPS, int R, int D, int STRIDE, typename Own>
__device__ inline void finish_whole(const float* acc, const float* tops, const float* sums,
                                    Own own, float* out, float* lse, int index) {
  join_rows<WARPS, R, D, STRIDE>(acc, tops, sums, own, index, [=](int row, int d, Joined all) {
    store4(out + Row(row) * D + d, all.values, all.sum);
    if (d == 0) lse[row] = lse_of(all.top, all.sum);
  });
}
