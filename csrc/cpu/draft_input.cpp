#include <cstdint>
#include <cstring>

#include "checks.h"
#include "ops.h"
#include "rows.h"

namespace adaptivespec {

namespace {

constexpr const char* kOp = "draft_input";

}  // namespace

void draft_input(const Tensor& x, const Tensor& residual, const Tensor& tokens, const Tensor& parent_rows,
                 const Tensor& embeddings, const Tensor& hidden, const Tensor& embed_norm, const Tensor& hidden_norm,
                 double eps, bool norm_before_residual) {
  const Argument x_arg(kOp, "x", x, 2);                                // [R, 2H]
  const Argument residual_arg(kOp, "residual", residual, 2);           // [R, H]
  const Argument tokens_arg(kOp, "tokens", tokens, 1);                 // [R]
  const Argument parents_arg(kOp, "parent_rows", parent_rows, 1);      // [R]
  const Argument embeddings_arg(kOp, "embeddings", embeddings, 2);     // [V, H]
  const Argument hidden_arg(kOp, "hidden", hidden, 2);                 // [P, H]
  const Argument embed_norm_arg(kOp, "embed_norm", embed_norm, 1);     // [H]
  const Argument hidden_norm_arg(kOp, "hidden_norm", hidden_norm, 1);  // [H]
  const int64_t rows = tokens_arg.size(0), size = hidden_arg.size(1);
  const int64_t vocab = embeddings_arg.size(0), parents = hidden_arg.size(0);
  x_arg.of_type(ScalarType::Float).of_size(0, rows).of_size(1, 2 * size).contiguous();
  residual_arg.of_type(ScalarType::Float).of_size(0, rows).of_size(1, size).contiguous();
  tokens_arg.of_type(ScalarType::Long).contiguous();
  parents_arg.of_type(ScalarType::Long).of_size(0, rows).contiguous();
  embeddings_arg.of_type(ScalarType::Float).of_size(1, size).last_contiguous();
  hidden_arg.of_type(ScalarType::Float).last_contiguous();
  embed_norm_arg.of_type(ScalarType::Float).of_size(0, size).contiguous();
  hidden_norm_arg.of_type(ScalarType::Float).of_size(0, size).contiguous();

  const int64_t* token = tokens_arg.read<int64_t>();
  const int64_t* parent = parents_arg.read<int64_t>();
  const float epsilon = static_cast<float>(eps);
  for (int64_t r = 0; r < rows; ++r) {
    ADAPTIVESPEC_CHECK(token[r] >= 0 && token[r] < vocab, kOp, "token ", r, " is ", token[r], ", there are ", vocab,
                       " embeddings");
    ADAPTIVESPEC_CHECK(parent[r] >= 0 && parent[r] < parents, kOp, "parent row ", r, " is ", parent[r], ", there are ",
                       parents);
    float* embedded = x_arg.write<float>() + r * 2 * size;
    float* kept = residual_arg.write<float>() + r * size;
    const float* state = hidden_arg.read<float>() + parent[r] * hidden_arg.stride(0);
    rms_norm(embeddings_arg.read<float>() + token[r] * embeddings_arg.stride(0), embed_norm_arg.read<float>(), size,
             epsilon, embedded);
    rms_norm(state, hidden_norm_arg.read<float>(), size, epsilon, embedded + size);
    std::memcpy(kept, norm_before_residual ? embedded + size : state, sizeof(float) * size);
  }
}

}  // namespace adaptivespec
