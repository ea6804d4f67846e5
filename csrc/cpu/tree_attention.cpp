#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "adaptivespec/paged_kv.h"
#include "adaptivespec/scalar_types.h"
#include "adaptivespec/tree.h"
#include "checks.h"
#include "isa.h"
#include "ops.h"

namespace adaptivespec {

// Keys a tile, in groups of 16.
constexpr int kTileGroups = 8;
constexpr int kTile = kTileGroups * 16;

template <class T>
struct AttentionArgs {
  RowView<T> out;               // [Tq, Hq, D]
  RowView<const T> query;       // [Tq, Hq, D]
  RowView<const T> tree_key;    // [Tk, Hkv, D]
  RowView<const T> tree_value;  // [Tk, Hkv, D]
  PagedView<T> key_cache;
  PagedView<T> value_cache;
  const int32_t* block_table;  // [B, max_blocks]
  int64_t table_stride;
  const int32_t* prefix_lens;  // [B]
  const int32_t* query_start;  // [B + 1]
  const int32_t* key_start;    // [B + 1]
  const int64_t* ancestors;    // [Tq]
  int64_t requests, kv_heads, group, head_dim, block_size;
  float scale;
};

// Rows first_row .. first_row + rows of one KV head of one request; row = query * group + head within the group.
struct Job {
  int64_t request, kv_head, first_row, rows;
};

// One thread's working memory for one job.
struct JobScratch {
  int64_t padded_dims;  // head_dim rounded up to 16
  float* query;         // packed panels, scaled
  float* out;           // [rows, padded_dims]
  float* keys;          // [kTileGroups, head_dim, 16]
  float* values;        // [kTile, padded_dims]
  float* zeros;         // [padded_dims]
  void* states;         // PanelState a panel
  uint64_t* words;      // [rows] visible tree columns
};

}  // namespace adaptivespec

#ifdef ADAPTIVESPEC_X86
#define ADAPTIVESPEC_ISA_AVX512
#include "isa_begin.inc"
#include "simd.inc"
#include "tree_attention.inc"
#include "isa_end.inc"

#define ADAPTIVESPEC_ISA_AVX2
#include "isa_begin.inc"
#include "simd.inc"
#include "tree_attention.inc"
#include "isa_end.inc"
#endif

#include "isa_begin.inc"
#include "simd.inc"
#include "tree_attention.inc"
#include "isa_end.inc"

namespace adaptivespec {

namespace {

constexpr const char* kOp = "tree_attention";

// Rows that one job holds at once; more would push the running output out of the second-level cache.
constexpr int64_t kJobRows = 192;

// Rows of a panel under any instruction set.
constexpr int64_t kMostPanelRows = 6;

// Multiply-adds below which a second thread costs more than it brings.
constexpr int64_t kSerialWork = int64_t{1} << 17;

template <class T>
using Attend = void (*)(const AttentionArgs<T>&, const Job&, const JobScratch&);

Attend<float> attend_of(const float*) { return ADAPTIVESPEC_DISPATCH(attend_f32); }
Attend<bf16> attend_of(const bf16*) { return ADAPTIVESPEC_DISPATCH(attend_bf16); }
Attend<fp16> attend_of(const fp16*) { return ADAPTIVESPEC_DISPATCH(attend_fp16); }

// A 64-byte aligned buffer that only grows; one a thread.
class Arena {
 public:
  JobScratch lay_out(int64_t head_dim) {
    const int64_t padded = round_up(head_dim);
    const int64_t query = round_up((kJobRows + kMostPanelRows) * head_dim);  // the last panel has its full width
    const int64_t out = kJobRows * padded, keys = head_dim * kTile, values = kTile * padded;
    const int64_t states = kJobRows * kStateFloats, words = 2 * kJobRows;
    reserve(query + out + keys + values + padded + states + words);
    float* next = memory_.get();
    const auto take = [&next](int64_t count) {
      float* here = next;
      next += count;
      return here;
    };
    JobScratch scratch{};
    scratch.padded_dims = padded;
    scratch.query = take(query);
    scratch.out = take(out);
    scratch.keys = take(keys);
    scratch.values = take(values);
    scratch.zeros = take(padded);
    scratch.states = take(states);
    scratch.words = reinterpret_cast<uint64_t*>(take(words));
    std::fill_n(scratch.zeros, padded, 0.0f);
    return scratch;
  }

