// Scores of blocks, averaged over the query heads; those by the mean scaled by 1 / sqrt(D).
//
// A score is linear in q for the mean, and in its positive and its negative values for Quest's
// bound: the query heads of a KV head are added up first. A head whose q is not finite counts
// nothing. members i32 [H_kv + 1 + H_q]: for each KV head where its query heads begin among those
// that follow, the end last. high, low f32 [H_kv, blocks, D].
//
// Grid: (blocks / 4) blocks of four warps, each of which scores one block of keys.
// Out: scores f32 [blocks].

//// body
constexpr int COUNT = D / 32;
const int lane = int(threadIdx.x % 32);
const int block = int(blockIdx.x) * 4 + int(threadIdx.x / 32);
const int num_blocks = params[kNumBlocks];
if (block < num_blocks) {
  float score = 0.0f;
  for (int head = 0; head < params[kNumHeads]; ++head) {
    const Row at = (Row(head) * num_blocks + block) * D + lane;
    float most[COUNT];
    float least[COUNT];
    float positive[COUNT];
    float negative[COUNT];
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      most[c] = __ldg(high + at + c * 32);
#if QUEST
      least[c] = __ldg(low + at + c * 32);
#else
      least[c] = most[c];
#endif
      positive[c] = negative[c] = 0.0f;
    }
    const int end = members[head + 1];
#pragma unroll 4
    for (int i = members[head]; i < end; ++i) {
      const Row row = Row(members[i]) * D + lane;
      float q[COUNT];
      int bad = 0;
#pragma unroll
      for (int c = 0; c < COUNT; ++c) {
        q[c] = as_float(queries[row + c * 32]);
        if (!(fabsf(q[c]) < infinity())) bad = 1;
      }
      const bool skip = __any_sync(kAll, bad);
#pragma unroll
      for (int c = 0; c < COUNT; ++c) {
        positive[c] += skip ? 0.0f : fmaxf(q[c], 0.0f);
        negative[c] += skip ? 0.0f : fminf(q[c], 0.0f);
      }
    }
#pragma unroll
    for (int c = 0; c < COUNT; ++c) score += positive[c] * most[c] + negative[c] * least[c];
  }
  score = warp_sum(score) / float(params[kQueries]);
#if !QUEST
  score /= sqrtf(float(D));
#endif
  if (lane == 0) scores[block] = score;
}
