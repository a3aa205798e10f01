// Scores of blocks, averaged over the query heads; those by the mean scaled by 1 / sqrt(D).
// Grid: (blocks / 4) threadgroups of four simdgroups, each of which scores one block.
// rising, falling f32 [H_kv, D] from query_sums; high, low f32 [H_kv, blocks, D].
// Out: scores f32 [blocks].

//// body
const int lane = int(thread_index_in_simdgroup);
const int block = int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup);
if (block < params[kNumBlocks]) {
  float score = 0.0f;
  for (int head = 0; head < params[kNumHeads]; ++head) {
    const ulong at = (ulong(head) * ulong(params[kNumBlocks]) + ulong(block)) * D;
    for (int d = lane * 4; d < D; d += 128) {
      const float4 up = load4(rising + ulong(head) * D + ulong(d));
      const float4 down = load4(falling + ulong(head) * D + ulong(d));
      const float4 most = load4(high + at + ulong(d));
#if QUEST
      score += dot(up, most) + dot(down, load4(low + at + ulong(d)));
#else
      score += dot(up + down, most);
#endif
    }
  }
  score = simd_sum(score) / float(params[kQueries]);
#if !QUEST
  score /= metal::sqrt(float(D));
#endif
  if (lane == 0) scores[block] = score;
}
