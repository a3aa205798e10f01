#ifndef BODY
// Attention of a few query rows (single query, grouped heads, short suffixes) to one part of the
// keys. LANES threads share a key, so a simdgroup holds 32 / LANES keys at once; all R rows of the
// tile use a key while it is in registers.
//
// Grid: (tiles, splits) threadgroups of SIMDGROUPS simdgroups. Which rows a tile has: GROUPED, see
// EvenRows; else tiles i32 [tiles, 1 + R], a KV head and the query rows that read it, -1 for none.
// Where the only split is one of the prefix, it visits the suffix too. TOKENS 1: lists i32 [H_q, K],
// how many tokens, then their numbers. TOKENS 2: blocks i32 [blocks]. TOKENS 3: scores f32 [blocks],
// of which every threadgroup chooses the best for itself.
// Out: part_out f32 [rows, splits, D] and part_lse f32 [rows, splits], natural log.

template <int R, int C>
struct Rows {
  float4 q[R][C];  // scaled, in units of log 2
  float4 acc[R][C];
  float top[R];
  float sum[R];
  int limit[R];  // the last key of a causal region that the row sees
};

// Visits keys [begin, end); every thread of the simdgroup takes part in every step.
template <int R, int C, int LANES, int UNROLL, bool CAUSAL, typename Keys, typename Values,
          typename Tokens, typename Layout>
void visit(thread Rows<R, C>& rows, Keys keys, Values values, Tokens tokens, Layout layout,
           int begin, int end, int stride, int lane) {
  constexpr int SLOTS = 32 / LANES;
  const int slot = lane / LANES;
  const int part = lane % LANES;
  for (int base = begin; base < end; base += stride) {
    ulong row[UNROLL];
    float score[R][UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int i = base + u * SLOTS + slot;
      row[u] = layout.row(tokens.token(i < end ? i : end - 1));
#pragma unroll
      for (int r = 0; r < R; ++r) score[r][u] = 0.0f;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const float4 key = keys.load(row[u], (c * LANES + part) * 4);
#pragma unroll
        for (int r = 0; r < R; ++r) score[r][u] += dot(rows.q[r][c], key);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float top = rows.top[r];
      bool seen[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int i = base + u * SLOTS + slot;
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
          score[r][u] += simd_shuffle_xor(score[r][u], ushort(step));
        }
        seen[u] = i < end && (!CAUSAL || i <= rows.limit[r]);
        if (seen[u]) top = fmax(top, score[r][u]);
      }
      const float fade = metal::exp2(rows.top[r] - top);
      rows.top[r] = top;
      rows.sum[r] *= fade;
#pragma unroll
      for (int c = 0; c < C; ++c) rows.acc[r][c] *= fade;
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        score[r][u] = seen[u] ? metal::exp2(score[r][u] - top) : 0.0f;
        rows.sum[r] += score[r][u];
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const float4 value = values.load(row[u], (c * LANES + part) * 4);
#pragma unroll
        for (int r = 0; r < R; ++r) rows.acc[r][c] += score[r][u] * value;
      }
    }
  }
}

inline float over_slots(float value, int lanes) {
  for (int step = lanes; step < 32; step *= 2) value += simd_shuffle_xor(value, ushort(step));
  return value;
}

// A block of keys as a candidate: the greater key comes first, of equal ones the lower id.
struct Candidate {
  uint key;
  int id;
  bool before(Candidate other) const {
    return key > other.key || (key == other.key && id < other.id);
  }
};

