#ifndef BODY
// Attention of a few query rows (single query, grouped heads, short suffixes) to one part of the
// keys. LANES threads share a key, so a warp holds 32 / LANES keys at once; all R rows of the tile
// use a key while it is in registers, and the values of a key are on their way before its score.
//
// Grid: (tiles, splits) blocks of SIMDGROUPS warps. Which rows a tile has: GROUPED, see EvenRows;
// else tiles i32 [tiles, 1 + R], a KV head and the query rows that read it, -1 for none. WHOLE: there
// is one split, which visits the suffix too. TOKENS 1: lists i32 [H_q, K], how many
// tokens, then their numbers. TOKENS 2: blocks i32 [blocks]. TOKENS 3: scores f32 [blocks], of
// which every block of threads chooses the best for itself.
// MERGE: there are several parts, which the last block of a tile makes one: parts f32 as in
// merge_parts, counters i32 [tiles], 0 before and after. Out: out f32 [rows, D], lse f32 [rows].

template <int R, int COUNT>
struct Rows {
  float q[R][COUNT];  // scaled, in units of log 2
  float acc[R][COUNT];
  float top[R];
  float sum[R];
  int limit[R];  // the last key of a causal region that the row sees
};

// Value i of a thread is dimension dimension(i, part): WIDTH neighbours, then the next thread's.
template <int LANES, int WIDTH>
__device__ inline int dimension(int i, int part) {
  return (i / WIDTH * LANES + part) * WIDTH + i % WIDTH;
}

// Visits keys [begin, end); every thread of the warp takes part in every step.
template <int R, int COUNT, int LANES, int WIDTH, int UNROLL, bool CAUSAL, typename Keys,
          typename Values, typename Tokens, typename Layout>
__device__ inline void visit(Rows<R, COUNT>& rows, Keys keys, Values values, Tokens tokens,
                             Layout layout, int begin, int end, int stride, int lane) {
  constexpr int SLOTS = 32 / LANES;
  constexpr int LOADS = COUNT / WIDTH;
  const int slot = lane / LANES;
  const int part = lane % LANES;
  for (int base = begin; base < end; base += stride) {
    typename Keys::template Raw<WIDTH> key[UNROLL][LOADS];
    typename Values::template Raw<WIDTH> value[UNROLL][LOADS];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int i = base + u * SLOTS + slot;
      const Row row = layout.row(tokens.token(i < end ? i : end - 1));
#pragma unroll
      for (int c = 0; c < LOADS; ++c) {
        const int d = (c * LANES + part) * WIDTH;
        key[u][c] = keys.template fetch<WIDTH>(row, d);
        value[u][c] = values.template fetch<WIDTH>(row, d);
      }
    }
    float score[R][UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int r = 0; r < R; ++r) score[r][u] = 0.0f;
#pragma unroll
      for (int c = 0; c < LOADS; ++c) {
        float k[WIDTH];
        Keys::template expand<WIDTH>(key[u][c], k);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
#pragma unroll
          for (int r = 0; r < R; ++r) score[r][u] += rows.q[r][c * WIDTH + e] * k[e];
        }
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
        for (int hop = 1; hop < LANES; hop *= 2) {
          score[r][u] += __shfl_xor_sync(kAll, score[r][u], hop);
        }
        seen[u] = i < end && (!CAUSAL || i <= rows.limit[r]);
        if (seen[u]) top = fmaxf(top, score[r][u]);
      }
      const float fade = exp2f(rows.top[r] - top);
      rows.top[r] = top;
      rows.sum[r] *= fade;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) rows.acc[r][i] *= fade;
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        score[r][u] = seen[u] ? exp2f(score[r][u] - top) : 0.0f;
        rows.sum[r] += score[r][u];
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int c = 0; c < LOADS; ++c) {
        float v[WIDTH];
        Values::template expand<WIDTH>(value[u][c], v);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
#pragma unroll
          for (int r = 0; r < R; ++r) rows.acc[r][c * WIDTH + e] += score[r][u] * v[e];
        }
      }
    }
  }
}

// Reads the rows of a tile; a missing row stays zero.
template <int R, int COUNT, int LANES, int WIDTH, int D, typename T, typename Own>
__device__ inline void start_rows(Rows<R, COUNT>& rows, const T* queries, Own own,
                                  const int* params, int part) {
  const float scale = kLog2E / sqrtf(float(D));
  const int causal = params[kSuffix] - params[kQueries];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int row = own.row(r);
    rows.top[r] = kLowest;
    rows.sum[r] = 0.0f;
    rows.limit[r] = (causal > 0 ? causal : 0) + (row < 0 ? 0 : row % params[kQueries]);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      rows.acc[r][i] = 0.0f;
      const int d = dimension<LANES, WIDTH>(i, part);
      rows.q[r][i] = row < 0 ? 0.0f : as_float(queries[Row(row) * D + d]) * scale;
    }
  }
}

