#ifndef BODY
// Scores of blocks, averaged over the query heads; those by the mean scaled by 1 / sqrt(D).
//
// A score is linear in q for the mean, and in its positive and its negative values for Quest's
// bound: the query heads of a KV head are added up first. A head whose q is not finite counts
// nothing. GROUPED: KV heads have as many query heads, neighbours; else members i32
// [H_kv + 1 + H_q], for each KV head where its query heads begin among those that follow, the end
// last. high, low f32 [H_kv, blocks, D].
//
// Grid: (blocks / 8) threadgroups of eight simdgroups. Eight blocks are scored at once, each
// simdgroup for its share of the KV heads. Out: scores f32 [blocks].

constant constexpr int kScored = 8;

// What the query heads of one KV head add up to, of the dimensions that are this thread's.
template <int QUADS>
struct Summed {
  float4 positive[QUADS];
  float4 negative[QUADS];
};

// Adds a row of q, unless one of its values is not finite.
template <int QUADS, int D, typename Queries>
void add_row(thread Summed<QUADS>& summed, Queries row, int lane) {
  float4 q[QUADS];
  int bad = 0;
  for (int c = 0; c < QUADS; ++c) {
    const int d = c * 128 + lane * 4;
    q[c] = d < D ? load4(row + d) : float4(0.0f);
    if (!(isfinite(q[c].x) && isfinite(q[c].y) && isfinite(q[c].z) && isfinite(q[c].w))) bad = 1;
  }
  if (simd_max(bad) != 0) return;
  for (int c = 0; c < QUADS; ++c) {
    summed.positive[c] += metal::fmax(q[c], float4(0.0f));
    summed.negative[c] += metal::fmin(q[c], float4(0.0f));
  }
}

#else  // body
constexpr int QUADS = (D + 127) / 128;
threadgroup float partial[kScored * kScored];

const int lane = int(thread_index_in_simdgroup);
const int simd_id = int(simdgroup_index_in_threadgroup);
const int first = int(threadgroup_position_in_grid.x) * kScored;
const int num_blocks = params[kNumBlocks];

float score[kScored];
for (int b = 0; b < kScored; ++b) score[b] = 0.0f;
for (int head = simd_id; head < params[kNumHeads]; head += kScored) {
  Summed<QUADS> summed;
  for (int c = 0; c < QUADS; ++c) summed.positive[c] = summed.negative[c] = float4(0.0f);
#if GROUPED
  const int each = params[kSharing];
  for (int i = 0; i < each; ++i) {
    add_row<QUADS, D>(summed, queries + ulong(head * each + i) * D, lane);
  }
#else
  for (int i = members[head]; i < members[head + 1]; ++i) {
    add_row<QUADS, D>(summed, queries + ulong(members[i]) * D, lane);
  }
#endif
  for (int b = 0; b < kScored; ++b) {
    const ulong block = ulong(head) * ulong(num_blocks) + ulong(min(first + b, num_blocks - 1));
    for (int c = 0; c < QUADS; ++c) {
      const int d = c * 128 + lane * 4;
      if (d >= D) continue;
      const float4 most = load4(high + block * D + ulong(d));
#if QUEST
      const float4 least = load4(low + block * D + ulong(d));
      score[b] += dot(summed.positive[c], most) + dot(summed.negative[c], least);
#else
      score[b] += dot(summed.positive[c] + summed.negative[c], most);
#endif
    }
  }
}
for (int b = 0; b < kScored; ++b) {
  const float sum = simd_sum(score[b]);
  if (lane == 0) partial[simd_id * kScored + b] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int mine = simd_id * 32 + lane;
if (mine < kScored && first + mine < num_blocks) {
  float sum = 0.0f;
  for (int s = 0; s < kScored; ++s) sum += partial[s * kScored + mine];
  sum /= float(params[kQueries]);
#if !QUEST
  sum /= metal::sqrt(float(D));
#endif
  scores[first + mine] = sum;
}
#endif  // body
