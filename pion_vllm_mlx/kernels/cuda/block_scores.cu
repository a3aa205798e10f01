#ifndef BODY
// Scores of blocks, averaged over the query heads; those by the mean scaled by 1 / sqrt(D).
//
// A score is linear in q for the mean, and in its positive and its negative values for Quest's
// bound: the query heads of a KV head are added up first. A head whose q is not finite counts
// nothing. GROUPED: KV heads have as many query heads, neighbours; else members i32
// [H_kv + 1 + H_q], for each KV head where its query heads begin among those that follow, the end
// last. high, low f32 [H_kv, blocks, D].
//
// Grid: (blocks / 8) blocks of eight warps. Eight blocks of keys are scored at once, each warp for
// its share of the KV heads. Out: scores f32 [blocks].

constexpr int kScored = 8;

// What the query heads of one KV head add up to, of the dimensions that are this thread's.
template <int COUNT>
struct Summed {
  float positive[COUNT];
  float negative[COUNT];
};

// WIDTH floats at p.
template <int WIDTH>
__device__ inline void load_floats(const float* p, float* out) {
  if (WIDTH == 4) {
    Loader<float, 4>::expand(Loader<float, 4>::fetch(p), out);
  } else if (WIDTH == 2) {
    const float2 pair = __ldg(reinterpret_cast<const float2*>(p));
    out[0] = pair.x, out[1] = pair.y;
  } else {
    out[0] = __ldg(p);
  }
}

// Adds a row of q, unless one of its values is not finite.
template <int COUNT, int WIDTH, typename T>
__device__ inline void add_row(Summed<COUNT>& summed, const T* row, int lane) {
  float q[COUNT];
  int bad = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    q[i] = as_float(row[(i / WIDTH * 32 + lane) * WIDTH + i % WIDTH]);
    if (!(fabsf(q[i]) < infinity())) bad = 1;
  }
  const bool skip = __any_sync(kAll, bad);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    summed.positive[i] += skip ? 0.0f : fmaxf(q[i], 0.0f);
    summed.negative[i] += skip ? 0.0f : fminf(q[i], 0.0f);
  }
}

#else  // body
constexpr int COUNT = D / 32;
constexpr int WIDTH = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
__shared__ float partial[kScored * kScored];

const int lane = int(threadIdx.x % 32);
const int warp = int(threadIdx.x / 32);
const int first = int(blockIdx.x) * kScored;
const int num_blocks = params[kNumBlocks];

float score[kScored] = {};
for (int head = warp; head < params[kNumHeads]; head += kScored) {
  Summed<COUNT> summed = {};
#if GROUPED
  const int each = params[kSharing];
#pragma unroll 4
  for (int i = 0; i < each; ++i) {
    add_row<COUNT, WIDTH>(summed, queries + Row(head * each + i) * D, lane);
  }
#else
  const int end = members[head + 1];
#pragma unroll 4
  for (int i = members[head]; i < end; ++i) {
    add_row<COUNT, WIDTH>(summed, queries + Row(members[i]) * D, lane);
  }
#endif
#pragma unroll
  for (int b = 0; b < kScored; ++b) {
    const Row block = Row(head) * num_blocks + ::min(first + b, num_blocks - 1);
#pragma unroll
    for (int i = 0; i < COUNT; i += WIDTH) {
      const Row at = block * D + (i / WIDTH * 32 + lane) * WIDTH;
      float most[WIDTH];
      float least[WIDTH];
      load_floats<WIDTH>(high + at, most);
#if QUEST
      load_floats<WIDTH>(low + at, least);
#else
      for (int e = 0; e < WIDTH; ++e) least[e] = most[e];
#endif
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) {
        score[b] += summed.positive[i + e] * most[e] + summed.negative[i + e] * least[e];
      }
    }
  }
}
#pragma unroll
for (int b = 0; b < kScored; ++b) {
  const float sum = warp_sum(score[b]);
  if (lane == 0) partial[warp * kScored + b] = sum;
}
__syncthreads();

const int mine = int(threadIdx.x);
if (mine < kScored && first + mine < num_blocks) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kScored; ++w) sum += partial[w * kScored + mine];
  sum /= float(params[kQueries]);
#if !QUEST
  sum /= sqrtf(float(D));
#endif
  scores[first + mine] = sum;
}
#endif  // body