// Ordered as scores are, zeros alike; least for what is not a number.
inline uint key_of(float score) {
  if (!(score == score)) return 0u;
  const uint bits = as_type<uint>(score == 0.0f ? 0.0f : score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The first candidate behind `last` of those that are this thread's.
template <typename Scores>
Candidate next_candidate(Scores scores, int num, Candidate last, int index, int threads) {
  Candidate first{0u, 0x7fffffff};
  for (int id = index; id < num; id += threads) {
    const Candidate one{key_of(scores[id]), id};
    if (last.before(one) && one.before(first)) first = one;
  }
  return first;
}

// Leaves the ids of the `top` best scores in `chosen`, the best first. Two rounds use `keys` and
// `ids` [2 * SIMDGROUPS] in turn, so that one barrier a round is enough.
template <int SIMDGROUPS, typename Scores, typename Keys, typename Ids>
void choose(Scores scores, int num, int top, Keys keys, Ids ids, Ids chosen, int index) {
  constexpr int threads = SIMDGROUPS * 32;
  const int simd_id = index / 32;
  Candidate mine = next_candidate(scores, num, Candidate{0xffffffffu, -1}, index, threads);
  for (int round = 0; round < top; ++round) {
    Candidate best;
    best.key = simd_max(mine.key);
    best.id = simd_min(mine.key == best.key ? mine.id : 0x7fffffff);
    const int at = round % 2 * SIMDGROUPS;
    if (index % 32 == 0) {
      keys[at + simd_id] = best.key;
      ids[at + simd_id] = best.id;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int s = 0; s < SIMDGROUPS; ++s) {
      const Candidate other{keys[at + s], ids[at + s]};
      if (other.before(best)) best = other;
    }
    if (index == 0) chosen[round] = best.id;
    if (best.id == mine.id) mine = next_candidate(scores, num, best, index, threads);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

#else  // body
constexpr int C = D / (4 * LANES);
constexpr int SLOTS = 32 / LANES;
threadgroup float group_acc[SIMDGROUPS * R * D];
threadgroup float group_top[SIMDGROUPS * R];
threadgroup float group_sum[SIMDGROUPS * R];

const int lane = int(thread_index_in_simdgroup);
const int simd_id = int(simdgroup_index_in_threadgroup);
const int split = int(threadgroup_position_in_grid.y);
const int chunk = params[kChunk];
#if GROUPED
const EvenRows<R> own{params[kSharing], int(threadgroup_position_in_grid.x)};
#else
const auto own = table_rows(tiles, int(threadgroup_position_in_grid.x) * (R + 1));
#endif
const int head = own.head();

Rows<R, C> rows;
for (int r = 0; r < R; ++r) {
  const int row = own.row(r);
  rows.top[r] = kLowest;
  rows.sum[r] = 0.0f;
  rows.limit[r] = 0;
  if (row >= 0) {
    const int causal = params[kSuffix] - params[kQueries];
    rows.limit[r] = (causal > 0 ? causal : 0) + row % params[kQueries];
  }
  for (int c = 0; c < C; ++c) {
    rows.acc[r][c] = float4(0.0f);
    rows.q[r][c] = float4(0.0f);
    if (row >= 0) {
      rows.q[r][c] = load4(queries + ulong(row) * D + (c * LANES + lane % LANES) * 4) *
                     (kLog2E / metal::sqrt(float(D)));
    }
  }
}

const int step = SLOTS * UNROLL;
const int stride = SIMDGROUPS * step;
#if PAGED
const Paged layout{table, ulong(params[kNumHeads]), ulong(head), params[kStride]};
#else
const Contiguous layout{ulong(head) * ulong(params[kStride])};
#endif
#if TOKENS == 1
const int list = own.row(0) * params[kListWidth];
const int visible = lists[list];
const auto tokens = listed(lists, list + 1);
#elif TOKENS >= 2
const int in_blocks = params[kTop] * params[kBlockTokens];
const int tail_tokens = (params[kTokens] - params[kStart]) % params[kBlockTokens];
const int visible = in_blocks + tail_tokens;
#if TOKENS == 3
threadgroup uint best_keys[2 * SIMDGROUPS];
threadgroup int best_ids[2 * SIMDGROUPS];
threadgroup int blocks[kMostChosen];
choose<SIMDGROUPS>(scores, params[kNumBlocks], params[kTop], best_keys, best_ids, blocks,
                   simd_id * 32 + lane);
#endif
const auto tokens = blocks_of(blocks, params[kBlockTokens], params[kStart], in_blocks,
                              params[kTokens] - tail_tokens);
#else
const int visible = params[kTokens] - params[kStart];
const Run tokens{params[kStart]};
#endif

if (split < params[kPrefixSplits]) {
  const int begin = split * chunk;
  const int end = min(begin + chunk, visible);
  visit<R, C, LANES, UNROLL, false>(rows, KEYS, VALUES, tokens, layout, begin + simd_id * step,
                                    end, stride, lane);
}
#if SUFFIX
const bool alone = params[kSplits] == params[kPrefixSplits];
const int behind = alone ? 0 : split - params[kPrefixSplits];
if (behind >= 0) {
  const int begin = behind * chunk;
  const int end = min(begin + chunk, params[kSuffix]);
  visit<R, C, LANES, UNROLL, true>(rows, plain<D>(suffix_keys), plain<D>(suffix_values), Run{0},
                                   Contiguous{ulong(head) * ulong(params[kSuffix])},
                                   begin + simd_id * step, end, stride, lane);
}
#endif

for (int r = 0; r < R; ++r) {
  float top = rows.top[r];
  for (int hop = LANES; hop < 32; hop *= 2) top = fmax(top, simd_shuffle_xor(top, ushort(hop)));
  const float fade = metal::exp2(rows.top[r] - top);
  const float sum = over_slots(rows.sum[r] * fade, LANES);
  const int at = simd_id * R + r;
  for (int c = 0; c < C; ++c) {
    float4 acc = rows.acc[r][c] * fade;
    acc.x = over_slots(acc.x, LANES);
    acc.y = over_slots(acc.y, LANES);
    acc.z = over_slots(acc.z, LANES);
    acc.w = over_slots(acc.w, LANES);
    if (lane < LANES) {
      const int d = at * D + (c * LANES + lane) * 4;
      group_acc[d] = acc.x;
      group_acc[d + 1] = acc.y;
      group_acc[d + 2] = acc.z;
      group_acc[d + 3] = acc.w;
    }
  }
  if (lane == 0) {
    group_top[at] = top;
    group_sum[at] = sum;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int i = simd_id * 32 + lane; i < R * D; i += SIMDGROUPS * 32) {
  const int r = i / D;
  const int row = own.row(r);
  if (row < 0) continue;
  float top = kLowest;
  for (int s = 0; s < SIMDGROUPS; ++s) top = fmax(top, group_top[s * R + r]);
  float sum = 0.0f;
  float acc = 0.0f;
  for (int s = 0; s < SIMDGROUPS; ++s) {
    const float weight = metal::exp2(group_top[s * R + r] - top);
    sum += group_sum[s * R + r] * weight;
    acc += group_acc[(s * R + r) * D + i % D] * weight;
  }
  const ulong part = ulong(row) * ulong(params[kSplits]) + ulong(split);
  part_out[part * D + ulong(i % D)] = sum == 0.0f ? 0.0f : acc / sum;
  if (i % D == 0) {
    part_lse[part] = sum == 0.0f ? -INFINITY : (top + metal::log2(sum)) * kLn2;
  }
}
#endif  // body
