#ifndef BODY
// How many blocks come before each: those with a greater score, or an equal one and a lower id.
// A score that is not a number comes last.
// Grid: (blocks / 4) blocks of four warps, one block of keys each. Out: ranks i32 [blocks].

__device__ inline bool comes_before(float score, int id, float mine, int my_id) {
  const bool is_number = score == score;
  const bool am_number = mine == mine;
  if (is_number && am_number && score != mine) return score > mine;
  return is_number == am_number ? id < my_id : is_number;
}

#else  // body
const int lane = int(threadIdx.x % 32);
const int block = int(blockIdx.x) * 4 + int(threadIdx.x / 32);
const int num = params[kNumBlocks];
if (block < num) {
  const float mine = scores[block];
  int before = 0;
#pragma unroll 8
  for (int other = lane; other < num; other += 32) {
    if (comes_before(scores[other], other, mine, block)) before += 1;
  }
  before = warp_count(before);
  if (lane == 0) ranks[block] = before;
}
#endif  // body
