// Host checks of the ops: device, dtype, shape, strides. Everything a kernel dereferences is checked here first.
//
// Values of index tensors are checked where the host can read them, on the CPU; a CUDA kernel checks each index it follows.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace adaptivespec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << "adaptivespec::" << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

#define ADAPTIVESPEC_CHECK(condition, op, ...) \
  do {                                         \
    if (__builtin_expect(!(condition), 0)) ::adaptivespec::fail(op, __VA_ARGS__); \
  } while (0)

// The op that is being checked, and where its tensors must be.
struct Place {
  const char* op;
  bool cuda = false;
  int32_t device = -1;

  Place(const char* op_) : op(op_) {}  // a CPU op
  Place(const char* op_, const Tensor& first) : op(op_) {
#ifndef ADAPTIVESPEC_EMULATED  // the CUDA sources run on the CPU then
    cuda = true;
    device = first.is_cuda() ? first.get_device_index() : -1;
#else
    (void)first;
#endif
  }
};

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return "another dtype";
  }
}

inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ']';
  return text.str();
}

// One argument: its sizes and strides are read once.
class Argument {
 public:
  Argument(const Place& place, const char* name, const Tensor& tensor, int64_t dim)
      : op_(place.op), name_(name), tensor_(&tensor) {
    if (place.cuda) {
      ADAPTIVESPEC_CHECK(tensor.is_cuda() && tensor.get_device_index() == place.device, op_, name,
                         " must be a CUDA tensor on the device of the others");
    } else {
      ADAPTIVESPEC_CHECK(tensor.is_cpu(), op_, name, " must be a CPU tensor");
    }
    ADAPTIVESPEC_CHECK(tensor.dim() == dim, op_, name, " must have ", dim, " dimensions, got ", shape_text(tensor));
    sizes_ = tensor.sizes().data();
    strides_ = tensor.strides().data();
    type_ = tensor.scalar_type();
  }

  int64_t size(int64_t i) const { return sizes_[i]; }
  int64_t stride(int64_t i) const { return strides_[i]; }
  ScalarType type() const { return type_; }
  std::string shape() const { return shape_text(*tensor_); }
  int64_t element_bytes() const { return tensor_->element_size(); }

  const Argument& of_type(ScalarType type) const {
    ADAPTIVESPEC_CHECK(type_ == type, op_, name_, " must be ", dtype_name(type), ", got ", dtype_name(type_));
    return *this;
  }
  const Argument& of_size(int64_t i, int64_t expected) const {
    ADAPTIVESPEC_CHECK(sizes_[i] == expected, op_, name_, " must have size ", expected, " in dimension ", i, ", got ",
                       shape_text(*tensor_));
    return *this;
  }
  const Argument& contiguous() const {
    ADAPTIVESPEC_CHECK(tensor_->is_contiguous(), op_, name_, " must be contiguous");
    return *this;
  }
  const Argument& last_contiguous() const {
    const int64_t last = tensor_->dim() - 1;
    ADAPTIVESPEC_CHECK(strides_[last] == 1 || sizes_[last] <= 1, op_, name_,
                       " must be contiguous in its last dimension, its stride there is ", strides_[last]);
    return *this;
  }
  // An output whose rows alias would be written by two threads.
  const Argument& distinct(int64_t i) const {
    ADAPTIVESPEC_CHECK(sizes_[i] <= 1 || strides_[i] != 0, op_, name_, " is an output and must not be expanded");
    return *this;
  }

  template <class T>
  const T* read() const {
    return static_cast<const T*>(tensor_->const_data_ptr());
  }
  template <class T>
  T* write() const {
    return static_cast<T*>(tensor_->mutable_data_ptr());
  }

 private:
  const char* op_;
  const char* name_;
  const Tensor* tensor_;
  const int64_t* sizes_;
  const int64_t* strides_;
  ScalarType type_;
};

// `start` [B + 1] must begin at 0 and never fall; its last entry must not pass `rows`.
inline void check_starts(const char* op, const char* name, const int32_t* start, int64_t requests, int64_t rows) {
  ADAPTIVESPEC_CHECK(start[0] >= 0, op, name, "[0] is ", start[0]);
  for (int64_t b = 0; b < requests; ++b) {
    ADAPTIVESPEC_CHECK(start[b] <= start[b + 1], op, name, " falls at request ", b);
  }
  ADAPTIVESPEC_CHECK(start[requests] <= rows, op, name, " ends at ", start[requests], ", past the ", rows, " rows");
}

}  // namespace adaptivespec
