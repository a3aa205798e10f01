#ifndef BODY
// How many blocks come before each: those with a greater score, or an equal one and a lower id.
// A score that is not a number comes last.
// Grid: (blocks / 4) threadgroups of four simdgroups, one block each. Out: ranks i32 [blocks].

inline bool comes_before(float score, int id, float mine, int my_id) {
  const bool is_number = score == score;
  const bool am_number = mine == mine;
  if (is_number && am_number && score != mine) return score > mine;
  return is_number == am_number ? id < my_id : is_number;
}

#else  // body
const int lane = int(thread_index_in_simdgroup);
const int block = int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup);
const int num = params[kNumBlocks];
if (block < num) {
  const float mine = scores[block];
  int before = 0;
  for (int other = lane; other < num; other += 32) {
    if (comes_before(scores[other], other, mine, block)) before += 1;
  }
  before = simd_sum(before);
  if (lane == 0) ranks[block] = before;
}
#endif  // body
