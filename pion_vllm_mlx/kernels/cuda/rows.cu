// How rows of K and V are held, and which of them a block of threads visits. Included before every
// kernel. D is the head dimension. The twin of metal/rows.metal.

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

constexpr float kLowest = -1e30f;  // below every score; finite, so differences are too
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr unsigned kAll = 0xffffffffu;
constexpr int kMostChosen = 32;  // blocks that threads choose where they attend to them

// The numbers of a launch, in the order in which the host packs them.
enum Param {
  kTokens,        // N
  kStart,         // the first token seen
  kStride,        // rows of a KV head in a contiguous prefix; tokens of a page in a paged one
  kNumHeads,      // H_kv
  kSplits,        // parts of the keys, those of the suffix behind those of the prefix
  kPrefixSplits,  // parts of the prefix
  kChunk,         // keys of a part
  kSuffix,        // S
  kQueries,       // M
  kListWidth,     // K: row length of the listed tokens
  kBlockTokens,   // tokens of a selected block
  kNumBlocks,     // blocks there are
  kTop,           // blocks selected, or to select
  kSharing,       // query rows of a KV head, where every head has as many and they are neighbours
};

using Row = long long;

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

__device__ inline float low_bfloat(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_bfloat(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// Values as they come from memory, WIDTH at a time, and as floats.
template <typename T, int WIDTH>
struct Loader;

template <>
struct Loader<float, 4> {
  using Raw = float4;
  __device__ static Raw fetch(const float* p) {
    return __ldg(reinterpret_cast<const float4*>(p));
  }
  __device__ static void expand(const Raw& raw, float* out) {
    out[0] = raw.x, out[1] = raw.y, out[2] = raw.z, out[3] = raw.w;
  }
};

__device__ inline void expand_pair(unsigned pair, const __nv_bfloat16*, float* out) {
  out[0] = low_bfloat(pair);
  out[1] = high_bfloat(pair);
}

__device__ inline void expand_pair(unsigned pair, const __half*, float* out) {
  out[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xffffu)));
  out[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
}

struct TwoQuads {
  float4 low;
  float4 high;
};

template <>
struct Loader<float, 8> {
  using Raw = TwoQuads;
  __device__ static Raw fetch(const float* p) {
    return Raw{Loader<float, 4>::fetch(p), Loader<float, 4>::fetch(p + 4)};
  }
  __device__ static void expand(const Raw& raw, float* out) {
    Loader<float, 4>::expand(raw.low, out);
    Loader<float, 4>::expand(raw.high, out + 4);
  }
};

template <typename T>
struct Loader<T, 4> {
  using Raw = uint2;
  __device__ static Raw fetch(const T* p) { return __ldg(reinterpret_cast<const uint2*>(p)); }
  __device__ static void expand(const Raw& raw, float* out) {
    const T* kind = nullptr;
    expand_pair(raw.x, kind, out);
    expand_pair(raw.y, kind, out + 2);
  }
};

template <typename T>
struct Loader<T, 8> {
  using Raw = uint4;
  __device__ static Raw fetch(const T* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }
  __device__ static void expand(const Raw& raw, float* out) {
    const T* kind = nullptr;
    expand_pair(raw.x, kind, out);
    expand_pair(raw.y, kind, out + 2);
    expand_pair(raw.z, kind, out + 4);
    expand_pair(raw.w, kind, out + 6);
  }
};

__device__ inline float as_float(float value) { return value; }
__device__ inline float as_float(__half value) { return __half2float(value); }
__device__ inline float as_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// Four values at p as floats.
template <typename T>
__device__ inline void load4(const T* p, float* out) {
  Loader<T, 4>::expand(Loader<T, 4>::fetch(p), out);
}

// 16 bytes a load where the values of a thread allow it.
template <typename T, int D>
struct Plain {
  const T* data;
  template <int COUNT>
  __device__ static constexpr int width() {
    return sizeof(T) == 2 && COUNT % 8 == 0 ? 8 : 4;
  }
  template <int WIDTH>
  using Raw = typename Loader<T, WIDTH>::Raw;
  template <int WIDTH>
  __device__ Raw<WIDTH> fetch(Row row, int d) const {
    return Loader<T, WIDTH>::fetch(data + row * D + d);
  }
  template <int WIDTH>
  __device__ static void expand(const Raw<WIDTH>& raw, float* out) {
    Loader<T, WIDTH>::expand(raw, out);
  }
};

template <int D, typename T>
__device__ inline Plain<T, D> plain(const T* data) {
  return Plain<T, D>{data};
}

// Groups of GROUP codes of BITS bits with a scale and a bias each.
template <typename T, int D, int BITS, int GROUP>
struct Affine {
  const unsigned* codes;
  const T* scales;
  const T* biases;
  template <int COUNT>
  __device__ static constexpr int width() {
    return BITS == 4 && COUNT % 8 == 0 ? 8 : 4;
  }
  struct Word {
    unsigned word;
    float scale;
    float bias;
  };
  template <int WIDTH>
  using Raw = Word;
  template <int WIDTH>
  __device__ Word fetch(Row row, int d) const {
    const Row at = row * D + d;
    const unsigned word = __ldg(codes + at * BITS / 32) >> (d * BITS % 32);
    return Word{word, as_float(scales[at / GROUP]), as_float(biases[at / GROUP])};
  }
  template <int WIDTH>
  __device__ static void expand(const Word& raw, float* out) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      out[i] = float((raw.word >> (BITS * i)) & ((1u << BITS) - 1)) * raw.scale + raw.bias;
    }
  }
};

