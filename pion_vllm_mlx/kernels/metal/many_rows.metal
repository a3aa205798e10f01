#ifndef BODY
// Attention of 16 query rows of one KV head to one part of the keys: four simdgroups of four rows
// share tiles of 32 keys in threadgroup memory, SLICE dimensions at a time.
//
// Grid: (tiles, splits) threadgroups of 128 threads. tiles i32 [tiles, 1 + 16] as in few_rows.
// Out: part_out f32 [rows, splits, D], part_lse f32 [rows, splits].

template <int D, int SLICE>
struct RowGroup {
  float acc[4][D / 32];
  float top[4];
  float sum[4];
  int limit[4];
};

// Copies dimensions [slice, slice + SLICE) of 32 keys into a tile of padded rows.
template <int SLICE, typename Tile, typename Side, typename Tokens, typename Layout>
void copy_keys(Tile tile, Side side, Tokens tokens, Layout layout, int base, int end, int slice,
               int index) {
  constexpr int QUADS = SLICE / 4;
  for (int i = index; i < 32 * QUADS; i += 128) {
    const int key = base + i / QUADS;
    const int d = i % QUADS * 4;
    const float4 quad = side.load(layout.row(tokens.token(key < end ? key : end - 1)), slice + d);
    const int at = i / QUADS * (SLICE + 1) + d;
    tile[at] = quad.x;
    tile[at + 1] = quad.y;
    tile[at + 2] = quad.z;
    tile[at + 3] = quad.w;
  }
}

// Scores against 32 keys become weights; what was summed so far fades by the new maximum.
template <int D, int SLICE, bool CAUSAL, typename Weights>
void weigh(thread RowGroup<D, SLICE>& rows, thread float* score, Weights weights, int key, int end,
           int simd_id, int lane) {
  for (int r = 0; r < 4; ++r) {
    const bool seen = key < end && (!CAUSAL || key <= rows.limit[r]);
    const float top = fmax(rows.top[r], simd_max(seen ? score[r] : kLowest));
    const float weight = seen ? metal::exp2(score[r] - top) : 0.0f;
    const float fade = metal::exp2(rows.top[r] - top);
    rows.top[r] = top;
    rows.sum[r] = rows.sum[r] * fade + simd_sum(weight);
    for (int e = 0; e < D / 32; ++e) rows.acc[r][e] *= fade;
    weights[(simd_id * 4 + r) * 32 + lane] = weight;
  }
}

template <int D, int SLICE, bool CAUSAL, typename Tile, typename Query, typename Map, typename Keys,
          typename Values, typename Tokens, typename Layout>
void visit_tiles(thread RowGroup<D, SLICE>& rows, Tile tile, Tile query_tile, Tile weights,
                 Query queries, Map map, Keys keys, Values values, Tokens tokens, Layout layout,
                 int begin, int end, int index) {
  const int simd_id = index / 32;
  const int lane = index % 32;
  const float scale = kLog2E / metal::sqrt(float(D));
  for (int base = begin; base < end; base += 32) {
    float score[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int slice = 0; slice < D; slice += SLICE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the tiles are no longer read
      for (int i = index; i < 16 * SLICE; i += 128) {
        const int row = map.row(i / SLICE);
        query_tile[i] =
            row < 0 ? 0.0f : float(queries[ulong(row) * D + slice + i % SLICE]) * scale;
      }
      copy_keys<SLICE>(tile, keys, tokens, layout, base, end, slice, index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int d = 0; d < SLICE; ++d) {
        const float key = tile[lane * (SLICE + 1) + d];
        for (int r = 0; r < 4; ++r) score[r] += query_tile[(simd_id * 4 + r) * SLICE + d] * key;
      }
    }
    weigh<D, SLICE, CAUSAL>(rows, score, weights, base + lane, end, simd_id, lane);
#pragma unroll
    for (int slice = 0; slice < D; slice += SLICE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile of keys is no longer read
      copy_keys<SLICE>(tile, values, tokens, layout, base, end, slice, index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int j = 0; j < 32; ++j) {
        for (int r = 0; r < 4; ++r) {
          const float weight = weights[(simd_id * 4 + r) * 32 + j];
          for (int e = 0; e < SLICE / 32; ++e) {
            rows.acc[r][slice / 32 + e] += weight * tile[j * (SLICE + 1) + e * 32 + lane];
          }
        }
      }
    }
  }
}

template <typename Tiles>
struct RowMap {
  Tiles tiles;
  int first;
  int row(int r) const { return tiles[first + r]; }
};

template <typename Tiles>
RowMap<Tiles> row_map(Tiles tiles, int first) {
  return RowMap<Tiles>{tiles, first};
}

#else  // body
threadgroup float tile[32 * (SLICE + 1)];
threadgroup float query_tile[16 * SLICE];
threadgroup float weights[16 * 32];

const int lane = int(thread_index_in_simdgroup);
const int simd_id = int(simdgroup_index_in_threadgroup);
const int index = simd_id * 32 + lane;
const int split = int(threadgroup_position_in_grid.y);
const int first = int(threadgroup_position_in_grid.x) * 17;
const int head = tiles[first];
const int chunk = params[kChunk];
const auto map = row_map(tiles, first + 1);

RowGroup<D, SLICE> rows;
for (int r = 0; r < 4; ++r) {
  const int row = map.row(simd_id * 4 + r);
  const int causal = params[kSuffix] - params[kQueries];
  rows.top[r] = kLowest;
  rows.sum[r] = 0.0f;
  rows.limit[r] = (causal > 0 ? causal : 0) + (row < 0 ? 0 : row % params[kQueries]);
  for (int e = 0; e < D / 32; ++e) rows.acc[r][e] = 0.0f;
}

#if PAGED
const Paged layout{table, ulong(params[kNumHeads]), ulong(head), params[kStride]};
#else
const Contiguous layout{ulong(head) * ulong(params[kStride])};
#endif
if (split < params[kPrefixSplits]) {
  const int begin = split * chunk;
  const int end = min(begin + chunk, params[kTokens] - params[kStart]);
  visit_tiles<D, SLICE, false>(rows, tile, query_tile, weights, queries, map, KEYS, VALUES,
                               Run{params[kStart]}, layout, begin, end, index);
}
#if SUFFIX
else {
  const int begin = (split - params[kPrefixSplits]) * chunk;
  const int end = min(begin + chunk, params[kSuffix]);
  visit_tiles<D, SLICE, true>(rows, tile, query_tile, weights, queries, map, plain<D>(suffix_keys),
                              plain<D>(suffix_values), Run{0},
                              Contiguous{ulong(head) * ulong(params[kSuffix])}, begin, end, index);
}
#endif

for (int r = 0; r < 4; ++r) {
  const int row = map.row(simd_id * 4 + r);
  if (row < 0) continue;
  const ulong part = ulong(row) * ulong(params[kSplits]) + ulong(split);
  const bool none = rows.sum[r] == 0.0f;
  for (int e = 0; e < D / 32; ++e) {
    part_out[part * D + ulong(e * 32 + lane)] = none ? 0.0f : rows.acc[r][e] / rows.sum[r];
  }
  if (lane == 0) {
    part_lse[part] = none ? -INFINITY : (rows.top[r] + metal::log2(rows.sum[r])) * kLn2;
  }
}
#endif  // body
