#ifndef BODY
// One softmax from its parts: part_out f32 [rows, splits, D], part_lse f32 [rows, splits].
// Grid: (rows) blocks of D threads. Out: out f32 [rows, D], lse f32 [rows].

#else  // body
const int lane = int(threadIdx.x % 32);
const int row = int(blockIdx.x);
const int d = int(threadIdx.x);
const int splits = params[kSplits];
const Row first = Row(row) * splits;

float top = kLowest;
for (int s = lane; s < splits; s += 32) top = fmaxf(top, part_lse[first + s]);
top = warp_max(top);

float sum = 0.0f;
float acc = 0.0f;
for (int base = 0; base < splits; base += 32) {
  const float mine = base + lane < splits ? expf(part_lse[first + base + lane] - top) : 0.0f;
  // Past the last part the weight is 0 and the address that of the last.
#pragma unroll 16
  for (int j = 0; j < 32; ++j) {
    const int s = ::min(base + j, splits - 1);
    const float weight = __shfl_sync(kAll, mine, j);
    sum += weight;
    acc += weight * __ldg(part_out + (first + s) * D + d);
  }
}
out[Row(row) * D + d] = sum == 0.0f ? 0.0f : acc / sum;
if (d == 0) lse[row] = sum == 0.0f ? -infinity() : top + logf(sum);
#endif  // body
