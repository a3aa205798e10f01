#ifndef BODY
// Attention of 64 query rows of one KV head to one part of the keys on tensor cores: four warps of
// 16 rows share tiles of 32 keys. K and V are 16 bits wide. What is not exact in their type (wider
// q, the weights) is a sum of two parts, multiplied one after the other, so that results are those
// of float32 but for the order of sums.
//
// Grid: (tiles, splits) blocks of 128 threads. tiles i32 [tiles, 1 + 64] as in few_rows.
// Out: part_out f32 [rows, splits, D], part_lse f32 [rows, splits].

constexpr int kKeys = 32;

// What a warp holds of its 16 rows: a thread has rows lane / 4 and lane / 4 + 8 of each tile.
template <int D>
struct Tensor {
  float acc[D / 8][4];
  float top[2];
  float sum[2];
  int limit[2];
};

// Copies 32 rows of K or V, 16 bytes a load, into rows of D + 8 values.
template <int D, typename T, typename Tokens, typename Layout>
__device__ inline void copy_rows(uint4* tile, Plain<T, D> side, Tokens tokens, Layout layout,
                                 int base, int end, int index) {
  constexpr int LOADS = D / 8;
#pragma unroll
  for (int i = index; i < kKeys * LOADS; i += 128) {
    const int key = base + i / LOADS;
    const Row row = layout.row(tokens.token(key < end ? key : end - 1));
    tile[i / LOADS * (LOADS + 1) + i % LOADS] = side.template fetch<8>(row, i % LOADS * 8);
  }
}

// Fragments of 16 query rows, unscaled: PARTS words for each pair of values.
template <int D, int PARTS, typename T, typename Q>
__device__ inline void load_queries(unsigned (&q)[PARTS][D / 16][4], const Q* queries, int row,
                                    int row8, int pair) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int id = w % 2 ? row8 : row;
      const int d = k * 16 + w / 2 * 8 + pair * 2;
      float first = id < 0 ? 0.0f : as_float(queries[Row(id) * D + d]);
      float second = id < 0 ? 0.0f : as_float(queries[Row(id) * D + d + 1]);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) q[part][k][w] = pack<T>(first, second);
    }
  }
}

// Scores of 16 rows against the tile's 32 keys, in units of log 2.
template <int D, int PARTS, typename T>
__device__ inline void score_tile(float (&score)[kKeys / 8][4],
                                  const unsigned (&q)[PARTS][D / 16][4], const unsigned* tile,
                                  int row, int pair) {
  const float scale = kLog2E / sqrtf(float(D));
  const T* kind = nullptr;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const unsigned* key = tile + (n * 8 + row) * (D / 2 + 4) + k * 8 + pair;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) multiply(score[n], q[part][k], key[0], key[4], kind);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) score[n][e] *= scale;
  }
}

// Scores become weights; what was summed so far fades by the new maximum.
template <int D, bool CAUSAL>
__device__ inline void weigh(Tensor<D>& rows, float (&score)[kKeys / 8][4], int base, int end,
                             int pair) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = rows.top[half];
    bool seen[kKeys / 8][2];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = base + n * 8 + pair * 2 + e;
        seen[n][e] = key < end && (!CAUSAL || key <= rows.limit[half]);
        if (seen[n][e]) top = fmaxf(top, score[n][half * 2 + e]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
    const float fade = exp2f(rows.top[half] - top);
    rows.top[half] = top;
    rows.sum[half] *= fade;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      rows.acc[n][half * 2] *= fade;
      rows.acc[n][half * 2 + 1] *= fade;
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& weight = score[n][half * 2 + e];
        weight = seen[n][e] ? exp2f(weight - top) : 0.0f;
        rows.sum[half] += weight;
      }
    }
  }
}

