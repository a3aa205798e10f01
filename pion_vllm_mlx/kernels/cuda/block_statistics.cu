#ifndef BODY
// What a selector keeps of each full block of keys: the mean, or the largest and least values.
// Grid: (blocks, H_kv) blocks of 32 threads. Out: high f32 [H_kv, blocks, D], and with QUEST low of
// the same shape.

#else  // body
const int lane = int(threadIdx.x);
const int block = int(blockIdx.x);
const int head = int(blockIdx.y);
const int size = params[kBlockTokens];
const int first = params[kStart] + block * size;
const auto side = KEYS;
#if PAGED
const Paged layout{table, params[kNumHeads], head, params[kStride]};
#else
const Contiguous layout{Row(head) * params[kStride]};
#endif

const Row at = (Row(head) * params[kNumBlocks] + block) * D;
for (int d = lane * 4; d < D; d += 128) {
  float upper[4];
  side.template expand<4>(side.template fetch<4>(layout.row(first), d), upper);
#if QUEST
  float lower[4] = {upper[0], upper[1], upper[2], upper[3]};
#endif
#pragma unroll 8
  for (int t = first + 1; t < first + size; ++t) {
    float key[4];
    side.template expand<4>(side.template fetch<4>(layout.row(t), d), key);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#if QUEST
      upper[e] = fmaxf(upper[e], key[e]);
      lower[e] = fminf(lower[e], key[e]);
#else
      upper[e] += key[e];
#endif
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#if QUEST
    high[at + d + e] = upper[e];
    low[at + d + e] = lower[e];
#else
    high[at + d + e] = upper[e] / float(size);
#endif
  }
}
#endif  // body