// Adds up what the slots of a warp found, and leaves it in the block's shared memory.
template <int R, int COUNT, int LANES, int WIDTH, int D>
__device__ inline void gather_slots(const Rows<R, COUNT>& rows, float* acc, float* tops,
                                    float* sums, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float top = rows.top[r];
#pragma unroll
    for (int hop = LANES; hop < 32; hop *= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, hop));
    const float fade = exp2f(rows.top[r] - top);
    float sum = rows.sum[r] * fade;
#pragma unroll
    for (int hop = LANES; hop < 32; hop *= 2) sum += __shfl_xor_sync(kAll, sum, hop);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float value = rows.acc[r][i] * fade;
#pragma unroll
      for (int hop = LANES; hop < 32; hop *= 2) value += __shfl_xor_sync(kAll, value, hop);
      if (lane < LANES) acc[(warp * R + r) * D + dimension<LANES, WIDTH>(i, lane)] = value;
    }
    if (lane == 0) {
      tops[warp * R + r] = top;
      sums[warp * R + r] = sum;
    }
  }
}

#else  // body
constexpr int COUNT = D / LANES;
constexpr int SLOTS = 32 / LANES;
constexpr int WIDTH = decltype(KEYS)::template width<COUNT>();
__shared__ float4 group_quads[SIMDGROUPS * R * D / 4];
float* const group_acc = reinterpret_cast<float*>(group_quads);
__shared__ float group_top[SIMDGROUPS * R];
__shared__ float group_sum[SIMDGROUPS * R];

const int lane = int(threadIdx.x % 32);
const int warp = int(threadIdx.x / 32);
const int split = int(blockIdx.y);
const int chunk = params[kChunk];
const int step = SLOTS * UNROLL;
#if GROUPED
const EvenRows<R> own{params[kSharing], int(blockIdx.x)};
#else
const TableRows own{tiles + Row(blockIdx.x) * (R + 1)};
#endif
const int head = own.head();


#if PAGED
const Paged layout{table, params[kNumHeads], head, params[kStride]};
#else
const Contiguous layout{Row(head) * params[kStride]};
#endif
#if TOKENS == 1
const int* list = lists + Row(own.row(0)) * params[kListWidth];
const int visible = list[0];
const Listed tokens{list + 1};
#elif TOKENS >= 2
const int in_blocks = params[kTop] * params[kBlockTokens];
const int tail_tokens = (params[kTokens] - params[kStart]) % params[kBlockTokens];
const int visible = in_blocks + tail_tokens;
#if TOKENS == 3
__shared__ Choice<SIMDGROUPS> choice;
__shared__ int blocks[kMostChosen];
choose<SIMDGROUPS>(scores, params[kNumBlocks], params[kTop], choice, blocks, int(threadIdx.x));
#endif
const Blocks tokens{blocks, params[kBlockTokens], params[kStart], in_blocks,
                    params[kTokens] - tail_tokens};
#else
const int visible = params[kTokens] - params[kStart];
const Run tokens{params[kStart]};
#endif

// WHOLE: one part, the suffix behind the prefix. Else a part is of either, each with a way of its
// own to the end: rows that live through both take 32 registers more, and a third of the speed.
Rows<R, COUNT> rows;
if (WHOLE || split < params[kPrefixSplits]) {
  start_rows<R, COUNT, LANES, WIDTH, D>(rows, queries, own, params, lane % LANES);
  const int begin = split * chunk;
  const int end = ::min(begin + chunk, visible);
  visit<R, COUNT, LANES, WIDTH, UNROLL, false>(rows, KEYS, VALUES, tokens, layout,
                                               begin + warp * step, end, SIMDGROUPS * step, lane);
#if !WHOLE
  gather_slots<R, COUNT, LANES, WIDTH, D>(rows, group_acc, group_top, group_sum, warp, lane);
#endif
}
#if SUFFIX
#if !WHOLE
else {
  start_rows<R, COUNT, LANES, WIDTH, D>(rows, queries, own, params, lane % LANES);
#else
{
#endif
  const int begin = WHOLE ? 0 : (split - params[kPrefixSplits]) * chunk;
  const int end = ::min(begin + chunk, params[kSuffix]);
  visit<R, COUNT, LANES, WIDTH, 1, true>(rows, plain<D>(suffix_keys), plain<D>(suffix_values),
                                         Run{0}, Contiguous{Row(head) * params[kSuffix]},
                                         begin + warp * SLOTS, end, SIMDGROUPS * SLOTS, lane);
#if !WHOLE
  gather_slots<R, COUNT, LANES, WIDTH, D>(rows, group_acc, group_top, group_sum, warp, lane);
#endif
}
#endif
#if WHOLE
gather_slots<R, COUNT, LANES, WIDTH, D>(rows, group_acc, group_top, group_sum, warp, lane);
#endif

#if MERGE
__shared__ int told;
finish_part<SIMDGROUPS, R, D, D>(group_acc, group_top, group_sum, own, split, params[kSplits],
                                 parts, counters + blockIdx.x, out, lse, &told, int(threadIdx.x));
#else
finish_whole<SIMDGROUPS, R, D, D>(group_acc, group_top, group_sum, own, out, lse,
                                  int(threadIdx.x));
#endif
#endif  // body
