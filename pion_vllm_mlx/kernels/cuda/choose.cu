// How the threads of a block choose the best blocks of keys. Part of a kernel's header, behind
// rows.cu.

// A block of keys as a candidate: a number that is the greater the earlier it comes. Its upper half
// is ordered as scores are, its lower half is the greater the lower the id. 0 is no candidate.
using Candidate = unsigned long long;

// Ordered as scores are, zeros alike; least for what is not a number.
__device__ inline unsigned key_of(float score) {
  if (!(score == score)) return 0u;
  const unsigned bits = __float_as_uint(score == 0.0f ? 0.0f : score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ inline Candidate candidate(const float* scores, int id) {
  return Candidate(key_of(__ldcg(scores + id))) << 32 | ~unsigned(id);
}

__device__ inline int id_of(Candidate one) { return int(~unsigned(one)); }

// The first candidate of a warp.
__device__ inline Candidate first_of_warp(Candidate mine) {
  const unsigned key = __reduce_max_sync(kAll, unsigned(mine >> 32));
  const unsigned rest = unsigned(mine >> 32) == key ? unsigned(mine) : 0u;
  return Candidate(key) << 32 | __reduce_max_sync(kAll, rest);
}

// The first candidate behind `last` of those that are this thread's.
template <int THREADS>
__device__ inline Candidate next_candidate(const float* scores, int num, Candidate last,
                                           int index) {
  Candidate first = 0;
  for (int id = index; id < num; id += THREADS) {
    const Candidate one = candidate(scores, id);
    if (one < last && one > first) first = one;
  }
  return first;
}

// Leaves the `top` first candidates of a warp, whose threads hold KEPT each, in `found`.
template <int KEPT, int THREADS>
__device__ inline void first_of_held(const float* scores, int num, int top, Candidate* found,
                                     int index) {
  Candidate mine[KEPT];
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int id = index + i * THREADS;
    mine[i] = id < num ? candidate(scores, id) : 0;
  }
#pragma unroll
  for (int end = KEPT; end > 1; --end) {  // sorted, so that a round looks at the first alone
#pragma unroll
    for (int i = 1; i < end; ++i) {
      const Candidate one = mine[i - 1];
      const Candidate other = mine[i];
      mine[i - 1] = one > other ? one : other;
      mine[i] = one > other ? other : one;
    }
  }
  for (int round = 0; round < top; ++round) {
    const Candidate best = first_of_warp(mine[0]);
    if (index % 32 == 0) found[round] = best;
    const bool is_mine = mine[0] == best;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      const Candidate next = i + 1 < KEPT ? mine[i + 1] : 0;
      mine[i] = is_mine ? next : mine[i];
    }
  }
}

// What choosing needs of a block's shared memory.
template <int WARPS>
struct Choice {
  Candidate found[WARPS * kMostChosen];
};

// Leaves the ids of the `top` best scores in `chosen`, the best first. Where threads can hold the
// scores, each warp finds its first ones, of which every thread then places one; else round by
// round, two of which use their part of the shared memory in turn: one barrier a round is enough.
template <int WARPS>
__device__ inline void choose(const float* scores, int num, int top, Choice<WARPS>& shared,
                              int* chosen, int index) {
  constexpr int THREADS = WARPS * 32;
  const int warp = index / 32;
  if (num <= THREADS * 8) {
    Candidate* found = shared.found + warp * top;
    if (num <= THREADS * 4) {
      first_of_held<4, THREADS>(scores, num, top, found, index);
    } else {
      first_of_held<8, THREADS>(scores, num, top, found, index);
    }
    __syncthreads();
    for (int at = index; at < WARPS * top; at += THREADS) {
      const Candidate mine = shared.found[at];
      int before = 0;
#pragma unroll 8
      for (int other = 0; other < WARPS * top; ++other) before += shared.found[other] > mine;
      if (mine != 0 && before < top) chosen[before] = id_of(mine);
    }
    __syncthreads();
    return;
  }
  Candidate mine = next_candidate<THREADS>(scores, num, ~Candidate(0), index);
  for (int round = 0; round < top; ++round) {
    Candidate best = first_of_warp(mine);
    const int at = round % 2 * WARPS;
    if (index % 32 == 0) shared.found[at + warp] = best;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const Candidate other = shared.found[at + w];
      best = other > best ? other : best;
    }
    if (index == 0) chosen[round] = id_of(best);
    if (best == mine) mine = next_candidate<THREADS>(scores, num, best, index);
  }
  __syncthreads();
}
