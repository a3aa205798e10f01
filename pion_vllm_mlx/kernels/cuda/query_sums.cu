// Sums over the query heads of each KV head, which is all that scoring needs: a score is linear in
// q for the mean, and in its positive and negative values for Quest's bound. A head whose q is not
// finite counts nothing.
// Grid: (H_kv) blocks of 32 threads. members i32 [H_q + H_kv + 1]: for each KV head where its query
// heads begin among those that follow, the end last. Out: rising, falling f32 [H_kv, D].

//// body
const int lane = int(threadIdx.x);
const int head = int(blockIdx.x);
const int begin = members[head];
const int end = members[head + 1];

float positive[D / 32];
float negative[D / 32];
#pragma unroll
for (int c = 0; c < D / 32; ++c) positive[c] = negative[c] = 0.0f;
for (int i = begin; i < end; ++i) {
  const Row at = Row(members[i]) * D;
  float q[D / 32];
  int bad = 0;
#pragma unroll
  for (int c = 0; c < D / 32; ++c) {
    q[c] = as_float(queries[at + c * 32 + lane]);
    if (!(fabsf(q[c]) < infinity())) bad = 1;
  }
  if (warp_count(bad) != 0) continue;
#pragma unroll
  for (int c = 0; c < D / 32; ++c) {
    positive[c] += fmaxf(q[c], 0.0f);
    negative[c] += fminf(q[c], 0.0f);
  }
}
#pragma unroll
for (int c = 0; c < D / 32; ++c) {
  rising[Row(head) * D + c * 32 + lane] = positive[c];
  falling[Row(head) * D + c * 32 + lane] = negative[c];
}
