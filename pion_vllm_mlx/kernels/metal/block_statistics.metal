#ifndef BODY
// What a selector keeps of each full block of keys: the mean, or the largest and least values.
// Grid: (blocks, H_kv) threadgroups of 32 threads. Out: high f32 [H_kv, blocks, D], and with QUEST
// low of the same shape.

#else  // body
const int lane = int(thread_index_in_simdgroup);
const int block = int(threadgroup_position_in_grid.x);
const int head = int(threadgroup_position_in_grid.y);
const int size = params[kBlockTokens];
const int first = params[kStart] + block * size;
const auto side = KEYS;
#if PAGED
const Paged layout{table, ulong(params[kNumHeads]), ulong(head), params[kStride]};
#else
const Contiguous layout{ulong(head) * ulong(params[kStride])};
#endif

const ulong at = (ulong(head) * ulong(params[kNumBlocks]) + ulong(block)) * D;
for (int d = lane * 4; d < D; d += 128) {
  float4 upper = side.load(layout.row(first), d);
#if QUEST
  float4 lower = upper;
#endif
  for (int t = first + 1; t < first + size; ++t) {
    const float4 key = side.load(layout.row(t), d);
#if QUEST
    upper = metal::fmax(upper, key);
    lower = metal::fmin(lower, key);
#else
    upper += key;
#endif
  }
#if !QUEST
  upper = upper / float(size);
#endif
  *(device float4*)(high + at + ulong(d)) = upper;
#if QUEST
  *(device float4*)(low + at + ulong(d)) = lower;
#endif
}
#endif  // body
