// How many blocks come before each: those with a greater score, or an equal one and a lower id.
// A score that is not a number counts as the least.
// Grid: (blocks / 4) threadgroups of four simdgroups, one block each. Out: ranks i32 [blocks].

inline float comparable(float score) { return score == score ? score : -INFINITY; }

//// body
const int lane = int(thread_index_in_simdgroup);
const int block = int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup);
const int num = params[kNumBlocks];
if (block < num) {
  const float mine = comparable(scores[block]);
  int before = 0;
  for (int other = lane; other < num; other += 32) {
    const float score = comparable(scores[other]);
    if (score > mine || (score == mine && other < block)) before += 1;
  }
  before = simd_sum(before);
  if (lane == 0) ranks[block] = before;
}
