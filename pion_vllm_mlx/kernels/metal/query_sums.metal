// Sums over the query heads of each KV head, which is all that scoring needs: a score is linear in
// q for the mean, and in its positive and negative values for Quest's bound. A head whose q is not
// finite counts nothing.
// Grid: (H_kv) threadgroups of 32 threads. members i32 [H_q + H_kv + 1]: for each KV head where
// its query heads begin among those that follow, the end last. Out: rising, falling f32 [H_kv, D].

//// body
const int lane = int(thread_index_in_simdgroup);
const int head = int(threadgroup_position_in_grid.x);
const int begin = members[head];
const int end = members[head + 1];

float4 positive[(D + 127) / 128];
float4 negative[(D + 127) / 128];
for (int c = 0; c < (D + 127) / 128; ++c) positive[c] = negative[c] = float4(0.0f);
for (int i = begin; i < end; ++i) {
  const int row = members[i];
  int bad = 0;
  for (int d = lane * 4; d < D; d += 128) {
    const float4 q = load4(queries + ulong(row) * D + ulong(d));
    if (!(isfinite(q.x) && isfinite(q.y) && isfinite(q.z) && isfinite(q.w))) bad = 1;
  }
  if (simd_max(bad) != 0) continue;
  for (int c = 0; c * 128 + lane * 4 < D; ++c) {
    const float4 q = load4(queries + ulong(row) * D + ulong(c * 128 + lane * 4));
    positive[c] += metal::fmax(q, float4(0.0f));
    negative[c] += metal::fmin(q, float4(0.0f));
  }
}
for (int c = 0; c * 128 + lane * 4 < D; ++c) {
  const ulong at = ulong(head) * D + ulong(c * 128 + lane * 4);
  *(device float4*)(rising + at) = positive[c];
  *(device float4*)(falling + at) = negative[c];
}
