// libopapi: the few compiled operators that tests of a copy need, so that they can make and read strided
// tensors on the device. Each runs in stream order on the simulator's side of device memory.
#include <acl/acl.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "sim.h"

using aclnnStatus = int;

struct aclTensor {
  std::vector<int64_t> sizes, strides;  // elements
  int64_t offset;
  aclDataType type;
  char* data;
};
struct aclScalar {
  double real;
  int64_t integer;
};
struct aclIntArray {};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};
// What the first half of a call (…GetWorkspaceSize) prepares and the second runs.
struct aclOpExecutor {
  std::function<int()> run;
};

namespace {

size_t item_bytes(aclDataType type) {
  switch (type) {
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_COMPLEX32:
      return 4;
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_DOUBLE:
    case ACL_COMPLEX64:
      return 8;
    case ACL_COMPLEX128:
      return 16;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
      return 2;
    default:
      return 1;
  }
}

bool is_contiguous(const aclTensor& tensor) {
  int64_t expected = 1;
  for (size_t k = tensor.sizes.size(); k-- > 0; expected *= tensor.sizes[k])
    if (tensor.sizes[k] != 1 && tensor.strides[k] != expected)
      return false;
  return true;
}

bool is_real(aclDataType type) {
  return type == ACL_FLOAT || type == ACL_DOUBLE;
}

template <typename T>
T read_as(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}
template <typename T>
void write_as(char* bytes, T value) {
  std::memcpy(bytes, &value, sizeof(T));
}

aclScalar read_number(const char* bytes, aclDataType type) {
  if (is_real(type)) {
    const double real = type == ACL_FLOAT ? read_as<float>(bytes) : read_as<double>(bytes);
    return {real, static_cast<int64_t>(real)};
  }
  int64_t integer = 0;
  switch (type) {
    case ACL_INT8:
      integer = read_as<int8_t>(bytes);
      break;
    case ACL_INT16:
      integer = read_as<int16_t>(bytes);
      break;
    case ACL_INT32:
      integer = read_as<int32_t>(bytes);
      break;
    default:
      std::memcpy(&integer, bytes, item_bytes(type));
  }
  return {static_cast<double>(integer), integer};
}

void write_number(char* bytes, aclDataType type, const aclScalar& value) {
  if (type == ACL_FLOAT)
    write_as<float>(bytes, static_cast<float>(value.real));
  else if (type == ACL_DOUBLE)
    write_as<double>(bytes, value.real);
  else if (type == ACL_BOOL)
    write_as<bool>(bytes, value.real != 0);
  else if (type == ACL_BF16) {
    const float real = static_cast<float>(value.real);
    std::memcpy(bytes, reinterpret_cast<const char*>(&real) + 2, 2);  // exact for what tests write
  } else
    std::memcpy(bytes, &value.integer, item_bytes(type));
}

int64_t elements(const aclTensor& tensor) {
  int64_t count = 1;
  for (const int64_t size : tensor.sizes)
    count *= size;
  return count;
}

// Walks a tensor in row-major order, broadcast to `sizes`; `bytes` is null where memory is missing.
class Walk {
 public:
  Walk(const aclTensor& tensor, const std::vector<int64_t>& sizes)
      : sizes_(sizes), strides_(sizes.size()), at_(sizes.size()) {
    const auto item = static_cast<int64_t>(item_bytes(tensor.type));
    const size_t missing = sizes.size() - tensor.sizes.size();
    int64_t last = 0;
    for (size_t k = missing; k < sizes.size(); ++k) {
      const bool broadcasts = tensor.sizes[k - missing] == 1;
      strides_[k] = broadcasts ? 0 : tensor.strides[k - missing] * item;
      last += strides_[k] * (sizes[k] - 1);
    }
    bytes = sim::find(tensor.data + tensor.offset * item, static_cast<size_t>(last + item), sim::Reach::kCopy);
  }
  void next() {
    for (size_t k = sizes_.size(); k-- > 0;) {
      bytes += strides_[k];
      if (++at_[k] < sizes_[k])
        return;
      bytes -= strides_[k] * sizes_[k];
      at_[k] = 0;
    }
  }

  char* bytes;

