// How the threads of a block choose the best blocks of keys. Part of a kernel's header, behind
// rows.cu.

constexpr int kNoBlock = 0x7fffffff;  // comes behind every block
constexpr int kKept = 8;              // candidates that a thread can hold

// A block of keys as a candidate: the greater key comes first, of equal ones the lower id.
struct Candidate {
  unsigned key;
  int id;
  __device__ bool before(Candidate other) const {
    return key > other.key || (key == other.key && id < other.id);
  }
};

// Ordered as scores are, zeros alike; least for what is not a number.
__device__ inline unsigned key_of(float score) {
  if (!(score == score)) return 0u;
  const unsigned bits = __float_as_uint(score == 0.0f ? 0.0f : score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The first candidate behind `last` of those that are this thread's.
template <int THREADS>
__device__ inline Candidate next_candidate(const float* scores, int num, Candidate last,
                                           int index) {
  Candidate first{0u, kNoBlock};
#pragma unroll 4
  for (int id = index; id < num; id += THREADS) {
    const Candidate one{key_of(__ldcg(scores + id)), id};
    if (last.before(one) && one.before(first)) first = one;
  }
  return first;
}

// The `top` first candidates of a warp, whose threads have KEPT each, go to `keys` and `ids`.
template <int KEPT>
__device__ inline void first_of_warp(Candidate (&mine)[KEPT], int top, unsigned* keys, int* ids,
                                     int lane) {
  for (int round = 0; round < top; ++round) {
    Candidate best = mine[0];
#pragma unroll
    for (int i = 1; i < KEPT; ++i) {
      if (mine[i].before(best)) best = mine[i];
    }
    const unsigned key = __reduce_max_sync(kAll, best.key);
    const int id = __reduce_min_sync(kAll, best.key == key ? best.id : kNoBlock);
    if (lane == 0) {
      keys[round] = key;
      ids[round] = id;
    }
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      if (mine[i].id == id) mine[i] = Candidate{0u, kNoBlock};
    }
  }
}

// What choosing needs of a block's shared memory.
template <int WARPS>
struct Choice {
  unsigned keys[WARPS * kMostChosen];
  int ids[WARPS * kMostChosen];
};

// Leaves the ids of the `top` best scores in `chosen`, the best first: those of each warp, then
// those of all, where threads can hold the scores; else round by round. Two rounds use their part
// of the shared memory in turn, so that one barrier a round is enough.
template <int WARPS>
__device__ inline void choose(const float* scores, int num, int top, Choice<WARPS>& shared,
                              int* chosen, int index) {
  constexpr int THREADS = WARPS * 32;
  const int warp = index / 32;
  const int lane = index % 32;
  if (num <= THREADS * kKept) {
    Candidate mine[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int id = index + i * THREADS;
      mine[i] = id < num ? Candidate{key_of(__ldcg(scores + id)), id} : Candidate{0u, kNoBlock};
    }
    first_of_warp(mine, top, shared.keys + warp * top, shared.ids + warp * top, lane);
    __syncthreads();
    if (warp == 0) {
      Candidate all[WARPS * kMostChosen / 32];
#pragma unroll
      for (int i = 0; i < WARPS * kMostChosen / 32; ++i) {
        const int at = lane + i * 32;
        const bool is = at < WARPS * top;
        all[i] = is ? Candidate{shared.keys[at], shared.ids[at]} : Candidate{0u, kNoBlock};
      }
      __syncwarp();
      first_of_warp(all, top, shared.keys, chosen, lane);
    }
    __syncthreads();
    return;
  }
  Candidate mine = next_candidate<THREADS>(scores, num, Candidate{0xffffffffu, -1}, index);
  for (int round = 0; round < top; ++round) {
    const unsigned key = __reduce_max_sync(kAll, mine.key);
    Candidate best{key, __reduce_min_sync(kAll, mine.key == key ? mine.id : kNoBlock)};
    const int at = round % 2 * WARPS;
    if (lane == 0) {
      shared.keys[at + warp] = best.key;
      shared.ids[at + warp] = best.id;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const Candidate other{shared.keys[at + w], shared.ids[at + w]};
      if (other.before(best)) best = other;
    }
    if (index == 0) chosen[round] = best.id;
    if (best.id == mine.id) mine = next_candidate<THREADS>(scores, num, best, index);
  }
  __syncthreads();
}
