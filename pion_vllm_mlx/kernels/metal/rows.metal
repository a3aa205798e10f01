// How rows of K and V are held, and which of them a threadgroup visits. Included before every
// kernel. D is the head dimension; a row has D values, of which a thread loads four at a time.

constant constexpr float kLowest = -1e30f;  // below every score; finite, so differences are too
constant constexpr float kLog2E = 1.4426950408889634f;
constant constexpr float kLn2 = 0.6931471805599453f;
constant constexpr int kMostChosen = 32;  // blocks that threads choose where they attend to them

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

inline float4 load4(const device float* p) { return *(const device float4*)(p); }

inline float4 load4(const device half* p) { return float4(*(const device half4*)(p)); }

// A bfloat is the upper half of a float. Older systems have no vectors of it.
inline float4 load4(const device bfloat16_t* p) {
  const uint2 pair = *(const device uint2*)(p);
  return float4(as_type<float>(pair.x << 16), as_type<float>(pair.x & 0xffff0000u),
                as_type<float>(pair.y << 16), as_type<float>(pair.y & 0xffff0000u));
}

template <typename T, int D>
struct Plain {
  const device T* data;
  float4 load(ulong row, int d) const { return load4(data + row * D + d); }
};

template <int D, typename T>
Plain<T, D> plain(const device T* data) {
  return Plain<T, D>{data};
}

// Groups of GROUP codes of BITS bits with a scale and a bias each.
template <typename T, int D, int BITS, int GROUP>
struct Affine {
  const device uint* codes;
  const device T* scales;
  const device T* biases;
  float4 load(ulong row, int d) const {
    constexpr uint mask = (1u << BITS) - 1;
    const ulong at = row * D + d;
    const uint word = codes[at * BITS / 32] >> (d * BITS % 32);
    const float4 code(float(word & mask), float((word >> BITS) & mask),
                      float((word >> (2 * BITS)) & mask), float((word >> (3 * BITS)) & mask));
    return code * float(scales[at / GROUP]) + float(biases[at / GROUP]);
  }
};

template <int D, int BITS, int GROUP, typename T>
Affine<T, D, BITS, GROUP> affine(const device uint* codes, const device T* scales,
                                 const device T* biases) {
  return Affine<T, D, BITS, GROUP>{codes, scales, biases};
}

// Where token t of one KV head lies: row t behind the head's first one, or through a block table.
struct Contiguous {
  ulong first;
  ulong row(int token) const { return first + ulong(token); }
};

struct Paged {
  const device int* table;
  ulong num_heads;
  ulong head;
  int page;
  ulong row(int token) const {
    return (ulong(table[token / page]) * num_heads + head) * ulong(page) + ulong(token % page);
  }
};

// Which tokens are visited: key i of the visit is token token(i).
struct Run {
  int start;
  int token(int i) const { return start + i; }
};

template <typename Ids>
struct Listed {
  Ids ids;
  int first;
  int token(int i) const { return ids[first + i]; }
};

template <typename Ids>
Listed<Ids> listed(Ids ids, int first) {
  return Listed<Ids>{ids, first};
}

// The tokens of blocks, then those behind the last full block.
template <typename Ids>
struct Blocks {
  Ids ids;
  int block_tokens;
  int start;
  int in_blocks;
  int tail;
  int token(int i) const {
    return i < in_blocks ? start + ids[i / block_tokens] * block_tokens + i % block_tokens
                         : tail + (i - in_blocks);
  }
};

template <typename Ids>
Blocks<Ids> blocks_of(Ids ids, int block_tokens, int start, int in_blocks, int tail) {
  return Blocks<Ids>{ids, block_tokens, start, in_blocks, tail};
}

// The query rows of a tile as a table has them: a KV head, then a row or -1 each.
template <typename Ids>
struct TableRows {
  Ids ids;
  int at;
  int head() const { return ids[at]; }
  int row(int r) const { return ids[at + 1 + r]; }
};

template <typename Ids>
TableRows<Ids> table_rows(Ids ids, int at) {
  return TableRows<Ids>{ids, at};
}

// The query rows of a tile where every KV head has `each`, one head's behind another's: R, or what
// is left of the head's.
template <int R>
struct EvenRows {
  int each;
  int tile;
  int tiles_of_head() const { return (each + R - 1) / R; }
  int head() const { return tile / tiles_of_head(); }
  int row(int r) const {
    const int i = tile % tiles_of_head() * R + r;
    return i < each ? head() * each + i : -1;
  }
};