template <int D, int BITS, int GROUP, typename T>
__device__ inline Affine<T, D, BITS, GROUP> affine(const unsigned* codes, const T* scales,
                                                   const T* biases) {
  return Affine<T, D, BITS, GROUP>{codes, scales, biases};
}

// Where token t of one KV head lies: row t behind the head's first one, or through a block table.
struct Contiguous {
  Row first;
  __device__ Row row(int token) const { return first + token; }
};

struct Paged {
  const int* table;
  int num_heads;
  int head;
  int page;
  __device__ Row row(int token) const {
    const Row block = Row(__ldg(table + token / page)) * num_heads + head;
    return block * page + token % page;
  }
};

// Which tokens are visited: key i of the visit is token token(i).
struct Run {
  int start;
  __device__ int token(int i) const { return start + i; }
};

struct Listed {
  const int* ids;
  __device__ int token(int i) const { return __ldg(ids + i); }
};

// The tokens of blocks, then those behind the last full block.
struct Blocks {
  const int* ids;
  int block_tokens;
  int start;
  int in_blocks;
  int tail;
  __device__ int token(int i) const {
    return i < in_blocks ? start + ids[i / block_tokens] * block_tokens + i % block_tokens
                         : tail + (i - in_blocks);
  }
};

// The query rows of a tile as a table has them: a KV head, then a row or -1 each.
struct TableRows {
  const int* at;
  __device__ int head() const { return at[0]; }
  __device__ int row(int r) const { return at[1 + r]; }
};

// The query rows of a tile where every KV head has `each`, one head's behind another's: R, or what
// is left of the head's.
template <int R>
struct EvenRows {
  int each;
  int tile;
  __device__ int tiles_of_head() const { return (each + R - 1) / R; }
  __device__ int head() const { return tile / tiles_of_head(); }
  __device__ int row(int r) const {
    const int i = tile % tiles_of_head() * R + r;
    return i < each ? head() * each + i : -1;
  }
};

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int hop = 16; hop; hop /= 2) value += __shfl_xor_sync(kAll, value, hop);
  return value;
}

__device__ inline int warp_count(int value) {
#pragma unroll
  for (int hop = 16; hop; hop /= 2) value += __shfl_xor_sync(kAll, value, hop);
  return value;
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int hop = 16; hop; hop /= 2) value = fmaxf(value, __shfl_xor_sync(kAll, value, hop));
  return value;
}
