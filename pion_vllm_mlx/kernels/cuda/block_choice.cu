#ifndef BODY
// The ids of the blocks whose rank is below the number wanted, ascending.
// Grid: (blocks / 4) blocks of four warps, one block of keys each. Out: chosen i32 [top].

#else  // body
const int lane = int(threadIdx.x % 32);
const int block = int(blockIdx.x) * 4 + int(threadIdx.x / 32);
if (block < params[kNumBlocks] && ranks[block] < params[kTop]) {
  int before = 0;
#pragma unroll 8
  for (int other = lane; other < block; other += 32) {
    if (ranks[other] < params[kTop]) before += 1;
  }
  before = warp_count(before);
  if (lane == 0) chosen[before] = block;
}
#endif  // body
