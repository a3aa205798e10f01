// Scores of blocks, averaged over the query heads; those by the mean scaled by 1 / sqrt(D).
//
// A score is linear in q for the mean, and in its positive and its negative values for Quest's
// bound: the query heads of a KV head are added up first. A head whose q is not finite counts
// nothing. members i32 [H_kv + 1 + H_q]: for each KV head where its query heads begin among those
// that follow, the end last. high, low f32 [H_kv, blocks, D].
//
// Grid: (blocks / 4) threadgroups of four simdgroups, each of which scores one block.
// Out: scores f32 [blocks].

//// body
constexpr int QUADS = (D + 127) / 128;
const int lane = int(thread_index_in_simdgroup);
const int block = int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup);
const int num_blocks = params[kNumBlocks];
if (block < num_blocks) {
  float score = 0.0f;
  for (int head = 0; head < params[kNumHeads]; ++head) {
    float4 positive[QUADS];
    float4 negative[QUADS];
    for (int c = 0; c < QUADS; ++c) positive[c] = negative[c] = float4(0.0f);
    for (int i = members[head]; i < members[head + 1]; ++i) {
      float4 q[QUADS];
      int bad = 0;
      for (int c = 0; c < QUADS; ++c) {
        const int d = c * 128 + lane * 4;
        q[c] = d < D ? load4(queries + ulong(members[i]) * D + ulong(d)) : float4(0.0f);
        if (!(isfinite(q[c].x) && isfinite(q[c].y) && isfinite(q[c].z) && isfinite(q[c].w))) {
          bad = 1;
        }
      }
      if (simd_max(bad) != 0) continue;
      for (int c = 0; c < QUADS; ++c) {
        positive[c] += metal::fmax(q[c], float4(0.0f));
        negative[c] += metal::fmin(q[c], float4(0.0f));
      }
    }
    const ulong at = (ulong(head) * ulong(num_blocks) + ulong(block)) * D;
    for (int c = 0; c < QUADS; ++c) {
      const int d = c * 128 + lane * 4;
      if (d >= D) continue;
      const float4 most = load4(high + at + ulong(d));
#if QUEST
      score += dot(positive[c], most) + dot(negative[c], load4(low + at + ulong(d)));
#else
      score += dot(positive[c] + negative[c], most);
#endif
    }
  }
  score = simd_sum(score) / float(params[kQueries]);
#if !QUEST
  score /= metal::sqrt(float(D));
#endif
  if (lane == 0) scores[block] = score;
}
