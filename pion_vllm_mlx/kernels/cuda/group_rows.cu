#ifndef BODY
// Attention of at most eight query rows of one KV head (one query, grouped heads, short suffixes)
// to one part of the keys on tensor cores, straight from registers. K and V are 16 bits wide. Rows
// 0 to 7 of a 16-row fragment are the values rounded to that type, rows 8 to 15 what rounding left
// of them, so that results are those of float32 but for the order of sums.
//
// A warp takes 16 keys a step. Fragments name dimensions and keys in whatever order lets a thread
// load 16 bytes at a time: thread 4 g + t has of keys g and g + 8 the dimensions 32 c + 8 t to
// 32 c + 8 t + 7, and of the values of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 WIDTH dimensions from
// 8 WIDTH s + WIDTH g on. What is loaded next is on its way while this is multiplied.
//
// Grid: (tiles, splits) blocks of SIMDGROUPS warps. Tiles, lists, blocks, scores, MERGE and outputs
// as in few_rows; a part is of the prefix or of the suffix.

// Words of values as they were loaded.
__device__ inline void words_of(const uint4& raw, unsigned* out) {
  out[0] = raw.x, out[1] = raw.y, out[2] = raw.z, out[3] = raw.w;
}
__device__ inline void words_of(const uint2& raw, unsigned* out) { out[0] = raw.x, out[1] = raw.y; }

// What a thread holds of row lane / 4: sums of V, of the rounded weights and of what is left.
template <int D>
struct Group {
  static constexpr int WIDTH = D % 64 == 0 ? 8 : 4;  // values of V a load
  static constexpr int SETS = D / (8 * WIDTH);
  float acc[SETS][WIDTH][4];
  float top;
  float sum;
  int limit;
};

// Dimension of acc[set][e][half], half 0 or 1.
template <int WIDTH>
__device__ inline int dimension(int set, int e, int half, int pair) {
  return (set * 8 + pair * 2 + half) * WIDTH + e;
}

// The query's fragment: q[2 c] for dimensions 32 c + 8 t to + 3, q[2 c + 1] for + 4 to + 7.
template <int D, typename T, typename Q>
__device__ inline void load_query(unsigned (&q)[D / 16][4], const Q* queries, int row, int pair) {
#pragma unroll
  for (int c = 0; c < D / 32; ++c) {
    float values[8];
    const Q* at = queries + Row(row < 0 ? 0 : row) * D + c * 32 + pair * 8;
    Loader<Q, 8>::expand(Loader<Q, 8>::fetch(at), values);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      float first = row < 0 ? 0.0f : values[i];
      float second = row < 0 ? 0.0f : values[i + 1];
      q[2 * c + i / 4][i % 4] = pack<T>(first, second);
      q[2 * c + i / 4][i % 4 + 1] = pack<T>(first, second);
    }
  }
}

template <int D, typename T, typename Tokens, typename Layout>
__device__ inline void load_keys(uint4 (&key)[2][D / 32], Plain<T, D> side, Tokens tokens,
                                 Layout layout, int base, int end, int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const Row row = layout.row(tokens.token(::min(base + n * 8 + lane / 4, end - 1)));
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      key[n][c] = side.template fetch<8>(row, c * 32 + lane % 4 * 8);
    }
  }
}

template <int WIDTH, int SETS, int D, typename T, typename Raw, typename Tokens, typename Layout>
__device__ inline void load_values(Raw (&value)[4][SETS], Plain<T, D> side, Tokens tokens,
                                   Layout layout, int base, int end, int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int i = base + n / 2 * 8 + lane % 4 * 2 + n % 2;
    const Row row = layout.row(tokens.token(::min(i, end - 1)));
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
      value[n][s] = side.template fetch<WIDTH>(row, (s * 8 + lane / 4) * WIDTH);
    }
  }
}

// Scores of 16 keys, in units of log 2: this thread has keys 8 n + 2 t and + 1 of row g.
template <int D, typename T>
__device__ inline void score_keys(float (&score)[2][2], const unsigned (&q)[D / 16][4],
                                  const uint4 (&key)[2][D / 32]) {
  const float scale = kLog2E / sqrtf(float(D));
  const T* kind = nullptr;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float both[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      unsigned words[4];
      words_of(key[n][c], words);
      multiply(both, q[2 * c], words[0], words[1], kind);
      multiply(both, q[2 * c + 1], words[2], words[3], kind);
    }
    score[n][0] = (both[0] + both[2]) * scale;
    score[n][1] = (both[1] + both[3]) * scale;
  }
}

// Scores become weights, as the fragment that multiplies V; what was summed so far fades.
template <int D, bool CAUSAL, typename T>
__device__ inline void weigh(Group<D>& rows, float (&score)[2][2], unsigned (&weights)[4], int base,
                             int end, int pair) {
  float top = rows.top;
  bool seen[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = base + n * 8 + pair * 2 + e;
      seen[n][e] = i < end && (!CAUSAL || i <= rows.limit);
      if (seen[n][e]) top = fmaxf(top, score[n][e]);
    }
  }
  top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
  top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
  if (__any_sync(kAll, top != rows.top)) {
    const float fade = exp2f(rows.top - top);
    rows.sum *= fade;
#pragma unroll
    for (int s = 0; s < Group<D>::SETS; ++s) {
#pragma unroll
      for (int e = 0; e < Group<D>::WIDTH; ++e) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.acc[s][e][i] *= fade;
      }
    }
  }
  rows.top = top;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      score[n][e] = seen[n][e] ? exp2f(score[n][e] - top) : 0.0f;
      rows.sum += score[n][e];
    }
    weights[n * 2] = pack<T>(score[n][0], score[n][1]);
    weights[n * 2 + 1] = pack<T>(score[n][0], score[n][1]);
  }
}