 private:
  // A panel's state is three arrays of 16; at worst every row is a panel of its own.
  static constexpr int64_t kStateFloats = 3 * 16;

  static int64_t round_up(int64_t count) { return (count + 15) / 16 * 16; }

  void reserve(int64_t count) {
    if (count <= capacity_) return;
    memory_.reset(static_cast<float*>(::operator new(sizeof(float) * count, std::align_val_t{64})));
    capacity_ = count;
  }

  struct Release {
    void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Release> memory_;
  int64_t capacity_ = 0;
};

// Splits the rows of all requests and KV heads into `parts` ranges of equal cost and runs range `part`.
// Every (request, KV head) pair is `rows` units that cost `keys` each; a range may begin and end inside a pair.
template <class T>
void run_part(const AttentionArgs<T>& args, Attend<T> attend, int64_t total, int64_t part, int64_t parts) {
  thread_local Arena arena;
  const JobScratch scratch = arena.lay_out(args.head_dim);
  const int64_t begin = total * part / parts, end = total * (part + 1) / parts;
  int64_t done = 0;
  for (int64_t b = 0; b < args.requests && done < end; ++b) {
    const int64_t rows = (args.query_start[b + 1] - args.query_start[b]) * args.group;
    const int64_t cost = args.prefix_lens[b] + args.key_start[b + 1] - args.key_start[b] + 1;
    for (int64_t head = 0; head < args.kv_heads && done < end; ++head) {
      const int64_t first = std::clamp<int64_t>((begin - done + cost - 1) / cost, 0, rows);
      const int64_t last = std::clamp<int64_t>((end - done + cost - 1) / cost, 0, rows);
      done += rows * cost;
      for (int64_t row = first; row < last; row += kJobRows) {
        attend(args, Job{b, head, row, std::min(kJobRows, last - row)}, scratch);
      }
    }
  }
}

template <class T>
void run(const AttentionArgs<T>& args) {
  int64_t total = 0;
  for (int64_t b = 0; b < args.requests; ++b) {
    const int64_t rows = (args.query_start[b + 1] - args.query_start[b]) * args.group;
    total += rows * args.kv_heads * (args.prefix_lens[b] + args.key_start[b + 1] - args.key_start[b] + 1);
  }
  if (total == 0) return;
  const Attend<T> attend = attend_of(static_cast<const T*>(nullptr));
  const int64_t parts = total * args.head_dim < kSerialWork ? 1 : torch::stable::get_num_threads();
  if (parts == 1) return run_part(args, attend, total, 0, 1);
  torch::stable::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) run_part(args, attend, total, part, parts);
  });
}

template <class T>
RowView<const T> read_rows(const Argument& tensor) {
  return {tensor.read<T>(), tensor.stride(0), tensor.stride(1)};
}

template <class T>
PagedView<T> paged(const Argument& cache) {
  return {cache.read<T>(), cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3)};
}

}  // namespace

