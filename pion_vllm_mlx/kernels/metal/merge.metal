#ifndef BODY
// One softmax from its parts: part_out f32 [rows, splits, D], part_lse f32 [rows, splits].
// Grid: (rows) threadgroups of D threads. Out: out f32 [rows, D], lse f32 [rows].

#else  // body
const int lane = int(thread_index_in_simdgroup);
const int row = int(threadgroup_position_in_grid.x);
const int d = int(simdgroup_index_in_threadgroup) * 32 + lane;
const int splits = params[kSplits];
const ulong first = ulong(row) * ulong(splits);

float top = kLowest;
for (int s = lane; s < splits; s += 32) top = fmax(top, part_lse[first + ulong(s)]);
for (int hop = 1; hop < 32; hop *= 2) top = fmax(top, simd_shuffle_xor(top, ushort(hop)));

float sum = 0.0f;
float acc = 0.0f;
for (int base = 0; base < splits; base += 32) {
  const int s = base + lane;
  const float mine = s < splits ? metal::exp(part_lse[first + ulong(s)] - top) : 0.0f;
  for (int j = 0; j < min(32, splits - base); ++j) {
    const float weight = simd_shuffle(mine, ushort(j));
    sum += weight;
    acc += weight * part_out[(first + ulong(base + j)) * D + ulong(d)];
  }
}
out[ulong(row) * D + ulong(d)] = sum == 0.0f ? 0.0f : acc / sum;
if (d == 0) lse[row] = sum == 0.0f ? -INFINITY : top + metal::log(sum);
#endif  // body
