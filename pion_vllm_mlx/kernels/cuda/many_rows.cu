#ifndef BODY
// Attention of 16 query rows of one KV head to one part of the keys: four warps of four rows share
// tiles of 32 keys in shared memory, SLICE dimensions at a time.
//
// Grid: (tiles, splits) blocks of 128 threads. tiles i32 [tiles, 1 + 16] as in few_rows.
// Out: part_out f32 [rows, splits, D], part_lse f32 [rows, splits].

template <int D>
struct RowGroup {
  float acc[4][D / 32];
  float top[4];
  float sum[4];
  int limit[4];
};

// Copies dimensions [slice, slice + SLICE) of 32 keys into a tile of padded rows.
template <int SLICE, typename Side, typename Tokens, typename Layout>
__device__ inline void copy_keys(float* tile, Side side, Tokens tokens, Layout layout, int base,
                                 int end, int slice, int index) {
  constexpr int WIDTH = Side::template width<SLICE>();
  constexpr int LOADS = SLICE / WIDTH;
#pragma unroll
  for (int i = index; i < 32 * LOADS; i += 128) {
    const int key = base + i / LOADS;
    const int d = i % LOADS * WIDTH;
    const Row row = layout.row(tokens.token(key < end ? key : end - 1));
    float values[WIDTH];
    Side::template expand<WIDTH>(side.template fetch<WIDTH>(row, slice + d), values);
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) tile[i / LOADS * (SLICE + 1) + d + e] = values[e];
  }
}

// Scores against 32 keys become weights; what was summed so far fades by the new maximum.
template <int D, bool CAUSAL>
__device__ inline void weigh(RowGroup<D>& rows, const float* score, float* weights, int key,
                             int end, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const bool seen = key < end && (!CAUSAL || key <= rows.limit[r]);
    const float top = fmaxf(rows.top[r], warp_max(seen ? score[r] : kLowest));
    const float weight = seen ? exp2f(score[r] - top) : 0.0f;
    const float fade = exp2f(rows.top[r] - top);
    rows.top[r] = top;
    rows.sum[r] = rows.sum[r] * fade + warp_sum(weight);
#pragma unroll
    for (int e = 0; e < D / 32; ++e) rows.acc[r][e] *= fade;
    weights[(warp * 4 + r) * 32 + lane] = weight;
  }
}

template <int D, int SLICE, bool CAUSAL, typename T, typename Keys, typename Values,
          typename Tokens, typename Layout>
__device__ inline void visit_tiles(RowGroup<D>& rows, float* tile, float* query_tile,
                                   float* weights, const T* queries, const int* row_ids,
                                   Keys keys, Values values, Tokens tokens, Layout layout,
                                   int begin, int end, int index) {
  const int warp = index / 32;
  const int lane = index % 32;
  const float scale = kLog2E / sqrtf(float(D));
  for (int base = begin; base < end; base += 32) {
    float score[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int slice = 0; slice < D; slice += SLICE) {
      __syncthreads();  // the tiles are no longer read
      for (int i = index; i < 16 * SLICE; i += 128) {
        const int row = row_ids[i / SLICE];
        query_tile[i] =
            row < 0 ? 0.0f : as_float(queries[Row(row) * D + slice + i % SLICE]) * scale;
      }
      copy_keys<SLICE>(tile, keys, tokens, layout, base, end, slice, index);
      __syncthreads();
#pragma unroll 8
      for (int d = 0; d < SLICE; ++d) {
        const float key = tile[lane * (SLICE + 1) + d];
#pragma unroll
        for (int r = 0; r < 4; ++r) score[r] += query_tile[(warp * 4 + r) * SLICE + d] * key;
      }
    }
    weigh<D, CAUSAL>(rows, score, weights, base + lane, end, warp, lane);
#pragma unroll
    for (int slice = 0; slice < D; slice += SLICE) {
      __syncthreads();  // the tile of keys is no longer read
      copy_keys<SLICE>(tile, values, tokens, layout, base, end, slice, index);
      __syncthreads();
#pragma unroll 4
      for (int j = 0; j < 32; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float weight = weights[(warp * 4 + r) * 32 + j];
#pragma unroll
          for (int e = 0; e < SLICE / 32; ++e) {
            rows.acc[r][slice / 32 + e] += weight * tile[j * (SLICE + 1) + e * 32 + lane];
          }
        }
      }
    }
  }
}

#else  // body
__shared__ float tile[32 * (SLICE + 1)];
__shared__ float query_tile[16 * SLICE];
__shared__ float weights[16 * 32];

const int index = int(threadIdx.x);
const int lane = index % 32;
const int warp = index / 32;
const int split = int(blockIdx.y);
const int* row_ids = tiles + Row(blockIdx.x) * 17 + 1;
const int head = row_ids[-1];
const int chunk = params[kChunk];

RowGroup<D> rows;
#pragma unroll
for (int r = 0; r < 4; ++r) {
  const int row = row_ids[warp * 4 + r];
  const int causal = params[kSuffix] - params[kQueries];
  rows.top[r] = kLowest;
  rows.sum[r] = 0.0f;
  rows.limit[r] = (causal > 0 ? causal : 0) + (row < 0 ? 0 : row % params[kQueries]);
#pragma unroll
  for (int e = 0; e < D / 32; ++e) rows.acc[r][e] = 0.0f;
}

#if PAGED
const Paged layout{table, params[kNumHeads], head, params[kStride]};
#else
const Contiguous layout{Row(head) * params[kStride]};
#endif
if (split < params[kPrefixSplits]) {
  const int begin = split * chunk;
  const int end = ::min(begin + chunk, params[kTokens] - params[kStart]);
  visit_tiles<D, SLICE, false>(rows, tile, query_tile, weights, queries, row_ids, KEYS, VALUES,
                               Run{params[kStart]}, layout, begin, end, index);
}
#if SUFFIX
else {
  const int begin = (split - params[kPrefixSplits]) * chunk;
  const int end = ::min(begin + chunk, params[kSuffix]);
  visit_tiles<D, SLICE, true>(rows, tile, query_tile, weights, queries, row_ids,
                              plain<D>(suffix_keys), plain<D>(suffix_values), Run{0},
                              Contiguous{Row(head) * params[kSuffix]}, begin, end, index);
}
#endif

#pragma unroll
for (int r = 0; r < 4; ++r) {
  const int row = row_ids[warp * 4 + r];
  if (row < 0) continue;
  const Row part = Row(row) * params[kSplits] + split;
  const bool none = rows.sum[r] == 0.0f;
#pragma unroll
  for (int e = 0; e < D / 32; ++e) {
    part_out[part * D + e * 32 + lane] = none ? 0.0f : rows.acc[r][e] / rows.sum[r];
  }
  if (lane == 0) part_lse[part] = none ? -infinity() : (rows.top[r] + log2f(rows.sum[r])) * kLn2;
}
#endif  // body
