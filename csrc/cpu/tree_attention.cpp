#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "adaptivespec/scalar_types.h"
#include "attend_trees.h"
#include "isa.h"
#include "ops.h"

namespace adaptivespec {

// Keys a tile, in groups of 16.
constexpr int kTileGroups = 8;
constexpr int kTile = kTileGroups * 16;

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

#define ADAPTIVESPEC_KERNELS "tree_attention.inc"
#include "each_isa.inc"

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
    const int64_t cost = args.prefix(b) + args.key_start[b + 1] - args.key_start[b] + 1;
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

}  // namespace

template <class T>
void attend_trees(const AttentionArgs<T>& args) {
  int64_t total = 0;
  for (int64_t b = 0; b < args.requests; ++b) {
    const int64_t rows = (args.query_start[b + 1] - args.query_start[b]) * args.group;
    total += rows * args.kv_heads * (args.prefix(b) + args.key_start[b + 1] - args.key_start[b] + 1);
  }
  if (total == 0) return;
  const Attend<T> attend = attend_of(static_cast<const T*>(nullptr));
  const int64_t parts = total * args.head_dim < kSerialWork ? 1 : torch::stable::get_num_threads();
  if (parts == 1) return run_part(args, attend, total, 0, 1);
  torch::stable::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) run_part(args, attend, total, part, parts);
  });
}

template void attend_trees<float>(const AttentionArgs<float>&);

void tree_attention(const Tensor& out, const Tensor& query, const Tensor& tree_key, const Tensor& tree_value,
                    const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                    const Tensor& prefix_lens, const Tensor& query_start, const Tensor& key_start,
                    const Tensor& ancestors, double scale) {
  const RowTensors rows(kOp, out, query, tree_key, tree_value);
  const RowShape shape = rows.shape();
  for_query_type(kOp, shape.type, [&]<class T>(T*) {
    AttentionArgs<T> args = tree_arguments<T>(kOp, {query_start, key_start, ancestors}, shape);
    add_prefixes(kOp, {key_cache, value_cache, block_table, prefix_lens}, shape, args);
    check_indices(kOp, args);
    rows.add_to(args);
    args.scale = static_cast<float>(scale);
    attend_trees(args);
  });
}

void tree_part_attention(const Tensor& out, const Tensor& lse, const Tensor& query, const Tensor& tree_key,
                         const Tensor& tree_value, const Tensor& query_start, const Tensor& key_start,
                         const Tensor& ancestors, double scale) {
  constexpr const char* op = "tree_part_attention";
  const RowTensors rows(op, out, query, tree_key, tree_value);
  const RowShape shape = rows.shape();
  for_query_type(op, shape.type, [&]<class T>(T*) {
    AttentionArgs<T> args = tree_arguments<T>(op, {query_start, key_start, ancestors}, shape);
    check_indices(op, args);
    rows.add_to(args);
    add_lse(op, lse, shape, args);
    args.scale = static_cast<float>(scale);
    attend_trees(args);
  });
}

}  // namespace adaptivespec
