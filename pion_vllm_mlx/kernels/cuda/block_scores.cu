// Scores of blocks, averaged over the query heads; those by the mean scaled by 1 / sqrt(D).
// Grid: (blocks / 4) blocks of four warps, each of which scores one block.
// rising, falling f32 [H_kv, D] from query_sums; high, low f32 [H_kv, blocks, D].
// Out: scores f32 [blocks].

//// body
const int lane = int(threadIdx.x % 32);
const int block = int(blockIdx.x) * 4 + int(threadIdx.x / 32);
if (block < params[kNumBlocks]) {
  float score = 0.0f;
#pragma unroll 4
  for (int head = 0; head < params[kNumHeads]; ++head) {
    const Row at = (Row(head) * params[kNumBlocks] + block) * D;
    for (int d = lane * 4; d < D; d += 128) {
      float up[4], down[4], most[4];
      load4(rising + Row(head) * D + d, up);
      load4(falling + Row(head) * D + d, down);
      load4(high + at + d, most);
#if QUEST
      float least[4];
      load4(low + at + d, least);
#pragma unroll
      for (int e = 0; e < 4; ++e) score += up[e] * most[e] + down[e] * least[e];
#else
#pragma unroll
      for (int e = 0; e < 4; ++e) score += (up[e] + down[e]) * most[e];
#endif
    }
  }
  score = warp_sum(score) / float(params[kQueries]);
#if !QUEST
  score /= sqrtf(float(D));
#endif
  if (lane == 0) scores[block] = score;
}