// Adds the weights times the values of 16 keys.
template <int D, typename T, typename Raw>
__device__ inline void add_values(Group<D>& rows, const unsigned (&weights)[4],
                                  const Raw (&value)[4][Group<D>::SETS]) {
  constexpr int WIDTH = Group<D>::WIDTH;
  const T* kind = nullptr;
#pragma unroll
  for (int s = 0; s < Group<D>::SETS; ++s) {
    unsigned words[4][WIDTH / 2];
#pragma unroll
    for (int n = 0; n < 4; ++n) words_of(value[n][s], words[n]);
#pragma unroll
    for (int e = 0; e < WIDTH; e += 2) {
      const unsigned one = words[0][e / 2];
      const unsigned two = words[1][e / 2];
      const unsigned three = words[2][e / 2];
      const unsigned four = words[3][e / 2];
      multiply(rows.acc[s][e], weights, (one & 0xffffu) | two << 16,
               (three & 0xffffu) | four << 16, kind);
      multiply(rows.acc[s][e + 1], weights, one >> 16 | (two & 0xffff0000u),
               three >> 16 | (four & 0xffff0000u), kind);
    }
  }
}

// Visits keys [begin, end), `stride` from one step of the warp to its next.
template <int D, bool CAUSAL, typename T, typename Q, typename Tokens, typename Layout>
__device__ inline void visit(Group<D>& rows, const Q* queries, int row, Plain<T, D> keys,
                             Plain<T, D> values, Tokens tokens, Layout layout, int begin, int end,
                             int stride, int lane) {
  if (begin >= end) return;
  constexpr int WIDTH = Group<D>::WIDTH;
  constexpr int SETS = Group<D>::SETS;
  uint4 key[2][D / 32];
  typename Plain<T, D>::template Raw<WIDTH> value[4][SETS];
  load_keys(key, keys, tokens, layout, begin, end, lane);
  load_values<WIDTH, SETS>(value, values, tokens, layout, begin, end, lane);
  unsigned q[D / 16][4];
  load_query<D, T>(q, queries, row, lane % 4);
  for (int base = begin; base < end; base += stride) {
    const int next = base + stride;
    float score[2][2];
    score_keys<D, T>(score, q, key);
    if (next < end) load_keys(key, keys, tokens, layout, next, end, lane);
    unsigned weights[4];
    weigh<D, CAUSAL, T>(rows, score, weights, base, end, lane % 4);
    add_values<D, T>(rows, weights, value);
    if (next < end) load_values<WIDTH, SETS>(value, values, tokens, layout, next, end, lane);
  }
}

// Adds up what the threads of a warp hold and leaves it in the block's shared memory.
template <int R, int D, int STRIDE>
__device__ inline void gather(const Group<D>& rows, float* acc, float* tops, float* sums, int warp,
                              int lane) {
  constexpr int WIDTH = Group<D>::WIDTH;
  const int row = lane / 4;
  float sum = rows.sum;
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  if (row >= R) return;
  float* mine = acc + (warp * R + row) * STRIDE;
#pragma unroll
  for (int s = 0; s < Group<D>::SETS; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < WIDTH; e += 4) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          four[i] = rows.acc[s][e + i][half] + rows.acc[s][e + i][half + 2];
        }
        store4(mine + dimension<WIDTH>(s, e, half, lane % 4), four, 1.0f);
      }
    }
  }
  if (lane % 4 == 0) {
    tops[warp * R + row] = rows.top;
    sums[warp * R + row] = sum;
  }
}

#else  // body
constexpr int PADDED = D + 4;
__shared__ float4 group_quads[SIMDGROUPS * R * PADDED / 4];
float* const group_acc = reinterpret_cast<float*>(group_quads);
__shared__ float group_top[SIMDGROUPS * R];
__shared__ float group_sum[SIMDGROUPS * R];

const int lane = int(threadIdx.x % 32);
const int warp = int(threadIdx.x / 32);
const int chunk = params[kChunk];
const int tile = int(blockIdx.x);
const int split = int(blockIdx.y);
#if GROUPED
const EvenRows<R> own{params[kSharing], tile};
#else
const TableRows own{tiles + Row(tile) * (R + 1)};
#endif
const int head = own.head();
const int row = lane / 4 < R ? own.row(lane / 4) : -1;

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

Group<D> rows = {};
const int causal = params[kSuffix] - params[kQueries];
rows.top = kLowest;
rows.limit = (causal > 0 ? causal : 0) + (row < 0 ? 0 : row % params[kQueries]);
#if SUFFIX
if (split >= params[kPrefixSplits]) {
  const int begin = (split - params[kPrefixSplits]) * chunk;
  visit<D, true>(rows, queries, row, plain<D>(suffix_keys), plain<D>(suffix_values), Run{0},
                 Contiguous{Row(head) * params[kSuffix]}, begin + warp * 16,
                 ::min(begin + chunk, params[kSuffix]), SIMDGROUPS * 16, lane);
} else
#endif
{
  const int begin = split * chunk;
  visit<D, false>(rows, queries, row, KEYS, VALUES, tokens, layout, begin + warp * 16,
                  ::min(begin + chunk, visible), SIMDGROUPS * 16, lane);
}
gather<R, D, PADDED>(rows, group_acc, group_top, group_sum, warp, lane);

#if MERGE
__shared__ int told;
finish_part<SIMDGROUPS, R, D, PADDED>(group_acc, group_top, group_sum, own, split,
                                      params[kSplits], parts, counters + tile, out, lse,
                                      &told, int(threadIdx.x));
#else
finish_whole<SIMDGROUPS, R, D, PADDED>(group_acc, group_top, group_sum, own, out, lse,
                                       int(threadIdx.x));
#endif
#endif  // body
