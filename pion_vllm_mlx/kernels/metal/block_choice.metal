#ifndef BODY
// The ids of the blocks whose rank is below the number wanted, ascending.
// Grid: (blocks / 4) threadgroups of four simdgroups, one block each. Out: chosen i32 [top].

#else  // body
const int lane = int(thread_index_in_simdgroup);
const int block = int(threadgroup_position_in_grid.x) * 4 + int(simdgroup_index_in_threadgroup);
if (block < params[kNumBlocks] && ranks[block] < params[kTop]) {
  int before = 0;
  for (int other = lane; other < block; other += 32) {
    if (ranks[other] < params[kTop]) before += 1;
  }
  before = simd_sum(before);
  if (lane == 0) chosen[before] = block;
}
#endif  // body