// Adds the weights times the tile's values; a word of b holds two keys of one dimension.
template <int D, typename T>
__device__ inline void add_values(Tensor<D>& rows, float (&score)[kKeys / 8][4],
                                  const unsigned short* tile, int row, int pair) {
  constexpr int STRIDE = D + 8;
  const T* kind = nullptr;
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    unsigned weights[2][4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float* pairs = score[k * 2 + w / 2] + w % 2 * 2;
        weights[part][w] = pack<T>(pairs[0], pairs[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const unsigned short* value = tile + (k * 16 + pair * 2) * STRIDE + n * 8 + row;
      const unsigned b0 = value[0] | unsigned(value[STRIDE]) << 16;
      const unsigned b1 = value[8 * STRIDE] | unsigned(value[9 * STRIDE]) << 16;
      multiply(rows.acc[n], weights[0], b0, b1, kind);
      multiply(rows.acc[n], weights[1], b0, b1, kind);
    }
  }
}

template <int D, bool CAUSAL, typename T, typename Q, typename Tokens, typename Layout>
__device__ inline void visit_rows(Tensor<D>& rows, uint4* key_tile, uint4* value_tile,
                                  const Q* queries, const int* row_ids, Plain<T, D> keys,
                                  Plain<T, D> values, Tokens tokens, Layout layout, int begin,
                                  int end, int index) {
  constexpr int PARTS = Same<T, Q>::value ? 1 : 2;
  const int lane = index % 32;
  const int row = lane / 4;
  const int pair = lane % 4;
  const int* own = row_ids + index / 32 * 16;
  unsigned q[PARTS][D / 16][4];
  load_queries<D, PARTS, T>(q, queries, own[row], own[row + 8], pair);
  for (int base = begin; base < end; base += kKeys) {
    __syncthreads();  // the tiles are no longer read
    copy_rows(key_tile, keys, tokens, layout, base, end, index);
    copy_rows(value_tile, values, tokens, layout, base, end, index);
    __syncthreads();
    float score[kKeys / 8][4];
    score_tile<D, PARTS, T>(score, q, reinterpret_cast<const unsigned*>(key_tile), row, pair);
    weigh<D, CAUSAL>(rows, score, base, end, pair);
    add_values<D, T>(rows, score, reinterpret_cast<const unsigned short*>(value_tile), row, pair);
  }
}

#else  // body
__shared__ uint4 key_tile[kKeys * (D / 8 + 1)];
__shared__ uint4 value_tile[kKeys * (D / 8 + 1)];

const int index = int(threadIdx.x);
const int lane = index % 32;
const int split = int(blockIdx.y);
const int* row_ids = tiles + Row(blockIdx.x) * 65 + 1;
const int head = row_ids[-1];
const int chunk = params[kChunk];
const int* own = row_ids + index / 32 * 16 + lane / 4;

Tensor<D> rows;
#pragma unroll
for (int half = 0; half < 2; ++half) {
  const int row = own[half * 8];
  const int causal = params[kSuffix] - params[kQueries];
  rows.top[half] = kLowest;
  rows.sum[half] = 0.0f;
  rows.limit[half] = (causal > 0 ? causal : 0) + (row < 0 ? 0 : row % params[kQueries]);
#pragma unroll
  for (int n = 0; n < D / 8; ++n) rows.acc[n][half * 2] = rows.acc[n][half * 2 + 1] = 0.0f;
}

#if PAGED
const Paged layout{table, params[kNumHeads], head, params[kStride]};
#else
const Contiguous layout{Row(head) * params[kStride]};
#endif
if (split < params[kPrefixSplits]) {
  const int begin = split * chunk;
  const int end = ::min(begin + chunk, params[kTokens] - params[kStart]);
  visit_rows<D, false>(rows, key_tile, value_tile, queries, row_ids, KEYS, VALUES,
                       Run{params[kStart]}, layout, begin, end, index);
}
#if SUFFIX
else {
  const int begin = (split - params[kPrefixSplits]) * chunk;
  const int end = ::min(begin + chunk, params[kSuffix]);
  visit_rows<D, true>(rows, key_tile, value_tile, queries, row_ids, plain<D>(suffix_keys),
                      plain<D>(suffix_values), Run{0}, Contiguous{Row(head) * params[kSuffix]},
                      begin, end, index);
}
#endif

#pragma unroll
for (int half = 0; half < 2; ++half) {
  float sum = rows.sum[half];
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  const int row = own[half * 8];
  if (row < 0) continue;
  const Row part = Row(row) * params[kSplits] + split;
  const bool none = sum == 0.0f;
  const int d = lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    part_out[part * D + n * 8 + d] = none ? 0.0f : rows.acc[n][half * 2] / sum;
    part_out[part * D + n * 8 + d + 1] = none ? 0.0f : rows.acc[n][half * 2 + 1] / sum;
  }
  if (lane % 4 == 0) part_lse[part] = none ? -infinity() : (rows.top[half] + log2f(sum)) * kLn2;
}
#endif  // body