void tree_attention(const Tensor& out, const Tensor& query, const Tensor& tree_key, const Tensor& tree_value,
                    const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                    const Tensor& prefix_lens, const Tensor& query_start, const Tensor& key_start,
                    const Tensor& ancestors, double scale) {
  const Argument out_arg(kOp, "out", out, 3);                          // [Tq, Hq, D]
  const Argument query_arg(kOp, "query", query, 3);                    // [Tq, Hq, D]
  const Argument tree_key_arg(kOp, "tree_key", tree_key, 3);           // [Tk, Hkv, D]
  const Argument tree_value_arg(kOp, "tree_value", tree_value, 3);     // [Tk, Hkv, D]
  const Argument key_cache_arg(kOp, "key_cache", key_cache, 4);        // [blocks, Hkv, block_size, D]
  const Argument value_cache_arg(kOp, "value_cache", value_cache, 4);  // [blocks, Hkv, block_size, D]
  const Argument block_table_arg(kOp, "block_table", block_table, 2);  // [B, max_blocks]
  const Argument prefix_lens_arg(kOp, "prefix_lens", prefix_lens, 1);  // [B]
  const Argument query_start_arg(kOp, "query_start", query_start, 1);  // [B + 1]
  const Argument key_start_arg(kOp, "key_start", key_start, 1);        // [B + 1]
  const Argument ancestors_arg(kOp, "ancestors", ancestors, 1);        // [Tq]

  const ScalarType type = query_arg.type();
  const int64_t queries = query_arg.size(0), heads = query_arg.size(1), dims = query_arg.size(2);
  const int64_t tree_rows = tree_key_arg.size(0), kv_heads = tree_key_arg.size(1);
  const int64_t requests = prefix_lens_arg.size(0);
  const int64_t blocks = key_cache_arg.size(0), block_size = key_cache_arg.size(2);
  ADAPTIVESPEC_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, kOp, "the ", heads,
                     " query heads must be a multiple of the ", kv_heads, " KV heads");
  ADAPTIVESPEC_CHECK(dims > 0 && dims <= 1024, kOp, "head size must be in 1..1024, got ", dims);
  query_arg.last_contiguous();
  out_arg.of_type(type).of_size(0, queries).of_size(1, heads).of_size(2, dims);
  out_arg.last_contiguous().distinct(0).distinct(1);
  tree_key_arg.of_type(type).of_size(2, dims).last_contiguous();
  tree_value_arg.of_type(type).of_size(0, tree_rows).of_size(1, kv_heads).of_size(2, dims).last_contiguous();
  key_cache_arg.of_type(type).of_size(1, kv_heads).of_size(3, dims);
  value_cache_arg.of_type(type).of_size(0, blocks).of_size(1, kv_heads).of_size(2, block_size).of_size(3, dims);
  block_table_arg.of_type(ScalarType::Int).of_size(0, requests).last_contiguous();
  prefix_lens_arg.of_type(ScalarType::Int).contiguous();
  query_start_arg.of_type(ScalarType::Int).of_size(0, requests + 1).contiguous();
  key_start_arg.of_type(ScalarType::Int).of_size(0, requests + 1).contiguous();
  ancestors_arg.of_type(ScalarType::Long).of_size(0, queries).contiguous();

  const int32_t* lens = prefix_lens_arg.read<int32_t>();
  const int32_t* table = block_table_arg.read<int32_t>();
  const int32_t* key_starts = key_start_arg.read<int32_t>();
  check_starts(kOp, "query_start", query_start_arg.read<int32_t>(), requests, queries);
  check_starts(kOp, "key_start", key_starts, requests, tree_rows);
  for (int64_t b = 0; b < requests; ++b) {
    ADAPTIVESPEC_CHECK(key_starts[b + 1] - key_starts[b] <= kMaxTreeRows, kOp, "request ", b, " has more than ",
                       kMaxTreeRows, " tree keys");
    ADAPTIVESPEC_CHECK(lens[b] >= 0 && (lens[b] == 0 || lens[b] <= block_table_arg.size(1) * block_size), kOp,
                       "the prefix of request ", b, " (", lens[b], ") does not fit its ", block_table_arg.size(1),
                       " blocks of ", block_size);
    for (int64_t i = 0; i * block_size < lens[b]; ++i) {
      const int32_t block = table[b * block_table_arg.stride(0) + i];
      ADAPTIVESPEC_CHECK(block >= 0 && block < blocks, kOp, "block ", i, " of request ", b, " is ", block,
                         ", the cache has ", blocks);
    }
  }

  const auto launch = [&]<class T>(T*) {
    AttentionArgs<T> args;
    args.out = {out_arg.write<T>(), out_arg.stride(0), out_arg.stride(1)};
    args.query = read_rows<T>(query_arg);
    args.tree_key = read_rows<T>(tree_key_arg);
    args.tree_value = read_rows<T>(tree_value_arg);
    args.key_cache = paged<T>(key_cache_arg);
    args.value_cache = paged<T>(value_cache_arg);
    args.block_table = table;
    args.table_stride = block_table_arg.stride(0);
    args.prefix_lens = lens;
    args.query_start = query_start_arg.read<int32_t>();
    args.key_start = key_starts;
    args.ancestors = ancestors_arg.read<int64_t>();
    args.requests = requests;
    args.kv_heads = kv_heads;
    args.group = heads / kv_heads;
    args.head_dim = dims;
    args.block_size = block_size;
    args.scale = static_cast<float>(scale);
    run(args);
  };
  switch (type) {
    case ScalarType::Float: return launch(static_cast<float*>(nullptr));
    case ScalarType::BFloat16: return launch(static_cast<bf16*>(nullptr));
    case ScalarType::Half: return launch(static_cast<fp16*>(nullptr));
    default: fail(kOp, "query must be float32, bfloat16 or float16, got ", dtype_name(type));
  }
}

}  // namespace adaptivespec