 private:
  std::vector<int64_t> sizes_, strides_, at_;
};

int copy(const aclTensor& dst, const aclTensor& src) {
  const int64_t count = elements(dst);
  if (count == 0)
    return 0;
  Walk to(dst, dst.sizes), from(src, dst.sizes);
  if (to.bytes == nullptr || from.bytes == nullptr)
    return sim::kAiCoreException;
  const size_t item = item_bytes(dst.type);
  for (int64_t i = 0; i < count; ++i, to.next(), from.next())
    if (dst.type == src.type)
      std::memmove(to.bytes, from.bytes, item);
    else
      write_number(to.bytes, dst.type, read_number(from.bytes, src.type));
  return 0;
}

int fill(const aclTensor& dst, const aclScalar& value) {
  const int64_t count = elements(dst);
  if (count == 0)
    return 0;
  Walk to(dst, dst.sizes);
  if (to.bytes == nullptr)
    return sim::kAiCoreException;
  if (value.real == 0 && is_contiguous(dst))
    sim::zero(to.bytes, static_cast<size_t>(count) * item_bytes(dst.type));
  else
    for (int64_t i = 0; i < count; ++i, to.next())
      write_number(to.bytes, dst.type, value);
  return 0;
}

// Of numbers; what is no float or integer is compared by its bits.
int is_close(const aclTensor& a, const aclTensor& b, double rtol, double atol, const aclTensor& out) {
  const int64_t count = elements(out);
  if (count == 0)
    return 0;
  Walk left(a, out.sizes), right(b, out.sizes), to(out, out.sizes);
  if (left.bytes == nullptr || right.bytes == nullptr || to.bytes == nullptr)
    return sim::kAiCoreException;
  for (int64_t i = 0; i < count; ++i, left.next(), right.next(), to.next()) {
    const double x = read_number(left.bytes, a.type).real, y = read_number(right.bytes, b.type).real;
    const bool same = std::memcmp(left.bytes, right.bytes, item_bytes(a.type)) == 0;
    write_as<bool>(to.bytes, same || std::fabs(x - y) <= atol + rtol * std::fabs(y));
  }
  return 0;
}

// Over all dimensions.
int all_true(const aclTensor& src, const aclTensor& out) {
  bool all = true;
  if (elements(src) > 0) {
    Walk from(src, src.sizes);
    if (from.bytes == nullptr)
      return sim::kAiCoreException;
    for (int64_t i = 0; i < elements(src); ++i, from.next())
      all = all && read_number(from.bytes, src.type).real != 0;
  }
  return fill(out, {all ? 1.0 : 0.0, all});
}

aclnnStatus prepare(uint64_t* workspace, aclOpExecutor** executor, std::function<int()> run) {
  *workspace = 0;
  *executor = new aclOpExecutor{std::move(run)};
  return 0;
}

aclnnStatus run(aclOpExecutor* executor, aclrtStream stream) {
  auto work = std::move(executor->run);
  delete executor;
  return sim::submit(stream, std::move(work));
}

}  // namespace

SIM_API aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, aclDataType type,
                                   const int64_t* strides, int64_t offset, aclFormat, const int64_t*, uint64_t,
                                   void* data) {
  return new aclTensor{
      {sizes, sizes + dims}, {strides, strides + dims}, offset, type, static_cast<char*>(data)};
}
SIM_API int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return 0;
}
SIM_API aclScalar* aclCreateScalar(void* value, aclDataType type) {
  return new aclScalar(read_number(static_cast<char*>(value), type));
}
SIM_API int aclDestroyScalar(const aclScalar* scalar) {
  delete scalar;
  return 0;
}
SIM_API aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t count) {
  return new aclTensorList{{tensors, tensors + count}};
}
SIM_API int aclDestroyTensorList(const aclTensorList* list) {
  for (const aclTensor* tensor : list->tensors)
    delete tensor;
  delete list;
  return 0;
}

SIM_API aclIntArray* aclCreateIntArray(const int64_t*, uint64_t) {
  return new aclIntArray;
}
SIM_API int aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return 0;
}

SIM_API aclnnStatus aclnnIsCloseGetWorkspaceSize(const aclTensor* a, const aclTensor* b, double rtol,
                                                 double atol, bool, aclTensor* out, uint64_t* workspace,
                                                 aclOpExecutor** executor) {
  return prepare(workspace, executor,
                 [a = *a, b = *b, rtol, atol, out = *out] { return is_close(a, b, rtol, atol, out); });
}
SIM_API aclnnStatus aclnnIsClose(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return run(executor, stream);
}
SIM_API aclnnStatus aclnnAllGetWorkspaceSize(const aclTensor* src, const aclIntArray*, bool, aclTensor* out,
                                             uint64_t* workspace, aclOpExecutor** executor) {
  return prepare(workspace, executor, [src = *src, out = *out] { return all_true(src, out); });
}
SIM_API aclnnStatus aclnnAll(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return run(executor, stream);
}
SIM_API aclnnStatus aclnnInplaceCopyGetWorkspaceSize(aclTensor* dst, const aclTensor* src, uint64_t* workspace,
                                                     aclOpExecutor** executor) {
  return prepare(workspace, executor, [dst = *dst, src = *src] { return copy(dst, src); });
}
SIM_API aclnnStatus aclnnInplaceCopy(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return run(executor, stream);
}
SIM_API aclnnStatus aclnnCastGetWorkspaceSize(const aclTensor* src, aclDataType, aclTensor* dst,
                                              uint64_t* workspace, aclOpExecutor** executor) {
  return prepare(workspace, executor, [dst = *dst, src = *src] { return copy(dst, src); });
}
SIM_API aclnnStatus aclnnCast(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return run(executor, stream);
}
SIM_API aclnnStatus aclnnInplaceZeroGetWorkspaceSize(aclTensor* dst, uint64_t* workspace,
                                                     aclOpExecutor** executor) {
  return prepare(workspace, executor, [dst = *dst] { return fill(dst, {0, 0}); });
}
SIM_API aclnnStatus aclnnInplaceZero(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return run(executor, stream);
}
SIM_API aclnnStatus aclnnInplaceOneGetWorkspaceSize(aclTensor* dst, uint64_t* workspace,
                                                    aclOpExecutor** executor) {
  return prepare(workspace, executor, [dst = *dst] { return fill(dst, {1, 1}); });
}
SIM_API aclnnStatus aclnnInplaceOne(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return run(executor, stream);
}
SIM_API aclnnStatus aclnnInplaceFillScalarGetWorkspaceSize(aclTensor* dst, const aclScalar* value,
                                                           uint64_t* workspace, aclOpExecutor** executor) {
  return prepare(workspace, executor, [dst = *dst, value = *value] { return fill(dst, value); });
}
SIM_API aclnnStatus aclnnInplaceFillScalar(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return run(executor, stream);
}
